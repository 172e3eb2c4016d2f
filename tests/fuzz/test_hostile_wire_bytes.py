"""Whatever bytes arrive, a codec returns a value or raises CodecError, in memory that is a small multiple of theirs."""

import contextlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, strategies as st

from anabranch._wire.bodies import (
    AwsError,
    decode_aws_error,
    decode_describe_stream_consumer,
    decode_describe_stream_summary,
    decode_get_records,
    decode_get_shard_iterator,
    decode_list_shards,
    decode_list_stream_consumers,
    decode_put_records,
    decode_register_stream_consumer,
    decode_subscribe_to_shard_event,
    decode_subscription_message,
)
from anabranch._wire.event_stream import MessageDecoder, encode_frame, encode_message
from anabranch.errors import CodecError
from anabranch.local import cbor

Decode = Callable[[bytes], Any]
DECODERS: list[Decode] = [
    decode_describe_stream_consumer,
    decode_describe_stream_summary,
    decode_get_records,
    decode_get_shard_iterator,
    decode_list_shards,
    decode_list_stream_consumers,
    decode_put_records,
    decode_register_stream_consumer,
    decode_subscribe_to_shard_event,
]
RANGE = {"StartingHashKey": "0", "EndingHashKey": "1"}
CHILD = {"ShardId": "s", "ParentShards": ["p"], "HashKeyRange": RANGE}
RECORD = {"SequenceNumber": "1", "Data": "QUJD", "PartitionKey": "k", "ApproximateArrivalTimestamp": 1.5}
LARGE = RECORD | {"Data": "QUJD" * 400}
CONSUMER = {"ConsumerName": "c", "ConsumerARN": "a", "ConsumerStatus": "ACTIVE", "ConsumerCreationTimestamp": 1.5}
ANSWERS: list[Any] = [
    {"Records": [RECORD], "NextShardIterator": "A", "MillisBehindLatest": 1, "ChildShards": [CHILD]},
    {"Records": [LARGE], "ContinuationSequenceNumber": "A", "MillisBehindLatest": 1, "ChildShards": [CHILD]},
    {"Shards": [{"ShardId": "s", "HashKeyRange": RANGE, "SequenceNumberRange": {"StartingSequenceNumber": "1"}}]},
    {"Records": [{"SequenceNumber": "1", "ShardId": "s"}, {"ErrorCode": "E"}], "FailedRecordCount": 1},
    {"SequenceNumber": "1", "ShardId": "s", "ShardIterator": "A"},
    {"Consumers": [CONSUMER], "Consumer": CONSUMER, "ConsumerDescription": CONSUMER},
    {"__type": "x#Code", "message": "m"},
]
BODIES = [json.dumps(answer).encode() for answer in ANSWERS]


def returns_or_refuses(decode: Callable[[], Any]) -> None:
    with contextlib.suppress(CodecError):
        decode()


@st.composite
def damaged(draw: st.DrawFn, bodies: list[bytes]) -> bytes:
    """A valid body, cut, doubled, or with some of its bytes changed."""
    body = bytearray(draw(st.sampled_from(bodies)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(body) - 1)) if body else 0
        match draw(st.sampled_from(["set", "cut", "insert", "remove"])):
            case "set" if body:
                body[at] = draw(st.integers(0, 255))
            case "cut":
                del body[at:]
            case "insert":
                body[at:at] = draw(st.binary(max_size=9))
            case _:
                del body[at : at + draw(st.integers(1, 5))]
    return bytes(body)


@given(damaged(BODIES) | st.binary(max_size=200))
def test_every_decoder_of_answers_returns_or_refuses(body) -> None:
    for decode in DECODERS:
        returns_or_refuses(lambda decode=decode: decode(body))


@given(damaged(BODIES) | st.binary(max_size=200), st.none() | st.text())
def test_errors_are_always_readable(body, error_type) -> None:
    assert isinstance(decode_aws_error(body, error_type), AwsError)


FRAMES = [
    encode_message({":message-type": "event", ":event-type": "SubscribeToShardEvent"}, BODIES[0]),
    encode_message({":message-type": "exception", ":exception-type": "X", "n": "x" * 40}, BODIES[6]),
]


@given(st.lists(damaged(FRAMES) | st.binary(max_size=40), min_size=1, max_size=3))
def test_a_damaged_stream_is_read_or_refused(pieces) -> None:
    decoder = MessageDecoder()

    def read() -> None:
        for piece in pieces:
            for message in decoder.feed(piece):
                decode_subscription_message(message)

    returns_or_refuses(read)


@given(st.binary(max_size=60), damaged(BODIES))
def test_hostile_headers_with_right_checksums_are_read_or_refused(block, payload) -> None:
    def read() -> None:
        for message in MessageDecoder().feed(encode_frame(block, payload)):
            decode_subscription_message(message)

    returns_or_refuses(read)


def prelude(total: int, headers: int) -> bytes:
    lengths = struct.pack(">II", total, headers)
    return lengths + struct.pack(">I", crc32(lengths))


def read_json(body: bytes) -> None:
    decode_get_records(body)


def read_frames(body: bytes) -> None:
    MessageDecoder().feed(body)


@pytest.mark.parametrize(
    "decode, body",
    [
        pytest.param(cbor.decode, b"\x9b\x7f" + b"\xff" * 7, id="an array of 2**63 items"),
        pytest.param(cbor.decode, b"\xbb\x7f" + b"\xff" * 7 + b"\x60\x00", id="a map of 2**63 members"),
        pytest.param(cbor.decode, b"\x5b\x7f" + b"\xff" * 7, id="a string of 2**63 bytes"),
        pytest.param(cbor.decode, b"\x81" * 1_000_000, id="a million arrays in each other"),
        pytest.param(cbor.decode, b"\xc1" * 1_000_000, id="a million tags"),
        pytest.param(cbor.decode, b"\x9f" + b"\x80" * 100_000, id="many empty arrays without an end"),
        pytest.param(cbor.decode, b"\x7f" + b"\x60" * 1_000_000, id="a string of a million empty chunks"),
        pytest.param(read_json, b'{"Records":' + b"[" * 1_000_000, id="a million JSON arrays in each other"),
        pytest.param(read_json, b'{"X":' + b'{"a":' * 200_000, id="unknown members in each other"),
        pytest.param(read_json, b'{"Records":[' + b"{}," * 300_000 + b"{}]}", id="many empty records"),
        pytest.param(read_json, b'{"MillisBehindLatest":' + b"9" * 1_000_000 + b"}", id="a number of a million digits"),
        pytest.param(read_json, b'{"Records":[{"Data":"' + b"A" * 1_000_001 + b'"}]}', id="base64 of a bad length"),
        pytest.param(read_frames, prelude(0xFFFFFFFF, 0), id="a frame of four gigabytes"),
        pytest.param(read_frames, prelude(1 << 24, 1 << 24), id="headers longer than their frame"),
    ],
)
def test_hostile_sizes_are_refused_in_little_memory(decode: Callable[[bytes], None], body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100 * len(body) + (1 << 20)
    assert peak_bytes < 64 << 20


def test_a_frame_that_never_becomes_whole_is_held_once() -> None:
    decoder = MessageDecoder()
    tracemalloc.start()
    try:
        decoder.feed(prelude(20 << 20, 0))
        for _ in range(300):
            assert decoder.feed(bytes(1 << 16)) == []
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoder.buffered_bytes == 12 + (300 << 16)
    assert peak_bytes < 64 << 20
