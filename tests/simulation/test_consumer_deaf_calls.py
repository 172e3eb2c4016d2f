"""Calls that do not end when they are told to: they are named, and neither a stop nor the process waits for them."""

import asyncio
from functools import partial

import pytest

from anabranch import events
from anabranch.errors import ConsumerFailedError

from simulated_stream import run, stream_world, until

WAYS = pytest.mark.parametrize("way", ["run", "run_batches"])


class Deaf:
    """A handler whose calls take no notice of anything, until they are let go."""

    def __init__(self):
        self.started = self.ended = 0
        self.let_go = asyncio.Event()

    async def in_the_loop(self, item):
        self.started += 1
        while not self.let_go.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        self.ended += 1


def _run(consumer, way):
    return consumer.run if way == "run" else partial(consumer.run_batches, max_records=1)


@WAYS
def test_a_stop_waits_no_longer_for_a_call_that_does_not_end_and_names_it(way):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            handler, happened = Deaf(), []
            consumer = world.consumer(app="billing", leases="memory://", on_event=happened.append)
            running = asyncio.create_task(_run(consumer, way)(handler.in_the_loop, handle_signals=False))
            await until(lambda: handler.started == 1, "the call")
            try:
                async with asyncio.timeout(2.5):
                    report = await consumer.stop(deadline=0.1)
                    assert await running == report
                assert handler.ended == 0
                assert len(report.leftovers) == 1
                assert report.committed
                assert report.released
                (told,) = [event for event in happened if isinstance(event, events.ZombieCall)]
                assert "in_the_loop" in told.stack
                assert not any("runner" in task.get_name() for task in asyncio.all_tasks())
            finally:
                handler.let_go.set()
            await until(lambda: handler.ended == 1, "the end of the call")
            assert handler.started == 1

    run(main)


@WAYS
def test_a_consumer_that_fails_says_so_whatever_its_calls_do(way):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            handler, happened = Deaf(), []
            consumer = world.consumer(app="billing", leases="memory://", on_event=happened.append)
            running = asyncio.create_task(_run(consumer, way)(handler.in_the_loop, handle_signals=False))
            await until(lambda: handler.started == 1, "the call")
            consumer._consumer_run.scheduler.call_at(0, {}.popitem)
            try:
                with pytest.raises(ConsumerFailedError, match="KeyError"):
                    async with asyncio.timeout(2.5):
                        await running
                assert any(isinstance(event, events.ZombieCall) for event in happened)
            finally:
                handler.let_go.set()
            await until(lambda: handler.ended == 1, "the end of the call")

    run(main)


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_that_is_cancelled_ends_whatever_its_calls_do(times):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            handler = Deaf()
            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(handler.in_the_loop, handle_signals=False))
            await until(lambda: handler.started == 1, "the call")
            for _ in range(times):
                running.cancel()
                await asyncio.sleep(0)
            try:
                await asyncio.wait([running], timeout=30)
                assert running.cancelled()
            finally:
                handler.let_go.set()
            await until(lambda: handler.ended == 1, "the end of the call")

    run(main)


def test_leaving_the_block_of_a_consumer_waits_no_longer_for_a_call_that_does_not_end():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            handler = Deaf()
            consumer = world.consumer(app="billing", leases="memory://")
            async with consumer:
                running = asyncio.create_task(consumer.run(handler.in_the_loop, handle_signals=False))
                await until(lambda: handler.started == 1, "the call")
                consumer._consumer_run.stop_by(0)
            try:
                async with asyncio.timeout(1):
                    assert len((await running).leftovers) == 1
            finally:
                handler.let_go.set()

    run(main)
