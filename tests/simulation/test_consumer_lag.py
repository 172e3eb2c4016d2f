"""The lag of a shard is the age of its oldest unfinished record (rule O4), and what a run counts."""

import asyncio

import pytest

from anabranch import Retry

from simulated_stream import run, stream_world, until


def measures(consumer):
    return consumer._consumer_run.measures()


def shard(consumer):
    return consumer.status().shards[0]


@pytest.mark.parametrize("read", ["polling", "fanout"])
@pytest.mark.parametrize("order", ["shard", "key"])
def test_a_slow_handler_with_old_records_in_its_window_shows_their_age(order, read):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 1_000)
            await asyncio.sleep(300)

            async def slow(record):
                await asyncio.sleep(100)

            consumer = world.consumer(app="billing", leases="memory://", order=order, read=read)
            running = asyncio.create_task(consumer.run(slow))
            await until(lambda: consumer.status().shards and shard(consumer).unfinished_count, "a record in hand")
            await asyncio.sleep(5)
            state = shard(consumer)
            assert state.millis_behind_latest == 0  # everything was read
            started = 305 if read == "polling" else 307.5  # a consumer is registered first, and subscribes in turn
            assert state.lag == pytest.approx(started, abs=3)
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
            for _ in range(100):  # also while nothing arrives for the whole time of a subscription
                await asyncio.sleep(5)
                assert (shard(consumer).lag, shard(consumer).millis_behind_latest) == (0, 0)
            await consumer.stop()
            await running

    run(main, seconds=10_000)


def test_a_shard_that_cannot_be_read_may_be_behind_by_that_time():
    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(lambda: consumer.status().shards and shard(consumer).lag == 0, "a read")
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


def test_a_stopped_shard_is_behind_by_the_age_of_its_record():
    async def main():
        async with stream_world(1) as world:
            world.put("ab")

            async def fail(record):
                raise ValueError("poison")

            consumer = world.consumer(app="billing", leases="memory://", on_failure=Retry(attempts=2, backoff=0.1))
            running = asyncio.create_task(consumer.run(fail))
            await until(lambda: consumer.status().shards and shard(consumer).phase == "stopped", "the stop")
            counted = measures(consumer).counters
            assert (counted.failed_count, counted.retry_count, counted.handled_count) == (2, 1, 0)
            await asyncio.sleep(40)
            assert shard(consumer).lag == pytest.approx(40, abs=2)
            await consumer.stop()
            await running

    run(main, seconds=10_000)


# what is counted


async def loop_over_records(consumer):
    async with consumer:
        async for _ in consumer:
            await asyncio.sleep(0.015)


async def loop_over_batches(consumer):
    async with consumer:
        async for batch in consumer.batches():
            await asyncio.sleep(0.015 * len(batch))


async def acknowledge_each(consumer):
    async with consumer:
        async for record in consumer:
            await asyncio.sleep(0.015)
            consumer.ack(record)


async def handle(record):
    await asyncio.sleep(0.015)


async def handle_batch(batch):
    await asyncio.sleep(0.015 * len(batch))


@pytest.mark.parametrize(
    "consume, options, calls",
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
def test_every_way_to_consume_counts_records_bytes_and_times(consume, options, calls):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 40)
            consumer = world.consumer(app="billing", leases="memory://", **options)
            running = asyncio.create_task(consume(consumer))
            await until(lambda: consumer.status().shards and measures(consumer).counters.committed_count == 40, "all")
            found = measures(consumer)
            counted, read_bytes = found.counters, sum(len(str(number)) + 1 for number in range(40))
            assert (counted.read_count, counted.handled_count, counted.committed_count) == (40, 40, 40)
            assert (counted.read_bytes, counted.handled_bytes) == (read_bytes, read_bytes)
            assert counted.calls.count == calls
            assert counted.calls.total_ms == pytest.approx(600, abs=45)
            assert found.store_calls.count > 3
            assert (found.lease_taken_count, found.store_failure_count) == (1, 0)
            assert [shard.held_bytes for shard in found.shards] == [0]
            assert found.shards[0].counters == counted
            await consumer.stop()
            await asyncio.gather(running, return_exceptions=True)

    run(main)


def test_calls_that_never_wait_are_timed_as_well():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 500)
            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(lambda: consumer.status().shards and measures(consumer).counters.committed_count == 500, "all")
            assert measures(consumer).counters.calls.counts[0] == 500
            await consumer.stop()
            await running

    run(main)


def test_totals_keep_what_was_counted_of_shards_that_are_gone():
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
            assert sum(one.counters.handled_count for one in measures(consumer).shards) == 8
            assert measures(consumer).counters.handled_count == 16
            await consumer.stop()
            await running

    run(main)
