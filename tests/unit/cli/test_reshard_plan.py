"""Plans to scale: each step is allowed, and they end where they should."""

import pytest
from hypothesis import given, strategies as st

from anabranch._cli.reshard_plan import plan_scale, plan_split
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.shards import Shard
from anabranch.errors import ConfigurationError


@given(st.integers(1, 500), st.integers(1, 500))
def test_every_step_at_most_doubles_or_halves_and_the_last_one_arrives(present, target):
    steps = plan_scale(present, target)
    assert [step.before for step in steps] == [present, *(step.after for step in steps)][: len(steps)]
    assert all(step.before <= 2 * step.after and step.after <= 2 * step.before for step in steps)
    assert (steps[-1].after if steps else present) == target


def test_no_step_more_than_needed():
    assert [step.after for step in plan_scale(3, 20)] == [6, 12, 20]
    assert [step.after for step in plan_scale(16, 3)] == [8, 4, 3]


def test_more_calls_than_a_day_allows_are_refused():
    with pytest.raises(ConfigurationError, match="go to 1024 first"):
        plan_scale(1, 10_000)


def test_a_shard_of_one_hash_key_cannot_be_split():
    shard = Shard(shard_id="shardId-000000000000", hash_key_range=HashKeyRange(5, 5), starting_sequence_number=1)
    with pytest.raises(ConfigurationError, match="holds one hash key only"):
        plan_split([shard], shard.shard_id, None)
