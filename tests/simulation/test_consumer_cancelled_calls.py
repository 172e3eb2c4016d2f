"""Handlers and cancellation: what they do to the task that they run in keeps no record, no stop and no end waiting."""

import asyncio

import pytest

from anabranch.errors import ConsumerFailedError

from simulated_stream import run, stream_world, until

WAYS = pytest.mark.parametrize("way", ["run", "run_batches"])


def _number(item):
    return int(getattr(item, "records", [item])[0].data)


def _run(consumer, way, handle):
    options = {} if way == "run" else {"max_records": 1}
    return asyncio.create_task(getattr(consumer, way)(handle, handle_signals=False, **options))


async def _ignores_cancellation():
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return


@WAYS
@pytest.mark.parametrize("end", ["stop", "failure"])
def test_a_call_that_catches_its_cancellation_keeps_no_end_waiting(way, end):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            started = []

            async def handle(item):
                started.append(item)
                await _ignores_cancellation()

            consumer = world.consumer(app="billing", leases="memory://")
            running = _run(consumer, way, handle)
            await until(lambda: bool(started), "the call")
            if end == "stop":
                assert len((await consumer.stop(deadline=0.1)).leftovers) == 1
                await running
            else:
                consumer._consumer_run.scheduler.call_at(0, {}.popitem)
                with pytest.raises(ConsumerFailedError, match="KeyError"):
                    await running

    run(main)


@WAYS
@pytest.mark.parametrize("waits", [True, False])
def test_a_handler_that_cancels_the_task_it_runs_in_costs_no_more_than_its_attempt(way, waits):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            seen = []

            async def handle(item):
                seen.append(_number(item))
                if len(seen) == 1:
                    asyncio.current_task().cancel()
                    if waits:
                        await asyncio.sleep(5)

            consumer = world.consumer(app="billing", leases="memory://", until="tip", concurrency=1)
            await _run(consumer, way, handle)
            assert seen[-2:] == [1, 2]
            assert seen.count(0) <= 2

    run(main)


@WAYS
def test_a_cancellation_that_a_handler_caught_is_not_held_against_the_next_call(way):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            seen = []

            async def handle(item):
                seen.append(_number(item))
                if len(seen) == 1:
                    asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
                    await _ignores_cancellation()
                elif len(seen) == 2:
                    gone = asyncio.get_running_loop().create_future()
                    gone.cancel()
                    await gone

            consumer = world.consumer(app="billing", leases="memory://", until="tip", concurrency=1)
            await _run(consumer, way, handle)
            assert seen == [0, 1, 1, 2]

    run(main)
