"""The rows of a lease store: the persistent state of an application.

An application has one `AppRow`, a `StreamRow` for each stream, a `LeaseRow` for each shard, a `MemberRow` for each run
of a worker process, and `ControlRow`s for commands. Rows are immutable; every write replaces one row under a condition.

- Rows name members, never worker ids. A member is one run of one process, so two processes are never confused.
- The `version` of a lease grows by one with every write, its `epoch` with every take. Neither ever goes back.
- The `watermark` only advances within one `seek_epoch`. A finish is final within one generation.
- A newer minor version may add fields to a row, at its top level. Every write of an older one keeps them, in `extra`.
- The garbage collector does not track lease rows and what is in them: nothing in a row refers back, and a worker may
  replace thousands of rows a second.
"""

from base64 import urlsafe_b64encode
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, Literal

import msgspec

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import TRIM_HORIZON, Position, StartingPosition
from anabranch.reasons import Reason

OrderMode = Literal["shard", "key", "none"]

PROTOCOL: Final = "1.0"
"""The version of the rows and their meaning. A worker does not join a fleet with a higher major version (rule U2)."""


Place = Literal["here", "arriving", "leaving", "moved"]


class AppRow(msgspec.Struct, frozen=True, kw_only=True):
    """The application's identity (rule L14). A running process never creates a second one."""

    app: str
    app_id: str
    """Random. Another id under the same name means that the store was reset."""
    created_wall_ms: int
    incarnation: str = ""
    """The storage that the fleet trusts. A new one is recorded only after the longest expiry (rule L13)."""
    watch: int = 0
    """Grows while somebody looks at the fleet; then members write their status more often."""
    place: Place = "here"
    """Workers start only `here`. `arriving`, `leaving`: its rows are being copied. `moved`: it is elsewhere now."""
    other_store: str = ""
    """The URL of the store that it comes from, or moves to; after the move, also a line with its storage."""
    extra: dict[str, Any] = {}

    @property
    def other_url(self) -> str:
        return self.other_store.partition("\n")[0]

    @property
    def other_storage(self) -> str:
        return self.other_store.partition("\n")[2]


class FanOutConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """The stream consumer through which an application reads a stream with enhanced fan-out."""

    name: str
    arn: str = ""
    """Empty while it is being registered."""
    state: Literal["registering", "registered", "found", "removing"]
    """`found`: it existed before the application did, so the application never removes it."""


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
    fanout: FanOutConsumer | None = None
    """None if no worker has read the stream with fan-out."""
    version: int = 0
    extra: dict[str, Any] = {}


class LeaseKey(msgspec.Struct, frozen=True, order=True, gc=False):
    stream_key: str
    generation: int
    shard_id: str

    @property
    def stream_name(self) -> str:
        return self.stream_key.split(":")[1]

    @property
    def short_name(self) -> str:
        """At most 30 characters for any stream and shard, for rows that must stay small."""
        number = self.shard_id.removeprefix(_SHARD_PREFIX)
        is_usual = len(number) == _SHARD_DIGITS and number.isascii() and number.isdigit()
        shard = str(int(number)) if is_usual else f"~{short_id(self.shard_id)}"
        return f"{short_id(self.stream_key)}/{self.generation}/{shard}"


_SHARD_PREFIX: Final = "shardId-"
_SHARD_DIGITS: Final = 12


@lru_cache(10_000)
def short_id(name: str) -> str:
    """Six characters that stand for a long name: 36 bits of its digest. They are compared, never looked up."""
    return urlsafe_b64encode(sha256(name.encode()).digest()).decode()[:6]


def parse_short_name(name: str, stream_keys: Iterable[str]) -> LeaseKey | None:
    """The lease with this short name, if it is of one of these streams; None if that cannot be told."""
    stream, _, rest = name.partition("/")
    generation, _, shard = rest.partition("/")
    known = next((key for key in stream_keys if short_id(key) == stream), None)
    if known is None or not generation.isdecimal() or not shard.isdecimal():
        return None
    return LeaseKey(known, int(generation), f"{_SHARD_PREFIX}{int(shard):0{_SHARD_DIGITS}d}")


class OpenKey(msgspec.Struct, frozen=True, gc=False):
    """A partition key with an unfinished record between watermark and frontier (rule M1)."""

    digest: bytes
    """Eight bytes of the partition key's digest. A collision repeats records, but never skips one."""
    first_open: Position
    attempts: int = 0
    state: Literal["open", "dead_lettering", "skipping"] = "open"
    """What becomes of its first open record. `dead_lettering`: its letter may be written or not; every owner writes it
    again, and none calls the handler (rule D1). `skipping`: an operator requested it (rule C3).
    """
    error_type: str = ""
    fingerprint: str = ""
    """Error type and fingerprint of the letter, for an owner that did not see the error."""


class Checkpoint(msgspec.Struct, frozen=True, gc=False):
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
    """All records that arrived before this time, by the service's clock, were handled, here or in parents (rule T4)."""


class Finish(msgspec.Struct, frozen=True):
    """How a shard ended."""

    reason: Literal["end", "trimmed"]
    children: tuple[str, ...] = ()


class Stopped(msgspec.Struct, frozen=True):
    """Why a shard is stopped at a record (rule D4). Its lease is kept."""

    reason: Reason
    position: Position | None
    partition_key: str | None
    member_id: str
    at_wall_ms: int


