"""Calls that ignore their timeout hold up their key; calls that ignore the end of their lease are reported."""

import asyncio

import pytest

from anabranch import Retry, events
from anabranch.reasons import RecordInHandler
from memory_rows import DeafStore

from simulated_stream import run, stream_world, until


class Unheeding:
    """A handler whose first call goes on after it was told to end, until it is let go."""

    def __init__(self):
        self.running = self.most_running = self.calls = 0
        self.let_go = asyncio.Event()

    def enter(self):
        self.calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)

    async def in_the_loop(self, item):
        self.enter()
        try:
            while self.calls == 1 and not self.let_go.is_set():
                await self.wait_stubbornly()
        finally:
            self.running -= 1

    async def wait_stubbornly(self):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("run_name", ["run", "run_batches"])
def test_a_call_that_ignores_its_time_out_is_named_with_its_place_and_not_tried_again_beside_itself(run_name):
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            handler, happened = Unheeding(), []
            consumer = world.consumer(
                app="billing",
                leases="memory://",
                on_failure=Retry(attempts=3, backoff=0.01, timeout=0.1),
                on_event=happened.append,
            )
            running = asyncio.create_task(getattr(consumer, run_name)(handler.in_the_loop, handle_signals=False))

            def reasons():
                return [event.reason for event in happened if isinstance(event, events.ShardStalled)]

            await until(reasons, "the reason")
            assert reasons()[0].timeout == 0.1
            assert "in_the_loop (test_consumer_timeouts.py:" in reasons()[0].at
            assert handler.calls == 1
            handler.let_go.set()
            await until(
                lambda: handler.running == 0 and consumer.status().shards[0].counters.handled_count == 1, "the end"
            )
            assert handler.most_running == 1
            await consumer.stop()
            await running

    run(main)


async def _handle_forever(item):
    await asyncio.Event().wait()


async def _loop_forever(consumer):
    async for _ in consumer:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "consume, function",
    [
        (lambda consumer: consumer.run(_handle_forever, handle_signals=False), "_handle_forever"),
        (lambda consumer: consumer.run_batches(_handle_forever, handle_signals=False), "_handle_forever"),
        (_loop_forever, "_loop_forever"),
    ],
    ids=["records", "batches", "loop"],
)
def test_a_record_that_is_handled_for_long_is_named_with_the_place_where_its_handling_stands(consume, function):
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            happened = []
            async with world.consumer(app="billing", leases="memory://", on_event=happened.append) as consumer:
                running = asyncio.create_task(consume(consumer))
                await until(lambda: any(isinstance(event, events.ShardStalled) for event in happened), "the event")
                reason = next(event.reason for event in happened if isinstance(event, events.ShardStalled))
                assert isinstance(reason, RecordInHandler)
                assert (reason.partition_key, reason.children_wait) == ("a", False)
                assert reason.seconds >= 10
                assert f"{function} (test_consumer_timeouts.py:" in reason.at
                (shard,) = consumer.status().shards
                assert (shard.reason.code, shard.reason.at) == ("record-in-handler", reason.at)
                running.cancel()
                await asyncio.wait([running])

    run(main)


@pytest.mark.parametrize("way", ["in_the_loop", "the callers loop"])
def test_a_call_that_outlives_its_lease_is_reported_with_its_stack(way):
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            store, handler, happened = DeafStore(), Unheeding(), []
            consumer = world.consumer(app="billing", leases=store, on_event=happened.append)

            async def loop_over_it():
                async with consumer:
                    async for record in consumer:
                        await handler.in_the_loop(record)

            handle = getattr(handler, way, None)
            work = loop_over_it() if handle is None else consumer.run(handle, handle_signals=False)
            running = asyncio.create_task(work)
            await until(lambda: handler.running == 1, "the call")
            store.is_deaf = True

            def zombies():
                return [event for event in happened if isinstance(event, events.ZombieCall)]

            await until(zombies, "the zombie")
            assert "in_the_loop" in zombies()[0].stack
            assert "is at:" in str(zombies()[0])
            assert "_engine" not in zombies()[0].stack.partition("in_")[0]
            store.is_deaf = False
            handler.let_go.set()
            await consumer.stop(deadline=1.0)
            await running

    run(main)
