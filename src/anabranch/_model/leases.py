"""The rows of a lease store: the persistent state of an application.

An application has one `AppRow`, a `StreamRow` for each stream, a `LeaseRow` for each shard, a `MemberRow` for each run
of a worker process, and `ControlRow`s for commands. Rows are immutable; every write replaces one row under a condition.

- Rows name members, never worker ids. A member is one run of one process, so two processes are never confused.
- The `version` of a lease grows by one with every write, its `epoch` with every take. Neither ever goes back.
- The `watermark` only advances within one `seek_epoch`. A finish is final within one generation.
- A newer minor version may add fields to a row, at its top level. An older one keeps them in `extra`.
"""

from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import TRIM_HORIZON, Position, StartingPosition

OrderMode = Literal["shard", "key", "none"]

PROTOCOL: Final = "1.0"
"""The version of the rows and their meaning. A worker does not join a fleet with a higher major version (rule U2)."""


class AppRow(msgspec.Struct, frozen=True, kw_only=True):
    """The application's identity (rule L14). A running process never creates a second one."""

    app: str
    app_id: str
    """Random. Another id under the same name means that the store was reset."""
    created_wall_ms: int
    incarnation: str = ""
    """The storage that the fleet trusts. Another one is recorded only after the longest expiry, so that a process that
    starts just after a rollback knows of it too (rule L13).
    """
    watch: int = 0
    """Grows while somebody looks at the fleet; then members write their status more often."""
    extra: dict[str, Any] = {}
    """Fields of a newer version. Every write keeps them."""


class StreamRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stream, as it was when the application first saw it."""

    stream_key: str
    """`account:stream:creationEpochSeconds`, as in KCL. A stream that was created again has another key."""
    name: str
    arn: str
    created_seconds: float
    origin: StartingPosition
    """Where its root leases start. `latest` is stored here as a time, once for all workers (rule T1)."""
    generation: int = 0
    bootstrapped: bool = False
    """True once all root leases exist; no worker reads before that (rule S2)."""
    version: int = 0
    extra: dict[str, Any] = {}
    """Fields of a newer version. Every write keeps them."""


class LeaseKey(msgspec.Struct, frozen=True, order=True):
    stream_key: str
    generation: int
    shard_id: str


class OpenKey(msgspec.Struct, frozen=True):
    """A partition key with an unfinished record between watermark and frontier (rule M1)."""

    digest: bytes
    """Eight bytes of the partition key's digest. A collision repeats records, but never skips one."""
    first_open: Position
    attempts: int = 0
    state: Literal["open", "dead_lettering"] = "open"


class Checkpoint(msgspec.Struct, frozen=True):
    """How far a shard is handled.

    All records up to `watermark` are finished. Between `watermark` and `frontier`, a record is unfinished only if its
    key is in `open_keys` and it is at or after that key's first open record.
    """

    watermark: Position | None = None
    """None if nothing is finished: reading starts at the lease's `start`."""
    frontier: Position | None = None
    open_keys: tuple[OpenKey, ...] = ()
    seek_epoch: int = 0
    order: OrderMode = "shard"
    seen_through_seconds: float | None = None
    """All records that arrived before this time, by the service's clock, were handled. If the shard was never read:
    they were in its parents (rule T4).
    """


class Finish(msgspec.Struct, frozen=True):
    """How a shard ended."""

    reason: Literal["end", "trimmed"]
    children: tuple[str, ...] = ()


class Stopped(msgspec.Struct, frozen=True):
    """Why a shard is stopped at a record (rule D4). Its lease is kept."""

    reason: str
    position: Position | None
    partition_key: str | None
    member_id: str
    at_wall_ms: int


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    key: LeaseKey
    start: StartingPosition = TRIM_HORIZON
    """Where reading starts without a watermark: the origin for a root, the beginning for every other shard."""
    waits_for: tuple[str, ...] = ()
    """The parents that had a row when this one was created; never changes (rule S1)."""
    hash_key_range: HashKeyRange | None = None
    """Kept to know the shard's lineage after it has left the listing."""
    owner: str | None = None
    version: int = 0
    epoch: int = 0
    """The low part of the fence token: above all parents at the first start, one more with each take (rule U3)."""
    checkpoint: Checkpoint = Checkpoint()
    finish: Finish | None = None
    stopped: Stopped | None = None
    paused: bool = False
    takes_without_progress: int = 0
    """Grows with each take, and falls to zero with each commit that advances. A high number shows a record that kills
    its owners (rule D5).
    """
    records_handled: int = 0
    checkpointed_at_wall_ms: int | None = None
    extra: dict[str, Any] = {}
    """Fields of a newer version. Every write keeps them."""

    @property
    def is_finished(self) -> bool:
        return self.finish is not None

    @property
    def fence_token(self) -> int:
        """Only grows, also from parent to child (rule U3)."""
        return (self.key.generation << 32) | self.epoch


