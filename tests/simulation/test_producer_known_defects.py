"""Eighteen defects found in aiokpl 0.2.0, each as a test of our producer.

The tests run in virtual time on the local server's state, without sockets.
"""

import asyncio

import msgspec
import pytest
from memory_kinesis import MemoryKinesis, simulated, warm_up

from anabranch._wire.aggregate import open_aggregate
from anabranch.config import ProducerSettings
from anabranch.errors import AccessDeniedError, BufferFull, InvalidRequestError, TransportError
from anabranch.events import WriteFailed

DENIED = AccessDeniedError("no", operation="ListShards", code="AccessDeniedException")


@simulated
async def test_01_after_a_split_the_map_is_refreshed_and_no_write_repeats_forever():
    kinesis = MemoryKinesis()
    async with kinesis.producer() as producer:
        await warm_up(producer)
        kinesis.split()
        deliveries = await producer.put_many([(f"k{n}", b"%d" % n) for n in range(10)])
        assert all([(await delivery).delivered for delivery in deliveries])
        assert kinesis.calls["ListShards"] == 2
    assert sorted(kinesis.records()[1:]) == [(f"k{n}", b"%d" % n) for n in range(10)]
    assert len(list(kinesis.stored())) <= 1 + 1 + 10  # one aggregate that straddled, and its records once more


@simulated
async def test_02_while_no_map_is_known_records_of_different_shards_share_no_aggregate():
    kinesis = MemoryKinesis({"orders": 3})
    kinesis.before_list = lambda: TransportError("no listing")
    async with kinesis.producer() as producer:
        await producer.put_many([(f"k{n}", b"%d" % n) for n in range(20)])
        await producer.flush()
    assert all(open_aggregate(record["Data"]) is None for _, record in kinesis.stored())
    assert len(kinesis.records()) == 20


@simulated
async def test_03_leaving_delivers_what_is_in_flight():
    kinesis = MemoryKinesis(latency=2.0)
    async with kinesis.producer() as producer:
        deliveries = await producer.put_many([("k", b"%d" % n) for n in range(5)])
        await asyncio.sleep(0.5)
    assert all(delivery.result().delivered for delivery in deliveries)


@simulated
async def test_04_the_first_put_may_come_from_any_task_and_closing_from_another():
    kinesis = MemoryKinesis()
    producer = kinesis.producer()

    async def request():
        return await producer.put_and_wait(b"x", "k")

    results = await asyncio.gather(*(asyncio.ensure_future(request()) for _ in range(3)))
    assert all(result.delivered for result in results)
    await asyncio.ensure_future(producer.close())
    assert len(kinesis.records()) == 3


@simulated
async def test_05_a_missing_stream_fails_at_once_and_holds_back_nobody():
    kinesis = MemoryKinesis()
    loop = asyncio.get_running_loop()
    async with kinesis.producer() as producer:
        missing = await producer.put(b"1", "k", stream="not-there")
        assert (await producer.put_and_wait(b"2", "k")).delivered
        result = await missing
        assert result.error.startswith("ResourceNotFoundException")
        assert loop.time() < 0.1


@simulated
async def test_05_a_writer_that_may_not_list_shards_still_writes():
    kinesis = MemoryKinesis({"orders": 2})
    kinesis.before_list = lambda: DENIED
    async with kinesis.producer() as producer:
        assert (await producer.put_and_wait(b"1", "k")).delivered


@simulated
async def test_06_a_legal_record_of_nearly_a_mebibyte_passes_and_blocks_nobody():
    kinesis = MemoryKinesis(limits="aws")
    loop = asyncio.get_running_loop()
    async with kinesis.producer(aggregate=None) as producer:
        large = await producer.put(b"x" * 1_048_570, "k")
        small = await producer.put(b"small", "l")
        assert (await large).delivered
        assert (await small).delivered
        assert loop.time() < 0.5


