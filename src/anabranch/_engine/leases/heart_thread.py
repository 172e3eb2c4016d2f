"""Heartbeats on a thread of their own, so that a busy handler cannot starve them; and a watch over the main loop.

The thread has its own event loop and shares two references with the rest: the report it is given and the status it
publishes. It beats only while the main loop turns: past the stall limit it stops renewing on purpose, because a process
that does nothing must not keep its shards. Long before that it names the stack that blocks the loop. C code that holds
the interpreter's lock starves this thread too; then the fence holds, since it is compared and never signalled.
"""

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable

from anabranch._engine.leases.heartbeat import Heartbeat
from anabranch._engine.leases.zombie_guard import ZombieGuard
from anabranch._ports import Clock
from anabranch.events import Event, LoopBlocked, LoopStalled

__all__ = ["HeartThread"]

LOOK_EVERY_MS = 500
BLOCKED_AFTER_MS = 2_000


class HeartThread:
    def __init__(self, clock: Clock, stall_limit_ms: int, emit: Callable[[Event], None]) -> None:
        self._clock = clock
        self._stall_limit_ms = stall_limit_ms
        self._emit = emit
        self._ticked_at_ms = clock.now_ms()
        self._watched = threading.current_thread()
        self._heartbeat: Heartbeat | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self.failure: BaseException | None = None
        """What ended the heart unexpectedly. The main loop looks at it with each tick."""

    def tick(self) -> None:
        """The main loop turns."""
        self._ticked_at_ms = self._clock.now_ms()

    @property
    def is_stalled(self) -> bool:
        """The main loop has stood still for too long, or its thread is gone: nothing is renewed any more."""
        return not self._watched.is_alive() or self._clock.now_ms() - self._ticked_at_ms > self._stall_limit_ms

    def start(self, heartbeat: Heartbeat, guard: ZombieGuard | None = None) -> None:
        self._heartbeat = heartbeat
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(heartbeat, guard, started), name="anabranch-heart", daemon=True
        )
        self._thread.start()
        started.wait()

    def wake(self) -> None:
        if self._heartbeat is not None:
            self._call(self._heartbeat.wake)

    def stop(self) -> None:
        if self._stopped is not None:
            self._call(self._stopped.set)
        self._loop = self._stopped = None

    def _call(self, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself, and its loop is closed
                self._loop.call_soon_threadsafe(callback)

    def _live(self, heartbeat: Heartbeat, guard: ZombieGuard | None, started: threading.Event) -> None:
        try:
            asyncio.run(self._run(heartbeat, guard, started))
        except Exception as error:  # noqa: BLE001 -- P7: nobody awaits a thread; the main loop raises it
            self.failure = error
        finally:
            started.set()  # also where it could not start, for want of file descriptors: nobody waits for it in vain

    async def _run(self, heartbeat: Heartbeat, guard: ZombieGuard | None, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = stopped = asyncio.Event()
        started.set()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(heartbeat.run()), group.create_task(self._watch())]
            if guard is not None:
                tasks.append(group.create_task(guard.run()))
            await stopped.wait()
            for task in tasks:
                task.cancel()

    async def _watch(self) -> None:
        """Names what blocks the main loop: after two seconds, each time that has doubled, and at the stall limit."""
        said_ms, said_stalled = BLOCKED_AFTER_MS // 2, False
        while True:
            if await self._was_paused():
                continue  # nothing blocks the loop: the next look will find it turning
            blocked_ms = self._clock.now_ms() - self._ticked_at_ms
            if blocked_ms < BLOCKED_AFTER_MS:
                said_ms, said_stalled = BLOCKED_AFTER_MS // 2, False
            elif self.is_stalled and not said_stalled:
                said_ms, said_stalled = blocked_ms, True
                self._emit(LoopStalled(blocked_ms=blocked_ms, stack=self._stack()))
            elif blocked_ms >= 2 * said_ms:
                said_ms = blocked_ms
                self._emit(LoopBlocked(blocked_ms=blocked_ms, stack=self._stack()))

    async def _was_paused(self) -> bool:
        """Waits until the next look; True if the whole process stood still meanwhile (stopped, or the machine was
        suspended). A thread that was only starved of the interpreter's lock is late too, but then the processor was
        used.
        """
        due_ms, used_ns = self._clock.now_ms() + LOOK_EVERY_MS, time.process_time_ns()
        await self._clock.sleep_until_ms(due_ms)
        late_ms = self._clock.now_ms() - due_ms
        return late_ms > LOOK_EVERY_MS and (time.process_time_ns() - used_ns) // 1_000_000 < late_ms // 2

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched.ident or 0)  # noqa: SLF001 -- the documented way to another thread
        return "(the thread of the event loop is gone)" if frame is None else "".join(traceback.format_stack(frame))
