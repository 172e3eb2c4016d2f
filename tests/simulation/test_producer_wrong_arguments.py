"""Arguments of a wrong type raise a TypeError that names the argument and the fix; wrong options name themselves."""

import functools
import json
from enum import StrEnum

import pytest
from memory_kinesis import MemoryKinesis, simulated

from anabranch.config import LeaseSettings, ProducerSettings
from anabranch.errors import ConfigurationError
from anabranch.producer import Producer
from anabranch.sync_producer import SyncProducer


class Key(StrEnum):
    RED = "red"


WRONG_PUTS = {
    "a key of bytes": ((b"x", b"k"), {}, "partition_key"),
    "a key that is a number": ((b"x", 7), {}, "partition_key"),
    "a key that is missing": ((b"x", None), {}, "partition_key"),
    "a key that cannot be hashed": ((b"x", ["k"]), {}, "partition_key"),
    "a hash key that is a number": ((b"x", "k"), {"explicit_hash_key": 5}, "explicit_hash_key.*'5'"),
    "a hash key of bytes": ((b"x", "k"), {"explicit_hash_key": b"5"}, "explicit_hash_key"),
    "a stream that is a number": ((b"x", "k"), {"stream": 5}, "stream"),
    "a list of streams": ((b"x", "k"), {"stream": ["orders"]}, "stream"),
    "text as data": (("x", "k"), {}, "encode="),
}
WRONG_TIMES = ["a", b"1", [1], float("inf"), float("nan")]


@pytest.mark.parametrize("name", WRONG_PUTS)
def test_a_put_refuses(name):
    arguments, options, message = WRONG_PUTS[name]

    @simulated
    async def check():
        kinesis = MemoryKinesis(latency=1.0)
        async with kinesis.producer(buffer_bytes=1 << 20) as producer:
            for _ in range(2):  # with room in the buffer, then without
                with pytest.raises(TypeError, match=message):
                    producer.put_nowait(*arguments, **options)
                with pytest.raises(TypeError, match=message):
                    await producer.put(*arguments, **options)
                with pytest.raises(TypeError, match=message):
                    await producer.put_and_wait(*arguments, **options)
                await producer.put(b"0" * 1_047_000, "k", timeout=10)
        assert len(kinesis.records()) == 2

    check()
    with SyncProducer("orders") as producer:
        for put in (producer.put, producer.put_nowait, producer.put_and_wait):
            with pytest.raises(TypeError, match=message):
                put(*arguments, **options)


@simulated
async def test_put_many_refuses_keys_of_a_wrong_type():
    kinesis = MemoryKinesis()
    async with kinesis.producer() as producer:
        for key in (b"k", 7, None, ["k"]):
            with pytest.raises(TypeError, match="partition_key"):
                await producer.put_many([("fine", b"1"), (key, b"2")])
        with pytest.raises(TypeError, match="stream"):
            await producer.put_many([("k", b"x")], stream=5)
    assert kinesis.records() == [("fine", b"1")] * 4


def test_the_blocking_put_many_refuses_keys_of_a_wrong_type():
    with SyncProducer("orders") as producer:
        for key in (b"k", 7, None, ["k"]):
            with pytest.raises(TypeError, match="partition_key"):
                producer.put_many([(key, b"2")])


@pytest.mark.parametrize("kind", [Producer, SyncProducer])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"stream": "no spaces allowed"}, "no spaces allowed"),
        ({"order": "shard"}, "order is 'shard'; it must be 'key' or 'none'"),
        ({"aggregate": "stream"}, "aggregate is 'stream'; it must be 'shard', 'key' or None"),
        ({"linger": "1"}, "linger is '1'; it must be a number"),
        ({"linger": -1, "delivery_timeout": 0}, "linger is -1 s.*delivery_timeout is 0 s; it must be positive"),
        ({"buffer_bytes": 1000}, "buffer_bytes is 1000; it must be at least 1048576"),
        ({"settings": LeaseSettings()}, "settings is .*; it must be of type ProducerSettings or None"),
        ({"aws": "eu-west-1"}, "aws is 'eu-west-1'; it must be of type Aws or None"),
        ({"aggregate": None, "settings": ProducerSettings(trace="wrap")}, "aggregate=None forbids aggregates"),
        ({"on_undelivered": print, "metrics": print}, "metrics is .*; it must be a list of exporters"),
        ({"on_undelivered": 5}, "on_undelivered=5: expected a plain function"),
    ],
)
def test_a_wrong_option_is_named_when_the_producer_is_made(kind, options, message):
    with pytest.raises(ConfigurationError, match=message):
        kind(**{"stream": "orders", **options})


