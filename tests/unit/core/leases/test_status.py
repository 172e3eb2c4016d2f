"""When a member writes its status, and how large the rows of a member with many shards are."""

import pytest

from anabranch._core.leases.status import StatusReporter
from anabranch._model.leases import LeaseKey, ShardStatus
from anabranch.reasons import PausedByProgram, ReadsFailing, ReadsThrottled
from anabranch.stores.row_codec import decode_row, encode_row
from reason_samples import SAMPLES

STREAM = "123456789012:orders:1700000000"


def name(number):
    return LeaseKey(STREAM, 0, f"shardId-{number:012d}").short_name


THROTTLED = ReadsThrottled(error="Rate exceeded for shard shardId-000000000000", failure_count=4)
FINE = (ShardStatus(name(0), None, 5, 1.5),)
STALLED = (ShardStatus(name(0), THROTTLED, 5, 1.5),)


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


def test_nothing_is_written_while_no_reason_changes_and_no_viewer_runs():
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
    shards = tuple(ShardStatus(name(n), PausedByProgram() if n < 30 else None, n, 0.1) for n in range(500))
    ((_, row),) = Member().rounds(1, shards)
    assert (row.shard_count, row.stalled_count, row.millis_behind_latest, row.records_per_second) == (500, 30, 499, 50)
    assert row.shards == shards[:20]
    assert len(encode_row(row)) < 4096
    assert decode_row("status", encode_row(row)) == row


def test_the_shard_that_is_furthest_behind_is_always_in_the_status():
    shards = tuple(ShardStatus(name(n), PausedByProgram(), 0, 0.1, None, n, 100) for n in range(100))
    ((_, row),) = Member().rounds(1, shards)
    assert row.shards == (shards[99], *shards[:19])
    assert decode_row("status", encode_row(row)) == row


@pytest.mark.parametrize("letter", ["x", "\u00e9", '"'])
def test_long_reasons_and_names_leave_a_status_under_4_kb(letter):
    reason = ReadsFailing(error=letter * 200, failure_count=9)
    shards = tuple(ShardStatus(name(n), reason, 10**9, 0.1) for n in range(500))
    ((_, row),) = Member().rounds(1, shards)
    assert len(row.shards) >= 3
    assert row.shards[0].reason == reason.shortened(120)
    assert len(encode_row(row)) < 4096


@pytest.mark.parametrize("reason", SAMPLES, ids=lambda reason: reason.code)
def test_most_of_the_20_worst_shards_fit_whatever_their_reason(reason):
    shards = tuple(ShardStatus(name(n), reason, 12_345, 0.1) for n in range(20))
    ((_, row),) = Member().rounds(1, shards)
    assert len(row.shards) >= 13
    assert len(encode_row(row)) < 4096
    assert decode_row("status", encode_row(row)) == row


def test_a_status_with_few_stalled_shards_has_their_texts_for_readers_of_another_version():
    ((_, row),) = Member().rounds(1, tuple(ShardStatus(name(0), reason) for reason in SAMPLES[:5]))
    assert all(reason.text in encode_row(row).decode() for reason in SAMPLES[:5])
