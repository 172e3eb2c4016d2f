"""Calls that do not end when they are told to: they are named, and neither a stop nor the process waits for them."""

import asyncio

import pytest

from stubborn_calls import StubbornHandler, check_failure, check_stop

from simulated_stream import run, stream_world, until

WAYS = pytest.mark.parametrize("way", ["run", "run_batches"])


def run_by(way):
    def run(consumer, handle):
        if way == "run":
            return consumer.run(handle, handle_signals=False)
        return consumer.run_batches(handle, max_records=1, handle_signals=False)

    return run


@WAYS
def test_a_stop_waits_no_longer_for_a_call_that_does_not_end_and_names_it(way):
    async def main():
        async with stream_world(1) as world:
            await check_stop(world, "in_the_loop", run_by(way), seconds=2.5)

    run(main)


@WAYS
def test_a_consumer_that_fails_says_so_whatever_its_calls_do(way):
    async def main():
        async with stream_world(1) as world:
            await check_failure(world, "in_the_loop", run_by(way), seconds=2.5)

    run(main)


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_that_is_cancelled_ends_whatever_its_calls_do(times):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            handler = StubbornHandler()
            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(handler.in_the_loop, handle_signals=False))
            await until(lambda: handler.running == 1, "the call")
            for _ in range(times):
                running.cancel()
                await asyncio.sleep(0)
            try:
                await asyncio.wait([running], timeout=30)
                assert running.cancelled()
            finally:
                handler.let_go.set()
            await until(lambda: handler.running == 0, "the end of the call")

    run(main)


def test_leaving_the_block_of_a_consumer_waits_no_longer_for_a_call_that_does_not_end():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            handler = StubbornHandler()
            consumer = world.consumer(app="billing", leases="memory://")
            async with consumer:
                running = asyncio.create_task(consumer.run(handler.in_the_loop, handle_signals=False))
                await until(lambda: handler.running == 1, "the call")
                consumer._consumer_run.stop_by(0)
            try:
                async with asyncio.timeout(1):
                    assert len((await running).leftovers) == 1
            finally:
                handler.let_go.set()

    run(main)
