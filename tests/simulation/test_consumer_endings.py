"""How a consumer, a shard or a single call ends when things do not go as planned: nothing stands still in silence."""

import asyncio
from dataclasses import replace as replace_settings
from datetime import timedelta

import pytest
from msgspec.structs import replace

import anabranch
from anabranch import Retry, events
from anabranch._model.leases import LeaseRow, MemberRow
from anabranch.config import CheckpointSettings, ConsumerSettings, LeaseSettings
from anabranch.errors import (
    AccessDeniedError,
    ConsumerFailedError,
    FleetMismatchError,
    ShardStoppedError,
    StreamNotFoundError,
)
from anabranch.stores.memory import MemoryLeaseStore
from memory_rows import replace_rows

from simulated_stream import QUICK, now, now_ms, numbers, polled_shards, run, stream_world, until


def test_a_handler_that_ends_in_a_cancellation_of_its_own_fails_its_record():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            seen, happened = [], []

            async def handle(record, context):
                if int(record.data) == 1 and context.attempt == 1:
                    lost = asyncio.get_running_loop().create_future()
                    lost.cancel()
                    await lost
                seen.append(record)

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", concurrency=1, on_event=happened.append,
                on_failure=Retry(attempts=2, backoff=0),
            )  # fmt: skip
            assert (await consumer.run(handle)).clean
            assert numbers(seen) == [0, 1, 2]
            assert any(isinstance(event, events.HandlerFailed) for event in happened)

    run(main)


def test_a_batch_handler_that_ends_in_a_cancellation_of_its_own_fails_its_batch():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            seen = []

            async def handle(batch, context):
                if context.attempt == 1:
                    lost = asyncio.get_running_loop().create_future()
                    lost.cancel()
                    await lost
                seen.extend(batch)

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", concurrency=1, on_failure=Retry(attempts=2, backoff=0)
            )
            assert (await consumer.run_batches(handle, max_wait=0.1)).clean
            assert numbers(seen) == [0, 1, 2]

    run(main)


