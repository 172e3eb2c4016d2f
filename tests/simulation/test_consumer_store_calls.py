"""How often a fleet at rest calls its lease store."""

import asyncio
from collections import Counter
from functools import wraps

from anabranch import ConsumerSettings
from anabranch._model.leases import LeaseRow
from anabranch.stores.memory import MemoryLeaseStore
from memory_rows import stored

from simulated_stream import run, stream_world, until

WORKERS = 3
SHARDS = 12
MINUTES = 10


class CountingStore(MemoryLeaseStore):
    def __init__(self):
        super().__init__()
        self.calls = Counter()
        for name in ("poll", "read_leases", "read_lease", "read_streams", "heartbeat", "write_lease", "write_status"):
            setattr(self, name, self._counted(getattr(self, name), name))

    def _counted(self, call, name):
        @wraps(call)
        async def counted(*arguments, **options):
            self.calls[name] += 1
            return await call(*arguments, **options)

        return counted

    def count(self, name):
        """Of one worker, in a minute."""
        return self.calls[name] / (WORKERS * MINUTES)


def owned(store):
    counts = Counter(row.owner for row in stored(store, LeaseRow))
    return sorted(counts.values()) == [SHARDS // WORKERS] * WORKERS


def test_a_fleet_at_rest_reads_all_leases_once_a_minute_and_polls_once_a_second():
    async def main():
        store = CountingStore()
        async with stream_world(SHARDS) as world:
            consumers = [
                world.consumer(app="billing", leases=store, settings=ConsumerSettings()) for _ in range(WORKERS)
            ]
            running = [asyncio.create_task(one.run(lambda record: None, handle_signals=False)) for one in consumers]
            await until(lambda: owned(store), "fair shares")
            await asyncio.sleep(120)
            store.calls.clear()
            await asyncio.sleep(MINUTES * 60)
            assert 0.9 <= store.count("read_leases") <= 1.0
            assert store.count("read_lease") == 0
            assert 55 <= store.count("poll") <= 60
            assert 23 <= store.count("heartbeat") <= 25
            assert store.count("write_lease") == 0
            assert store.count("write_status") == 0
            for consumer in consumers:
                await consumer.stop()
            await asyncio.gather(*running)

    run(main, seconds=3_600)


def test_a_lease_that_moves_is_read_by_its_key():
    async def main():
        store = CountingStore()
        async with stream_world(SHARDS) as world:
            consumers = [world.consumer(app="billing", leases=store) for _ in range(WORKERS)]
            running = [asyncio.create_task(one.run(lambda record: None, handle_signals=False)) for one in consumers]
            await until(lambda: owned(store), "fair shares")
            await asyncio.sleep(61)
            store.calls.clear()
            parent = world.open_shards()[0]["ShardId"]
            world.split(parent)
            await until(lambda: any(row.is_finished for row in stored(store, LeaseRow)), "the end of the parent")
            await asyncio.sleep(5)
            live = [row for row in stored(store, LeaseRow) if not row.is_finished]
            assert len(live) == SHARDS + 1
            assert all(row.owner is not None for row in live)
            # The parent and its children; the end of the parent also reads all rows, and the next listing does.
            assert store.calls["read_lease"] >= 3 * (WORKERS - 1)
            assert store.calls["read_leases"] <= 1 + WORKERS * 2
            for consumer in consumers:
                await consumer.stop()
            await asyncio.gather(*running)

    run(main, seconds=3_600)
