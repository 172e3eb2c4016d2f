"""A shard on which owners died: its records are handled alone, with everything else at rest and committed."""

import asyncio

import pytest

from anabranch import Retry, events
from anabranch._model.leases import MemberRow
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import run, stream_world, until

RECORDS = 12


class Fleet:
    """A stream of two shards, on the first of which owners have died; and what a handler sees of both."""

    def __init__(self, world, deaths):
        self.world = world
        self.deaths = deaths
        self.store = MemoryLeaseStore()
        self.happened = []
        self.suspect, self.other = sorted(shard["ShardId"] for shard in world.open_shards())
        self.handled = {self.suspect: [], self.other: []}
        self.running = {self.suspect: 0, self.other: 0}

    def consumer(self, **options):
        return self.world.consumer(
            app="billing", leases=self.store, until="tip", on_event=self.happened.append, **options
        )

    async def prepare(self):
        await self.consumer().run(lambda record: None, handle_signals=False)
        for shard in self.world.open_shards():
            for number in range(RECORDS):
                self.world.call(
                    "PutRecord",
                    PartitionKey=f"key-{number % 4}",
                    ExplicitHashKey=shard["HashKeyRange"]["StartingHashKey"],
                    Data=str(number).encode(),
                )
        for death in range(self.deaths):
            row = await self.row(self.suspect)
            member = MemberRow(member_id=f"dead#{death}", expiry_ms=3_000)
            await self.store.register_member(member)
            await self.store.take_lease(
                row.key, member.member_id, expected_owner=row.owner, expected_version=row.version
            )
            await self.store.leave(member.member_id)

    async def row(self, shard_id):
        (row,) = [row for row in await self.store.read_leases() if row.key.shard_id == shard_id]
        return row

    async def handle(self, record):
        await self.begin(record)
        await asyncio.sleep(0.005)
        self.end(record)

    async def begin(self, record):
        self.running[record.shard_id] += 1
        if record.shard_id == self.suspect and "suspected" in self.words:
            assert self.running == {self.suspect: 1, self.other: 0}, "not alone"
            for shard_id, done in self.handled.items():
                assert (await self.row(shard_id)).records_handled == len(done), f"{shard_id} is not committed"

    def end(self, record):
        self.running[record.shard_id] -= 1
        self.handled[record.shard_id].append(int(record.data))

    @property
    def words(self):
        return ["suspected"] if any(isinstance(event, events.ShardSuspected) for event in self.happened) else []

    def check(self):
        assert {shard_id: sorted(done) for shard_id, done in self.handled.items()} == {
            self.suspect: list(range(RECORDS)),
            self.other: list(range(RECORDS)),
        }


async def _in_a_run(fleet, **options):
    await fleet.consumer(concurrency=8, on_failure=Retry(attempts=1), **options).run(fleet.handle, handle_signals=False)


async def _in_batches(fleet):
    async def handle(batch):
        if batch.shard_id == fleet.suspect and fleet.words:
            assert len(batch) == 1
        for record in batch:
            await fleet.handle(record)

    consumer = fleet.consumer(on_failure=Retry(attempts=1))
    await consumer.run_batches(handle, max_wait=0.05, handle_signals=False)


async def _in_a_loop(fleet):
    async with fleet.consumer() as consumer:
        async for record in consumer:
            await fleet.handle(record)


WAYS = {
    "run by shard": _in_a_run,
    "run by key": lambda fleet: _in_a_run(fleet, order="key"),
    "run in no order": lambda fleet: _in_a_run(fleet, order="none"),
    "run_batches": _in_batches,
    "loop": _in_a_loop,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_records_of_a_suspect_are_handled_alone_and_committed_one_by_one(way):
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world, deaths=2)
            await fleet.prepare()
            await WAYS[way](fleet)
            fleet.check()
            assert fleet.words, "no suspect"
            assert not [event for event in fleet.happened if isinstance(event, events.ShardStopped)]
            assert (await fleet.row(fleet.suspect)).takes_without_progress == 0

    run(main)


def test_a_shard_on_which_one_owner_died_is_no_suspect():
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world, deaths=1)
            await fleet.prepare()
            await _in_a_run(fleet)
            fleet.check()
            assert not fleet.words

    run(main)


def test_a_suspect_that_is_not_tried_is_not_to_blame():
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world, deaths=2)
            await fleet.prepare()
            go_on, begun = asyncio.Event(), []

            async def handle(record):
                begun.append(record)
                await go_on.wait()

            consumer = fleet.consumer(concurrency=8)
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(lambda: bool(begun), "a record")
            takes = (await fleet.row(fleet.suspect)).takes_without_progress
            assert takes == (3 if begun[0].shard_id == fleet.suspect else 2)
            go_on.set()
            await running

    run(main)
