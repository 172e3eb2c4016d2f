"""Which leases an application creates from a listing: the roots at its first start, and missing ones later.

- `latest` is fixed at the first start, once for all workers, at five seconds before the service's time (rule T1).
  Arrival times are not exact: a few older records may be delivered, but none is lost.
- In scope are the shards that ended at or after the origin; `listing_filter` makes the service return exactly those.
  Roots are shards in scope whose parents are not. They must divide the hash keys into adjacent ranges; otherwise the
  listing is repeated (rule T2).
- A shard needs a new lease only if no lease accounts for it. An unfinished lease accounts for all its descendants,
  because its end creates their leases. Any lease accounts for its ancestors, which were finished earlier or lie before
  the origin (rule S6).
- Of the shards without a lease that accounts for them, the oldest generation gets leases. The rest follows from their
  ends.
- A deleted row accounts for nothing. Its shard is read again, unless the lease of a shard that came after it was taken:
  then it was finished (rule L18).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from anabranch._core.shards.graph import (
    Ids,
    RowsByKeys,
    ShardGraph,
    ancestors_by_keys,
    creation_order,
    deleted_shards,
    gaps,
    has_overlap,
    still_to_come,
    unread_since,
    was_taken,
)
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import RESTORED_VERSION_MIN, Checkpoint, Finish, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import (
    TRIM_HORIZON,
    Shard,
    ShardFilter,
    StartingPosition,
    at_timestamp,
    parse_stream,
)
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
            start,
            server_seconds=summary.server_seconds or wall_seconds,
            created_seconds=summary.created_seconds,
        ),
    )


def pin(start: Start, *, server_seconds: float, created_seconds: float) -> StartingPosition:
    """The origin of a stream at its first start. A number is a Unix time in seconds."""
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
    return missing_leases(stream, ShardGraph().united(shards=listing, rows=rows), scope, rows)


def missing_leases(
    stream: StreamRow, graph: ShardGraph, scope: Mapping[str, Shard], rows: Sequence[LeaseRow]
) -> tuple[LeaseRow, ...]:
    """Leases for the shards in scope that no row accounts for, in order of creation.

    `rows` are all rows of this stream and generation, including finished ones, read after the listing.
    """
    behind = accounted_for(graph, rows)
    unread = [shard_id for shard_id in dict.fromkeys([*scope, *deleted_shards(rows)]) if shard_id not in behind]
    ahead = still_to_come(graph, unread, rows)
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
    """Where the version of a new row starts: at 0, but above all versions that a deleted row may have had, if a row
    that it waits for was restored (rule L18).
    """
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
    """Whether a lease that has no row must have had one before: roots get theirs at the first start, and the children
    of a finished shard before its end. Only what follows a trimmed shard may have been overlooked.
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
    near = by_keys.near(graph.hash_key_range(shard_id))
    # Ancestors by hash keys count too, because shards between them may have been trimmed unseen. They are finished, or
    # their ends would create this lease; but its fence tokens must go above theirs (rule U3).
    before = [row.key.shard_id for row in ancestors_by_keys(graph, shard_id, near)]
    waits_for = tuple(sorted({name for name in (*parents, *before) if name in by_id}))
    # A shard with a parent in scope was created after the origin: read all of it.
    is_root = not waits_for and not any(parent in scope for parent in parents)
    return LeaseRow(
        key=LeaseKey(stream.stream_key, stream.generation, shard_id),
        start=stream.origin if is_root else TRIM_HORIZON,
        waits_for=waits_for,
        version=first_version(waits_for, [by_id[name] for name in waits_for]),
        hash_key_range=graph.hash_key_range(shard_id),
        checkpoint=Checkpoint(seen_through_seconds=unread_since(graph, shard_id, near, by_id)),
    )
