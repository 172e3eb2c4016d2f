"""The counters and gauges of a run, as plain values that exporters, alerts and logs read.

Counters only grow. The shards' counters are written where the engine updates anyway: per page, per call, per commit. So
counting adds no function call for a record, and reading them costs nothing there either.
"""

from typing import Final

import msgspec
from msgspec.structs import replace

from anabranch.reasons import Reason

__all__ = ["BOUNDS_MS", "ConsumerMeasures", "Counters", "ShardMeasures", "TimeBuckets", "WriteCounters"]

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

    def plus(self, other: "TimeBuckets") -> "TimeBuckets":
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return TimeBuckets(counts, self.total_ms + other.total_ms)

    def since(self, before: "TimeBuckets") -> "TimeBuckets":
        """What was added since an earlier copy."""
        counts = [mine - theirs for mine, theirs in zip(self.counts, before.counts, strict=True)]
        return TimeBuckets(counts, self.total_ms - before.total_ms)

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
    """Handler calls, one for each record or batch, failed ones included. In a loop over records: from one record to the
    next.
    """

    def plus(self, other: "Counters") -> "Counters":
        return _combined(self, other, 1)

    def since(self, before: "Counters") -> "Counters":
        """What was counted since an earlier copy."""
        return _combined(self, before, -1)

    def copy(self) -> "Counters":
        return replace(self, calls=self.calls.copy())


_COUNTS: Final = tuple(name for name in Counters.__struct_fields__ if name != "calls")


def _combined(one: Counters, other: Counters, sign: int) -> Counters:
    counts = {name: getattr(one, name) + sign * getattr(other, name) for name in _COUNTS}
    calls = one.calls.plus(other.calls) if sign > 0 else one.calls.since(other.calls)
    return Counters(**counts, calls=calls)


class ShardMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """One shard that this process holds, now."""

    stream: str
    shard_id: str
    counters: Counters
    """Since its lease was taken."""
    lag: float | None
    """Seconds: the age of its oldest unfinished record, by the service's clock; with none, how far its reads are behind
    the tip (rule O4). None until it was read.
    """
    millis_behind_latest: int | None
    """As the service said in the last answer: how far the last read is behind the tip."""
    retention_left: float | None
    """Seconds until its oldest unfinished record is trimmed; None until it was read."""
    checkpoint_age: float | None
    """Seconds since its checkpoint was last written; None if it never was."""
    unfinished_count: int
    buffered_bytes: int
    subscription_age: float | None
    """For how long the present subscription is active, with fan-out; None if it is not."""
    reason: Reason | None
    """Why it is stalled; None if it is not."""


class ConsumerMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a consumer, now."""

    app: str
    counters: Counters
    """Since the run began, also of shards that it no longer holds."""
    shards: tuple[ShardMeasures, ...]
    """Those that it holds: the active shards."""
    budget_used_bytes: int
    """Buffered records, and the room that reads under way have reserved."""
    budget_limit_bytes: int
    lease_taken_count: int
    hand_off_count: int
    """Leases that it gave to another worker."""
    lease_lost_count: int
    """Leases that it lost without giving or releasing them."""
    store_calls: TimeBuckets
    """Calls to the lease store, failed ones included."""
    store_failure_count: int
    """Calls that failed or had no answer in time."""
    store_throttle_count: int
    """Those of them that were throttled."""
    dead_letter_age: float | None = None
    """Seconds since the last dead letter was written; None if none was."""
    loop_lags: TimeBuckets
    """How late the event loop was, measured twice a second."""

    @property
    def lag(self) -> float | None:
        """The largest of all shards; None if unknown."""
        return max((shard.lag for shard in self.shards if shard.lag is not None), default=None)


class WriteCounters(msgspec.Struct):
    """Of one stream since its first put, or of one of its shards. Counted per Kinesis record and per call, not for each
    record of an aggregate.
    """

    delivered_count: int = 0
    """User records, those in aggregates one by one."""
    delivered_bytes: int = 0
    """Their data and partition keys."""
    aggregated_count: int = 0
    """Those of them that were sent in aggregates."""
    failed_count: int = 0
    expired_count: int = 0
    """Those of them that were not delivered within `delivery_timeout`."""
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
    """Failed attempts of Kinesis records by AWS's error code, or ours."""
    requests: TimeBuckets = msgspec.field(default_factory=TimeBuckets)
    """From the request to its response."""
    buffering: TimeBuckets = msgspec.field(default_factory=TimeBuckets)
    """From the first put of each Kinesis record until it is sent for the first time."""

    def copy(self) -> "WriteCounters":
        errors = dict(self.errors)
        return replace(self, errors=errors, requests=self.requests.copy(), buffering=self.buffering.copy())
