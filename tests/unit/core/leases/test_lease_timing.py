from hypothesis import given, strategies as st
from msgspec.structs import asdict

from anabranch._core.leases.timing import CLOCK_JUMP_MS_MAX, Fence, StartGate, lease_timing


def test_the_defaults_are_derived_from_ten_seconds():
    timing = lease_timing()
    assert (timing.heartbeat_interval_ms, timing.call_deadline_ms, timing.fence_ms) == (2_500, 1_500, 7_000)
    assert (timing.grace_ms, timing.slack_ms, timing.poll_interval_ms) == (2_000, 500, 1_000)


@given(st.integers(3_000, 600_000))
def test_every_expiry_that_the_settings_allow_is_safe(expiry_ms):
    timing = lease_timing(expiry_ms)
    # fence * 100/99 + grace + slack <= expiry * 100/101, in whole numbers
    after_fence_ms = timing.grace_ms + timing.slack_ms
    assert timing.fence_ms * 100 * 101 + after_fence_ms * 99 * 101 <= expiry_ms * 100 * 99
    assert timing.heartbeat_interval_ms + 3 * timing.call_deadline_ms <= timing.fence_ms
    assert min(asdict(timing).values()) > 0


@given(st.integers(3_000, 600_000))
def test_a_dead_member_is_replaced_within_one_and_a_half_times_the_expiry(expiry_ms):
    calls_ms = 4 * 100
    assert lease_timing(expiry_ms).poll_interval_ms + expiry_ms * 101 // 100 + calls_ms < expiry_ms * 3 // 2


def test_large_fleets_poll_less_often():
    timing = lease_timing()
    assert [timing.poll_interval_for(count) for count in (1, 40, 60, 100, 500)] == [1_000, 1_000, 1_500, 2_500, 2_500]


WALL = 1_700_000_000_000


def acknowledged(at_ms=1_000):
    return Fence().acknowledged(at_ms, WALL + at_ms, 7_000)


def may_start(fence, now_ms, wall_ms):
    gate = StartGate()
    gate.limit = fence.limit
    return gate.allows(now_ms, wall_ms)


def test_nothing_starts_before_the_first_acknowledgement():
    assert not may_start(Fence(), 0, WALL)


def test_starts_are_allowed_until_the_fence_and_not_at_it():
    fence = acknowledged()
    assert may_start(fence, 7_999, WALL + 7_999)
    assert not may_start(fence, 8_000, WALL + 8_000)


def test_a_later_acknowledgement_lifts_a_fence_that_has_passed():
    fence = acknowledged().acknowledged(20_000, WALL + 20_000, 7_000)
    assert may_start(fence, 26_999, WALL + 26_999)


def test_an_earlier_acknowledgement_takes_nothing_back():
    fence = acknowledged(5_000)
    assert fence.acknowledged(4_000, WALL + 4_000, 7_000) is fence


def test_a_wall_clock_that_ran_ahead_fences_until_the_next_acknowledgement():
    fence = acknowledged()
    slept_ms = CLOCK_JUMP_MS_MAX + 1
    assert may_start(fence, 2_000, WALL + 2_000 + CLOCK_JUMP_MS_MAX)
    assert not may_start(fence, 2_000, WALL + 2_000 + slept_ms)
    awake = fence.acknowledged(3_000, WALL + 3_000 + slept_ms, 7_000)
    assert may_start(awake, 3_500, WALL + 3_500 + slept_ms)


def test_an_answer_to_a_heartbeat_from_before_a_suspend_does_not_lift_the_fence():
    before = acknowledged().acknowledged(2_000, WALL + 2_000, 7_000)
    assert not may_start(before, 2_500, WALL + 62_500)


def test_a_wall_clock_that_was_set_back_changes_nothing():
    assert may_start(acknowledged(), 2_000, WALL - 3_600_000)


def test_an_ended_member_starts_nothing_ever():
    over = acknowledged().ended("sealed")
    assert not may_start(over, 1_500, WALL + 1_500)
    assert over.acknowledged(9_000, WALL + 9_000, 7_000) is over
    assert over.ended("left") is over
    assert over.ending == "sealed"


def test_only_large_fleets_pause_between_reads_of_all_leases():
    assert lease_timing().read_pause_for(4, 1_000) == 0
    assert lease_timing().read_pause_for(100, 5_000) == 25_000
