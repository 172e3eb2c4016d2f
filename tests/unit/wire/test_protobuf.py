"""Numbers, lengths and unknown fields of the protobuf wire format."""

import pytest

from anabranch._wire.aggregate import encode_varint, read_length, read_tag, read_varint, skip_field
from anabranch.errors import CodecError

NUMBERS = {
    0: "00",
    1: "01",
    127: "7f",
    128: "8001",
    300: "ac02",
    16383: "ff7f",
    16384: "808001",
    2**64 - 1: "ff" * 9 + "01",
}


@pytest.mark.parametrize("number, encoded", NUMBERS.items())
def test_a_number_is_written_and_read_in_seven_bit_groups(number, encoded):
    encoded = bytes.fromhex(encoded)
    assert encode_varint(number) == encoded
    assert read_varint(b"?" + encoded + b"?", 1, len(encoded) + 1) == (number, len(encoded) + 1)


def test_a_long_winded_number_is_legal_and_loses_what_is_above_64_bits():
    assert read_varint(b"\x81\x80\x00", 0, 3) == (1, 3)
    assert read_varint(b"\xff" * 9 + b"\x7f", 0, 10) == (2**64 - 1, 10)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80" * 10 + b"\x01"], ids=["empty", "cut off", "eleven bytes"])
def test_a_number_that_does_not_end_is_refused(data):
    with pytest.raises(CodecError, match="the number at byte 0 is too long"):
        read_varint(data, 0, len(data))


def test_a_number_is_not_read_past_the_end_of_its_message():
    with pytest.raises(CodecError, match="is too long or cut off"):
        read_varint(b"\x80\x01", 0, 1)


@pytest.mark.parametrize("tag", [0, 7, 1 << 32])
def test_a_tag_without_a_field_number_or_beyond_32_bits_is_refused(tag):
    with pytest.raises(CodecError, match=f"invalid tag {tag}"):
        read_tag(encode_varint(tag), 0, 10)


def test_tags_and_lengths_have_at_most_five_bytes():
    assert read_tag(b"\x88\x80\x80\x80\x00", 0, 5) == (8, 5)
    assert read_length(b"\x81\x80\x80\x80\x00x", 0, 6) == (5, 6)
    for read in (read_tag, read_length):
        with pytest.raises(CodecError, match="is too long or cut off"):
            read(b"\x88\x80\x80\x80\x80\x00" + b"x" * 8, 0, 14)


def test_a_length_must_fit_into_its_message():
    assert read_length(b"\x02ab", 0, 3) == (1, 3)
    with pytest.raises(CodecError, match="claims 3 bytes, but 2 are left"):
        read_length(b"\x03ab", 0, 3)


SKIPPED = {
    "varint": "08 9601",
    "fixed64": "09 0102030405060708",
    "delimited": "0a 02 6162",
    "fixed32": "0d 01020304",
    "empty group": "0b 0c",
    "group of fields and groups": "0b 08 9601 13 0a 01 78 14 0d 01020304 0c",
}
BROKEN = {
    "varint": "08 96",
    "fixed64": "09 01020304050607",
    "delimited": "0a 03 6162",
    "fixed32": "0d 010203",
    "group without an end": "0b 08 01",
    "group with another's end": "0b 14",
    "end without a group": "0c",
    "wire type 6": "0e",
    "wire type 7": "0f",
    "101 groups": "0b" * 101 + "0c" * 101,
}


def skip_first(data):
    tag, position = read_tag(data, 0, len(data))
    return skip_field(data + b"?" * 16, tag, position, len(data))


@pytest.mark.parametrize("content", SKIPPED.values(), ids=SKIPPED)
def test_a_field_of_any_wire_type_is_skipped_whole(content):
    data = bytes.fromhex(content)
    assert skip_first(data) == len(data)


def test_groups_are_skipped_a_hundred_deep():
    assert skip_first(bytes.fromhex("0b" * 100 + "0c" * 100)) == 200


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_field_is_refused(content):
    with pytest.raises(CodecError):
        skip_first(bytes.fromhex(content))
