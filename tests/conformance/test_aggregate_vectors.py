"""Aggregates whose bytes are known from the KPL's format, and records that only look like aggregates."""

import hashlib

import pytest

from anabranch._wire.aggregate import MAGIC, AggregateBuilder, open_aggregate

A = "f3899ac20a01610a01621a0508001a01781a0508011a0179b0031909ae75891ca94acec2ecce3125"

VECTORS = {
    "two keys": ([("a", None, b"x"), ("b", None, b"y")], A),
    "one key twice": (
        [("pk", None, b"hello"), ("pk", None, b"world")],
        "f3899ac20a02706b1a0908001a0568656c6c6f1a0908001a05776f726c644747b0d63591c416fdae617529bdda27",
    ),
    "some explicit hash keys": (
        [("k1", None, b"one"), ("k2", "123", b"two"), ("k1", "0", b"three"), ("k3", None, b"")],
        (
            "f3899ac20a026b310a026b320a026b3312033132331201301a0708001a036f6e651a09080110001a0374776f"
            "1a0b080010011a0574687265651a0408021a00bf3809c5fdae7433e1f5eb7ed6a00e2c"
        ),
    ),
    "keys beyond ASCII, the highest hash key, empty data": (
        [("ключ", None, b"\x00\xff"), ("é", str(2**128 - 1), b"")],
        (
            "f3899ac20a08d0bad0bbd18ed1870a02c3a912273334303238323336363932303933383436333436333337343630373433"
            "313736383231313435351a0608001a0200ff1a06080110001a00d79ced1b1564d9fb222fbb2822e8c0e2"
        ),
    ),
}

NOT_AGGREGATES = {
    "empty": b"",
    "the magic number alone": MAGIC,
    "the magic number and three bytes": MAGIC + b"abc",
    "the digest of nothing, and nothing": MAGIC + hashlib.md5(b"").digest(),
    "a digest that does not fit": bytes.fromhex(A)[:-1] + b"\x24",
    "another magic number": b"\xf3\x89\x9a\xc3" + bytes.fromhex(A)[4:],
}


def build(records):
    builder = AggregateBuilder()
    for partition_key, explicit_hash_key, data in records:
        assert builder.add(partition_key, data, explicit_hash_key, size_max=1 << 20)
    return builder.finish()


@pytest.mark.parametrize("records, expected", VECTORS.values(), ids=VECTORS)
def test_the_builder_writes_the_known_bytes(records, expected):
    assert build(records).hex() == expected


@pytest.mark.parametrize("records, encoded", VECTORS.values(), ids=VECTORS)
def test_the_reader_finds_the_records_in_the_known_bytes(records, encoded):
    assert open_aggregate(bytes.fromhex(encoded)).sub_records() == records


def test_indexes_and_lengths_of_two_bytes_are_written_and_read():
    records = [(f"p{i % 130}", None, b"z" * i) for i in range(300)]
    encoded = build(records)
    assert len(encoded) == 47_692
    assert hashlib.sha256(encoded).hexdigest() == "6f4f03de97be3c28af586e25e40f8662b5b8c99377c0a9cfa5d85fa67e37ec81"
    assert open_aggregate(encoded).sub_records() == records


@pytest.mark.parametrize("data", NOT_AGGREGATES.values(), ids=NOT_AGGREGATES)
def test_what_only_looks_like_an_aggregate_is_passed_on_as_it_is(data):
    assert open_aggregate(data) is None


def test_an_index_outside_its_table_makes_it_no_aggregate_so_that_no_record_is_lost():
    message = bytes.fromhex("0a01610a01621a0508001a01781a0508071a0179")
    assert open_aggregate(MAGIC + message + hashlib.md5(message).digest()) is None
