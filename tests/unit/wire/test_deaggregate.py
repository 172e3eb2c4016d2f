"""Every rule by which a record is, or is not, an aggregate; and what is read from one."""

import hashlib

import pytest

from anabranch._model.hash_keys import HashKeyRange, even_ranges
from anabranch._wire.aggregate import MAGIC, AggregateBuilder, Tag, open_aggregate, parse_aggregate
from anabranch.errors import CodecError

KEY_A, KEY_B = "0a 01 61", "0a 01 62"
RECORD_X = "1a 05 08 00 1a 01 78"
X = ("a", None, b"x")


def wrap(*parts):
    message = b"".join(part if isinstance(part, bytes) else bytes.fromhex(part) for part in parts)
    return MAGIC + message + hashlib.md5(message).digest()


def build(*records):
    builder = AggregateBuilder()
    for partition_key, explicit_hash_key, data in records:
        builder.add(partition_key, data, explicit_hash_key, size_max=1 << 20)
    return builder.finish()


UNUSUAL = {
    "the table after the records": ((RECORD_X, KEY_A), [X]),
    "the table between the records": ((RECORD_X, KEY_A, RECORD_X), [X, X]),
    "a key twice in the table": ((KEY_A, KEY_A, RECORD_X, "1a 05 08 01 1a 01 79"), [X, ("a", None, b"y")]),
    "data before the key index": ((KEY_A, "1a 05 1a 01 78 08 00"), [X]),
    "a field twice: the last counts": ((KEY_A, KEY_B, "1a 0a 08 01 1a 01 79 08 00 1a 01 78"), [X]),
    "numbers written in more bytes than needed": (
        (KEY_A, "1a 8a 80 00 08 80 80 00 1a 81 80 80 00 78"),
        [X],
    ),
    "two-byte numbers below 128": (("0a 81 00 61", "1a 87 00 08 80 00 1a 81 00 78"), [X]),
    "a tag in two bytes": (("8a 00 01 61", "9a 00 06 88 00 00 1a 01 78"), [X]),
    "an empty partition key": (("0a 00", RECORD_X), [("", None, b"x")]),
    "an unused key": ((KEY_A, KEY_B, RECORD_X), [X]),
    "an explicit hash key of leading zeros": (
        (KEY_A, "12 03 303037", "1a 07 08 00 10 00 1a 01 78"),
        [("a", "7", b"x")],
    ),
    "an explicit hash key of zeros alone": ((KEY_A, "12 02 3030", "1a 07 08 00 10 00 1a 01 78"), [("a", "0", b"x")]),
    "unknown fields in the message": (
        (KEY_A, "20 01", "29 0102030405060708", "32 01 00", "3b 3c", "3d 01020304", "a0 06 96 01", RECORD_X),
        [X],
    ),
    "unknown fields in a record": ((KEY_A, "1a 0e 28 01 08 00 35 01020304 1a 01 78 3b 3c"), [X]),
    "known numbers with other wire types": ((KEY_A, "08 05 15 01020304 19 0102030405060708", RECORD_X), [X]),
    "unknown fields in a tag": ((KEY_A, "1a 0c 08 00 1a 01 78 22 05 18 01 0a 01 74"), [X]),
}
BROKEN = {
    "no record": (
        "has no records",
        KEY_A,
    ),
    "no table": (
        "key 0 of a table of 0",
        RECORD_X,
    ),
    "a key index outside the table": ("key 1 of a table of 1", KEY_A, RECORD_X, "1a 05 08 01 1a 01 78"),
    "a key index of 64 bits": ("partition key 18446744073709551615", KEY_A, "1a 0e 08 ffffffffffffffffff01 1a 01 78"),
    "a key index of 32 bits and nothing below": ("partition key 4294967296", KEY_A, "1a 09 08 8080808010 1a 01 78"),
    "a key index of three bytes that looks like two": (
        "partition key 425984",
        KEY_A,
        KEY_A * 200,
        "1a 07 08 8080 1a 1a 01 78",
    ),
    "a hash key index without a table": ("key 0 of a table of 0", KEY_A, "1a 07 08 00 10 00 1a 01 78"),
    "a hash key index outside the table": ("key 1 of a table of 1", KEY_A, "12 01 30", "1a 07 08 00 10 01 1a 01 78"),
    "a record without a key index": ("sub-record 0 has no partition key index", KEY_A, "1a 03 1a 01 78"),
    "a record without data": ("or no data", KEY_A, "1a 02 08 00"),
    "an empty record": ("or no data", KEY_A, "1a 00"),
    "a record longer than the message": ("claims 6 bytes, but 5 are left", KEY_A, "1a 06 08 00 1a 01 78"),
    "a key longer than the message": ("claims 5 bytes, but 1 are left", RECORD_X, "0a 05 61"),
    "data longer than its record": ("claims 2 bytes, but 1 are left", KEY_A, "1a 05 08 00 1a 02 78", RECORD_X),
    "data shorter than its record": ("ends inside the field", KEY_A, "1a 06 08 00 1a 01 78 61"),
    "a tag without a key": ("has no key", KEY_A, "1a 0a 08 00 1a 01 78 22 03 12 01 74"),
    "a partition key that is not UTF-8": ("not UTF-8", "0a 01 ff", RECORD_X),
    "a surrogate in a partition key": ("not UTF-8", "0a 03 eda080", RECORD_X),
    "an empty explicit hash key": ("is not a number from 0", KEY_A, "12 00", RECORD_X),
    "an explicit hash key that is no number": ("is not a number from 0", KEY_A, "12 02 2d31", RECORD_X),
    "an explicit hash key of other digits": ("is not a number from 0", KEY_A, b"\x12\x03" + "१".encode(), RECORD_X),
    "an explicit hash key of 2**128": ("is not a number from 0", KEY_A, b"\x12\x27" + str(2**128).encode(), RECORD_X),
    "an explicit hash key of 5000 digits": ("is not a number from 0", KEY_A, b"\x12\x88\x27" + b"1" * 5000, RECORD_X),
    "a field number of zero": ("invalid tag 2", KEY_A, RECORD_X, "02 00"),
    "text": (
        "invalid tag 108",
        b"hello, world",
    ),
    "one byte": (
        "is too long or cut off",
        b"\x1a",
    ),
}


