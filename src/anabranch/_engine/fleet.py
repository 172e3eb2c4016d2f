"""This process in the fleet: it drives the lease machine, and sends its heartbeats.

`LeaseMachine` decides everything. This module performs its store calls, each with a deadline, and returns the answers
to it. The answer to a call that failed is `NoAnswer`.

Heartbeats have a thread of their own with its own event loop, so a busy handler cannot delay them. The thread shares
two references with the main loop: the report that it sends, and the status that it publishes. If the main loop is
blocked, the thread reports the stack that blocks it. After the stall limit it stops the heartbeats, because a process
that does nothing must not keep its shards. C code that holds the interpreter's lock blocks this thread, too. The fence
still holds then: it is compared, never signalled.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from anabranch._core.leases import store_calls as calls
from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._core.leases.machine import (
    CommandsSeen,
    Ended,
    Held,
    Joined,
    LeaseMachine,
    Lost,
    MemberProfile,
    ReportChanged,
)
from anabranch._core.leases.plan import Drain, Write, Written
from anabranch._core.leases.store_calls import Description, Moment, NoAnswer, Steps, StoreCall
from anabranch._core.leases.timing import LeaseTiming
from anabranch._core.shards import lifecycle
from anabranch._core.shards.lifecycle import unfinished_shards
from anabranch._engine.clock import Alarm
from anabranch._model.leases import AppRow, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import Shard, ShardFilter
from anabranch._ports import Clock, LeaseStore, Ports
from anabranch.errors import LeaseStoreCode, LeaseStoreError
from anabranch.events import Event, LoopBlocked, LoopStalled, LoopUnblocked, StoreAnswered, StoreUnanswered
from anabranch.measures import TimeBuckets
from anabranch.reasons import ClockSkew, Reason, StoreAccessDenied, StoreThrottled, StoreUnreachable

T = TypeVar("T")

TICK_MS = 500
LOOK_EVERY_MS = 500
BLOCKED_AFTER_MS = 2_000

EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h: a service manager should start the process again."""
CHECKS_PER_SLACK = 3
_STORE_REASONS: Final[Mapping[str, type[StoreThrottled | StoreAccessDenied | ClockSkew]]] = {
    "throttled": StoreThrottled,
    "access_denied": StoreAccessDenied,
    "clock_skew": ClockSkew,
}
NO_LIMIT_MS = 1 << 62


def moment_of(clock: Clock) -> Moment:
    return Moment(clock.now_ms(), clock.wall_ms())


async def drive(
    steps: Steps[T], perform: Callable[[calls.Action], Awaitable[Any]], clock: Clock, after_step: Callable[[], None]
) -> T:
    """Performs the steps one after another. Calls `after_step` before each one, and at the end."""
    try:
        action = next(steps)
        while True:
            after_step()
            answer = await perform(action)
            action = steps.send(calls.Answer(answer, moment_of(clock)))
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        steps.close()  # if it was cancelled during a call, there is no answer to send
        after_step()


@dataclass(eq=False, repr=False)
class StoreCaller:
    """Calls a lease store, each time with a deadline, and counts the calls. Used on one event loop."""

    _store: LeaseStore
    _clock: Clock
    _deadline_ms: int
    calls: TimeBuckets = field(default_factory=TimeBuckets)
    failure_count: int = 0
    throttle_count: int = 0

    async def call(self, call: StoreCall[Any]) -> object:
        """What the store returned, or `NoAnswer`. Raises errors that no retry fixes (no database, another schema)."""
        deadline_ms, began_ms = call.deadline_ms or self._deadline_ms, self._clock.now_ms()
        try:
            async with asyncio.timeout(deadline_ms / 1000):
                return await send(self._store, call)
        except LeaseStoreError as error:
            return self._no_answer(str(error), error.code)
        except TimeoutError:
            return self._no_answer(f"lease store {self._store} gave no answer within {deadline_ms} ms")
        finally:
            self.calls.add(self._clock.now_ms() - began_ms)

    def _no_answer(self, error: str, code: LeaseStoreCode = "no_answer") -> NoAnswer:
        self.failure_count += 1
        self.throttle_count += code == "throttled"
        return NoAnswer(error, code)


