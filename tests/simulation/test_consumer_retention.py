"""Records that fall out of retention before they are read are told of, and nothing else is."""

import asyncio
import dataclasses

import pytest
from msgspec.structs import replace

from anabranch import PollingSettings, Retry, events
from anabranch._model.leases import Checkpoint, LeaseRow
from anabranch.errors import TransportError
from anabranch.stores.memory import MemoryLeaseStore
from memory_rows import replace_rows

from simulated_stream import QUICK, now_ms, numbers, run, stream_world, until

HOUR = 3600.0
SHARD = "orders/shardId-000000000000"


class Leaping:
    """A service whose clock can be set ahead; beyond the retention, all that its stream held is gone then."""

    def __init__(self, client, world):
        self._client = client
        self._world = world
        self._ahead_seconds = 0.0
        self.reads_only = None
        self.read_count = self.reads_in_flight = 0

    def __getattr__(self, name):
        return getattr(self._client, name)

    def set_ahead(self, hours):
        self._ahead_seconds += hours * HOUR

    async def leap(self, hours):
        self.set_ahead(hours)
        stream = self._world.kinesis.state.account.streams[self._world.stream]
        if hours >= stream.retention_hours:
            stream.trimmed_before_ms = now_ms() + 1
            await until(lambda: now_ms() > stream.trimmed_before_ms, "a later time")

    async def get_shard_iterator(self, stream, shard_id, position):
        if self.reads_only is not None and shard_id not in self.reads_only:
            raise TransportError("it cannot be reached")
        return await self._client.get_shard_iterator(stream, shard_id, position)

    async def get_records(self, stream, iterator, **options):
        self.reads_in_flight += 1
        try:
            answer = self._later(await self._client.get_records(stream, iterator, **options))
        finally:
            self.reads_in_flight -= 1
        self.read_count += 1
        return answer

    async def describe_stream_summary(self, stream):
        return self._later(await self._client.describe_stream_summary(stream))

    def _later(self, answer):
        return replace(answer, server_seconds=answer.server_seconds + self._ahead_seconds)


async def leaping(consumer, world):
    ports = await consumer._open()
    service = Leaping(ports.kinesis, world)
    object.__setattr__(ports, "kinesis", service)
    return service


def warnings(happened):
    return [event for event in happened if isinstance(event, events.RetentionRunsOut)]


def losses(happened):
    return [event for event in happened if isinstance(event, events.DataLost)]


@pytest.mark.parametrize("raised, lost_count", [(False, 1), (True, 0)])
def test_a_worker_that_stalled_beyond_the_retention_reports_the_loss_once(raised, lost_count):
    async def main():
        async with stream_world(1) as world:
            seen, happened = [], []
            async with world.consumer(app="billing", leases="memory://", on_event=happened.append) as consumer:
                service = await leaping(consumer, world)
                running = asyncio.create_task(consumer.run(seen.append))
                world.put(["a"])
                await until(lambda: len(seen) == 1, "the first record")
                consumer.pause()
                await until(lambda: not service.reads_in_flight, "the end of the last read")
                world.put(["a"] * 2)
                if raised:
                    world.call("IncreaseStreamRetentionPeriod", RetentionPeriodHours=48)
                await service.leap(25)
                world.put(["a"])
                consumer.resume()
                await until(lambda: numbers(seen)[-1] == 3, "the record after it")
                await service.leap(1)
                world.put(["a"])
                await until(lambda: numbers(seen)[-1] == 4, "one more")
                await consumer.stop()
                await running
            assert numbers(seen) == ([0, 1, 2, 3, 4] if raised else [0, 3, 4])
            assert len(losses(happened)) == lost_count
            for event in losses(happened):
                assert event.from_position == seen[0].sequence_number
                hours = (event.trimmed_through_seconds - event.read_through_seconds) / HOUR
                assert 0.9 < hours < 1.1  # a day and an hour have passed

    run(main)


