"""Law: however the hash space is cut, its ranges cover every hash key exactly once."""

import itertools

from hypothesis import given, strategies as st

from anabranch._model.hash_keys import HashKeyRange, even_ranges, md5_hash_key, parse_hash_key

LAST = 2**128 - 1
HASH_KEYS = st.integers(0, LAST) | st.sampled_from([0, 1, LAST - 1, LAST])


@given(count=st.integers(1, 2000))
def test_even_ranges_leave_no_gap_and_do_not_overlap(count):
    ranges = even_ranges(count)
    assert len(ranges) == count
    assert ranges[0].start == 0
    assert ranges[-1].end == LAST
    assert all(left.end + 1 == right.start for left, right in itertools.pairwise(ranges))
    assert all(left.is_adjacent_to(right) for left, right in itertools.pairwise(ranges))
    assert sum(range_.size for range_ in ranges) == 2**128


@given(count=st.integers(1, 2000))
def test_even_ranges_differ_by_less_than_their_number(count):
    sizes = [range_.size for range_ in even_ranges(count)]
    assert max(sizes) - min(sizes) < count


@given(count=st.integers(1, 300), key=HASH_KEYS)
def test_every_hash_key_lies_in_exactly_one_range(count, key):
    assert sum(key in range_ for range_ in even_ranges(count)) == 1


@given(partition_key=st.text(st.characters(exclude_categories=["Cs"]), max_size=256), count=st.integers(1, 50))
def test_every_partition_key_has_exactly_one_range(partition_key, count):
    key = md5_hash_key(partition_key)
    assert sum(key in range_ for range_ in even_ranges(count)) == 1
    assert parse_hash_key(str(key)) == key


@given(ends=st.tuples(HASH_KEYS, HASH_KEYS).map(sorted), keys=st.lists(HASH_KEYS))
def test_a_range_contains_what_lies_between_its_ends(ends, keys):
    range_ = HashKeyRange(*ends)
    assert range_.start in range_
    assert range_.end in range_
    assert [key in range_ for key in keys] == [ends[0] <= key <= ends[1] for key in keys]
