"""What follows the last attempt: a record is skipped or goes to the dead letters, and the shard goes on."""

import asyncio
from dataclasses import replace

import pytest

from anabranch import DeadLetter, Retry, Skip, events, reasons
from anabranch.errors import ConfigurationError, DeadLetterError, ShardStoppedError
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import QUICK, kinds, run, stream_world, until

WAYS = ["records", "by hand", "batches", "run", "run_batches", "key", "none"]
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
EVERY_HANDLER = pytest.mark.parametrize("way", ["run", "run_batches", "key", "none"])


async def consume(world, way, take, **options):
    """Hands each record to `take`, in one of the ways that there are. A batch ends at the first that it refuses."""
    order = way if way in {"key", "none"} else "shard"
    options = {"app": "billing", "until": "tip", "order": order, **options}
    acknowledge = "manual" if way == "by hand" else "auto"
    async with world.consumer(acknowledge=acknowledge, **options) as consumer:
        if way in {"records", "by hand"}:
            async for record in consumer:
                take(record)
                if way == "by hand":
                    consumer.ack(record)
            return await consumer.stop()
        if way == "batches":
            async for batch in consumer.batches(max_wait=0.1):
                for record in batch:
                    take(record)
            return await consumer.stop()

        async def handle(item):
            for record in getattr(item, "records", [item]):
                take(record)

        if way == "run_batches":
            return await consumer.run_batches(handle, max_wait=0.1)
        return await consumer.run(handle)


class Letters:
    """A destination: an async function that keeps the letters."""

    def __init__(self):
        self.written = []
        self.fails = False

    async def __call__(self, letter):
        await asyncio.sleep(0.01)
        if self.fails:
            raise DeadLetterError("the queue is away")
        self.written.append(letter)


def refuse(*payloads):
    taken = []

    def take(record):
        if record.data in payloads:
            raise LookupError(f"no customer {record.data.decode()}")
        taken.append(record.data)

    return take, taken


@EVERY_HANDLER
@pytest.mark.parametrize("then", ["skip", "letter"])
def test_a_record_that_keeps_failing_is_passed_and_all_others_are_handled(way, then):
    async def main():
        async with stream_world(1) as world:
            places = world.put_payloads(b"1", b"2", b"poison", b"4", b"5")
            letters, happened, (take, taken) = Letters(), [], refuse(b"poison")
            report = await consume(
                world, way, take, leases="memory://", on_event=happened.append,
                on_failure=Retry(attempts=3, backoff=0.01, then=Skip() if then == "skip" else DeadLetter(letters)),
            )  # fmt: skip
            assert set(taken) == {b"1", b"2", b"4", b"5"}
            assert report.clean
            (stopped,) = kinds(happened, events.ConsumerStopped)
            assert (stopped.skipped_count, stopped.dead_letter_count) == (
                report.skipped_count,
                report.dead_letter_count,
            )
            if then == "skip":
                assert (report.skipped_count, report.dead_letter_count) == (1, 0)
                (skipped,) = kinds(happened, events.RecordSkipped)
                assert (skipped.position, skipped.partition_key) == (places[2], "key-2")
                return
            assert (report.skipped_count, report.dead_letter_count) == (0, 1)
            (letter,) = letters.written
            assert (letter.sequence_number, letter.partition_key, letter.payload) == (places[2], "key-2", b"poison")
            assert (letter.app, letter.stream, letter.shard_id) == ("billing", "orders", "shardId-000000000000")
            assert (letter.error_type, letter.message) == ("LookupError", "no customer poison")
            assert "in take" in letter.stack
            assert "_engine" not in letter.stack
            assert (letter.attempts, len(letter.attempted_seconds), letter.recovered) == (3, 3, False)
            (event,) = kinds(happened, events.RecordDeadLettered)
            assert (event.position, event.attempts, event.error_type) == (places[2], 3, "LookupError")

    run(main)


@EVERY_HANDLER
def test_a_letter_says_when_each_call_started(way):
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"poison")
            letters, began = Letters(), []

            async def fail_slowly(item):
                began.append(asyncio.get_running_loop().time())
                await asyncio.sleep(5)
                raise LookupError

            order = way if way in {"key", "none"} else "shard"
            policy = Retry(attempts=2, backoff=0.0, then=DeadLetter(letters))
            async with world.consumer(
                app="billing", until="tip", order=order, leases="memory://", on_failure=policy
            ) as consumer:
                await (consumer.run_batches if way == "run_batches" else consumer.run)(fail_slowly)
            (letter,) = letters.written
            ages = [letter.written_seconds - one for one in letter.attempted_seconds]
            assert ages == pytest.approx([10, 5], abs=0.1)
            assert began[1] - began[0] == pytest.approx(5, abs=0.1)

    run(main)


