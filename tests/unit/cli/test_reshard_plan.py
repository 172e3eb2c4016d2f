"""Plans to scale: each step is allowed, and they end where they should."""

import pytest
from hypothesis import given, strategies as st

from anabranch._cli.shards import plan_scale, plan_split
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Shard
from anabranch.errors import ConfigurationError


@given(st.integers(1, 500), st.integers(1, 500))
def test_every_step_at_most_doubles_or_halves_and_the_last_one_arrives(present, target):
    steps = plan_scale(present, target)
    assert [step.count_before for step in steps] == [present, *(step.count_after for step in steps)][: len(steps)]
    assert all(
        step.count_before <= 2 * step.count_after and step.count_after <= 2 * step.count_before for step in steps
    )
    assert (steps[-1].count_after if steps else present) == target


def test_no_step_more_than_needed():
    assert [step.count_after for step in plan_scale(3, 20)] == [6, 12, 20]
    assert [step.count_after for step in plan_scale(16, 3)] == [8, 4, 3]


def test_more_calls_than_a_day_allows_are_refused():
    with pytest.raises(ConfigurationError, match="scale to 1024 first"):
        plan_scale(1, 10_000)


def shard_of(start, end):
    hash_key_range = HashKeyRange(start, end)
    return Shard(shard_id="shardId-000000000000", hash_key_range=hash_key_range, starting_sequence_number=1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_shard_of_a_few_hash_keys_cannot_be_split(size):
    shard = shard_of(5, 4 + size)
    with pytest.raises(ConfigurationError, match=f"holds {size} hash keys, too few"):
        plan_split([shard], shard.shard_id, None)


@pytest.mark.parametrize("key, is_allowed", [(10, False), (11, False), (12, True), (19, True), (20, False)])
def test_a_shard_is_split_where_the_service_allows_it(key, is_allowed):
    shard = shard_of(10, 20)
    if is_allowed:
        assert plan_split([shard], shard.shard_id, key).text.endswith(f"at hash key {key}")
    else:
        with pytest.raises(ConfigurationError, match="above 11 and below 20"):
            plan_split([shard], shard.shard_id, key)


def test_four_hash_keys_are_enough_for_two_shards():
    shard = shard_of(5, 8)
    assert [keys.size for _, keys in plan_split([shard], shard.shard_id, None).ranges] == [4, 2, 2]
