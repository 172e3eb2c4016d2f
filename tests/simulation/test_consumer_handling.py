"""Records on their way to handlers: acknowledgement, failures, batches, threads, processes, stopping."""

import asyncio
from dataclasses import replace

import pytest

import anabranch
from anabranch import Retry, events
from anabranch.budget import READ_RESERVE_BYTES
from anabranch.errors import ShardStoppedError
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import QUICK, check_order, now_ms, numbers, polled_shards, run, stream_world, until

KEYS = [f"user-{i}" for i in range(8)]


async def _rows(store):
    return list(await store.read_leases(with_finished=True))


def test_a_record_is_acknowledged_when_the_next_is_asked_for():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 5)
            store = MemoryLeaseStore()
            async with world.consumer(app="billing", leases=store) as consumer:
                async for record in consumer:
                    if int(record.data) == 2:
                        break
            async with world.consumer(app="billing", leases=store, until="tip") as consumer:
                assert numbers([record async for record in consumer]) == [2, 3, 4]

    run(main)


def test_stop_inside_the_loop_acknowledges_the_current_record():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 5)
            store = MemoryLeaseStore()
            async with world.consumer(app="billing", leases=store) as consumer:
                async for record in consumer:
                    if int(record.data) == 2:
                        report = await consumer.stop()
            assert report.clean
            async with world.consumer(app="billing", leases=store, until="tip") as consumer:
                assert numbers([record async for record in consumer]) == [3, 4]

    run(main)


def test_batches_are_bounded_by_count_and_acknowledged_as_a_whole():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 25)
            store = MemoryLeaseStore()
            sizes = []
            async with world.consumer(app="billing", leases=store, until="tip") as consumer:
                async for batch in consumer.batches(max_records=10, max_wait=0.1):
                    sizes.append(len(batch))
                    if len(sizes) == 2:
                        break
            async with world.consumer(app="billing", leases=store, until="tip") as consumer:
                left = [record async for batch in consumer.batches(max_records=10, max_wait=0.1) for record in batch]
            assert sizes == [10, 10]
            assert numbers(left) == list(range(10, 25))

    run(main)


def test_a_batch_handler_runs_one_batch_of_a_shard_at_a_time():
    async def main():
        async with stream_world(3) as world:
            world.put(KEYS * 20)
            seen, busy = [], set()
            consumer = world.consumer(app="billing", leases="memory://", until="tip")

            @consumer.batch_handler(max_records=7, max_wait=0.05)
            async def handle(batch):
                assert batch.shard_id not in busy
                busy.add(batch.shard_id)
                await asyncio.sleep(0)
                seen.extend(batch)
                busy.discard(batch.shard_id)

            report = await consumer.run()
            assert report.clean
            check_order(seen)
            assert sorted(numbers(seen)) == list(range(world.put_count))

    run(main)


def test_a_failing_record_is_tried_again_and_then_stops_its_shard_and_is_reported():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 6)
            store, happened, seen = MemoryLeaseStore(), [], []

            async def handle(record, context):
                if int(record.data) == 3:
                    raise ValueError("no such customer")
                seen.append(record)

            consumer = world.consumer(
                app="billing", leases=store, until="tip", on_event=happened.append,
                on_failure=Retry(attempts=3, backoff=0.01),
            )  # fmt: skip
            with pytest.raises(ShardStoppedError):
                await consumer.run(handle)
            assert numbers(seen) == [0, 1, 2]
            failures = [event for event in happened if isinstance(event, events.HandlerFailed)]
            assert [event.attempt for event in failures] == [1, 2, 3]
            (stop,) = [event for event in happened if isinstance(event, events.ShardStopped)]
            assert "no such customer" in str(stop)
            assert "'a'" in str(stop)
            (row,) = await _rows(store)
            assert row.stopped is not None
            assert row.stopped.partition_key == "a"
            assert row.checkpoint.watermark == seen[-1].position

            seen.clear()  # a process that starts later tries again
            await world.consumer(app="billing", leases=store, until="tip").run(seen.append)
            assert numbers(seen) == [3, 4, 5]
            assert (await _rows(store))[0].stopped is None

    run(main)


