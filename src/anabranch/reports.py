"""What a consumer says of itself, and what can be said of a whole fleet. Plain values, ready for `--json`."""

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
    """A shard that is stopped at a record: nothing from this record on is handled until a new worker tries again."""

    stream: str
    shard_id: str
    reason: str
    position: str | None
    """Of the record; None if nobody knows it, because its owners died without naming it."""
    partition_key: str | None
    record: Record[bytes] | None = None
    """The record itself; None if another worker stopped the shard."""
    error: BaseException | None = None
    """What the handler or the decoder raised; None if another worker stopped the shard."""

    def __str__(self) -> str:
        at = "" if self.position is None else f" at record {self.position} (partition key {self.partition_key!r})"
        return f"{self.stream}/{self.shard_id} is stopped{at}: {self.reason}"


class StopReport(msgspec.Struct, frozen=True):
    """How a stop went. Clean means: everything started was finished and committed, the leases are free, and no shard of
    this worker is stopped at a record.
    """

    leftovers: tuple[Record[bytes], ...] = ()
    """Records whose handlers still ran at the deadline; they will be handled again."""
    committed: bool = True
    """False if the store took no final checkpoint: what was finished since the last one will be handled again."""
    released: bool = True
    """False if the store gave no answer to the leave: the leases are free only after their expiry."""
    stopped: tuple[StoppedShard, ...] = ()
    """The shards of this worker that are stopped at a record."""

    @property
    def clean(self) -> bool:
        return not self.leftovers and self.committed and self.released and not self.stopped


class FlushReport(msgspec.Struct, frozen=True):
    """How a flush went. What failed for good is not in it: that is raised."""

    complete: bool = True
    """False if the deadline came first."""
    pending_count: int = 0
    """Records that were still on their way then; they stay on it."""


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """One shard that this process holds."""

    stream: str
    shard_id: str
    phase: str
    """reading, ended, stopped."""
    reason: str | None
    """Why it stands still; None while it moves."""
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
    """None until it has joined its application, and after the run."""
    fenced: bool
    """Whether it may start no handler call: it has not joined, the run is over, or no heartbeat was acknowledged for
    too long."""
    paused: bool
    shards: tuple[ShardState, ...]
    budget_used_bytes: int
    budget_limit_bytes: int


class FleetMember(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a worker process, as seen from outside."""

    member_id: str
    worker_id: str
    state: Literal["live", "silent", "dead", "sealed", "left"]
    """silent: its heart was watched and stood still for its expiry; dead: its process is gone for certain; sealed: the
    others have given it up; left: it stopped in order."""
    beats: bool
    """Whether its heart was seen to beat by whoever looks: never on the first look."""
    heartbeat_age: float
    """Seconds since then, or since the first look."""
    expiry: float
    """Seconds without a heartbeat after which the others may give it up."""
    joined_seconds: float
    """Wall-clock time of its own machine, in seconds since 1970."""
    shard_count: int
    shards_max: int | None
    records_per_second: float
    reads_healthy: bool
    draining: bool
    """It stops, and takes nothing more."""

    @property
    def is_live(self) -> bool:
        return self.state == "live"


class StoppedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record at which a shard stopped on purpose."""

    reason: str
    position: str | None
    partition_key: str | None
    member_id: str
    stopped_seconds: float
    """Wall-clock time, in seconds since 1970."""


class FleetShard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of an application, as its rows tell."""

    stream: str
    shard_id: str
    state: Literal["moving", "still", "stopped", "paused", "waiting", "orphaned", "unowned", "finished"]
    """still: held by a live member that names a reason; stopped: at a record that could not be handled; waiting: for
    its parents; orphaned: its owner shows no life; unowned: nobody holds it."""
    reason: str | None
    """Why it does not move; None while it does, and when it is finished."""
    owner: str | None
    """The member that holds its lease."""
    worker_id: str | None
    checkpoint: str | None
    """Everything up to here is handled; None: nothing yet, it starts at `starts_at`."""
    starts_at: str
    checkpointed_seconds: float | None
    """When that was written, in seconds since 1970."""
    millis_behind_latest: int | None
    """As its owner said with its last heartbeat; None where nobody said anything."""
    records_per_second: float | None
    records_handled: int
    waits_for: tuple[str, ...]
    """Its parents that are not finished."""
    children: tuple[str, ...]
    stopped: StoppedRecord | None
    takes_without_progress: int
    fence_token: int


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An application: all its members and shards, as its lease store has them now."""

    app: str
    created_seconds: float
    streams: tuple[str, ...]
    members: tuple[FleetMember, ...]
    shards: tuple[FleetShard, ...]
    unreported_count: int
    """Shards of live members of which no heartbeat has said anything: those just taken, and where a member holds more
    than a heartbeat has room for, those least far behind."""

    @property
    def live_members(self) -> tuple[FleetMember, ...]:
        return tuple(member for member in self.members if member.is_live)

    @property
    def unfinished_shards(self) -> tuple[FleetShard, ...]:
        return tuple(shard for shard in self.shards if shard.state != "finished")

    @property
    def still_shards(self) -> tuple[FleetShard, ...]:
        """Those that do not move, whatever the reason."""
        return tuple(shard for shard in self.unfinished_shards if shard.state != "moving")

    @property
    def millis_behind_latest(self) -> int | None:
        """Of the shard that is furthest behind; None where nobody said anything."""
        lags = [shard.millis_behind_latest for shard in self.shards if shard.millis_behind_latest is not None]
        return max(lags, default=None)

    @property
    def records_per_second(self) -> float:
        return sum(member.records_per_second for member in self.members)
