"""A simulated process: its clocks, its pauses, and the timers and answers that wait while it does not run.

Everything a worker does goes through one of two lanes: `heart` for heartbeats, `main` for the rest. A paused process
runs neither, a stalled one only its heart. What comes due meanwhile runs when it is over, in the order in which it was
due: so a worker that wakes up may act on old news before it looks at a clock.
"""

from collections.abc import Callable
from typing import Any, Literal

from anabranch.testing.tick.agenda import Agenda

__all__ = ["Lane", "Process"]

Lane = Literal["heart", "main"]


class Process:
    def __init__(self, agenda: Agenda, *, rate_ppm: int = 0, offset_ms: int = 0, clock_stops: bool = False) -> None:
        self.alive = True
        self.paused_until_ms = 0
        self.stalled_until_ms = 0
        self._agenda = agenda
        self._rate = 1_000_000 + rate_ppm
        self._offset_ms = offset_ms
        self._clock_stops = clock_stops
        self._stood_still_ms = 0

    def now_ms(self) -> int:
        return (self._agenda.now_ms - self._stood_still_ms) * self._rate // 1_000_000 + self._offset_ms

    def wall_ms(self) -> int:
        """True time with an offset of its own: NTP keeps the wall clock's rate, and suspending does not stop it."""
        return self._agenda.now_ms + 1_700_000_000_000 + self._offset_ms

    def true_ms(self) -> int:
        """What no process can know: for the journal only."""
        return self._agenda.now_ms

    def at(self, due_ms: int, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """Runs the action when the process's own clock shows `due_ms`, and the process runs."""
        ahead_ms = max(0, due_ms - self.now_ms())
        delay_ms = -(-ahead_ms * 1_000_000 // self._rate)
        self._agenda.after(delay_ms, self._due, due_ms, lane, action, arguments)

    def deliver(self, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """Runs the action as soon as the process runs and has done what it does now."""
        self._agenda.after(0, self._due, None, lane, action, arguments)

    def receive(self, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """Runs the action now, or as soon as the process runs: something has come in from outside."""
        self._due(None, lane, action, arguments)

    def pause(self, duration_ms: int) -> None:
        until_ms = self._agenda.now_ms + duration_ms
        if self._clock_stops:
            self._stood_still_ms += max(0, until_ms - max(self.paused_until_ms, self._agenda.now_ms))
        self.paused_until_ms = max(self.paused_until_ms, until_ms)

    def stall(self, duration_ms: int) -> None:
        self.stalled_until_ms = max(self.stalled_until_ms, self._agenda.now_ms + duration_ms)

    def kill(self) -> None:
        self.alive = False

    def _due(self, due_ms: int | None, lane: Lane, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        resumes_ms = self.paused_until_ms if lane == "heart" else max(self.paused_until_ms, self.stalled_until_ms)
        if self._agenda.now_ms < resumes_ms:
            self._agenda.at(resumes_ms, self._due, due_ms, lane, action, arguments)
        elif due_ms is not None and self.now_ms() < due_ms:
            self.at(due_ms, lane, action, *arguments)
        else:
            action(*arguments)
