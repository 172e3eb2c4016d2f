"""Order through resharding: the four cases of a well-behaved consumer, stateful and ephemeral, and the cases between.

In every one of them the promise is the same: at no time are the records of a partition key handled in any order but the
one in which they were written, and none is left out.
"""

import asyncio

import msgspec
import pytest

from anabranch import events
from anabranch._wire.aggregate import PRODUCER_TAG, AggregateBuilder
from anabranch.records import Record
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import check_order, numbers, run, stream_world, until

KEYS = [f"user-{i}" for i in range(12)]


async def _consume_while(world, change, **options):
    """Reads, changes the stream while reading, writes more, and reads that too."""
    seen: list[Record[bytes]] = []
    world.put(KEYS * 3)
    changed = False
    async with world.consumer(idle_timeout=0.8, start="trim_horizon", **options) as consumer:
        async for record in consumer:
            seen.append(record)
            if not changed:
                changed = True
                change()
                world.put(KEYS * 3)
    return seen


@pytest.mark.parametrize("options", [{"app": "billing", "leases": "memory://"}, {}], ids=["stateful", "ephemeral"])
def test_a_shard_splits_while_the_consumer_is_online(options):
    async def main():
        async with stream_world(1) as world:
            seen = await _consume_while(world, world.split, **options)
            check_order(seen)
            assert sorted(numbers(seen)) == list(range(world.put_count))

    run(main)


@pytest.mark.parametrize("options", [{"app": "billing", "leases": "memory://"}, {}], ids=["stateful", "ephemeral"])
def test_two_shards_merge_while_the_consumer_is_online(options):
    async def main():
        async with stream_world(2) as world:
            seen = await _consume_while(world, world.merge, **options)
            check_order(seen)
            assert sorted(numbers(seen)) == list(range(world.put_count))

    run(main)


class CountingStore(MemoryLeaseStore):
    whole_reads = 0

    async def read_leases(self, *, with_finished=False):
        self.whole_reads += with_finished
        return await super().read_leases(with_finished=with_finished)


def test_while_children_wait_for_their_parent_listings_do_not_read_all_rows():
    async def main():
        async with stream_world(1) as world:
            store, may_end, seen = CountingStore(), asyncio.Event(), []
            world.put(KEYS)

            async def handle(record):
                await may_end.wait()
                seen.append(record)

            consumer = world.consumer(app="billing", leases=store, start="trim_horizon")
            running = asyncio.create_task(consumer.run(handle))
            world.split()
            world.put(KEYS)
            await asyncio.sleep(120)
            before = store.whole_reads
            await asyncio.sleep(600)  # twenty listings
            assert store.whole_reads == before
            may_end.set()
            await until(lambda: len(seen) == world.put_count, "all records")
            check_order(seen)
            await consumer.stop()
            await running

    run(main, seconds=2_000)


@pytest.mark.parametrize("change", ["split", "merge"])
def test_a_stateful_consumer_was_offline_during_a_reshard(change):
    async def main():
        async with stream_world(2) as world:
            options = {"app": "billing", "leases": MemoryLeaseStore(), "until": "tip"}
            world.put(KEYS * 2)
            seen: list[Record[bytes]] = []
            for round_number in range(3):
                async with world.consumer(**options) as consumer:
                    seen.extend([record async for record in consumer])
                world.put(KEYS)
                if round_number == 0:
                    getattr(world, change)()
                world.put(KEYS)
            async with world.consumer(app="billing", leases=options["leases"], idle_timeout=0.8) as consumer:
                seen.extend([record async for record in consumer])
            check_order(seen)
            assert sorted(numbers(seen)) == list(range(world.put_count))

    run(main)


@pytest.mark.parametrize("change", ["split", "merge"])
def test_an_ephemeral_consumer_that_was_offline_starts_at_the_tip(change):
    async def main():
        async with stream_world(2, state_delay=0) as world:
            world.put(KEYS)
            getattr(world, change)()
            world.put(KEYS)
            seen: list[Record[bytes]] = []
            async with world.consumer(idle_timeout=1) as consumer:
                async for record in consumer:
                    seen.append(record)
                    if len(seen) == 1:
                        world.put(KEYS)
            # `latest` is pinned five seconds back: older records may come too, and none of the newer is missing.
            check_order(seen)
            assert set(numbers(seen)) >= set(range(world.put_count - len(KEYS), world.put_count))

    run(main)


