"""Batches that fail: the record to blame is found, and all others are handled once."""

import asyncio

import pytest

import anabranch
from anabranch import BatchFailure, Retry, events
from anabranch.errors import ConfigurationError, ShardStoppedError
from anabranch.stores import MemoryLeaseStore

from simulated_stream import numbers, run, stream_world


def test_one_bad_record_in_a_batch_of_five_hundred_stops_the_shard_there_and_each_one_before_it_is_handled_once():
    async def main():
        async with stream_world(1) as world:
            world.put(["user"] * 500)
            done, happened, store = [], [], MemoryLeaseStore()

            async def handle(batch):
                if any(record.data == b"321" for record in batch):
                    raise ValueError("no such customer")
                done.extend(int(record.data) for record in batch)

            consumer = world.consumer(
                app="billing", leases=store, until="tip", on_event=happened.append,
                on_failure=Retry(attempts=3, backoff=0.01),
            )  # fmt: skip
            with pytest.raises(ShardStoppedError) as stopped:
                await consumer.run_batches(handle, max_wait=0.1, handle_signals=False)
            assert done == list(range(321))
            (shard,) = stopped.value.report.stopped
            assert shard.record.data == b"321"
            assert shard.reason.attempts == 3
            failed = [event for event in happened if isinstance(event, events.HandlerFailed)]
            assert [event.record_count for event in failed].count(1) == 3
            assert len(failed) < 15  # halving, not one call for each record
            (row,) = await store.read_leases()
            assert row.stopped.position == shard.record.position

    run(main)


def batches_if_the_first_fails(count, error_of):
    """The numbers of the records of each call, where the first call raises `error_of(batch)`."""
    calls = []

    async def handle(batch):
        calls.append(numbers(batch))
        if len(calls) == 1:
            raise error_of(batch)

    async def main():
        async with stream_world(1) as world:
            world.put(["user"] * count)
            consumer = world.consumer(app="billing", leases="memory://", until="tip", on_failure=Retry(backoff=0.01))
            await consumer.run_batches(handle, max_wait=0.1, handle_signals=False)

    run(main)
    return calls


def test_an_outage_of_one_call_repeats_the_batch_whole_and_nothing_else():
    calls = batches_if_the_first_fails(500, lambda _: ConnectionError("the database is down"))
    assert calls == [list(range(500))] * 2


@pytest.mark.parametrize("failed", [[7], [7, 3], [3, 4, 5]])
def test_a_handler_can_say_which_records_failed_and_those_before_the_first_are_finished(failed):
    def error_of(batch):
        return BatchFailure(failed=[record for record in batch if int(record.data) in failed])

    assert batches_if_the_first_fails(10, error_of) == [list(range(10)), list(range(min(failed), 10))]


def test_a_failure_that_names_no_record_of_its_batch_fails_all_of_it():
    another = anabranch.testing.make_record(b"of another batch")
    assert batches_if_the_first_fails(4, lambda _: BatchFailure(failed=[another])) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("failed", [[], ["no record"], [None]])
def test_a_batch_failure_without_records_is_refused(failed):
    with pytest.raises(ConfigurationError, match="at least one"):
        BatchFailure(failed=failed)


def test_a_batch_that_waits_for_its_retry_does_not_occupy_a_runner():
    async def main():
        async with stream_world(2) as world:
            world.put([f"user-{number}" for number in range(40)])
            failing, handled = asyncio.Event(), set()

            async def handle(batch):
                if not failing.is_set():
                    failing.set()
                    raise ValueError("later")
                handled.add(batch.shard_id)

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", concurrency=1, on_failure=Retry(backoff=20.0)
            )
            await consumer.run_batches(handle, max_wait=0.1, handle_signals=False)
            assert len(handled) == 2

    run(main)
