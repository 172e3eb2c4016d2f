"""A lease store that does not answer for a while: nothing is lost by it, and it is said what is wrong."""

import asyncio
from dataclasses import replace

import pytest

from anabranch import CheckpointSettings, events
from anabranch.errors import LeaseStoreError
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import QUICK, numbers, run, stream_world, until

SELDOM = replace(QUICK, checkpoints=CheckpointSettings(interval=60))


class Store(MemoryLeaseStore):
    """Leaves some calls without an answer."""

    def __init__(self, *names):
        super().__init__()
        self._names = names
        self.unanswered = 0

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "__dict__").get("_names", ()):
            return self._away(super().__getattribute__(name))
        return super().__getattribute__(name)

    def _away(self, call):
        async def answer(*arguments, **options):
            if self.unanswered:
                self.unanswered -= 1
                raise LeaseStoreError("the disk is full")
            return await call(*arguments, **options)

        return answer


@pytest.mark.parametrize("call", ["write_lease", "leave"])
def test_a_last_word_that_got_no_answer_is_said_again(call):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            store, seen = Store(call), []
            consumer = world.consumer(app="billing", leases=store, settings=SELDOM)
            running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
            await until(lambda: len(seen) == 3, "the records")
            store.unanswered = 2
            assert (await consumer.stop()).clean
            await running
            await world.consumer(app="billing", leases=store, until="tip").run(seen.append, handle_signals=False)
            assert numbers(seen) == [0, 1, 2]

    run(main)


def test_a_stop_whose_last_word_gets_no_answer_ends_at_its_deadline():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            store, seen = Store("write_lease"), []
            consumer = world.consumer(app="billing", leases=store, settings=SELDOM)
            running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
            await until(lambda: len(seen) == 1, "the record")
            store.unanswered = 1_000_000
            report = await consumer.stop(deadline=0.5)
            assert not report.committed
            assert report.released
            await running

    run(main)


def test_what_is_wrong_with_the_store_is_said_where_a_commit_fails():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            store, happened = Store("write_lease"), []
            store.unanswered = 1
            consumer = world.consumer(app="billing", leases=store, on_event=happened.append)
            running = asyncio.create_task(consumer.run(lambda record: None, handle_signals=False))
            await until(lambda: any(isinstance(event, events.CheckpointFailed) for event in happened), "the event")
            await consumer.stop()
            await running
            (said,) = [str(event) for event in happened if isinstance(event, events.CheckpointFailed)]
            assert "the disk is full" in said

    run(main)


def test_a_shard_that_stalls_without_heartbeats_reports_the_reason():
    async def main():
        async with stream_world(1) as world:
            store, seen, happened = Store("heartbeat", "poll"), [], []
            consumer = world.consumer(app="billing", leases=store, on_event=happened.append)
            running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
            await until(lambda: any(isinstance(event, events.ShardStarted) for event in happened), "the start")
            store.unanswered = 1_000_000
            await until(lambda: any(isinstance(event, events.ShardStalled) for event in happened), "the event")
            assert consumer.status().fenced
            store.unanswered = 0
            world.put(["a"])
            await until(lambda: len(seen) == 1, "the record")
            await consumer.stop()
            await running
            (said,) = [str(event) for event in happened if isinstance(event, events.ShardStalled)]
            assert "no heartbeat" in said
            assert "the disk is full" in said

    run(main)


def test_a_consumer_that_cannot_join_for_want_of_the_store_says_so():
    async def main():
        async with stream_world(1) as world:
            store, happened = Store("register_member"), []
            store.unanswered = 3
            consumer = world.consumer(app="billing", leases=store, until="tip", on_event=happened.append)
            await consumer.run(lambda record: None, handle_signals=False)
            (said,) = [str(event) for event in happened if isinstance(event, events.StoreUnanswered)]
            assert "2 times in a row, retrying: the disk is full" in said

    run(main)