@EVERY_WAY
@pytest.mark.parametrize("then", ["skip", "letter"])
def test_a_payload_that_does_not_decode_follows_the_same_policy_at_once(way, then):
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1", b"oops", b"3", b"oops", b"oops", b"6")
            letters, happened, taken = Letters(), [], []
            await consume(
                world, way, lambda record: taken.append(record.value), leases="memory://", decode=int,
                on_event=happened.append,
                on_failure=Retry(attempts=3, then=Skip() if then == "skip" else DeadLetter(letters)),
            )  # fmt: skip
            assert sorted(taken) == [1, 3, 6]
            assert len(kinds(happened, events.HandlerFailed)) == 3  # no second attempt
            if then == "skip":
                assert len(kinds(happened, events.RecordSkipped)) == 3
            else:
                assert [letter.payload for letter in letters.written] == [b"oops"] * 3
                assert {letter.attempts for letter in letters.written} == {1}
                assert len({letter.idempotency_key for letter in letters.written}) == 3

    run(main)


@EVERY_HANDLER
def test_a_destination_that_is_down_is_the_reason_and_nothing_is_lost(way):
    async def main():
        async with stream_world(1) as world:
            (place, *_) = world.put_payloads(b"poison", b"2", b"3")
            letters, happened, (take, taken) = Letters(), [], refuse(b"poison")
            letters.fails = True
            async with world.consumer(
                app="billing", leases="memory://", order=way if way in {"key", "none"} else "shard",
                start="trim_horizon", on_event=happened.append,
                on_failure=Retry(attempts=1, then=DeadLetter(letters)),
            ) as consumer:  # fmt: skip

                async def handle(item):
                    for record in getattr(item, "records", [item]):
                        take(record)

                running = consumer.run_batches(handle, max_wait=0.1) if way == "run_batches" else consumer.run(handle)
                task = asyncio.ensure_future(running)
                await until(lambda: kinds(happened, events.ShardStalled), "the reason")
                (began,) = kinds(happened, events.ShardStalled)
                assert isinstance(began.reason, reasons.LetterNotWritten)
                assert began.reason.position == place
                assert "the queue is away" in began.reason.error
                (shard,) = consumer.status().shards
                assert shard.reason == began.reason
                assert taken == ([b"2", b"3"] if way in {"key", "none"} else [])
                letters.fails = False
                await until(lambda: letters.written and len(taken) == 2, "the rest")
                assert consumer.status().shards[0].reason is None
                await consumer.stop()
                await task

    run(main)


@pytest.mark.parametrize("then", ["skip", "letter"])
@pytest.mark.parametrize("way", ["run", "key", "run_batches"])
def test_an_outage_is_not_poison(way, then):
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(*(str(number).encode() for number in range(60)))
            letters, store, taken = Letters(), MemoryLeaseStore(), []

            def take(record):
                if int(record.data) >= 10:
                    raise ConnectionError("the database is down")
                taken.append(record.data)

            policy = Retry(attempts=1, backoff=0, then=Skip() if then == "skip" else DeadLetter(letters))
            with pytest.raises(ShardStoppedError) as caught:
                await consume(world, way, take, leases=store, on_failure=policy)
            (stopped,) = caught.value.report.stopped
            assert isinstance(stopped.reason, reasons.LooksLikeOutage)
            assert "looks like an outage, not poison: 20 failed in a row" in str(stopped)
            assert "ConnectionError: the database is down" in str(stopped)
            passed = caught.value.report.skipped_count + caught.value.report.dead_letter_count
            assert passed == 20
            taken.clear()
            await consume(world, way, lambda record: taken.append(record.data), leases=store, on_failure=policy)
            assert len(taken) == 30  # it is over: the rest is handled

    run(main)


