from anabranch._core.leases.timing import CLOCK_JUMP_MS_MAX, Fence

WALL = 1_700_000_000_000


def acknowledged(at_ms=1_000):
    return Fence("a#1").acknowledged(at_ms, WALL + at_ms, 7_000)


def test_nothing_starts_before_the_first_acknowledgement():
    assert not Fence("a#1").may_start(0, WALL)


def test_starts_are_allowed_until_the_fence_and_not_at_it():
    fence = acknowledged()
    assert fence.may_start(7_999, WALL + 7_999)
    assert not fence.may_start(8_000, WALL + 8_000)


def test_a_later_acknowledgement_lifts_a_fence_that_has_passed():
    fence = acknowledged().acknowledged(20_000, WALL + 20_000, 7_000)
    assert fence.may_start(26_999, WALL + 26_999)


def test_an_earlier_acknowledgement_takes_nothing_back():
    fence = acknowledged(5_000)
    assert fence.acknowledged(4_000, WALL + 4_000, 7_000) is fence


def test_a_wall_clock_that_ran_ahead_fences_until_the_next_acknowledgement():
    fence = acknowledged()
    slept_ms = CLOCK_JUMP_MS_MAX + 1
    assert fence.may_start(2_000, WALL + 2_000 + CLOCK_JUMP_MS_MAX)
    assert not fence.may_start(2_000, WALL + 2_000 + slept_ms)
    awake = fence.acknowledged(3_000, WALL + 3_000 + slept_ms, 7_000)
    assert awake.may_start(3_500, WALL + 3_500 + slept_ms)


def test_an_answer_to_a_heartbeat_from_before_a_suspend_does_not_lift_the_fence():
    before = acknowledged().acknowledged(2_000, WALL + 2_000, 7_000)
    assert not before.may_start(2_500, WALL + 62_500)


def test_a_wall_clock_that_was_set_back_changes_nothing():
    assert acknowledged().may_start(2_000, WALL - 3_600_000)


def test_an_ended_member_starts_nothing_ever():
    over = acknowledged().ended("sealed")
    assert not over.may_start(1_500, WALL + 1_500)
    assert over.acknowledged(9_000, WALL + 9_000, 7_000) is over
    assert over.ended("left") is over
    assert over.ending == "sealed"