_METHODS: Final[Mapping[type[StoreCall[Any]], Callable[[LeaseStore, Any], Awaitable[object]]]] = {
    calls.OpenApp: lambda store, call: store.open(call.app),
    calls.ReadApp: lambda store, _: store.read_app(),
    calls.ReadIncarnation: lambda store, _: store.identity(),
    calls.RecordIncarnation: lambda store, call: store.record_incarnation(call.expected, call.incarnation),
    calls.RegisterMember: lambda store, call: store.register_member(call.row),
    calls.SendHeartbeat: lambda store, call: store.heartbeat(call.write),
    calls.PollStore: lambda store, _: store.poll(),
    calls.Seal: lambda store, call: store.seal_member(call.member_id, call.observed_counter),
    calls.Leave: lambda store, call: store.leave(call.member_id),
    calls.RequestHandOff: lambda store, call: store.request_hand_off(call.donor, call.request.short_name),
    calls.DeleteMember: lambda store, call: store.delete_member(call.member_id),
    calls.WriteStatus: lambda store, call: store.write_status(call.row),
    calls.ReadStreams: lambda store, _: store.read_streams(),
    calls.PutStream: lambda store, call: store.put_stream(call.row),
    calls.WriteStream: lambda store, call: store.write_stream(call.row, call.expected_version),
    calls.CreateLease: lambda store, call: store.create_lease(call.row),
    calls.ReadLeases: lambda store, call: store.read_leases(with_finished=call.with_finished),
    calls.ReadLease: lambda store, call: store.read_lease(call.key),
    calls.TakeLease: lambda store, call: store.take_lease(
        call.key,
        call.member_id,
        expected_owner=call.expected_owner,
        expected_version=call.expected_version,
        epoch_floor=call.epoch_floor,
    ),
    calls.WriteLease: lambda store, call: store.write_lease(
        call.row, member_id=call.member_id, expected_version=call.expected_version
    ),
    calls.DeleteLease: lambda store, call: store.delete_lease(call.key, call.expected_version),
    calls.WriteControl: lambda store, call: store.write_control(call.row),
}


def send(store: LeaseStore, call: StoreCall[Any]) -> Awaitable[object]:
    return _METHODS[type(call)](store, call)


@dataclass(eq=False, repr=False)
class HeartbeatSender:
    """Drives a `HeartbeatState`, on the heartbeat thread or (in a simulation) as a task of the main loop."""

    _state: HeartbeatState
    _store: StoreCaller
    _clock: Clock
    _is_stalled: Callable[[], bool]
    _on_status: Callable[[], None]

    def __post_init__(self) -> None:
        self._alarm = Alarm(self._clock)
        self._published = self._state.status

    async def run(self) -> None:
        """Sends heartbeats until this member has ended."""
        await drive(self._state.run(moment_of(self._clock)), self._perform, self._clock, self._publish)

    def wake(self) -> None:
        """Sends the next heartbeat now: there is something to report."""
        self._state.wake(self._clock.now_ms())
        self._alarm.ring()

    async def _perform(self, action: calls.Action) -> object:
        if isinstance(action, calls.Wait):
            await self._alarm.wait(action.until_ms)
            while self._is_stalled():
                await self._alarm.wait(self._clock.now_ms() + self._state.timing.heartbeat_interval_ms)
            return None
        assert isinstance(action, StoreCall)
        return await self._store.call(action)

    def _publish(self) -> None:
        if self._state.status is not self._published:
            self._published = self._state.status
            self._on_status()


