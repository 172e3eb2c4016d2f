from typing import Any

import msgspec
import pytest

from anabranch._model.streams import StreamName, parse_stream
from anabranch._wire import cbor
from anabranch._wire.bodies import CBOR, JSON, AnswerDecoder, encode_request, is_cbor, stream_members
from anabranch._wire.timestamps import Timestamp
from anabranch.errors import CodecError


class Answer(msgspec.Struct, rename="pascal"):
    creation_timestamp: float
    blob: bytes = b""
    items: list["Item"] = []


class Item(msgspec.Struct, rename="pascal"):
    timestamp: float | None = None
    number: int = 0


DECODER = AnswerDecoder("DescribeThing", Answer)


@pytest.mark.parametrize(
    "content_type, expected",
    [(JSON, False), (CBOR, True), ("application/cbor", True), ("Application/X-AMZ-CBOR-1.1; x=y", True), (None, False)],
)
def test_the_content_type_tells_the_protocol(content_type: str | None, expected: bool) -> None:
    assert is_cbor(content_type) is expected


def test_members_that_are_none_are_left_out_of_a_request() -> None:
    assert encode_request({"A": None, "B": 1, "C": "x"}) == [b'{"B":1,"C":"x"}']


def test_a_request_with_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(CodecError, match="not Unicode"):
        encode_request({"StreamName": "\ud800"})


def test_a_stream_is_named_by_its_arn_where_that_is_known() -> None:
    arn = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
    assert stream_members(StreamName("orders")) == {"StreamName": "orders"}
    assert stream_members(parse_stream(arn)) == {"StreamARN": arn}


@pytest.mark.parametrize("text", ["1701760153.593", "1.701760153593E9", "1701760153593e-3"])
def test_every_way_to_write_seconds_in_json_is_read(text: str) -> None:
    assert DECODER.decode(b'{"CreationTimestamp":%b}' % text.encode(), JSON).creation_timestamp == 1701760153.593


def test_whole_seconds_are_read_as_a_float() -> None:
    creation_timestamp = DECODER.decode(b'{"CreationTimestamp":1701760153}', None).creation_timestamp
    assert isinstance(creation_timestamp, float)
    assert creation_timestamp == 1701760153.0


@pytest.mark.parametrize("value", [Timestamp(1701760153.593), 1701760153593, 1701760153593.0])
def test_milliseconds_in_cbor_become_seconds_with_the_tag_and_without(value: Any) -> None:
    body = cbor.encode({"CreationTimestamp": value, "Blob": b"\0", "Items": [{"Timestamp": value, "Number": 5}]})
    answer = DECODER.decode(memoryview(body), CBOR)
    assert answer == Answer(1701760153.593, b"\0", [Item(1701760153.593, 5)])


def test_a_tagged_timestamp_under_another_name_becomes_seconds_too() -> None:
    class Other(msgspec.Struct):
        when: float

    assert AnswerDecoder("Other", Other).decode(cbor.encode({"when": Timestamp(2.5)}), CBOR).when == 2.5


def test_a_null_timestamp_stays_null() -> None:
    body = cbor.encode({"CreationTimestamp": 0, "Items": [{"Timestamp": None}]})
    assert DECODER.decode(body, CBOR).items == [Item()]


@pytest.mark.parametrize(
    "body, content_type",
    [
        (b"", JSON),
        (b"{}", JSON),
        (b"[]", JSON),
        (b"<html>", JSON),
        (b'{"CreationTimestamp":"now"}', JSON),
        (b'{"CreationTimestamp":1,"Blob":"\xff"}', JSON),
        (b'{"X":' + b"[" * 100_000, JSON),
        (b"", CBOR),
        (b"\x01", CBOR),
        (b'{"CreationTimestamp":1}', CBOR),
        (cbor.encode({"CreationTimestamp": True}), CBOR),
        (cbor.encode({"CreationTimestamp": "now"}), CBOR),
        (cbor.encode({"CreationTimestamp": 1 << 63}), CBOR),
    ],
)
def test_an_answer_of_another_shape_is_refused_with_the_operations_name(body: bytes, content_type: str) -> None:
    with pytest.raises(CodecError, match=r"^DescribeThing was answered with"):
        DECODER.decode(body, content_type)
