"""Two workers of one application, for tests of hand-offs: over sockets, or simulated."""

import asyncio
from dataclasses import replace

from anabranch import events
from anabranch.reasons import CallsOutliveHandOff
from anabranch.stores.memory import MemoryLeaseStore

from stream_world import QUICK, until

TOP = str((1 << 128) - 1)


def settings(hand_off):
    return replace(QUICK, leases=replace(QUICK.leases, drain_deadline=0.3, hand_off=hand_off))


class TwoWorkers:
    """One that holds both shards and is busy with a record of the upper one, and one that joins and wants a shard."""

    def __init__(self, world, hand_off, handle, *, by_batch=False, **options):
        store = MemoryLeaseStore()
        self.happened, self.others, self._joined = [], [], []
        self.first = world.consumer(
            app="billing", leases=store, settings=settings(hand_off), on_event=self.happened.append, **options
        )
        self.second = world.consumer(app="billing", leases=store, on_event=self._joined.append)
        self._run = self.first.run_batches if by_batch else self.first.run
        self._handle = handle
        for number in range(3):
            world.call("PutRecord", PartitionKey="a", ExplicitHashKey=TOP, Data=str(number).encode())

    async def __aenter__(self):
        self._tasks = [asyncio.create_task(self._run(self._handle, handle_signals=False))]
        await until(lambda: len(self.said(events.ShardStarted)) == 2, "both shards")
        return self

    async def join(self):
        self._tasks.append(asyncio.create_task(self.second.run(self.others.append, handle_signals=False)))
        await until(lambda: bool(self._joined), "the second worker")

    def said(self, kind):
        return [event for event in self.happened if isinstance(event, kind)]

    async def __aexit__(self, *_):
        await self.second.stop(deadline=1)
        await self.first.stop(deadline=1)
        await asyncio.gather(*self._tasks)


def reason(consumer):
    """Why the shard of this consumer that has unfinished records does not move."""
    return next((shard.reason for shard in consumer.status().shards if shard.unfinished_count), None)


class _Effects(list):
    def __init__(self, effects):
        super().__init__()
        self._effects = effects

    def append(self, record):
        self._effects.append(("second", int(record.data)))


async def check_forced_hand_off(world, handle, running, effects, go_on):
    """The shard is given only after the call of its first record, which runs until `go_on`, has ended. `handle` adds
    each record to `running` when its call starts, and ("first", number) to `effects` when it ends.
    """
    async with TwoWorkers(world, "force", handle) as workers:
        workers.others = _Effects(effects)
        await until(lambda: bool(running), "the first call")
        await workers.join()
        await until(lambda: bool(workers.said(events.HandOffForced)), "the word that it is forced")
        await until(lambda: reason(workers.first) is not None, "a reason why it stands still")
        assert isinstance(reason(workers.first), CallsOutliveHandOff)
        for _ in range(3):
            await asyncio.sleep(0.1)
            assert not workers.said(events.LeaseGiven), "given while a call of it runs"
        go_on.set()
        await until(lambda: len(effects) == 3, "the rest, by the other worker")
    assert effects == [("first", 0), ("second", 1), ("second", 2)]
