"""Simulated processes on one event loop, and the network between them and the services.

Each process can be paused, stalled and killed, and has its own clocks. A process is a `contextvars` context: every
task, timer and callback created inside it belongs to it. Before each callback, the loop asks the `ProcessScheduler`
whether its process runs now. The callbacks of a paused process wait until it resumes, and then run in order. Those of a
dead process never run. A stalled process runs only its heartbeats.

On the network, messages take time, get lost, or arrive late or twice. A request takes effect when it arrives at the
service, even if its caller has given up, is paused or is dead.
"""

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from anabranch._engine.fleet import HeartbeatSender
from anabranch.testing.doubles import TimerClock
from anabranch.testing.journal import CommitsBlocked, ProcessHalted
from anabranch.testing.loop import SimulationLoop

if TYPE_CHECKING:
    from anabranch.testing.world.fleet import SimulatedFleet

ProcessPart = Literal["heartbeat", "main"]

_CURRENT_PROCESS: contextvars.ContextVar[tuple["SimulatedProcess", ProcessPart] | None] = contextvars.ContextVar(
    "process", default=None
)
WALL_START_MS = 1_700_000_000_000
"""The wall-clock time at the start of each simulation."""


class SimulatedProcess:
    def __init__(self, name: str, fleet: "SimulatedFleet", *, rate_ppm: int = 0, clock_stops: bool = False) -> None:
        self.name = name
        self.is_alive = True
        self.paused_until = 0.0
        self.stalled_until = 0.0
        self.cut_until: dict[str, float] = {}
        """For each service (`store`, `stream`): until when this process is cut off from it."""
        self.clock = SimulatedClock(fleet.loop, rate_ppm)
        self.context = contextvars.Context()
        self.context.run(_CURRENT_PROCESS.set, (self, "main"))
        self._loop = fleet.loop
        self._clock_stops = clock_stops
        """Whether a pause also stops its monotonic clock, as on a suspended machine."""
        self._tell = fleet.journal.tell

    def report_commits_blocked(self, seconds: float, *, since: float | None = None) -> None:
        """Tells the checkers that the process cannot commit for this long, from now or from `since`."""
        starts = self._loop.time() if since is None else since
        self._tell(
            CommitsBlocked(self.name, int(starts * 1000), int((starts + seconds) * 1000) + 1)
        )  # rounded outwards

    def world_ms(self) -> int:
        """The true time, for the checkers. The process sees only its own clock, which may run fast or slow."""
        return int(self._loop.time() * 1000)

    def spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        return self._loop.create_task(work, name=name, context=self.context)

    def pause(self, seconds: float) -> None:
        now = self._loop.time()
        until = max(self.paused_until, now + seconds)
        if self._clock_stops:
            self.clock.stop_for(until - max(self.paused_until, now))
        self.paused_until = until
        self._tell(ProcessHalted(self.name, int(until * 1000) + 1))
        self.report_commits_blocked(until - now)

    def stall(self, seconds: float) -> None:
        self.report_commits_blocked(seconds)
        self.stalled_until = max(self.stalled_until, self._loop.time() + seconds)
        self._tell(ProcessHalted(self.name, int(self.stalled_until * 1000) + 1))

    def resumes_at(self, part: ProcessPart) -> float:
        return self.paused_until if part == "heartbeat" else max(self.paused_until, self.stalled_until)


class ProcessScheduler:
    """Decides for the loop which callbacks run now."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop
        self._deferred: dict[tuple[SimulatedProcess, ProcessPart], list[asyncio.Handle]] = {}
        self._dead: list[asyncio.Handle] = []
        loop.gate = self._may_run
        loop.context_for = self._context_for

    def release_all(self) -> None:
        """Runs all callbacks, also those of dead processes, so that everything is cleaned up after the run."""
        self._loop.gate = None
        for handle in [*self._dead, *(handle for kept in self._deferred.values() for handle in kept)]:
            self._loop.resume(handle)

    def _context_for(self, coroutine: Any) -> contextvars.Context | None:
        """Heartbeats have their own thread in a real process, so they have their own context here."""
        owner = _CURRENT_PROCESS.get()
        if owner is None or coroutine.cr_code is not HeartbeatSender.run.__code__:
            return None
        context = contextvars.copy_context()
        context.run(_CURRENT_PROCESS.set, (owner[0], "heartbeat"))
        return context

    def _may_run(self, handle: asyncio.Handle) -> bool:
        owner = handle._context.get(_CURRENT_PROCESS)  # type: ignore[attr-defined]  # noqa: SLF001 -- no public way to read it
        if owner is None:
            return True
        process, part = owner
        if not process.is_alive:
            self._dead.append(handle)
            return False
        resumes_at = process.resumes_at(part)
        if self._loop.time() >= resumes_at and owner not in self._deferred:  # earlier callbacks must run first
            return True
        if owner not in self._deferred:
            self._deferred[owner] = []
            self._loop.call_at(resumes_at, self._release, owner, context=contextvars.Context())
        self._deferred[owner].append(handle)
        return False

    def _release(self, owner: tuple[SimulatedProcess, ProcessPart]) -> None:
        """Runs the deferred callbacks, unless the pause was extended meanwhile."""
        process, part = owner
        if self._loop.time() < (resumes_at := process.resumes_at(part)):
            self._loop.call_at(resumes_at, self._release, owner, context=contextvars.Context())
            return
        for handle in self._deferred.pop(owner):
            self._loop.resume(handle)


class SimulatedClock(TimerClock):
    """A process's clocks: a monotonic clock, which may run fast or slow or stop, and a wall clock, which is exact."""

    def __init__(self, loop: SimulationLoop, rate_ppm: int) -> None:
        self._loop = loop
        self._rate = 1 + rate_ppm / 1_000_000
        self._stopped_seconds = 0.0

    def stop_for(self, seconds: float) -> None:
        self._stopped_seconds += max(0.0, seconds)

    def now_ms(self) -> int:
        return int((self._loop.time() - self._stopped_seconds) * 1000 * self._rate)

    def wall_ms(self) -> int:
        return WALL_START_MS + int(self._loop.time() * 1000)

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> "_ClockTimer":
        return _ClockTimer(self._loop, self, at_ms, callback)


