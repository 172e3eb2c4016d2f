"""Hash keys: the MD5 of a partition key, explicit ones, and ranges of them."""

import pytest

from anabranch._model.hash_keys import (
    HashKeyRange,
    check_partition_key,
    even_ranges,
    md5_hash_key,
    parse_hash_key,
)

KNOWN = {
    "abcd": 0xE2FC714C4727EE9395F324CD2E7F331F,
    "a": 16955237001963240173058271559858726497,
    "user-123": 250018372642977770877286195909578633128,
    "ключ": 0xC3657B66C60A307292AAE11F07B04AE7,
}


@pytest.mark.parametrize("partition_key, expected", KNOWN.items())
def test_the_hash_key_is_the_md5_of_the_partition_key_in_utf_8(partition_key, expected):
    assert md5_hash_key(partition_key) == expected


@pytest.mark.parametrize("text, expected", [("0", 0), ("1", 1), (str(2**128 - 1), 2**128 - 1)])
def test_a_hash_key_is_a_decimal_of_128_bits(text, expected):
    assert parse_hash_key(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "00", "007", "-1", "+1", " 1", "1 ", "1\n", "1_0", "1.0", "0x1", "\u0661", str(2**128), "9" * 39, "1" * 5000],
)
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"a hash key is a decimal integer from 0 to 2\*\*128 - 1"):
        parse_hash_key(text)


@pytest.mark.parametrize("partition_key", ["a", "x" * 256, "é" * 256, "😀" * 256])
def test_a_partition_key_has_up_to_256_characters_whatever_their_bytes(partition_key):
    assert check_partition_key(partition_key) is partition_key


@pytest.mark.parametrize("partition_key, length", [("", 0), ("x" * 257, 257)])
def test_a_partition_key_of_another_length_is_refused(partition_key, length):
    with pytest.raises(ValueError, match=f"1 to 256 characters, not {length}"):
        check_partition_key(partition_key)


def test_a_partition_key_must_be_text_that_utf_8_can_encode():
    with pytest.raises(ValueError, match="must be encodable as UTF-8"):
        check_partition_key("\ud800")


def test_a_range_includes_both_its_ends():
    range_ = HashKeyRange(10, 20)
    assert [key in range_ for key in (9, 10, 20, 21)] == [False, True, True, False]
    assert "10" not in range_
    assert range_.size == 11


def test_ranges_that_touch_are_adjacent_in_either_order():
    low, middle, high = HashKeyRange(0, 9), HashKeyRange(10, 19), HashKeyRange(20, 29)
    assert low.is_adjacent_to(middle)
    assert middle.is_adjacent_to(low)
    assert not low.is_adjacent_to(high)
    assert not low.is_adjacent_to(low)


def test_the_hash_space_is_cut_as_the_service_cuts_it():
    assert even_ranges(1) == [(0, 2**128 - 1)]
    assert even_ranges(3) == [
        (0, 113427455640312821154458202477256070484),
        (113427455640312821154458202477256070485, 226854911280625642308916404954512140969),
        (226854911280625642308916404954512140970, 340282366920938463463374607431768211455),
    ]
