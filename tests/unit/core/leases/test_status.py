"""When a member writes its status, and how large the rows of a member with many shards are."""

import pytest

from anabranch._core.leases import rows
from anabranch._core.leases.status import StatusReporter
from anabranch._model.leases import HandOffRequest, HeartbeatWrite, LeaseKey, MemberRow, ShardStatus
from anabranch.stores.row_codec import decode_row, encode_row

STREAM = "123456789012:orders:1700000000"
FINE = (ShardStatus("shardId-000000000000", None, 5, 1.5, STREAM),)
STALLED = (ShardStatus("shardId-000000000000", "throttled", 5, 1.5, STREAM),)


class Member:
    """Its rounds, one a second."""

    def __init__(self):
        self.reporter = StatusReporter("a#1")
        self.now_ms = 0
        self.mark = 0
        self.written = []

    def rounds(self, count, shards=FINE, *, renewed_every=None, answered=True):
        for number in range(count):
            if renewed_every is not None and number % renewed_every == 0:
                self.mark += 1
            self.reporter.observe_mark(self.mark)
            row = self.reporter.next_row(shards, self.now_ms)
            if row is not None:
                self.written.append((self.now_ms, row))
                if answered:
                    self.reporter.written(shards, self.now_ms)
            self.now_ms += 1_000
        written, self.written = self.written, []
        return written


def times(written):
    return [now_ms for now_ms, _ in written]


def test_nothing_is_written_while_no_reason_changes_and_nobody_watches():
    assert Member().rounds(300) == []


def test_a_new_reason_is_written_at_once_and_the_next_change_after_a_minute():
    member = Member()
    member.rounds(10)
    assert times(member.rounds(1, STALLED)) == [10_000]
    assert times(member.rounds(100, FINE)) == [70_000]
    assert times(member.rounds(100, STALLED)) == [130_000]
    assert times(member.rounds(100, STALLED)) == []


def test_a_viewer_is_answered_in_the_next_round_and_then_every_five_seconds_while_it_renews():
    member = Member()
    assert times(member.rounds(3, STALLED)) == [0]
    assert times(member.rounds(20, STALLED, renewed_every=5)) == [3_000, 8_000, 13_000, 18_000]
    assert times(member.rounds(100, STALLED)) == []


def test_many_viewers_cause_a_write_every_two_seconds():
    member = Member()
    member.rounds(1)
    assert times(member.rounds(6, renewed_every=1)) == [1_000, 3_000, 5_000]
    assert times(member.rounds(9)) == [7_000], "the last viewer is answered too"


def test_a_mark_of_the_past_wakes_no_new_member():
    member = Member()
    member.mark = 17
    assert member.rounds(100) == []


def test_a_write_without_an_answer_is_repeated_with_a_higher_revision():
    member = Member()
    lost = member.rounds(2, STALLED, answered=False)
    again = member.rounds(2, STALLED)
    assert [row.revision for _, row in lost + again] == [1, 2, 3]


def test_the_status_of_500_shards_has_the_totals_and_the_20_worst():
    shards = tuple(
        ShardStatus(f"shardId-{n:012d}", "throttled" if n < 30 else None, n, 0.1, STREAM) for n in range(500)
    )
    ((_, row),) = Member().rounds(1, shards)
    assert (row.shard_count, row.stalled_count, row.millis_behind_latest, row.records_per_second) == (500, 30, 499, 50)
    assert row.shards == shards[:20]
    assert len(encode_row(row)) < 4096
    assert decode_row("status", encode_row(row)) == row


@pytest.mark.parametrize("letter", ["x", "\u00e9", '"'])
def test_long_reasons_and_names_leave_a_status_under_4_kb(letter):
    stream = f"123456789012:{'s' * 128}:1700000000"
    shards = tuple(ShardStatus(f"shardId-{n:012d}", letter * 200, 10**9, 0.1, stream) for n in range(500))
    ((_, row),) = Member().rounds(1, shards)
    assert len(row.shards) >= 3
    assert len(encode_row(row)) < 4096


def member_id(number):
    return f"orders-7d4b9c6f5-x2x7q:1#{number:032x}"


def test_the_heartbeat_row_of_a_member_with_500_shards_and_8_requests_stays_under_1_kb():
    row = MemberRow(
        member_id=member_id(0),
        worker_id=member_id(0).partition("#")[0],
        expiry_ms=10_000,
        fingerprint="order=key",
        streams=(STREAM,),
        joined_wall_ms=1_700_000_000_000,
    )
    row = rows.heartbeat(row, HeartbeatWrite(member_id=row.member_id, attempt=500_000, load=500, lease_version=5_000))
    for number in range(9):
        request = HandOffRequest(LeaseKey(STREAM, 0, f"shardId-{9_000 + number:012d}"), member_id(number))
        row = rows.request_hand_off(row, request)
    assert len(row.wanted) == 8
    assert len(encode_row(row)) < 1024
    assert decode_row("member", encode_row(row)) == row


@pytest.mark.parametrize(
    "shard_id", ["shardId-000000000012", "shardId-12", "shardId-0000000000012", "shard-\u0661" * 3, "7"]
)
def test_a_request_for_a_shard_of_any_name_is_kept(shard_id):
    row = MemberRow(
        member_id="a#1", worker_id="a", expiry_ms=1, wanted=(HandOffRequest(LeaseKey("b", 2, shard_id), "b"),)
    )
    assert decode_row("member", encode_row(row)) == row
