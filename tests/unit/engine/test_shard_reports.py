"""What a heartbeat reports about a member's shards."""

from anabranch._core.handling.lanes import LaneLimits, RecordLane
from anabranch._core.leases.lease_table import Holding
from anabranch._core.reading.horizon import TrimHorizon
from anabranch._core.reading.pace import Pace, PaceLimits
from anabranch._core.reading.window import Unpacker
from anabranch._engine.session import Session
from anabranch._engine.shard_reports import REASON_CHARACTERS_MAX, ShardReports
from anabranch._model.leases import HandOffRequest, LeaseKey, LeaseRow
from anabranch._model.streams import StreamName
from anabranch.budget import READ_RESERVE_BYTES, Budget
from shard_records import STREAM, plain


def make_session(number=0):
    shard_id = f"shardId-{number:012d}"
    row = LeaseRow(key=LeaseKey("1:orders:1", 0, shard_id))
    session = Session(
        Holding(row),
        StreamName(STREAM),
        Unpacker(STREAM, shard_id, None),
        Pace(PaceLimits(), 0),
        Budget(),
        TrimHorizon(24, 0.0),
    )
    session.lane = RecordLane(row.checkpoint, "shard", session.window)
    return session


def read(session, *records):
    assert session.budget.try_reserve(READ_RESERVE_BYTES)
    session.accept(list(records), READ_RESERVE_BYTES)


def handle(session, count):
    for _ in range(count):
        session.lane.finish(session.lane.next(0))


def test_a_rate_is_measured_over_five_seconds_however_often_it_is_asked_for():
    reports, session = ShardReports(lambda event: None), make_session()
    read(session, *map(plain, range(100)))
    assert reports.report([session], 0)[0].records_per_second == 0
    handle(session, 30)
    assert reports.report([session], 1_000)[0].records_per_second == 0
    assert reports.report([session], 5_000)[0].records_per_second == 6
    assert reports.report([session], 5_100)[0].records_per_second == 6
    assert reports.report([session], 10_000)[0].records_per_second == 0


def test_another_holding_of_the_same_shard_is_measured_anew():
    reports, session = ShardReports(lambda event: None), make_session()
    read(session, *map(plain, range(10)))
    reports.report([session], 0)
    handle(session, 10)
    assert reports.report([session], 5_000)[0].records_per_second == 2
    assert reports.report([make_session()], 10_000)[0].records_per_second == 0
    assert reports.report([], 5_000) == ()


def test_the_report_begins_with_what_needs_a_look():
    sessions = [make_session(number) for number in range(74)]
    for number, session in enumerate(sessions):
        session.behind_ms = number
    sessions[3].reason = "x" * 500
    found = ShardReports(lambda event: None).report(sessions, 0)
    assert len(found) == 74
    assert found[0].shard_id == sessions[3].shard_id
    assert found[0].reason == "x" * REASON_CHARACTERS_MAX
    assert [status.millis_behind_latest for status in found[1:4]] == [73, 72, 71]
    assert found[0].stream_key == "1:orders:1"


def test_a_record_that_holds_up_its_shard_is_named_after_ten_seconds():
    reports, session = ShardReports(lambda event: None), make_session()
    reports.report([session], 0)
    assert reports.report([session], 60_000)[0].reason is None  # idle is not stalled
    read(session, plain(1), plain(2))
    entry = session.lane.next(60_000)
    assert reports.report([session], 61_000)[0].reason is None
    position = entry.record.position
    held_up = f"record {position} of key {entry.record.partition_key!r} has not been finished for 15 s"
    assert reports.report([session], 75_000)[0].reason == held_up
    session.lane.finish(entry)
    assert reports.report([session], 75_500)[0].reason is None


def test_a_record_that_holds_up_the_end_of_its_shard_is_named_with_that():
    reports, session = ShardReports(lambda event: None), make_session()
    read(session, plain(1))
    session.move("end")
    session.lane.next(0)
    reports.report([session], 0)
    reason = reports.report([session], 10_000)[0].reason
    assert reason.startswith("the shard has ended and its children wait: record 1")


def test_a_call_that_ignores_its_time_out_is_the_first_reason():
    session = make_session()
    session.reason = "no such key"
    (found,) = ShardReports(lambda event: None).report([session], 0, overdue={session: "it ignores its time-out"})
    assert found.reason == "it ignores its time-out"


def test_pauses_and_hand_overs_are_reasons_and_an_error_goes_before_them():
    session = make_session()
    assert ShardReports(lambda event: None).report([session], 0, blocked_reason="paused")[0].reason == "paused"
    session.is_draining = True
    session.holding.request = HandOffRequest(session.key, "other")
    assert ShardReports(lambda event: None).report([session], 0)[0].reason == "it is being handed over to other"
    session.reason = "no such key"
    assert ShardReports(lambda event: None).report([session], 0, blocked_reason="paused")[0].reason == "no such key"