def test_leases_of_a_stream_that_is_not_read_any_more_are_left_alone():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            store, seen = MemoryLeaseStore(), []
            options = {"app": "billing", "leases": store, "until": "tip", "on_event": (happened := []).append}
            await world.consumer(**options).run(seen.append)
            first_second = now_ms() // 1000
            world.call("DeleteStream")
            await until(lambda: now_ms() // 1000 > first_second, "another creation time")
            world.call("CreateStream", ShardCount=2)
            world.put(["a"] * 2)
            for _ in range(2):
                await world.consumer(**options).run(seen.append)
            assert numbers(seen) == [0, 1, 2, 3, 4]
            assert sum(isinstance(event, events.StreamChanged) for event in happened) == 1

    run(main)


def test_a_stop_is_kept_by_a_run_that_is_only_being_opened():
    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(app="billing", leases="memory://")
            for _ in range(2):  # also where a run came before it
                running = asyncio.create_task(consumer.run(lambda record: None, handle_signals=False))
                await asyncio.sleep(0)
                assert (await consumer.stop()).clean
                assert (await running).clean
            assert consumer._consumer_run is None
            running = asyncio.create_task(consumer.run(lambda record: None, handle_signals=False))
            await until(lambda: consumer._consumer_run is not None, "the next run, which nobody stopped")
            await consumer.stop()
            await running

    run(main)


@pytest.mark.parametrize("way", ["records", "batches", "run"])
def test_a_stop_is_kept_by_what_begins_after_it_if_nothing_did_before(way):
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            async with world.consumer(app="billing", leases="memory://", until="tip") as consumer:
                for count in (0, 1):
                    if count == 0:
                        assert (await consumer.stop()).clean
                    seen = []
                    if way == "run":
                        await consumer.run(seen.append, handle_signals=False)
                    else:
                        seen += [
                            item async for item in (consumer if way == "records" else consumer.batches(max_wait=0.1))
                        ]
                    assert len(seen) == count  # the stop is used up by the first
                await consumer.stop()  # what it was meant for has ended
                world.put("a")
                await consumer.run(seen.append, handle_signals=False)
                assert len(seen) >= 2

    run(main)


def test_a_stop_is_kept_by_an_iterator_that_has_not_taken_its_first_step():
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            async with world.consumer(app="billing", leases="memory://", until="tip") as consumer:
                assert len([record async for record in consumer]) == 1
                batches = consumer.batches()
                await consumer.stop()
                later = consumer.batches(max_wait=0.1)
                world.put("a")
                assert [batch async for batch in batches] == []
                assert [batch async for batch in batches] == []
                assert [len(batch) async for batch in later] == [1]

    run(main)


def test_a_second_stop_may_shorten_the_deadline_of_the_first():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            started = asyncio.Event()

            async def handle(record):
                started.set()
                await asyncio.Event().wait()

            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await started.wait()
            first = asyncio.create_task(consumer.stop(deadline=60))
            await asyncio.sleep(0.05)
            report = await consumer.stop(deadline=0)
            assert len(report.leftovers) == 1
            await first
            await running

    run(main)


def test_a_heart_that_fails_unexpectedly_ends_the_consumer():
    class Store(MemoryLeaseStore):
        broken = False

        async def heartbeat(self, beat):
            if self.broken:
                raise ZeroDivisionError("a bug")
            return await super().heartbeat(beat)

    async def main():
        async with stream_world(1) as world:
            store = Store()
            consumer = world.consumer(app="billing", leases=store)
            running = asyncio.create_task(consumer.run(lambda record: None, handle_signals=False))
            await until(lambda: consumer._consumer_run is not None and consumer._consumer_run.has_joined, "join")
            store.broken = True
            with pytest.raises(ConsumerFailedError, match="a bug"):
                await running

    run(main)


@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_a_shared_budget_gets_its_bytes_back_from_a_consumer_that(end):
    async def main():
        budget = anabranch.Budget(64 << 20)
        settings = ConsumerSettings(leases=QUICK.leases, polling=QUICK.polling, budget=budget)
        async with stream_world(2) as world:
            world.put(["a", "b", "c", "d"] * 100)

            started = []

            async def handle(record):
                started.append(record)
                await asyncio.Event().wait()

            consumer = world.consumer(app="billing", leases="memory://", settings=settings, order="key")
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(lambda: len(started) == 4, "the calls")
            assert budget.used_bytes > 0
            if end == "fails":

                async def fail():
                    raise ZeroDivisionError("a bug")

                consumer._consumer_run._spawn(fail(), "a task with a bug")
                with pytest.raises(ConsumerFailedError, match="a bug"):
                    await running
            else:
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert budget.used_bytes == 0

    run(main)


def test_a_consumer_that_is_starting_can_be_asked_and_paused():
    class Store(MemoryLeaseStore):
        def __init__(self):
            super().__init__()
            self.asked, self.answers = asyncio.Event(), asyncio.Event()

        async def poll(self):
            self.asked.set()
            await self.answers.wait()
            return await super().poll()

    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            store, seen = Store(), []
            consumer = world.consumer(app="billing", leases=store)
            running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
            await store.asked.wait()
            consumer.pause()
            status = consumer.status()
            assert status.paused
            assert status.fenced
            assert status.member_id is None
            store.answers.set()
            await until(lambda: bool(consumer.status().shards), "a shard")
            await until(lambda: not any(one.is_busy for one in polled_shards(consumer)), "the moment to read")
            assert not seen
            consumer.resume()
            await until(lambda: len(seen) == 1, "the record")
            await consumer.stop()
            await running

    run(main)


def test_an_error_in_the_timetable_ends_the_consumer():
    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(lambda record: None, handle_signals=False))
            await until(lambda: consumer._consumer_run is not None and consumer._consumer_run.has_joined, "the start")
            consumer._consumer_run.scheduler.call_at(0, {}.popitem)
            with pytest.raises(ConsumerFailedError, match="KeyError"):
                await running

    run(main)


