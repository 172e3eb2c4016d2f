import pytest
from msgspec.structs import replace

from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._core.leases.store_calls import Moment, NoAnswer
from anabranch._core.leases.timing import lease_timing
from anabranch._model.leases import HeartbeatWrite, MemberRow

WALL = 1_700_000_000_000
ROW = MemberRow(member_id="a#1", expiry_ms=10_000)
SEALED = MemberRow(member_id="a#1", expiry_ms=10_000, state="sealed")


def registered():
    beating = HeartbeatState("a#1", lease_timing())
    beating.registered(ROW, "disk", Moment(0, WALL))
    return beating


def test_the_registration_counts_as_a_heartbeat():
    beating = registered()
    assert beating.status.fence.valid_until_ms == 7_000
    assert beating.next_heartbeat_ms == 2_500


def test_validity_counts_from_before_the_request_however_late_the_answer():
    beating = registered()
    beating.begin(2_500, WALL + 2_500)
    beating.answered(ROW)
    assert beating.status.fence.valid_until_ms == 9_500
    assert beating.next_heartbeat_ms == 5_000


def test_attempts_grow_over_failures_and_carry_the_report():
    beating = registered()
    beating.report = HeartbeatWrite(member_id="a#1", attempt=0, load=3)
    first = beating.begin(2_500, WALL)
    beating.failed(4_000, NoAnswer("away"))
    second = beating.begin(4_000, WALL)
    assert [first.attempt, second.attempt] == [1, 2]
    assert (second.member_id, second.load) == ("a#1", 3)


def test_a_failure_is_reported_and_changes_nothing_but_the_time_of_the_next_try():
    beating = registered()
    status = beating.status
    beating.begin(2_500, WALL)
    assert beating.next_heartbeat_ms is None
    beating.failed(2_600, NoAnswer("away"))
    assert beating.status == replace(status, trouble=NoAnswer("away"))
    assert beating.next_heartbeat_ms == 4_000


def test_three_tries_fit_before_the_fence():
    beating = registered()
    tries = 0
    while (
        beating.next_heartbeat_ms is not None
        and beating.next_heartbeat_ms + 1_500 <= beating.status.fence.valid_until_ms
    ):
        began_ms = beating.next_heartbeat_ms
        beating.begin(began_ms, WALL)
        beating.failed(began_ms + 1_500, NoAnswer("away"))
        tries += 1
    assert tries == 3


@pytest.mark.parametrize("answer, ending", [(None, "missing"), (SEALED, "sealed")])
def test_a_row_that_is_gone_or_sealed_ends_the_member(answer, ending):
    beating = registered()
    beating.begin(2_500, WALL)
    beating.answered(answer)
    assert beating.status.fence.ending == ending
    assert beating.next_heartbeat_ms is None


def test_after_the_end_late_answers_and_failures_change_nothing():
    beating = registered()
    beating.begin(2_500, WALL)
    beating.end("rolled_back")
    beating.answered(ROW)
    assert beating.status.fence.ending == "rolled_back"
    assert beating.next_heartbeat_ms is None
    beating.begin(3_000, WALL)
    beating.failed(4_000, NoAnswer("away"))
    assert beating.next_heartbeat_ms is None


def test_a_failure_without_an_attempt_is_nothing():
    beating = registered()
    beating.failed(100, NoAnswer("away"))
    assert beating.next_heartbeat_ms == 2_500


def test_a_new_report_triggers_a_heartbeat_unless_one_is_in_flight():
    beating = registered()
    beating.wake(1_000)
    assert beating.next_heartbeat_ms == 1_000
    beating.wake(1_500)
    assert beating.next_heartbeat_ms == 1_000
    beating.begin(1_500, WALL)
    beating.wake(1_600)
    assert beating.next_heartbeat_ms is None