def test_a_failing_key_does_not_hold_up_other_keys():
    async def main():
        async with stream_world(1) as world:
            world.put(["bad", "good", "bad", "good", "good"])
            done = []

            async def handle(record, context):
                if record.partition_key == "bad" and context.attempt < 3:
                    raise ValueError("not yet")
                done.append(record)

            consumer = world.consumer(
                app="billing", leases="memory://", order="key", until="tip", on_failure=Retry(attempts=3, backoff=0.2)
            )
            await consumer.run(handle)
            assert [record.partition_key for record in done] == ["good", "good", "good", "bad", "bad"]
            check_order(done)

    run(main)


def test_a_time_out_cancels_the_call_and_counts_as_a_failed_attempt():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            attempts = []

            async def handle(record, context):
                attempts.append((context.attempt, context.deadline))
                if context.attempt == 1:
                    await asyncio.sleep(60)

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_failure=Retry(attempts=2, backoff=0, timeout=0.1)
            )
            await consumer.run(handle)
            assert attempts == [(1, 0.1), (2, 0.1)]

    run(main)


def test_stop_reports_what_still_ran_at_the_deadline_and_repeats_it_later():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            store, started = MemoryLeaseStore(), []

            async def handle(record):
                started.append(record)
                if int(record.data) == 1:
                    await asyncio.Event().wait()

            consumer = world.consumer(app="billing", leases=store)
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(lambda: len(started) == 2, "the second record")
            report = await consumer.stop(deadline=0.2)
            await running
            assert not report.clean
            assert numbers(report.leftovers) == [1]
            seen = []
            await world.consumer(app="billing", leases=store, until="tip").run(seen.append)
            assert numbers(seen) == [1, 2]

    run(main)


def test_pause_reads_nothing_more_until_resume():
    async def main():
        async with stream_world(1) as world:
            seen = []
            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
            world.put(["a"])
            await until(lambda: len(seen) == 1, "the first record")
            consumer.pause()
            await until(lambda: not any(one.is_busy for one in polled_shards(consumer)), "no read")
            world.put(["a"])
            assert consumer.status().paused
            assert len(seen) == 1
            consumer.resume()
            await until(lambda: len(seen) == 2, "the second record")
            status = consumer.status()
            assert status.shards[0].phase == "reading"
            await consumer.stop()
            await running

    run(main)


def test_a_failing_event_hook_disturbs_nothing(caplog):
    def hook(event):
        raise RuntimeError("broken hook")

    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            async with world.consumer(until="tip", start="trim_horizon", on_event=hook) as consumer:
                assert numbers([record async for record in consumer]) == [0, 1, 2]

    run(main)
    assert "broken hook" in caplog.text


def test_an_unexpected_error_of_a_shards_reading_restarts_it_and_then_ends_the_consumer():
    async def main():
        async with stream_world(1) as world, world.consumer(on_event=(happened := []).append) as consumer:
            ports = await consumer._open()
            client = ports.kinesis

            class Broken:
                def __getattr__(self, name):
                    return getattr(client, name)

                async def get_records(self, *arguments, **options):
                    raise ZeroDivisionError("a bug")

            object.__setattr__(ports, "kinesis", Broken())
            with pytest.raises(anabranch.errors.ConsumerFailedError, match="a bug"):
                async for _ in consumer:
                    pass
            assert [event.restart for event in happened if isinstance(event, events.TaskRestarted)] == [1, 2, 3]

    run(main)


def test_a_shard_of_the_same_name_in_another_stream_does_not_keep_a_broken_one_going():
    async def main():
        async with stream_world(1) as world:
            world.kinesis.state.call("CreateStream", {"StreamName": "refunds", "ShardCount": 1}, now_ms=now_ms())
            consumer = world.consumer(["orders", "refunds"])
            async with consumer:
                ports = await consumer._open()
                client = ports.kinesis

                class Broken:
                    def __getattr__(self, name):
                        return getattr(client, name)

                    async def get_records(self, stream, iterator, **options):
                        if stream.name == "refunds":
                            raise ZeroDivisionError("a bug")
                        return await client.get_records(stream, iterator, **options)

                object.__setattr__(ports, "kinesis", Broken())
                with pytest.raises(anabranch.errors.ConsumerFailedError, match="a bug"):
                    async for _ in consumer:
                        pass

    run(main)