def test_an_idle_timeout_does_not_end_a_consumer_whose_handler_still_runs():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 2)
            seen = []

            async def handle(record):
                await asyncio.sleep(0.8)
                seen.append(record)

            consumer = world.consumer(app="billing", leases="memory://", idle_timeout=0.4)
            assert (await consumer.run(handle)).clean
            assert numbers(seen) == [0, 1]

    run(main)


@pytest.mark.parametrize("hindrance", ["throttle", "fail", "delay"])
def test_an_idle_timeout_does_not_end_a_consumer_that_could_not_read_yet(hindrance):
    async def main():
        async with stream_world(2) as world:
            world.put(str(number) for number in range(10))
            faults = world.kinesis.faults.on("GetRecords")
            fault = faults.delay(1.5) if hindrance == "delay" else getattr(faults, hindrance)()
            fault.at_most(2 if hindrance == "delay" else 6)  # of two shards
            seen = []
            consumer = world.consumer(app="billing", leases="memory://", idle_timeout=0.5)
            assert (await consumer.run(seen.append)).clean
            assert len(seen) == 10

    run(main)


def test_an_idle_timeout_does_not_end_a_loop_whose_body_takes_longer():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 2)
            seen = []
            async with world.consumer(app="billing", leases="memory://", idle_timeout=0.4) as consumer:
                async for record in consumer:
                    await asyncio.sleep(0.8)
                    seen.append(record)
            assert numbers(seen) == [0, 1]

    run(main)


def test_the_workers_of_a_fleet_all_end_at_the_tip():
    async def main():
        async with stream_world(4) as world:
            world.put([f"user-{i}" for i in range(20)])
            store, seen = MemoryLeaseStore(), []

            async def handle(record):
                await asyncio.sleep(0.2)
                seen.append(record)

            consumers = [world.consumer(app="billing", leases=store, until="tip") for _ in range(2)]
            reports = await asyncio.gather(*(consumer.run(handle, handle_signals=False) for consumer in consumers))
            assert all(report.clean for report in reports)
            assert sorted(numbers(seen)) == list(range(20))

    run(main)


def test_a_stopped_shard_stays_stopped_when_its_worker_stops_in_order():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            store = MemoryLeaseStore()

            async def handle(record):
                raise ValueError("never")

            for takes in (1, 2, 3):
                consumer = world.consumer(app="billing", leases=store, until="tip", on_failure=Retry(attempts=1))
                with pytest.raises(ShardStoppedError):
                    await consumer.run(handle)
                (row,) = await store.read_leases()
                assert row.stopped is not None, takes

    run(main)


def test_a_shard_that_ended_five_owners_stops_and_is_tried_again_by_a_process_that_starts_later():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            store, seen, happened = MemoryLeaseStore(), [], []
            options = {"app": "billing", "leases": store, "until": "tip", "on_event": happened.append}

            async def never(record):
                begun.append(record)
                await asyncio.Event().wait()

            begun = []
            for lives in range(1, 6):  # owners that died before they finished anything
                consumer = world.consumer(**options)
                running = asyncio.create_task(consumer.run(never, handle_signals=False))
                await until(lambda count=lives: len(begun) == count, "its record")
                await consumer._consumer_run.cancel()
                await running
                for member in (await store.poll()).members:
                    await store.leave(member.member_id)
            with pytest.raises(ShardStoppedError):
                await world.consumer(**options).run(seen.append)
            (stop,) = [event for event in happened if isinstance(event, events.ShardStopped)]
            assert "5 owners in a row died while they handled it" in str(stop)
            assert stop.partition_key == "a"
            (row,) = await store.read_leases()
            assert row.stopped is not None
            await world.consumer(**options).run(seen.append)
            assert numbers(seen) == [0]

    run(main)


class GoneShard:
    """A service from whose stream one shard is gone, by retention."""

    def __init__(self, client, shard_id):
        self._client = client
        self._shard_id = shard_id

    def __getattr__(self, name):
        return getattr(self._client, name)

    async def get_shard_iterator(self, stream, shard_id, position):
        if shard_id == self._shard_id:
            raise StreamNotFoundError("no such shard", operation="GetShardIterator", code="ResourceNotFoundException")
        return await self._client.get_shard_iterator(stream, shard_id, position)

    async def list_shards(self, stream, **options):
        answer = await self._client.list_shards(stream, **options)
        return replace(answer, shards=[shard for shard in answer.shards if shard.shard_id != self._shard_id])


