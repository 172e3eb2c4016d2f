"""Protobuf and our aggregate codec: what we write it reads, what it writes we read, byte for byte.

Protobuf's parser also decides what a valid message is, over messages made of all kinds of fields.
"""

import hashlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import event, given, settings, strategies as st

from aggregate_oracle import AggregatedRecord, read_aggregate, write_aggregate
from anabranch._wire.aggregate import MAGIC, AggregateBuilder, Tag, encode_varint, open_aggregate, parse_aggregate
from anabranch.errors import CodecError

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
HASH_KEYS = st.integers(0, 2**128 - 1).map(str)
RECORDS = st.lists(st.tuples(KEYS, st.none() | HASH_KEYS, st.binary(max_size=300)), min_size=1, max_size=8)
TAGS = st.lists(st.tuples(KEYS, st.none() | KEYS), max_size=3)


def wrap(message):
    return MAGIC + message + hashlib.md5(message).digest()


@given(records=RECORDS)
def test_ours_and_protobuf_write_the_same_bytes(records):
    ours = AggregateBuilder()
    for partition_key, explicit_hash_key, data in records:
        ours.add(partition_key, data, explicit_hash_key, size_max=1 << 20)
    assert ours.finish() == write_aggregate(records)


@given(records=RECORDS)
def test_each_reads_what_the_other_wrote(records):
    builder = AggregateBuilder()
    for partition_key, explicit_hash_key, data in records:
        builder.add(partition_key, data, explicit_hash_key, size_max=1 << 20)
    assert read_aggregate(builder.finish()) == records
    assert open_aggregate(write_aggregate(records)).sub_records() == records


@given(records=st.lists(st.tuples(KEYS, st.none() | HASH_KEYS, st.binary(max_size=20), TAGS), min_size=1, max_size=4))
def test_protobuf_reads_the_tags_that_ours_wrote(records):
    builder = AggregateBuilder()
    for partition_key, explicit_hash_key, data, tags in records:
        builder.add(partition_key, data, explicit_hash_key, [Tag(*tag) for tag in tags], size_max=1 << 20)
    parsed = AggregatedRecord.FromString(builder.finish()[4:-16])
    for record, (partition_key, explicit_hash_key, data, tags) in zip(parsed.records, records, strict=True):
        assert parsed.partition_key_table[record.partition_key_index] == partition_key
        assert record.HasField("explicit_hash_key_index") == (explicit_hash_key is not None)
        assert record.data == data
        assert [(tag.key, tag.value if tag.HasField("value") else None) for tag in record.tags] == tags


# Messages of every shape: fields in any order, repeated, unknown, of a wrong wire type, with long-winded numbers.
def varint(number, padding=0):
    encoded = encode_varint(number)
    return encoded[:-1] + bytes((encoded[-1] | 0x80,)) + b"\x80" * (padding - 1) + b"\x00" if padding else encoded


NUMBERS = st.tuples(st.sampled_from([0, 1, 2, 127, 128, 16384, 2**32]), st.sampled_from([0, 0, 0, 1, 2])).map(
    lambda pair: varint(*pair)
)
SMALL_INDEXES = st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 0, 1, 3])).map(lambda pair: varint(*pair))


def field(number, wire_type, content):
    return varint(number << 3 | wire_type) + content


def delimited(number, content, padding=0):
    return field(number, 2, varint(len(content), padding) + content)


PADDINGS = st.sampled_from([0, 0, 0, 1, 2])


def unknown(low):
    numbers = st.integers(low, low + 20) | st.sampled_from([1000, 2**29 - 1])
    return st.one_of(
        st.builds(field, numbers, st.just(0), NUMBERS),
        st.builds(field, numbers, st.just(1), st.binary(min_size=8, max_size=8)),
        st.builds(delimited, numbers, st.binary(max_size=140), PADDINGS),
        st.builds(field, numbers, st.just(5), st.binary(min_size=4, max_size=4)),
        numbers.map(lambda n: field(n, 3, field(7, 0, b"\x01") + field(9, 3, field(9, 4, b""))) + field(n, 4, b"")),
    )


