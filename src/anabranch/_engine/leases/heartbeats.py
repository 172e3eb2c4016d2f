"""Sends one member's heartbeats, on a thread of their own so that a busy handler cannot starve them.

The thread has its own event loop. It shares two references with the rest: the report that it sends, and the status that
it publishes. If the main loop is blocked for longer than the stall limit, the thread stops sending, because a process
that does nothing must not keep its shards. Long before that it reports the stack that blocks the loop. C code that
holds the interpreter's lock starves this thread too. The fence still holds then: it is compared, never signalled.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._core.leases.store_calls import Action, StoreCall, Wait
from anabranch._engine.clock import Alarm
from anabranch._engine.leases.drive import StoreCaller, drive, moment_of
from anabranch._ports import Clock
from anabranch.events import Event, LoopBlocked, LoopStalled, LoopUnblocked

LOOK_EVERY_MS = 500
BLOCKED_AFTER_MS = 2_000

EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h: a service manager should start the process again."""
LOOKS_IN_SLACK = 3


class HeartbeatSender:
    """Drives a `HeartbeatState`, on the heartbeat thread or (in a simulation) as a task of the main loop."""

    def __init__(
        self,
        state: HeartbeatState,
        store: StoreCaller,
        clock: Clock,
        *,
        is_stalled: Callable[[], bool],
        on_status: Callable[[], None],
    ) -> None:
        self._state = state
        self._store = store
        self._clock = clock
        self._is_stalled = is_stalled
        self._on_status = on_status
        self._alarm = Alarm(clock)
        self._published = state.status

    async def run(self) -> None:
        """Sends heartbeats until this member has ended."""
        await drive(self._state.run(moment_of(self._clock)), self._perform, self._clock, self._publish)

    def wake(self) -> None:
        """Sends the next heartbeat now: there is something to report."""
        self._state.wake(self._clock.now_ms())
        self._alarm.ring()

    async def _perform(self, action: Action) -> object:
        timing = self._state.timing
        if isinstance(action, Wait):
            await self._alarm.wait(action.until_ms)
            while self._is_stalled():
                await self._alarm.wait(self._clock.now_ms() + timing.heartbeat_interval_ms)
            return None
        assert isinstance(action, StoreCall)
        return await self._store.call(action, timing.call_deadline_ms)

    def _publish(self) -> None:
        if self._state.status is not self._published:
            self._published = self._state.status
            self._on_status()


class HeartbeatThread:
    """A thread with an event loop for heartbeats, which also watches the main loop."""

    def __init__(self, clock: Clock, stall_limit_ms: int, emit: Callable[[Event], None]) -> None:
        self._clock = clock
        self._stall_limit_ms = stall_limit_ms
        self._emit = emit
        self._ticked_at_ms = clock.now_ms()
        self._watched = threading.current_thread()
        self._sender: HeartbeatSender | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self.failure: BaseException | None = None
        """What ended the thread unexpectedly. The main loop checks it with each tick."""

    def tick(self) -> None:
        """The main loop is running."""
        self._ticked_at_ms = self._clock.now_ms()

    def is_stalled(self) -> bool:
        """Whether the main loop has been blocked for too long, or its thread is gone: then no heartbeats are sent."""
        return not self._watched.is_alive() or self._clock.now_ms() - self._ticked_at_ms > self._stall_limit_ms

    @property
    def restart_reason(self) -> str | None:
        """Why this process should be restarted (rule O2); None if it should not. Asked from any thread."""
        if self.is_stalled():
            return f"the event loop has been blocked for longer than {self._stall_limit_ms / 1000:g} s"
        if self._thread is not None and not self._thread.is_alive():
            return f"the heartbeat thread has ended: {self.failure!r}"
        return None

    def start(self, sender: HeartbeatSender, guard: "ExitOnLeaseExpiry | None" = None) -> None:
        self._sender = sender
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(sender, guard, started), name="anabranch-heartbeats", daemon=True
        )
        self._thread.start()
        started.wait()

    def wake(self) -> None:
        if self._sender is not None:
            self._call(self._sender.wake)

    def stop(self) -> None:
        if self._stopped is not None:
            self._call(self._stopped.set)
        self._loop = self._stopped = None

    def _call(self, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself, and its loop is closed
                self._loop.call_soon_threadsafe(callback)

    def _live(self, sender: HeartbeatSender, guard: "ExitOnLeaseExpiry | None", started: threading.Event) -> None:
        try:
            asyncio.run(self._run(sender, guard, started))
        except Exception as error:  # noqa: BLE001 -- P7: nobody awaits a thread; the main loop raises it
            self.failure = error
        finally:
            started.set()  # also if it could not start (no file descriptors left): `start` waits for this

    async def _run(self, sender: HeartbeatSender, guard: "ExitOnLeaseExpiry | None", started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = stopped = asyncio.Event()
        started.set()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sender.run()), group.create_task(self._watch())]
            if guard is not None:
                tasks.append(group.create_task(guard.run()))
            await stopped.wait()
            for task in tasks:
                task.cancel()

    async def _watch(self) -> None:
        """Reports what blocks the main loop: after two seconds, each time the duration has doubled, and at the stall
        limit.
        """
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
        """Waits until the next check. True if the whole process was paused meanwhile (stopped, or the machine was
        suspended). A thread that only lacked the interpreter's lock is late too, but then the process used the CPU.
        """
        due_ms, used_ns = self._clock.now_ms() + LOOK_EVERY_MS, time.process_time_ns()
        await self._clock.sleep_until_ms(due_ms)
        late_ms = self._clock.now_ms() - due_ms
        return late_ms > LOOK_EVERY_MS and (time.process_time_ns() - used_ns) // 1_000_000 < late_ms // 2

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched.ident or 0)  # noqa: SLF001 -- the documented way to another thread
        return "(the thread of the event loop is gone)" if frame is None else "".join(traceback.format_stack(frame))


class ExitOnLeaseExpiry:
    """With `on_zombie="exit"`: ends the process before another member can start records that still run here (rule L11).

    For sinks that cannot refuse a late write by its fence token. It runs on the heartbeat thread, since a call that
    outlives its lease may be what blocks the main loop. Other members start after fence and grace have passed.
    """

    def __init__(
        self,
        state: HeartbeatState,
        clock: Clock,
        running: Callable[[], Sequence[Event]],
        emit: Callable[[Event], None],
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._state = state
        self._clock = clock
        self._running = running
        self._emit = emit
        self._end_process = end_process

    async def run(self) -> None:
        timing, valid_until_ms = self._state.timing, 0
        while True:
            fence = self._state.status.fence
            if fence.ending == "left":
                return
            valid_until_ms = fence.valid_until_ms or valid_until_ms
            due_ms, now_ms = valid_until_ms + timing.grace_ms, self._clock.now_ms()
            if now_ms >= due_ms and (running := self._running()):
                for event in running:
                    self._emit(event)
                self._end_process(EXIT_STATUS)
                return
            await self._clock.sleep_until_ms(max(due_ms, now_ms + timing.slack_ms // LOOKS_IN_SLACK))
