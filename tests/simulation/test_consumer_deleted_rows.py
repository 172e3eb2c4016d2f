"""Somebody deletes the lease row of a shard: it is named, the other shards go on, and its owner creates it again."""

import asyncio

from msgspec.structs import replace

from anabranch import events
from anabranch._model.leases import LeaseRow
from anabranch.stores.memory import MemoryLeaseStore
from memory_rows import stored

from simulated_stream import HALF, numbers, run, stream_world, until

FIRST, SECOND = (f"shardId-{number:012d}" for number in range(2))
KEYS = {FIRST: "a", SECOND: "b"}
"""A partition key of each shard."""


class Fleet:
    def __init__(self, world):
        self.world = world
        self.store = MemoryLeaseStore()
        self.seen = []
        self.happened = []
        self.running = {}
        self.hold_back = ("", asyncio.Event())
        self.is_holding_back = False

    async def start(self, name="worker"):
        consumer = self.world.consumer(app="billing", leases=self.store, on_event=self.happened.append)
        task = asyncio.create_task(consumer.run(self.handle, handle_signals=False))
        self.running[name] = (consumer, task)
        await until(lambda: consumer.status().member_id is not None, "the worker")

    async def handle(self, record):
        shard_id, event = self.hold_back
        if record.shard_id == shard_id:
            self.is_holding_back = True
            await event.wait()
        self.seen.append(record)

    async def stop(self, name="worker"):
        consumer, task = self.running.pop(name)
        await consumer.stop()
        await task

    async def kill(self, name):
        """It leaves no word."""
        _, task = self.running.pop(name)
        self.store.leave = _leave_nothing
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del self.store.leave

    async def put(self, shard_id, count):
        self.world.put([KEYS[shard_id]] * count)
        seen = len(self.seen)
        await until(lambda: len(self.seen) == seen + count, "the records")
        await asyncio.sleep(2)  # a commit

    def row(self, shard_id):
        return next((row for row in stored(self.store, LeaseRow) if row.key.shard_id == shard_id), None)

    def delete(self, shard_id):
        deleted = self.row(shard_id)
        for rows in self.store.rows.places.values():
            for key in [key for key, row in rows.items() if row is deleted]:
                del rows[key]
        return deleted

    def told(self):
        return [event for event in self.happened if isinstance(event, events.LeaseRowDeleted)]

    def shards(self, kind):
        return [event.shard_id for event in self.happened if isinstance(event, kind)]


async def _leave_nothing(member_id):
    await asyncio.sleep(3600)


def test_a_row_that_is_deleted_while_its_shard_is_handled_is_created_again_and_nothing_is_repeated():
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world)
            await fleet.start()
            await fleet.put(FIRST, 3)
            deleted = fleet.delete(FIRST)
            await fleet.put(FIRST, 3)
            await fleet.put(SECOND, 3)
            restored = fleet.row(FIRST)
            assert (restored.owner, restored.epoch, restored.records_handled) == (deleted.owner, deleted.epoch, 6)
            (told,) = fleet.told()
            assert (told.shard_id, told.repeats, told.position) == (
                FIRST,
                False,
                str(restored.checkpoint.watermark),
            )
            assert not fleet.shards(events.LeaseLost)
            assert not fleet.shards(events.MemberEnded)
            await fleet.stop()
            await fleet.start()
            await asyncio.sleep(10)
            assert numbers(fleet.seen) == list(range(9))
            await fleet.stop()

    run(main)


def test_the_row_of_an_idle_shard_is_created_again_within_a_minute():
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world)
            await fleet.start()
            await fleet.put(FIRST, 3)
            deleted = fleet.delete(FIRST)
            await asyncio.sleep(61)
            assert fleet.row(FIRST).checkpoint == deleted.checkpoint
            assert [event.repeats for event in fleet.told()] == [False]
            await fleet.stop()

    run(main)


def test_a_worker_that_knew_the_row_of_a_dead_owner_creates_it_again_where_it_last_saw_it():
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world)
            await fleet.start("one")
            await fleet.start("two")
            await until(lambda: len({row.owner for row in stored(fleet.store, LeaseRow)} - {None}) == 2, "their shares")
            await fleet.put(FIRST, 3)
            await asyncio.sleep(61)  # the other one looks at all leases
            await fleet.put(FIRST, 2)
            owner = fleet.row(FIRST).owner
            dead = next(name for name, (one, _) in fleet.running.items() if one.status().member_id == owner)
            deleted = fleet.delete(FIRST)
            await fleet.kill(dead)
            await until(lambda: len(fleet.seen) == 7, "the records after the position that was seen")
            assert numbers(fleet.seen) == [0, 1, 2, 3, 4, 3, 4]
            (told,) = fleet.told()
            assert (told.shard_id, told.repeats) == (FIRST, True)
            assert fleet.row(FIRST).epoch > deleted.epoch
            await fleet.stop(*fleet.running)

    run(main)


