"""What a member reports about its shards."""

from traceback import StackSummary
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from anabranch._core.reading.service_time import ServiceClock
from anabranch._engine.shard_reports import ShardReports
from anabranch._model.leases import HandOffRequest
from anabranch.reasons import (
    BudgetFull,
    HandedOver,
    HandledAlone,
    OpenKeysLimit,
    PausedByProgram,
    PausedInStore,
    ReadsFailing,
    RecordInHandler,
    RecordUnfinished,
    TimeoutIgnored,
    WaitsForIsolatedShard,
)
from anabranch.reports import SubscriptionState
from held_sessions import make_session, read
from shard_records import STREAM, plain

FAILING = ReadsFailing(error="no such key", failure_count=1)
OVERDUE = TimeoutIgnored(position="1", partition_key="k", timeout=3.0)
PAUSED = PausedByProgram()


class Calls:
    """The handler calls that run, as a processor knows them."""

    def __init__(self, running=(), overdue=None, *, manual_ack=False, held=()):
        self.manual_ack = manual_ack
        self.running = lambda: list(running)
        self.overdue = lambda now_ms: overdue or {}
        self.queue = SimpleNamespace(is_held=lambda session: session in held)

    def stack_of(self, record):
        return StackSummary.from_list([("/app/app.py", 12, "handle", f"await query({record.partition_key})")])


def make_reports(emit=lambda event: None, calls=None, subscription_of=lambda session: None):
    reader, service_clock = SimpleNamespace(subscription_of=subscription_of), ServiceClock()
    service_clock.observe(0.0, 0)
    return ShardReports(emit, calls or Calls(), reader, service_clock, SimpleNamespace(reasons=dict))


def report(session, now_ms=0, *, blocked=None, calls=None):
    """The reason in a first report."""
    return make_reports(calls=calls).report([session], now_ms, blocked)[0].reason


def handle(session, count):
    for _ in range(count):
        session.finish(session.next_work(0))


def test_a_rate_is_measured_over_five_seconds_however_often_it_is_asked_for():
    reports, session = make_reports(), make_session()
    read(session, *map(plain, range(100)))
    assert reports.report([session], 0)[0].records_per_second == 0
    handle(session, 30)
    assert reports.report([session], 1_000)[0].records_per_second == 0
    assert reports.report([session], 5_000)[0].records_per_second == 6
    assert reports.report([session], 5_100)[0].records_per_second == 6
    assert reports.report([session], 10_000)[0].records_per_second == 0


def test_another_holding_of_the_same_shard_is_measured_again():
    reports, session = make_reports(), make_session()
    read(session, *map(plain, range(10)))
    reports.report([session], 0)
    handle(session, 10)
    assert reports.report([session], 5_000)[0].records_per_second == 2
    assert reports.report([make_session()], 10_000)[0].records_per_second == 0
    assert reports.report([], 5_000) == ()


def test_the_report_begins_with_what_needs_a_look():
    sessions = [make_session(number) for number in range(74)]
    for number, session in enumerate(sessions):
        read(session, behind_ms=number)
    sessions[3].report(FAILING)
    found = make_reports().report(sessions, 0)
    assert len(found) == 74
    assert found[0].lease == sessions[3].key.short_name
    assert found[0].reason == FAILING
    assert [status.millis_behind_latest for status in found[1:4]] == [73, 72, 71]


def test_a_shard_that_is_not_subscribed_comes_before_those_that_are_behind():
    sessions = [make_session(number) for number in range(30)]
    for number, session in enumerate(sessions):
        read(session, behind_ms=number)
    sessions[3].report(FAILING)
    reports = make_reports(subscription_of=lambda session: polled if session is sessions[7] else active)
    active, polled = (
        SubscriptionState(state=state, seconds=None, renewal_count=0, event_seconds_ago=None, reason=None)
        for state in ("active", "polled")
    )
    found = reports.report(sessions, 0)
    assert [status.lease for status in found[:3]] == [sessions[number].key.short_name for number in (3, 7, 29)]