@pytest.mark.parametrize("parts, expected", UNUSUAL.values(), ids=UNUSUAL)
def test_whatever_protobuf_allows_is_read(parts, expected):
    assert parse_aggregate(wrap(*parts)).sub_records() == expected


@pytest.mark.parametrize("reason_and_parts", BROKEN.values(), ids=BROKEN)
def test_a_message_that_is_not_whole_is_passed_on_with_a_reason(reason_and_parts):
    reason, *parts = reason_and_parts
    data = wrap(*parts)
    assert open_aggregate(data) is None
    with pytest.raises(CodecError, match=reason):
        parse_aggregate(data)


def test_a_record_without_the_magic_number_is_no_aggregate():
    assert open_aggregate(b"plain") is None
    with pytest.raises(CodecError, match="no magic number"):
        parse_aggregate(b"plain")


def test_a_record_of_twenty_bytes_is_no_aggregate():
    with pytest.raises(CodecError, match="no message before"):
        parse_aggregate(MAGIC + hashlib.md5(b"").digest())


def test_a_wrong_digest_makes_it_no_aggregate():
    data = wrap(KEY_A, RECORD_X)
    with pytest.raises(CodecError, match="MD5"):
        parse_aggregate(data[:-1] + bytes((data[-1] ^ 1,)))


def test_one_level_is_opened():
    inner = build(X)
    assert open_aggregate(build(("a", None, inner))).sub_records() == [("a", None, inner)]


def test_an_absent_explicit_hash_key_is_not_the_first_of_the_table():
    aggregate = open_aggregate(build(("a", "5", b""), ("a", None, b""), ("b", "6", b"")))
    assert aggregate.sub_records() == [("a", "5", b""), ("a", None, b""), ("b", "6", b"")]


@pytest.mark.parametrize("explicit_hash_key", [None, "9"])
def test_sub_records_are_made_by_demand(explicit_hash_key):
    records = [(f"k{number % 3}", explicit_hash_key if number % 2 else None, b"%d" % number) for number in range(10)]
    aggregate = open_aggregate(build(*records))
    assert len(aggregate) == 10
    assert aggregate.sub_records(3, 7) == records[3:7]
    assert aggregate.sub_records(8) == records[8:]
    assert aggregate.sub_records(10) == []


def test_an_aggregate_of_empty_records_is_held_in_little_more_than_its_bytes():
    count = 170_000
    data = wrap(KEY_A, bytes.fromhex("1a 04 08 00 1a 00") * count)
    aggregate = open_aggregate(data)
    assert len(aggregate) == count
    assert aggregate.sub_records(count - 1) == [("a", None, b"")]
    held = sum(
        column.itemsize * len(column) for column in (aggregate._key_indexes, aggregate._starts, aggregate._stops)
    )
    assert held <= 12 * count


def test_tags_mark_the_aggregate_where_they_are_on_its_first_record():
    tagged = "1a 0a 08 00 1a 01 78 22 03 0a 01 74"
    assert open_aggregate(wrap(KEY_A, tagged, RECORD_X)).first_tags == (Tag("t"),)
    assert open_aggregate(wrap(KEY_A, RECORD_X, tagged)).first_tags == ()


def test_misrouted_sub_records_are_named_by_their_places():
    low, high = even_ranges(2)
    aggregate = open_aggregate(  # the MD5 of "a" starts with 0c, that of "user-123" with bc
        build(("a", None, b""), ("user-123", None, b""), ("a", str(2**128 - 1), b""), ("user-123", "0", b""))
    )
    assert aggregate.misrouted(low) == [1, 2]
    assert aggregate.misrouted(high) == [0, 3]
    assert aggregate.misrouted(HashKeyRange(0, 2**128 - 1)) == []


def test_an_unused_key_of_another_shard_misroutes_nothing():
    low, _ = even_ranges(2)
    aggregate = open_aggregate(wrap(KEY_A, b"\x0a\x08user-123", RECORD_X))
    assert aggregate.misrouted(low) == []