def test_a_row_that_no_live_worker_knew_is_created_again_at_the_start_with_a_higher_fence_token():
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world)
            await fleet.start()
            await fleet.put(FIRST, 2)
            await fleet.put(SECOND, 2)
            await fleet.stop()
            deleted = fleet.delete(FIRST)
            await fleet.start()
            world.put([KEYS[SECOND]])
            await until(lambda: len(fleet.seen) == 5, "the other shard goes on at once")
            assert not fleet.told()
            await until(lambda: len(fleet.seen) == 7, "the records of the first one", seconds=120)
            assert numbers(fleet.seen) == [0, 1, 2, 3, 4, 0, 1]
            (told,) = fleet.told()
            assert (told.shard_id, told.repeats, told.position) == (FIRST, True, None)
            assert fleet.row(FIRST).fence_token > deleted.fence_token
            await fleet.stop()

    run(main)


def test_a_worker_that_joins_after_the_deletion_leaves_the_row_to_its_live_owner():
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world)
            await fleet.start("one")
            await fleet.put(FIRST, 3)
            fleet.delete(FIRST)
            await fleet.start("two")
            await asyncio.sleep(120)
            assert [event.repeats for event in fleet.told()] == [False]
            assert numbers(fleet.seen) == [0, 1, 2]
            await fleet.stop("one")
            await fleet.stop("two")

    run(main)


def test_the_only_row_of_a_stream_is_created_again_too():
    async def main():
        async with stream_world(1) as world:
            fleet = Fleet(world)
            await fleet.start("one")
            await fleet.start("idle")
            await fleet.put(FIRST, 2)
            fleet.delete(FIRST)
            await asyncio.sleep(200)
            assert fleet.row(FIRST) is not None
            assert numbers(fleet.seen) == [0, 1]
            await fleet.stop("one")
            await fleet.stop("idle")

    run(main)


def test_a_child_waits_for_a_parent_whose_row_was_deleted_while_it_was_read():
    """The third worker has never seen the parent's row."""

    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world)
            await fleet.start("one")
            await fleet.start("two")
            await until(lambda: len({row.owner for row in stored(fleet.store, LeaseRow)} - {None}) == 2, "their shares")
            parent = fleet.row(SECOND)
            world.put([KEYS[FIRST]] * 2 + [KEYS[SECOND]] * 2)
            await until(lambda: len(fleet.seen) == 4, "the records")
            slow = asyncio.Event()
            fleet.hold_back = (SECOND, slow)
            world.put([KEYS[SECOND]])
            await until(lambda: fleet.is_holding_back, "a slow call")
            world.call("MergeShards", ShardToMerge=FIRST, AdjacentShardToMerge=SECOND)
            child = f"shardId-{2:012d}"
            await until(lambda: fleet.row(child) is not None, "the child's row", seconds=60)
            assert fleet.row(child).waits_for == (FIRST, SECOND)
            fleet.delete(SECOND)
            world.put(["c"])
            await fleet.start("three")
            await asyncio.sleep(20)
            assert fleet.row(child).epoch == 0
            slow.set()
            await until(lambda: len(fleet.seen) == 6, "the rest", seconds=120)
            assert [record.shard_id for record in fleet.seen][-2:] == [SECOND, child]
            assert fleet.row(child).fence_token > parent.fence_token
            assert [event.repeats for event in fleet.told()] == [False]
            for name in tuple(fleet.running):
                await fleet.stop(name)

    run(main)


def test_a_finished_row_that_is_deleted_before_its_children_started_is_read_again_first():
    async def main():
        async with stream_world(1) as world:
            fleet = Fleet(world)
            await fleet.start()
            await fleet.put(FIRST, 2)
            await fleet.stop()
            world.call("SplitShard", ShardToSplit=FIRST, NewStartingHashKey=HALF)
            left, right = (f"shardId-{number:012d}" for number in (1, 2))
            key = fleet.row(FIRST).key
            for child in (left, right):
                row = LeaseRow(key=replace(key, shard_id=child), waits_for=(FIRST,))
                await fleet.store.create_lease(row)
            fleet.delete(FIRST)
            world.put(["c"])
            await fleet.start()
            await until(lambda: len(fleet.seen) == 5, "the parent again, then the child", seconds=120)
            assert [record.shard_id for record in fleet.seen][2:4] == [FIRST, FIRST]
            assert fleet.seen[4].shard_id in {left, right}
            assert [event.repeats for event in fleet.told()] == [True]
            await fleet.stop()

    run(main)


def test_a_job_does_not_end_at_the_tip_while_a_shard_has_no_row():
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world)
            await fleet.start()
            await fleet.put(FIRST, 2)
            await fleet.stop()
            fleet.delete(SECOND)
            world.put([KEYS[SECOND]])
            job = world.consumer(app="billing", leases=fleet.store, until="tip", on_event=fleet.happened.append)
            await job.run(fleet.seen.append, handle_signals=False)
            assert numbers(fleet.seen) == [0, 1, 2]

    run(main)
