"""When a shard may start, which rows its end creates, and when finished rows can be deleted.

- When a lease is created, it names the parents that have a row (rule S1). Its shard may start when each of them is
  finished. A parent's row stays until the shard was taken: if it is missing before, somebody has deleted it, and the
  shard waits (rule L18). Neither a shard listing nor `max_shards` lets it start earlier (rule S7).
- A parent of a merged shard may have no row *yet*, because its own parent is still being read. That parent's row is
  created first. Otherwise the child would start before it.
- A shard is marked as finished only after the rows of its children exist (rule S4). If the known children do not cover
  its hash keys, some are missing: the shard stays unfinished and reports why.
- If the service no longer knows a shard, the shard was trimmed, unless the stream is a different one (rule S3). The
  heirs of a trimmed shard are the oldest remaining shards that do not descend from another lease. They wait for it,
  because its owner may still handle records.
- The member that finishes the last parent of a child takes the child at once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from anabranch._core.shards.bootstrap import accounted_for, first_version, had_row, missing_leases
from anabranch._core.shards.graph import Ids, ShardGraph, ancestors_by_keys, gaps, unread_since, was_taken
from anabranch._model.leases import Checkpoint, Finish, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Shard
from anabranch._wire.messages import StreamSummary

_SAME_CREATION_SECONDS: Final = 1.0
"""JSON and CBOR round creation times differently, by less than this. Deleting and creating a stream takes longer."""


class ShardEnd(msgspec.Struct, frozen=True):
    """What to write at the end of a shard: first `rows`, in this order, each only if it is absent; then `finish`."""

    rows: tuple[LeaseRow, ...]
    finish: Finish
    restored: tuple[LeaseKey, ...] = ()
    """Those of `rows` that had a row before: it was deleted, and a member may still hold the lease (rule L18)."""


def open_parents(row: LeaseRow, leases: Mapping[LeaseKey, LeaseRow]) -> tuple[str, ...]:
    """The unfinished parents; the shard may start when there are none (rule S1). `leases` must have all unfinished
    leases: a parent that is not in it is finished.
    """
    stream_key, generation = row.key.stream_key, row.key.generation
    parents = [leases.get(LeaseKey(stream_key, generation, shard_id)) for shard_id in row.waits_for]
    return tuple(parent.key.shard_id for parent in parents if parent is not None and not parent.is_finished)


def deleted_parents(row: LeaseRow, leases: Mapping[LeaseKey, LeaseRow]) -> tuple[LeaseKey, ...]:
    """Parents whose rows somebody has deleted: a lease is first taken after they are restored (rule L18). `leases`
    must have the rows of all parents, also of finished ones.
    """
    keys = [replace(row.key, shard_id=shard_id) for shard_id in row.waits_for]
    return () if was_taken(row) else tuple(key for key in keys if key not in leases)


def plan_end(
    row: LeaseRow,
    graph: ShardGraph,
    scope: Mapping[str, Shard] | None,
    rows: Sequence[LeaseRow],
    read_through_seconds: float | None = None,
) -> ShardEnd | None:
    """The end of a shard that was read completely. None if more has to be known: list the shards and call again.

    `scope` has the shards of a complete listing made after the end was seen. It may be None if all parents of the
    children have rows. `rows` are all rows of this stream and generation, including finished ones. The shard was read
    until `read_through_seconds` (rule T4).
    """
    children = sorted(graph.children(row.key.shard_id))
    if not _cover_hash_keys(graph, row.key.shard_id, children):
        return None
    with_rows = {other.key.shard_id: None for other in (*rows, row)}
    parents_have_rows = all(parent in with_rows for child in children for parent in graph.parents(child))
    if scope is None and not parents_have_rows:
        return None
    ancestors = () if scope is None or parents_have_rows else _unread_ancestors(graph, scope, children, [*rows, row])
    new = [shard_id for shard_id in (*ancestors, *children) if shard_id not in with_rows]
    known = with_rows | dict.fromkeys(new)
    rows_at_end = [*rows, replace(row, checkpoint=Checkpoint(seen_through_seconds=read_through_seconds))]
    new_rows = tuple(_new_row(row, shard_id, graph, rows_at_end, known) for shard_id in new)
    restored: dict[str, LeaseKey] = {}
    for new_row in new_rows:
        if had_row(new_row, rows) or any(parent in restored for parent in new_row.waits_for):
            restored[new_row.key.shard_id] = new_row.key
    return ShardEnd(new_rows, Finish("end", tuple(children)), tuple(restored.values()))


def _cover_hash_keys(graph: ShardGraph, shard_id: str, children: Sequence[str]) -> bool:
    ranges = [known for child in children if (known := graph.hash_key_range(child)) is not None]
    parent = graph.hash_key_range(shard_id)
    return bool(children) and len(ranges) == len(children) and (parent is None or not gaps(ranges, parent))


def _unread_ancestors(
    graph: ShardGraph, scope: Mapping[str, Shard], children: Sequence[str], rows: Sequence[LeaseRow]
) -> list[str]:
    """Ancestors of the children that still have to be read: in scope, without a row, and with no row below them."""
    done = accounted_for(graph, rows)
    found = [shard_id for shard_id in graph.ancestors(children) if shard_id in scope and shard_id not in done]
    # Parents first: an ancestor has fewer ancestors than its descendants.
    return sorted(found, key=lambda shard_id: (len(graph.ancestors([shard_id])), shard_id))


def _new_row(ended: LeaseRow, shard_id: str, graph: ShardGraph, rows: Sequence[LeaseRow], known: Ids) -> LeaseRow:
    # A shard that was read to its end has child rows to wait for. A trimmed one may have none, and only its own row has
    # its fence token (rule U3).
    older = (
        other.key.shard_id
        for other in ancestors_by_keys(graph, shard_id, rows)
        if other.finish is None or other.finish.reason == "trimmed"
    )
    parents = (parent for parent in graph.parents(shard_id) if parent in known)
    waits_for = tuple(sorted({*parents, *older}))
    return LeaseRow(
        key=LeaseKey(ended.key.stream_key, ended.key.generation, shard_id),
        waits_for=waits_for,
        version=first_version(waits_for, rows),
        hash_key_range=graph.hash_key_range(shard_id),
        checkpoint=Checkpoint(seen_through_seconds=unread_since(graph, shard_id, rows, known)),
    )


def plan_trimmed(
    stream: StreamRow,
    row: LeaseRow,
    graph: ShardGraph,
    scope: Mapping[str, Shard],
    rows: Sequence[LeaseRow],
    read_through_seconds: float | None = None,
) -> ShardEnd:
    """The end of a shard that was trimmed before it was read to its end.

    `scope` has the shards of a listing made after the trim. The heirs get all hash keys that only this lease covered.
    These can be more than its own, because an earlier trimmed shard may have passed its keys on. Nothing after
    `read_through_seconds` was read; None counts as nothing read at all (rule T4).
    """
    since_seconds = stream.created_seconds if read_through_seconds is None else read_through_seconds
    trimmed = replace(row, finish=Finish("trimmed"), checkpoint=Checkpoint(seen_through_seconds=since_seconds))
    others = [other for other in rows if other.key != row.key]
    uncovered = [
        heir
        for heir in missing_leases(stream, graph, scope, [*others, trimmed])
        if not had_row(heir, [*others, trimmed])  # else its row was deleted, and somebody may hold it (rule L18)
    ]
    heirs = tuple(
        replace(
            heir,
            waits_for=tuple(sorted({row.key.shard_id, *heir.waits_for})),
            start=TRIM_HORIZON,
        )
        for heir in uncovered
    )
    with_rows = {other.key.shard_id for other in others}
    children = {heir.key.shard_id for heir in heirs} | {
        child for child in graph.children(row.key.shard_id) if child in with_rows
    }
    return ShardEnd(heirs, Finish("trimmed", tuple(sorted(children))))


def classify_missing_shard(
    stream: StreamRow, summary: StreamSummary | None
) -> Literal["trimmed", "stream_deleted", "stream_recreated"]:
    """Why the service does not know a shard. `summary` is None if it does not know the stream either."""
    if summary is None or summary.status == "DELETING":
        return "stream_deleted"
    difference_seconds = abs(summary.created_seconds - stream.created_seconds)
    if summary.arn != stream.arn or difference_seconds >= _SAME_CREATION_SECONDS:
        return "stream_recreated"
    return "trimmed"


def removable(rows: Sequence[LeaseRow], graph: ShardGraph, listed_now: Collection[str]) -> tuple[LeaseRow, ...]:
    """Finished rows that can be deleted once the service confirms that their shards are gone (rules S3, S6).

    `rows` are all rows of one stream and generation; `listed_now` are the shards of a complete, recent listing.

    A finished row decides whether its children may start, prevents a listed shard from being read again, and has the
    fence token that its descendants must exceed (rule U3). So it stays until its shard is gone from the stream, all its
    followers have started, and its parents have no rows. Followers are its children and every row that waits for it.
    The hash keys of a trimmed shard may go to shards that another row names: it also stays until those have started.
    """
    by_id = {row.key.shard_id: row for row in rows}
    full_graph = graph.united(rows=rows)
    waiting: dict[str, list[str]] = {}
    for row in rows:
        for parent in row.waits_for:
            waiting.setdefault(parent, []).append(row.key.shard_id)
    return tuple(
        row
        for row in rows
        if row.finish is not None
        and row.key.shard_id not in listed_now
        and _followers_have_started(row, row.finish, waiting.get(row.key.shard_id, ()), by_id)
        and not any(parent in by_id for parent in full_graph.parents(row.key.shard_id))
    )


def _followers_have_started(
    row: LeaseRow, finish: Finish, waiting: Iterable[str], by_id: Mapping[str, LeaseRow]
) -> bool:
    followers = [by_id.get(shard_id) for shard_id in (*finish.children, *waiting)]
    if not all(_has_progress(follower) for follower in followers):
        return False
    if finish.reason == "end" or row.hash_key_range is None:
        return True
    ranges = [follower.hash_key_range for follower in followers if follower and follower.hash_key_range]
    return not gaps(ranges, row.hash_key_range)


def _has_progress(follower: LeaseRow | None) -> bool:
    """False for a lost row: it is created again from its parent's row."""
    return follower is not None and (follower.is_finished or follower.checkpoint.watermark is not None)
