"""The producer's engine and facade in virtual time: handles, buffer, flush, close, hooks."""

import asyncio
import gc

import pytest
from memory_kinesis import MemoryKinesis, simulated

from anabranch.config import ProducerSettings
from anabranch.errors import (
    AccessDeniedError,
    BufferFull,
    ConfigurationError,
    DeliveryFailed,
    ProducerError,
    TransportError,
    UsageError,
)
from anabranch.events import HookFailed, WriterFailed

DENIED = AccessDeniedError("no", operation="PutRecords", code="AccessDeniedException")


@simulated
async def test_a_put_returns_a_handle_that_tells_where_the_record_is():
    kinesis = MemoryKinesis()
    async with kinesis.producer() as producer:
        delivery = await producer.put(b"hello", "k", explicit_hash_key="7")
        assert not delivery.done()
        assert repr(delivery) == "<Delivery to orders, partition key 'k': pending>"
        with pytest.raises(asyncio.InvalidStateError):
            delivery.result()
        result = await delivery
        assert delivery.done()
        assert "delivered" in repr(delivery)
        assert result.delivered
        assert result.shard_id == "shardId-000000000000"
        assert (result.partition_key, result.data, result.explicit_hash_key) == ("k", b"hello", "7")
        assert result == await delivery
        assert result.attempts[0].duration_seconds == pytest.approx(0.02)
    assert kinesis.records() == [("k", b"hello")]


@simulated
async def test_an_idle_producer_sends_at_once():
    kinesis = MemoryKinesis(latency=0.1)
    async with kinesis.producer(linger=5.0) as producer:
        await producer.put_and_wait(b"1", "k")
        started = asyncio.get_running_loop().time()
        await producer.put_and_wait(b"2", "k")
        assert asyncio.get_running_loop().time() - started == pytest.approx(0.1)


@simulated
async def test_put_many_keeps_the_order_of_its_items():
    kinesis = MemoryKinesis()
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        items = [(f"k{number % 3}", b"%d" % number * 1_000) for number in range(3_000)]
        deliveries = await producer.put_many(items)
        results = [await delivery for delivery in deliveries]
        assert all(result.delivered for result in results)
    stored = kinesis.records()
    for key in ("k0", "k1", "k2"):
        assert [data for k, data in stored if k == key] == [data for k, data in items if k == key]


@simulated
async def test_put_waits_for_room_and_order_of_calls_is_order_of_queueing():
    kinesis = MemoryKinesis(latency=1.0)
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        await producer.put(b"0" * 1_000_000, "k")
        waiting = [asyncio.ensure_future(producer.put(b"%d" % n * 600_000, "k")) for n in range(1, 4)]
        await asyncio.sleep(0)
        with pytest.raises(BufferFull, match="full"):
            producer.put_nowait(b"x", "k")  # there would be room, but others came first
        await asyncio.gather(*waiting)
    assert [data[:1] for _, data in kinesis.records()] == [b"0", b"1", b"2", b"3"]


@simulated
async def test_the_wait_for_room_can_be_bounded_or_given_up():
    kinesis = MemoryKinesis(latency=1.0)
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        await producer.put(b"0" * 1_000_000, "k")
        with pytest.raises(BufferFull, match=r"no space .* within 0.1 s"):
            await producer.put(b"1" * 600_000, "k", timeout=0.1)
        given_up = asyncio.ensure_future(producer.put(b"2" * 600_000, "k"))
        await asyncio.sleep(0.1)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await producer.put(b"3", "k")
    assert [data[:1] for _, data in kinesis.records()] == [b"0", b"3"]


@simulated
async def test_a_record_that_no_buffer_could_hold_is_refused_at_once():
    kinesis = MemoryKinesis()
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        with pytest.raises(ValueError, match="raise buffer_bytes"):
            producer.put_nowait(b"x" * (1 << 20), "k")
        with pytest.raises(ValueError, match="raise buffer_bytes"):
            await producer.put(b"x" * (1 << 20), "k")