def test_a_standstill_is_told_once_when_it_begins_and_again_when_it_comes_back():
    told, session = [], make_session()
    reports = ShardReports(told.append)
    for now_ms, blocked_reason in (
        (0, None),
        (1, "told to pause"),
        (2, "told to pause"),
        (3, None),
        (4, "told to pause"),
    ):
        reports.report([session], now_ms, blocked_reason=blocked_reason)
    assert [type(event).__name__ for event in told] == ["StandstillBegan", "StandstillBegan"]
    assert "told to pause" in str(told[0])


def test_a_shard_that_cannot_be_read_for_want_of_room_says_so():
    reports, session = ShardReports(lambda event: None), make_session()
    session.budget_full_since_ms = 5_000
    session.budget.try_reserve(session.budget.limit_bytes)
    assert reports.report([session], 14_999)[0].reason is None
    assert (
        "budget has been full for 10 s: unfinished records use 268435456 of"
        in reports.report([session], 15_000)[0].reason
    )
    session.budget_full_since_ms = None
    assert reports.report([session], 15_001)[0].reason is None


def test_a_full_lane_is_the_reason_only_if_nothing_of_it_is_finished():
    told, session = [], make_session()
    reports = ShardReports(told.append)
    session.lane = RecordLane(session.row.checkpoint, "key", session.window, LaneLimits(open_keys_max=2))
    read(session, *(plain(number, f"key-{number}") for number in range(1, 5)))
    reports.report([session], 0)
    first, second = session.lane.next(0), session.lane.next(0)
    assert session.lane.next(0) is None
    for second_count in range(1, 10):
        assert reports.report([session], second_count * 1000)[0].reason is None
    session.lane.finish(first)
    assert session.lane.next(0) is not None
    assert reports.report([session], 10_000)[0].reason is None
    full = "2 keys have unfinished records, which is the limit"
    assert [reports.report([session], at_ms)[0].reason for at_ms in (19_000, 25_000, 26_000)] == [None, full, full]
    assert [event.reason for event in told] == [full]
    session.lane.finish(second)
    assert reports.report([session], 27_000)[0].reason is None


def test_a_full_budget_is_reported_once_when_it_lasts_for_a_minute_and_again_after_ten():
    told, sessions = [], [make_session(number) for number in range(50)]
    reports = ShardReports(told.append)
    for number, session in enumerate(sessions):
        session.budget_full_since_ms = number
    reports.report(sessions, 0)
    for second in range(60):
        reports.report(sessions, second * 1000)
    assert told == []
    for second in range(60, 600 + 60):
        reports.report(sessions, second * 1000)
    (event,) = told
    assert event.shard_id == sessions[0].shard_id
    assert "the byte budget has been full for 60 s" in event.reason
    assert event.reason.endswith("1 shard waits")
    reports.report(sessions, 660_000)
    assert [event.reason.rpartition("; ")[2] for event in told] == ["1 shard waits", "50 shards wait"]


def test_turns_of_a_full_budget_are_not_reported():
    told, sessions = [], [make_session(number) for number in range(50)]
    reports = ShardReports(told.append)
    for second in range(1_000):
        sessions[second % 50].budget_full_since_ms = second * 1000  # it was read and waits again
        reports.report(sessions, second * 1000)
    assert told == []


def test_a_shard_that_waits_for_room_tells_what_else_comes():
    told, session = [], make_session()
    reports = ShardReports(told.append)
    session.budget_full_since_ms = 0
    reports.report([session], 20_000)
    reports.report([session], 21_000, blocked_reason="told to pause")
    assert [event.reason for event in told] == ["told to pause"]


def test_who_asks_between_two_reports_is_told_the_reason_and_nobody_else_is():
    told = []
    reports, session, other = ShardReports(told.append), make_session(), make_session(1)
    read(session, *map(plain, range(10)))
    running = session.lane.next(0)
    reports.report([session, other], 0)
    (paused, held_up) = reports.states(
        [other, session], 1_000, "it is paused", {session: "a call ignores its time-out"}
    )
    assert (paused.reason, held_up.reason) == ("it is paused", "a call ignores its time-out")
    (waiting,) = reports.states([session], 12_000, None, {})
    assert "has not been finished for 12 s" in waiting.reason
    session.lane.finish(running)
    assert reports.states([session, make_session(2)], 12_000, None, {})[0].reason is None
    assert told == []
