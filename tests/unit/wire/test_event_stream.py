import struct
from zlib import crc32

import pytest

from anabranch._wire.event_stream import (
    FRAME_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HeaderValue,
    Message,
    MessageDecoder,
    Uuid,
    encode_headers,
    encode_message,
    frame,
)
from anabranch._wire.timestamps import Timestamp
from anabranch.errors import CodecError

EVENT = {":message-type": "event", ":event-type": "SubscribeToShardEvent"}


def lengths(total: int, headers: int) -> bytes:
    start = struct.pack(">II", total, headers)
    return start + struct.pack(">I", crc32(start))


def test_an_empty_message_is_sixteen_bytes_with_the_published_checksums() -> None:
    assert encode_message({}, b"").hex() == "000000100000000005c248eb7d98c8ff"
    assert MessageDecoder().feed(bytes.fromhex("000000100000000005c248eb7d98c8ff")) == [Message({}, b"")]


@pytest.mark.parametrize(
    "value, kind, content",
    [
        (True, 0, ""),
        (False, 1, ""),
        (-128, 2, "80"),
        (127, 2, "7f"),
        (128, 3, "0080"),
        (-32769, 4, "ffff7fff"),
        (1 << 31, 5, "0000000080000000"),
        (-(1 << 63), 5, "8000000000000000"),
        (b"\x00\xff", 6, "000200ff"),
        ("\u00e9", 7, "0002c3a9"),
        (Timestamp(1.5), 8, "00000000000005dc"),
        (Uuid(range(16)), 9, "000102030405060708090a0b0c0d0e0f"),
    ],
)
def test_every_header_type_is_written_and_read(value: HeaderValue, kind: int, content: str) -> None:
    block = encode_headers({"h": value})
    assert block.hex() == f"0168{kind:02x}{content}"
    (message,) = MessageDecoder().feed(frame(block, b"p"))
    assert message.headers["h"] == value
    assert type(message.headers["h"]) is type(value)


def test_an_integer_in_a_wider_type_than_it_needs_is_read() -> None:
    (message,) = MessageDecoder().feed(frame(bytes.fromhex("0168050000000000000001"), b""))
    assert message.headers == {"h": 1}


def test_bytes_cut_anywhere_give_the_same_messages() -> None:
    stream = encode_message(EVENT, b"first") + encode_message(EVENT, b"") + encode_message({"x": 1}, b"third" * 100)
    expected = MessageDecoder().feed(stream)
    assert [message.payload for message in expected] == [b"first", b"", b"third" * 100]
    for size in (1, 2, 7, 11, 12, 13, 100, 500):
        decoder = MessageDecoder()
        read = [m for at in range(0, len(stream), size) for m in decoder.feed(memoryview(stream)[at : at + size])]
        assert read == expected
        assert decoder.buffered_bytes == 0


def test_a_message_that_is_not_whole_is_kept_and_counted() -> None:
    whole = encode_message(EVENT, b"payload")
    decoder = MessageDecoder()
    assert decoder.feed(whole + whole[:20]) == [Message(EVENT, b"payload")]
    assert decoder.buffered_bytes == 20
    assert decoder.feed(whole[20:]) == [Message(EVENT, b"payload")]
    assert decoder.feed(b"") == []


def test_nothing_refers_to_the_buffer_that_was_fed() -> None:
    data = bytearray(encode_message(EVENT, b"payload"))
    (message,) = MessageDecoder().feed(data)
    data[:] = b"\0" * len(data)
    assert message == Message(EVENT, b"payload")


def test_equal_header_blocks_are_parsed_once_and_cannot_be_changed() -> None:
    first, second = MessageDecoder().feed(encode_message(EVENT, b"1") + encode_message(EVENT, b"2"))
    assert first.headers is second.headers
    with pytest.raises(TypeError):
        first.headers["x"] = 1  # type: ignore[index]


def test_remembered_header_blocks_are_bounded() -> None:
    decoder = MessageDecoder()
    for number in range(1000):
        decoder.feed(encode_message({"number": number}, b""))
    decoder.feed(encode_message({"large": b"x" * 5000}, b""))
    assert len(decoder._blocks) == 64


def test_a_changed_bit_anywhere_is_noticed() -> None:
    whole = encode_message(EVENT, b"payload")
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 0x10
        with pytest.raises(CodecError, match="checksum"):
            MessageDecoder().feed(changed)


@pytest.mark.parametrize(
    "total, headers",
    [(0, 0), (15, 0), (16, 1), (FRAME_BYTES_MAX + 1, 0), (0xFFFFFFFF, 0), (1 << 20, HEADERS_BYTES_MAX + 1)],
)
def test_impossible_lengths_are_refused_before_anything_is_waited_for(total: int, headers: int) -> None:
    with pytest.raises(CodecError, match=f"claims {total} bytes"):
        MessageDecoder().feed(lengths(total, headers))


@pytest.mark.parametrize(
    "block, reason",
    [
        ("00 00", "empty"),
        ("0161 00 0161 00", "twice"),
        ("01", "empty"),
        ("0261", "passes the end"),
        ("0161", "passes the end"),
        ("0161 04 0000", "passes the end"),
        ("0161 07 00", "passes the end"),
        ("0161 07 0005 6162", "passes the end"),
        ("0161 09 0000", "passes the end"),
        ("0161 0a", "unknown type 10"),
        ("01ff 00", "not UTF-8"),
        ("0161 07 0001 ff", "not UTF-8"),
        ("0161 08 7fffffffffffffff", "year 10000"),
    ],
)
def test_broken_headers_are_refused_with_the_reason(block: str, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        MessageDecoder().feed(frame(bytes.fromhex(block), b""))


@pytest.mark.parametrize(
    "headers, reason",
    [
        ({"": "x"}, "1 to 255"),
        ({"x" * 256: "x"}, "1 to 255"),
        ({"x": 1 << 63}, "as large as"),
        ({"x": Uuid(b"short")}, "5 bytes instead of 16"),
        ({"x": "y" * 65536}, "65535 is the most"),
        ({str(number): "y" * 65535 for number in range(3)}, "at most 131072"),
    ],
)
def test_headers_that_fit_no_frame_are_not_written(headers: dict[str, HeaderValue], reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        encode_headers(headers)


def test_a_payload_that_fits_no_frame_is_not_written() -> None:
    with pytest.raises(CodecError, match="at most 25165824"):
        frame(b"", bytes(FRAME_BYTES_MAX))
