"""Whose leases are taken when: dead workers, workers with other settings, and stores that fail over."""

import asyncio
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_row

from anabranch import events
from anabranch._model.leases import AppRow, HeartbeatWrite, MemberRow
from anabranch.errors import FleetMismatchError
from anabranch.reasons import WorkersFull
from anabranch.stores.memory import MemoryLeaseStore
from memory_rows import StoreThatFailsOverIn, replace_rows

from simulated_stream import QUICK, kinds, run, stream_world, until


async def joined(consumer, shards=1):
    running = asyncio.create_task(consumer.run(lambda _: None))
    await until(lambda: running.done() or len(consumer.status().shards) == shards, f"{shards} shards")
    return running


async def die(consumer, running):
    """Without a last word, as a process that is killed."""
    await consumer._consumer_run.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("known_dead", [True, False])
def test_the_shards_of_a_process_that_is_known_to_be_dead_are_taken_at_once(known_dead):
    class Store(MemoryLeaseStore):
        """As one whose processes run on one machine, where the operating system tells who is dead."""

        dead = ()

        async def poll(self):
            return replace_row(await super().poll(), known_dead=self.dead)

    async def main():
        async with stream_world(1) as world:
            store = Store()
            first = world.consumer(app="billing", leases=store)
            running = await joined(first)
            member_id = first.status().member_id
            await die(first, running)
            if known_dead:
                store.dead = (member_id,)
            begun = asyncio.get_running_loop().time()
            second = world.consumer(app="billing", leases=store)
            running = await joined(second)
            assert (asyncio.get_running_loop().time() - begun < 1) == known_dead
            await second.stop()
            await running

    run(main)


# workers with other settings, as after a store was restored


async def meet_a_stranger(world, joined_wall_ms, happened):
    store = MemoryLeaseStore()
    consumer = world.consumer(app="billing", leases=store, on_event=happened.append)
    running = await joined(consumer)
    await store.register_member(MemberRow(member_id="b#1", expiry_ms=3_000, order="key", joined_wall_ms=joined_wall_ms))
    for beat in range(1, 11):
        await asyncio.sleep(1)
        await store.heartbeat(HeartbeatWrite(member_id="b#1", attempt=beat))
    try:
        await consumer.stop()
    finally:
        await running


def test_a_worker_that_came_before_one_with_other_settings_says_so_once_and_stays():
    async def main():
        async with stream_world(1) as world:
            happened = []
            await meet_a_stranger(world, 10**15, happened)
            (told,) = kinds(happened, events.MemberDiffers)
            assert (told.member_id, told.settings) == ("b#1", "order key; protocol 1.0")

    run(main)


def test_a_worker_that_came_after_one_with_other_settings_ends():
    async def main():
        async with stream_world(1) as world:
            with pytest.raises(FleetMismatchError, match=r"differs from worker 'b' .*order key"):
                await meet_a_stranger(world, -1, [])

    run(main)


def test_a_shard_that_no_worker_may_hold_is_told_of_once():
    async def main():
        async with stream_world(2) as world:
            happened = []
            settings = replace(QUICK, leases=replace(QUICK.leases, max_shards=1))
            consumer = world.consumer(app="billing", leases="memory://", settings=settings, on_event=happened.append)
            running = await joined(consumer)
            await asyncio.sleep(120)
            await consumer.stop()
            await running
            (told,) = kinds(happened, events.ShardStalled)
            assert told.shard_id not in {shard.shard_id for shard in consumer.status().shards}
            assert told.reason == WorkersFull()

    run(main)


# stores that fail over


async def seconds_until_a_free_shard_is_taken(world, store, prepare, happened):
    """Of two workers with one shard each, one leaves; `prepare` is called right after it."""
    first = world.consumer(app="billing", leases=store)
    leaving = asyncio.create_task(first.run(lambda _: None))
    second = world.consumer(app="billing", leases=store, on_event=happened.append)
    running = await joined(second)
    await first.stop()
    prepare()
    begun = asyncio.get_running_loop().time()
    await until(lambda: len(second.status().shards) == 2, "the free shard")
    seconds = asyncio.get_running_loop().time() - begun
    await second.stop()
    await asyncio.gather(leaving, running)
    return seconds


@pytest.mark.parametrize("call", ["poll", "read_streams", "read_app", "read_leases"])
def test_nothing_is_taken_soon_after_a_failed_call_that_was_a_fail_over(call):
    """The owner may be unaware of it, and its lease be forgotten by the storage that the next calls reach."""

    async def main():
        async with stream_world(2) as world:
            store, happened = StoreThatFailsOverIn(call), []

            def fail_over():
                store.is_due = True

            assert await seconds_until_a_free_shard_is_taken(world, store, fail_over, happened) >= 3
            assert kinds(happened, events.StoreRolledBack)

    run(main)


def test_nothing_is_taken_soon_where_the_application_does_not_name_its_storage():
    async def main():
        async with stream_world(1) as world:
            store = MemoryLeaseStore()
            first = world.consumer(app="billing", leases=store, until="tip")
            await first.run(lambda _: None)
            replace_rows(store, AppRow, lambda row: replace_row(row, incarnation=""))
            begun = asyncio.get_running_loop().time()
            second = world.consumer(app="billing", leases=store, until="tip")
            await second.run(lambda _: None)
            assert asyncio.get_running_loop().time() - begun > 3
            assert (await store.read_app()).incarnation == await store.identity()

    run(main)


def test_a_free_shard_of_a_healthy_store_is_taken_at_once():
    async def main():
        async with stream_world(2) as world:
            assert await seconds_until_a_free_shard_is_taken(world, MemoryLeaseStore(), lambda: None, []) < 2

    run(main)
