"""A stream: its settings, its shards, its consumers, and the state it is in.

`status` and `deadline_ms` are the lifecycle: CREATING, UPDATING and DELETING end at the deadline, and a change
that was asked for with an UPDATING (a split, an encryption) takes effect then, as of the deadline, however late
somebody looks. What is older than the trim horizon is gone for good: raising the retention brings nothing back.
"""

from typing import Any, Final, Literal, TypeAlias

import msgspec

from anabranch._model.hash_keys import even_ranges
from anabranch.limits import KIB, RECORD_BYTES_DEFAULT_MAX, RETENTION_HOURS_MIN
from anabranch.local.state.consumer import Consumer
from anabranch.local.state.routing import Routing
from anabranch.local.state.shard import Shard, full_shard_id

__all__ = ["Change", "EncryptionChange", "MergeChange", "ScaleChange", "SplitChange", "Stream", "StreamMode"]

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
    deadline_ms: int | None
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
    """When UpdateShardCount was called, for its limit of calls a day."""
    next_shard_index: int = 0
    next_turn: int = 0
    """Which open shard an AUTO-distributed record goes to next."""
    shards: dict[str, Shard] = {}
    """By id, in the order of their creation."""
    routing: Routing = msgspec.field(default_factory=Routing)

    def __post_init__(self) -> None:
        self.reroute()

    def open_first_shards(self, count: int) -> None:
        for index, hash_key_range in enumerate(even_ranges(count)):
            shard = Shard(index, hash_key_range, self.created_ms, self.created_ms // 1000)
            self.shards[shard.shard_id] = shard
        self.next_shard_index = count
        self.reroute()

    def reroute(self) -> None:
        self.routing = Routing(self.shards.values())

    @property
    def open_shard_count(self) -> int:
        return len(self.routing.open_shards)

    def horizon_ms(self, now_ms: int, time_scale: float) -> int:
        """Nothing that arrived before this can be read."""
        return max(self.trimmed_before_ms, now_ms - round(self.retention_hours * HOUR_MS * time_scale))

    def forget_expired_shards(self, horizon_ms: int) -> None:
        for shard_id in [s.shard_id for s in self.shards.values() if s.is_expired(horizon_ms)]:
            del self.shards[shard_id]

    def shard(self, text: str, horizon_ms: int) -> Shard | None:
        """The shard that an id means."""
        shard = self.shards.get(full_shard_id(text) or "")
        return None if shard is None or shard.is_expired(horizon_ms) else shard

    def children_of(self, shard: Shard) -> list[dict[str, Any]]:
        """ChildShards, as a read at the end of a closed shard answers it."""
        children = (self.shards[child_id] for child_id in shard.child_ids)
        return [
            {
                "ShardId": child.shard_id,
                "ParentShards": list(child.parent_ids),
                "HashKeyRange": {
                    "StartingHashKey": str(child.hash_key_range.start),
                    "EndingHashKey": str(child.hash_key_range.end),
                },
            }
            for child in children
        ]