class ShardStatus(msgspec.Struct, frozen=True, array_like=True):
    """What a member reports about one of its shards."""

    shard_id: str
    reason: str | None = None
    """Why it is stalled; None if it is not."""
    millis_behind_latest: int | None = None
    records_per_second: float = 0.0
    stream_key: str = ""


class StatusRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a member reports about its shards, for those who look at the fleet. No worker reads it."""

    member_id: str
    revision: int
    """Grows with each write. A viewer sees by it that the status is new."""
    shard_count: int = 0
    stalled_count: int = 0
    millis_behind_latest: int | None = None
    """The largest of all shards."""
    records_per_second: float = 0.0
    """Of all shards."""
    shards: tuple[ShardStatus, ...] = ()
    """The worst, at most 20: stalled ones first, then those furthest behind."""
    extra: dict[str, Any] = {}
    """Fields of a newer version. Every write keeps them."""


REQUESTS_MAX: Final = 8
"""Open hand-off requests in one member's row, so that the row stays small for any number of shards."""


class HandOffRequest(msgspec.Struct, frozen=True):
    """A member asks the owner to give it a lease (rule L12)."""

    key: LeaseKey
    requester: str


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a worker process in the fleet (rules L1 to L3)."""

    member_id: str
    worker_id: str
    counter: int = 0
    state: Literal["live", "sealed", "left"] = "live"
    """Sealed and left are final. Only then can this member's leases be taken."""
    expiry_ms: int
    """After this long without a new counter, others may seal this member."""
    protocol: str = PROTOCOL
    fingerprint: str = ""
    """Settings that a fleet must share (rule U2)."""
    shards_max: int | None = None
    """How many shards this member holds at most; all members respect it."""
    load: int = 0
    lease_version: int = 0
    """Grows when this member's leases change: then others read the lease rows again."""
    reads_healthy: bool = True
    draining: bool = False
    wanted: tuple[HandOffRequest, ...] = ()
    streams: tuple[str, ...] = ()
    """The streams that this member reads."""
    joined_wall_ms: int = 0
    extra: dict[str, Any] = {}
    """Fields of a newer version. Every write keeps them."""


class HeartbeatWrite(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat writes."""

    member_id: str
    attempt: int
    """Grows with every attempt, including failed ones. The stored counter becomes the larger of the two (rule L2)."""
    load: int = 0
    lease_version: int = 0
    reads_healthy: bool = True
    draining: bool = False
    answered: tuple[HandOffRequest, ...] = ()
    """Requests that this member has answered; they are removed from `wanted`."""


class Conflict(msgspec.Struct, frozen=True):
    """A lease was not written because its condition failed. `row` is the stored row; None if there is none."""

    row: LeaseRow | None


class ControlRow(msgspec.Struct, frozen=True, kw_only=True):
    """A command from outside the fleet; only the lease's owner applies it (rule C3)."""

    command_id: str
    action: str
    key: LeaseKey | None = None
    arguments: dict[str, str] = {}
    requested_by: str = ""
    requested_wall_ms: int = 0
    state: Literal["pending", "applied", "refused", "expired"] = "pending"
    result: str = ""
    extra: dict[str, Any] = {}
    """Fields of a newer version. Every write keeps them."""


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reads about once a second."""

    app: AppRow | None
    """None, or another `app_id`: the store was reset (rule L14)."""
    members: tuple[MemberRow, ...]
    """In the order of their ids, whatever their state."""
    commands: tuple[ControlRow, ...]
    """The pending ones, in the order in which they were requested, then of their ids."""
    evidence: str | None
    """The identity of the storage that gave this answer (rule L13). None if the server does not offer it with each
    answer; then only rows that are older than acknowledged writes show a roll-back.
    """
    known_dead: tuple[str, ...] = ()
    """Live members whose process is known to be dead, so that they may be sealed without waiting (rule L17)."""


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    row: MemberRow | None
    """As it is stored now; None if there is none."""
    counter_before: int | None = None
    """The stored counter before this write. Lower than an acknowledged one: the store was rolled back (rule L13)."""
    evidence: str | None = None
    """As in `Poll`."""


class LeaseRows(list[LeaseRow]):
    """Leases in the order of their keys, and which storage they came from (`evidence`, as in `Poll`)."""

    def __init__(self, rows: Iterable[LeaseRow] = (), evidence: str | None = None) -> None:
        super().__init__(rows)
        self.evidence = evidence
