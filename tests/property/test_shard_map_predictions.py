"""The map's law: for every listing that covers the hash space, each hash key is predicted for the one that holds it;
for any listing at all, what is predicted holds the key.
"""

import itertools
import random

from hypothesis import given, strategies as st

from anabranch._core.writing.shard_map import ShardMap, digest_of_hash_key
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Shard

HIGHEST = (1 << 128) - 1
hash_keys = st.integers(0, HIGHEST)


def shards_at(cuts):
    starts = [0, *sorted(cuts)]
    ends = [start - 1 for start in starts[1:]] + [HIGHEST]
    return [
        Shard(shard_id=f"shardId-{i:012}", hash_key_range=HashKeyRange(*pair), starting_sequence_number=i)
        for i, pair in enumerate(zip(starts, ends, strict=True))
    ]


def ready_map(shards):
    shard_map = ShardMap(entropy=random.Random(1))
    shard_map.begin(0)
    shard_map.install(shards, 0)
    return shard_map


@given(st.sets(st.integers(1, HIGHEST), max_size=40), hash_keys, st.randoms(use_true_random=False))
def test_a_whole_listing_in_any_order_predicts_the_holder(cuts, hash_key, rng):
    shards = shards_at(cuts)
    holder = next(shard for shard in shards if hash_key in shard.hash_key_range)
    rng.shuffle(shards)
    shard_map = ready_map(shards)
    assert shard_map.state == "ready"
    assert shard_map.predict(digest_of_hash_key(hash_key)).shard_id == holder.shard_id


@given(st.lists(st.tuples(hash_keys, hash_keys), max_size=12), hash_keys)
def test_any_listing_predicts_only_holders_and_keeps_no_overlap(ranges, hash_key):
    shards = [
        Shard(shard_id=f"shardId-{i:012}", hash_key_range=HashKeyRange(*sorted(pair)), starting_sequence_number=i)
        for i, pair in enumerate(ranges)
    ]
    shard_map = ready_map(shards)
    predicted = shard_map.predict(digest_of_hash_key(hash_key))
    assert predicted is None or predicted.holds(digest_of_hash_key(hash_key))
    kept = shard_map.shards
    assert all(left.end < right.start for left, right in itertools.pairwise(kept))


@given(st.sets(st.integers(1, HIGHEST), min_size=1, max_size=10), hash_keys, hash_keys)
def test_what_is_disproved_is_not_predicted_and_nothing_else_is_lost(cuts, disproved, other):
    shard_map = ready_map(shards_at(cuts))
    digest, another = digest_of_hash_key(disproved), digest_of_hash_key(other)
    wrong, right = shard_map.predict(digest), shard_map.predict(another)
    shard_map.learn(wrong, digest, "shardId-000000009999", 1)
    assert shard_map.predict(digest) is None
    assert shard_map.predict(another) == (None if right == wrong else right)
