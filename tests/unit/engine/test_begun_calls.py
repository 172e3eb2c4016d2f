"""Calls that are stepped by hand and awaited later end, fail and are cancelled like awaited ones."""

import asyncio
import contextlib

import pytest

from anabranch._engine.dispatcher import FINISHED, raise_later, resume_call


def begin(call):
    steps = call.__await__()
    return steps, next(steps, FINISHED)


async def run_begun(call):
    steps, waits_for = begin(call)
    assert waits_for is not FINISHED
    return await resume_call(steps, waits_for)


async def wait_twice(*, ignores=0):
    await asyncio.sleep(0)
    for _ in range(ignores):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
    await asyncio.sleep(0)
    return "done"


def test_a_call_that_does_not_wait_has_finished_when_it_was_begun():
    async def call():
        return "done"

    assert begin(call())[1] is FINISHED


def test_a_call_that_waits_continues_where_it_waited():
    assert asyncio.run(run_begun(wait_twice())) == "done"


def test_a_call_that_waits_for_a_future_is_woken_by_it():
    async def main():
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "given")

        async def call():
            return await future

        return await run_begun(call())

    assert asyncio.run(main()) == "given"


@pytest.mark.parametrize("ignores", [1, 3])
def test_a_call_that_ignores_its_cancellation_is_awaited_to_its_end(ignores):
    async def main():
        task = asyncio.create_task(run_begun(wait_twice(ignores=ignores)))
        for _ in range(ignores):
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
        return await task

    assert asyncio.run(main()) == "done"


def test_a_call_that_is_cancelled_where_it_first_waits_may_still_return():
    async def call():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "cleaned up"

    async def main():
        task = asyncio.create_task(run_begun(call()))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(main()) == "cleaned up"


def test_a_cancelled_call_is_cancelled():
    async def main():
        task = asyncio.create_task(run_begun(asyncio.sleep(3600)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_call_that_has_failed_raises_its_error_where_it_is_awaited():
    with pytest.raises(ValueError, match="wrong"):
        asyncio.run(raise_later(ValueError("wrong")))


def test_a_call_that_is_not_awaited_any_more_is_closed_once():
    ended = []

    async def call():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("closed")

    async def main():
        coroutine = call()
        steps, waits_for = begin(coroutine)
        rest = resume_call(steps, waits_for)
        rest.send(None)
        coroutine.close()  # as the garbage collector may do first
        rest.close()
        assert ended == ["closed"]

    asyncio.run(main())
