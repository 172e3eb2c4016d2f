"""The lineage of shards: who descends from whom, as far as anybody has told.

Three sources know shards: listings, the ChildShards that end a read, and lease rows. They are united and never
subtracted (rule S5): a shard that a listing lacks is still known, and what is known of it is never unlearnt. Parents
are named by id and may be unknown otherwise; a merge has two of them.

A shard's hash key range never changes. If a source contradicts another, the stream is not the one it was, and that is
an error, not a choice.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from anabranch._core.shards.coverage import overlaps
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import LeaseRow
from anabranch._model.shards import Shard
from anabranch._wire.messages import ChildShard
from anabranch.errors import StreamRecreatedError

__all__ = ["ShardGraph", "ancestors_by_keys", "creation_order", "still_to_come", "unfinished_ancestors"]

Ids = dict[str, None]
"""A set of ids that keeps its order, so that one seed replays alike in every process."""


class ShardGraph:
    """What is known now; a plain value that `united` extends into a new one."""

    def __init__(
        self,
        listed: Mapping[str, Shard] | None = None,
        ranges: Mapping[str, HashKeyRange] | None = None,
        parents: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.listed: Mapping[str, Shard] = listed or {}
        """Shards that a listing has shown, by id."""
        self._ranges: Mapping[str, HashKeyRange] = ranges or {}
        self._parents: Mapping[str, tuple[str, ...]] = parents or {}
        self._children: dict[str, Ids] = {}
        for shard_id, above in self._parents.items():
            for parent in above:
                self._children.setdefault(parent, {})[shard_id] = None

    def united(
        self,
        *,
        shards: Iterable[Shard] = (),
        child_shards: Iterable[ChildShard] = (),
        rows: Iterable[LeaseRow] = (),
    ) -> "ShardGraph":
        listed = dict(self.listed)
        ranges = dict(self._ranges)
        parents = {shard_id: dict.fromkeys(above) for shard_id, above in self._parents.items()}

        def learn(shard_id: str, above: Iterable[str], hash_key_range: HashKeyRange | None) -> None:
            parents.setdefault(shard_id, {}).update(dict.fromkeys(above))
            if hash_key_range is None:
                return
            known = ranges.setdefault(shard_id, hash_key_range)
            if known != hash_key_range:
                raise StreamRecreatedError(
                    f"{shard_id} held the hash keys {known.start} to {known.end} and now holds "
                    f"{hash_key_range.start} to {hash_key_range.end}: the stream was deleted and created anew"
                )

        for shard in shards:
            known = listed.get(shard.shard_id)
            if known is None or known.is_open:  # a page from an older instant does not open a closed shard again
                listed[shard.shard_id] = shard
            learn(shard.shard_id, shard.parent_shard_ids, shard.hash_key_range)
        for child in child_shards:
            learn(child.shard_id, child.parent_shard_ids, child.hash_key_range)
        for row in rows:
            learn(row.key.shard_id, row.waits_for, row.hash_key_range)
            if row.finish is not None:
                for child_id in row.finish.children:
                    learn(child_id, (row.key.shard_id,), None)
        return ShardGraph(listed, ranges, {shard_id: tuple(above) for shard_id, above in parents.items()})

    def hash_key_range(self, shard_id: str) -> HashKeyRange | None:
        return self._ranges.get(shard_id)

    def parents(self, shard_id: str) -> tuple[str, ...]:
        return self._parents.get(shard_id, ())

    def children(self, shard_id: str) -> tuple[str, ...]:
        return tuple(self._children.get(shard_id, ()))

    def ancestors(self, shard_ids: Iterable[str]) -> Ids:
        """All from whom these descend, without themselves unless one descends from another."""
        return _closure(shard_ids, self.parents)

    def descendants(self, shard_ids: Iterable[str]) -> Ids:
        return _closure(shard_ids, self.children)


def _closure(shard_ids: Iterable[str], neighbours: Callable[[str], tuple[str, ...]]) -> Ids:
    found: Ids = {}
    waiting = [near for shard_id in shard_ids for near in neighbours(shard_id)]
    while waiting:
        shard_id = waiting.pop()
        if shard_id not in found:
            found[shard_id] = None
            waiting.extend(neighbours(shard_id))
    return found


def unfinished_ancestors(graph: ShardGraph, shard_id: str, rows: Iterable[LeaseRow]) -> tuple[str, ...]:
    unfinished = (row for row in rows if not row.is_finished)
    return tuple(row.key.shard_id for row in ancestors_by_keys(graph, shard_id, unfinished))


def ancestors_by_keys(graph: ShardGraph, shard_id: str, rows: Iterable[LeaseRow]) -> tuple[LeaseRow, ...]:
    """Leases of shards that held some of this shard's hash keys before it.

    Two shards hold the same keys only if one descends from the other. So where generations came and went between two
    listings, or were trimmed, the keys still show the line that nobody names. Which of the two came first, their ids
    tell where the graph does not: the service numbers shards as it creates them.
    """
    own = graph.hash_key_range(shard_id)
    if own is None:
        return ()
    older, younger = graph.ancestors([shard_id]), graph.descendants([shard_id]) | {shard_id: None}
    return tuple(
        row
        for row in rows
        if row.hash_key_range is not None
        and overlaps(row.hash_key_range, own)
        and row.key.shard_id not in younger
        and (row.key.shard_id in older or row.key.shard_id < shard_id)
    )


def still_to_come(graph: ShardGraph, shard_ids: Iterable[str], rows: Sequence[LeaseRow]) -> Ids:
    """Those of the shards that an unfinished lease leads to: its descendants, by name or by the hash keys they hold."""
    asked = dict.fromkeys(shard_ids)
    by_name = graph.descendants([row.key.shard_id for row in rows if not row.is_finished])
    by_keys = [
        shard_id for shard_id in asked if shard_id not in by_name and unfinished_ancestors(graph, shard_id, rows)
    ]
    found = by_name | dict.fromkeys(by_keys) | graph.descendants(by_keys)
    return {shard_id: None for shard_id in asked if shard_id in found}


def creation_order(shard: Shard) -> tuple[int, str]:
    """Older shards first, so that a bootstrap that dies half-way leaves parents rather than children (KCL's order)."""
    return (shard.starting_sequence_number, shard.shard_id)