def test_a_record_that_is_about_to_be_lost_is_reported_again_when_half_of_the_time_is_left():
    async def main():
        async with stream_world(1) as world:
            happened, begun, finish = [], asyncio.Event(), asyncio.Event()

            async def wait(record):
                begun.set()
                await finish.wait()

            async with world.consumer(app="billing", leases="memory://", on_event=happened.append) as consumer:
                service = await leaping(consumer, world)
                running = asyncio.create_task(consumer.run(wait))
                world.put(["a"])
                await begun.wait()
                for hours, told in ((17, []), (2, ["5.0 h"]), (1, ["5.0 h"]), (2, ["5.0 h", "2.0 h"])):
                    service.set_ahead(hours)
                    await asyncio.sleep(30)  # of the simulated time
                    assert [f"{event.seconds / HOUR:.1f} h" for event in warnings(happened)] == told
                assert str(warnings(happened)[1]).startswith(f"{SHARD}: data loss in 2.0 h")
                assert consumer.status().shards[0].retention_left == pytest.approx(2 * HOUR, abs=180)
                finish.set()
                await consumer.stop()
                await running
            assert not losses(happened)

    run(main)


def test_a_shard_that_is_stopped_at_an_old_record_is_about_to_lose_it():
    async def main():
        async with stream_world(1) as world:
            happened = []
            world.put(["a"])

            async def fail(record):
                raise LookupError("no such customer")

            policy = Retry(attempts=1)
            async with world.consumer(
                app="billing", leases="memory://", start="trim_horizon", on_failure=policy, on_event=happened.append
            ) as consumer:
                (await leaping(consumer, world)).set_ahead(21)
                running = asyncio.create_task(consumer.run(fail))
                await until(lambda: warnings(happened), "the warning")
                (warning,) = warnings(happened)
                assert warning.seconds == pytest.approx(3 * HOUR, abs=60)
                assert warning.reason.code == "stopped-by-handler"
                assert "no such customer" in str(warning)
                await consumer.stop()
                await running

    run(main)


def test_an_idle_shard_loses_nothing_as_time_goes_by():
    async def main():
        async with stream_world(2) as world:
            seen, happened = [], []
            async with world.consumer(app="billing", leases="memory://", on_event=happened.append) as consumer:
                service = await leaping(consumer, world)
                running = asyncio.create_task(consumer.run(seen.append))
                world.put(["a"])
                await until(lambda: len(seen) == 1, "the record of one of them")
                for _ in range(5):
                    target = service.read_count + 6
                    await until(lambda target=target: service.read_count >= target, "some reads of both")
                    await service.leap(12)
                world.put(["a"])
                await until(lambda: len(seen) == 2, "the next one")
                await consumer.stop()
                await running
            assert not losses(happened)

    run(main)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_child_first_read_beyond_the_retention_reports_the_loss_in_any_worker(restarts):
    async def main():
        async with stream_world(1) as world:
            store, seen, happened = MemoryLeaseStore(), [], []
            options = {"app": "billing", "leases": store, "on_event": happened.append}
            async with world.consumer(**options) as consumer:
                service = await leaping(consumer, world)
                running = asyncio.create_task(consumer.run(seen.append))
                world.put(["a"])
                await until(lambda: len(seen) == 1, "the parent's record")
                service.reads_only = (world.open_shards()[0]["ShardId"],)
                world.split()
                world.put(["a", "b"])
                await until(lambda: any(isinstance(event, events.ShardFinished) for event in happened), "its end")
                if not restarts:
                    await service.leap(25)
                    service.reads_only = None
                    await until(lambda: len(losses(happened)) == 2, "both losses")
                await consumer.stop()
                await running
            if restarts:
                async with world.consumer(**options) as consumer:
                    await (await leaping(consumer, world)).leap(25)
                    running = asyncio.create_task(consumer.run(seen.append))
                    await until(lambda: len(losses(happened)) == 2, "both losses")
                    await consumer.stop()
                    await running
            children = sorted(shard["ShardId"] for shard in world.open_shards())
            assert sorted(event.shard_id for event in losses(happened)) == children
            assert {event.from_position for event in losses(happened)} == {"TRIM_HORIZON"}

    run(main)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("last_change", ["split", "merge"])
