"""What is finished is committed within the interval, in the midst of a page too, however the records are taken."""

import asyncio

import pytest

from anabranch import CheckpointSettings, ConsumerSettings
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import block, run, stream_world, until

WAYS = ["async for", "manual ack", "batches", "record handler", "batch handler"]
SECONDS = 0.1
"""What the work on a record takes, or on a batch of two."""


class WatchedStore(MemoryLeaseStore):
    """Tells how far its one lease is committed, by the numbers of records."""

    def __init__(self):
        super().__init__()
        self.numbers = {}
        """Of the records that were handed out, by position."""
        self.committed = -1
        self._commit = asyncio.Event()

    async def write_lease(self, row, **expected):
        answer = await super().write_lease(row, **expected)
        self.committed = self.numbers.get(row.checkpoint.watermark, self.committed)
        self._commit.set()
        return answer

    async def committed_before(self, number):
        """Until everything before this record is committed."""
        while self.committed < number - 1:
            self._commit.clear()
            await self._commit.wait()


async def consume(way, consumer, work):
    """Takes all records in this way; `work` gets those of one step of it."""
    match way:
        case "async for":
            async for record in consumer:
                await work([record])
        case "manual ack":
            async for record in consumer:
                await work([record])
                consumer.ack(record)
        case "batches":
            async for batch in consumer.batches(max_records=2):
                await work(batch.records)
        case "record handler":

            async def handle(record):
                await work([record])

            await consumer.run(handle, handle_signals=False)
        case "batch handler":

            async def handle_batch(batch):
                await work(batch.records)

            await consumer.run_batches(handle_batch, max_records=2, handle_signals=False)


def commits_in_the_midst(way, settings, seconds=SECONDS):
    """Returns only if everything before the record in hand is committed while the rest of its page waits."""

    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 100)
            store, seen = WatchedStore(), asyncio.Event()

            async def work(records):
                store.numbers |= {record.position: int(record.data) for record in records}
                await asyncio.sleep(seconds)
                if int(records[0].data) >= 6:
                    await store.committed_before(int(records[0].data))
                    seen.set()
                    await asyncio.Event().wait()

            options = {"acknowledge": "manual"} if way == "manual ack" else {}
            async with world.consumer(app="billing", leases=store, settings=settings, **options) as consumer:
                run = asyncio.create_task(consume(way, consumer, work))
                await until(lambda: seen.is_set() or run.done(), "a commit in the midst of a page", 10)
                run.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await run

    run(main)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_finished_is_committed_while_the_rest_of_its_page_waits(way):
    commits_in_the_midst(way, ConsumerSettings())


@pytest.mark.parametrize("way", WAYS)
def test_a_commit_comes_as_soon_as_so_many_records_are_finished(way):
    commits_in_the_midst(way, ConsumerSettings(checkpoints=CheckpointSettings(interval=300, records=1)), 0)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_finished_is_committed_though_the_work_never_waits(way):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 400)  # less than the loop would need to turn by their number
            store, committed_at = WatchedStore(), []

            async def work(records):
                store.numbers |= {record.position: int(record.data) for record in records}
                if store.committed >= 0:
                    committed_at.append(int(records[0].data))
                else:
                    block(0.01)

            options = {"acknowledge": "manual"} if way == "manual ack" else {}
            settings = ConsumerSettings(checkpoints=CheckpointSettings(interval=0.1))
            async with world.consumer(
                app="billing", leases=store, settings=settings, until="tip", **options
            ) as consumer:
                await consume(way, consumer, work)
            assert committed_at, "nothing was committed before the last record"

    run(main)


@pytest.mark.parametrize("seconds", [1.0, 20.0])
def test_without_a_setting_the_store_says_how_often_is_committed(seconds):
    class Store(WatchedStore):
        checkpoint_interval = seconds

    async def main():
        async with stream_world(1) as world:
            store, started = Store(), asyncio.get_running_loop().time()
            consumer = world.consumer(app="billing", leases=store)
            world.put(["a"])

            async def handle(record):
                store.numbers[record.position] = int(record.data)

            running = asyncio.create_task(consumer.run(handle))
            await until(lambda: store.committed >= 0, "the commit")
            assert (asyncio.get_running_loop().time() - started > 10) == (seconds > 10)
            await consumer.stop()
            await running

    run(main)


def test_what_a_loop_acknowledges_after_a_quiet_interval_is_committed_within_the_next_one():
    async def main():
        async with stream_world(1) as world:
            world.put(["user"] * 3)
            store, positions = MemoryLeaseStore(), []
            settings = ConsumerSettings(checkpoints=CheckpointSettings(interval=1.0))
            async with world.consumer(app="billing", leases=store, until="tip", settings=settings) as consumer:
                async for record in consumer:
                    positions.append(record.position)
                    if len(positions) == 1:
                        await asyncio.sleep(1.5)  # an interval passes in which nothing finishes
                    elif len(positions) == 2:
                        await asyncio.sleep(1.05)
                        (row,) = await store.read_leases()
                        assert row.checkpoint.watermark == positions[0]

    run(main)
