import struct
from zlib import crc32

import pytest

from anabranch._wire.event_stream import (
    FRAME_BYTES_MAX,
    HEADERS_BYTES_MAX,
    Message,
    MessageDecoder,
    encode_frame,
    encode_headers,
    encode_message,
)
from anabranch.errors import CodecError

EVENT = {":message-type": "event", ":event-type": "SubscribeToShardEvent"}


def lengths(total: int, headers: int) -> bytes:
    start = struct.pack(">II", total, headers)
    return start + struct.pack(">I", crc32(start))


def test_an_empty_message_is_sixteen_bytes_with_the_published_checksums() -> None:
    assert encode_message({}, b"").hex() == "000000100000000005c248eb7d98c8ff"
    assert MessageDecoder().feed(bytes.fromhex("000000100000000005c248eb7d98c8ff")) == [Message({}, b"")]


def test_a_text_header_is_written_and_read() -> None:
    block = encode_headers({"h": "\u00e9"})
    assert block.hex() == "0168070002c3a9"
    (message,) = MessageDecoder().feed(encode_frame(block, b"p"))
    assert message.headers == {"h": "\u00e9"}


@pytest.mark.parametrize(
    "value",
    [
        "00",
        "01",
        "02 80",
        "03 0080",
        "04 ffff7fff",
        "05 8000000000000000",
        "06 0002 00ff",
        "08 00000000000005dc",
        "09 000102030405060708090a0b0c0d0e0f",
    ],
)
def test_a_header_that_is_not_text_is_skipped(value: str) -> None:
    (message,) = MessageDecoder().feed(encode_frame(bytes.fromhex(f"0168 {value} 0169 07 0001 78"), b""))
    assert message.headers == {"i": "x"}


def test_bytes_cut_anywhere_give_the_same_messages() -> None:
    stream = encode_message(EVENT, b"first") + encode_message(EVENT, b"") + encode_message({"x": "1"}, b"third" * 100)
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
        decoder.feed(encode_message({"number": str(number)}, b""))
    decoder.feed(encode_message({"large": "x" * 5000}, b""))
    assert len(decoder._cached_headers) == 64


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
        ("0161 07 0000 0161 07 0000", "twice"),
        ("01", "empty"),
        ("0261", "is longer than the header block"),
        ("0161", "is longer than the header block"),
        ("0161 04 0000", "is longer than the header block"),
        ("0161 07 00", "is longer than the header block"),
        ("0161 07 0005 6162", "is longer than the header block"),
        ("0161 09 0000", "is longer than the header block"),
        ("0161 0a", "unknown type 10"),
        ("01ff 00", "not UTF-8"),
        ("0161 07 0001 ff", "not UTF-8"),
    ],
)
def test_broken_headers_are_refused_with_the_reason(block: str, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        MessageDecoder().feed(encode_frame(bytes.fromhex(block), b""))