@simulated
async def test_a_record_that_the_service_would_not_take_is_refused_where_it_is_put():
    kinesis = MemoryKinesis(latency=1.0)
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        with pytest.raises(ValueError, match="partition key"):
            producer.put_nowait(b"x", "")
        with pytest.raises(ValueError, match="stream's name"):
            producer.put_nowait(b"x", "k", stream="no such name!")
        await producer.put(b"0" * 1_000_000, "k")
        with pytest.raises(ValueError, match="partition key"):
            await producer.put(b"x" * 100_000, "")  # found when its turn came
        with pytest.raises(ValueError, match="stream's name"):
            await producer.put(b"x" * 100_000, "k", stream="no such name!")


@simulated
async def test_flush_is_a_barrier_for_what_was_put_before_and_waits_for_nothing_after():
    kinesis = MemoryKinesis(latency=0.1)
    async with kinesis.producer(order="none", linger=60.0) as producer:
        before = [await producer.put(b"%d" % n, f"k{n}") for n in range(100)]
        flushing = asyncio.ensure_future(producer.flush())
        await asyncio.sleep(0)
        report = await flushing
        assert report.complete
        assert all(delivery.done() for delivery in before)


@simulated
async def test_flush_covers_puts_that_wait_for_room():
    kinesis = MemoryKinesis(latency=0.1)
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        await producer.put(b"0" * 1_000_000, "k")
        waiting = asyncio.ensure_future(producer.put(b"1" * 600_000, "k"))
        await asyncio.sleep(0)
        await producer.flush()
        assert (await waiting).done()


@simulated
async def test_flush_with_a_deadline_reports_what_is_still_on_its_way():
    kinesis = MemoryKinesis(latency=10.0)
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        await producer.put(b"1", "k")
        await asyncio.sleep(0.1)
        await producer.put(b"2", "k")
        report = await producer.flush(deadline=1.0)
        assert (report.complete, report.pending_count) == (False, 2)
        await producer.put(b"3" * 1_000_000, "k")
        waiting = asyncio.ensure_future(producer.put(b"4" * 600_000, "k"))
        await asyncio.sleep(0)
        assert not (await producer.flush(deadline=1.0)).complete
        assert (await producer.flush()).complete
        assert (await waiting).done()
    assert len(kinesis.records()) == 4


@simulated
async def test_flush_of_a_producer_that_was_never_used_returns_at_once():
    producer = MemoryKinesis().producer()
    assert (await producer.flush()).complete
    assert (await producer.close()).complete


@simulated
async def test_leaving_delivers_everything():
    kinesis = MemoryKinesis(latency=1.0)
    async with kinesis.producer() as producer:
        deliveries = [producer.put_nowait(b"%d" % n, f"k{n}") for n in range(50)]
    assert all(delivery.result().delivered for delivery in deliveries)
    assert len(kinesis.records()) == 50


@simulated
async def test_close_fails_what_cannot_be_delivered_in_time_and_gives_the_records_back():
    kinesis = MemoryKinesis(latency=100.0)
    producer = kinesis.producer()
    flying = await producer.put(b"flying", "k")
    await asyncio.sleep(0.1)
    await producer.put(b"waiting", "k")
    with pytest.raises(DeliveryFailed) as failed:
        await producer.close(deadline=1.0)
    assert [(r.data, r.maybe_written) for r in failed.value.results] == [(b"flying", True), (b"waiting", False)]
    assert failed.value.result.error.startswith("ProducerClosed")
    assert flying.done()
    with pytest.raises(UsageError, match="closed"):
        producer.put_nowait(b"x", "k")
    assert (await producer.close()).complete


@simulated
async def test_a_failure_that_nobody_awaited_is_raised_once_by_the_next_flush():
    kinesis = MemoryKinesis()
    async with kinesis.producer() as producer:
        kinesis.before_put = lambda _: DENIED
        await producer.put(b"1", "k")
        await producer.put(b"2", "l")
        with pytest.raises(DeliveryFailed, match=r"orders .*'k'.* \(AccessDeniedException: no\), and 1 more") as failed:
            await producer.flush()
        assert [result.data for result in failed.value.results] == [b"1", b"2"]
        assert (await producer.flush()).complete


