"""Bytes from anywhere: the reader returns an aggregate or None, and raises nothing but CodecError when asked why."""

import hashlib
import random

import pytest
from hypothesis import given, strategies as st

from anabranch._model.hash_keys import HashKeyRange
from anabranch._wire.aggregate import MAGIC, AggregateBuilder, Tag, open_aggregate, parse_aggregate
from anabranch.errors import CodecError


def read(data):
    """Everything that a consumer does with a record's bytes; says whether they were an aggregate."""
    aggregate = open_aggregate(data)
    if aggregate is None:
        with pytest.raises(CodecError, match=r"."):
            parse_aggregate(data)
        return False
    sub_records = aggregate.sub_records()
    assert len(sub_records) == len(aggregate) > 0
    assert all(content in data for _, _, content in sub_records)
    aggregate.misrouted(HashKeyRange(2**100, 2**127))
    return True


def wrap(message):
    return MAGIC + message + hashlib.md5(message).digest()


@given(data=st.binary(max_size=200))
def test_any_bytes(data):
    read(data)
    read(MAGIC + data)


@given(message=st.binary(min_size=1, max_size=200))
def test_any_message_under_a_fitting_digest(message):
    read(wrap(message))


def test_every_cut_and_many_changes_of_a_true_message():
    builder = AggregateBuilder()
    for number in range(140):  # past the first index of two bytes
        builder.add(f"k{number}", b"d" * (number % 3), size_max=1 << 20)
    builder.add("k", b"data", "340282366920938463463374607431768211455", [Tag("t", "v"), Tag("u")], size_max=1 << 20)
    builder.add("k", b"d" * 300, size_max=1 << 20)
    message = builder.finish()[len(MAGIC) : -16]
    for length in range(1, len(message)):
        read(wrap(message[:length]))
    entropy = random.Random(7)
    outcomes = []
    for _ in range(3000):
        changed = bytearray(message)
        for _ in range(entropy.choice((1, 1, 2, 5))):
            changed[entropy.randrange(len(changed))] = entropy.choice((0, 1, 0x0A, 0x1A, 0x7F, 0x80, 0xFF, 0x12, 0x08))
        outcomes.append(read(wrap(bytes(changed))))
    assert any(outcomes)
    assert not all(outcomes)


def test_a_message_of_one_repeated_byte_is_read_or_rejected_at_once():
    for byte in range(256):
        read(wrap(bytes((byte,)) * 5000))