@simulated
async def test_07_a_failing_event_hook_changes_nothing():
    kinesis = MemoryKinesis()
    errors = [TransportError("cut")]
    kinesis.before_put = lambda _: errors.pop() if errors else None

    def broken(event):
        raise RuntimeError("metrics are down")

    async with kinesis.producer(on_event=broken) as producer:
        assert (await producer.put_and_wait(b"1", "k")).delivered


@simulated
async def test_08_and_16_each_happening_is_reported_once_with_its_size_also_when_it_failed():
    kinesis, events = MemoryKinesis(), []
    errors = [TransportError("cut"), TransportError("cut")]
    kinesis.before_put = lambda _: errors.pop() if errors else None
    async with kinesis.producer(on_event=events.append, aggregate=None) as producer:
        await producer.put_many([(f"k{n}", b"x") for n in range(7)])
        await producer.flush()
    told = [event.entry_count for event in events if isinstance(event, WriteFailed)]
    assert told == [7, 7]
    assert kinesis.calls["PutRecords"] == 3


@simulated
async def test_09_a_put_starts_no_task_and_costs_the_same_however_many_wait():
    kinesis = MemoryKinesis(latency=1.0)
    async with kinesis.producer() as producer:
        await warm_up(producer)
        before = len(asyncio.all_tasks())
        for number in range(1_000):
            producer.put_nowait(b"x", f"k{number}")
        assert len(asyncio.all_tasks()) == before
        await asyncio.sleep(0.1)
        assert len(asyncio.all_tasks()) <= before + 1


@simulated
async def test_10_a_burst_travels_in_few_requests():
    kinesis = MemoryKinesis({"orders": 4})
    async with kinesis.producer(aggregate=None, order="none") as producer:
        await producer.put_many([(f"k{n}", b"x") for n in range(2_000)])
        await producer.flush()
    assert kinesis.calls["PutRecords"] <= 8


@simulated
async def test_11_requests_in_flight_are_bounded_and_every_attempt_is_in_the_history():
    kinesis = MemoryKinesis({"orders": 8}, latency=1.0)
    errors = [TransportError("cut") for _ in range(3)]
    kinesis.before_put = lambda _: errors.pop() if errors else None
    async with kinesis.producer(aggregate=None, settings=ProducerSettings(requests_in_flight=3)) as producer:
        deliveries = []
        for number in range(100):
            deliveries.append(producer.put_nowait(b"x", f"k{number}"))
            await asyncio.sleep(0.01)
        attempts = [len((await delivery).attempts) for delivery in deliveries]
    assert kinesis.in_flight_max == 3
    assert max(attempts) > 1
    assert sum(attempts) == sum(kinesis.put_sizes)  # no retry hides inside another


@simulated
async def test_12_sizes_and_keys_are_checked_where_they_are_given():
    kinesis = MemoryKinesis()
    async with kinesis.producer() as producer:
        await warm_up(producer)
        for data, key in ((b"x" * (1 << 20), "k"), (b"x", ""), (b"x", "k" * 257)):
            with pytest.raises(ValueError, match=r"partition key|at most"):
                producer.put_nowait(data, key)
    assert kinesis.calls["PutRecords"] <= 2


@simulated
async def test_12_an_invalid_request_is_split_and_not_retried_forever():
    kinesis = MemoryKinesis()

    def judge(entries):
        if any(b"poison" in entry.data for entry in entries):
            return InvalidRequestError("bad", operation="PutRecords", code="ValidationException")
        return None

    kinesis.before_put = judge
    async with kinesis.producer(settings=ProducerSettings(after_failure="continue")) as producer:
        await warm_up(producer)
        deliveries = await producer.put_many([(f"k{n}", b"poison" if n == 33 else b"fine") for n in range(64)])
        results = [await delivery for delivery in deliveries]
    assert [result.delivered for result in results] == [number != 33 for number in range(64)]
    assert kinesis.calls["PutRecords"] < 30


@simulated
async def test_13_records_without_a_known_shard_are_not_held_to_one_shards_rate():
    kinesis = MemoryKinesis({"orders": 50}, limits="aws")
    kinesis.before_list = lambda: TransportError("no listing")
    loop = asyncio.get_running_loop()
    async with kinesis.producer() as producer:
        await producer.put_many([(f"k{n}", b"x") for n in range(5_000)])
        await producer.flush()
        assert loop.time() < 2.0


