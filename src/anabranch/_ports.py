"""Protocols of what the engine needs from outside: a clock, Kinesis, a lease store, a dead-letter destination.

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
        """Whether `now_ms()` is before `at_ms`, and `wall_ms() - now_ms()` is at most `wall_ahead_ms_max`. A larger
        difference shows that the machine was suspended (rule L9). Called for each record: must be cheap.
        """

    async def sleep_until_ms(self, at_ms: int) -> None: ...

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls back once on the event loop, not before `at_ms`. Cheaper than a sleeping task."""


class ShardSubscription(Protocol):
    """A subscription to one shard that the service has accepted. Its methods raise `ServiceError` if the service sends
    an error, and `TransportError` if the connection breaks, also in the middle of an event.
    """

    server_seconds: float | None
    """The service's clock when it accepted the subscription."""

    async def next_bytes(self) -> int | None:
        """Waits until the next event begins to arrive; returns its size, or None if the subscription has ended. The
        rest of the event is not received before `receive` is called, so the caller can first wait for free memory.
        """

    async def receive(self) -> SubscribeToShardEvent | None:
        """The event whose size `next_bytes` returned; None if that message was not an event."""

    def close(self, *, silent: bool = False) -> None:
        """Ends it at once. `silent`: the service has sent nothing for too long, so its connection is not used again."""


