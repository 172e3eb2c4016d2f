"""AWS's rate limits, as token buckets. Enforced only with `limits="aws"`. Time is an argument.

A write is rejected if the bucket has too few bytes or records left. A read is allowed while anything is left, and is
charged for what it returned, so a read of 10 MiB blocks the next one for five seconds. A clock that goes backwards
refills nothing.
"""

from collections.abc import Mapping
from typing import Final

from anabranch import limits


class TokenBucket:
    __slots__ = ("_at_ms", "_capacity", "_level", "_per_second")

    def __init__(self, per_second: float, capacity: float | None = None) -> None:
        self._per_second = per_second
        self._capacity = per_second if capacity is None else capacity
        self._level = self._capacity
        self._at_ms: int | None = None

    def level(self, now_ms: int) -> float:
        if self._at_ms is None:
            self._at_ms = now_ms
        elif now_ms > self._at_ms:
            refill = (now_ms - self._at_ms) * self._per_second / 1000
            self._level = min(self._capacity, self._level + refill)
            self._at_ms = now_ms
        return self._level

    def take(self, amount: float, now_ms: int) -> bool:
        if self.level(now_ms) < amount:
            return False
        self._level -= amount
        return True

    def charge(self, amount: float, now_ms: int) -> None:
        """Takes the amount, even if the level gets negative. An amount above the capacity empties the bucket first, so
        that all of it must be refilled.
        """
        level = self.level(now_ms)
        self._level = (min(0.0, level) if amount > self._capacity else level) - amount

    def ready_ms(self, now_ms: int) -> int:
        """When the level is above zero again; `now_ms` if it is."""
        level = self.level(now_ms)
        return now_ms if level > 0 else now_ms + int(-level * 1000 / self._per_second) + 1


class ShardThroughput:
    """The limits of one shard."""

    __slots__ = ("_reads", "_write_bytes", "_write_records", "iterators", "read_bytes")

    def __init__(self) -> None:
        self._write_bytes = TokenBucket(limits.SHARD_WRITE_BYTES_PER_SECOND, limits.SHARD_WRITE_BURST_BYTES)
        self._write_records = TokenBucket(limits.SHARD_WRITE_RECORDS_PER_SECOND)
        self._reads = TokenBucket(limits.SHARD_READS_PER_SECOND)
        self.read_bytes = TokenBucket(limits.SHARD_READ_BYTES_PER_SECOND)
        self.iterators = TokenBucket(limits.GET_SHARD_ITERATOR_PER_SECOND)

    def allows_write(self, size_bytes: int, now_ms: int) -> bool:
        if self._write_bytes.level(now_ms) < size_bytes or not self._write_records.take(1, now_ms):
            return False
        return self._write_bytes.take(size_bytes, now_ms)

    def allows_read(self, now_ms: int) -> bool:
        return self.read_bytes.level(now_ms) > 0 and self._reads.take(1, now_ms)


# Calls per second and account, from the API reference of each operation. Calls with records have their own limits.
CALLS_PER_SECOND: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        (
            "AddTagsToStream", "CreateStream", "DecreaseStreamRetentionPeriod", "DeleteStream",
            "DeregisterStreamConsumer", "DescribeAccountSettings", "DisableEnhancedMonitoring",
            "EnableEnhancedMonitoring", "IncreaseStreamRetentionPeriod", "ListStreamConsumers", "ListStreams",
            "ListTagsForStream", "MergeShards", "RegisterStreamConsumer", "RemoveTagsFromStream", "SplitShard",
            "StartStreamEncryption", "StopStreamEncryption", "UpdateAccountSettings", "UpdateStreamMode",
            "UpdateStreamWarmThroughput",
        ),
        5,
    ),
    "DescribeLimits": 1,
    "DescribeStream": 10,
    "DescribeStreamConsumer": 20,
    "DescribeStreamSummary": 20,
    "ListShards": 1000,
    "UpdateShardCount": 10,
}  # fmt: skip
