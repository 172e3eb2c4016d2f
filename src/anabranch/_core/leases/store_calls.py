"""The store calls of the lease protocol as values, and the answers to them.

The core decides which call comes next and never performs one. Its operations are generators: they yield an `Action` and
are resumed with an `Answer`. A driver performs each action with a deadline: the engine over asyncio, the protocol
simulator over a simulated network. After the deadline the answer is `NoAnswer`: the call may have taken effect, or may
still do so.
"""

from collections.abc import Generator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from anabranch._model.leases import (
    AppRow,
    Conflict,
    ControlRow,
    HandOffRequest,
    HeartbeatAnswer,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    LeaseRows,
    LookRequest,
    MemberRow,
    Poll,
    ShardStatus,
    StatusRow,
    StreamRow,
)
from anabranch._model.streams import ShardFilter
from anabranch.errors import LeaseStoreCode

T = TypeVar("T")


class Moment(NamedTuple):
    """A point in time, on both clocks of this process."""

    now_ms: int
    """The monotonic clock."""
    wall_ms: int
    """The wall clock: milliseconds since 1970."""


class NoAnswer(msgspec.Struct, frozen=True):
    """A call failed or reached its deadline. It may have taken effect."""

    error: str
    code: LeaseStoreCode = "no_answer"


class Answer(NamedTuple):
    value: Any
    """For a store call: what the store returned, or `NoAnswer`."""
    moment: Moment
    """When it was received."""


class StoreCall(msgspec.Struct, Generic[T], frozen=True):
    """One call of the lease store port. `T` is what the store returns."""

    deadline_ms: ClassVar[int | None] = None
    """None: the protocol's own deadline."""


class OpenApp(StoreCall[AppRow], frozen=True):
    deadline_ms: ClassVar[int | None] = 30_000
    """Creating tables takes longer than any later call."""
    app: AppRow


class ReadApp(StoreCall[AppRow | None], frozen=True): ...


class ReadIncarnation(StoreCall[str], frozen=True):
    """Ask the store for the identity of its storage (rule L13)."""


class RecordIncarnation(StoreCall[AppRow | None], frozen=True):
    """Write a new identity of the storage into the app row."""

    expected: str
    incarnation: str


class RegisterMember(StoreCall[MemberRow], frozen=True):
    row: MemberRow


class SendHeartbeat(StoreCall[HeartbeatAnswer], frozen=True):
    write: HeartbeatWrite


class PollStore(StoreCall[Poll], frozen=True): ...


class Seal(StoreCall[MemberRow | None], frozen=True):
    """Declare a member dead that missed its heartbeats, so that others can take its leases (rule L3)."""

    member_id: str
    observed_counter: int


class Leave(StoreCall[MemberRow | None], frozen=True):
    """End this process's own membership."""

    member_id: str


class RequestHandOff(StoreCall[MemberRow | None], frozen=True):
    """Ask a live member to give a lease (rule L12), or to check the rows of the leases that it holds (rule L18)."""

    donor: str
    """The member that is asked."""
    request: HandOffRequest | LookRequest


class DeleteMember(StoreCall[bool], frozen=True):
    """Delete the row of a member that ended long ago."""

    member_id: str


class WriteStatus(StoreCall[None], frozen=True):
    row: StatusRow


class ReadStreams(StoreCall[Sequence[StreamRow]], frozen=True): ...


class PutStream(StoreCall[StreamRow], frozen=True):
    row: StreamRow


class WriteStream(StoreCall[StreamRow | None], frozen=True):
    row: StreamRow
    expected_version: int


class CreateLease(StoreCall[LeaseRow], frozen=True):
    row: LeaseRow


class ReadLeases(StoreCall[LeaseRows], frozen=True):
    with_finished: bool = False


class ReadLease(StoreCall[LeaseRow | None], frozen=True):
    key: LeaseKey


class TakeLease(StoreCall[LeaseRow | Conflict], frozen=True):
    """Take a lease that is free, or whose owner has ended (rule L7)."""

    key: LeaseKey
    member_id: str
    expected_owner: str | None
    expected_version: int
    epoch_floor: int = 0
    """The store makes the new epoch larger than this. The lease machine sets it right before the call."""


class WriteLease(StoreCall[LeaseRow | Conflict], frozen=True):
    row: LeaseRow
    member_id: str
    expected_version: int


class DeleteLease(StoreCall[bool], frozen=True):
    key: LeaseKey
    expected_version: int


class WriteControl(StoreCall[bool], frozen=True):
    """Answer a command (rule C3)."""

    row: ControlRow


class Wait(msgspec.Struct, frozen=True):
    until_ms: int
    """On the monotonic clock."""
    wakeable: bool = False
    """Whether the wait ends early when the driver is woken."""


class Description(msgspec.Struct, frozen=True):
    """What the core needs from the engine for a worker's heartbeats and its status row."""

    reads_healthy: bool = True
    shards: tuple[ShardStatus, ...] = ()
    """All shards of this worker, from the worst to the best."""


class Describe(msgspec.Struct, frozen=True):
    """Ask the engine for a `Description`."""


class ListShards(msgspec.Struct, frozen=True):
    """List the shards of the stream that is being started. The answer is the complete listing."""

    shard_filter: ShardFilter | None


Action: TypeAlias = StoreCall[Any] | Wait | Describe | ListShards
Steps: TypeAlias = Generator[Action, Answer, T]
"""An operation of the core, which returns a `T`."""
