"""What the engine needs from outside, as protocols: a clock, Kinesis, a lease store, dead letters.

`_aws`, `stores` and `dead_letters` implement them for production, `testing` for simulated fleets.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from anabranch._model.entropy import Entropy
from anabranch._model.leases import (
    AppRow,
    Conflict,
    ControlRow,
    HeartbeatAnswer,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    LeaseRows,
    MemberRow,
    Place,
    Poll,
    StatusRow,
    StreamRow,
)
from anabranch._model.streams import ShardFilter, StartingPosition, StreamName
from anabranch._tracing import Tracing
from anabranch._wire.messages import (
    ConsumerDescription,
    GetRecordsResponse,
    ListShardsResponse,
    ListStreamConsumersResponse,
    PutRecordsEntry,
    PutRecordsResponse,
    StreamSummary,
    SubscribeToShardEvent,
)
from anabranch.events import Event
from anabranch.letters import Letter


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Time, as the engine sees it.

    `now_ms` has an arbitrary origin, never goes back, and also counts while the machine sleeps (rule L9). `wall_ms` is
    only for display and AWS timestamps, and is never compared with another machine's. All waiting goes through the
    clock, so that a simulation can run hours in milliseconds.
    """

    def now_ms(self) -> int: ...
    def wall_ms(self) -> int: ...

    def is_before(self, at_ms: int, wall_ahead_ms_max: int) -> bool:
        """Whether `at_ms` is ahead, and the wall clock at most this far ahead. Called per record: must be cheap."""

    async def sleep_until_ms(self, at_ms: int) -> None: ...

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls back once on the event loop, not before `at_ms`. Cheaper than a sleeping task."""


class ShardSubscription(Protocol):
    """A subscription to one shard that the service has accepted. Its methods raise what the service sends as an error,
    or `TransportError` if the connection breaks, also in the middle of an event.
    """

    server_seconds: float | None
    """The service's clock when it accepted the subscription."""

    async def next_bytes(self) -> int | None:
        """The size of the next event, as soon as it begins to arrive. None: the subscription has ended. Only a small
        part of the event arrives before `receive` is called, so a caller can wait for room.
        """

    async def receive(self) -> SubscribeToShardEvent | None:
        """The event that `next_bytes` announced; None if it was another message."""

    def close(self, *, silent: bool = False) -> None:
        """Ends it at once. `silent`: the service sent nothing for too long."""


class StreamListing(Protocol):
    """What consumers and producers need to know about a stream.

    A call returns its typed answer or raises `ServiceError` (the service refused), `TransportError` (no usable answer;
    `maybe_sent` says whether the service may have acted) or `CredentialsError`. Implementations do not retry.
    Cancelling a call drops its answer; the service may still act on the request.
    """

    async def list_shards(
        self, stream: StreamName, *, shard_filter: ShardFilter | None = None, next_token: str | None = None
    ) -> ListShardsResponse: ...

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary: ...


class Kinesis(StreamListing, Protocol):
    """What a consumer needs from Kinesis."""

    # reading
    async def get_shard_iterator(self, stream: StreamName, shard_id: str, position: StartingPosition) -> str: ...

    async def get_records(
        self, stream: StreamName, shard_iterator: str, *, has_room: Callable[[int], bool] | None = None
    ) -> GetRecordsResponse | None:
        """`has_room` gets the length of a large response before its body is received. False drops it: returns None."""

    async def subscribe_to_shard(
        self, consumer_arn: str, shard_id: str, position: StartingPosition
    ) -> ShardSubscription:
        """Returns when the service has accepted the subscription. The caller closes it."""

    # the consumers of a stream (enhanced fan-out)
    async def register_stream_consumer(self, stream_arn: str, name: str) -> ConsumerDescription: ...

    async def describe_stream_consumer(self, stream_arn: str, name: str) -> ConsumerDescription: ...

    async def list_stream_consumers(
        self, stream_arn: str, *, next_token: str | None = None
    ) -> ListStreamConsumersResponse: ...

    async def deregister_stream_consumer(self, consumer_arn: str) -> None: ...


class KinesisWriting(StreamListing, Protocol):
    """What a producer needs from Kinesis."""

    async def put_records(self, stream: StreamName, entries: Sequence[PutRecordsEntry]) -> PutRecordsResponse: ...


