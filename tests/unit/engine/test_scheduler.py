"""The timetable: an error in it is heard, and delays nobody else."""

import asyncio

from anabranch._engine.scheduler import Scheduler
from anabranch._engine.system_clock import SystemClock

from stream_world import run


def test_an_error_of_one_callback_is_told_and_keeps_no_other_from_its_time():
    async def main():
        clock, errors, called = SystemClock(), [], asyncio.Event()
        scheduler = Scheduler(clock, errors.append)
        scheduler.call_at(clock.now_ms(), {}.popitem)
        scheduler.call_at(clock.now_ms(), lambda: None)
        scheduler.call_at(clock.now_ms() + 20, called.set)
        await called.wait()
        assert [type(error) for error in errors] == [KeyError]

    run(main, 5)