@simulated
async def test_a_failure_that_nobody_awaited_is_raised_by_leaving():
    kinesis = MemoryKinesis()
    kinesis.before_put = lambda _: DENIED
    with pytest.raises(DeliveryFailed):
        async with kinesis.producer() as producer:
            await producer.put(b"1", "k")


@simulated
async def test_leaving_by_an_error_keeps_that_error_and_notes_the_undelivered():
    kinesis = MemoryKinesis()
    kinesis.before_put = lambda _: DENIED

    async def body():
        async with kinesis.producer() as producer:
            await producer.put(b"1", "k")
            raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        await body()
    assert "undelivered" in error.value.__notes__[0]


@simulated
async def test_a_failure_that_was_awaited_is_not_raised_again():
    kinesis = MemoryKinesis()
    kinesis.before_put = lambda _: DENIED
    async with kinesis.producer() as producer:
        early = asyncio.ensure_future(_result(producer.put_nowait(b"1", "k")))
        late = producer.put_nowait(b"2", "l")
        assert not (await early).delivered
        assert not (await late).delivered
        with pytest.raises(DeliveryFailed, match="'m' was not delivered: AccessDeniedException"):
            await producer.put_and_wait(b"3", "m")


async def _result(delivery):
    return await delivery


@simulated
async def test_on_undelivered_takes_failures_and_may_put_them_again():
    kinesis = MemoryKinesis({"orders": 1, "spare": 1})
    kinesis.before_put = lambda entries: DENIED if entries[0].data == b"1" and not taken else None
    taken = []

    def take(result):
        taken.append(result.data)
        producer.put_nowait(result.data, result.partition_key, stream="spare")

    async with kinesis.producer(on_undelivered=take) as producer:
        await producer.put(b"1", "k")
        await producer.flush()
    assert taken == [b"1"]
    assert kinesis.records("spare") == [("k", b"1")]


@simulated
async def test_what_a_failing_on_undelivered_did_not_take_is_raised_by_flush():
    kinesis = MemoryKinesis()
    kinesis.before_put = lambda _: DENIED
    events = []

    def take(result):
        raise RuntimeError("full disk")

    async with kinesis.producer(on_undelivered=take, on_event=events.append) as producer:
        await producer.put(b"1", "k")
        with pytest.raises(DeliveryFailed):
            await producer.flush()
        kinesis.before_put = None
        await producer.put_and_wait(b"2", "k")
    assert any(isinstance(event, HookFailed) and "full disk" in str(event) for event in events)
    assert producer._writer is None


@simulated
async def test_failures_that_nobody_looks_at_fill_the_buffer_and_are_raised_by_the_next_put():
    kinesis = MemoryKinesis()
    kinesis.before_put = lambda _: DENIED
    async with kinesis.producer(buffer_bytes=1 << 20, settings=ProducerSettings(after_failure="continue")) as producer:
        await producer.put(b"1" * 900_000, "k")
        await asyncio.sleep(1)
        with pytest.raises(DeliveryFailed):
            await producer.put(b"2" * 900_000, "k")
        await producer.put(b"3" * 900_000, "k")
        await asyncio.sleep(1)
        with pytest.raises(DeliveryFailed):
            producer.put_nowait(b"4" * 900_000, "k")
        kinesis.before_put = None
        await producer.put_and_wait(b"5" * 900_000, "k")


@simulated
async def test_later_records_of_a_failed_key_fail_until_somebody_looked():
    kinesis = MemoryKinesis()
    kinesis.before_put = lambda _: DENIED
    async with kinesis.producer() as producer:
        first = await producer.put(b"1", "k")
        await asyncio.sleep(1)
        kinesis.before_put = None
        second = await producer.put(b"2", "k")
        assert (await second).error.startswith("OrderKept")
        assert not first.result().delivered
        assert (await producer.put_and_wait(b"3", "k")).delivered


@simulated
async def test_several_streams_by_one_producer_by_name_and_by_arn():
    kinesis = MemoryKinesis({"orders": 1, "events": 2})
    async with kinesis.producer(None) as producer:
        with pytest.raises(UsageError, match="no stream: pass one"):
            await producer.put(b"x", "k")
        await producer.put(b"1", "k", stream="orders")
        await producer.put_many([("k", b"2")], stream="events")
        await producer.put(b"3", "k", stream="arn:aws:kinesis:us-east-1:000000000000:stream/events")
    assert kinesis.records() == [("k", b"1")]
    assert sorted(kinesis.records("events")) == [("k", b"2"), ("k", b"3")]