def test_what_is_read_and_unfinished_never_exceeds_the_budget():
    async def main():
        budget = anabranch.Budget(32 << 20)
        settings = anabranch.ConsumerSettings(leases=QUICK.leases, polling=QUICK.polling, budget=budget)
        async with stream_world(4) as world:
            world.call("UpdateMaxRecordSize", MaxRecordSizeInKiB=10240)
            payload = bytes(6 << 20)
            for key in KEYS[:4]:
                world.call("PutRecord", PartitionKey=key, Data=payload)
            seen = []

            async def handle(record):
                assert budget.used_bytes <= budget.limit_bytes
                await asyncio.sleep(0.01)
                seen.append(len(record.data))

            consumer = world.consumer(app="billing", leases="memory://", until="tip", settings=settings, order="key")
            await consumer.run(handle)
            assert seen == [len(payload)] * 4
            assert 6 << 20 < budget.peak_bytes <= budget.limit_bytes
            assert budget.used_bytes == 0

    run(main)


def test_records_acknowledged_by_hand_in_any_order_do_not_come_again():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 6)
            store = MemoryLeaseStore()
            async with world.consumer(app="billing", leases=store, acknowledge="manual") as consumer:
                held = []
                async for record in consumer:
                    held.append(record)
                    if len(held) == 6:
                        consumer.ack(held[4], held[0], held[2])
                        with pytest.raises(anabranch.errors.UsageError, match="already"):
                            consumer.ack(held[4])
                        break
            async with world.consumer(app="billing", leases=store, acknowledge="manual", idle_timeout=1) as consumer:
                again = []
                async for record in consumer:
                    again.append(record)
                    consumer.ack(record)
            assert numbers(again) == [1, 3, 5]

    run(main)


def test_acknowledging_by_hand_goes_with_the_callers_own_loop_only():
    async def main():
        async with stream_world(1) as world:
            with pytest.raises(anabranch.errors.UsageError, match="async for"):
                await world.consumer(acknowledge="manual").run(lambda record: None)

    run(main)


async def _seal(store, member_id):
    """What another member does to one that missed its heartbeats."""
    while True:
        (row,) = [row for row in (await store.poll()).members if row.member_id == member_id]
        if (await store.seal_member(member_id, row.counter)).state == "sealed":
            return


def test_what_was_handed_out_twice_over_a_lost_lease_may_be_acknowledged_twice():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 2)
            store = MemoryLeaseStore()
            async with world.consumer(app="billing", leases=store, acknowledge="manual") as consumer:
                records = aiter(consumer)
                first = [await anext(records), await anext(records)]
                await _seal(store, consumer.status().member_id)
                again = [await anext(records), await anext(records)]
                assert numbers(again) == [0, 1]
                consumer.ack(*first)
                consumer.ack(*again)
                assert (await consumer.stop()).clean
            async with world.consumer(app="billing", leases=store, until="tip") as consumer:
                assert [record async for record in consumer] == []

    run(main)


def test_a_shard_waits_for_room_in_the_budget_and_is_read_when_there_is_some():
    async def main():
        async with stream_world(2) as world:
            settings = replace(QUICK, budget=READ_RESERVE_BYTES)
            seen, may_end = [], asyncio.Event()

            async def handle(record):
                seen.append(record)
                await may_end.wait()

            consumer = world.consumer(app="billing", leases="memory://", settings=settings)
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(
                lambda: consumer._consumer_run is not None and len(consumer._consumer_run.sessions) == 2, "both"
            )
            sessions = consumer._consumer_run.sessions.values()
            world.put(["a"])
            await until(lambda: len(seen) == 1, "the record that holds the budget")
            await until(lambda: any(session.budget_full_since_ms is not None for session in sessions), "want of room")
            world.put([f"user-{i}" for i in range(8)])
            may_end.set()
            await until(lambda: len(seen) == 9, "the records of both shards")
            await consumer.stop()
            await running

    run(main)
