"""The status of a consumer, a producer or a whole fleet. Plain values, ready for `--json`."""

from typing import Literal

import msgspec

from anabranch.records import Record

__all__ = [
    "ConsumerStatus",
    "FleetMember",
    "FleetShard",
    "FleetStatus",
    "FlushReport",
    "ShardState",
    "StopReport",
    "StoppedRecord",
    "StoppedShard",
]


class StoppedShard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that is stopped at a record. It is not handled from there on until a new worker retries."""

    stream: str
    shard_id: str
    reason: str
    position: str | None
    """Of the record; None if unknown, because the owners crashed without reporting it."""
    partition_key: str | None
    record: Record[bytes] | None = None
    """The record itself; None if another worker stopped the shard."""
    error: BaseException | None = None
    """What the handler or the decoder raised; None if another worker stopped the shard."""

    def __str__(self) -> str:
        at = "" if self.position is None else f" at record {self.position} (partition key {self.partition_key!r})"
        return f"{self.stream}/{self.shard_id} is stopped{at}: {self.reason}"


class StopReport(msgspec.Struct, frozen=True):
    """The result of a stop. `clean`: all started records were finished and committed, the leases are free, and no shard
    of this worker is stopped at a record.
    """

    leftovers: tuple[Record[bytes], ...] = ()
    """Records whose handlers still ran at the deadline; they will be handled again."""
    committed: bool = True
    """False if the final checkpoint could not be written: records finished since the last one will be handled again."""
    released: bool = True
    """False if the store did not answer: the leases become free only after their expiry."""
    stopped: tuple[StoppedShard, ...] = ()
    """The shards of this worker that are stopped at a record."""

    @property
    def clean(self) -> bool:
        return not self.leftovers and self.committed and self.released and not self.stopped


class FlushReport(msgspec.Struct, frozen=True):
    """The result of a flush. Failed records are raised, not reported here."""

    complete: bool = True
    """False if the deadline came first."""
    pending_count: int = 0
    """Records that were still being sent at the deadline; the producer continues to send them."""


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """One shard that this process holds."""

    stream: str
    shard_id: str
    phase: str
    """reading, ended, stopped."""
    reason: str | None
    """Why it is stalled; None if it is not."""
    checkpoint: str | None
    millis_behind_latest: int | None
    unfinished_count: int
    finished_count: int
    held_bytes: int
    fence_token: int


class ConsumerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """This process, now."""

    app: str | None
    member_id: str | None
    """None before the consumer has joined its application, and after the run."""
    fenced: bool
    """True if it must not start handler calls: it has not joined, the run is over, or no heartbeat was acknowledged in
    time."""
    paused: bool
    shards: tuple[ShardState, ...]
    budget_used_bytes: int
    budget_limit_bytes: int


class FleetMember(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a worker process, as seen from outside."""

    member_id: str
    worker_id: str
    state: Literal["live", "silent", "dead", "sealed", "left"]
    """silent: it sent no heartbeat for its expiry; dead: its process is known to be dead; sealed: the other workers
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
    millis_behind_latest: int | None = None
    """The largest of its shards; None if unknown."""

    @property
    def is_live(self) -> bool:
        return self.state == "live"


class StoppedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record at which a shard stopped."""

    reason: str
    position: str | None
    partition_key: str | None
    member_id: str
    stopped_seconds: float
    """Wall-clock time, in seconds since 1970."""


class FleetShard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of an application, from its lease rows."""

    stream: str
    shard_id: str
    state: Literal["moving", "stalled", "stopped", "paused", "waiting", "orphaned", "unowned", "finished"]
    """stalled: its owner reports the reason; stopped: at a record that could not be handled; waiting: for its
    parents; orphaned: its owner sends no heartbeats; unowned: no worker holds it."""
    reason: str | None
    """Why it makes no progress; None if it does, or is finished."""
    owner: str | None
    """The member that holds its lease."""
    worker_id: str | None
    checkpoint: str | None
    """All records up to here are handled. None if none is; reading starts at `starts_at`."""
    starts_at: str
    checkpointed_seconds: float | None
    """When the checkpoint was written, in seconds since 1970."""
    millis_behind_latest: int | None
    """From its owner's status; None if unknown, or if the status is not new."""
    records_per_second: float | None
    records_handled: int
    waits_for: tuple[str, ...]
    """Its unfinished parents."""
    children: tuple[str, ...]
    stopped: StoppedRecord | None
    takes_without_progress: int
    fence_token: int


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An application with all its members and shards, from its lease store."""

    app: str
    created_seconds: float
    streams: tuple[str, ...]
    members: tuple[FleetMember, ...]
    shards: tuple[FleetShard, ...]
    unreported_count: int
    """Shards of live members without a report: those just taken and, if a member holds more than 20, those that are
    least behind."""

    @property
    def live_members(self) -> tuple[FleetMember, ...]:
        return tuple(member for member in self.members if member.is_live)

    @property
    def unfinished_shards(self) -> tuple[FleetShard, ...]:
        return tuple(shard for shard in self.shards if shard.state != "finished")

    @property
    def stalled_shards(self) -> tuple[FleetShard, ...]:
        """Unfinished shards in any state other than "moving"."""
        return tuple(shard for shard in self.unfinished_shards if shard.state != "moving")

    @property
    def millis_behind_latest(self) -> int | None:
        """The largest of all shards; None if unknown."""
        lags = [shard.millis_behind_latest for shard in self.shards]
        lags += [member.millis_behind_latest for member in self.members]  # of shards that its status does not name
        return max((lag for lag in lags if lag is not None), default=None)

    @property
    def records_per_second(self) -> float:
        return sum(member.records_per_second or 0.0 for member in self.members)