@simulated
async def test_values_are_encoded_as_the_encode_option_says():
    kinesis = MemoryKinesis()
    async with kinesis.producer(encode=dict) as producer:
        await producer.put({"a": 1}, "k")
        producer.put_nowait({"b": [2]}, "k")
    assert [data for _, data in kinesis.records()] == [b'{"a":1}', b'{"b":[2]}']


@simulated
async def test_nothing_is_left_running_after_close_and_no_timer_while_idle():
    kinesis = MemoryKinesis()
    loop = asyncio.get_running_loop()
    async with kinesis.producer() as producer:
        await producer.put_and_wait(b"1", "k")
        await asyncio.sleep(1)
        assert not [timer for timer in loop._scheduled if not timer._cancelled]
        assert len(asyncio.all_tasks()) == 2
    assert len(asyncio.all_tasks()) == 1


@simulated
async def test_a_cancelled_await_leaves_the_record_on_its_way():
    kinesis = MemoryKinesis(latency=1.0)
    async with kinesis.producer() as producer:
        delivery = await producer.put(b"1", "k")
        waiting = [asyncio.ensure_future(_result(delivery)) for _ in range(2)]
        await asyncio.sleep(0.1)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert (await waiting[1]).delivered


@simulated
async def test_a_fault_of_the_port_itself_is_an_ambiguous_attempt_not_the_end():
    kinesis = MemoryKinesis()
    faults = [ZeroDivisionError("oops")]
    kinesis.before_put = lambda _: faults.pop() if faults else None
    listing_faults = [ZeroDivisionError("oops too")]
    kinesis.before_list = lambda: listing_faults.pop() if listing_faults else None
    async with kinesis.producer() as producer:
        result = await producer.put_and_wait(b"1", "k")
        assert "ZeroDivisionError" in result.attempts[0].message
        assert result.maybe_written


@simulated
async def test_a_fault_of_ours_ends_the_producer_loudly_and_settles_every_record():
    kinesis, events = MemoryKinesis(latency=0.5), []
    producer = kinesis.producer(on_event=events.append, buffer_bytes=1 << 20)
    flying = await producer.put(b"1", "k")
    await asyncio.sleep(0.1)
    waiting = asyncio.ensure_future(producer.put(b"2" * 1_048_200, "k"))
    flushing = asyncio.ensure_future(producer.flush())
    await asyncio.sleep(0)

    def broken(*_):
        raise ZeroDivisionError("a bug")

    producer._writer._step = broken
    with pytest.raises(ProducerError, match="a bug"):
        await waiting
    assert not (await flying).delivered
    with pytest.raises((ProducerError, DeliveryFailed)):
        await flushing
    with pytest.raises(ProducerError, match="a bug"):
        producer.put_nowait(b"3", "k")
    assert any(isinstance(event, WriterFailed) for event in events)


@simulated
async def test_handles_are_freed_when_nobody_holds_them():
    kinesis = MemoryKinesis()
    async with kinesis.producer() as producer:
        for _ in range(50):
            await producer.put_many([(f"k{n}", b"x" * 100) for n in range(100)])
        await producer.flush()
        gc.collect()
        assert producer._writer.used_bytes == 0
        stream = producer._writer._streams["orders"]
        assert all(lane.is_empty for lane in stream._lanes.active())


def test_all_wrong_options_are_named_at_once():
    with pytest.raises(ConfigurationError) as error:
        MemoryKinesis().producer(
            "bad name!", order="shard", aggregate="all", linger=-1, delivery_timeout=0, buffer_bytes=5
        )
    assert len(error.value.violations) == 6
    with pytest.raises(ConfigurationError) as error:
        ProducerSettings(shard_share=2, requests_in_flight=0, after_failure="stop", aggregate_partition_key="")
    assert len(error.value.violations) == 4


