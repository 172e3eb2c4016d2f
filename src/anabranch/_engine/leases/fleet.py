"""This process in the fleet: the asyncio driver of the lease machine, and its heartbeats.

`LeaseMachine` decides everything. This performs its store calls with a deadline each, feeds the answers back, passes on
what changed, and runs the heartbeats of the current member.
"""

import asyncio
import contextlib
import os
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._core.leases.machine import (
    CommandsSeen,
    Ended,
    HandOffRequested,
    Held,
    Joined,
    LeaseMachine,
    Lost,
    MemberProfile,
    ReportChanged,
)
from anabranch._core.leases.plan import Write, Written
from anabranch._core.leases.store_calls import (
    Action,
    Describe,
    Description,
    ListShards,
    NoAnswer,
    Steps,
    StoreCall,
    Wait,
)
from anabranch._core.leases.timing import LeaseTiming
from anabranch._core.shards import gate
from anabranch._core.shards.bootstrap import unfinished_shards
from anabranch._engine.clock import Alarm
from anabranch._engine.leases.drive import StoreCaller, drive, moment_of
from anabranch._engine.leases.heartbeats import ExitOnLeaseExpiry, HeartbeatSender, HeartbeatThread
from anabranch._model.leases import AppRow, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import Shard, ShardFilter
from anabranch._ports import Ports
from anabranch.events import Event, StoreAnswered, StoreUnanswered
from anabranch.measures import TimeBuckets
from anabranch.reasons import ClockSkew, Reason, StoreAccessDenied, StoreThrottled, StoreUnreachable

T = TypeVar("T")

TICK_MS = 500
_STORE_REASONS: Final[Mapping[str, type[StoreThrottled | StoreAccessDenied | ClockSkew]]] = {
    "throttled": StoreThrottled,
    "access_denied": StoreAccessDenied,
    "clock_skew": ClockSkew,
}
NO_LIMIT_MS = 1 << 62


