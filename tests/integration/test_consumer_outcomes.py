"""What a consumer says of records that cannot be handled: where it stops, what it logs, and how its run ends."""

import asyncio
import logging

import pytest

from anabranch import Retry, events
from anabranch.stores.memory import MemoryLeaseStore

from stream_world import run, stream_world

EVERY_WAY = pytest.mark.parametrize("way", ["records", "by hand", "batches", "run", "run_batches", "key", "none"])


def put(world, *payloads):
    """One record a payload, each with a key of its own; their sequence numbers."""
    return [
        world.call("PutRecord", PartitionKey=f"key-{number}", Data=data)["SequenceNumber"]
        for number, data in enumerate(payloads)
    ]


async def consume(world, way, take, **options):
    """Hands the records, or the lists of them, to `take`, in one of the ways that there are."""
    order = way if way in {"key", "none"} else "shard"
    options = {"app": "billing", "until": "tip", "order": order, **options}
    acknowledge = "manual" if way == "by hand" else "auto"
    async with world.consumer(acknowledge=acknowledge, **options) as consumer:
        if way in {"records", "by hand"}:
            async for record in consumer:
                take(record)
                if way == "by hand":
                    consumer.ack(record)
        elif way == "batches":
            async for batch in consumer.batches(max_wait=0.1):
                take(batch)
        elif way == "run_batches":
            await consumer.run_batches(as_handler(take), max_wait=0.1)
        else:
            await consumer.run(as_handler(take))


def as_handler(take):
    async def handle(item):
        take(item)

    return handle


def kinds(happened, kind):
    return [event for event in happened if isinstance(event, kind)]


# payloads that do not decode


@EVERY_WAY
def test_what_comes_before_a_payload_that_does_not_decode_is_handled_and_the_shard_stops_there_at_once(way):
    async def main():
        async with stream_world(1) as world:
            places = put(world, b"1", b"2", b"oops", b"4")
            store, happened, taken, tried = MemoryLeaseStore(), [], [], []

            def decode(data):
                tried.append(data)
                return int(data)

            await consume(
                world, way, taken.append, leases=store, decode=decode, concurrency=1, on_event=happened.append,
                on_failure=Retry(attempts=5, backoff=0.01),
            )  # fmt: skip
            values = [[one.value for one in getattr(item, "records", [item])] for item in taken]
            assert values == ([[1, 2]] if "batches" in way else [[1], [2]])
            assert tried == [b"1", b"2", b"oops"]  # it would not decode the second time either
            (failed,) = kinds(happened, events.HandlerFailed)
            assert (failed.position, failed.attempt, failed.retry_in_ms) == (places[2], 1, None)
            assert isinstance(failed.exception, ValueError)
            (stop,) = kinds(happened, events.ShardStopped)
            assert (stop.position, stop.partition_key) == (places[2], "key-2")
            assert stop.reason == "its payload does not decode: ValueError: " + str(failed.exception)
            assert stop.exception is failed.exception
            (row,) = await store.read_leases()
            assert str(row.checkpoint.watermark) == places[1]
            taken.clear()
            await consume(world, way, taken.append, leases=store, decode=bytes)  # the next deploy can read it
            assert [one.data for item in taken for one in getattr(item, "records", [item])] == [b"oops", b"4"]

    run(main, 20)


def test_a_batch_before_a_payload_that_does_not_decode_is_tried_again_as_any_other():
    async def main():
        async with stream_world(1) as world:
            places, attempts, happened = put(world, b"1", b"2", b"oops"), [], []

            async def handle(batch, context):
                attempts.append(([record.value for record in batch], context.attempt))
                if context.attempt < 3:
                    raise LookupError("later")

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", decode=int, on_event=happened.append,
                on_failure=Retry(attempts=3, backoff=0),
            )  # fmt: skip
            await consumer.run_batches(handle, max_wait=0.1)
            assert attempts == [([1, 2], 1), ([1, 2], 2), ([1, 2], 3)]
            (stop,) = kinds(happened, events.ShardStopped)
            assert stop.position == places[2]

    run(main, 15)


def test_a_batch_that_is_not_acknowledged_is_not_passed_by_the_stop_after_it():
    async def main():
        async with stream_world(1) as world:
            put(world, b"1", b"2", b"oops")
            store = MemoryLeaseStore()
            async with world.consumer(app="billing", leases=store, decode=int) as consumer:
                async for batch in consumer.batches(max_wait=0.1):
                    assert [record.value for record in batch] == [1, 2]
                    break
            (row,) = await store.read_leases()
            assert (row.checkpoint.watermark, row.stopped) == (None, None)

    run(main, 15)


# what is logged


def failing(record):
    raise LookupError(f"no customer {record.partition_key}")


@pytest.mark.parametrize("way", ["run", "run_batches", "threads"])
def test_the_first_and_the_last_failed_attempt_are_logged_with_their_traceback(way, caplog):
    async def main():
        async with stream_world(1) as world:
            put(world, b"1")
            happened = []

            async def handle(item):
                failing(getattr(item, "records", [item])[0])

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append,
                on_failure=Retry(attempts=4, backoff=0),
            )  # fmt: skip
            if way == "run_batches":
                await consumer.run_batches(handle, max_wait=0.1)
            else:
                await consumer.run(failing if way == "threads" else handle)
            failures = kinds(happened, events.HandlerFailed)
            assert [event.attempt for event in failures] == [1, 2, 3, 4]
            assert all(isinstance(event.exception, LookupError) for event in failures)

    caplog.set_level(logging.INFO, "anabranch")
    run(main, 15)
    logged = [record for record in caplog.records if "attempt" in record.getMessage()]
    assert [record.exc_info is not None for record in logged] == [True, False, False, True]
    assert "in failing" in caplog.text


def test_tracebacks_are_left_out_while_many_calls_fail_and_the_last_attempts_have_a_limit_of_their_own(caplog):
    async def main():
        async with stream_world(1) as world:
            put(world, *[b"1"] * 40)
            calls, all_called = [], asyncio.Event()

            async def handle(record):
                calls.append(record)
                if len(calls) == 40:
                    all_called.set()
                await all_called.wait()
                failing(record)

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", order="key", concurrency=40,
                on_failure=Retry(attempts=2, backoff=0),
            )  # fmt: skip
            await consumer.run(handle)

    caplog.set_level(logging.INFO, "anabranch")
    run(main, 15)
    first = [record for record in caplog.records if "attempt 1 at" in record.getMessage()]
    last = [record for record in caplog.records if "attempt 2 at" in record.getMessage()]
    assert len(first) == 40
    assert sum(record.exc_info is not None for record in first) == 10
    assert first[-1].getMessage().endswith("(no traceback: 10 were logged in the last minute)")
    assert last[0].exc_info is not None


def test_a_process_logs_the_traceback_of_its_handler(caplog):
    async def main():
        async with stream_world(1) as world:
            put(world, b"1")
            consumer = world.consumer(app="billing", leases="memory://", until="tip", on_failure=Retry(attempts=1))
            await consumer.run(failing, processes=1)

    caplog.set_level(logging.INFO, "anabranch")
    run(main, 30)
    assert "in failing" in caplog.text
    assert "no customer key-0" in caplog.text
