"""How shards become others: split, merge, and scaling to a count.

Every step closes one or two shards and opens what covers the same range, so the open ranges always cover the hash
space exactly once. Scaling cuts the space evenly as CreateStream does: every shard that a new border runs through
is split there, then everything within two neighbouring borders is merged. As on AWS this leaves short-lived shards
in between, with all parents named. Borders that differ from existing ones by rounding alone are the existing ones;
shards that already fit are left in peace.
"""

from bisect import bisect_left
from typing import Final

from anabranch._model.hash_keys import HashKeyRange, even_ranges
from anabranch.limits import HASH_KEY_MAX
from anabranch.local.state.shard import Shard, shard_id_of
from anabranch.local.state.stream import Stream

__all__ = ["merge", "scale", "split"]

# floor(2**128 / n) * i for different n differ by thousands at most; shards of an even cut are wider than 2**100.
_ROUNDING: Final = 1 << 32


def split(stream: Stream, shard: Shard, new_starting_hash_key: int, now_ms: int) -> tuple[Shard, Shard]:
    start, end = shard.hash_key_range
    ranges = HashKeyRange(start, new_starting_hash_key - 1), HashKeyRange(new_starting_hash_key, end)
    low, high = _replace(stream, (shard,), ranges, now_ms)
    return low, high


def merge(stream: Stream, shard: Shard, adjacent: Shard, now_ms: int) -> Shard:
    start = min(shard.hash_key_range.start, adjacent.hash_key_range.start)
    end = max(shard.hash_key_range.end, adjacent.hash_key_range.end)
    (merged,) = _replace(stream, (shard, adjacent), (HashKeyRange(start, end),), now_ms)
    return merged


def scale(stream: Stream, target_shard_count: int, now_ms: int) -> None:
    borders = _snapped_borders(stream, target_shard_count)
    for shard in list(stream.routing.open_shards):
        inside = [border for border in borders if shard.hash_key_range.start < border <= shard.hash_key_range.end]
        _split_at_all(stream, shard, inside, now_ms)
    for start, following in zip(borders, [*borders[1:], HASH_KEY_MAX + 1], strict=True):
        _merge_all(stream, stream.routing.neighbours(start, following - 1), now_ms)


def _replace(stream: Stream, parents: tuple[Shard, ...], ranges: tuple[HashKeyRange, ...], now_ms: int) -> list[Shard]:
    first = stream.next_shard_index
    stream.next_shard_index += len(ranges)
    child_ids = tuple(shard_id_of(first + offset) for offset in range(len(ranges)))
    opened_ms = max(parent.close(now_ms, child_ids) for parent in parents)
    for parent in parents:
        parent.closed_ms = opened_ms  # both parents of a merge end at once
    created_s = max(opened_ms // 1000, *(parent.created_s for parent in parents)) + 1
    parent_ids = tuple(parent.shard_id for parent in parents)
    children = [
        Shard(first + offset, hash_key_range, opened_ms, created_s, parent_ids)
        for offset, hash_key_range in enumerate(ranges)
    ]
    stream.shards.update((child.shard_id, child) for child in children)
    stream.reroute()
    return children


def _snapped_borders(stream: Stream, count: int) -> list[int]:
    present = [shard.hash_key_range.start for shard in stream.routing.open_shards]
    borders = []
    for wanted, _ in even_ranges(count):
        at = bisect_left(present, wanted)
        near = [border for border in present[max(0, at - 1) : at + 1] if abs(border - wanted) <= _ROUNDING]
        borders.append(near[0] if near else wanted)
    return borders


def _split_at_all(stream: Stream, shard: Shard, borders: list[int], now_ms: int) -> None:
    if borders:
        middle = len(borders) // 2
        low, high = split(stream, shard, borders[middle], now_ms)
        _split_at_all(stream, low, borders[:middle], now_ms)
        _split_at_all(stream, high, borders[middle + 1 :], now_ms)


def _merge_all(stream: Stream, shards: list[Shard], now_ms: int) -> Shard:
    if len(shards) == 1:
        return shards[0]
    middle = len(shards) // 2
    low = _merge_all(stream, shards[:middle], now_ms)
    return merge(stream, low, _merge_all(stream, shards[middle:], now_ms), now_ms)
