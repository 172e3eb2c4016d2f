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
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from anabranch._core.shards.graph import (
    ShardGraph,
    ancestors_by_keys,
    creation_order,
    gaps,
    has_overlap,
    still_to_come,
    unread_since,
)
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import Checkpoint, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Shard, ShardFilter, StartingPosition, at_timestamp
from anabranch.errors import ConfigurationError

PIN_MARGIN_SECONDS: Final = 5


class IncompleteListing(msgspec.Struct, frozen=True):
    """A listing whose roots do not divide the hash keys: conclude nothing and list again."""

    uncovered: tuple[HashKeyRange, ...]
    overlapping: bool

    def __str__(self) -> str:
        if self.overlapping:
            return "shards in the listing overlap: they are of different generations"
        return f"{len(self.uncovered)} hash key ranges have no shard in the listing"


def pin(
    start: Literal["latest", "trim_horizon"] | float, *, server_seconds: float, created_seconds: float
) -> StartingPosition:
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
    named = {row.key.shard_id: None for row in rows}
    behind = named | graph.ancestors(named)
    ahead = still_to_come(graph, (shard_id for shard_id in scope if shard_id not in behind), rows)
    candidates = {
        shard_id: shard for shard_id, shard in scope.items() if shard_id not in behind and shard_id not in ahead
    }
    oldest = [
        shard
        for shard in candidates.values()
        if not any(parent in candidates for parent in graph.parents(shard.shard_id))
    ]
    return tuple(_lease(stream, graph, shard, scope, rows) for shard in sorted(oldest, key=creation_order))


def _lease(
    stream: StreamRow, graph: ShardGraph, shard: Shard, scope: Mapping[str, Shard], rows: Sequence[LeaseRow]
) -> LeaseRow:
    parents = graph.parents(shard.shard_id)
    # Ancestors by hash keys count too, because shards between them may have been trimmed unseen. They are finished, or
    # their ends would create this lease; but its fence tokens must go above theirs (rule U3).
    before = {row.key for row in ancestors_by_keys(graph, shard.shard_id, rows)}
    waits_for = tuple(row.key.shard_id for row in rows if row.key.shard_id in parents or row.key in before)
    # A shard with a parent in scope was created after the origin: read all of it.
    is_root = not waits_for and not any(parent in scope for parent in parents)
    return LeaseRow(
        key=LeaseKey(stream.stream_key, stream.generation, shard.shard_id),
        start=stream.origin if is_root else TRIM_HORIZON,
        waits_for=waits_for,
        hash_key_range=shard.hash_key_range,
        checkpoint=Checkpoint(
            seen_through_seconds=unread_since(graph, shard.shard_id, rows, [row.key.shard_id for row in rows])
        ),
    )