class StreamListing(Protocol):
    """The calls that both consumers and producers need: the shards of a stream, and its description.

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

    # registered consumers (enhanced fan-out)
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
    - Writes return the stored row. So a caller that repeats a write, because the first response was lost, learns what
      is stored.
    - The condition of a write concerns only the row that it writes.
    - The application's row is stored under its name, every other row under that name and the `app_id` that `open`
      returned. So a delayed write cannot change an application that was deleted and created again (rule L14).
    - The store is called from two event loops: the worker's, and that of the heartbeat thread. If a connection is bound
      to one loop, open one for each.

    `_core.leases.rows` defines each condition as a function over rows. A store only compares versions, owners and
    counters: it has no clock, does not expire anything, and changes no row by itself.
    """

    checkpoint_interval: float = 1.0
    """Seconds between two commits of a shard, if `CheckpointSettings.interval` is None."""
    publish_interval: float = 0.0
    """Seconds between two times at which other processes see what this one has written; 0 if they see it at once. A
    store with an interval is for one worker, and `renew_watch` may do nothing.
    """
    warnings: Sequence[str] = ()
    """Problems that `open` found although the store works. Workers report them (`LeaseStoreWarning`)."""

    async def open(self, app: AppRow) -> AppRow:
        """Creates the tables and the application's row if they do not exist. Returns the stored row, whose `app_id`
        all other calls then use. A new row gets the storage's `identity` as its `incarnation`, so that workers notice
        if they are connected to another storage (rule L13).
        """

    async def read_app(self) -> AppRow | None:
        """May be called before `open`. Creates nothing."""

    async def identity(self) -> str:
        """The identity of the storage. If it changes, acknowledged writes may be lost (rule L13)."""

    async def poll(self) -> Poll:
        """The application, all members and the pending commands. A worker reads them about once a second."""

    async def record_incarnation(self, expected: str, incarnation: str) -> AppRow | None:
        """Sets the app row's `incarnation` if it is still the expected one; returns the stored row."""

    async def move_app(self, expected: Place, place: Place, other_store: str) -> AppRow | None:
        """Sets the app row's `place` and `other_store` if its place is still the expected one; returns the stored row.
        A move to another store has several steps, and each begins with this write.
        """

    async def renew_watch(self) -> None:
        """Adds one to the app row's `watch`. Members that see it grow write their status more often for a viewer."""

    async def delete_app(self, app_id: str) -> bool:
        """Deletes the application's row, if it still has this id, then all rows under the id. False if there were none.
        If a call fails, the next one continues; until one succeeds, `leftovers` returns the id. The store does not
        check that no member is live: the caller has done that.
        """

    async def leftovers(self) -> Sequence[str]:
        """The ids of applications of this name that are only half deleted, sorted. May be called before `open`."""

    async def close(self) -> None: ...

    # members
    async def register_member(self, row: MemberRow) -> MemberRow:
        """Creates the row if there is none; returns the stored row."""

    async def heartbeat(self, write: HeartbeatWrite) -> HeartbeatAnswer:
        """Updates the member's row if it is live. Never creates one."""

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        """Evicts a member that missed its heartbeats: sets its state from live to sealed if its counter is still the
        observed one. Returns the stored row (rule L3).
        """

    async def leave(self, member_id: str) -> MemberRow | None:
        """Sets the state from live to left. This one write frees all leases of the member. Returns the stored row."""

    async def request_hand_off(self, donor: str, request: str) -> MemberRow | None:
        """Asks the live member `donor` for a lease: adds `request` to its `wanted`, unless it is there already or
        `wanted` has 8 requests. Returns the donor's stored row (rule L12).
        """

    async def delete_member(self, member_id: str) -> bool:
        """Deletes a sealed or left member, and its status. The caller has checked that it owns no lease."""

    async def write_status(self, row: StatusRow) -> None:
        """Replaces the member's status if that has a lower revision. Does not check that the member exists."""

    async def read_statuses(self) -> Sequence[StatusRow]:
        """Sorted by member. Workers do not read them; the CLI and `Application` do."""

    # streams
    async def put_stream(self, row: StreamRow) -> StreamRow:
        """Creates the row if there is none; returns the stored row."""

    async def write_stream(self, row: StreamRow, expected_version: int) -> StreamRow | None:
        """Replaces the row and returns what is stored; None if the version is not the expected one."""

    async def read_streams(self) -> Sequence[StreamRow]: ...

    # leases
    async def create_lease(self, row: LeaseRow) -> LeaseRow:
        """Creates the row if there is none; returns the stored row."""

    async def read_leases(self, *, with_finished: bool = False) -> LeaseRows:
        """Sorted by key. Finished rows, which are kept for the stream's retention (rule S6), only `with_finished`."""

    async def read_lease(self, key: LeaseKey) -> LeaseRow | None: ...

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        """Sets the owner to `member_id`, adds one to `version` and `takes_without_progress`, and sets the epoch to
        `max(epoch, epoch_floor) + 1`. The floor is the highest epoch of the parent shards (rule U3).

        Condition: the row has the expected owner and version, and is not finished. The store does not check the owner's
        state: the caller has seen it sealed or left, or its row missing for its whole expiry (rule L7).
        """

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        """A write by the owner: `row`, with version `expected_version + 1`, replaces the stored row. It commits a
        checkpoint, finishes or stops the shard, releases the lease (owner None), or gives it to another member.

        Condition: the stored row has the owner `member_id` and the expected version.
        """

    async def delete_lease(self, key: LeaseKey, expected_version: int) -> bool:
        """Deletes a finished row if it has the expected version (rule S6)."""

    # commands
    async def put_control(self, row: ControlRow) -> None:
        """Creates the row if there is none. So a command can be sent again if its response was lost."""

    async def write_control(self, row: ControlRow) -> bool:
        """Replaces a pending command; False if it is no longer pending."""

    async def read_controls(self) -> Sequence[ControlRow]:
        """Sorted by the time of the request, then by id."""


class LetterDestination(Protocol):
    """Where dead letters go. Calls raise `DeadLetterError`, whose code says what kind of failure it was."""

    async def check(self, retention_hours: int) -> list[str]:
        """Raises if it cannot be used. Returns warnings, for example if it keeps letters for less than 14 days or than
        the stream's retention.
        """

    async def write(self, letter: Letter) -> str | None:
        """Returns when the letter is durable: None, or the letter's URL in an overflow if it was too large.

        Writing a letter again makes no second one. If a destination cannot prevent that, readers of the letters drop
        repeats by their idempotency key.
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
    """None if the failure policy writes no dead letters."""
    heartbeats_on_thread: bool = False
    """Whether heartbeats are sent from their own thread. A simulation has no threads, and uses the event loop."""
    tracing: Tracing | None = None
    """None if nothing is traced."""
    add_metric: Callable[[str, float], None] | None = None
    """Receives the metrics that handlers report with `context.metric`; None drops them."""
    before_call: Callable[[], Awaitable[None]] | None = None
    """For simulations: awaited between the check of the lease and the handler call, the worst moment for a pause."""
