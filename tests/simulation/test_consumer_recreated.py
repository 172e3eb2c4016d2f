"""A stream that is deleted, or deleted and created anew, while it is read: nothing of it is finished by that."""

import asyncio

import pytest

from anabranch import events
from anabranch.errors import StreamDeletedError, StreamRecreatedError
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import now_ms, polled_shards, run, stream_world, until


async def create_anew(world, shards):
    """In one step, as far as readers can see; a stream is known by the second in which it was created."""
    created_second = now_ms() // 1000
    await until(lambda: now_ms() // 1000 > created_second, "another second")
    world.call("DeleteStream")
    world.call("CreateStream", ShardCount=shards)


def start(world, seen, **options):
    consumer = world.consumer(app="billing", **options)
    return consumer, asyncio.create_task(consumer.run(seen.append, handle_signals=False))


def test_a_stream_that_is_deleted_ends_its_workers_and_finishes_nothing():
    async def main():
        async with stream_world(2) as world:
            world.put("abcdef")
            store, seen, happened = MemoryLeaseStore(), [], []
            _, running = start(world, seen, leases=store, on_event=happened.append)
            await until(lambda: len(seen) == 6, "all records")
            world.call("DeleteStream")
            with pytest.raises(StreamDeletedError, match="nothing was marked as finished"):
                await running
            assert not [row for row in await store.read_leases(with_finished=True) if row.is_finished]
            assert "deleted" in str(next(event for event in happened if isinstance(event, events.StreamChanged)))

    run(main)


def test_a_stream_that_is_created_again_ends_its_workers():
    async def main():
        async with stream_world(2) as world:
            world.put("abcdef")
            store, seen = MemoryLeaseStore(), []
            _, running = start(world, seen, leases=store)
            await until(lambda: len(seen) == 6, "all records")
            await create_anew(world, 1)
            with pytest.raises(StreamRecreatedError, match="restart the worker to read the new stream"):
                await running
            assert not [row for row in await store.read_leases(with_finished=True) if row.is_finished]

    run(main)


def test_a_worker_without_shards_makes_no_leases_of_the_new_stream_among_those_of_the_old():
    async def main():
        async with stream_world(1) as world:
            store, seen = MemoryLeaseStore(), []
            fleet = [start(world, seen, leases=store) for _ in range(2)]
            await until(lambda: all(w._consumer_run and w._consumer_run.has_joined for w, _ in fleet), "both")
            await create_anew(world, 3)
            for _, running in fleet:
                with pytest.raises(StreamRecreatedError):
                    await running
            assert len(await store.read_leases(with_finished=True)) == 1

    run(main)


def test_a_place_in_the_old_stream_that_is_asked_for_in_the_new_one_is_recognised():
    async def main():
        async with stream_world(1) as world:
            world.put("abc")
            seen = []
            consumer, running = start(world, seen, leases="memory://")
            await until(lambda: len(seen) == 3, "all records")
            consumer.pause()
            await create_anew(world, 1)
            (shard,) = polled_shards(consumer)
            shard.iterator = None  # as after an iterator that expired
            consumer.resume()
            with pytest.raises(StreamRecreatedError):
                await running

    run(main)


def test_a_shard_that_was_never_read_is_not_begun_in_another_stream():
    async def main():
        async with stream_world(1) as world:
            seen = []
            consumer, running = start(world, seen, leases="memory://")
            await until(lambda: consumer._consumer_run and consumer.status().shards, "the shard")
            consumer.pause()
            await create_anew(world, 1)
            world.put("abc")
            (shard,) = polled_shards(consumer)
            shard.iterator = None  # as after an iterator that expired: the beginning of a shard is asked for again
            consumer.resume()
            with pytest.raises(StreamRecreatedError):
                await running
            assert seen == []

    run(main)
