"""The rows of a lease store: what a fleet remembers about an application.

An application has one `AppRow`, a `StreamRow` for each stream that it reads, a `LeaseRow` for each shard, a
`MemberRow` for each life of a worker process, and `ControlRow`s for commands. Rows are immutable; every write
replaces one row under a condition.

Rules that hold in every row:
- rows name members, never worker ids: a member is one life of one process, so two processes can never pass for
  each other;
- `version` of a lease grows by one with every write, `epoch` with every take, and neither ever goes back;
- `watermark` only advances within one `seek_epoch`; `finished` is final within one generation.
"""

from typing import Final, Literal

import msgspec

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.sequence_numbers import Position
from anabranch._model.start_positions import TRIM_HORIZON, StartingPosition

__all__ = [
    "PROTOCOL",
    "AppRow",
    "Checkpoint",
    "Conflict",
    "ControlRow",
    "Finish",
    "HandOffRequest",
    "HeartbeatWrite",
    "LeaseKey",
    "LeaseRow",
    "MemberRow",
    "OpenKey",
    "OrderMode",
    "ShardStatus",
    "Stopped",
    "StreamRow",
]

OrderMode = Literal["shard", "key", "none"]

PROTOCOL: Final = "1.0"
"""Of the rows and what they mean, major and minor: a worker joins no fleet of a higher major (rule U2)."""


class AppRow(msgspec.Struct, frozen=True, kw_only=True):
    """The birth certificate (rule L14): a running process never makes a second one."""

    app: str
    app_id: str
    """A random identity; another one under the same name means that the store was reset."""
    created_wall_ms: int
    incarnation: str = ""
    """The storage that the fleet trusts; another one is recorded only after the longest expiry was waited out, so that
    a process that starts just after a roll-back knows of it too (rule L13).
    """


class StreamRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of the application, as it was when the application first saw it."""

    stream_key: str
    """Identity over re-creation: `account:stream:creationEpochSeconds`, as KCL's multi-stream keys."""
    name: str
    arn: str
    created_seconds: float
    origin: StartingPosition
    """Where its root leases start; `latest` is pinned here as a time, once for all workers (rule T1)."""
    generation: int = 0
    bootstrapped: bool = False
    """True once every root lease exists; nobody reads before that (rule S2)."""
    version: int = 0


class LeaseKey(msgspec.Struct, frozen=True, order=True):
    stream_key: str
    generation: int
    shard_id: str


class OpenKey(msgspec.Struct, frozen=True):
    """A partition key with an unfinished record between watermark and frontier (rule M1)."""

    digest: bytes
    """Eight bytes of the partition key's digest. A clash repeats a record; it never skips one."""
    first_open: Position
    attempts: int = 0
    state: Literal["open", "dead_lettering"] = "open"


class Checkpoint(msgspec.Struct, frozen=True):
    """How far a shard is handled.

    Everything up to `watermark` is finished; of what lies above it, up to `frontier`, a record is finished
    unless its key is in `open_keys` and it is not before that key's first open record.
    """

    watermark: Position | None = None
    """None: nothing is finished; reading starts at the lease's `start`."""
    frontier: Position | None = None
    open_keys: tuple[OpenKey, ...] = ()
    seek_epoch: int = 0
    order: OrderMode = "shard"
    seen_through_seconds: float | None = None
    """What arrived before, by the service's clock, was handled; of a shard that nobody has read yet: was in its parents
    (rule T4).
    """


class Finish(msgspec.Struct, frozen=True):
    """How a shard ended."""

    reason: Literal["end", "trimmed"]
    children: tuple[str, ...] = ()


class Stopped(msgspec.Struct, frozen=True):
    """Why a shard stands still on purpose (rule D4): its lease is kept, and the record is named."""

    reason: str
    position: Position | None
    partition_key: str | None
    member_id: str
    at_wall_ms: int


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    key: LeaseKey
    start: StartingPosition = TRIM_HORIZON
    """Where a shard without a watermark is read from: the pin for a root, its beginning for every other shard."""
    waits_for: tuple[str, ...] = ()
    """The parents that had a row when this one was made; set once (rule S1)."""
    hash_key_range: HashKeyRange | None = None
    """The shard's part of the hash space, so that lineage and strays can be judged after it has left the listing."""
    owner: str | None = None
    version: int = 0
    epoch: int = 0
    """The fence token's low part: one more than any parent's at first start, one more with each take (rule U3)."""
    checkpoint: Checkpoint = Checkpoint()
    finish: Finish | None = None
    stopped: Stopped | None = None
    paused: bool = False
    takes_without_progress: int = 0
    """Grows with each take, falls to zero with each commit that advances: a record that kills its owners shows (rule
    D5).
    """
    records_handled: int = 0
    checkpointed_at_wall_ms: int | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish is not None

    @property
    def fence_token(self) -> int:
        """One integer that only grows along a line of descent (rule U3)."""
        return (self.key.generation << 32) | self.epoch


class ShardStatus(msgspec.Struct, frozen=True, array_like=True):
    """What a member says of one of its shards; kept short, since every heartbeat carries it."""

    shard_id: str
    reason: str | None = None
    """Why it stands still; None while it moves."""
    millis_behind_latest: int | None = None
    records_per_second: float = 0.0
    stream_key: str = ""


class HandOffRequest(msgspec.Struct, frozen=True):
    """A member asks the row's member to give it a lease (rule L12: given, never taken)."""

    key: LeaseKey
    requester: str


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a worker process in the fleet (rules L1 to L3)."""

    member_id: str
    worker_id: str
    counter: int = 0
    state: Literal["live", "sealed", "left"] = "live"
    """Sealed and left are final; only then can this member's leases be taken."""
    expiry_ms: int
    """After this long without a new counter, others may seal this member: always the victim's own number."""
    protocol: str = PROTOCOL
    fingerprint: str = ""
    """Settings that a fleet must share (rule U2)."""
    shards_max: int | None = None
    """How many shards this member takes at most; the balance of every other member respects it."""
    load: int = 0
    lease_version: int = 0
    """Grows when this member's leases change, so that others know when to read the lease rows again."""
    reads_healthy: bool = True
    draining: bool = False
    wanted: tuple[HandOffRequest, ...] = ()
    status: tuple[ShardStatus, ...] = ()
    joined_wall_ms: int = 0


class HeartbeatWrite(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat writes beside the counter."""

    member_id: str
    attempt: int
    """Grows with every attempt, also over failures; the stored counter becomes the larger of the two (rule L2)."""
    load: int = 0
    lease_version: int = 0
    reads_healthy: bool = True
    draining: bool = False
    status: tuple[ShardStatus, ...] = ()
    answered: tuple[HandOffRequest, ...] = ()
    """Requests that this member has answered, to be removed from `wanted`."""


class Conflict(msgspec.Struct, frozen=True):
    """A lease was not written, since its condition did not hold; this is the row as it is now (None: there is none)."""

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
