"""From which time on a shard that nobody has read is still to be read (rule T4).

It has nothing that came before the shards before it were read. What came later is its own, or was in a shard between
them that nobody ever saw, because it was opened, closed and trimmed out of sight. Such a shard has no row, so nobody
else would tell that its records are lost: then the first shard after it does.

Rules that hold here:
- A parent that has a row speaks for itself, and covers its hash keys up to the child's beginning.
- Where a parent has none, the latest row with its hash keys counts, key by key, and of those the earliest.
- Keys that no row has were never read before: what was lost of them nobody promised.
- Rows of shards that came later say nothing, although they may have been read before one that was found late.
"""

from collections.abc import Collection, Iterable
from typing import Final

from anabranch._core.shards.coverage import gaps
from anabranch._core.shards.graph import ShardGraph, ancestors_by_keys
from anabranch._model.leases import LeaseRow

__all__ = ["unread_since"]

_UNKNOWN: Final = float("-inf")


def unread_since(
    graph: ShardGraph, shard_id: str, rows: Iterable[LeaseRow], with_rows: Collection[str]
) -> float | None:
    """By the service's clock; None where nobody knows. `rows` are all of its stream and generation, `with_rows` the
    shards that have one, or will have before it does.
    """
    own = graph.hash_key_range(shard_id)
    before = sorted(ancestors_by_keys(graph, shard_id, rows), key=_time, reverse=True)
    if own is None or not before:
        return None
    parents = (parent for parent in _parents(graph, shard_id) if parent in with_rows)
    covered = [known for parent in parents if (known := graph.hash_key_range(parent)) is not None]
    since = _time(before[0])
    left = gaps(covered, own)
    for row in before:
        assert row.hash_key_range is not None, "it was found by its hash keys"
        covered.append(row.hash_key_range)
        if (rest := gaps(covered, own)) != left:
            since, left = _time(row), rest
    return since if since > _UNKNOWN else None


def _time(row: LeaseRow) -> float:
    seen_through_seconds = row.checkpoint.seen_through_seconds
    return _UNKNOWN if seen_through_seconds is None else seen_through_seconds


def _parents(graph: ShardGraph, shard_id: str) -> tuple[str, ...]:
    """As the service lists them, if it was asked: to the graph all are parents that a row was made to wait for."""
    listed = graph.listed.get(shard_id)
    return graph.parents(shard_id) if listed is None else listed.parent_shard_ids
