"""`ManualClock` and `make_context`, which users' own tests build on."""

import asyncio

from anabranch import Context
from anabranch.testing import ManualClock, make_context
from anabranch.testing.loop import run


def test_time_does_not_change_until_it_is_advanced():
    clock = ManualClock(5, wall_ahead_ms=1_000)
    assert (clock.now_ms(), clock.wall_ms()) == (5, 1_005)
    clock.advance(10)
    assert (clock.now_ms(), clock.wall_ms()) == (15, 1_015)


def test_by_default_the_wall_clock_shows_a_day_in_2023():
    assert ManualClock(5).wall_ms() == 1_700_000_000_005


def test_callbacks_run_in_the_order_of_their_times_and_read_that_time():
    clock, seen = ManualClock(), []
    for at_ms in (30, 10, 20):
        clock.call_at_ms(at_ms, lambda: seen.append(clock.now_ms()))
    clock.call_at_ms(15, lambda: seen.append("cancelled")).cancel()
    clock.advance(25)
    assert seen == [10, 20]
    clock.advance(5)
    assert seen == [10, 20, 30]


def test_a_callback_whose_time_has_passed_runs_in_the_next_advance():
    clock, seen = ManualClock(100), []
    clock.call_at_ms(50, lambda: seen.append(clock.now_ms()))
    clock.advance(1)
    assert seen == [100]


def test_the_wall_clock_can_jump_alone():
    clock = ManualClock(wall_ahead_ms=0)
    clock.jump_wall(1_500)
    assert (clock.now_ms(), clock.wall_ms()) == (0, 1_500)


def test_sleepers_wake_when_advance_reaches_their_time():
    async def main():
        clock, woken = ManualClock(), []

        async def sleep_until(at_ms):
            await clock.sleep_until_ms(at_ms)
            woken.append(at_ms)

        async with asyncio.TaskGroup() as group:
            for at_ms in (20, 10, 0):
                group.create_task(sleep_until(at_ms))
            cancelled = group.create_task(sleep_until(15))
            await asyncio.sleep(1)  # in virtual time, so it only lets the tasks run
            cancelled.cancel()
            await asyncio.sleep(1)
            clock.advance(10)
            await asyncio.sleep(1)
            assert woken == [0, 10]
            clock.advance(10)
        return woken

    assert run(main) == [0, 10, 20]


def test_by_default_a_context_is_that_of_the_first_call_for_a_record():
    assert make_context() == Context(attempt=1, fence_token=1, millis_behind_latest=0)


def test_each_field_of_a_context_can_be_set():
    context = make_context(attempt=3, fence_token=7, millis_behind_latest=9, deadline=5.0)
    assert context == Context(attempt=3, fence_token=7, millis_behind_latest=9, deadline=5.0)