def test_more_letters_in_a_minute_than_allowed_look_like_an_outage():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(*(b"poison" if number % 2 else b"fine" for number in range(20)))
            letters, (take, taken) = Letters(), refuse(b"poison")
            policy = Retry(attempts=1, then=DeadLetter(letters, per_minute=5))
            with pytest.raises(ShardStoppedError, match="5 failed in a minute"):
                await consume(world, "run", take, leases="memory://", on_failure=policy)
            assert len(letters.written) == 5
            assert len(taken) == 6

    run(main)


def test_errors_to_give_up_on_are_not_retried():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1", b"poison", b"3")
            happened, (take, taken) = [], refuse(b"poison")
            await consume(
                world, "run", take, leases="memory://", on_event=happened.append,
                on_failure=Retry(attempts=5, give_up_on=(KeyError, LookupError), then=Skip()),
            )  # fmt: skip
            assert taken == [b"1", b"3"]
            assert len(kinds(happened, events.HandlerFailed)) == 1

    run(main)


def test_a_batch_with_an_error_to_give_up_on_is_halved_at_once():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1", b"poison", b"3", b"4")
            happened, (take, taken) = [], refuse(b"poison")
            await consume(
                world, "run_batches", take, leases="memory://", on_event=happened.append,
                on_failure=Retry(attempts=5, backoff=0, give_up_on=(LookupError,), then=Skip()),
            )  # fmt: skip
            assert [failed.record_count for failed in kinds(happened, events.HandlerFailed)] == [4, 2, 1]
            assert set(taken) == {b"1", b"3", b"4"}

    run(main)


def test_a_record_that_is_too_old_by_the_services_clock_is_not_retried():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"poison", b"2")
            happened, (take, taken) = [], refuse(b"poison")
            await consume(
                world, "run", take, leases="memory://", on_event=happened.append,
                on_failure=Retry(attempts=1000, backoff=1.0, backoff_max=1.0, max_age=20.0, then=Skip()),
            )  # fmt: skip
            assert taken == [b"2"]
            failed = kinds(happened, events.HandlerFailed)
            assert 15 < len(failed) < 200
            assert failed[-1].retry_in_ms is None

    run(main)


def test_the_records_behind_a_letter_wait_for_it_within_their_key_only():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"poison", b"a2", key="a")
            world.put_payloads(b"b1", b"b2", key="b")
            letters, (take, taken) = Letters(), refuse(b"poison")

            async def slow(letter):
                await asyncio.sleep(5)
                assert taken == [b"b1", b"b2"]
                await letters(letter)

            await consume(
                world, "key", take, leases="memory://", on_failure=Retry(attempts=1, then=DeadLetter(slow)),
            )  # fmt: skip
            assert taken == [b"b1", b"b2", b"a2"]

    run(main)


async def leave_a_letter_unwritten(world, way, store, *, letters=None):
    """A worker that stops while its destination is down."""
    happened, (take, taken) = [], refuse(b"poison")
    letters = letters or Letters()
    letters.fails = True
    async with world.consumer(
        app="billing", leases=store, order=way if way in {"key", "none"} else "shard", on_event=happened.append,
        on_failure=Retry(attempts=2, backoff=0.01, then=DeadLetter(letters)),
    ) as consumer:  # fmt: skip

        async def handle(item):
            for record in getattr(item, "records", [item]):
                take(record)

        running = consumer.run_batches(handle, max_wait=0.1) if way == "run_batches" else consumer.run(handle)
        task = asyncio.ensure_future(running)
        await until(lambda: kinds(happened, events.ShardStalled), "the reason")
        await consumer.stop()
        await task
    (row,) = await store.read_leases()
    (key,) = row.checkpoint.open_keys
    assert (key.state, key.attempts, key.error_type) == ("dead_lettering", 2, "LookupError")
    return taken


@pytest.mark.parametrize("then_way", WAYS)
@EVERY_HANDLER
def test_the_next_owner_writes_the_letter_and_does_not_call_the_handler(way, then_way):
    async def main():
        async with stream_world(1) as world:
            places, store, letters = world.put_payloads(b"1", b"poison", b"3"), MemoryLeaseStore(), Letters()
            taken = await leave_a_letter_unwritten(world, way, store)
            taken_later = []
            await consume(
                world, then_way, lambda record: taken_later.append(record.data), leases=store,
                on_failure=Retry(then=DeadLetter(letters)),
            )  # fmt: skip
            assert b"poison" not in taken_later
            assert set(taken + taken_later) == {b"1", b"3"}
            (letter,) = letters.written
            assert (letter.sequence_number, letter.payload, letter.recovered) == (places[1], b"poison", True)
            assert (letter.error_type, letter.attempts, letter.stack) == ("LookupError", 2, "")
            assert len(letter.fingerprint) == 16
            (row,) = await store.read_leases()
            assert row.checkpoint.open_keys == ()
            assert str(row.checkpoint.watermark) == places[2]

    run(main)


