import msgspec
import pytest

from anabranch._model.streams import StreamName, parse_stream
from anabranch._wire.bodies import answer_decoder, encode_request, stream_members
from anabranch.errors import CodecError


class Answer(msgspec.Struct, rename="pascal"):
    creation_timestamp: float
    blob: bytes = b""
    items: list["Item"] = []


class Item(msgspec.Struct, rename="pascal"):
    timestamp: float | None = None
    number: int = 0


DECODE = answer_decoder("DescribeThing", Answer)


def test_members_that_are_none_are_left_out_of_a_request() -> None:
    assert encode_request({"A": None, "B": 1, "C": "x"}) == [b'{"B":1,"C":"x"}']


def test_a_request_with_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(CodecError, match="not valid Unicode"):
        encode_request({"StreamName": "\ud800"})


def test_a_stream_is_named_by_its_arn_where_that_is_known() -> None:
    arn = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
    assert stream_members(StreamName("orders")) == {"StreamName": "orders"}
    assert stream_members(parse_stream(arn)) == {"StreamARN": arn}


@pytest.mark.parametrize("text", ["1701760153.593", "1.701760153593E9", "1701760153593e-3"])
def test_every_way_to_write_seconds_in_json_is_read(text: str) -> None:
    assert DECODE(b'{"CreationTimestamp":%b}' % text.encode()).creation_timestamp == 1701760153.593


def test_whole_seconds_are_read_as_a_float() -> None:
    creation_timestamp = DECODE(b'{"CreationTimestamp":1701760153}').creation_timestamp
    assert isinstance(creation_timestamp, float)
    assert creation_timestamp == 1701760153.0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"<html>",
        b'{"CreationTimestamp":"now"}',
        b'{"CreationTimestamp":1,"Blob":"\xff"}',
        b'{"X":' + b"[" * 100_000,
    ],
)
def test_an_answer_of_another_shape_is_refused_with_the_operations_name(body: bytes) -> None:
    with pytest.raises(CodecError, match=r"^the answer to DescribeThing"):
        DECODE(body)