def test_the_children_of_a_shard_that_is_gone_are_read():
    async def main():
        async with stream_world(1) as world:
            store, seen, happened = MemoryLeaseStore(), [], []
            world.put(["a"])
            options = {"app": "billing", "leases": store, "until": "tip", "on_event": happened.append}
            await world.consumer(**options).run(seen.append)
            (gone,) = world.open_shards()
            world.split()
            world.put(["a", "b"])
            async with world.consumer(**options) as consumer:
                ports = await consumer._open()
                object.__setattr__(ports, "kinesis", GoneShard(ports.kinesis, gone["ShardId"]))
                await consumer.run(seen.append)
            assert sorted(numbers(seen)) == [0, 1, 2]

    run(main)


class Trimmed:
    """A service that has forgotten the first records of its stream, by retention."""

    def __init__(self, client, count):
        self._client = client
        self._count = count

    def __getattr__(self, name):
        return getattr(self._client, name)

    async def get_records(self, stream, iterator, **options):
        answer = await self._client.get_records(stream, iterator, **options)
        return replace(answer, records=[record for record in answer.records if int(record.data) >= self._count])


@pytest.mark.parametrize("hours_ago, lost", [(1, False), (25, True), (None, True)])
def test_a_checkpoint_that_was_trimmed_is_a_loss_only_if_records_may_have_been_lost(hours_ago, lost):
    async def main():
        async with stream_world(1) as world:
            store, seen, happened = MemoryLeaseStore(), [], []
            world.put(["a"] * 2)
            options = {"app": "billing", "leases": store, "until": "tip", "on_event": happened.append}
            await world.consumer(**options).run(seen.append)
            (row,) = await store.read_leases()
            last_seen = None if hours_ago is None else now_ms() / 1000 - 3600 * hours_ago
            checkpoint = replace(row.checkpoint, seen_through_seconds=last_seen)
            replace_rows(store, LeaseRow, lambda row: replace(row, checkpoint=checkpoint))
            world.put(["a"] * 2)
            async with world.consumer(**options) as consumer:
                ports = await consumer._open()
                object.__setattr__(ports, "kinesis", Trimmed(ports.kinesis, 3))
                await consumer.run(seen.append)
            assert numbers(seen) == [0, 1, 3]
            assert any(isinstance(event, events.DataLost) for event in happened) == lost

    run(main)


def test_a_checkpoint_that_is_still_there_is_no_loss():
    async def main():
        async with stream_world(1) as world:
            store, seen, happened = MemoryLeaseStore(), [], []
            options = {"app": "billing", "leases": store, "until": "tip", "on_event": happened.append}
            for _ in range(2):
                world.put(["a"] * 2)
                await world.consumer(**options).run(seen.append)
                (row,) = await store.read_leases()
                checkpoint = replace(row.checkpoint, seen_through_seconds=None)
                replace_rows(store, LeaseRow, lambda row, kept=checkpoint: replace(row, checkpoint=kept))
            assert numbers(seen) == [0, 1, 2, 3]
            assert not any(isinstance(event, events.DataLost) for event in happened)

    run(main)


TOP = str((1 << 128) - 1)


def test_a_plain_function_that_returns_a_coroutine_is_a_failure_not_a_success():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            happened = []

            async def handle(record, factor):
                pass

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append, on_failure=Retry(attempts=1)
            )
            with pytest.raises(ShardStoppedError):
                await consumer.run(lambda record: handle(record, 1))
            (stop,) = [event for event in happened if isinstance(event, events.ShardStopped)]
            assert "async def" in str(stop)

    run(main)


class Denying:
    """A service that denies a listing while it is told to."""

    def __init__(self, client):
        self._client = client
        self.denied = False

    def __getattr__(self, name):
        return getattr(self._client, name)

    async def list_shards(self, stream, **options):
        if self.denied:
            raise AccessDeniedError("denied", operation="ListShards", code="AccessDeniedException")
        return await self._client.list_shards(stream, **options)


