"""Two workers of one application, for tests of hand-offs: over sockets, or simulated."""

import asyncio
from dataclasses import replace

from anabranch import events
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
