"""Which leases an application makes from a listing: its roots when it begins, and what is missing later.

Rules that hold here:
- `latest` is pinned to the service's clock at the first start, five seconds back, once for all workers (rule T1):
  arrival times are not exact, so a few older records may be delivered and none is lost.
- In scope are the shards that ended at or after the origin; the service tells which (`listing_filter`). The roots are
  those of them whose parents are out of scope. They cut the hash space into touching ranges, or the listing is no good
  and is made again (rule T2).
- A shard needs a lease of its own only if no lease accounts for it. An unfinished lease accounts for all its
  descendants, whose leases its end will make; any lease accounts for its ancestors, which were finished before it or
  lie before the origin. That only decides what not to make (rule S6).
- Of the shards that nothing accounts for, the oldest generation gets leases; the rest follows from their ends.
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
from anabranch._model.shard_filters import ShardFilter
from anabranch._model.shards import Shard
from anabranch._model.start_positions import TRIM_HORIZON, StartingPosition, at_timestamp
from anabranch.errors import ConfigurationError

__all__ = [
    "PIN_MARGIN_SECONDS",
    "IncompleteListing",
    "listing_filter",
    "missing_leases",
    "pin",
    "plan_bootstrap",
    "roots",
]

PIN_MARGIN_SECONDS: Final = 5


class IncompleteListing(msgspec.Struct, frozen=True):
    """A listing whose roots do not cut the hash space: list again, and conclude nothing (unknown topology)."""

    uncovered: tuple[HashKeyRange, ...]
    overlapping: bool

    def __str__(self) -> str:
        if self.overlapping:
            return "the listing shows shards of different generations that hold the same hash keys"
        return f"the listing leaves {len(self.uncovered)} ranges of hash keys without a shard"


def pin(
    start: Literal["latest", "trim_horizon"] | float, *, server_seconds: float, created_seconds: float
) -> StartingPosition:
    """The origin of a stream that is read for the first time. A number is a time, in seconds of the epoch."""
    if start == "trim_horizon":
        return TRIM_HORIZON
    if start == "latest":
        return at_timestamp(max(server_seconds - PIN_MARGIN_SECONDS, created_seconds))
    seconds = float(start)
    if seconds > server_seconds:
        raise ConfigurationError(
            f"start= lies {seconds - server_seconds:.0f} s in the future by the service's clock: "
            "name a time that has been, or 'latest'"
        )
    return at_timestamp(max(seconds, created_seconds))


def listing_filter(origin: StartingPosition) -> ShardFilter | None:
    """What to list so that the answer is exactly what is in scope; None: everything that there is."""
    if origin.timestamp_seconds is None:
        return None
    return ShardFilter("FROM_TIMESTAMP", timestamp_seconds=origin.timestamp_seconds)


def roots(listing: Iterable[Shard]) -> tuple[Shard, ...]:
    """The shards of a listing none of whose parents is in it, in the order of creation."""
    known = {shard.shard_id: shard for shard in listing}
    found = (shard for shard in known.values() if not any(parent in known for parent in shard.parent_shard_ids))
    return tuple(sorted(found, key=creation_order))


def plan_bootstrap(
    stream: StreamRow, listing: Sequence[Shard], rows: Sequence[LeaseRow] = ()
) -> tuple[LeaseRow, ...] | IncompleteListing:
    """The root leases that are still to be made, in order (rule S2); `rows` are those that another worker has made."""
    ranges = [shard.hash_key_range for shard in roots(listing)]
    uncovered, overlapping = gaps(ranges), has_overlap(ranges)
    if uncovered or overlapping:
        return IncompleteListing(uncovered, overlapping)
    scope = {shard.shard_id: shard for shard in listing}
    return missing_leases(stream, ShardGraph().united(shards=listing, rows=rows), scope, rows)


def missing_leases(
    stream: StreamRow, graph: ShardGraph, scope: Mapping[str, Shard], rows: Sequence[LeaseRow]
) -> tuple[LeaseRow, ...]:
    """Leases for the shards in scope that no row accounts for, in the order of creation.

    `rows` are all of this stream and generation, finished ones included, read after the listing.
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
    # Those before it by their hash keys count, too, where the shards between them were trimmed out of sight. They are
    # finished, or it would be theirs to make; but its fence tokens go above theirs (rule U3).
    before = {row.key for row in ancestors_by_keys(graph, shard.shard_id, rows)}
    waits_for = tuple(row.key.shard_id for row in rows if row.key.shard_id in parents or row.key in before)
    # One whose parent is in scope was born after the origin: all of it is to be read.
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
