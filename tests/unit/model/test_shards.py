"""A shard, its parents, and the number in its id."""

import pytest

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Shard, shard_index


def make_shard(**changes):
    defaults = {
        "shard_id": "shardId-000000000002",
        "hash_key_range": HashKeyRange(0, 9),
        "starting_sequence_number": 1,
    }
    return Shard(**(defaults | changes))


def test_a_shard_is_open_until_it_has_an_end():
    assert make_shard().is_open
    assert not make_shard(ending_sequence_number=0).is_open


@pytest.mark.parametrize(
    "parents, expected",
    [
        ({}, ()),
        ({"parent_shard_id": "p"}, ("p",)),
        ({"parent_shard_id": "p", "adjacent_parent_shard_id": "q"}, ("p", "q")),
        ({"adjacent_parent_shard_id": "q"}, ("q",)),
    ],
    ids=["root", "split", "merge", "merge whose first parent is not named"],
)
def test_a_shard_names_its_parents(parents, expected):
    assert make_shard(**parents).parent_shard_ids == expected


def test_shards_are_values():
    assert make_shard() == make_shard()
    assert hash(make_shard()) == hash(make_shard())
    with pytest.raises(AttributeError):
        make_shard().ending_sequence_number = 1


@pytest.mark.parametrize("shard_id, expected", [("shardId-000000000042", 42), ("shardId-1234567890123", 1234567890123)])
def test_the_number_of_a_shard_is_found_in_its_id(shard_id, expected):
    assert shard_index(shard_id) == expected


@pytest.mark.parametrize("shard_id", ["", "42", "-42", "shardId-", "shardId-x", "shardId-\u0661", "shardId-0000 1"])
def test_an_id_without_a_number_is_refused_by_name(shard_id):
    with pytest.raises(ValueError, match="a shard id looks like shardId-000000000042"):
        shard_index(shard_id)