@pytest.mark.parametrize("seconds", WRONG_TIMES)
def test_a_time_of_a_wrong_type_is_refused(seconds):
    @simulated
    async def check():
        async with MemoryKinesis().producer() as producer:
            with pytest.raises(TypeError, match=r"timeout is .* number of seconds"):
                await producer.put(b"x", "k", timeout=seconds)
            with pytest.raises(TypeError, match=r"deadline is .* number of seconds"):
                await producer.flush(deadline=seconds)
            with pytest.raises(TypeError, match=r"deadline is .* number of seconds"):
                await producer.close(deadline=seconds)
            assert (await producer.put_and_wait(b"x", "k")).delivered, "a refused close() closes nothing"

    check()
    with SyncProducer("orders") as producer:
        with pytest.raises(TypeError, match="timeout"):
            producer.put(b"x", "k", timeout=seconds)
        with pytest.raises(TypeError, match="deadline"):
            producer.flush(deadline=seconds)
        with pytest.raises(TypeError, match="deadline"):
            producer.close(deadline=seconds)


@simulated
async def test_kinds_of_text_are_keys():
    kinesis = MemoryKinesis()
    async with kinesis.producer() as producer:
        await producer.put_and_wait(b"x", Key.RED)
    assert kinesis.records() == [("red", b"x")]


@simulated
async def test_an_encoder_that_returns_text_is_refused_by_put_and_harms_no_other_record():
    kinesis = MemoryKinesis()
    texts = [3, 5]

    def encode(value):
        return json.dumps(value) if value in texts else json.dumps(value).encode()

    async with kinesis.producer(encode=encode) as producer:
        before = [await producer.put(number, "k") for number in range(3)]
        with pytest.raises(TypeError, match=r"encode=.* returned str.*\.encode\(\)"):
            await producer.put(3, "k")
        with pytest.raises(TypeError, match="returned str"):
            producer.put_nowait(3, "k")
        with pytest.raises(TypeError, match="returned str"):
            await producer.put_many([("k", 4), ("k", 5), ("k", 6)])
        assert all([(await delivery).delivered for delivery in before])
        assert (await producer.put_and_wait(7, "k")).delivered
    assert [data for _, data in kinesis.records()] == [b"0", b"1", b"2", b"4", b"7"]


@simulated
async def test_an_encoder_may_return_any_kind_of_bytes():
    kinesis = MemoryKinesis()
    for kind in (bytes, bytearray, memoryview):
        async with kinesis.producer(encode=lambda value, kind=kind: kind(value)) as producer:
            await producer.put_and_wait(b"abc", "k")
    assert [data for _, data in kinesis.records()] == [b"abc"] * 3


def test_the_blocking_producer_refuses_text_from_an_encoder():
    with SyncProducer("orders", encode=json.dumps) as producer, pytest.raises(TypeError, match=r"json\.dumps.*str"):
        producer.put({"a": 1}, "k")


async def _encode(value):
    return value


@pytest.mark.parametrize("encode", [_encode, functools.partial(_encode)])
def test_an_asynchronous_encoder_is_refused_at_once(encode):
    for make in (MemoryKinesis().producer, SyncProducer):
        with pytest.raises(ConfigurationError, match="async function"):
            make("orders", encode=encode)


def test_options_of_a_wrong_type_are_named_together():
    with pytest.raises(ConfigurationError) as error:
        MemoryKinesis().producer("orders", linger="a", delivery_timeout=None, buffer_bytes=1.5e9)
    assert len(error.value.violations) == 3
    with pytest.raises(TypeError, match="stream"):
        MemoryKinesis().producer(5)