def test_without_an_event_loop_the_error_names_the_other_producer():
    with pytest.raises(UsageError, match="SyncProducer"):
        MemoryKinesis().producer().put_nowait(b"x", "k")
    kinesis = MemoryKinesis(latency=0)
    producer = kinesis.producer()
    asyncio.run(producer.put_and_wait(b"x", "k"))
    with pytest.raises(UsageError, match="SyncProducer"):
        producer.put_nowait(b"x", "k")


def test_a_producer_may_be_used_by_one_loop_after_another_if_nothing_was_left():
    kinesis = MemoryKinesis(latency=0)
    producer = kinesis.producer()

    async def invocation():
        await producer.put(b"x", "k")
        await producer.flush(deadline=10)

    asyncio.run(invocation())
    asyncio.run(invocation())
    assert len(kinesis.records()) == 2


def test_a_producer_is_not_shared_by_two_loops():
    kinesis = MemoryKinesis(latency=0)
    producer = kinesis.producer()
    first = asyncio.new_event_loop()
    try:
        first.run_until_complete(producer.put_and_wait(b"x", "k"))

        async def elsewhere():
            producer.put_nowait(b"x", "k")

        with pytest.raises(UsageError, match="another event loop"):
            asyncio.run(elsewhere())
        first.run_until_complete(producer.close())
    finally:
        first.close()


def test_a_loop_that_ends_with_records_on_their_way_settles_them():
    kinesis = MemoryKinesis(latency=60)
    deliveries = []

    async def main():
        deliveries.append(await kinesis.producer().put(b"x", "k"))
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert deliveries[0].result().maybe_written


@simulated
async def test_a_transport_error_is_retried_without_a_timer_of_its_own():
    kinesis = MemoryKinesis()
    errors = [TransportError("cut"), TransportError("cut")]
    kinesis.after_put = lambda _: errors.pop() if errors else None
    async with kinesis.producer() as producer:
        result = await producer.put_and_wait(b"x", "k")
        assert [attempt.code for attempt in result.attempts] == ["TransportError", "TransportError", None]
        assert result.maybe_written
    assert len(kinesis.records()) == 3


@simulated
async def test_a_put_that_gets_the_space_of_another_stream_is_sent_at_once():
    kinesis = MemoryKinesis({"orders": 2, "other": 2})
    plain = kinesis.put_records

    async def put_records(stream, entries):
        if any(entry.data == b"slow" for entry in entries):
            await asyncio.sleep(30)
        return await plain(stream, entries)

    kinesis.put_records = put_records
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        await producer.put_and_wait(b"known", "k", stream="orders")
        await producer.put_and_wait(b"known", "k", stream="other")
        for stream in ("orders", "other", "other"):  # whichever stream is served first
            slow = await producer.put(b"slow", "k", stream=stream, explicit_hash_key="0")
            await asyncio.sleep(0.01)
            large = await producer.put(b"0" * 1_000_000, "k", stream=stream, explicit_hash_key=str(2**128 - 1))
            waits = asyncio.ensure_future(
                producer.put(b"1" * 900_000, "k", stream="other" if stream == "orders" else "orders")
            )
            await large
            async with asyncio.timeout(5):
                assert (await (await waits)).delivered
            await slow


@simulated
async def test_the_space_of_failures_that_a_flush_raises_goes_to_a_waiting_put():
    kinesis = MemoryKinesis({"orders": 1, "slow": 1, "secret": 1})
    plain = kinesis.put_records

    async def put_records(stream, entries):
        if stream.name == "secret":
            raise DENIED
        if stream.name == "slow":
            await asyncio.sleep(30)
        return await plain(stream, entries)

    kinesis.put_records = put_records
    async with kinesis.producer(buffer_bytes=1 << 20) as producer:
        await producer.put(b"0" * 600_000, "k", stream="secret")
        await producer.put(b"1" * 300_000, "k", stream="slow")
        await asyncio.sleep(1)
        waits = asyncio.ensure_future(producer.put(b"2" * 500_000, "k", timeout=5))
        await asyncio.sleep(1)
        with pytest.raises(DeliveryFailed):
            await producer.flush(deadline=1)
        assert (await (await waits)).delivered
