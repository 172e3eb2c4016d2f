"""The scheduler: an error in a callback is reported and delays no other callback."""

import asyncio
from functools import partial

from anabranch._engine.clock import TURN_CALLBACKS_MAX, Scheduler, SystemClock

from stream_world import run


def test_an_error_of_one_callback_is_reported_and_delays_no_other():
    async def main():
        clock, errors, called = SystemClock(), [], asyncio.Event()
        scheduler = Scheduler(clock, errors.append)
        scheduler.call_at(clock.now_ms(), {}.popitem)
        scheduler.call_at(clock.now_ms(), lambda: None)
        scheduler.call_at(clock.now_ms() + 20, called.set)
        await called.wait()
        assert [type(error) for error in errors] == [KeyError]

    run(main)


class HandClock:
    """Timers fire when the test sets the time."""

    def __init__(self):
        self.time_ms = 0
        self._timers = []

    def now_ms(self):
        return self.time_ms

    def call_at_ms(self, at_ms, callback):
        timer = _Timer(at_ms, callback, self._timers)
        self._timers.append(timer)
        return timer

    def advance(self, to_ms):
        self.time_ms = to_ms
        for timer in [timer for timer in self._timers if timer.at_ms <= to_ms]:
            timer.cancel()
            timer.callback()


class _Timer:
    def __init__(self, at_ms, callback, timers):
        self.at_ms, self.callback, self._timers = at_ms, callback, timers

    def cancel(self):
        self._timers.remove(self)


def test_a_callback_that_plans_ahead_delays_nothing_that_is_due_before():
    clock, called = HandClock(), []
    scheduler = Scheduler(clock, called.append)
    scheduler.call_at(10, lambda: scheduler.call_at(2_000, lambda: called.append("later")))
    scheduler.call_at(20, lambda: called.append("soon"))
    clock.advance(10)
    clock.advance(20)
    assert called == ["soon"]
    clock.advance(2_000)
    assert called == ["soon", "later"]


def test_callbacks_that_are_due_together_leave_the_loop_a_turn_in_between_and_keep_their_order():
    clock, called, count = HandClock(), [], 2 * TURN_CALLBACKS_MAX + 1
    scheduler = Scheduler(clock, called.append)
    for number in range(count):
        scheduler.call_at(10, partial(called.append, number))
    for turns in (1, 2):
        clock.advance(10)
        assert called == list(range(turns * TURN_CALLBACKS_MAX))
    clock.advance(10)
    assert called == list(range(count))
