"""A stream: its settings, its shards and how they split and merge, its consumers, and its lifecycle.

CREATING, UPDATING and DELETING end at `deadline_ms`. A change (a split, an encryption) takes effect as of that time,
however late the next call comes. Records older than the trim horizon are lost, even if the retention gets longer.

Resharding closes one or two shards and opens shards for the same range, so the open ranges always cover the hash space
exactly once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any, Final, Literal, TypeAlias

import msgspec

from anabranch._model.hash_keys import HashKeyRange, even_ranges
from anabranch.limits import HASH_KEY_MAX, KIB, RECORD_BYTES_DEFAULT_MAX, RETENTION_HOURS_MIN
from anabranch.local.state.identifiers import Timestamp, full_shard_id, shard_id_of
from anabranch.local.state.shard import Shard


class Consumer(msgspec.Struct, kw_only=True):
    """A consumer with enhanced fan-out, registered with a stream. Its ARN contains the second of its creation."""

    name: str
    arn: str
    created_ms: int
    status: Literal["CREATING", "ACTIVE", "DELETING"]
    deadline_ms: int | None = None
    """When CREATING or DELETING ends."""
    tags: dict[str, str] = {}
    policy: str | None = None

    def members(self) -> dict[str, Any]:
        return {
            "ConsumerName": self.name,
            "ConsumerARN": self.arn,
            "ConsumerStatus": self.status,
            "ConsumerCreationTimestamp": Timestamp(self.created_ms // 1000),  # whole seconds, as on AWS
        }


class Routing:
    """Which open shard a hash key belongs to. Rebuilt whenever a shard opens or closes."""

    def __init__(self, shards: Iterable[Shard] = ()) -> None:
        self.open_shards = sorted((shard for shard in shards if shard.is_open), key=lambda s: s.hash_key_range.start)
        """In the order of their hash keys."""
        self._starts = [shard.hash_key_range.start for shard in self.open_shards]

    def shard_for(self, hash_key: int) -> Shard:
        return self.open_shards[bisect_right(self._starts, hash_key) - 1]


HOUR_MS: Final = 3_600_000

StreamMode: TypeAlias = Literal["PROVISIONED", "ON_DEMAND"]


class SplitChange(msgspec.Struct, frozen=True, tag="split"):
    shard_id: str
    new_starting_hash_key: str


class MergeChange(msgspec.Struct, frozen=True, tag="merge"):
    shard_id: str
    adjacent_shard_id: str


class ScaleChange(msgspec.Struct, frozen=True, tag="scale"):
    target_shard_count: int


class EncryptionChange(msgspec.Struct, frozen=True, tag="encryption"):
    key_id: str | None


Change: TypeAlias = SplitChange | MergeChange | ScaleChange | EncryptionChange


class Stream(msgspec.Struct, kw_only=True):
    name: str
    arn: str
    created_ms: int
    status: Literal["CREATING", "ACTIVE", "UPDATING", "DELETING"]
    deadline_ms: int | None = None
    change: Change | None = None
    mode: StreamMode
    retention_hours: int = RETENTION_HOURS_MIN
    trimmed_before_ms: int = 0
    key_id: str | None = None
    """The KMS key of an encrypted stream."""
    metrics: list[str] = []
    tags: dict[str, str] = {}
    policy: str | None = None
    consumers: dict[str, Consumer] = {}
    max_record_kib: int = RECORD_BYTES_DEFAULT_MAX // KIB
    warm_throughput_mibps: int | None = None
    distribution: Literal["AUTO", "USER_PARTITION_KEY"] = "USER_PARTITION_KEY"
    scaled_at_ms: list[int] = []
    """When UpdateShardCount was called, for its daily limit."""
    next_shard_index: int = 0
    placed_count: int = 0
    """If distribution is AUTO, the open shards take records in turn."""
    shards: dict[str, Shard] = {}
    """By id, in order of creation."""
    routing: Routing = msgspec.field(default_factory=Routing)

    def __post_init__(self) -> None:
        self.rebuild_routing()

    def open_first_shards(self, count: int) -> None:
        for index, hash_key_range in enumerate(even_ranges(count)):
            shard = Shard(index, hash_key_range, self.created_ms, self.created_ms // 1000)
            self.shards[shard.shard_id] = shard
        self.next_shard_index = count
        self.rebuild_routing()

    def rebuild_routing(self) -> None:
        self.routing = Routing(self.shards.values())

    @property
    def creation_timestamp(self) -> Timestamp:
        """Whole seconds, as on AWS."""
        return Timestamp(self.created_ms // 1000)

    @property
    def open_shard_count(self) -> int:
        return len(self.routing.open_shards)

    def horizon_ms(self, now_ms: int, time_scale: float) -> int:
        """Records that arrived before this time cannot be read."""
        return max(self.trimmed_before_ms, now_ms - round(self.retention_hours * HOUR_MS * time_scale))

    def forget_expired_shards(self, horizon_ms: int) -> None:
        for shard_id in [s.shard_id for s in self.shards.values() if s.is_expired(horizon_ms)]:
            del self.shards[shard_id]

    def shard(self, text: str, horizon_ms: int) -> Shard | None:
        shard = self.shards.get(full_shard_id(text) or "")
        return None if shard is None or shard.is_expired(horizon_ms) else shard

    def children_of(self, shard: Shard) -> list[dict[str, Any]]:
        """ChildShards, as returned by a read at the end of a closed shard."""
        children = (self.shards[child_id] for child_id in shard.child_ids)
        return [
            {
                "ShardId": child.shard_id,
                "ParentShards": list(child.parent_ids),
                "HashKeyRange": child.members()["HashKeyRange"],
            }
            for child in children
        ]


_ROUNDING: Final = 1 << 32
"""Rounding moves the borders of an even cut by a few thousand at most, and its shards are wider than 2**100."""


def reshard(stream: Stream, change: SplitChange | MergeChange | ScaleChange, now_ms: int) -> list[Shard]:
    """Returns the shards that it closed."""
    before = stream.routing.open_shards
    if isinstance(change, SplitChange):
        split(stream, stream.shards[change.shard_id], int(change.new_starting_hash_key), now_ms)
    elif isinstance(change, MergeChange):
        merge(stream, stream.shards[change.shard_id], stream.shards[change.adjacent_shard_id], now_ms)
    else:
        scale(stream, change.target_shard_count, now_ms)
    return [shard for shard in before if not shard.is_open]


def split(stream: Stream, shard: Shard, new_starting_hash_key: int, now_ms: int) -> list[Shard]:
    start, end = shard.hash_key_range
    ranges = HashKeyRange(start, new_starting_hash_key - 1), HashKeyRange(new_starting_hash_key, end)
    return _replace(stream, (shard,), ranges, now_ms)


def merge(stream: Stream, shard: Shard, adjacent: Shard, now_ms: int) -> Shard:
    start = min(shard.hash_key_range.start, adjacent.hash_key_range.start)
    end = max(shard.hash_key_range.end, adjacent.hash_key_range.end)
    return _replace(stream, (shard, adjacent), (HashKeyRange(start, end),), now_ms)[0]


def scale(stream: Stream, target_shard_count: int, now_ms: int) -> None:
    """Cuts the hash space evenly, as CreateStream does: splits shards at the new borders, then merges within them.

    As on AWS this leaves short-lived shards in between. Shards that already fit are not touched.
    """
    borders = _snapped_borders(stream, target_shard_count)
    for shard in list(stream.routing.open_shards):
        inside = [border for border in borders if shard.hash_key_range.start < border <= shard.hash_key_range.end]
        _split_at_all(stream, shard, inside, now_ms)
    for start, following in zip(borders, [*borders[1:], HASH_KEY_MAX + 1], strict=True):
        within = [s for s in stream.routing.open_shards if start <= s.hash_key_range.start < following]
        _merge_all(stream, within, now_ms)


def _replace(stream: Stream, parents: tuple[Shard, ...], ranges: tuple[HashKeyRange, ...], now_ms: int) -> list[Shard]:
    first = stream.next_shard_index
    stream.next_shard_index += len(ranges)
    child_ids = tuple(shard_id_of(first + offset) for offset in range(len(ranges)))
    opened_ms = max(now_ms, *(parent.closes_from_ms for parent in parents))
    for parent in parents:
        parent.closed_ms, parent.child_ids = opened_ms, child_ids
    created_s = max(opened_ms // 1000, *(parent.created_s for parent in parents)) + 1
    parent_ids = tuple(parent.shard_id for parent in parents)
    children = [
        Shard(first + offset, hash_key_range, opened_ms, created_s, parent_ids)
        for offset, hash_key_range in enumerate(ranges)
    ]
    stream.shards.update((child.shard_id, child) for child in children)
    stream.rebuild_routing()
    return children


def _snapped_borders(stream: Stream, count: int) -> list[int]:
    """The borders of an even cut. Existing borders are used if they differ from these only by rounding."""
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