@pytest.mark.parametrize("shard_is_gone", [False, True])
@EVERY_HANDLER
def test_a_letter_is_written_without_the_record_if_that_was_trimmed(way, shard_is_gone):
    async def main():
        async with stream_world(1) as world:
            places, store, letters = world.put_payloads(b"1", b"poison", b"3"), MemoryLeaseStore(), Letters()
            await leave_a_letter_unwritten(world, way, store)
            if shard_is_gone:
                world.call("SplitShard", ShardToSplit="shardId-000000000000", NewStartingHashKey=str(1 << 127))
            await asyncio.sleep(25 * 3600)
            world.put_payloads(b"later")
            taken = []
            await consume(
                world, way, lambda record: taken.append(record.data), leases=store,
                on_failure=Retry(then=DeadLetter(letters)),
            )  # fmt: skip
            assert taken == [b"later"]
            (letter,) = letters.written
            assert (letter.sequence_number, letter.payload, letter.partition_key) == (places[1], None, None)
            assert (letter.recovered, letter.error_type, letter.attempts) == (True, "LookupError", 2)

    run(main, seconds=200_000)


def test_a_consumer_without_a_destination_says_what_an_open_letter_needs():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1", b"poison", b"3")
            store, happened = MemoryLeaseStore(), []
            await leave_a_letter_unwritten(world, "run", store)
            async with world.consumer(app="billing", leases=store, on_event=happened.append) as consumer:
                task = asyncio.ensure_future(consumer.run(lambda record: None))
                await until(lambda: kinds(happened, events.ShardStalled), "the reason")
                assert "Retry(then=DeadLetter(...))" in kinds(happened, events.ShardStalled)[0].reason.error
                await consumer.stop()
                await task

    run(main)


def test_a_failing_record_at_the_end_of_a_shard_gets_the_last_step_of_its_policy():
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1", b"poison")
            world.call("SplitShard", ShardToSplit="shardId-000000000000", NewStartingHashKey=str(1 << 127))
            world.put_payloads(b"3")
            letters, (take, taken) = Letters(), refuse(b"poison")
            await consume(
                world, "run", take, leases="memory://", settings=replace(QUICK, at_shard_end="finish"),
                on_failure=Retry(attempts=100, backoff=5.0, then=DeadLetter(letters)),
            )  # fmt: skip
            assert taken == [b"1", b"3"]
            (letter,) = letters.written
            assert (letter.payload, letter.attempts, letter.error_type) == (b"poison", 1, "LookupError")

    run(main)


def test_a_destination_is_checked_at_the_start():
    class Checked(Letters):
        async def check(self, retention_hours):
            assert retention_hours == 24
            if self.fails:
                raise DeadLetterError("no such queue", code="missing", advice="create it")
            return ["it keeps letters for 4 days"]

    async def main():
        async with stream_world(1) as world:
            letters, happened = Checked(), []
            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append,
                on_failure=Retry(then=DeadLetter(letters)),
            )  # fmt: skip
            consumer._open_letters = lambda store: letters
            letters.close = _close
            await consumer.run(lambda record: None)
            (warning,) = kinds(happened, events.DeadLettersWarning)
            assert warning.warning == "it keeps letters for 4 days"
            letters.fails = True
            with pytest.raises(DeadLetterError, match="no such queue: create it"):
                await consumer.run(lambda record: None)

    run(main)


async def _close():
    """Nothing is open."""


@pytest.mark.parametrize(
    "policy, message",
    [
        (DeadLetter(), "needs app="),
        (DeadLetter("sqs://"), "sqs://"),
        (DeadLetter("https://queue"), "https://queue"),
        (DeadLetter(print), "the dead letter function print is not async: make it an async def"),
    ],
)
def test_a_destination_that_cannot_be_is_refused_by_name_when_the_consumer_is_made(policy, message):
    async def main():
        async with stream_world(1) as world:
            with pytest.raises(ConfigurationError, match=message):
                world.consumer(on_failure=Retry(then=policy), app=None if policy.url is None else "billing")

    run(main)
