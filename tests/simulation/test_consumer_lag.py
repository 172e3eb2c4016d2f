"""The lag of a shard is the age of its oldest unfinished record (rule O4). And the counters of a run."""

import asyncio

import pytest

from anabranch import Retry

from simulated_stream import run, stream_world, until

HANDLING_SECONDS = 0.015
"""How long the slow handlers and loops take for each record."""


def measures(consumer):
    return consumer._consumer_run.measures()


def shard(consumer):
    return consumer.status().shards[0]


@pytest.mark.parametrize("read", ["polling", "fanout"])
@pytest.mark.parametrize("order", ["shard", "key"])
def test_with_a_slow_handler_the_lag_is_the_age_of_the_records_that_were_read_and_wait(order, read):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 1_000)
            await asyncio.sleep(300)

            async def slow(record):
                await asyncio.sleep(100)

            consumer = world.consumer(app="billing", leases="memory://", order=order, read=read)
            running = asyncio.create_task(consumer.run(slow))
            await until(lambda: consumer.status().shards and shard(consumer).unfinished_count, "an unfinished record")
            await asyncio.sleep(5)
            state = shard(consumer)
            assert state.millis_behind_latest == 0  # everything was read
            # 300 s before the consumer started, and 5 s since. Fan-out has to register a consumer first.
            age = 305 if read == "polling" else 307.5
            assert state.lag == pytest.approx(age, abs=3)
            assert state.retention_left == pytest.approx(24 * 3600 - state.lag, abs=1.1)
            assert consumer.status().lag == state.lag
            await asyncio.sleep(50)
            assert shard(consumer).lag == pytest.approx(state.lag + 50, abs=1.1)
            assert measures(consumer).lag == shard(consumer).lag
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run(main, seconds=10_000)


@pytest.mark.parametrize("read", ["polling", "fanout"])
def test_a_shard_at_the_tip_has_no_lag_whatever_the_age_of_its_last_record(read):
    async def main():
        async with stream_world(1) as world:
            world.put("abc")
            await asyncio.sleep(1_000)
            consumer = world.consumer(app="billing", leases="memory://", read=read)
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(
                lambda: consumer.status().shards and shard(consumer).counters.handled_count == 3, "three records"
            )
            for _ in range(100):  # 500 s, longer than a subscription lasts
                await asyncio.sleep(5)
                assert (shard(consumer).lag, shard(consumer).millis_behind_latest) == (0, 0)
            await consumer.stop()
            await running

    run(main, seconds=10_000)


def test_the_lag_grows_while_the_reads_of_a_shard_are_throttled():
    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(lambda: consumer.status().shards and shard(consumer).lag == 0, "the first read")
            world.kinesis.faults.on("GetRecords").throttle()
            await asyncio.sleep(30)
            assert shard(consumer).reason.code == "reads-throttled"
            assert shard(consumer).millis_behind_latest == 0
            assert shard(consumer).lag == pytest.approx(30, abs=2)
            assert measures(consumer).counters.throttle_count > 3
            world.kinesis.faults.clear()
            await until(lambda: shard(consumer).lag == 0, "a read after the throttling")
            await consumer.stop()
            await running

    run(main, seconds=10_000)


def test_the_lag_of_a_stopped_shard_is_the_age_of_the_record_that_failed():
    async def main():
        async with stream_world(1) as world:
            world.put("ab")

            async def fail(record):
                raise ValueError("poison")

            consumer = world.consumer(app="billing", leases="memory://", on_failure=Retry(attempts=2, backoff=0.1))
            running = asyncio.create_task(consumer.run(fail))
            await until(
                lambda: consumer.status().shards and shard(consumer).phase == "stopped", "the stop of the shard"
            )
            counted = measures(consumer).counters
            assert (counted.failed_count, counted.retry_count, counted.handled_count) == (2, 1, 0)
            await asyncio.sleep(40)
            assert shard(consumer).lag == pytest.approx(40, abs=2)
            await consumer.stop()
            await running

    run(main, seconds=10_000)


# counters


async def loop_over_records(consumer):
    async with consumer:
        async for _ in consumer:
            await asyncio.sleep(HANDLING_SECONDS)


async def loop_over_batches(consumer):
    async with consumer:
        async for batch in consumer.batches():
            await asyncio.sleep(HANDLING_SECONDS * len(batch))


async def acknowledge_each(consumer):
    async with consumer:
        async for record in consumer:
            await asyncio.sleep(HANDLING_SECONDS)
            consumer.ack(record)


async def handle(record):
    await asyncio.sleep(HANDLING_SECONDS)


async def handle_batch(batch):
    await asyncio.sleep(HANDLING_SECONDS * len(batch))


@pytest.mark.parametrize(
    "consume, options, call_count",
    [
        (lambda consumer: consumer.run(handle), {}, 40),
        (lambda consumer: consumer.run(handle), {"order": "key"}, 40),
        (lambda consumer: consumer.run_batches(handle_batch, max_records=10), {}, 4),
        (loop_over_records, {}, 40),
        (loop_over_batches, {}, 1),
        (acknowledge_each, {"acknowledge": "manual"}, 40),
    ],
    ids=["handler", "keys", "batches", "loop", "loop over batches", "manual"],
)
def test_every_way_to_consume_counts_records_bytes_and_times(consume, options, call_count):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 40)
            consumer = world.consumer(app="billing", leases="memory://", **options)
            running = asyncio.create_task(consume(consumer))
            await until(
                lambda: consumer.status().shards and measures(consumer).counters.committed_count == 40, "all commits"
            )
            found = measures(consumer)
            counted = found.counters
            read_bytes = sum(len(str(number)) + len("a") for number in range(40))  # the data and the partition keys
            assert (counted.read_count, counted.handled_count, counted.committed_count) == (40, 40, 40)
            assert (counted.read_bytes, counted.handled_bytes) == (read_bytes, read_bytes)
            assert counted.calls.count == call_count
            assert counted.calls.total_ms == pytest.approx(40 * HANDLING_SECONDS * 1000, abs=45)
            assert found.store_calls.count > 3
            assert (found.lease_taken_count, found.store_failure_count) == (1, 0)
            assert [measured.held_bytes for measured in found.shards] == [0]
            assert found.shards[0].counters == counted
            await consumer.stop()
            await asyncio.gather(running, return_exceptions=True)

    run(main)


def test_calls_of_a_handler_that_never_waits_are_timed_too():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 500)
            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(
                lambda: consumer.status().shards and measures(consumer).counters.committed_count == 500, "all commits"
            )
            assert measures(consumer).counters.calls.counts[0] == 500  # the bucket of the shortest times
            await consumer.stop()
            await running

    run(main)


def test_the_totals_of_a_run_include_shards_that_have_ended():
    async def main():
        async with stream_world(1) as world:
            world.put("abcdefgh")
            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(
                lambda: consumer.status().shards and shard(consumer).counters.handled_count == 8, "the first records"
            )
            world.split()
            world.put("abcdefgh")
            await until(lambda: len(consumer.status().shards) == 2, "the children")
            await until(lambda: measures(consumer).counters.committed_count == 16, "all records")
            assert sum(measured.counters.handled_count for measured in measures(consumer).shards) == 8  # the children
            assert measures(consumer).counters.handled_count == 16
            await consumer.stop()
            await running

    run(main)
