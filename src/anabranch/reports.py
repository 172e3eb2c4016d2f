"""The status of a consumer, a producer or a whole fleet. Plain values, ready for `--json`."""

from typing import Literal

import msgspec

from anabranch.measures import Counters, TimeBuckets, WriteCounters
from anabranch.reasons import Reason, WorkerDead, WorkerSilent
from anabranch.records import Record


class StoppedShard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that is stopped at a record. It is not handled from there on until a new worker retries."""

    stream: str
    shard_id: str
    reason: Reason
    position: str | None
    """Of the record; None if unknown, because the owners crashed without reporting it."""
    partition_key: str | None
    record: Record[bytes] | None = None
    """The record itself; None if another worker stopped the shard."""
    error: BaseException | None = None
    """What the handler or the decoder raised; None if another worker stopped the shard."""

    def __str__(self) -> str:
        return f"{self.stream}/{self.shard_id} is {self.reason}"


class StopReport(msgspec.Struct, frozen=True):
    """The result of a stop. `clean`: all started records are committed, all leases are free, no shard is stopped."""

    leftovers: tuple[Record[bytes], ...] = ()
    """Records whose handlers still ran at the deadline; they will be handled again."""
    committed: bool = True
    """False if the final checkpoint could not be written: records finished since the last one will be handled again."""
    released: bool = True
    """False if the store did not answer: the leases become free only after their expiry."""
    stopped: tuple[StoppedShard, ...] = ()
    """The shards of this worker that are stopped at a record."""
    skipped_count: int = 0
    """Records that were not handled in this run, by the policy or by an operator."""
    dead_letter_count: int = 0
    """Records that this run wrote to the dead letters."""

    @property
    def clean(self) -> bool:
        return not self.leftovers and self.committed and self.released and not self.stopped


class FlushReport(msgspec.Struct, frozen=True):
    """The result of a flush. Failed records are raised, not reported here."""

    complete: bool = True
    """False if the deadline came first."""
    pending_count: int = 0
    """Records that were still being sent at the deadline; the producer continues to send them."""


class SubscriptionState(msgspec.Struct, frozen=True, kw_only=True):
    """How a shard is read with fan-out."""

    state: str
    """`active`: records are pushed; `polled`: it is polled, as `reason` says; `waiting`, `subscribing`, `taken_over`,
    `full`, `closed`: it subscribes soon; `ended`: it was read to its end."""
    seconds: float | None = None
    """For how long the present subscription is active; None if it is not."""
    renewal_count: int = 0
    event_seconds_ago: float | None = None
    """When the last event came, with records or without; None if there was none."""
    reason: Reason | None = None
    """Why it is not active."""


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """One shard that this process holds."""

    stream: str
    shard_id: str
    phase: str
    """`reading`; `ended`: its last record was read; `finishing`: its end is being written; `draining`: it waits for
    running calls before it moves; `failed`, `stopping`, `stopped`: a record cannot be handled."""
    reason: Reason | None
    """Why it is stalled; None if it is not."""
    checkpoint: str | None
    lag: float | None
    """Seconds: the age of its oldest unfinished record, by the service's clock; if there is none, how far its reads are
    behind the tip. None until it was read."""
    retention_left: float | None
    """Seconds until its oldest unfinished record is trimmed; None until it was read."""
    millis_behind_latest: int | None
    """As Kinesis said: how far the last read was behind the tip. What was read may still be unfinished."""
    checkpoint_age: float | None
    """Seconds since its checkpoint was last written; None if it never was."""
    unfinished_count: int
    counters: Counters
    """Since the lease was taken."""
    held_bytes: int
    fence_token: int
    subscription: SubscriptionState | None = None
    """With `read="fanout"`."""


class ConsumerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """This process, now."""

    app: str | None
    member_id: str | None = None
    """None before the consumer has joined its application, and after the run."""
    fenced: bool = True
    """True if it may start no handler calls: it has not joined, has left, or no heartbeat was acknowledged in time."""
    paused: bool = False
    shards: tuple[ShardState, ...] = ()
    budget_used_bytes: int
    budget_limit_bytes: int

    @property
    def lag(self) -> float | None:
        """Seconds: the largest of its shards; None if unknown."""
        return max((shard.lag for shard in self.shards if shard.lag is not None), default=None)


class ConsumerMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a consumer, now."""

    app: str
    counters: Counters
    """Since the run began, also of shards that it no longer holds."""
    shards: tuple[ShardState, ...]
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