async def exit_on_lease_expiry(
    state: HeartbeatState,
    clock: Clock,
    running_calls: Callable[[], Sequence[Event]],
    emit: Callable[[Event], None],
    end_process: Callable[[int], object] = os._exit,
) -> None:
    """With `on_zombie="exit"`: ends the process before others can start a record that still runs here (rule L11).

    Other members start after fence and grace have passed. This runs on the heartbeat thread, because the call that
    outlives its lease may block the main loop.
    """
    timing, valid_until_ms = state.timing, 0
    while (fence := state.status.fence).ending != "left":
        valid_until_ms = fence.valid_until_ms or valid_until_ms
        due_ms, now_ms = valid_until_ms + timing.grace_ms, clock.now_ms()
        if now_ms >= due_ms and (running := running_calls()):
            for event in running:
                emit(event)
            end_process(EXIT_STATUS)
            return
        await clock.sleep_until_ms(max(due_ms, now_ms + timing.slack_ms // CHECKS_PER_SLACK))


@dataclass(eq=False, repr=False)
class HeartbeatThread:
    """A thread with an event loop for heartbeats, which also watches the main loop."""

    _clock: Clock
    _stall_limit_ms: int
    _emit: Callable[[Event], None]
    _thread: threading.Thread | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _stopped: asyncio.Event | None = None
    failure: BaseException | None = None
    """What ended the thread unexpectedly. The main loop checks it with each tick."""

    def __post_init__(self) -> None:
        self._ticked_at_ms = self._clock.now_ms()
        self._watched = threading.current_thread()

    def tick(self) -> None:
        """The main loop is running."""
        self._ticked_at_ms = self._clock.now_ms()

    def is_stalled(self) -> bool:
        """Whether the main loop has been blocked for too long, or its thread has ended. Then no heartbeat is sent."""
        return not self._watched.is_alive() or self._clock.now_ms() - self._ticked_at_ms > self._stall_limit_ms

    @property
    def restart_reason(self) -> str | None:
        """Why this process should be restarted (rule O2); None if it should not. Asked from any thread."""
        if self.is_stalled():
            return f"the event loop has been blocked for longer than {self._stall_limit_ms / 1000:g} s"
        if self._thread is not None and not self._thread.is_alive():
            return f"the heartbeat thread has ended: {self.failure!r}"
        return None

    def start(self, *work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs the work until `stop`."""
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(work, started), name="anabranch-heartbeats", daemon=True
        )
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        if self._stopped is not None:
            self.call(self._stopped.set)
        self._loop = self._stopped = None

    def call(self, callback: Callable[[], None]) -> None:
        """Calls back on the thread, if it still runs."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself, and its loop is closed
                self._loop.call_soon_threadsafe(callback)

    def _live(self, work: Sequence[Callable[[], Coroutine[Any, Any, None]]], started: threading.Event) -> None:
        try:
            asyncio.run(self._run(work, started))
        except Exception as error:  # noqa: BLE001 -- P7: nobody awaits a thread; the main loop raises it
            self.failure = error
        finally:
            started.set()  # also if it could not start (no file descriptors left): `start` waits for this

    async def _run(self, work: Sequence[Callable[[], Coroutine[Any, Any, None]]], started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = stopped = asyncio.Event()
        started.set()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run()) for run in (*work, self._watch)]
            await stopped.wait()
            for task in tasks:
                task.cancel()

    async def _watch(self) -> None:
        """Reports what blocks the main loop: after two seconds, at each doubling, and at the stall limit."""
        reported_ms, stall_is_reported, blocked_before_ms = BLOCKED_AFTER_MS // 2, False, 0
        while True:
            if await self._was_paused():
                continue  # the pause is not the loop's fault; the next check sees whether it runs
            blocked_ms = self._clock.now_ms() - self._ticked_at_ms
            if blocked_ms < BLOCKED_AFTER_MS:
                if blocked_before_ms >= BLOCKED_AFTER_MS:
                    self._emit(LoopUnblocked(blocked_ms=blocked_before_ms))
                reported_ms, stall_is_reported = BLOCKED_AFTER_MS // 2, False
            elif self.is_stalled() and not stall_is_reported:
                reported_ms, stall_is_reported = blocked_ms, True
                self._emit(LoopStalled(blocked_ms=blocked_ms, stack=self._stack()))
            elif blocked_ms >= 2 * reported_ms:
                reported_ms = blocked_ms
                self._emit(LoopBlocked(blocked_ms=blocked_ms, stack=self._stack()))
            blocked_before_ms = blocked_ms

    async def _was_paused(self) -> bool:
        """Waits until the next check. True if the process or the machine was suspended meanwhile. A thread that could
        not get the interpreter's lock is late, too, but then the process used CPU time.
        """
        due_ms, used_ns = self._clock.now_ms() + LOOK_EVERY_MS, time.process_time_ns()
        await self._clock.sleep_until_ms(due_ms)
        late_ms = self._clock.now_ms() - due_ms
        return late_ms > LOOK_EVERY_MS and (time.process_time_ns() - used_ns) // 1_000_000 < late_ms // 2

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched.ident or 0)  # noqa: SLF001 -- the documented way to another thread
        return "(the thread of the event loop is gone)" if frame is None else "".join(traceback.format_stack(frame))


@dataclass(eq=False, repr=False)
class Fleet:
    _ports: Ports
    timing: LeaseTiming
    _profile: MemberProfile
    _group: asyncio.TaskGroup
    _: KW_ONLY
    stall_limit_ms: int
    on_change: Callable[[Held | Lost | Drain | CommandsSeen], None]
    """Called in the step in which a lease is taken, lost or requested."""
    on_status: Callable[[], None]
    """Called after each answered heartbeat: the fence may have moved."""
    describe: Callable[[], Description]
    """Returns what heartbeats report about the worker."""
    running_calls: Callable[[], Sequence[Event]] | None = None
    """Returns the handler calls that run now. Called on the heartbeat thread. None: they do not end the process."""

    def __post_init__(self) -> None:
        ports = self._ports
        self._machine = LeaseMachine(self._profile, self.timing, ports.entropy)
        self._clock = ports.clock
        self.store = StoreCaller(ports.store, ports.clock, self.timing.call_deadline_ms)
        self.heartbeat_store = StoreCaller(ports.store, ports.clock, self.timing.call_deadline_ms)
        """Calls from the heartbeat thread."""
        self.loop_lags = TimeBuckets()
        """How late the event loop was, measured every half second."""
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
        """Unfinished leases whose row is gone, as last seen (None: never). They were finished since, or deleted."""
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
        thread = self._thread
        return None if thread is None else thread.restart_reason

    @property
    def valid_until_ms(self) -> int | None:
        """When the fence passes, unless another heartbeat is acknowledged before."""
        machine = self._machine
        return None if machine.ending is not None else machine.heartbeat.status.fence.valid_until_ms

    @property
    def acknowledged_at_ms(self) -> int:
        """When the last acknowledged heartbeat was sent, or -1. Until then no other member could have its leases."""
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
        """Whether a handler call may start now (rule L8), and before `before_ms`. Asked in the step that starts it."""
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
        return bool(lifecycle.open_parents(row, machine.table.leases)) or machine.is_read_by_others(
            row, self._clock.now_ms()
        )

    # from start to end

    async def open(self, app: AppRow, store_name: str, *, may_create: bool) -> AppRow:
        return await self._drive(self._machine.open(app, store_name, may_create=may_create))

    async def check_fleet(self) -> None:
        """Raises if this worker's settings differ from those of a live fleet. Called before the first write."""
        await self._drive(self._machine.check_fleet())

    async def begin_stream(
        self, proposal: StreamRow, list_shards: Callable[[ShardFilter | None], Awaitable[list[Shard]]]
    ) -> StreamRow:
        """The stream's row, once all its root leases exist."""

        async def perform(action: calls.Action) -> Any:
            if isinstance(action, calls.ListShards):
                return await list_shards(action.shard_filter)
            return await self._perform(action)

        return await self._drive(self._machine.begin_stream(proposal), perform)

    async def lease_rows(self, row: StreamRow) -> list[LeaseRow]:
        """All lease rows of a stream, finished ones included."""
        return await self._drive(self._machine.lease_rows(row))

    async def join(self, streams: Collection[str]) -> None:
        _joined.add(self)
        await self._drive(self._machine.join(streams))
        self._has_joined = True

    async def run(self) -> NoReturn:
        await self._drive(self._machine.run())
        raise AssertionError("it runs until it is cancelled")

    def wake(self) -> None:
        """Something changed that the next round should see now: a status, a finished shard."""
        self._alarm.ring()

    def drain(self) -> None:
        """This worker stops: it takes nothing more and requests nothing."""
        self._machine.drain()

    async def leave(self) -> bool:
        """One write frees all leases of this member; False if the store gave no answer."""
        return await self._drive(self._machine.leave())

    # leases

    async def write(self, step: Write) -> Written:
        return await self._drive(self._machine.write(step))

    async def transfer(self, key: LeaseKey, final: LeaseRow) -> Written:
        """Gives a drained lease to the member that requested it. `final` has the last checkpoint."""
        return await self._drive(self._machine.transfer(key, final))

    def keep(self, key: LeaseKey) -> None:
        """The drain timed out: the lease stays here for a while (rule L12)."""
        self._machine.table.keep(key, self._clock.now_ms())

    async def create_lease(self, row: LeaseRow, *, member_id: str) -> LeaseRow | None:
        """`member_id` planned it. None: it was not created, or there was no answer."""
        return await self._drive(self._machine.create_lease(row, member_id))

    async def find_unheld(self, keys: Collection[LeaseKey]) -> Collection[LeaseKey]:
        """Returns the leases that no live member holds. All members are asked: call it until they have answered."""
        return await self._drive(self._machine.find_unheld(keys))

    async def adopt(self, parent: LeaseKey, children: Collection[str]) -> None:
        """Takes the children of a finished shard that can start (rule S4)."""
        await self._drive(self._machine.adopt(parent, children))
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
        steps = self._machine.ask(call)
        return await self._drive(steps)

    def raise_store_reset(self) -> NoReturn:
        try:
            self._machine.raise_store_reset()
        finally:
            self._pass_on()

    # driving

    async def _drive(self, steps: Steps[T], perform: Callable[[calls.Action], Awaitable[Any]] | None = None) -> T:
        self._machine.moment = moment_of(self._clock)
        return await drive(steps, perform or self._perform, self._clock, self._pass_on)

    async def _perform(self, action: calls.Action) -> Any:
        if isinstance(action, calls.Wait):
            wait = self._alarm.wait if action.wakeable else self._clock.sleep_until_ms
            return await wait(action.until_ms)
        if isinstance(action, calls.Describe):
            return self.describe()
        assert isinstance(action, StoreCall)
        return await self.store.call(action)

    def _pass_on(self) -> None:
        for change in self._machine.take_changes():
            match change:
                case Held() | Lost() | Drain() | CommandsSeen():
                    self.on_change(change)
                case Joined():
                    self._start_heartbeats(change.heartbeat)
                case Ended():
                    self.close()
                case ReportChanged():
                    self._wake_heartbeats()
                case StoreUnanswered() | StoreAnswered() if self._has_joined:
                    pass  # `RunMonitor` reports these, once for all calls
                case _:
                    self._ports.emit(change)

    # heartbeats

    def _start_heartbeats(self, state: HeartbeatState) -> None:
        ports, on_status, thread = self._ports, self.on_status, None
        if ports.heartbeats_on_thread:
            loop = asyncio.get_running_loop()
            thread = HeartbeatThread(ports.clock, self.stall_limit_ms, ports.emit)

            def on_status() -> None:
                with contextlib.suppress(RuntimeError):  # the main loop is closed
                    loop.call_soon_threadsafe(self.on_status)

        is_stalled = (lambda: False) if thread is None else thread.is_stalled
        sender = HeartbeatSender(state, self.heartbeat_store, ports.clock, is_stalled, on_status)
        if thread is None:
            self._task = self._group.create_task(sender.run(), name="heartbeats")
        else:
            work = [sender.run]
            if self.running_calls is not None:
                work.append(partial(exit_on_lease_expiry, state, ports.clock, self.running_calls, ports.emit))
            thread.start(*work)
            self._task = self._group.create_task(self._tick(thread), name="loop watch")
        self._sender, self._thread = sender, thread
        self.on_status()

    async def _tick(self, thread: HeartbeatThread) -> None:
        while True:
            thread.tick()
            if thread.failure is not None:
                raise thread.failure
            due_ms = self._clock.now_ms() + TICK_MS
            await self._clock.sleep_until_ms(due_ms)
            self.loop_lags.add(self._clock.now_ms() - due_ms)

    def _wake_heartbeats(self) -> None:
        if self._sender is not None and self._thread is not None:
            self._thread.call(self._sender.wake)
        elif self._sender is not None:
            self._sender.wake()

    def close(self) -> None:
        """Stops the heartbeats. The store is not told: if the worker has not left, its leases expire."""
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


def _after_fork_in_child() -> None:
    """Parent and child would act as one member. So each member ends in the child, which must join as a new one."""
    for fleet in list(_joined):
        fleet.on_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