def test_a_record_that_holds_up_its_shard_is_named_after_ten_seconds():
    reports, session = make_reports(), make_session()
    reports.report([session], 0)
    assert reports.report([session], 60_000)[0].reason is None  # idle is not stalled
    read(session, plain(1), plain(2))
    work = session.next_work(60_000)
    assert reports.report([session], 61_000)[0].reason is None
    record = {"position": "1", "partition_key": work.records[0].partition_key, "seconds": 15}
    assert reports.report([session], 75_000)[0].reason == RecordUnfinished(**record)
    session.finish(work)
    assert reports.report([session], 75_500)[0].reason is None


@pytest.mark.parametrize("manual_ack", [False, True])
def test_a_record_in_a_handler_is_named_with_the_line_of_its_call(manual_ack):
    session = make_session()
    read(session, plain(1))
    work = session.next_work(0)
    reports = make_reports(calls=Calls([(session, work.records[0])], manual_ack=manual_ack))
    reports.report([session], 0)
    (found,) = reports.report([session], 15_000)
    record = {"position": "1", "partition_key": work.records[0].partition_key, "seconds": 15}
    in_handler = RecordInHandler(**record, at="handle (app.py:12)")
    assert found.reason == (RecordUnfinished(**record) if manual_ack else in_handler)
    other = make_reports(calls=Calls([(make_session(), work.records[0])]))
    other.report([session], 0)
    assert other.report([session], 15_000)[0].reason == RecordUnfinished(**record)


def test_a_record_that_holds_up_the_end_of_its_shard_is_named_with_that():
    reports, session = make_reports(), make_session()
    read(session, plain(1), is_end=True)
    session.next_work(0)
    reports.report([session], 0)
    reason = reports.report([session], 10_000)[0].reason
    assert (reason.code, reason.position, reason.children_wait) == ("record-unfinished", "1", True)


def test_a_call_that_ignores_its_time_out_is_the_first_reason():
    session = make_session()
    session.report(FAILING)
    assert report(session, calls=Calls(overdue={session: OVERDUE})) == OVERDUE


def test_pauses_and_hand_overs_are_reasons_and_an_error_goes_before_them():
    session = make_session()
    assert report(session, blocked=PAUSED) == PAUSED
    session.holding.row = replace(session.row, paused=True)
    assert report(session) == PausedInStore()
    session.holding.row = replace(session.row, paused=False)
    session.drain()
    session.holding.request = HandOffRequest(session.key, "other")
    assert report(session) == HandedOver(to_member="other")
    session.report(FAILING)
    assert report(session, blocked=PAUSED) == FAILING


def test_a_hand_over_is_no_stall_and_one_that_waits_for_a_record_for_long_names_the_record():
    told, session = [], make_session()
    reports = make_reports(told.append)
    read(session, plain(1))
    session.next_work(0)
    reports.report([session], 0)
    session.drain()
    session.holding.request = HandOffRequest(session.key, "other")
    assert reports.report([session], 9_000)[0].reason == HandedOver(to_member="other")
    assert told == []
    assert reports.report([session], 11_000)[0].reason.code == "record-unfinished"
    assert [event.reason.code for event in told] == ["record-unfinished"]


def test_a_quarantined_shard_and_one_that_waits_for_it_are_distinguished():
    session = make_session()
    calls = Calls(held=[session])
    assert report(session, calls=calls) is None
    read(session, plain(1))
    assert report(session, calls=calls) == WaitsForIsolatedShard()
    session.isolate(isolated=True)
    session.holding.row = replace(session.row, takes_without_progress=4)
    assert report(session, calls=calls) == HandledAlone(owner_count=3)


def test_a_stall_is_reported_once_when_it_begins_and_again_when_it_comes_back():
    told, session = [], make_session()
    reports = make_reports(told.append)
    for now_ms, blocked in enumerate((None, PAUSED, PAUSED, None, PAUSED)):
        reports.report([session], 1_000 * now_ms, blocked)
    assert [type(event).__name__ for event in told] == ["ShardStalled", "ShardRecovered", "ShardStalled"]
    assert (told[0].reason, str(told[0])) == (PAUSED, f"{STREAM}/{session.shard_id}: stalled: {PAUSED}")
    assert (told[1].reason, told[1].seconds) == (PAUSED, 2.0)


def test_another_reason_is_reported_and_the_stall_ends_once():
    told, session = [], make_session()
    reports = make_reports(told.append)
    reports.report([session], 0, PAUSED)
    session.report(FAILING)
    reports.report([session], 1_000, PAUSED)
    session.report(None)
    reports.report([session], 4_000)
    assert [(type(event).__name__, event.reason) for event in told] == [
        ("ShardStalled", PAUSED), ("ShardStalled", FAILING), ("ShardRecovered", FAILING),
    ]  # fmt: skip
    assert told[2].seconds == 4.0


