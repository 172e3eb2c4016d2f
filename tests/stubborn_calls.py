"""Calls that do not end when they are told to, and what must be seen of them: in threads, and on the event loop."""

import asyncio
import threading
from contextlib import contextmanager, suppress

import pytest

from anabranch import Retry, events
from anabranch.errors import ConsumerFailedError
from memory_rows import DeafStore
from patience import PATIENCE

from stream_world import kinds, until


class StubbornHandler:
    """Its first call ignores every cancellation until it is let go."""

    def __init__(self):
        self.calls = self.running = self.most_running = 0
        self.let_go = threading.Event()

    @contextmanager
    def _call(self):
        self.calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield self.calls == 1
        finally:
            self.running -= 1

    def in_a_thread(self, item):
        with self._call() as is_first:
            if is_first:
                self.let_go.wait(PATIENCE)

    async def in_the_loop(self, item):
        with self._call() as is_first:
            while is_first and not self.let_go.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)


async def check_overrun(world, name, run_name="run"):
    """A call that outlasts its timeout is named with its line, and its record is not tried again beside it."""
    world.put("a")
    handler, happened = StubbornHandler(), []
    policy = Retry(attempts=3, backoff=0.01, timeout=0.1)
    consumer = world.consumer(app="billing", leases="memory://", on_failure=policy, on_event=happened.append)
    running = asyncio.create_task(getattr(consumer, run_name)(getattr(handler, name), handle_signals=False))
    try:
        await until(lambda: kinds(happened, events.ShardStalled), "the reason")
        reason = kinds(happened, events.ShardStalled)[0].reason
        assert reason.timeout == 0.1
        assert f"{name} (stubborn_calls.py:" in reason.at
        assert handler.calls == 1
    finally:
        handler.let_go.set()
    await until(lambda: handler.running == 0 and consumer.status().shards[0].counters.handled_count == 1, "the end")
    assert handler.most_running == 1
    await consumer.stop()
    await running


async def check_zombie(world, name, consume):
    """A call that outlives its lease is reported with its stack. `consume(consumer, handle)` consumes."""
    world.put("a")
    store, handler, happened = DeafStore(), StubbornHandler(), []
    consumer = world.consumer(app="billing", leases=store, on_event=happened.append)
    running = asyncio.create_task(consume(consumer, getattr(handler, name)))
    try:
        await until(lambda: handler.running == 1, "the call")
        store.is_deaf = True
        await until(lambda: kinds(happened, events.ZombieCall), "the zombie")
        zombie = kinds(happened, events.ZombieCall)[0]
        assert name in zombie.stack
        assert "is at:" in str(zombie)
        assert "_engine" not in zombie.stack.partition("in_")[0]
    finally:
        store.is_deaf = False
        handler.let_go.set()
    await consumer.stop(deadline=1.0)
    await running


async def check_stop(world, name, run, seconds=None):
    """A stop does not wait for a call after its deadline, and names the call. `run(consumer, handle)` runs it."""
    world.put(["a"])
    handler, happened = StubbornHandler(), []
    consumer = world.consumer(app="billing", leases="memory://", on_event=happened.append)
    running = asyncio.create_task(run(consumer, getattr(handler, name)))
    await until(lambda: handler.running == 1, "the call")
    try:
        async with asyncio.timeout(seconds):
            report = await consumer.stop(deadline=0.1)
            assert await running == report
        assert handler.running == 1
        assert len(report.leftovers) == 1
        assert report.committed
        assert report.released
        (told,) = kinds(happened, events.ZombieCall)
        assert name in told.stack
        assert not any("runner" in task.get_name() for task in asyncio.all_tasks())
    finally:
        handler.let_go.set()
    await until(lambda: handler.running == 0, "the end of the call")
    assert handler.calls == 1


async def check_failure(world, name, run, seconds=None):
    """A consumer that fails raises, whatever its calls do. `run(consumer, handle)` runs it."""
    world.put(["a"])
    handler, happened = StubbornHandler(), []
    consumer = world.consumer(app="billing", leases="memory://", on_event=happened.append)
    running = asyncio.create_task(run(consumer, getattr(handler, name)))
    await until(lambda: handler.running == 1, "the call")
    consumer._consumer_run.scheduler.call_at(0, {}.popitem)
    try:
        with pytest.raises(ConsumerFailedError, match="KeyError"):
            async with asyncio.timeout(seconds):
                await running
        assert handler.running == 1
        assert kinds(happened, events.ZombieCall)
    finally:
        handler.let_go.set()
    await until(lambda: handler.running == 0, "the end of the call")