class HealthReport(msgspec.Struct, frozen=True):
    """Whether a consumer or producer should be restarted, and whether it works."""

    live: bool
    """False only if a restart helps: its event loop is blocked for good, or its heartbeats have ended."""
    ready: bool
    """Whether it handles all of its shards, or can write."""
    reasons: tuple[str, ...] = ()
    """Why it is not ready, or not live."""


class ShardWrites(msgspec.Struct, frozen=True, kw_only=True):
    """One shard, as a producer sees it."""

    shard_id: str
    rate_share: float
    """The share of the full rate at which the producer writes to it, from 0 to 1. Throttling lowers it."""
    paused: float
    """For how many seconds nothing is sent to it; 0 if it is not paused."""
    counters: WriteCounters
    """Failures, requests and buffering are counted by stream only."""


class StreamWrites(msgspec.Struct, frozen=True, kw_only=True):
    """One stream, as a producer sees it."""

    stream: str
    pending_count: int
    """Records without an outcome, in flight or not."""
    requests_in_flight: int
    unseen_failure_count: int
    """Failed records that nobody has seen yet."""
    paused: float
    """For how many seconds nothing is sent, because whole requests failed; 0 if it is not paused."""
    failures_in_a_row: int
    """Of whole requests."""
    aggregates: bool
    """False with `aggregate=None`, or if the stream distributes records itself (AUTO)."""
    counters: WriteCounters
    shards: tuple[ShardWrites, ...]
    """Those that it has written to. Empty until they are known."""


class ProducerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """This producer, now."""

    error: str | None
    """Why it has failed; None if it has not."""
    buffered_bytes: int
    buffer_limit_bytes: int
    waiting_count: int
    """Puts that wait for buffer space."""
    streams: tuple[StreamWrites, ...] = ()

    @property
    def pending_count(self) -> int:
        return sum(stream.pending_count for stream in self.streams)