def test_a_shard_that_opened_after_the_trimmed_time_has_lost_nothing(restarts, last_change):
    """Its parent was open at the trim horizon, and tells what was lost, though none of its records are left."""

    async def main():
        async with stream_world(1) as world:
            store, seen, happened = MemoryLeaseStore(), [], []
            options = {"app": "billing", "leases": store, "on_event": happened.append}
            async with world.consumer(**options) as consumer:
                service = await leaping(consumer, world)
                running = asyncio.create_task(consumer.run(seen.append))
                world.put(["a"])
                await until(lambda: len(seen) == 1, "the first record")
                consumer.pause()
                await until(lambda: not service.reads_in_flight, "the end of the last read")
                world.split()
                world.put("abcdefgh")
                children = {shard["ShardId"] for shard in world.open_shards()}
                await service.leap(25)
                getattr(world, last_change)()
                world.put("abcdefgh")
                if not restarts:
                    consumer.resume()
                    await until(lambda: len(seen) == 9, "the grandchildren's records")
                await consumer.stop()
                await running
            if restarts:
                async with world.consumer(**options) as consumer:
                    (await leaping(consumer, world)).set_ahead(25)
                    running = asyncio.create_task(consumer.run(seen.append))
                    await until(lambda: len(seen) == 9, "the grandchildren's records")
                    await consumer.stop()
                    await running
            lost_of = {event.shard_id for event in losses(happened)}
            assert children <= lost_of
            assert len(losses(happened)) == len(lost_of) == 3  # and the first shard, which is gone

    run(main)


class RowsReadTogether(MemoryLeaseStore):
    """As two owners meet it who look at all rows in the same moment."""

    def __init__(self):
        super().__init__()
        self.together = None

    async def read_leases(self, *, with_finished=False):
        rows = await super().read_leases(with_finished=with_finished)
        if with_finished and self.together is not None:
            async with asyncio.timeout(5):
                await self.together.wait()
        return rows


def test_of_two_parents_that_are_trimmed_at_a_time_one_makes_the_child_at_once():
    async def main():
        async with stream_world(2) as world:
            store, seen, happened = RowsReadTogether(), [], []
            settings = dataclasses.replace(QUICK, polling=PollingSettings(idle_interval=0.2, listing_interval=300.0))
            options = {"app": "billing", "leases": store, "settings": settings, "on_event": happened.append}
            async with world.consumer(**options) as consumer:
                service = await leaping(consumer, world)
                running = asyncio.create_task(consumer.run(seen.append))
                world.put("abcdefgh")
                await until(lambda: len(seen) == 8, "the parents' records")
                consumer.pause()
                await until(lambda: not service.reads_in_flight, "the end of the last reads")
                store.together = asyncio.Barrier(2)
                world.merge()
                await service.leap(25)
                world.put("a")
                consumer.resume()
                await until(lambda: ends(happened) == ["trimmed", "trimmed"], "the end of both")
                store.together = None
                await until(lambda: len(seen) == 9, "the child's record")
                await consumer.stop()
                await running
            assert len(losses(happened)) >= 2

    run(main)


def ends(happened):
    return [event.reason for event in happened if isinstance(event, events.ShardFinished)]


@pytest.mark.parametrize("hours, lost_count", [(25, 2), (1, 0)])
def test_a_child_whose_row_was_made_before_anybody_knew_how_far_its_parent_was_read_is_judged_by_it_now(
    hours, lost_count
):
    async def main():
        async with stream_world(1) as world:
            store, seen, happened = MemoryLeaseStore(), [], []
            options = {"app": "billing", "leases": store, "on_event": happened.append}
            async with world.consumer(**options) as consumer:
                service = await leaping(consumer, world)
                running = asyncio.create_task(consumer.run(seen.append))
                world.put(["a"])
                await until(lambda: len(seen) == 1, "the parent's record")
                service.reads_only = (world.open_shards()[0]["ShardId"],)
                world.split()
                await until(lambda: ends(happened) == ["end"], "its end")
                await consumer.stop()
                await running
            parent = next(row for row in await store.read_leases(with_finished=True) if row.is_finished)
            replace_rows(store, LeaseRow, lambda row: row if row.is_finished else replace(row, checkpoint=Checkpoint()))
            async with world.consumer(**options) as consumer:
                await (await leaping(consumer, world)).leap(hours)
                running = asyncio.create_task(consumer.run(seen.append))
                world.put(["a", "b"])
                await until(lambda: len(seen) == 3, "the children's records")
                await until(lambda: len(losses(happened)) >= lost_count, "what was lost")
                await consumer.stop()
                await running
            known = parent.checkpoint.seen_through_seconds
            assert [event.read_through_seconds for event in losses(happened)] == [known] * lost_count

    run(main)