class _ClockTimer:
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
        if self._clock.now_ms() < self._at_ms:  # the process's clock is slow, or was stopped
            self._handle = self._arm()
        else:
            self._callback()


MESSAGE_SECONDS_MAX = 0.030
"""The longest delay of a message that is not late."""
_LATE_SECONDS = (1.5, 14)
"""The delay of a late message. It may be longer than the client's timeout."""
_TIMEOUT_SECONDS = (3, 8)
"""The client's timeout."""
_REPEATED_WITHIN_SECONDS = 5


class Network:
    """Carries the requests of processes to the services, and the answers back."""

    def __init__(self, fleet: "SimulatedFleet") -> None:
        self._loop = fleet.loop
        self._options = fleet.options
        self._random = fleet.random
        self.is_calm = False
        """If so, no message is lost, late or repeated, except where a process is cut off."""
        self.is_closed = False
        """After the run: every call fails at once."""

    async def call(
        self,
        process: SimulatedProcess,
        service: str,
        request: Callable[[], Any],
        timeout_error: Exception,
        on_trouble: Callable[[], None] = lambda: None,
    ) -> Any:
        """Calls `request` at the service, and returns its result or raises its error. Raises `timeout_error` after the
        client's timeout. Calls `on_trouble` when the request or its answer is lost or late.
        """
        if self.is_closed:
            raise timeout_error
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self._passes(process, service):
            self._later(self._delay(on_trouble), self._arrive, process, service, request, answer, on_trouble)
            if not self.is_calm and self._random.random() < self._options.repeated:
                delay = self._delay() + self._random.random() * _REPEATED_WITHIN_SECONDS
                self._later(delay, self._arrive, process, service, request)
        else:
            on_trouble()
        timeout_seconds = self._random.uniform(*_TIMEOUT_SECONDS)
        timer = self._loop.call_later(timeout_seconds, self._deliver, answer, None, timeout_error)
        try:
            return await answer
        finally:
            timer.cancel()

    def _arrive(
        self,
        process: SimulatedProcess,
        service: str,
        request: Callable[[], Any],
        answer: "asyncio.Future[Any] | None" = None,
        on_trouble: Callable[[], None] = lambda: None,
    ) -> None:
        """The request takes effect at the service. `answer` is None for a repeated request: its answer goes nowhere."""
        if self.is_closed or self._is_cut(process, service):
            on_trouble()
            return
        outcome: Any
        try:
            outcome, error = request(), None
        except Exception as raised:  # noqa: BLE001 -- the service's answer, which travels to the caller
            outcome, error = None, raised
        if answer is None:
            return
        if self._passes(process, service):
            self._later(self._delay(on_trouble), self._deliver, answer, outcome, error)
        else:
            on_trouble()

    def _deliver(self, answer: "asyncio.Future[Any]", outcome: Any, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(outcome)
        else:
            answer.set_exception(error)

    def _later(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        # Outside of any process: a message arrives even if its sender has died.
        self._loop.call_later(delay, action, *arguments, context=contextvars.Context())

    def _is_cut(self, process: SimulatedProcess, service: str) -> bool:
        return self._loop.time() < process.cut_until.get(service, 0.0)

    def _passes(self, process: SimulatedProcess, service: str) -> bool:
        """Whether this message arrives. Draws a random number, so call it once for each message."""
        if self._is_cut(process, service):
            return False
        return self.is_calm or self._random.random() >= self._options.lost

    def _delay(self, on_late: Callable[[], None] = lambda: None) -> float:
        if not self.is_calm and self._random.random() < self._options.late:
            on_late()
            return self._random.uniform(*_LATE_SECONDS)
        return self._random.uniform(0.001, MESSAGE_SECONDS_MAX)
