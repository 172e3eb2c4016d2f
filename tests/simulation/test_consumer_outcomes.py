"""What a consumer says of records that cannot be handled: where it stops, what it logs, and how its run ends."""

import asyncio
import logging
from dataclasses import replace

import pytest

from anabranch import Retry, events
from anabranch.errors import ShardStoppedError
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import QUICK, kinds, run, stream_world, until

EVERY_WAY = pytest.mark.parametrize("way", ["records", "by hand", "batches", "run", "run_batches", "key", "none"])


LOW, HIGH = "0", str((1 << 128) - 1)


def put_at(world, hash_key, data):
    """One record, of the first or the last shard."""
    world.call("PutRecord", PartitionKey="a", ExplicitHashKey=hash_key, Data=data)


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


# payloads that do not decode


@EVERY_WAY
def test_what_comes_before_a_payload_that_does_not_decode_is_handled_and_the_shard_stops_there_at_once(way):
    async def main():
        async with stream_world(1) as world:
            places = world.put_payloads(b"1", b"2", b"oops", b"4")
            store, happened, taken, tried = MemoryLeaseStore(), [], [], []

            def decode(data):
                tried.append(data)
                return int(data)

            with pytest.raises(ShardStoppedError):
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
            assert stop.reason.error == f"ValueError: {failed.exception}"
            assert stop.exception is failed.exception
            (row,) = await store.read_leases()
            assert str(row.checkpoint.watermark) == places[1]
            taken.clear()
            await consume(world, way, taken.append, leases=store, decode=bytes)  # the next deploy can read it
            assert [one.data for item in taken for one in getattr(item, "records", [item])] == [b"oops", b"4"]

    run(main)


def test_a_batch_before_a_payload_that_does_not_decode_is_tried_again_as_any_other():
    async def main():
        async with stream_world(1) as world:
            places, attempts, happened = world.put_payloads(b"1", b"2", b"oops"), [], []

            async def handle(batch, context):
                attempts.append(([record.value for record in batch], context.attempt))
                if len(attempts) < 3:
                    raise LookupError("later")

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", decode=int, on_event=happened.append,
                on_failure=Retry(attempts=3, backoff=0),
            )  # fmt: skip
            with pytest.raises(ShardStoppedError):
                await consumer.run_batches(handle, max_wait=0.1)
            assert attempts == [([1, 2], 1), ([1, 2], 2), ([1, 2], 1)]  # whole, once more, then halves
            (stop,) = kinds(happened, events.ShardStopped)
            assert stop.position == places[2]

    run(main)


def test_a_batch_that_is_not_acknowledged_is_not_passed_by_the_stop_after_it():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1", b"2", b"oops")
            store = MemoryLeaseStore()
            async with world.consumer(app="billing", leases=store, decode=int) as consumer:
                async for batch in consumer.batches(max_wait=0.1):
                    assert [record.value for record in batch] == [1, 2]
                    break
            (row,) = await store.read_leases()
            assert (row.checkpoint.watermark, row.stopped) == (None, None)

    run(main)


# what is logged


def failing(record):
    raise LookupError(f"no customer {record.partition_key}")


@pytest.mark.parametrize("way", ["run", "run_batches"])
def test_the_first_and_the_last_failed_attempt_are_logged_with_their_traceback(way, caplog):
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1")
            happened = []

            async def handle(item):
                failing(getattr(item, "records", [item])[0])

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append,
                on_failure=Retry(attempts=4, backoff=0),
            )  # fmt: skip
            batches = way == "run_batches"
            running = consumer.run_batches(handle) if batches else consumer.run(handle)
            with pytest.raises(ShardStoppedError):
                await running
            failures = kinds(happened, events.HandlerFailed)
            assert [event.attempt for event in failures] == [1, 2, 3, 4]
            assert all(isinstance(event.exception, LookupError) for event in failures)

    caplog.set_level(logging.INFO, "anabranch")
    run(main)
    logged = [record for record in caplog.records if getattr(record, "event", None) == "HandlerFailed"]
    assert [record.exc_info is not None for record in logged] == [True, False, False, True]
    assert "in failing" in caplog.text


