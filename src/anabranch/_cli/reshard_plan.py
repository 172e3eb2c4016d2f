"""What a change of a stream's shards takes, decided before anything is called. Pure.

AWS scales a stream at most to double or down to half its open shards in one call, so a longer way is several calls;
splits and merges concern open shards only, and merges neighbours only. What cannot be is refused with what could.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.shards import Shard
from anabranch.errors import ConfigurationError
from anabranch.limits import UPDATE_SHARD_COUNT_PER_DAY

__all__ = ["Merge", "Scale", "Split", "Step", "plan_merge", "plan_scale", "plan_split"]

_OPEN_SHOWN_MAX: Final = 6


class Scale(msgspec.Struct, frozen=True, tag="UpdateShardCount", tag_field="operation"):
    before: int
    after: int

    def __str__(self) -> str:
        return f"UpdateShardCount {self.before} -> {self.after}"


class Split(msgspec.Struct, frozen=True, tag="SplitShard", tag_field="operation"):
    shard: Shard
    new_starting_hash_key: int

    def __str__(self) -> str:
        return f"SplitShard {self.shard.shard_id} at hash key {self.new_starting_hash_key}"

    @property
    def results(self) -> tuple[HashKeyRange, HashKeyRange]:
        start, end = self.shard.hash_key_range
        return HashKeyRange(start, self.new_starting_hash_key - 1), HashKeyRange(self.new_starting_hash_key, end)


class Merge(msgspec.Struct, frozen=True, tag="MergeShards", tag_field="operation"):
    lower: Shard
    upper: Shard

    def __str__(self) -> str:
        return f"MergeShards {self.lower.shard_id} and {self.upper.shard_id}"

    @property
    def result(self) -> HashKeyRange:
        return HashKeyRange(self.lower.hash_key_range.start, self.upper.hash_key_range.end)


Step = Scale | Split | Merge


def plan_scale(present: int, target: int) -> list[Scale]:
    """The fewest calls that lead there; none if it is there."""
    steps: list[Scale] = []
    start = present
    while present != target:
        following = min(target, present * 2) if target > present else max(target, -(-present // 2))
        steps.append(Scale(present, following))
        present = following
    if len(steps) > UPDATE_SHARD_COUNT_PER_DAY:
        raise ConfigurationError(
            f"from {start} to {target} shards takes {len(steps)} calls, and AWS allows {UPDATE_SHARD_COUNT_PER_DAY} "
            f"in 24 hours: go to {steps[UPDATE_SHARD_COUNT_PER_DAY - 1].after} first"
        )
    return steps


def plan_split(shards: Sequence[Shard], shard_id: str, new_starting_hash_key: int | None) -> Split:
    """In the middle, unless told. AWS leaves two hash keys at least to the lower child, and to the upper one."""
    shard = _find_open(shards, shard_id)
    start, end = shard.hash_key_range
    middle = start + shard.hash_key_range.size // 2
    key = middle if new_starting_hash_key is None else new_starting_hash_key
    if not start + 1 < key < end:
        raise ConfigurationError(
            f"{shard_id} cannot be split at {key}: give a hash key above {start + 1} and below {end}"
            if end - start > 2
            else f"{shard_id} holds {shard.hash_key_range.size} hash keys, too few to be split"
        )
    return Split(shard, key)


def plan_merge(shards: Sequence[Shard], first_id: str, second_id: str) -> Merge:
    """The two in any order."""
    if first_id == second_id:
        raise ConfigurationError(f"a merge takes two shards, not {first_id} twice")
    pair = [_find_open(shards, shard_id) for shard_id in (first_id, second_id)]
    lower, upper = sorted(pair, key=lambda shard: shard.hash_key_range)
    if not lower.hash_key_range.is_adjacent_to(upper.hash_key_range):
        asked = pair[0]
        neighbours = [
            shard.shard_id
            for shard in _open_in_order(shards)
            if shard is not asked and shard.hash_key_range.is_adjacent_to(asked.hash_key_range)
        ]
        raise ConfigurationError(
            f"{first_id} and {second_id} are no neighbours: "
            + (f"{first_id} can be merged with {' or '.join(neighbours)}" if neighbours else f"{first_id} has none")
        )
    return Merge(lower, upper)


def _find_open(shards: Sequence[Shard], shard_id: str) -> Shard:
    found = next((shard for shard in shards if shard.shard_id == shard_id), None)
    if found is not None and found.is_open:
        return found
    what = f"there is no {shard_id}" if found is None else f"{shard_id} is closed: it was split or merged before"
    names = [shard.shard_id for shard in _open_in_order(shards)]
    more = f" and {len(names) - _OPEN_SHOWN_MAX} more" if len(names) > _OPEN_SHOWN_MAX else ""
    raise ConfigurationError(f"{what}; open are: {', '.join(names[:_OPEN_SHOWN_MAX])}{more}")


def _open_in_order(shards: Sequence[Shard]) -> list[Shard]:
    return sorted((shard for shard in shards if shard.is_open), key=lambda shard: shard.hash_key_range)