def test_a_listing_that_is_denied_for_a_while_ends_nothing():
    async def main():
        async with stream_world(1) as world:
            seen, happened = [], []
            async with world.consumer(app="billing", leases="memory://", on_event=happened.append) as consumer:
                ports = await consumer._open()
                service = Denying(ports.kinesis)
                object.__setattr__(ports, "kinesis", service)
                running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
                await until(lambda: any(isinstance(event, events.ShardStarted) for event in happened), "the start")
                service.denied = True
                await until(lambda: any(isinstance(event, events.ListingFailed) for event in happened), "the listing")
                service.denied = False
                world.put(["a"])
                await until(lambda: len(seen) == 1, "the record")
                await consumer.stop()
                await running

    run(main)


def test_a_worker_adopts_no_more_children_than_it_may_hold():
    async def main():
        settings = ConsumerSettings(leases=LeaseSettings(expiry=3.0, max_shards=1), polling=QUICK.polling)
        async with stream_world(1) as world:
            world.split()
            world.put([f"user-{i}" for i in range(8)])
            store, shards, seen = MemoryLeaseStore(), set(), []

            def handle(record):
                seen.append(record)
                shards.add(record.shard_id)

            consumer = world.consumer(app="billing", leases=store, settings=settings, idle_timeout=1.5)
            await consumer.run(handle)
            assert len(shards) == 1

    run(main)


def test_a_time_that_is_yet_to_come_is_waited_for():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            seen = []
            at = now() + timedelta(seconds=2)
            consumer = world.consumer(app="billing", leases="memory://", until=at)
            running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
            await until(lambda: len(seen) == 1, "the first record")
            world.put(["a"])
            assert (await running).clean
            assert numbers(seen) == [0, 1]
            assert now() >= at

    run(main)


def test_a_batch_that_waits_to_be_tried_again_keeps_nobody_from_stopping():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            attempts = []

            async def handle(batch):
                attempts.append(batch)
                await asyncio.sleep(0.3)
                raise ValueError("not yet")

            consumer = world.consumer(
                app="billing", leases="memory://", on_failure=Retry(attempts=1000, backoff=0.01, backoff_max=0.01)
            )
            running = asyncio.create_task(consumer.run_batches(handle, max_wait=0.1, handle_signals=False))
            await until(lambda: len(attempts) == 2, "the second attempt")
            report = await consumer.stop(deadline=15)
            assert report.clean
            assert len(attempts) == 2
            await running

    run(main)


def test_a_worker_joins_no_fleet_of_a_newer_protocol():
    class Store(MemoryLeaseStore):
        async def poll(self):
            beats.append(None)
            newer = MemberRow(member_id="b#1", expiry_ms=3000, protocol="2.0", counter=len(beats))
            return replace(await super().poll(), members=(newer,))

    beats = []

    async def main():
        async with stream_world(1) as world:
            with pytest.raises(FleetMismatchError, match=r"protocol 2\.0"):
                await world.consumer(app="billing", leases=Store()).run(lambda record: None)

    run(main)


@pytest.mark.parametrize("way", ["records", "batches"])
def test_a_stop_waits_for_the_loops_body_and_no_longer(way):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            async with world.consumer(app="billing", leases="memory://") as consumer:
                stopping = None
                async for _ in consumer if way == "records" else consumer.batches(max_wait=0.1):
                    stopping = asyncio.create_task(consumer.stop(deadline=60))
                    await asyncio.sleep(0.2)
                assert (await stopping).clean

    run(main)


@pytest.mark.parametrize("way", ["records", "manual", "batches"])
def test_a_loop_that_still_works_on_a_record_when_its_lease_is_freed_is_named(way):
    happened = []

    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            acknowledge = "manual" if way == "manual" else "auto"
            consumer = world.consumer(
                app="billing", leases="memory://", acknowledge=acknowledge, on_event=happened.append
            )
            async with consumer:
                async for _ in consumer.batches(max_wait=0.1) if way == "batches" else consumer:
                    report = await asyncio.create_task(consumer.stop(deadline=0.1))
                    assert len(report.leftovers) == 1

    run(main)
    (zombie,) = [event for event in happened if isinstance(event, events.ZombieCall)]
    assert zombie.shard_id == "shardId-000000000000"