def test_a_shard_without_room_to_read_reports_that_reason():
    reports, session = make_reports(), make_session()
    session.wait_for_budget(5_000)
    session.budget.try_reserve(session.budget.limit_bytes)
    assert reports.report([session], 14_999)[0].reason is None
    full = BudgetFull(seconds=10, used_bytes=268_435_456, limit_bytes=session.budget.limit_bytes)
    assert reports.report([session], 15_000)[0].reason == full
    session.begin_read()
    assert reports.report([session], 15_001)[0].reason is None


def test_a_full_lane_is_the_reason_only_if_nothing_of_it_is_finished():
    told, session = [], make_session(order="key", limits={"open_keys_max": 2})
    reports = make_reports(told.append)
    read(session, *(plain(number, f"key-{number}") for number in range(1, 5)))
    reports.report([session], 0)
    first, second = session.next_work(0), session.next_work(0)
    assert session.next_work(0) is None
    for second_count in range(1, 10):
        assert reports.report([session], second_count * 1000)[0].reason is None
    session.finish(first)
    assert session.next_work(0) is not None
    assert reports.report([session], 10_000)[0].reason is None
    full = OpenKeysLimit(key_count=2)
    assert [reports.report([session], at_ms)[0].reason for at_ms in (19_000, 25_000, 26_000)] == [None, full, full]
    assert [event.reason for event in told] == [full]
    session.finish(second)
    assert reports.report([session], 27_000)[0].reason is None


def test_a_full_budget_is_reported_once_when_it_lasts_for_a_minute_and_again_after_ten():
    told, sessions = [], [make_session(number) for number in range(50)]
    reports = make_reports(told.append)
    for number, session in enumerate(sessions):
        session.wait_for_budget(number)
    reports.report(sessions, 0)
    for second in range(60):
        reports.report(sessions, second * 1000)
    assert told == []
    for second in range(60, 600 + 60):
        reports.report(sessions, second * 1000)
    (event,) = told
    assert event.shard_id == sessions[0].shard_id
    assert (event.reason.code, event.reason.seconds) == ("budget-full", 60)
    reports.report(sessions, 660_000)
    assert [event.reason.shard_count for event in told] == [1, 50]
    for session in sessions[1:]:
        session.begin_read()
    reports.report(sessions, 661_000)
    assert len(told) == 2, "one of them still waits"
    sessions[0].begin_read()
    for second in range(662, 700):
        reports.report(sessions, second * 1000)
    over = told[2]
    assert len(told) == 3
    assert (type(over).__name__, over.shard_id, over.seconds) == ("ShardRecovered", sessions[0].shard_id, 662.0)
    assert over.reason == told[1].reason


def test_turns_of_a_full_budget_are_not_reported():
    told, sessions = [], [make_session(number) for number in range(50)]
    reports = make_reports(told.append)
    for second in range(1_000):
        sessions[second % 50].wait_for_budget(second * 1000)  # it was read and waits again
        reports.report(sessions, second * 1000)
    assert told == []


def test_a_shard_that_waits_for_room_reports_other_reasons_too():
    told, session = [], make_session()
    reports = make_reports(told.append)
    session.wait_for_budget(0)
    reports.report([session], 20_000)
    reports.report([session], 21_000, PAUSED)
    assert [event.reason for event in told] == [PAUSED]


def test_a_status_between_two_reports_has_the_reason_and_emits_nothing():
    told = []
    reports, session, other = make_reports(told.append), make_session(), make_session(1)
    read(session, *map(plain, range(10)))
    running = session.next_work(0)
    reports.report([session, other], 0)
    assert [state.reason for state in reports.states([other, session], 1_000, PAUSED, wall_ms=0)] == [PAUSED, PAUSED]
    (waiting,) = reports.states([session], 12_000, wall_ms=0)
    assert (waiting.reason.code, waiting.reason.seconds) == ("record-unfinished", 12)
    session.finish(running)
    assert reports.states([session, make_session(2)], 12_000, wall_ms=0)[0].reason is None
    assert told == []