def test_tracebacks_are_left_out_while_many_calls_fail_and_the_last_attempts_have_a_limit_of_their_own(caplog):
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(*[b"1"] * 40)
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
            with pytest.raises(ShardStoppedError):
                await consumer.run(handle)

    caplog.set_level(logging.INFO, "anabranch")
    run(main)
    first = [record for record in caplog.records if "attempt 1 at" in record.getMessage()]
    last = [record for record in caplog.records if "attempt 2 at" in record.getMessage()]
    assert len(first) == 40
    assert sum(record.exc_info is not None for record in first) == 10
    assert first[-1].getMessage().endswith("(no traceback: 10 were logged in the last minute)")
    assert last[0].exc_info is not None


# how the run ends


ENDS = pytest.mark.parametrize("ends", [{"until": "tip"}, {"until": None, "idle_timeout": 0.3}], ids=["tip", "idle"])


@EVERY_WAY
@ENDS
def test_a_run_that_ends_by_itself_with_a_stopped_shard_raises_and_names_record_and_error(way, ends):
    async def main():
        async with stream_world(1) as world:
            places = world.put_payloads(b"1", b"oops", b"3")
            with pytest.raises(ShardStoppedError) as raised:
                await consume(world, way, lambda item: None, leases="memory://", decode=int, **ends)
            report = raised.value.report
            (stopped,) = report.stopped
            assert (stopped.stream, stopped.shard_id) == ("orders", "shardId-000000000000")
            assert (stopped.position, stopped.partition_key, stopped.record.data) == (places[1], "key-1", b"oops")
            assert raised.value.__cause__ is stopped.error
            assert places[1] in str(raised.value)
            assert "DecodeError" in str(raised.value)
            assert (report.clean, report.committed, report.released) == (False, True, True)

    run(main)


def test_other_shards_are_handled_to_the_end_before_a_stopped_one_is_raised():
    async def main():
        async with stream_world(2) as world:
            for number in range(40):
                put_at(world, HIGH if number % 2 else LOW, str(number).encode())
            seen = []

            async def handle(record):
                if record.data == b"0":
                    failing(record)
                await asyncio.sleep(0.01)
                seen.append(int(record.data))

            consumer = world.consumer(app="billing", leases="memory://", until="tip", on_failure=Retry(attempts=1))
            with pytest.raises(ShardStoppedError) as raised:
                await consumer.run(handle)
            assert seen == list(range(1, 40, 2))
            assert [shard.shard_id for shard in raised.value.report.stopped] == ["shardId-000000000000"]

    run(main)


def test_a_run_that_is_stopped_returns_the_report_which_is_not_clean():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1")
            happened = []
            consumer = world.consumer(
                app="billing", leases="memory://", on_event=happened.append, on_failure=Retry(attempts=1)
            )
            running = asyncio.create_task(consumer.run(failing))
            await until(lambda: kinds(happened, events.ShardStopped), "the stop of the shard")
            assert len((await consumer.stop()).stopped) == 1
            report = await running
            assert not report.clean
            assert isinstance(report.stopped[0].error, LookupError)
            assert (report.leftovers, report.committed, report.released) == ((), True, True)

    run(main)


async def loop_until_the_run_has_ended(world, error=None):
    """One shard stops, and records of the other one follow. After the run has ended by itself, the loop is left, or its
    body raises the error.
    """
    happened = []
    put_at(world, LOW, b"oops")
    put_at(world, HIGH, b"1")
    async with world.consumer(
        app="billing", leases="memory://", decode=int, acknowledge="manual", idle_timeout=0.2, on_event=happened.append
    ) as consumer:
        async for record in consumer:
            consumer.ack(record)
            if kinds(happened, events.ShardStopped):
                await until(lambda: kinds(happened, events.ConsumerStopped), "the end of the run")
                if error is None:
                    break
                raise error
            put_at(world, HIGH, b"1")


def test_a_loop_that_is_left_after_its_run_ended_by_itself_raises_where_the_consumer_is_closed():
    async def main():
        async with stream_world(2) as world:
            with pytest.raises(ShardStoppedError):
                await loop_until_the_run_has_ended(world)

    run(main)


def test_an_error_in_the_body_of_a_loop_is_not_hidden_by_a_stopped_shard():
    async def main():
        async with stream_world(2) as world:
            with pytest.raises(LookupError) as raised:
                await loop_until_the_run_has_ended(world, LookupError("no such customer"))
            assert isinstance(raised.value.__context__, ShardStoppedError)
            assert "its payload does not decode" in raised.value.__notes__[0]

    run(main)