@pytest.mark.parametrize("acknowledge", ["auto", "manual"])
def test_a_loop_that_still_works_on_a_record_when_its_lease_is_lost_is_named_once(acknowledge):
    happened = []

    async def main():
        store = MemoryLeaseStore()
        async with stream_world(1) as world:
            world.put(["a"])
            consumer = world.consumer(
                app="billing", leases=store, acknowledge=acknowledge, on_event=happened.append, settings=QUICK
            )
            async with consumer:
                async for _ in consumer:
                    (member,) = (await store.poll()).members
                    while (await store.seal_member(member.member_id, member.counter)).state == "live":
                        (member,) = (await store.poll()).members
                    await until(lambda: any(isinstance(event, events.LeaseLost) for event in happened), "the loss")
                    break

    run(main)
    assert len([event for event in happened if isinstance(event, events.ZombieCall)]) == 1


def test_a_handler_may_ask_for_the_stop_that_waits_for_it():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            seen = []
            consumer = world.consumer(app="billing", leases="memory://")

            async def handle(record):
                seen.append(record)
                if len(seen) == 2:
                    assert not (await consumer.stop(deadline=60)).clean

            assert (await consumer.run(handle)).clean
            assert numbers(seen) == [0, 1]

    run(main)


def test_a_shard_that_a_slow_loop_walks_through_is_handed_over_between_two_records():
    async def main():
        async with stream_world(2) as world:
            for number in range(100):
                world.call("PutRecord", PartitionKey="a", ExplicitHashKey=TOP, Data=str(number).encode())
            store, mine, others = MemoryLeaseStore(), [], []
            other = world.consumer(app="billing", leases=store)
            async with world.consumer(app="billing", leases=store) as first:

                async def walk():
                    async for record in first:
                        mine.append(record)
                        await asyncio.sleep(0.05)

                walking = asyncio.create_task(walk())
                await until(lambda: bool(mine) and len(first.status().shards) == 2, "both shards")
                running = asyncio.create_task(other.run(others.append, handle_signals=False))
                await until(lambda: len(mine) + len(others) >= 100, "all records, by both workers")
                await other.stop()
                await first.stop()
                await running
                await walking
            assert others
            assert numbers(mine) + numbers(others) == list(range(100))

    run(main)


def test_a_store_that_was_given_as_an_object_is_left_open():
    class Store(MemoryLeaseStore):
        async def close(self):
            raise AssertionError("its owner closes it")

    async def main():
        async with stream_world(1) as world:
            store, seen = Store(), []
            for _ in range(2):
                world.put(["a"])
                consumer = world.consumer(app="billing", leases=store, until="tip")
                assert (await consumer.run(seen.append, handle_signals=False)).clean
            assert numbers(seen) == [0, 1]

    run(main)


@pytest.mark.parametrize("way", ["run", "run_batches"])
def test_a_run_that_is_cancelled_repeats_only_the_calls_that_were_cancelled_with_it(way):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 5)
            store, seen, ended = MemoryLeaseStore(), [], []

            async def handle(item):
                record = getattr(item, "records", [item])[0]
                seen.append(record)
                if len(seen) == 4:
                    try:
                        await asyncio.Event().wait()
                    finally:
                        ended.append(record)

            seldom = replace_settings(QUICK, checkpoints=CheckpointSettings(interval=60))
            consumer = world.consumer(app="billing", leases=store, settings=seldom)
            options = {} if way == "run" else {"max_records": 1}
            running = asyncio.create_task(getattr(consumer, way)(handle, handle_signals=False, **options))
            await until(lambda: len(seen) == 4, "the fourth record")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert numbers(ended) == [3]
            again = []
            next_one = world.consumer(app="billing", leases=store, until="tip")
            async with asyncio.timeout(2):  # no lease has to expire
                await next_one.run(again.append, handle_signals=False)
            assert numbers(again) == [3, 4]

    run(main)
