"""The owner of the tasks that run the handler: it tells of those that fail, and lets go of those that do not end."""

import asyncio
import contextlib
import gc

import pytest

from anabranch._engine.clock import SystemClock
from anabranch._engine.runners import RunnerTasks


def started(run_one, *, count=1, on_failed=pytest.fail, on_ignored_cancel=pytest.fail):
    runners = RunnerTasks(SystemClock(), on_failed)
    runners.start(run_one, count, on_ignored_cancel=on_ignored_cancel)
    return runners


async def wait_for_ever():
    await asyncio.Event().wait()


def test_runners_that_end_when_they_are_told_to_are_waited_for():
    async def main():
        ended = []

        async def run_one():
            try:
                await wait_for_ever()
            finally:
                await asyncio.sleep(0.01)
                ended.append(asyncio.current_task() in runners)

        async with started(run_one, count=3) as runners:
            await asyncio.sleep(0)
            assert asyncio.current_task() not in runners
            runners.cancel_all()
        assert ended == [True] * 3

    asyncio.run(main())


def test_the_failure_of_a_runner_is_told():
    async def main():
        failures = []

        async def run_one():
            raise KeyError("a")

        async with started(run_one, on_failed=failures.append):
            await asyncio.sleep(0.01)
        assert [repr(error) for error in failures] == ["KeyError('a')"]

    asyncio.run(main())


def test_a_runner_that_does_not_end_is_let_go_of_and_kept_until_it_does(monkeypatch):
    monkeypatch.setattr("anabranch._engine.runners.IGNORED_AFTER_MS", 20)

    async def main():
        told, may_end, ended = [], asyncio.Event(), []

        async def run_one():
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()
            ended.append(asyncio.current_task() in runners)

        async with started(run_one, on_ignored_cancel=lambda: told.append(1)) as runners:
            await asyncio.sleep(0)
            runners.cancel_all()
        assert told == [1]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await runners.end()
        may_end.set()
        await asyncio.sleep(0.01)
        assert ended == [True]
        assert not runners._released
        assert told == [1]

    asyncio.run(main())


def test_the_end_of_the_loop_does_not_wait_for_a_runner_that_was_let_go_of(monkeypatch, caplog):
    monkeypatch.setattr("anabranch._engine.runners.IGNORED_AFTER_MS", 20)

    async def main():
        async def run_one():
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await wait_for_ever()

        async with started(run_one, on_ignored_cancel=lambda: None) as runners:
            await asyncio.sleep(0)
            runners.cancel_all()

    asyncio.run(main())
    gc.collect()
    assert not caplog.records


def test_who_is_cancelled_while_runners_end_lets_go_of_them_at_once():
    async def main():
        told = []

        async def run_one():
            while not told:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.001)

        runners = started(run_one, on_ignored_cancel=lambda: told.append(1))
        await asyncio.sleep(0)
        runners.cancel_all()
        ending = asyncio.create_task(runners.end())
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait([ending])
        assert ending.cancelled()
        assert told == [1]
        await asyncio.wait(runners._released)

    asyncio.run(main())
