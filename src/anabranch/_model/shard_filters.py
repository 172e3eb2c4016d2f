"""Which shards a listing returns: AWS's ShardFilter as a value."""

from typing import Literal

import msgspec

__all__ = ["AT_LATEST", "AT_TRIM_HORIZON", "ShardFilter"]

FilterType = Literal[
    "AFTER_SHARD_ID", "AT_TRIM_HORIZON", "FROM_TRIM_HORIZON", "AT_LATEST", "AT_TIMESTAMP", "FROM_TIMESTAMP"
]


class ShardFilter(msgspec.Struct, frozen=True):
    type: FilterType
    shard_id: str | None = None
    timestamp_seconds: float | None = None


AT_LATEST = ShardFilter("AT_LATEST")
AT_TRIM_HORIZON = ShardFilter("AT_TRIM_HORIZON")