def test_a_run_whose_shards_are_all_stopped_raises_after_a_minute():
    async def main():
        async with stream_world(2) as world:
            put_at(world, LOW, b"0")
            happened, seen = [], []

            async def handle(record):
                if record.data == b"0":
                    failing(record)
                seen.append(record)

            consumer = world.consumer(
                app="billing", leases="memory://", on_event=happened.append, on_failure=Retry(attempts=1)
            )
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(lambda: kinds(happened, events.ShardStopped), "the stop of the first shard")
            await asyncio.sleep(90)
            assert not running.done()  # the other shard is not stopped
            put_at(world, HIGH, b"1")
            await until(lambda: seen, "a record of the other shard")
            put_at(world, HIGH, b"0")
            with pytest.raises(ShardStoppedError, match="all its shards have been stopped") as raised:
                await running
            assert len(raised.value.report.stopped) == 2

    run(main)


def test_a_run_whose_shards_are_all_stopped_continues_while_there_is_something_else_to_take():
    async def main():
        async with stream_world(2) as world:
            happened, taken = [], []
            patient = replace(QUICK, leases=replace(QUICK.leases, expiry=100.0, stall_limit=120.0))
            options = {"app": "billing", "leases": MemoryLeaseStore(), "on_failure": Retry(attempts=1)}
            options["settings"] = patient
            first = world.consumer(on_event=happened.append, **options)
            running = asyncio.create_task(first.run(failing, handle_signals=False))
            await until(lambda: len(kinds(happened, events.ShardStarted)) == 2, "both shards with one worker")
            other = world.consumer(on_event=taken.append, **options)
            dying = asyncio.create_task(other.run(failing, handle_signals=False))
            await until(lambda: kinds(taken, events.ShardStarted), "one shard with the other worker", 300)
            await other._consumer_run.cancel()  # it dies, and its lease has to expire
            await dying
            put_at(world, LOW, b"0")
            put_at(world, HIGH, b"0")
            with pytest.raises(ShardStoppedError) as raised:
                await running
            assert len(raised.value.report.stopped) == 2

    run(main)


def test_a_call_that_outlasts_the_stop_of_its_shard_is_committed_when_it_has_finished():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"takes long", b"fails")
            store, happened, seen, go_on = MemoryLeaseStore(), [], [], asyncio.Event()

            async def handle(record):
                if record.data == b"fails":
                    failing(record)
                await go_on.wait()

            consumer = world.consumer(
                app="billing", leases=store, order="key", on_event=happened.append, on_failure=Retry(attempts=1),
                settings=replace(QUICK, leases=replace(QUICK.leases, drain_deadline=0.1)),
            )  # fmt: skip
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(lambda: kinds(happened, events.ShardStopped), "the stop of the shard")
            go_on.set()
            assert len((await consumer.stop()).stopped) == 1
            await running
            (row,) = await store.read_leases()
            assert row.stopped is not None
            await world.consumer(app="billing", leases=store, order="key", until="tip").run(seen.append)
            assert [record.data for record in seen] == [b"fails"]

    run(main)


def test_a_shard_that_another_worker_stopped_is_not_taken_for_success_either():
    async def main():
        async with stream_world(1) as world:
            store, happened = MemoryLeaseStore(), []
            other = world.consumer(app="billing", leases=store, idle_timeout=1.5, on_event=happened.append)
            first = world.consumer(app="billing", leases=store, on_failure=Retry(attempts=1), on_event=happened.append)
            stopped = asyncio.create_task(first.run(failing, handle_signals=False))
            await until(lambda: kinds(happened, events.ShardStarted), "the first owner")
            waiting = asyncio.create_task(other.run(failing, handle_signals=False))
            await until(lambda: len(kinds(happened, events.ConsumerStarted)) == 2, "the other worker")
            (place,) = world.put_payloads(b"1")
            await until(lambda: kinds(happened, events.ShardStopped), "the stop of the shard")
            await first.stop()
            await stopped
            with pytest.raises(ShardStoppedError) as raised:
                await waiting
            (shard,) = raised.value.report.stopped
            assert (shard.position, shard.record, shard.error) == (place, None, None)
            assert "no customer key-0" in shard.reason.error

    run(main)
