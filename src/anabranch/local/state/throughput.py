"""AWS's rates, for a server that was asked to enforce them: buckets that refill with time, which is an argument.

Two kinds of use. Writes must fit: a record is refused when its bytes or its count are not there. Reads run into
debt: a read is allowed while anything is left, and then pays for what it returned, so that 10 MiB in one read cost
five seconds of silence. A clock that goes backwards refills nothing.
"""

from collections.abc import Mapping
from typing import Final

from anabranch.limits import (
    GET_SHARD_ITERATOR_PER_SECOND,
    SHARD_READ_BYTES_PER_SECOND,
    SHARD_READS_PER_SECOND,
    SHARD_WRITE_BURST_BYTES,
    SHARD_WRITE_BYTES_PER_SECOND,
    SHARD_WRITE_RECORDS_PER_SECOND,
    SUBSCRIBE_PER_SECOND,
)
from anabranch.local.errors import limit_exceeded

__all__ = ["CallRates", "ShardThroughput", "TokenBucket"]


class TokenBucket:
    __slots__ = ("_at_ms", "_level", "_per_second", "_room")

    def __init__(self, per_second: float, room: float | None = None) -> None:
        self._per_second = per_second
        self._room = per_second if room is None else room
        self._level = self._room
        self._at_ms: int | None = None

    def level(self, now_ms: int) -> float:
        if self._at_ms is None:
            self._at_ms = now_ms
        elif now_ms > self._at_ms:
            refill = (now_ms - self._at_ms) * self._per_second / 1000
            self._level = min(self._room, self._level + refill)
            self._at_ms = now_ms
        return self._level

    def take(self, amount: float, now_ms: int) -> bool:
        if self.level(now_ms) < amount:
            return False
        self._level -= amount
        return True

    def owe(self, amount: float, now_ms: int) -> None:
        """Take more than may be there. What exceeds a full bucket is paid for in whole, as if it had been empty."""
        level = self.level(now_ms)
        self._level = (min(0.0, level) if amount > self._room else level) - amount

    def ready_ms(self, now_ms: int) -> int:
        """When something is left again; now, if there is."""
        level = self.level(now_ms)
        return now_ms if level > 0 else now_ms + int(-level * 1000 / self._per_second) + 1


class ShardThroughput:
    """What one shard allows; made of buckets only when it is first asked."""

    __slots__ = ("_iterators", "_read_bytes", "_reads", "_write_bytes", "_write_records")

    def __init__(self) -> None:
        self._write_bytes: TokenBucket | None = None

    def _fill(self) -> TokenBucket:
        if self._write_bytes is None:
            self._write_bytes = TokenBucket(SHARD_WRITE_BYTES_PER_SECOND, SHARD_WRITE_BURST_BYTES)
            self._write_records = TokenBucket(SHARD_WRITE_RECORDS_PER_SECOND)
            self._reads = TokenBucket(SHARD_READS_PER_SECOND)
            self._read_bytes = TokenBucket(SHARD_READ_BYTES_PER_SECOND)
            self._iterators = TokenBucket(GET_SHARD_ITERATOR_PER_SECOND)
        return self._write_bytes

    def allows_write(self, size_bytes: int, now_ms: int) -> bool:
        write_bytes = self._fill()
        if write_bytes.level(now_ms) < size_bytes or not self._write_records.take(1, now_ms):
            return False
        return write_bytes.take(size_bytes, now_ms)

    def allows_read(self, now_ms: int) -> bool:
        self._fill()
        return self._read_bytes.level(now_ms) > 0 and self._reads.take(1, now_ms)

    def charge_read(self, size_bytes: int, now_ms: int) -> None:
        self._fill()
        self._read_bytes.owe(size_bytes, now_ms)

    def allows_iterator(self, now_ms: int) -> bool:
        self._fill()
        return self._iterators.take(1, now_ms)


# Calls a second of one account (API, each operation's text). The calls that carry records have limits of their own.
_CALLS_PER_SECOND: Final[Mapping[str, int]] = {
    "AddTagsToStream": 5,
    "CreateStream": 5,
    "DecreaseStreamRetentionPeriod": 5,
    "DeleteStream": 5,
    "DeregisterStreamConsumer": 5,
    "DescribeAccountSettings": 5,
    "DescribeLimits": 1,
    "DescribeStream": 10,
    "DescribeStreamConsumer": 20,
    "DescribeStreamSummary": 20,
    "DisableEnhancedMonitoring": 5,
    "EnableEnhancedMonitoring": 5,
    "IncreaseStreamRetentionPeriod": 5,
    "ListShards": 1000,
    "ListStreamConsumers": 5,
    "ListStreams": 5,
    "ListTagsForStream": 5,
    "MergeShards": 5,
    "RegisterStreamConsumer": 5,
    "RemoveTagsFromStream": 5,
    "SplitShard": 5,
    "StartStreamEncryption": 5,
    "StopStreamEncryption": 5,
    "UpdateAccountSettings": 5,
    "UpdateShardCount": 10,
    "UpdateStreamMode": 5,
    "UpdateStreamWarmThroughput": 5,
}


class CallRates:
    """Calls a second: of the account, and of a consumer on a shard. Nothing is counted unless the limits are on."""

    def __init__(self, account_id: str, *, enforced: bool) -> None:
        self._account_id = account_id
        self._is_enforced = enforced
        self._calls = {operation: TokenBucket(rate) for operation, rate in _CALLS_PER_SECOND.items()}
        self._subscriptions: dict[tuple[str, str], TokenBucket] = {}

    def check_call(self, operation: str, now_ms: int) -> None:
        bucket = self._calls.get(operation)
        if self._is_enforced and bucket is not None and not bucket.take(1, now_ms):
            raise limit_exceeded(f"Rate exceeded for {operation} under account {self._account_id}.")

    def allows_subscription(self, consumer_arn: str, shard_id: str, now_ms: int) -> bool:
        if not self._is_enforced:
            return True
        bucket = self._subscriptions.setdefault((consumer_arn, shard_id), TokenBucket(SUBSCRIBE_PER_SECOND))
        return bucket.take(1, now_ms)