@simulated
async def test_14_flush_is_a_barrier_that_keeps_to_the_shards_limits():
    kinesis, events = MemoryKinesis(limits="aws"), []
    async with kinesis.producer(aggregate=None, order="none", on_event=events.append) as producer:
        await warm_up(producer)
        deliveries = await producer.put_many([("k", b"x") for _ in range(3_000)])
        await producer.flush()
        assert all(delivery.done() for delivery in deliveries)
        assert asyncio.get_running_loop().time() > 11.5
    # The local server counts as AWS does; a producer that forced its way would be refused most of its records.
    attempts = sum(len(delivery.result().attempts) for delivery in deliveries)
    assert attempts < 3_300


@simulated
async def test_15_a_cancelled_put_gives_its_place_back_and_cancellation_is_not_swallowed():
    kinesis = MemoryKinesis(latency=1.0)
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        await producer.put(b"0" * 1_000_000, "k")
        given_up = asyncio.ensure_future(producer.put(b"1" * 900_000, "k"))
        await asyncio.sleep(0.1)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await producer.flush()
        assert producer._writer.used_bytes == 0
        await producer.put(b"2" * 1_000_000, "k", timeout=0.1)


@simulated
async def test_17_an_explicit_hash_key_with_leading_zeros_is_refused_where_it_is_given():
    kinesis = MemoryKinesis()
    async with kinesis.producer() as producer:
        with pytest.raises(ValueError, match="without leading zeros"):
            producer.put_nowait(b"x", "k", explicit_hash_key="007")
        assert (await producer.put_and_wait(b"x", "k", explicit_hash_key="7")).delivered


@simulated
async def test_18_arns_large_records_and_bytes_of_back_pressure():
    kinesis = MemoryKinesis()
    arn = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
    kinesis.call("UpdateMaxRecordSize", StreamARN=arn, MaxRecordSizeInKiB=10_240)
    async with kinesis.producer(arn, buffer_bytes=12 << 20) as producer:
        large = await producer.put(b"x" * ((10 << 20) - 1), "k")
        with pytest.raises(BufferFull):
            producer.put_nowait(b"x" * (2 << 20), "k")
        assert (await large).delivered


@simulated
async def test_18_a_service_that_places_records_itself_is_never_aggregated_for():
    kinesis = MemoryKinesis({"orders": 2})
    summary = kinesis.describe_stream_summary

    async def describe(stream):
        return msgspec.structs.replace(await summary(stream), record_distribution="AUTO")

    kinesis.describe_stream_summary = describe
    async with kinesis.producer() as producer:
        await warm_up(producer)
        await producer.put_many([("k", b"%d" % n) for n in range(20)])
        await producer.flush()
    assert all(open_aggregate(record["Data"]) is None for _, record in kinesis.stored())
    assert len(kinesis.records()) == 21


@simulated
async def test_18_order_per_key_through_throttled_slots_and_lost_answers():
    kinesis = MemoryKinesis({"orders": 2}, limits="aws")
    errors = [None, TransportError("cut"), None, TransportError("cut")]
    kinesis.after_put = lambda _: errors.pop() if errors else None
    async with kinesis.producer(aggregate=None) as producer:
        await producer.put_many([(f"k{n % 5}", b"%d" % n) for n in range(500)])
        await producer.flush()
    for key in range(5):
        seen = list(dict.fromkeys(int(data) for k, data in kinesis.records() if k == f"k{key}"))
        assert seen == sorted(seen)
        assert len(seen) == 100


@simulated
async def test_a_missing_stream_is_written_to_once_it_is_there():
    kinesis = MemoryKinesis()
    async with kinesis.producer("late") as producer:
        first = await (await producer.put(b"1", "k"))
        assert first.error.startswith("ResourceNotFoundException")
        kinesis.call("CreateStream", StreamName="late", ShardCount=1)
        assert (await producer.put_and_wait(b"2", "k")).delivered
