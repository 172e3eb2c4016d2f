"""No silent failures: unusable hooks, blocked keys, and how long `async with` waits at its end."""

import asyncio
import functools

import pytest
from memory_kinesis import MemoryKinesis, simulated

from anabranch.errors import AccessDeniedError, ConfigurationError, DeliveryFailed, TransportError, UsageError
from anabranch.events import HookFailed, KeyBlocked
from anabranch.sync_producer import SyncProducer

DENIED = AccessDeniedError("no", operation="PutRecords", code="AccessDeniedException")


async def _take(result):
    pass


class Taker:
    async def __call__(self, result):
        pass


@pytest.mark.parametrize("hook", [_take, functools.partial(_take), Taker()])
@pytest.mark.parametrize("option", ["on_undelivered", "on_event"])
@pytest.mark.parametrize("make", [MemoryKinesis().producer, SyncProducer])
def test_an_asynchronous_hook_is_refused(make, option, hook):
    with pytest.raises(ConfigurationError, match=f"{option}=.*plain function"):
        make("orders", **{option: hook})


def test_a_hook_that_cannot_be_called_is_refused():
    with pytest.raises(ConfigurationError, match="on_undelivered='log'"):
        MemoryKinesis().producer("orders", on_undelivered="log")


@simulated
async def test_a_hook_that_turns_out_to_be_asynchronous_takes_nothing():
    kinesis, events = MemoryKinesis(), []
    kinesis.before_put = lambda _: DENIED
    producer = kinesis.producer(on_undelivered=lambda result: asyncio.sleep(1, result), on_event=events.append)
    await producer.put(b"1", "k")
    with pytest.raises(DeliveryFailed):
        await producer.close()
    assert ["async function" in event.error for event in events if isinstance(event, HookFailed)] == [True]


@simulated
async def test_records_of_a_blocked_key_are_told_of_at_once_and_then_at_most_every_ten_seconds():
    kinesis, events = MemoryKinesis(), []
    kinesis.before_put = lambda _: DENIED
    producer = kinesis.producer(on_event=events.append)
    producer.put_nowait(b"first", "k")
    await asyncio.sleep(1)
    kinesis.before_put = None
    for _ in range(120):
        producer.put_nowait(b"later", "k")
        producer.put_nowait(b"fine", "other")
        await asyncio.sleep(0.25)
    with pytest.raises(DeliveryFailed):
        await producer.close()
    told = [event for event in events if isinstance(event, KeyBlocked)]
    assert [event.record_count for event in told] == [1, 40, 40]
    assert {event.partition_key for event in told} == {"k"}
    assert "flush()" in str(told[0])


@simulated
async def test_leaving_waits_until_each_record_has_its_outcome():
    kinesis = MemoryKinesis()
    loop = asyncio.get_running_loop()
    kinesis.before_put = lambda _: TransportError("down") if loop.time() < 100 else None
    async with kinesis.producer() as producer:
        delivery = await producer.put(b"1", "k")
    assert delivery.result().delivered
    assert loop.time() > 100


@simulated
async def test_leaving_waits_no_longer_than_the_delivery_timeout():
    kinesis = MemoryKinesis(latency=1_000_000)
    loop = asyncio.get_running_loop()
    producer = await kinesis.producer(delivery_timeout=40.0, buffer_bytes=1 << 20).__aenter__()
    await producer.put(b"in flight", "k")
    await producer.put(b"waits" * 150_000, "k")
    without_room = [asyncio.ensure_future(producer.put(b"no room" * 100_000, f"k{n}")) for n in range(3)]
    await asyncio.sleep(10)
    with pytest.raises(DeliveryFailed) as failed:
        await producer.__aexit__(None, None, None)
    assert loop.time() == pytest.approx(50, abs=0.1)
    assert [result.data for result in failed.value.results if result.maybe_written][:1] == [b"in flight"]
    ends = await asyncio.gather(*without_room, return_exceptions=True)
    assert all(isinstance(end, UsageError) or end.done() for end in ends)


@simulated
async def test_close_with_a_deadline_is_the_shorter_way():
    kinesis = MemoryKinesis()
    kinesis.before_put = lambda _: TransportError("down")
    producer = kinesis.producer()
    await producer.put(b"1", "k")
    with pytest.raises(DeliveryFailed):
        await producer.close(deadline=3)
    assert asyncio.get_running_loop().time() == pytest.approx(3, abs=0.1)
