"""A stream that is deleted, or deleted and created anew, while it is read: nothing of it is finished by that."""

import asyncio
from dataclasses import replace

import pytest

from anabranch import events
from anabranch.errors import StreamDeletedError, StreamRecreatedError
from anabranch.stores.memory import MemoryLeaseStore

from stream_world import QUICK, check_order, now_ms, run, stream_world, until

RESTART = replace(QUICK, on_recreated="restart")


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


def test_a_stream_that_is_created_anew_ends_its_workers_unless_they_were_told_otherwise():
    async def main():
        async with stream_world(2) as world:
            world.put("abcdef")
            store, seen = MemoryLeaseStore(), []
            _, running = start(world, seen, leases=store)
            await until(lambda: len(seen) == 6, "all records")
            await create_anew(world, 1)
            with pytest.raises(StreamRecreatedError, match="on_recreated='restart'"):
                await running
            assert not [row for row in await store.read_leases(with_finished=True) if row.is_finished]

    run(main)


def test_workers_that_were_told_so_go_on_with_the_new_stream():
    async def main():
        async with stream_world(4) as world:
            store, seen, happened = MemoryLeaseStore(), [], []
            options = {"leases": store, "settings": RESTART, "on_event": happened.append}
            fleet = [start(world, seen, **options) for _ in range(2)]
            joined = [lambda w=w: w._consuming and len(w.status().shards) == 2 for w, _ in fleet]
            await until(lambda: all(has_share() for has_share in joined), "a share for each")
            world.put("abcdefgh")
            await until(lambda: len(seen) == 8, "all records of the old stream")
            await create_anew(world, 6)
            world.put("abcdefgh" * 2)
            await until(lambda: len(seen) == 24, "all records of the new stream")
            check_order(seen)
            await until(lambda: sum(len(w.status().shards) for w, _ in fleet) == 6, "the old leases to be released")
            old, new = await store.read_streams()
            rows = await store.read_leases(with_finished=True)
            assert not [row for row in rows if row.is_finished]
            assert not [row for row in rows if row.key.stream_key == old.stream_key and row.owner is not None]
            assert len([row for row in rows if row.key.stream_key == new.stream_key]) == 6
            assert sum(isinstance(event, events.StreamChanged) for event in happened) == 2
            for consumer, running in fleet:
                await consumer.stop()
                assert (await running).clean

    run(main)


def test_a_worker_without_shards_makes_no_leases_of_the_new_stream_among_those_of_the_old():
    async def main():
        async with stream_world(1) as world:
            store, seen = MemoryLeaseStore(), []
            fleet = [start(world, seen, leases=store) for _ in range(2)]
            await until(lambda: all(w._consuming and w._consuming.worker.has_joined for w, _ in fleet), "both")
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
            (session,) = consumer._consuming.worker.sessions.values()
            session.iterator = None  # as after an iterator that expired
            consumer.resume()
            with pytest.raises(StreamRecreatedError):
                await running

    run(main)


def test_a_shard_that_was_never_read_is_not_begun_in_another_stream():
    async def main():
        async with stream_world(1) as world:
            seen = []
            consumer, running = start(world, seen, leases="memory://")
            await until(lambda: consumer._consuming and consumer.status().shards, "the shard")
            consumer.pause()
            await create_anew(world, 1)
            world.put("abc")
            (session,) = consumer._consuming.worker.sessions.values()
            session.iterator = None  # as after an iterator that expired: the beginning of a shard is asked for again
            consumer.resume()
            with pytest.raises(StreamRecreatedError):
                await running
            assert seen == []

    run(main)