class LeaseStore(Protocol):
    """One application's rows. `anabranch.testing.check_lease_store` checks every implementation.

    - Every write is atomic and conditional. A failed condition is a result (`Conflict`, `None`), never an exception.
    - Reads see every write that was acknowledged before the read began.
    - Implementations do not retry. A call that cannot be completed raises `LeaseStoreError`; it may or may not have
      taken effect.
    - Writes return the stored row, so that a caller whose answer was lost learns what is stored.
    - No write has a condition over two rows.
    - The application's row is stored under its name, every other row under that name and the `app_id` that this handle
      opened. So a delayed write never shows in an application that was deleted and created again (rule L14).
    - The store is called from two event loops: the worker's, and that of the heartbeat thread. Where a connection
      belongs to one loop, open one for each.

    `_core.leases.rows` defines each condition as a function over rows. A store compares versions, owners and counters.
    It has no clock, decides no expiry, and never changes a row by itself.
    """

    checkpoint_interval: float = 1.0
    """Seconds between two commits of a shard, if `CheckpointSettings.interval` is None."""
    seen_every: float = 0.0
    """Seconds until others see what a worker has written. If 0, workers also see that somebody watches them."""
    warnings: Sequence[str] = ()
    """What `open` found that should be changed, although the store works. Workers report it (`LeaseStoreWarning`)."""

    async def open(self, app: AppRow) -> AppRow:
        """Creates the tables and the application's row if they do not exist. Returns the stored row, whose `app_id`
        this handle uses from then on. A new row names its storage (`incarnation`), so that workers notice a rollback.
        """

    async def read_app(self) -> AppRow | None:
        """May be called before `open`. Creates nothing."""

    async def identity(self) -> str:
        """The identity of the storage. If it changes, acknowledged writes may be lost (rule L13)."""

    async def poll(self) -> Poll:
        """The application, all members and the pending commands: what a worker reads about once a second."""

    async def record_incarnation(self, expected: str, incarnation: str) -> AppRow | None:
        """Writes the app row's incarnation if it is still the expected one; returns the stored row."""

    async def move_app(self, expected: Place, place: Place, other_store: str) -> AppRow | None:
        """Writes where the application lives, if its place is still the expected one; returns the stored row."""

    async def renew_watch(self) -> None:
        """Adds one to the app row's `watch`: somebody looks at the fleet, so members write their status more often."""

    async def delete_app(self, app_id: str) -> bool:
        """Deletes the application's row, if it still has this id, then all rows under the id. False if there were none.
        A call after a failure continues; `leftovers` names the id until then. The caller has seen no live member.
        """

    async def leftovers(self) -> Sequence[str]:
        """The ids of this name's applications whose deletion did not end, sorted. May be called before `open`."""

    async def close(self) -> None: ...

    # members
    async def register_member(self, row: MemberRow) -> MemberRow:
        """Put if absent; returns the stored row."""

    async def heartbeat(self, write: HeartbeatWrite) -> HeartbeatAnswer:
        """Updates the row if it exists and is live. Never creates one."""

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        """Live -> sealed if the counter is still the observed one; returns the stored row (rule L3)."""

    async def leave(self, member_id: str) -> MemberRow | None:
        """Live -> left: one write frees all leases of the member."""

    async def request_hand_off(self, donor: str, request: str) -> MemberRow | None:
        """Adds a request's short name to a live donor's `wanted`: once, at most 8 names. Returns the donor's row."""

    async def delete_member(self, member_id: str) -> bool:
        """Deletes a sealed or left member, and its status. The caller has seen that no lease names it."""

    async def write_status(self, row: StatusRow) -> None:
        """Replaces the member's status, if its revision is lower. A status without a member does no harm."""

    async def read_statuses(self) -> Sequence[StatusRow]:
        """Sorted by member. Only viewers read them."""

    # streams
    async def put_stream(self, row: StreamRow) -> StreamRow:
        """Put if absent; returns the stored row."""

    async def write_stream(self, row: StreamRow, expected_version: int) -> StreamRow | None:
        """Replaces the row if its version is still the expected one; None if not."""

    async def read_streams(self) -> Sequence[StreamRow]: ...

    # leases
    async def create_lease(self, row: LeaseRow) -> LeaseRow:
        """Put if absent; returns the stored row."""

    async def read_leases(self, *, with_finished: bool = False) -> LeaseRows:
        """Sorted by key. Without finished rows by default, which stay for the stream's retention (rule S6)."""

    async def read_lease(self, key: LeaseKey) -> LeaseRow | None: ...

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        """Sets the owner to `member_id`. Version and `takes_without_progress` grow by one; the epoch becomes one more
        than the larger of itself and the floor, which is the highest epoch of the parents (rule U3).

        Condition: the row has the expected owner and version. The caller has seen that the owner was sealed or left, or
        was missing for its whole expiry (rule L7); the store does not check that.
        """

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        """A write by the owner: `row`, with version `expected_version + 1`, replaces the stored row.

        Condition: the stored row has the owner `member_id` and the expected version. Used to commit, finish, stop,
        release (owner None) and give (owner is another member).
        """

    async def delete_lease(self, key: LeaseKey, expected_version: int) -> bool:
        """Deletes a finished row if it has the expected version (rule S6)."""

    # commands
    async def put_control(self, row: ControlRow) -> None:
        """Put if absent, so that a command can be sent again if its answer was lost."""

    async def write_control(self, row: ControlRow) -> bool:
        """Replaces a pending command; False if it is no longer pending."""

    async def read_controls(self) -> Sequence[ControlRow]:
        """Sorted by the time of the request, then by id."""


class LetterDestination(Protocol):
    """Where dead letters go. Calls raise `DeadLetterError`, whose code is the reason why a shard waits."""

    async def check(self, retention_hours: int) -> list[str]:
        """Raises if it cannot be used. Returns warnings, for example if it keeps letters for less than 14 days or than
        the stream's retention.
        """

    async def write(self, letter: Letter) -> str | None:
        """Returns when the letter is durable: a pointer, if the whole letter is in an overflow. Writing it again does
        not make a second letter; where a destination cannot tell, readers do, by the idempotency key.
        """

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Everything that one run of a consumer needs."""

    kinesis: Kinesis
    store: LeaseStore
    clock: Clock
    entropy: Entropy
    emit: Callable[[Event], None]
    letters: LetterDestination | None = None
    """Where dead letters go, if the policy writes some."""
    heartbeats_on_thread: bool = False
    """Whether heartbeats have their own thread. A simulation has no threads: it sends them from the event loop."""
    tracing: Tracing | None = None
    """None: nothing is traced."""
    add_metric: Callable[[str, float], None] | None = None
    """Receives the metrics that handlers report with `context.metric`; None drops them."""
    before_call: Callable[[], Awaitable[None]] | None = None
    """For simulations: awaited between the fence check and the handler call, the worst moment for a pause."""