RESTORED_VERSION_MIN: Final = 1_000_000_000
"""A deleted row is created again with the time in seconds as its version: no other row has so high a one (rule L18)."""


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    """Takes since the last commit that advanced. A high number shows a record that kills its owners (rule D5)."""
    records_handled: int = 0
    checkpointed_at_wall_ms: int | None = None
    extra: dict[str, Any] = {}

    @property
    def is_finished(self) -> bool:
        return self.finish is not None

    @property
    def fence_token(self) -> int:
        """Only grows, also from parent to child (rule U3)."""
        return (self.key.generation << 32) | self.epoch


class SubscriptionStatus(msgspec.Struct, frozen=True, array_like=True):
    """What a member reports about a shard's subscription (enhanced fan-out)."""

    state: str
    seconds: int | None = None
    """Since the present subscription was accepted; None if there is none."""
    renewal_count: int = 0
    event_seconds_ago: float | None = None
    reason_code: str | None = None
    """Why it is not active."""


class ShardStatus(msgspec.Struct, frozen=True, array_like=True):
    """What a member reports about one of its shards."""

    lease: str
    """The short name of its lease."""
    reason: Reason | None = None
    """Why it is stalled; None if it is not."""
    millis_behind_latest: int | None = None
    records_per_second: float = 0.0
    subscription: SubscriptionStatus | None = None
    """With fan-out."""
    lag_ms: int | None = None
    """The age of its oldest unfinished record (rule O4); None if unknown."""
    retention_left_seconds: int | None = None
    """Until that record is trimmed."""
    handled_through_seconds: float | None = None
    """When that record arrived, by the service's clock. If its worker dies, the shard's lag is the time since then."""


class StatusRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a member reports about its shards, for those who look at the fleet. No worker reads it."""

    member_id: str
    revision: int
    """Grows with each write, so that a viewer can recognise a new status."""
    shard_count: int = 0
    stalled_count: int = 0
    millis_behind_latest: int | None = None
    """The largest of all shards."""
    records_per_second: float = 0.0
    """Of all shards."""
    shards: tuple[ShardStatus, ...] = ()
    """The worst, at most 20: the one furthest behind, then stalled ones, then those whose subscription is not active,
    then the others by their lag.
    """
    extra: dict[str, Any] = {}


REQUESTS_MAX: Final = 8
"""Open hand-off requests in one member's row, so that the row stays small for any number of shards."""
CHANGED_MAX: Final = 8
"""Changed leases that a member's row names, for the same reason."""
WORKER_ID_BYTES_MAX: Final = 64


class HandOffRequest(msgspec.Struct, frozen=True):
    """A member asks the owner to give it a lease (rule L12)."""

    key: LeaseKey
    requester: str

    @property
    def short_name(self) -> str:
        """Its name in the owner's row."""
        return f"{self.key.short_name}:{short_id(self.requester)}"


class LookRequest(msgspec.Struct, frozen=True):
    """A member found leases without a row. It asks each other one to look at the rows of all leases that it holds, and
    to create those that somebody has deleted (rule L18).
    """

    nonce: str
    """Used once, because the heartbeats of a stalled member still carry its answers to earlier requests."""

    @property
    def short_name(self) -> str:
        """Its name among the hand-off requests in a member's row."""
        return f"{LOOK_PREFIX}{short_id(self.nonce)}"


LOOK_PREFIX: Final = "look:"


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a worker process in the fleet (rules L1 to L3). It stays under 1 KB for any number of shards."""

    member_id: str
    """The worker's id, `#`, and 128 random bits."""
    counter: int = 0
    state: Literal["live", "sealed", "left"] = "live"
    """Sealed and left are final. Only then can this member's leases be taken."""
    expiry_ms: int
    """After this long without a new counter, others may seal this member."""
    protocol: str = PROTOCOL
    order: OrderMode = "shard"
    """A fleet must share protocol and order (rule U2)."""
    streams: tuple[str, ...] = ()
    """Short ids (`short_id`) of the keys of the streams that this member reads."""
    shards_max: int | None = None
    """How many shards this member holds at most; all members respect it."""
    load: int = 0
    change_count: int = 0
    """How many leases this member has created or changed, commits excluded."""
    changed: tuple[str, ...] = ()
    """Short names of the leases that it changed last, at most 8, the newest last. Others read these (rule R0)."""
    reads_healthy: bool = True
    draining: bool = False
    wanted: tuple[str, ...] = ()
    """Short names of the requests that this member has not answered yet, at most 8."""
    joined_wall_ms: int = 0
    extra: dict[str, Any] = {}

    @property
    def worker_id(self) -> str:
        return self.member_id.rpartition("#")[0] or self.member_id

    def reads(self, stream_key: str) -> bool:
        """Whether it reads the stream. A row that names no stream does not say."""
        return not self.streams or short_id(stream_key) in self.streams


class HeartbeatWrite(msgspec.Struct, frozen=True, kw_only=True):
    """What a heartbeat writes."""

    member_id: str
    attempt: int
    """Grows with every attempt, including failed ones. The stored counter becomes the larger of the two (rule L2)."""
    load: int = 0
    change_count: int = 0
    changed: tuple[str, ...] = ()
    reads_healthy: bool = True
    draining: bool = False
    answered: tuple[str, ...] = ()
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


class Poll(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reads about once a second."""

    app: AppRow | None
    """None, or another `app_id`: the store was reset (rule L14)."""
    members: tuple[MemberRow, ...]
    """In the order of their ids, whatever their state."""
    commands: tuple[ControlRow, ...]
    """The pending ones, in the order in which they were requested, then of their ids."""
    evidence: str | None
    """The identity of the storage that gave this answer (rule L13); None if the server does not offer it."""
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
