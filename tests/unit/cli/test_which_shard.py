"""The open shard of a hash key."""

from anabranch._cli.shards import open_in_order, shard_of
from anabranch._model.hash_keys import HASH_KEY_MAX, HashKeyRange
from anabranch._model.streams import Shard

HALF = HASH_KEY_MAX // 2
PARENT = Shard(
    shard_id="parent",
    hash_key_range=HashKeyRange(0, HASH_KEY_MAX),
    starting_sequence_number=1,
    ending_sequence_number=2,
)
LOWER, UPPER = (
    Shard(shard_id=name, hash_key_range=keys, starting_sequence_number=3, parent_shard_id="parent")
    for name, keys in (("lower", HashKeyRange(0, HALF)), ("upper", HashKeyRange(HALF + 1, HASH_KEY_MAX)))
)


def test_a_closed_shard_is_not_named_even_if_the_service_lists_it():
    open_shards = open_in_order([PARENT, UPPER, LOWER])
    assert [shard_of(open_shards, key) for key in (0, HALF, HALF + 1, HASH_KEY_MAX)] == [LOWER, LOWER, UPPER, UPPER]


def test_without_an_open_shard_there_is_none():
    assert shard_of(open_in_order([PARENT]), 1) is None
