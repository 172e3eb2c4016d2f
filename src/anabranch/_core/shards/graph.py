"""The graph of shards: which shard descends from which, which hash keys each holds, and what of them was read.

Shards are known from listings, from the ChildShards at the end of a read, and from lease rows. What these sources say
is merged, and nothing is ever removed (rule S5): a shard that is missing from a listing stays known. A parent may be
known only by its id. A shard that was created by a merge has two parents.

A shard's hash key range never changes. Contradicting ranges prove that the stream was created again, which is an error.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import LeaseRow
from anabranch._model.streams import Shard
from anabranch._wire.messages import ChildShard
from anabranch.errors import StreamRecreatedError
from anabranch.limits import HASH_KEY_MAX

ALL_HASH_KEYS: Final = HashKeyRange(0, HASH_KEY_MAX)


def overlaps(one: HashKeyRange, other: HashKeyRange) -> bool:
    return one.start <= other.end and other.start <= one.end


def gaps(ranges: Iterable[HashKeyRange], within: HashKeyRange = ALL_HASH_KEYS) -> tuple[HashKeyRange, ...]:
    """The parts of `within` that no range covers, in order."""
    found = []
    next_key = within.start
    for start, end in sorted(ranges):
        if start > within.end:
            break
        if start > next_key:
            found.append(HashKeyRange(next_key, start - 1))
        next_key = max(next_key, end + 1)
    if next_key <= within.end:
        found.append(HashKeyRange(next_key, within.end))
    return tuple(found)


def has_overlap(ranges: Iterable[HashKeyRange]) -> bool:
    ordered = sorted(ranges)
    return any(after.start <= before.end for before, after in pairwise(ordered))


Ids = dict[str, None]
"""An ordered set of ids: iteration must not differ between processes."""


@dataclass(eq=False, repr=False)
class ShardGraph:
    """An immutable graph; `extended` returns a larger one."""

    listed: Mapping[str, Shard] = field(default_factory=dict)
    """Shards that were in a listing, by id."""
    _ranges: Mapping[str, HashKeyRange] = field(default_factory=dict)
    _parents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._children: dict[str, Ids] = {}
        for shard_id, parent_ids in self._parents.items():
            for parent in parent_ids:
                self._children.setdefault(parent, {})[shard_id] = None

    def extended(
        self,
        *,
        shards: Iterable[Shard] = (),
        child_shards: Iterable[ChildShard] = (),
        rows: Iterable[LeaseRow] = (),
    ) -> "ShardGraph":
        listed = dict(self.listed)
        ranges = dict(self._ranges)
        parents = {shard_id: dict.fromkeys(parent_ids) for shard_id, parent_ids in self._parents.items()}

        def learn(shard_id: str, parent_ids: Iterable[str], hash_key_range: HashKeyRange | None) -> None:
            parents.setdefault(shard_id, {}).update(dict.fromkeys(parent_ids))
            if hash_key_range is None:
                return
            known_range = ranges.setdefault(shard_id, hash_key_range)
            if known_range != hash_key_range:
                raise StreamRecreatedError(
                    f"{shard_id} held the hash keys {known_range.start} to {known_range.end} and now holds "
                    f"{hash_key_range.start} to {hash_key_range.end}: the stream was deleted and created again"
                )

        for shard in shards:
            known = listed.get(shard.shard_id)
            if known is None or known.is_open:  # an older page must not reopen a closed shard
                listed[shard.shard_id] = shard
            learn(shard.shard_id, shard.parent_shard_ids, shard.hash_key_range)
        for child in child_shards:
            learn(child.shard_id, child.parent_shard_ids, child.hash_key_range)
        for row in rows:
            learn(row.key.shard_id, row.waits_for, row.hash_key_range)
            if row.finish is not None:
                for child_id in row.finish.children:
                    learn(child_id, (row.key.shard_id,), None)
        return ShardGraph(listed, ranges, {shard_id: tuple(parent_ids) for shard_id, parent_ids in parents.items()})

    def hash_key_range(self, shard_id: str) -> HashKeyRange | None:
        return self._ranges.get(shard_id)

    def parents(self, shard_id: str) -> tuple[str, ...]:
        return self._parents.get(shard_id, ())

    def children(self, shard_id: str) -> tuple[str, ...]:
        return tuple(self._children.get(shard_id, ()))

    def ancestors(self, shard_ids: Iterable[str]) -> Ids:
        """All ancestors. Includes a given shard only if it is an ancestor of another."""
        return _reachable(shard_ids, self.parents)

    def descendants(self, shard_ids: Iterable[str]) -> Ids:
        return _reachable(shard_ids, self.children)


def _reachable(shard_ids: Iterable[str], neighbours: Callable[[str], tuple[str, ...]]) -> Ids:
    found: Ids = {}
    to_visit = [neighbour for shard_id in shard_ids for neighbour in neighbours(shard_id)]
    while to_visit:
        shard_id = to_visit.pop()
        if shard_id not in found:
            found[shard_id] = None
            to_visit.extend(neighbours(shard_id))
    return found


def was_taken(row: LeaseRow) -> bool:
    """Whether the lease was ever owned. If so, all its parents are finished, even if their rows are gone."""
    return row.epoch > 0 or row.is_finished or row.checkpoint.watermark is not None


def deleted_shards(rows: Sequence[LeaseRow]) -> Ids:
    """Shards that must have a row but have none: somebody deleted it (rule L18). Workers keep the row of a parent until
    its child was taken. They keep the row of a child for as long as its finished parent has a row (rule S6).
    """
    with_rows = {row.key.shard_id: None for row in rows}
    expected: list[str] = []
    for row in rows:
        if not was_taken(row):
            expected += row.waits_for
        if row.finish is not None:
            expected += row.finish.children
    return {shard_id: None for shard_id in expected if shard_id not in with_rows}


def ancestors_by_keys(graph: ShardGraph, shard_id: str, rows: Iterable[LeaseRow]) -> tuple[LeaseRow, ...]:
    """Leases of shards that held some of this shard's hash keys before it.

    Two shards hold the same keys only if one descends from the other. So the keys show the lineage even if the shards
    between them were trimmed or never listed. If the graph does not say which came first, the ids do: the service
    numbers shards in order of creation.
    """
    own = graph.hash_key_range(shard_id)
    if own is None:
        return ()
    older, not_older = graph.ancestors([shard_id]), graph.descendants([shard_id]) | {shard_id: None}
    return tuple(
        row
        for row in rows
        if row.hash_key_range is not None
        and overlaps(row.hash_key_range, own)
        and row.key.shard_id not in not_older
        and (row.key.shard_id in older or row.key.shard_id < shard_id)
    )


class RowsByKeys:
    """Finds the rows that share hash keys with a shard without scanning all rows: a stream may have thousands."""

    def __init__(self, rows: Iterable[LeaseRow]) -> None:
        self._rows = sorted(
            (row.hash_key_range, number, row) for number, row in enumerate(rows) if row.hash_key_range is not None
        )
        self._starts = [keys.start for keys, _, _ in self._rows]
        self._highest_ends = list(accumulate((keys.end for keys, _, _ in self._rows), max))
        """For each row, the highest hash key of it and of all rows before it."""

    def overlapping(self, keys: HashKeyRange | None) -> list[LeaseRow]:
        """The rows that share hash keys with this range, in their original order; none if the range is unknown."""
        if keys is None:
            return []
        found = []
        for index in range(bisect_right(self._starts, keys.end) - 1, -1, -1):
            if self._highest_ends[index] < keys.start:
                break  # this row and all rows before it end too early
            if overlaps(self._rows[index][0], keys):
                found.append(self._rows[index])
        return [row for _, _, row in sorted(found, key=lambda entry: entry[1])]


def descendants_of_unfinished(graph: ShardGraph, shard_ids: Iterable[str], rows: Sequence[LeaseRow]) -> Ids:
    """Which of the shards descend from an unfinished lease, by parent ids or by hash keys. The end of that lease will
    create theirs.
    """
    asked = dict.fromkeys(shard_ids)
    unfinished = [row for row in rows if not row.is_finished]
    by_ids = graph.descendants([row.key.shard_id for row in unfinished])
    rows_by_keys = RowsByKeys(unfinished)
    by_keys = [
        shard_id
        for shard_id in asked
        if shard_id not in by_ids
        and ancestors_by_keys(graph, shard_id, rows_by_keys.overlapping(graph.hash_key_range(shard_id)))
    ]
    found = by_ids | dict.fromkeys(by_keys) | graph.descendants(by_keys)
    return {shard_id: None for shard_id in asked if shard_id in found}


def creation_order(shard: Shard) -> tuple[int, str]:
    """Older shards first, as in KCL: an interrupted bootstrap has created parents before their children."""
    return (shard.starting_sequence_number, shard.shard_id)


_UNKNOWN_TIME: Final = float("-inf")


def unread_since(
    graph: ShardGraph, shard_id: str, rows: Iterable[LeaseRow], with_rows: Collection[str]
) -> float | None:
    """The `seen_through_seconds` of a new row (rule T4): the time up to which its hash keys were read before, in the
    shard's ancestors. A loss between this time and the shard's first read is reported for this shard. None if unknown.
    `rows` are all rows of the stream and generation. `with_rows` are the shards that have a row before this one does.

    - A parent with a row reports its own losses, and covers its hash keys up to the start of the child.
    - A parent without a row was opened, closed and trimmed unseen, so this shard reports its losses. For each hash key
      the row with the latest time counts; the result is the earliest of these times.
    - Hash keys that are in no row were never read: no loss is reported for them.
    - Rows of later shards do not count, even if they were read before a shard that was found late.
    """
    own = graph.hash_key_range(shard_id)
    earlier_rows = sorted(ancestors_by_keys(graph, shard_id, rows), key=_seen_through, reverse=True)
    if own is None or not earlier_rows:
        return None
    parents = (parent for parent in _listed_parents(graph, shard_id) if parent in with_rows)
    covered = [keys for parent in parents if (keys := graph.hash_key_range(parent)) is not None]
    since = _seen_through(earlier_rows[0])
    uncovered = gaps(covered, own)
    for row in earlier_rows:  # latest time first, so the last row that covers new hash keys has the earliest time
        assert row.hash_key_range is not None, "ancestors_by_keys returns only rows with a range"
        covered.append(row.hash_key_range)
        if (still_uncovered := gaps(covered, own)) != uncovered:
            since, uncovered = _seen_through(row), still_uncovered
    return since if since > _UNKNOWN_TIME else None


def opened_after_horizon(
    graph: ShardGraph, shard_id: str, open_at_horizon: Iterable[str], with_rows: Collection[str]
) -> bool:
    """Whether ancestors with all its hash keys were still open at the trim horizon. If so, none of its records was
    trimmed. Only ancestors with a row count, because they report their own losses.
    """
    own = graph.hash_key_range(shard_id)
    ancestors = graph.ancestors([shard_id])
    before = [
        keys
        for other in open_at_horizon
        if other in ancestors and other in with_rows and (keys := graph.hash_key_range(other)) is not None
    ]
    return own is not None and not gaps(before, own)


def _seen_through(row: LeaseRow) -> float:
    seen_through_seconds = row.checkpoint.seen_through_seconds
    return _UNKNOWN_TIME if seen_through_seconds is None else seen_through_seconds


def _listed_parents(graph: ShardGraph, shard_id: str) -> tuple[str, ...]:
    """The parents that the service lists, or those in the graph if the shard is in no listing. In the graph, all shards
    that a row waits for count as parents.
    """
    listed = graph.listed.get(shard_id)
    return graph.parents(shard_id) if listed is None else listed.parent_shard_ids
