"""Operators go past a record at which a shard is stopped, or have it tried again, while the fleet runs (rule C3)."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from anabranch import Application, DeadLetter, Retry, events
from anabranch.errors import DeadLetterError, UsageError
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import kinds, run, stream_world, until

SHARD = "shardId-000000000000"
EVERY_HANDLER = pytest.mark.parametrize("way", ["run", "run_batches", "key", "none"])


class Fleet:
    """One running worker whose handler refuses `poison` until it is fixed."""

    def __init__(self, world, way, store, **options):
        self.taken, self.calls, self.happened, self.is_fixed = [], [], [], False
        self._way = way
        options = {"on_failure": Retry(attempts=2, backoff=0.01), **options}
        self.consumer = world.consumer(
            app="billing", leases=store, order=way if way in {"key", "none"} else "shard",
            on_event=self.happened.append, **options,
        )  # fmt: skip

    async def __aenter__(self):
        await self.consumer.__aenter__()
        running = (
            self.consumer.run_batches(self._handle, max_wait=0.1)
            if self._way == "run_batches"
            else self.consumer.run(self._handle)
        )
        self._task = asyncio.ensure_future(running)
        return self

    async def __aexit__(self, *_):
        await self.consumer.stop()
        self.report = await self._task
        await self.consumer.__aexit__(None, None, None)

    async def _handle(self, item):
        payloads = [record.data for record in getattr(item, "records", [item])]
        self.calls += payloads
        if b"poison" in payloads and not self.is_fixed:
            raise LookupError("no such customer")
        self.taken += payloads

    @asynccontextmanager
    async def stopped_application(self, store):
        await self.stopped()
        async with Application("billing", leases=store) as application:
            yield application

    async def stopped(self):
        await until(lambda: kinds(self.happened, events.ShardStopped), "the stop")
        await until(lambda: self.consumer.status().shards[0].phase == "stopped", "the stop")


@EVERY_HANDLER
def test_a_stopped_record_is_skipped_by_its_owner_within_two_seconds(way):
    async def main():
        async with stream_world(1) as world:
            places, store = world.put_payloads(b"1", b"poison", b"3"), MemoryLeaseStore()
            async with Fleet(world, way, store) as fleet:
                await fleet.stopped()
                began = asyncio.get_running_loop().time()
                async with Application("billing", leases=store) as application:
                    answer = await application.skip(SHARD, places[1])
                    assert asyncio.get_running_loop().time() - began < 2
                    assert (answer.state, answer.position) == ("applied", places[1])
                    assert f"record {places[1]} will be skipped" in answer.result
                    await until(lambda: sorted(fleet.taken) == [b"1", b"3"], "the rest")
                    (audited,) = await application.commands()
                    assert audited == answer
                assert fleet.calls.count(b"poison") == (5 if way == "run_batches" else 2)
                (skipped,) = kinds(fleet.happened, events.RecordSkipped)
                assert skipped.position == places[1]
                (told,) = kinds(fleet.happened, events.CommandAnswered)
                assert (told.action, told.state) == ("skip", "applied")
                assert (await store.poll()).commands == ()  # it is not polled any more
            assert fleet.report.clean
            assert fleet.report.skipped_count == 1
            (row,) = await store.read_leases()
            assert row.stopped is None
            assert str(row.checkpoint.watermark) == places[2]
            assert row.checkpoint.open_keys == ()

    run(main)


@EVERY_HANDLER
def test_a_stopped_shard_is_resumed_and_its_record_tried_once_more(way):
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1", b"poison", b"3")
            store = MemoryLeaseStore()
            async with Fleet(world, way, store) as fleet, fleet.stopped_application(store) as application:
                calls = fleet.calls.count(b"poison")
                fleet.happened.clear()
                assert (await application.resume(SHARD)).state == "applied"
                await fleet.stopped()  # once more, in vain
                assert fleet.calls.count(b"poison") == calls + 1
                fleet.is_fixed = True
                assert (await application.resume(SHARD)).state == "applied"
                await until(lambda: b"3" in fleet.taken, "the rest")
            assert fleet.report.clean
            assert sorted(set(fleet.taken)) == [b"1", b"3", b"poison"]

    run(main)


def test_a_resume_that_comes_late_does_not_apply_to_a_later_stop():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"poison")
            store = MemoryLeaseStore()
            async with Fleet(world, "run", store) as fleet, fleet.stopped_application(store) as application:
                fleet.happened.clear()
                await application.resume(SHARD)
                await fleet.stopped()  # again, at the same record
                calls, (first,) = len(fleet.calls), await store.read_controls()
                late = replace(first, command_id="late", state="pending", result="")
                await store.put_control(late)
                await until(lambda: len(kinds(fleet.happened, events.CommandAnswered)) == 2, "the answer")
                answer = kinds(fleet.happened, events.CommandAnswered)[1]
                assert (answer.state, "the shard has stopped again since" in answer.result) == ("refused", True)
                assert (len(fleet.calls), fleet.consumer.status().shards[0].phase) == (calls, "stopped")

    run(main)


@EVERY_HANDLER
def test_a_record_that_waits_for_a_retry_can_be_skipped(way):
    async def main():
        async with stream_world(1) as world:
            places, store = world.put_payloads(b"1", b"poison", b"3"), MemoryLeaseStore()
            policy = Retry(attempts=1000, backoff=60, backoff_max=600)
            async with Fleet(world, way, store, on_failure=policy) as fleet:
                await until(
                    lambda: [e for e in kinds(fleet.happened, events.HandlerFailed) if e.record_count == 1],
                    "a failed attempt",
                    seconds=600,
                )
                async with Application("billing", leases=store) as application:
                    answer = await application.skip(SHARD, places[1])
                assert (answer.state, answer.result[:20]) == ("applied", f"record {places[1]}"[:20])
                await until(lambda: sorted(fleet.taken) == [b"1", b"3"], "the rest")

    run(main, seconds=5000)


def test_a_letter_that_its_destination_does_not_accept_can_be_skipped():
    async def refuse(letter):
        raise DeadLetterError("the queue is away")

    async def main():
        async with stream_world(1) as world:
            places, store = world.put_payloads(b"1", b"poison", b"3"), MemoryLeaseStore()
            policy = Retry(attempts=1, then=DeadLetter(refuse))
            async with Fleet(world, "run", store, on_failure=policy) as fleet:
                await until(lambda: kinds(fleet.happened, events.ShardStalled), "the reason")
                async with Application("billing", leases=store) as application:
                    assert (await application.skip(SHARD, places[1])).state == "applied"
                await until(lambda: fleet.taken == [b"1", b"3"], "the rest")
            assert (fleet.report.skipped_count, fleet.report.dead_letter_count) == (1, 0)

    run(main)


def test_what_cannot_be_done_is_refused_with_the_reason():
    async def main():
        async with stream_world(1) as world:
            places, store = world.put_payloads(b"1", b"poison", b"3"), MemoryLeaseStore()
            async with Fleet(world, "run", store) as fleet, fleet.stopped_application(store) as application:
                later = await application.skip(SHARD, places[2])
                assert later.state == "refused"
                assert f"the shard is stopped at record {places[1]}, not at {places[2]}" in later.result
                earlier = await application.skip(SHARD, places[0])
                assert earlier.state == "applied"
                assert f"nothing to skip: the checkpoint is already past {places[0]}" in earlier.result
                with pytest.raises(UsageError, match="has no lease for shardId-000000000009"):
                    await application.skip("shardId-000000000009", places[1])
                with pytest.raises(UsageError, match="'soon' is not a position"):
                    await application.skip(SHARD, "soon")
                await application.skip(SHARD, places[1])
                await until(lambda: fleet.taken == [b"1", b"3"], "the rest")
                with pytest.raises(UsageError, match="is not stopped: there is nothing to resume"):
                    await application.resume(SHARD)
                assert (await application.skip(SHARD, f"{int(places[2]) + 5}")).state == "refused"

    run(main)


def test_an_owner_that_took_a_stopped_shard_over_applies_commands_too():
    async def main():
        async with stream_world(1) as world:
            places, store = world.put_payloads(b"1", b"poison", b"3"), MemoryLeaseStore()
            workers = Fleet(world, "run", store), Fleet(world, "run", store)
            async with workers[0], workers[1]:  # both start before the stop: the second does not try the record
                await until(lambda: [one for one in workers if kinds(one.happened, events.ShardStopped)], "the stop")
                owner, other = sorted(workers, key=lambda one: -len(kinds(one.happened, events.ShardStopped)))
                await owner.consumer.stop()
                await until(lambda: [s.phase for s in other.consumer.status().shards] == ["stopped"], "the take-over")
                async with Application("billing", leases=store) as application:
                    assert (await application.skip(SHARD, places[1])).state == "applied"
                await until(lambda: b"3" in other.taken, "the rest")

    run(main)
