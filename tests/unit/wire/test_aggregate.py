"""Filling an aggregate: what fits, what does not, and its exact size."""

import pytest

from anabranch._wire.aggregate import AGGREGATE_OVERHEAD_BYTES, TRACE_TAG, AggregateBuilder, Tag, open_aggregate


def test_an_empty_builder_has_the_size_of_its_frame():
    builder = AggregateBuilder()
    assert (builder.count, builder.size) == (0, AGGREGATE_OVERHEAD_BYTES)


@pytest.mark.parametrize("extras", [{}, {"explicit_hash_key": "7"}, {"tags": [Tag("t", "v")]}], ids=str)
@pytest.mark.parametrize("known", [False, True])
def test_a_record_is_added_if_it_fits_to_the_byte_and_changes_nothing_if_it_does_not(extras, known):
    builder = AggregateBuilder()
    builder.add("known", b"first", "1", size_max=1000)
    before = builder.finish()
    partition_key = "known" if known else "new"
    twin = AggregateBuilder()
    twin.add("known", b"first", "1", size_max=1000)
    twin.add(partition_key, b"data", **extras, size_max=1000)
    size = twin.size

    assert not builder.add(partition_key, b"data", **extras, size_max=size - 1)
    assert (builder.count, builder.size, builder.finish()) == (1, len(before), before)

    assert builder.add(partition_key, b"data", **extras, size_max=size)
    assert (builder.count, builder.size, len(builder.finish())) == (2, size, size)


def test_keys_are_written_once_in_the_order_of_their_first_use():
    builder = AggregateBuilder()
    for partition_key, explicit_hash_key in (("b", "2"), ("a", None), ("b", "1"), ("a", "2")):
        builder.add(partition_key, b"", explicit_hash_key, size_max=1000)
    aggregate = open_aggregate(builder.finish())
    assert aggregate.partition_keys == ["b", "a"]
    assert aggregate.explicit_hash_keys == ["2", "1"]


@pytest.mark.parametrize("length", [0, 127, 128, 1275, 1279, 1280, 16383, 16384, 70_000])
def test_data_and_keys_of_every_length_keep_the_size_exact(length):
    builder = AggregateBuilder()
    assert builder.add("k" * length, b"d" * length, size_max=1 << 20)
    assert builder.add("k" * length, b"e" * length, size_max=1 << 20)
    encoded = builder.finish()
    assert len(encoded) == builder.size
    assert open_aggregate(encoded).sub_records() == [
        ("k" * length, None, b"d" * length),
        ("k" * length, None, b"e" * length),
    ]


def test_more_keys_than_heads_stand_ready_keep_the_size_exact():
    builder = AggregateBuilder()
    records = [(f"key-{number}", None, b"x") for number in range(2000)]
    for partition_key, _, data in records:
        builder.add(partition_key, data, size_max=1 << 20)
    encoded = builder.finish()
    assert len(encoded) == builder.size
    assert open_aggregate(encoded).sub_records() == records


def test_tags_of_the_first_record_are_found_again():
    builder = AggregateBuilder()
    builder.add("k", b"", tags=[Tag("mark"), Tag("é", "")], size_max=1000)
    builder.add("k", b"", tags=[Tag("later", "x")], size_max=1000)
    assert open_aggregate(builder.finish()).first_tags == (Tag("mark", None), Tag("é", ""))


def test_finishing_changes_nothing():
    builder = AggregateBuilder()
    builder.add("k", b"1", size_max=1000)
    assert builder.finish() == builder.finish()
    builder.add("k", b"2", size_max=1000)
    assert len(open_aggregate(builder.finish())) == 2


def test_an_aggregate_without_records_is_not_written():
    with pytest.raises(AssertionError, match="at least one record"):
        AggregateBuilder().finish()


PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


@pytest.mark.parametrize("value", [None, "", PARENT.upper(), PARENT + "0", "ff" + PARENT[2:], "x" * 55])
def test_a_trace_parent_of_another_form_is_no_trace_parent_and_changes_nothing_else(value):
    builder = AggregateBuilder()
    builder.add("k", b"1", size_max=1 << 20)
    builder.add("k", b"2", tags=[Tag(TRACE_TAG, value), Tag("other", PARENT)], size_max=1 << 20)
    builder.add("k", b"3", tags=[Tag("other"), Tag(TRACE_TAG, PARENT)], size_max=1 << 20)
    aggregate = open_aggregate(builder.finish())
    assert aggregate.trace_parents == {2: PARENT}
    assert [data for _, _, data in aggregate.sub_records()] == [b"1", b"2", b"3"]
