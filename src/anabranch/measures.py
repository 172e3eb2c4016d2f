"""The counters of a run, as plain values that exporters, alerts and logs read.

Counters only grow. They are updated per page, call or commit, so counting adds no function call for a record.
"""

from typing import Final

import msgspec
from msgspec.structs import replace

__all__ = ["BOUNDS_MS", "Counters", "TimeBuckets", "WriteCounters"]

BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
"""The upper bounds of the buckets, each included. One more bucket has everything above."""

BUCKET_LAST_MS: Final = BOUNDS_MS[-1] + 1
"""All longer times are in the last bucket."""
BUCKET_OF_MS: Final = bytes(sum(ms > bound for bound in BOUNDS_MS) for ms in range(BUCKET_LAST_MS + 1))
"""The bucket of each time: looked up instead of searched, because a look-up is no function call."""


class TimeBuckets(msgspec.Struct, gc=False):
    """How long something took: a histogram."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    """How many took at most `BOUNDS_MS[i]` and longer than the bound before; the last one counts all longer times."""
    total_ms: int = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, elapsed_ms: int, count: int = 1) -> None:
        """`count` times that add up to `elapsed_ms`."""
        each_ms = elapsed_ms // count
        self.counts[BUCKET_OF_MS[min(max(each_ms, 0), BUCKET_LAST_MS)]] += count
        self.total_ms += max(elapsed_ms, 0)

    def plus(self, other: "TimeBuckets", sign: int = 1) -> "TimeBuckets":
        counts = [mine + sign * theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return TimeBuckets(counts, self.total_ms + sign * other.total_ms)

    def since(self, before: "TimeBuckets") -> "TimeBuckets":
        """What was added since an earlier copy."""
        return self.plus(before, -1)

    def copy(self) -> "TimeBuckets":
        return TimeBuckets(self.counts[:], self.total_ms)


class Counters(msgspec.Struct, gc=False):
    """Of one shard since its lease was taken, or of all shards since the run began."""

    read_count: int = 0
    """Kinesis records: an aggregate counts as one."""
    read_bytes: int = 0
    """Payloads and partition keys."""
    handled_count: int = 0
    """Records that are finished, those in aggregates one by one."""
    handled_bytes: int = 0
    committed_count: int = 0
    """Finished records that the checkpoint covers."""
    failed_count: int = 0
    """Failed attempts, of a record or of a batch."""
    retry_count: int = 0
    """Failed attempts after which another one follows."""
    dead_letter_count: int = 0
    skipped_count: int = 0
    throttle_count: int = 0
    """Reads that Kinesis refused because of its limits."""
    read_failure_count: int = 0
    """Reads that failed in another way."""
    calls: TimeBuckets = msgspec.field(default_factory=TimeBuckets)
    """Calls of handlers with a record or a batch, failed ones included. In a loop: from one record to the next."""

    def plus(self, other: "Counters", sign: int = 1) -> "Counters":
        names = [name for name in self.__struct_fields__ if name != "calls"]
        counts = {name: getattr(self, name) + sign * getattr(other, name) for name in names}
        return Counters(**counts, calls=self.calls.plus(other.calls, sign))

    def since(self, before: "Counters") -> "Counters":
        """What was counted since an earlier copy."""
        return self.plus(before, -1)

    def copy(self) -> "Counters":
        return replace(self, calls=self.calls.copy())


class WriteCounters(msgspec.Struct):
    """Of one stream since its first put, or of one of its shards. Updated per Kinesis record and call."""

    delivered_count: int = 0
    """User records, those in aggregates one by one."""
    delivered_bytes: int = 0
    """Their data and partition keys."""
    aggregated_count: int = 0
    """Delivered user records that were sent in aggregates."""
    failed_count: int = 0
    expired_count: int = 0
    """Failed records whose `delivery_timeout` passed."""
    kinesis_count: int = 0
    """Kinesis records that were delivered: an aggregate counts as one."""
    kinesis_bytes: int = 0
    """Their data."""
    attempt_count: int = 0
    """Kinesis records that were sent, retries included."""
    retry_count: int = 0
    user_attempt_count: int = 0
    """User records that were sent, retries included."""
    request_count: int = 0
    throttle_count: int = 0
    """Kinesis records that a shard refused because of its limits."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    """Failed attempts to write Kinesis records, by AWS's error code or ours."""
    requests: TimeBuckets = msgspec.field(default_factory=TimeBuckets)
    """From the request to its response."""
    buffering: TimeBuckets = msgspec.field(default_factory=TimeBuckets)
    """From the first put of each Kinesis record until it is sent for the first time."""

    def copy(self) -> "WriteCounters":
        errors = dict(self.errors)
        return replace(self, errors=errors, requests=self.requests.copy(), buffering=self.buffering.copy())
