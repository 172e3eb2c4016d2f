"""A record that kills its worker. Workers are started again and again, as a fleet's are."""

import asyncio
from collections import Counter

import pytest

from anabranch.errors import ShardStoppedError
from anabranch.reasons import StoppedByCrashes
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import run, stream_world

SHARDS, RECORDS = 3, 40
SUSPECTED_FROM_LIFE = 3


class Process:
    """One life of a worker: a record that kills ends it in that step, and nothing of it has an effect any more."""

    checkpoint_interval, publish_interval, warnings = 1.0, 0.0, ()

    def __init__(self, world, store, life, effects, order):
        self._store = store
        self._life = life
        self._effects = effects
        self._died = asyncio.Event()
        self._consumer = world.consumer(app="billing", leases=self, until="tip", order=order)

    def __getattr__(self, name):
        async def call(*arguments, **options):
            if self._died.is_set():
                await asyncio.Event().wait()
            return await getattr(self._store, name)(*arguments, **options)

        return call

    def __str__(self):
        return "memory"

    async def _handle(self, record):
        if record.data == b"poison":
            self._died.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if not self._died.is_set():
            self._effects.append((self._life, record.shard_id, int(record.data)))

    async def live(self):
        """Returns how it ended: it died, reached the tip, or found the shard stopped."""
        running = asyncio.create_task(self._consumer.run(self._handle, handle_signals=False))
        dying = asyncio.create_task(self._died.wait())
        await asyncio.wait([running, dying], return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if self._died.is_set():
            await self._consumer._consumer_run.cancel()
            running.cancel()
            await asyncio.wait([running])
            return "died"
        try:
            await running
        except ShardStoppedError:
            return "stopped"
        return "tip"


async def _live_until_it_is_stopped(world, store, effects, order, deaths_max):
    """Starts a worker again and again; returns how often it died."""
    deaths = 0
    for life in range(1, 100):
        match await Process(world, store, life, effects, order).live():
            case "stopped":
                return deaths
            case "died":
                deaths += 1
                assert deaths <= deaths_max
            case "tip":
                await asyncio.sleep(1)  # the other worker has not found it yet
    raise AssertionError("the shard is never stopped")


def _write(world, before):
    """Writes the same records to each shard, and one that kills to the first. Returns the first shard's id."""
    first, *_ = shards = sorted(world.open_shards(), key=lambda shard: shard["ShardId"])
    for shard in shards:
        where = {"PartitionKey": "p", "ExplicitHashKey": shard["HashKeyRange"]["StartingHashKey"]}
        for number in range(RECORDS):
            if shard is first and number == before:
                world.call("PutRecord", Data=b"poison", **where)
            world.call("PutRecord", Data=str(number).encode(), **where)
    return first["ShardId"]


async def _stopped(store):
    return {row.key.shard_id: row.stopped for row in await store.read_leases() if row.stopped is not None}


@pytest.mark.parametrize("order", ["shard", "key", "none"])
@pytest.mark.parametrize("before, deaths_max", [(0, 5), (30, 8)])
def test_a_record_that_kills_is_named_in_the_end_and_no_other_shard_loses_progress(order, before, deaths_max):
    async def main():
        async with stream_world(SHARDS) as world:
            store, effects = MemoryLeaseStore(), []
            poisoned = _write(world, before)
            assert await _live_until_it_is_stopped(world, store, effects, order, deaths_max) >= 5
            ((shard_id, stop),) = (await _stopped(store)).items()
            assert (shard_id, stop.partition_key) == (poisoned, "p")
            assert stop.reason == StoppedByCrashes(
                position=str(stop.position),
                partition_key=stop.partition_key,
                owner_count=5,
                arrival_seconds=stop.reason.arrival_seconds,
            )
            _check_effects(effects, poisoned, before, order)

    run(main)


def _check_effects(effects, poisoned, before, order):
    handled, since_suspected = Counter(), Counter()
    for life, shard_id, number in effects:
        handled[shard_id, number] += 1
        since_suspected[shard_id, number] += life >= SUSPECTED_FROM_LIFE
    shards = {shard_id for shard_id, _ in handled} - {poisoned}
    assert len(shards) == SHARDS - 1
    assert all(handled[shard_id, number] for shard_id in shards for number in range(RECORDS))
    if order != "none":
        assert {number for shard_id, number in handled if shard_id == poisoned} == set(range(before))
    assert max(since_suspected.values()) == 1, "a death took progress with it"


def test_a_fleet_whose_workers_are_started_again_and_share_their_shards_finds_it_too():
    async def main():
        async with stream_world(SHARDS) as world:
            store, effects = MemoryLeaseStore(), []
            poisoned = _write(world, before=3)
            workers = [_live_until_it_is_stopped(world, store, effects, "shard", 20) for _ in range(2)]
            assert 5 <= sum(await asyncio.gather(*workers)) <= 20
            assert list(await _stopped(store)) == [poisoned]
            assert len({(shard_id, number) for _, shard_id, number in effects}) == (SHARDS - 1) * RECORDS + 3

    run(main)
