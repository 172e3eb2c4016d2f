"""The byte budget among the shards of a consumer: those that cannot go on leave room for those that can."""

import asyncio
from dataclasses import replace

import pytest

from anabranch import Budget, Retry, events
from anabranch._engine.polling_reader import PollingReader
from anabranch.budget import READ_RESERVE_BYTES
from anabranch.limits import MIB
from anabranch.testing import journal as facts
from anabranch.testing.checkers import WithinBudget
from anabranch.testing.journal import Journal

from simulated_stream import QUICK, now_ms, run, stream_world, until

HALF_MIB = b"x" * (MIB // 2)


@pytest.mark.parametrize("order", ["shard", "key", "none"])
def test_shards_whose_records_fail_leave_the_others_room_to_be_read(order):
    async def main():
        async with stream_world(4) as world:
            hash_keys = [shard["HashKeyRange"]["StartingHashKey"] for shard in world.open_shards()]
            handled, failed_count = [], 0

            async def handle(record):
                nonlocal failed_count
                if record.partition_key == "bad":
                    failed_count += 1
                    raise ValueError("the sink is away")
                handled.append(record)

            consumer = world.consumer(
                app="billing",
                leases="memory://",
                order=order,
                on_failure=Retry(attempts=1000, backoff=3600.0, backoff_max=3600.0),
                settings=replace(QUICK, budget=32 * MIB),
            )
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(lambda: consumer._consumer_run and len(consumer.status().shards) == 4, "all shards")
            for _ in range(8):
                for hash_key in hash_keys[:3]:
                    world.call("PutRecord", PartitionKey="bad", ExplicitHashKey=hash_key, Data=HALF_MIB)
                await asyncio.sleep(0.25)  # a read for each of them, if there is room
            assert failed_count >= 3
            world.call("PutRecord", PartitionKey="good", ExplicitHashKey=hash_keys[3], Data=b"1")
            await until(lambda: handled, "the record of the fourth shard", 5)
            await consumer.stop(deadline=1.0)
            await running

    run(main)


def test_a_consumer_of_many_shards_does_not_keep_another_that_shares_its_budget_from_reading():
    async def main():
        async with stream_world(8) as world:
            world.kinesis.state.call("CreateStream", {"StreamName": "refunds", "ShardCount": 1}, now_ms=now_ms())
            world.kinesis.faults.on("GetRecords").delay(0.06)  # all the time somebody waits for room
            settings = replace(QUICK, budget=Budget(READ_RESERVE_BYTES))
            handled = []

            async def handle(record):
                handled.append(record.stream)

            async def fill():
                while True:
                    world.put(str(number) for number in range(16))  # no shard is idle, so that none is read seldom
                    await asyncio.sleep(0.1)

            many = world.consumer(app="many", leases="memory://", settings=settings)
            one = world.consumer("refunds", app="one", leases="memory://", settings=settings)
            async with asyncio.TaskGroup() as group:
                filling = group.create_task(fill())
                group.create_task(many.run(handle, handle_signals=False))
                await until(lambda: handled.count("orders") > 50, "all of the room to be in use")
                group.create_task(one.run(handle, handle_signals=False))
                request = {"StreamName": "refunds", "PartitionKey": "a", "Data": b"1"}
                world.kinesis.state.call("PutRecord", request, now_ms=now_ms())
                await until(lambda: "refunds" in handled, "the record of the other consumer", 5)
                await asyncio.gather(many.stop(deadline=1.0), one.stop(deadline=1.0))
                filling.cancel()

    run(main)


PATIENT = {"max_records": 100_000, "max_bytes": 100 * MIB, "max_wait": 3600.0}


@pytest.mark.parametrize("way", ["handler", "loop"])
def test_a_batch_that_its_shard_has_no_room_for_is_handed_out_as_it_is(way):
    async def main():
        async with stream_world(1) as world:
            sizes = []
            async with world.consumer(
                app="billing", leases="memory://", settings=replace(QUICK, budget=28 * MIB)
            ) as consumer:
                for _ in range(3):
                    world.call("PutRecord", PartitionKey="a", Data=HALF_MIB)

                async def handle(batch):
                    sizes.append(len(batch))

                async def loop():
                    async for batch in consumer.batches(**PATIENT):
                        await handle(batch)

                run = consumer.run_batches(handle, **PATIENT, handle_signals=False)
                if way == "loop":
                    run.close()
                    run = loop()
                running = asyncio.create_task(run)
                await until(lambda: sum(sizes) == 3, "the three records", 10)
                await consumer.stop()
                await running

    run(main)


def test_a_batch_that_the_budget_has_no_room_for_is_handed_out_as_it_is():
    async def main():
        async with stream_world(4) as world:
            hash_keys = [shard["HashKeyRange"]["StartingHashKey"] for shard in world.open_shards()]
            keys, let_go = [], asyncio.Event()

            async def handle(batch):
                keys.append(batch.records[0].partition_key)
                await let_go.wait()

            consumer = world.consumer(app="billing", leases="memory://", settings=replace(QUICK, budget=28 * MIB))
            running = asyncio.create_task(consumer.run_batches(handle, **PATIENT, handle_signals=False))
            world.call("PutRecord", PartitionKey="small", ExplicitHashKey=hash_keys[0], Data=b"1")
            await until(
                lambda: consumer._consumer_run and any(shard.unfinished_count for shard in consumer.status().shards),
                "a batch that waits for more",
            )
            assert keys == []
            entry = {"PartitionKey": "large", "ExplicitHashKey": hash_keys[1], "Data": bytes(MIB - 5)}
            world.call("PutRecords", Records=[entry] * 5)  # no room for a first read of the others, who are in front
            await until(lambda: len(keys) == 2, "both batches", 10)
            assert sorted(keys) == ["large", "small"]
            let_go.set()
            await consumer.stop()
            await running

    run(main)


def test_a_shard_that_finishes_records_is_not_reported_however_much_waits():
    """More than the budget lets wait behind one busy key: that is back-pressure, not a stall."""
    happened, seen = [], []

    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(
                app="billing",
                leases="memory://",
                order="key",
                until="tip",
                on_event=happened.append,
                settings=replace(QUICK, budget=32 * MIB),
            )

            async def handle(record):
                seen.append(record)
                await asyncio.sleep(0.15)

            for _ in range(16):
                world.call("PutRecord", PartitionKey="busy", Data=HALF_MIB)
            await consumer.run(handle, handle_signals=False)

    run(main)
    assert len(seen) == 16
    assert [event for event in happened if isinstance(event, events.ShardStalled)] == []


LARGEST = bytes(10 * MIB - 100)


@pytest.mark.parametrize("mistake", [None, "no limit", "too late"])
def test_large_records_at_many_tips_overdraw_the_budget_by_one_answer_at_most(monkeypatch, mistake):
    """Each of them is larger than what a read at the tip reserves (rule B1). It is noticed if the overdraft has no
    limit, or is taken only after a body was received.
    """
    journal, seen = Journal([WithinBudget()]), []
    if mistake == "no limit":
        monkeypatch.setattr(Budget, "try_overdraw", _overdraw)
    if mistake == "too late":
        monkeypatch.setattr(PollingReader, "_has_room", lambda *_: True)

    async def main():
        async with stream_world(12) as world:
            world.call("UpdateMaxRecordSize", MaxRecordSizeInKiB=10240)
            hash_keys = [shard["HashKeyRange"]["StartingHashKey"] for shard in world.open_shards()]
            budget, let_go = Budget(48 * MIB), asyncio.Event()

            async def handle(record):
                await let_go.wait()
                seen.append((record.partition_key, len(record.data)))

            consumer = world.consumer(
                app="billing", leases="memory://", order="key", settings=replace(QUICK, budget=budget)
            )
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(lambda: _are_at_tip(consumer, 12), "all shards at their tips")
            world.kinesis.faults.on("GetRecords").delay(0.3)  # so that the reads of all shards run at once
            await asyncio.sleep(1)
            for number, hash_key in enumerate(hash_keys):
                world.call("PutRecord", PartitionKey=f"user-{number}", ExplicitHashKey=hash_key, Data=LARGEST)
            await asyncio.sleep(5)
            assert budget.used_bytes > budget.limit_bytes - READ_RESERVE_BYTES
            let_go.set()
            await until(lambda: len(seen) == 12, "all records", 60)
            await consumer.stop()
            await running
            most_bytes = budget.limit_bytes + budget.overdraft_bytes_max
            journal.tell(facts.BytesMeasured(now_ms(), "worker", 0, budget.peak_bytes, most_bytes))
            journal.tell(facts.BytesReceived(now_ms(), "worker", world.kinesis.receiving_bytes_max, most_bytes))
            journal.tell(facts.CleanStop(now_ms(), "worker", budget.used_bytes))

    run(main)
    assert sorted(seen) == sorted((f"user-{number}", len(LARGEST)) for number in range(12))
    assert {violation.promise for violation in journal.violations} == ({"within budget"} if mistake else set())


def _overdraw(budget, wanted_bytes):
    budget.used_bytes += wanted_bytes
    budget.peak_bytes = max(budget.peak_bytes, budget.used_bytes)
    return True


def _are_at_tip(consumer, count):
    if consumer._consumer_run is None or len(consumer.status().shards) < count:
        return False
    return all(shard.millis_behind_latest == 0 for shard in consumer.status().shards)


def test_shards_at_their_tips_are_read_at_once_where_the_largest_answers_would_not_fit():
    async def main():
        async with stream_world(20) as world:
            world.kinesis.faults.on("GetRecords").delay(0.1)
            consumer = world.consumer(app="billing", leases="memory://", settings=replace(QUICK, budget=96 * MIB))
            running = asyncio.create_task(consumer.run(lambda _: None, handle_signals=False))
            await until(lambda: _are_at_tip(consumer, 20), "all shards at their tips")
            await asyncio.sleep(0.5)
            budget, at_once = consumer._budget, 0
            for _ in range(100):
                await asyncio.sleep(0.01)
                at_once = max(at_once, budget.used_bytes // budget.tip_reserve_bytes)
            assert at_once > 96 * MIB // READ_RESERVE_BYTES
            await consumer.stop()
            await running

    run(main)
