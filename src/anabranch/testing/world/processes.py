"""Simulated processes on one event loop: each can be paused, stalled, killed, and has clocks of its own.

A process is a context: every task, timer and callback that is made inside of it belongs to it. The loop asks before
each callback whether its process runs now; what a paused process would have done waits until it goes on, in order,
and what a dead one would have done is never done. A stalled process runs its heartbeats and nothing else.
"""

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, Literal

from anabranch.testing.journal import CommitsBlocked, Fact, ProcessHalted
from anabranch.testing.loop import SimulationLoop

__all__ = ["Processes", "SimulatedClock", "SimulatedProcess"]

Lane = Literal["heart", "main"]

_RUNS_IN: contextvars.ContextVar[tuple["SimulatedProcess", Lane] | None] = contextvars.ContextVar(
    "process", default=None
)
_WALL_MS = 1_700_000_000_000


class SimulatedProcess:
    def __init__(
        self,
        name: str,
        loop: SimulationLoop,
        *,
        rate_ppm: int = 0,
        clock_stops: bool = False,
        tell: Callable[[Fact], None],
    ) -> None:
        self.name = name
        self.is_alive = True
        self.paused_until = 0.0
        self.stalled_until = 0.0
        self.cut_until: dict[str, float] = {}
        """Until when no message passes between this process and the place of that name."""
        self.clock = SimulatedClock(loop, rate_ppm)
        self.context = contextvars.Context()
        self.context.run(_RUNS_IN.set, (self, "main"))
        self._loop = loop
        self._clock_stops = clock_stops
        self._tell = tell

    def hinder(self, seconds: float, *, since: float | None = None) -> None:
        """It cannot commit for so long, from now on or since then."""
        begins = self._loop.time() if since is None else since
        self._tell(CommitsBlocked(self.name, int(begins * 1000), int((begins + seconds) * 1000) + 1))

    def world_ms(self) -> int:
        """The time of the world, which no process knows."""
        return int(self._loop.time() * 1000)

    def spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        return self._loop.create_task(work, name=name, context=self.context)

    def pause(self, seconds: float) -> None:
        now = self._loop.time()
        until = max(self.paused_until, now + seconds)
        if self._clock_stops:
            self.clock.stand_still(until - max(self.paused_until, now))
        self.paused_until = until
        self._tell(ProcessHalted(self.name, int(until * 1000) + 1))
        self.hinder(until - now)

    def stall(self, seconds: float) -> None:
        self.hinder(seconds)
        self.stalled_until = max(self.stalled_until, self._loop.time() + seconds)
        self._tell(ProcessHalted(self.name, int(self.stalled_until * 1000) + 1))

    def is_well_since(self, at: float) -> bool:
        """Whether it has been running, and has reached everybody, since then; or runs no more."""
        troubled_until = max([self.paused_until, self.stalled_until, *self.cut_until.values()])
        return not self.is_alive or troubled_until < at

    def resumes_at(self, lane: Lane) -> float:
        return self.paused_until if lane == "heart" else max(self.paused_until, self.stalled_until)


class Processes:
    """The loop's gatekeeper."""

    def __init__(self, loop: SimulationLoop, is_heart: Callable[[Any], bool]) -> None:
        self._loop = loop
        self._is_heart = is_heart
        self._kept: dict[tuple[SimulatedProcess, Lane], list[asyncio.Handle]] = {}
        self._dead: list[asyncio.Handle] = []
        loop.gate = self._may_run
        loop.context_for = self._context_for

    def open(self) -> None:
        """The run is over: everybody may clean up."""
        self._loop.gate = None
        for handle in [*self._dead, *(handle for kept in self._kept.values() for handle in kept)]:
            self._loop.resume(handle)

    def _context_for(self, coroutine: Any) -> contextvars.Context | None:
        """Heartbeats have a thread of their own in a real process; here, a lane of their own."""
        running = _RUNS_IN.get()
        if running is None or not self._is_heart(coroutine):
            return None
        context = contextvars.copy_context()
        context.run(_RUNS_IN.set, (running[0], "heart"))
        return context

    def _may_run(self, handle: asyncio.Handle) -> bool:
        running = handle._context.get(_RUNS_IN)  # type: ignore[attr-defined]  # noqa: SLF001 -- what makes it a process
        if running is None:
            return True
        process, lane = running
        if not process.is_alive:
            self._dead.append(handle)
            return False
        resumes_at = process.resumes_at(lane)
        if self._loop.time() >= resumes_at and running not in self._kept:
            return True
        if running not in self._kept:
            self._kept[running] = []
            self._loop.call_at(resumes_at, self._release, running, context=contextvars.Context())
        self._kept[running].append(handle)
        return False

    def _release(self, running: tuple[SimulatedProcess, Lane]) -> None:
        process, lane = running
        if self._loop.time() < (resumes_at := process.resumes_at(lane)):
            self._loop.call_at(resumes_at, self._release, running, context=contextvars.Context())
            return
        for handle in self._kept.pop(running):
            self._loop.resume(handle)


class SimulatedClock:
    """A process's clocks: one that may run fast or slow and stand still, and the wall's, which is right."""

    def __init__(self, loop: SimulationLoop, rate_ppm: int) -> None:
        self._loop = loop
        self._rate = 1 + rate_ppm / 1_000_000
        self._stood_still = 0.0

    def stand_still(self, seconds: float) -> None:
        self._stood_still += max(0.0, seconds)

    def now_ms(self) -> int:
        return int((self._loop.time() - self._stood_still) * 1000 * self._rate)

    def wall_ms(self) -> int:
        return _WALL_MS + int(self._loop.time() * 1000)

    async def sleep_until_ms(self, at_ms: int) -> None:
        if at_ms <= self.now_ms():
            await asyncio.sleep(0)
            return
        woken = self._loop.create_future()
        timer = self.call_at_ms(at_ms, lambda: None if woken.done() else woken.set_result(None))
        try:
            await woken
        finally:
            timer.cancel()

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> "_Timer":
        return _Timer(self._loop, self, at_ms, callback)


class _Timer:
    def __init__(self, loop: SimulationLoop, clock: SimulatedClock, at_ms: int, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._clock = clock
        self._at_ms = at_ms
        self._callback = callback
        self._handle = self._arm()

    def cancel(self) -> None:
        self._handle.cancel()

    def _arm(self) -> asyncio.TimerHandle:
        return self._loop.call_later(max(1, self._at_ms - self._clock.now_ms()) / 1000, self._due)

    def _due(self) -> None:
        if self._clock.now_ms() < self._at_ms:
            self._handle = self._arm()
        else:
            self._callback()