def any_order(*required, optional, most=4):
    parts = st.tuples(st.tuples(*required), st.lists(optional, max_size=most))
    return parts.map(lambda found: [*found[0], *found[1]]).flatmap(st.permutations).map(b"".join)


TEXT_BYTES = KEYS.map(str.encode)
TAG_MESSAGES = any_order(
    st.builds(delimited, st.just(1), TEXT_BYTES, PADDINGS),
    optional=st.builds(delimited, st.just(2), TEXT_BYTES, PADDINGS) | unknown(3),
)
RECORD_MESSAGES = any_order(
    SMALL_INDEXES.map(lambda index: field(1, 0, index)),
    st.builds(delimited, st.just(3), st.binary(max_size=140), PADDINGS),
    optional=st.one_of(
        SMALL_INDEXES.map(lambda index: field(1, 0, index)),
        SMALL_INDEXES.map(lambda index: field(2, 0, index)),
        st.builds(delimited, st.just(3), st.binary(max_size=140), PADDINGS),
        st.builds(delimited, st.just(4), TAG_MESSAGES, PADDINGS),
        st.just(field(1, 5, b"abcd")),
        unknown(5),
    ),
)
MESSAGES = any_order(
    *[st.builds(delimited, st.just(1), TEXT_BYTES, PADDINGS)] * 2,
    st.builds(delimited, st.just(2), HASH_KEYS.map(str.encode), PADDINGS),
    st.builds(delimited, st.just(3), RECORD_MESSAGES, PADDINGS),
    optional=st.one_of(
        st.builds(delimited, st.just(1), TEXT_BYTES, PADDINGS),
        st.builds(delimited, st.just(2), HASH_KEYS.map(str.encode), PADDINGS),
        st.builds(delimited, st.just(3), RECORD_MESSAGES, PADDINGS),
        st.just(field(1, 0, b"\x05")),
        unknown(4),
    ),
)


# What ours asks for and Python's protobuf does not: texts in UTF-8, hash keys that are numbers, and (as Java's does)
# field numbers from 1 even inside fields that are skipped.
STRICTER = r"not UTF-8|explicit hash key|invalid tag [0-7]$"


def as_protobuf_reads(message):
    try:
        parsed = AggregatedRecord.FromString(message)
    except DecodeError:
        return None
    if not parsed.IsInitialized():  # Python's parser leaves the check of required fields to its caller, Java's does not
        return None
    keys, hash_keys = parsed.partition_key_table, parsed.explicit_hash_key_table
    try:
        return [
            (
                keys[record.partition_key_index],
                hash_keys[record.explicit_hash_key_index] if record.HasField("explicit_hash_key_index") else None,
                record.data,
            )
            for record in parsed.records
        ] or None
    except IndexError:
        return None


@given(message=MESSAGES)
def test_protobuf_and_ours_read_the_same_records_from_any_message(message):
    aggregate = open_aggregate(wrap(message))
    event("an aggregate" if aggregate else "none")
    assert (aggregate.sub_records() if aggregate else None) == as_protobuf_reads(message)


@settings(max_examples=300)
@given(message=MESSAGES, data=st.data())
def test_protobuf_and_ours_agree_on_damaged_messages(message, data):
    damage = data.draw(st.sampled_from(["cut", "change", "insert"]))
    at = data.draw(st.integers(0, len(message) - 1))
    if damage == "cut":
        message = message[:at]
    elif damage == "change":
        message = message[:at] + bytes((data.draw(st.integers(0, 255)),)) + message[at + 1 :]
    else:
        message = message[:at] + data.draw(st.binary(min_size=1, max_size=3)) + message[at:]
    expected = as_protobuf_reads(message)
    aggregate = open_aggregate(wrap(message))
    if aggregate is not None:
        assert aggregate.sub_records() == expected
    elif expected is not None:
        with pytest.raises(CodecError, match=STRICTER):
            parse_aggregate(wrap(message))
