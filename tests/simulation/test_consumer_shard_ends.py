"""The end of a shard of which one record still fails: its children wait, for as long as the settings say."""

import asyncio
from dataclasses import replace

import pytest

from anabranch import Retry, events
from anabranch.errors import ShardStoppedError
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import QUICK, numbers, run, stream_world, until


class Failing:
    """Fails at the records of key "a" until it is mended."""

    def __init__(self):
        self.is_mended = False
        self.failures = 0
        self.handled = []

    def check(self, record):
        if record.partition_key == "a" and not self.is_mended:
            self.failures += 1
            raise ValueError("no such customer")

    async def record(self, record):
        self.check(record)
        self.handled.append(record)

    async def batch(self, batch):
        for record in batch:
            self.check(record)
        self.handled += batch.records


@pytest.mark.parametrize("order", ["key", "shard", "none"])
def test_the_children_of_a_shard_wait_for_a_record_that_fails(order):
    async def main():
        async with stream_world(1) as world:
            world.put("bca")
            handler, happened, store = Failing(), [], MemoryLeaseStore()
            consumer = world.consumer(
                app="billing",
                leases=store,
                order=order,
                on_failure=Retry(attempts=10**9, backoff=0.01, backoff_max=0.01),  # for as long as the test may take
                on_event=happened.append,
            )
            running = asyncio.create_task(consumer.run(handler.record, handle_signals=False))
            await until(lambda: handler.failures and len(handler.handled) == 2, "the failing record")
            world.split()
            world.put("xyz")
            (session,) = consumer._consumer_run.sessions.values()
            await until(lambda: session.state == "ended", "the end of the shard")
            failures = handler.failures
            await until(lambda: handler.failures > failures + 5, "some more attempts")
            assert len(handler.handled) == 2
            assert not [event for event in happened if isinstance(event, events.ShardStopped)]
            handler.is_mended = True
            await until(lambda: len(handler.handled) == 6, "the children's records")
            assert numbers(handler.handled)[2] == 2
            await consumer.stop()
            await running

    run(main)


@pytest.mark.parametrize("way", ["key", "shard", "none", "batches"])
def test_at_the_end_of_a_shard_a_failing_record_gets_its_last_step_at_once_if_so_wished(way):
    async def main():
        async with stream_world(1) as world:
            world.put("bca")
            handler, happened, store = Failing(), [], MemoryLeaseStore()
            consumer = world.consumer(
                app="billing",
                leases=store,
                order="shard" if way == "batches" else way,
                on_failure=Retry(attempts=1000, backoff=0.2 if way == "batches" else 3600.0, backoff_max=3600.0),
                settings=replace(QUICK, at_shard_end="finish"),
                on_event=happened.append,
            )
            work = (
                consumer.run_batches(handler.batch, max_wait=0.05) if way == "batches" else consumer.run(handler.record)
            )
            running = asyncio.create_task(work)
            await until(lambda: handler.failures >= 1, "the failing record")  # a batch is tried again soon
            world.split()

            def stops():
                return [event for event in happened if isinstance(event, events.ShardStopped)]

            await until(stops, "the stop")
            (row,) = await store.read_leases(with_finished=True)
            assert row.stopped is not None
            assert not row.is_finished
            if way != "batches":
                assert handler.failures == 1
                assert "at_shard_end='finish'" in str(stops()[0])
            await consumer.stop()
            await running

            handler.is_mended = True  # a process that starts later tries again, and the children follow
            world.put("xyz")
            later = world.consumer(app="billing", leases=store, order=consumer._handler_options.order, until="tip")
            await later.run(handler.record)
            assert sorted(set(numbers(handler.handled))) == list(range(6))

    run(main)


def test_records_that_come_after_the_failing_one_are_handled_before_the_end_is_made():
    async def main():
        async with stream_world(1) as world:
            world.put("abcd")
            world.split()
            handler, happened = Failing(), []
            consumer = world.consumer(
                app="billing",
                leases="memory://",
                order="key",
                on_failure=Retry(attempts=1000, backoff=3600.0, backoff_max=3600.0),
                settings=replace(QUICK, at_shard_end="finish"),
                on_event=happened.append,
                until="tip",
            )
            with pytest.raises(ShardStoppedError):
                await consumer.run(handler.record)
            assert numbers(handler.handled) == [1, 2, 3]
            assert [event.position for event in happened if isinstance(event, events.ShardStopped)]

    run(main)
