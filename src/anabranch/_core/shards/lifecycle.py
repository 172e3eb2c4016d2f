"""When a lease is created, when its shard may start, what its end creates, and when its row can be deleted.

This module follows rules S1 to S7, T1, T2 and L18. What it adds to them:

- A shard needs a new lease only if no lease accounts for it. An unfinished lease accounts for all its descendants,
  because its end creates their leases. Any lease accounts for its ancestors, which were finished earlier or lie before
  the origin. A deleted row accounts for nothing, unless the shard is known to be finished.
- Of the shards without a lease that accounts for them, the oldest generation gets leases. The rest follows from their
  ends.
- A parent of a merged shard may have no row *yet*, because its own parent is still being read. That parent's row is
  created first. Otherwise the child would start before it.
- The heirs of a trimmed shard are the oldest remaining shards that do not descend from another lease. They wait for it,
  because its owner may still handle records.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from anabranch._core.shards.graph import (
    Ids,
    RowsByKeys,
    ShardGraph,
    ancestors_by_keys,
    creation_order,
    deleted_shards,
    descendants_of_unfinished,
    gaps,
    has_overlap,
    unread_since,
    was_taken,
)
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import RESTORED_VERSION_MIN, Checkpoint, Finish, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Shard, ShardFilter, StartingPosition, at_timestamp, parse_stream
from anabranch._wire.messages import StreamSummary
from anabranch.errors import ConfigurationError

Start = Literal["latest", "trim_horizon"] | float
"""`latest`, `trim_horizon`, or a Unix time in seconds."""

PIN_MARGIN_SECONDS: Final = 5


class IncompleteListing(msgspec.Struct, frozen=True):
    """A listing whose roots do not divide the hash keys: conclude nothing and list again."""

    uncovered: tuple[HashKeyRange, ...]
    overlapping: bool

    def __str__(self) -> str:
        if self.overlapping:
            return "shards in the listing overlap: they are of different generations"
        return f"{len(self.uncovered)} hash key ranges have no shard in the listing"


def propose_stream(summary: StreamSummary, start: Start, wall_seconds: float) -> StreamRow:
    """The row of a stream that an application begins to read now."""
    account_id = parse_stream(summary.arn).account_id
    return StreamRow(
        stream_key=f"{account_id}:{summary.name}:{int(summary.created_seconds)}",
        name=summary.name,
        arn=summary.arn,
        created_seconds=summary.created_seconds,
        origin=pin(
            start, server_seconds=summary.server_seconds or wall_seconds, created_seconds=summary.created_seconds
        ),
    )


def pin(start: Start, *, server_seconds: float, created_seconds: float) -> StartingPosition:
    """The origin of a stream at its first start."""
    if start == "trim_horizon":
        return TRIM_HORIZON
    if start == "latest":
        return at_timestamp(max(server_seconds - PIN_MARGIN_SECONDS, created_seconds))
    seconds = float(start)
    if seconds > server_seconds:
        raise ConfigurationError(
            f"start= is {seconds - server_seconds:.0f} s in the future by the service's clock: "
            "use a past time, or 'latest'"
        )
    return at_timestamp(max(seconds, created_seconds))


def listing_filter(origin: StartingPosition) -> ShardFilter | None:
    """The filter that lists exactly the shards in scope; None for all shards."""
    if origin.timestamp_seconds is None:
        return None
    return ShardFilter("FROM_TIMESTAMP", timestamp_seconds=origin.timestamp_seconds)


def roots(listing: Iterable[Shard]) -> tuple[Shard, ...]:
    """The shards without a parent in the listing, in order of creation."""
    known = {shard.shard_id: shard for shard in listing}
    found = (shard for shard in known.values() if not any(parent in known for parent in shard.parent_shard_ids))
    return tuple(sorted(found, key=creation_order))


def plan_bootstrap(
    stream: StreamRow, listing: Sequence[Shard], rows: Sequence[LeaseRow] = ()
) -> tuple[LeaseRow, ...] | IncompleteListing:
    """The root leases still to create, in order (rule S2). `rows` are those that other workers created."""
    ranges = [shard.hash_key_range for shard in roots(listing)]
    uncovered, overlapping = gaps(ranges), has_overlap(ranges)
    if uncovered or overlapping:
        return IncompleteListing(uncovered, overlapping)
    scope = {shard.shard_id: shard for shard in listing}
    return missing_leases(stream, ShardGraph().extended(shards=listing, rows=rows), scope, rows)


def missing_leases(
    stream: StreamRow, graph: ShardGraph, scope: Mapping[str, Shard], rows: Sequence[LeaseRow]
) -> tuple[LeaseRow, ...]:
    """Leases for the shards in scope that no row accounts for, in order of creation. `rows` are all rows of this stream
    and generation, also finished ones, read after the listing.
    """
    behind = accounted_for(graph, rows)
    unread = [shard_id for shard_id in dict.fromkeys([*scope, *deleted_shards(rows)]) if shard_id not in behind]
    ahead = descendants_of_unfinished(graph, unread, rows)
    candidates = {shard_id: None for shard_id in unread if shard_id not in ahead}
    oldest = [
        shard_id for shard_id in candidates if not any(parent in candidates for parent in graph.parents(shard_id))
    ]

    def order(shard_id: str) -> tuple[int, str]:
        return creation_order(scope[shard_id]) if shard_id in scope else (0, shard_id)

    by_id, by_keys = {row.key.shard_id: row for row in rows}, RowsByKeys(rows)
    return tuple(_lease(stream, graph, shard_id, scope, by_id, by_keys) for shard_id in sorted(oldest, key=order))


def accounted_for(graph: ShardGraph, rows: Sequence[LeaseRow]) -> Ids:
    """Shards that have a row, and their ancestors, which need none. A shard whose row somebody has deleted is excluded,
    with its ancestors, unless it was finished.
    """
    named = {row.key.shard_id: None for row in rows}
    finished = _surely_finished(graph, rows)
    deleted = {shard_id: None for shard_id in deleted_shards(rows) if shard_id not in finished}
    in_doubt = deleted | graph.ancestors(deleted)
    before = graph.ancestors(named)
    return named | {shard_id: None for shard_id in before if shard_id in finished or shard_id not in in_doubt}


def unfinished_shards(rows: Iterable[LeaseRow]) -> tuple[str, ...]:
    return tuple(sorted(row.key.shard_id for row in rows if not row.is_finished))


def _surely_finished(graph: ShardGraph, rows: Sequence[LeaseRow]) -> Ids:
    """Shards that were finished, even if their rows are gone: a shard that descends from them was owned."""
    return graph.ancestors(row.key.shard_id for row in rows if was_taken(row))


def first_version(waits_for: Collection[str], rows: Iterable[LeaseRow]) -> int:
    """0; if a row that it waits for was restored, more than any version that its deleted row had (rule L18)."""
    versions = [row.version for row in rows if row.key.shard_id in waits_for]
    return max((version for version in versions if version >= RESTORED_VERSION_MIN), default=0)


def ends_to_restore(stream: StreamRow, graph: ShardGraph, rows: Sequence[LeaseRow]) -> tuple[LeaseRow, ...]:
    """Finished rows to replace deleted rows of finished shards (rule L18)."""
    finished = _surely_finished(graph, rows)
    named = {row.key.shard_id: None for row in rows}
    return tuple(
        LeaseRow(
            key=LeaseKey(stream.stream_key, stream.generation, shard_id),
            hash_key_range=graph.hash_key_range(shard_id),
            finish=Finish("end", tuple(sorted(child for child in graph.children(shard_id) if child in named))),
        )
        for shard_id in deleted_shards(rows)
        if shard_id in finished
    )


def had_row(lease: LeaseRow, rows: Sequence[LeaseRow]) -> bool:
    """Whether a lease without a row had one before. Only what follows a trimmed shard may have been overlooked: roots
    get rows at the first start, and children before the end of their parent.
    """
    before = [row for row in rows if row.key.shard_id in lease.waits_for]
    may_be_new = any(row.finish is None or row.finish.reason == "trimmed" for row in before)
    return not may_be_new or lease.key.shard_id in deleted_shards(rows)


def _lease(
    stream: StreamRow,
    graph: ShardGraph,
    shard_id: str,
    scope: Mapping[str, Shard],
    by_id: Mapping[str, LeaseRow],
    by_keys: RowsByKeys,
) -> LeaseRow:
    parents = graph.parents(shard_id)
    sharing = by_keys.overlapping(graph.hash_key_range(shard_id))
    # Ancestors by hash keys count too, because shards between them may have been trimmed unseen. They are finished:
    # otherwise their ends would create this lease. But its fence tokens must be above theirs (rule U3).
    before = [row.key.shard_id for row in ancestors_by_keys(graph, shard_id, sharing)]
    waits_for = tuple(sorted({name for name in (*parents, *before) if name in by_id}))
    # A shard with a parent in scope was created after the origin: read all of it.
    is_root = not waits_for and not any(parent in scope for parent in parents)
    return LeaseRow(
        key=LeaseKey(stream.stream_key, stream.generation, shard_id),
        start=stream.origin if is_root else TRIM_HORIZON,
        waits_for=waits_for,
        version=first_version(waits_for, [by_id[name] for name in waits_for]),
        hash_key_range=graph.hash_key_range(shard_id),
        checkpoint=Checkpoint(seen_through_seconds=unread_since(graph, shard_id, sharing, by_id)),
    )


# the start and the end of a shard

_SAME_CREATION_SECONDS: Final = 1.0
"""JSON and CBOR round creation times differently, by less than this. Deleting and creating a stream takes longer."""


class ShardEnd(msgspec.Struct, frozen=True):
    """What to write at the end of a shard: first `rows`, in this order, each only if it is absent; then `finish`."""

    rows: tuple[LeaseRow, ...]
    finish: Finish
    restored: tuple[LeaseKey, ...] = ()
    """Which of the `rows` existed before and were deleted: a member may still hold such a lease (rule L18)."""


def open_parents(row: LeaseRow, leases: Mapping[LeaseKey, LeaseRow]) -> tuple[str, ...]:
    """The unfinished parents; without any, the shard may start (rule S1). `leases` must have all unfinished leases."""
    stream_key, generation = row.key.stream_key, row.key.generation
    parents = [leases.get(LeaseKey(stream_key, generation, shard_id)) for shard_id in row.waits_for]
    return tuple(parent.key.shard_id for parent in parents if parent is not None and not parent.is_finished)


def deleted_parents(row: LeaseRow, leases: Mapping[LeaseKey, LeaseRow]) -> tuple[LeaseKey, ...]:
    """Parents without a row: the lease is first taken after those are restored (rule L18). `leases` has all rows."""
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

    `scope` has the shards of a complete listing made after the end was seen; None if all parents of the children have
    rows. `rows` as in `missing_leases`. The shard was read until `read_through_seconds` (rule T4).
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
        replace(heir, waits_for=tuple(sorted({row.key.shard_id, *heir.waits_for})), start=TRIM_HORIZON)
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

    A finished row decides whether its children may start, prevents a listed shard from being read again, and has the
    fence token that its descendants must exceed (rule U3). So it stays until its shard is gone from the stream, all its
    followers have started, and its parents have no rows. Followers are its children and every row that waits for it.
    The hash keys of a trimmed shard may go to shards that another row names: it also stays until those have started.
    `rows` are all rows of one stream and generation; `listed_now` are the shards of a complete, recent listing.
    """
    by_id = {row.key.shard_id: row for row in rows}
    full_graph = graph.extended(rows=rows)
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