def test_an_ephemeral_consumer_reads_shards_that_opened_and_closed_between_two_listings():
    async def main():
        async with stream_world(1) as world:

            def split_twice():
                world.split()
                world.put(KEYS)
                for shard in world.open_shards():
                    world.split(shard["ShardId"])

            seen = await _consume_while(world, split_twice)
            check_order(seen)
            assert sorted(numbers(seen)) == list(range(world.put_count))

    run(main)


@pytest.mark.parametrize("options", [{"app": "billing", "leases": "memory://"}, {}], ids=["stateful", "ephemeral"])
def test_a_start_inside_the_second_after_a_split_misses_nothing_written_afterwards(options):
    async def main():
        async with stream_world(1) as world:
            world.put(KEYS)
            world.split()
            first_after = world.put_count
            world.put(KEYS)
            async with world.consumer(start="latest", idle_timeout=1, **options) as consumer:
                seen = [record async for record in consumer]
            check_order(seen)
            assert set(numbers(seen)) >= set(range(first_after, world.put_count))

    run(main)


@pytest.mark.parametrize("order", ["shard", "key"])
def test_a_child_waits_until_its_parents_last_record_is_finished(order):
    async def main():
        async with stream_world(2) as world:
            world.put(KEYS * 5)
            world.merge()
            world.put(KEYS * 5)
            running: dict[str, int] = {}
            started: list[Record[bytes]] = []

            async def handle(record):
                parents_running = [shard for shard, count in running.items() if count and shard < record.shard_id]
                assert record.shard_id != "shardId-000000000002" or not parents_running
                running[record.shard_id] = running.get(record.shard_id, 0) + 1
                started.append(record)
                await until(lambda: True, "a turn of the loop")
                running[record.shard_id] -= 1

            report = await world.consumer(app="billing", leases="memory://", order=order, idle_timeout=0.8).run(handle)
            assert report.clean
            check_order(started)
            assert sorted(numbers(started)) == list(range(world.put_count))

    run(main)


def test_a_stream_that_places_records_itself_is_read_whole_and_said_to_have_no_order():
    """No sub-record is in a wrong shard where there is no right one: what another writer aggregated is delivered."""
    aggregate = AggregateBuilder()
    for number in range(8):
        tags = (PRODUCER_TAG,) if number == 0 else ()
        assert aggregate.add(KEYS[number], b"%d" % number, tags=tags, size_max=1 << 20)
    happened = []

    async def main():
        async with stream_world() as world:
            world.stream = "clicks"
            world.call(
                "CreateStream",
                StreamModeDetails={"StreamMode": "ON_DEMAND"},
                RecordDistributionStrategy="AUTO",
            )
            world.call("PutRecord", PartitionKey=KEYS[0], Data=aggregate.finish())
            async with world.consumer(start="trim_horizon", until="tip", on_event=happened.append) as consumer:
                seen = [record async for record in consumer]
            assert sorted(numbers(seen)) == list(range(8))
            assert not any(record.misrouted for record in seen)

    run(main)
    (event,) = [event for event in happened if isinstance(event, events.KeysUnordered)]
    assert event.stream == "clicks"


class SeesEnds:
    """A service that answers one read as if the shard had ended, or names no children at the ends of shards."""

    def __init__(self, client, *, false_ends=0):
        self._client = client
        self.false_ends = false_ends

    def __getattr__(self, name):
        return getattr(self._client, name)

    async def get_records(self, stream, iterator, **options):
        response = await self._client.get_records(stream, iterator, **options)
        if response.next_shard_iterator is None:
            return msgspec.structs.replace(response, child_shards=())
        if self.false_ends:
            self.false_ends -= 1
            return msgspec.structs.replace(response, next_shard_iterator=None)
        return response


@pytest.mark.parametrize("false_ends", [0, 2])
def test_an_end_without_children_is_accepted_only_if_the_listing_shows_it_too(false_ends):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            if not false_ends:
                world.split()
            world.put(["a"] * 3)
            async with world.consumer(app="billing", leases="memory://", until="tip") as consumer:
                ports = await consumer._open()
                object.__setattr__(ports, "kinesis", SeesEnds(ports.kinesis, false_ends=false_ends))
                assert numbers([record async for record in consumer]) == [0, 1, 2, 3, 4, 5]

    run(main)