class FleetMember(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a worker process, as seen from outside."""

    member_id: str
    worker_id: str
    state: Literal["live", "silent", "dead", "evicted", "left"]
    """silent: it sent no heartbeat for its expiry; dead: its process is known to be dead; evicted: the other workers
    declared it dead; left: it stopped gracefully."""
    heartbeat_seen: bool
    """Whether a heartbeat was seen since the observer started. Always False on the first look."""
    heartbeat_age: float
    """Seconds since the last heartbeat that was seen, or since the first look."""
    expiry: float
    """Seconds without a heartbeat after which the others may declare it dead."""
    joined_seconds: float
    """Wall-clock time of its machine, in seconds since 1970."""
    shard_count: int
    shards_max: int | None
    records_per_second: float | None
    """None if unknown: until a new status is seen."""
    reads_healthy: bool
    draining: bool
    """It is stopping, and takes no more shards."""
    status_seen: bool = False
    """Whether it has just written a new status. Always False on the first look."""
    lag: float | None = None
    """Seconds: the largest of its shards; None if unknown."""
    millis_behind_latest: int | None = None
    """The largest of its shards; None if unknown."""

    @property
    def is_live(self) -> bool:
        return self.state == "live"

    @property
    def silence(self) -> Reason | None:
        """Why its shards do not move; None if it sends heartbeats, or holds none any more."""
        if self.state == "dead":
            return WorkerDead(worker_id=self.worker_id)
        if self.state == "silent":
            return WorkerSilent(worker_id=self.worker_id, seconds=self.heartbeat_age)
        return None


class StoppedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record at which a shard stopped."""

    reason: Reason
    position: str | None
    partition_key: str | None
    member_id: str
    stopped_seconds: float
    """Wall-clock time, in seconds since 1970."""


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """A command to a fleet, and its result."""

    command_id: str
    action: str
    stream: str
    shard_id: str
    position: str | None
    """The record to skip; None for other commands."""
    requested_by: str
    requested_seconds: float
    """Wall-clock time, in seconds since 1970."""
    state: Literal["pending", "applied", "refused", "expired"]
    result: str
    """In words; empty while it is pending."""


class FleetSubscription(msgspec.Struct, frozen=True, kw_only=True):
    """How the owner of a shard reads it with fan-out, as it last reported."""

    state: str
    """As in `SubscriptionState`."""
    seconds: float | None
    """For how long the subscription was active; None if it was not."""
    renewal_count: int
    event_seconds_ago: float | None
    reason_code: str | None
    """Why it was not active."""


class FleetShard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of an application, from its lease rows."""

    stream: str
    shard_id: str
    state: Literal["reading", "stalled", "stopped", "paused", "waiting", "orphaned", "unowned", "finished"]
    """stalled: its owner reports the reason; stopped: at a record that could not be handled; waiting: for its
    parents; orphaned: its owner sends no heartbeats; unowned: no worker holds it."""
    reason: Reason | None
    """Why it makes no progress; None if it does, or is finished."""
    owner: str | None
    """The member that holds its lease."""
    worker_id: str | None
    checkpoint: str | None
    """All records up to here are handled. None if none is; reading starts at `starts_at`."""
    starts_at: str
    checkpointed_seconds: float | None
    """When the checkpoint was written, in seconds since 1970."""
    lag: float | None
    """Seconds: the age of its oldest unfinished record, by the service's clock; if there is none, how far its reads are
    behind the tip. Reported by its owner; after the owner's death, its last report plus the time since. For a stopped
    shard without a report: the age of its record, by this machine's clock. None if unknown."""
    retention_left: float | None
    """Seconds until its oldest unfinished record is trimmed; None if unknown."""
    millis_behind_latest: int | None
    """How far the last read was behind the tip, from its owner's status; None without a new status."""
    records_per_second: float | None
    records_handled: int
    waits_for: tuple[str, ...]
    """Its unfinished parents."""
    children: tuple[str, ...]
    stopped: StoppedRecord | None
    takes_without_progress: int
    fence_token: int
    subscription: FleetSubscription | None = None
    """With fan-out, from its owner's status."""


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An application with all its members and shards, from its lease store."""

    app: str
    created_seconds: float
    streams: tuple[str, ...]
    members: tuple[FleetMember, ...]
    shards: tuple[FleetShard, ...]
    unreported_count: int
    """Shards of live members without a report. They were just taken, or their member holds more than 20: it reports on
    the 20 worst ones.
    """

    @property
    def live_members(self) -> tuple[FleetMember, ...]:
        return tuple(member for member in self.members if member.is_live)

    @property
    def unfinished_shards(self) -> tuple[FleetShard, ...]:
        return tuple(shard for shard in self.shards if shard.state != "finished")

    @property
    def stalled_shards(self) -> tuple[FleetShard, ...]:
        """Unfinished shards in any state other than "reading"."""
        return tuple(shard for shard in self.unfinished_shards if shard.state != "reading")

    @property
    def lag(self) -> float | None:
        """Seconds: the largest of all shards; None if unknown."""
        return max((shard.lag for shard in self.unfinished_shards if shard.lag is not None), default=None)

    @property
    def retention_left(self) -> float | None:
        """Seconds until the first unfinished record is trimmed; None if unknown."""
        left = [shard.retention_left for shard in self.unfinished_shards if shard.retention_left is not None]
        return min(left, default=None)

    @property
    def millis_behind_latest(self) -> int | None:
        """The largest of all shards; None if unknown."""
        lags = [shard.millis_behind_latest for shard in self.shards]
        lags += [member.millis_behind_latest for member in self.members]  # of shards that its status does not name
        return max((lag for lag in lags if lag is not None), default=None)

    @property
    def records_per_second(self) -> float:
        return sum(member.records_per_second or 0.0 for member in self.members)


class DesiredWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers a fleet should have, and why."""

    workers: int
    live_workers: int
    """Those that run now and are not stopping."""
    shard_count: int
    """Shards that workers can handle now."""
    lag: float | None
    """Seconds: the largest lag of a shard that more workers could help with; None if unknown."""
    records_per_second: float
    why: str
