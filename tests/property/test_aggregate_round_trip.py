"""Law: what an aggregate was filled with is found in it, and its size is known exactly before and after each record."""

from hypothesis import given, strategies as st

from anabranch._wire.aggregate import AGGREGATE_OVERHEAD_BYTES, AggregateBuilder, Tag, open_aggregate

# Few keys, so that they repeat; lengths around the edges of one and two bytes.
KEYS = st.sampled_from(["a", "ключ", "k" * 127, "k" * 128]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=9
)
HASH_KEYS = st.none() | st.integers(0, 3).map(str) | st.integers(0, 2**128 - 1).map(str)
DATA = st.binary(max_size=20) | st.sampled_from([b"d" * length for length in (120, 122, 123, 124, 127, 128, 16_380)])
TAGS = st.lists(st.builds(Tag, KEYS, st.none() | KEYS), max_size=2)
RECORDS = st.lists(st.tuples(KEYS, DATA, HASH_KEYS, st.just([]) | TAGS), min_size=1, max_size=20)


@given(records=RECORDS)
def test_what_goes_in_comes_out(records):
    builder = AggregateBuilder()
    for record in records:
        assert builder.add(*record, size_max=1 << 20)
    aggregate = open_aggregate(builder.finish())
    assert aggregate.sub_records() == [(key, hash_key, data) for key, data, hash_key, _ in records]
    assert aggregate.first_tags == tuple(records[0][3])


@given(records=RECORDS)
def test_the_size_is_exact_before_and_after_each_record(records):
    builder = AggregateBuilder()
    assert builder.size == AGGREGATE_OVERHEAD_BYTES
    twin = AggregateBuilder()
    for record in records:
        assert twin.add(*record, size_max=1 << 62)
        foretold = twin.size
        assert not builder.add(*record, size_max=foretold - 1)
        assert builder.add(*record, size_max=foretold)
        assert builder.size == foretold == len(builder.finish())


@given(records=RECORDS, size_max=st.integers(0, 2000))
def test_an_aggregate_holds_all_that_fit_in_order_and_is_never_too_large(records, size_max):
    builder = AggregateBuilder()
    taken = [record for record in records if builder.add(*record, size_max=size_max)]
    assert builder.count == len(taken)
    assert builder.size <= max(size_max, AGGREGATE_OVERHEAD_BYTES)
    if taken:
        aggregate = open_aggregate(builder.finish())
        assert aggregate.sub_records() == [(key, hash_key, data) for key, data, hash_key, _ in taken]


@given(records=RECORDS, data=st.data())
def test_any_part_of_an_aggregate_can_be_asked_for(records, data):
    builder = AggregateBuilder()
    for record in records:
        builder.add(*record, size_max=1 << 20)
    aggregate = open_aggregate(builder.finish())
    first = data.draw(st.integers(0, len(records)))
    last = data.draw(st.integers(first, len(records)))
    assert aggregate.sub_records(first, last) == aggregate.sub_records()[first:last]