class Fleet:
    def __init__(
        self,
        ports: Ports,
        timing: LeaseTiming,
        profile: MemberProfile,
        group: asyncio.TaskGroup,
        *,
        stall_limit_ms: int,
        on_change: Callable[[Held | Lost | HandOffRequested | CommandsSeen], None],
        on_status: Callable[[], None],
        describe: Callable[[], Description],
        running_calls: Callable[[], Sequence[Event]] | None = None,
    ) -> None:
        """`on_change` is called in the step in which a lease is taken, lost or requested. `on_status` is called after
        each answered heartbeat: the fence may have moved. `describe` returns what heartbeats report about the worker.
        `running_calls` returns the handler calls that run now; it is called on the heartbeat thread. None: the process
        does not exit because of them (`on_zombie`).
        """
        self.timing = timing
        self._machine = LeaseMachine(profile, timing, ports.entropy)
        self._ports = ports
        self._clock = ports.clock
        self.store = StoreCaller(ports.store, ports.clock)
        self.heartbeat_store = StoreCaller(ports.store, ports.clock)
        """Calls from the heartbeat thread."""
        self.loop_lags = TimeBuckets()
        """How late the event loop was, measured every half second."""
        self._group = group
        self._stall_limit_ms = stall_limit_ms
        self._on_change = on_change
        self._on_status = on_status
        self._describe = describe
        self._running_calls = running_calls
        self._alarm = Alarm(ports.clock)
        self._sender: HeartbeatSender | None = None
        self._thread: HeartbeatThread | None = None
        self._has_joined = False
        self._task: asyncio.Task[None] | None = None

    # what is known

    @property
    def member_id(self) -> str:
        return self._machine.member_id

    @property
    def app(self) -> AppRow:
        return self._machine.app

    @property
    def leases(self) -> Mapping[LeaseKey, LeaseRow]:
        """All leases of the streams that this worker reads, as last seen."""
        table = self._machine.table
        return {key: row for key, row in table.leases.items() if table.reads(key)}

    @property
    def vanished(self) -> Mapping[LeaseKey, LeaseRow | None]:
        """Unfinished leases whose rows are gone, as last seen: finished meanwhile, or deleted. None: never seen."""
        return self._machine.table.vanished

    def is_read(self, stream_key: str) -> bool:
        """Whether a live member holds leases of the stream, as far as is known here."""
        table = self._machine.table
        owners = [
            row.owner
            for rows in (table.leases, table.vanished)
            for row in rows.values()
            if row is not None and row.owner is not None and row.key.stream_key == stream_key
        ]
        return any(self.is_live(owner) for owner in owners)

    def unfinished(self, stream_key: str) -> tuple[str, ...]:
        """The shards of the stream with an unfinished lease, as far as is known here."""
        leases = self._machine.table.leases.values()
        return unfinished_shards(row for row in leases if row.key.stream_key == stream_key)

    def forget_vanished(self, stream_key: str) -> None:
        """All leases of the stream have their rows again."""
        vanished = self._machine.table.vanished
        for key in [key for key in vanished if key.stream_key == stream_key]:
            del vanished[key]

    @property
    def is_performing(self) -> bool:
        return self._machine.is_performing

    @property
    def trouble(self) -> str | None:
        """Why the last store call had no answer; None if it had one."""
        return None if self._machine.trouble is None else self._machine.trouble.error

    @property
    def store_trouble(self) -> NoAnswer | None:
        """Why the last heartbeat or the last other store call had no answer; None if both had one."""
        return self._machine.heartbeat.status.trouble or self._machine.trouble

    @property
    def blocked_reason(self) -> Reason | None:
        """Why nothing may be started on any lease now; None if it may."""
        if self.may_start():
            return None
        trouble = self.store_trouble
        if trouble is None:
            return StoreUnreachable(error=None)
        return _STORE_REASONS.get(trouble.code, StoreUnreachable)(error=trouble.error)

    @property
    def restart_reason(self) -> str | None:
        """Why this process should be restarted (rule O2); None if it should not. Asked from any thread."""
        thread = self._thread
        return None if thread is None else thread.restart_reason

    @property
    def valid_until_ms(self) -> int | None:
        """When the fence passes, unless another heartbeat is acknowledged before."""
        machine = self._machine
        return None if machine.ending is not None else machine.heartbeat.status.fence.valid_until_ms

    @property
    def acknowledged_at_ms(self) -> int:
        """When the last heartbeat was sent that the store has acknowledged; -1 if there is none. Until then this member
        was live, so no other member could have its leases.
        """
        valid_until_ms = self.valid_until_ms
        return -1 if valid_until_ms is None else valid_until_ms - self.timing.fence_ms

    @property
    def needs_round(self) -> bool:
        """Whether the last heartbeat brought something to act on at once."""
        row = self._machine.heartbeat.status.row
        return self._machine.ending is not None or (row is not None and bool(row.wanted))

    @property
    def is_draining(self) -> bool:
        return self._machine.draining

    def may_start(self, before_ms: int = NO_LIMIT_MS) -> bool:
        """Whether this member may start handler calls at this moment (rule L8): asked in the step that starts one. With
        `before_ms`, only before that time: the clock is read once for both.
        """
        gate = self._machine.heartbeat.gate
        until_ms, ahead_ms_max = gate.limit
        if before_ms < until_ms:  # noqa: PLR1730 -- min() costs more, and this is asked before each record
            until_ms = before_ms
        return not gate.is_closed and self._clock.is_before(until_ms, ahead_ms_max)

    def retries_stopped(self, row: LeaseRow) -> bool:
        """Whether to retry a shard that stopped at a record (rule D4)."""
        return self._machine.table.tries_again(row)

    def is_live(self, member_id: str) -> bool:
        """Whether this member is live, as far as is known here."""
        row = self._machine.detector.row(member_id)
        return row is not None and row.state == "live"

    def is_waiting_or_read(self, row: LeaseRow) -> bool:
        """Whether a shard waits for its parents, or another worker reads it."""
        machine = self._machine
        return bool(gate.open_parents(row, machine.table.leases)) or machine.is_read_by_others(
            row, self._clock.now_ms()
        )

    # from start to end

    async def open(self, app: AppRow, store_name: str, *, may_create: bool) -> AppRow:
        return await self._drive(self._machine.open(app, store_name, moment_of(self._clock), may_create=may_create))

    async def look_around(self) -> None:
        """Before anything else is written: raises if this worker does not share the settings of a live fleet."""
        await self._drive(self._machine.look_around(moment_of(self._clock)))

    async def begin_stream(
        self, proposal: StreamRow, list_shards: Callable[[ShardFilter | None], Awaitable[list[Shard]]]
    ) -> StreamRow:
        """The stream's row, once all its root leases exist."""

        async def perform(action: Action) -> Any:
            if isinstance(action, ListShards):
                return await list_shards(action.shard_filter)
            return await self._perform(action)

        steps = self._machine.begin_stream(proposal, moment_of(self._clock))
        return await drive(steps, perform, self._clock, self._pass_on)

    async def lease_rows(self, row: StreamRow) -> list[LeaseRow]:
        """All lease rows of a stream, finished ones included."""
        return await self._drive(self._machine.lease_rows(row, moment_of(self._clock)))

    async def join(self, streams: Collection[str]) -> None:
        _end_in_forks(self)
        await self._drive(self._machine.join(streams, moment_of(self._clock)))
        self._has_joined = True

    async def run(self) -> NoReturn:
        await self._drive(self._machine.run(moment_of(self._clock)))
        raise AssertionError("it runs until it is cancelled")

    def wake(self) -> None:
        """Something changed that the next round should see now: a status, a finished shard."""
        self._alarm.ring()

    def drain(self) -> None:
        """This worker stops: it takes nothing more and requests nothing."""
        self._machine.drain()

    async def leave(self) -> bool:
        """One write frees all leases of this member; False if the store gave no answer."""
        return await self._drive(self._machine.leave(moment_of(self._clock)))

    def close(self) -> None:
        """Stops the heartbeats without telling the store; other members notice that they are missing."""
        self._stop_heartbeats()

    # leases

    async def write(self, step: Write) -> Written:
        return await self._drive(self._machine.write(step, moment_of(self._clock)))

    async def transfer(self, key: LeaseKey, final: LeaseRow) -> Written:
        """Gives a drained lease to the member that requested it. `final` has the last checkpoint."""
        return await self._drive(self._machine.transfer(key, final, moment_of(self._clock)))

    def keep(self, key: LeaseKey) -> None:
        """The drain timed out: the lease stays here for a while (rule L12)."""
        self._machine.table.keep(key, self._clock.now_ms())

    async def create_lease(self, row: LeaseRow, *, member_id: str) -> LeaseRow | None:
        """`member_id` planned it. None: it was not created, or there was no answer."""
        created = await self._drive(self._machine.create_lease(row, member_id, moment_of(self._clock)))
        if created is not None:
            self._machine.observe_lease(created, moment_of(self._clock))
            self._pass_on()
        return created

    async def find_unheld(self, keys: Collection[LeaseKey]) -> Collection[LeaseKey]:
        """Those of some leases without a row that no live member holds. Asks all members; call it again until they have
        answered.
        """
        return await self._drive(self._machine.find_unheld(keys, moment_of(self._clock)))

    async def adopt(self, parent: LeaseKey, children: Collection[str]) -> None:
        """Takes those children of a finished shard that can start (rule S4)."""
        await self._drive(self._machine.adopt(parent, children, moment_of(self._clock)))
        self.wake()

    def give_unreadable(self, key: LeaseKey) -> None:
        """This member could not read the shard for long. Another may be able to (rule U7)."""
        self._machine.give_unreadable(key, moment_of(self._clock))
        self._pass_on()

    async def call(self, call: StoreCall[T]) -> T | None:
        """A read, or a write whose outcome no lease depends on; None if there was no answer."""
        answer = await self.ask(call)
        return None if isinstance(answer, NoAnswer) else answer

    async def ask(self, call: StoreCall[T]) -> T | NoAnswer:
        """As `call`, but a call without an answer returns `NoAnswer`: None may be an answer."""
        steps = self._machine.ask(call, moment_of(self._clock))
        return await self._drive(steps)

    def raise_store_reset(self) -> NoReturn:
        try:
            self._machine.raise_store_reset()
        finally:
            self._pass_on()

    # driving

    async def _drive(self, steps: Steps[T]) -> T:
        return await drive(steps, self._perform, self._clock, self._pass_on)

    async def _perform(self, action: Action) -> Any:
        if isinstance(action, Wait):
            wait = self._alarm.wait if action.wakeable else self._clock.sleep_until_ms
            return await wait(action.until_ms)
        if isinstance(action, Describe):
            return self._describe()
        assert isinstance(action, StoreCall)
        return await self.store.call(action, self.timing.call_deadline_ms)

    def _pass_on(self) -> None:
        for change in self._machine.take_changes():
            match change:
                case Held() | Lost() | HandOffRequested() | CommandsSeen():
                    self._on_change(change)
                case Joined():
                    self._start_heartbeats(change.heartbeat)
                case Ended():
                    self._stop_heartbeats()
                case ReportChanged():
                    self._wake_heartbeats()
                case StoreUnanswered() | StoreAnswered() if self._has_joined:
                    pass  # `RunWatch` reports these, once for all calls
                case _:
                    self._ports.emit(change)

    # heartbeats

    def _start_heartbeats(self, state: HeartbeatState) -> None:
        ports, on_status, thread = self._ports, self._on_status, None
        if ports.heartbeats_on_thread:
            loop = asyncio.get_running_loop()
            thread = HeartbeatThread(ports.clock, self._stall_limit_ms, ports.emit)

            def on_status() -> None:
                with contextlib.suppress(RuntimeError):  # the main loop is closed
                    loop.call_soon_threadsafe(self._on_status)

        self._sender = HeartbeatSender(
            state,
            self.heartbeat_store,
            ports.clock,
            is_stalled=(lambda: False) if thread is None else thread.is_stalled,
            on_status=on_status,
        )
        if thread is None:
            self._task = self._group.create_task(self._sender.run(), name="heartbeats")
        else:
            guard = None
            if self._running_calls is not None:
                guard = ExitOnLeaseExpiry(state, ports.clock, self._running_calls, ports.emit)
            thread.start(self._sender, guard)
            self._thread = thread
            self._task = self._group.create_task(self._tick(thread), name="loop watch")
        self._on_status()

    async def _tick(self, thread: HeartbeatThread) -> None:
        while True:
            thread.tick()
            if thread.failure is not None:
                raise thread.failure
            due_ms = self._clock.now_ms() + TICK_MS
            await self._clock.sleep_until_ms(due_ms)
            self.loop_lags.add(self._clock.now_ms() - due_ms)

    def _wake_heartbeats(self) -> None:
        if self._thread is not None:
            self._thread.wake()
        elif self._sender is not None:
            self._sender.wake()

    def _stop_heartbeats(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        if self._task is not None:
            self._task.cancel()
        self._sender = self._thread = self._task = None

    def on_fork(self) -> None:
        """In a forked child: the parent stays this member, and the child is not a member (rule L1)."""
        self._machine.end("forked")
        self._machine.take_changes()
        self._thread = None  # a thread of the parent


_joined: "weakref.WeakSet[Fleet]" = weakref.WeakSet()
"""The fleets of this process that have joined. One hook serves them all, because a fork hook cannot be removed."""


def _end_in_forks(fleet: Fleet) -> None:
    """A fork copies the member's identity and fence, so parent and child would act as one member. So every member ends
    in the child, before any other code runs there. The child must join as a new member.
    """
    _joined.add(fleet)


def _after_fork_in_child() -> None:
    for fleet in list(_joined):
        fleet.on_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
