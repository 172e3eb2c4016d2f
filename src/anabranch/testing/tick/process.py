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
        self._agenda = agenda
        self._rate = 1_000_000 + rate_ppm
        self._offset_ms = offset_ms
        self._clock_stops = clock_stops
        self._stood_still_ms = 0
        self._paused_until_ms = 0
        self._main_resumes_ms = 0
        """When the main lane runs again: it waits for pauses and for stalls."""
        self._lanes: dict[Lane, Callable[..., None]] = {"heart": self._heart, "main": self._main}

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
        self.after(max(0, due_ms - self.now_ms()), lane, action, *arguments)

    def after(self, delay_ms: int, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """The same, so long from now on the process's own clock."""
        if self._clock_stops:
            arguments = (self.now_ms() + delay_ms, lane, action, arguments)
            action = self._if_due
        true_delay_ms = -(-delay_ms * 1_000_000 // self._rate)
        self._agenda.after(true_delay_ms, self._lanes[lane], action, arguments)

    def deliver(self, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """Runs the action as soon as the process runs and has done what it does now."""
        self._agenda.after(0, self._lanes[lane], action, arguments)

    def receive(self, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """Runs the action now, or as soon as the process runs: something has come in from outside."""
        self._lanes[lane](action, arguments)

    def pause(self, duration_ms: int) -> None:
        until_ms = self._agenda.now_ms + duration_ms
        if self._clock_stops:
            self._stood_still_ms += max(0, until_ms - max(self._paused_until_ms, self._agenda.now_ms))
        self._paused_until_ms = max(self._paused_until_ms, until_ms)
        self.stall(duration_ms)

    def stall(self, duration_ms: int) -> None:
        self._main_resumes_ms = max(self._main_resumes_ms, self._agenda.now_ms + duration_ms)

    def kill(self) -> None:
        self.alive = False

    def _main(self, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._agenda.now_ms < self._main_resumes_ms:
            self._agenda.at(self._main_resumes_ms, self._main, action, arguments)
        elif self.alive:
            action(*arguments)

    def _heart(self, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._agenda.now_ms < self._paused_until_ms:
            self._agenda.at(self._paused_until_ms, self._heart, action, arguments)
        elif self.alive:
            action(*arguments)

    def _if_due(self, due_ms: int, lane: Lane, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """A timer of a clock that stood still meanwhile runs later."""
        if self.now_ms() < due_ms:
            self.at(due_ms, lane, action, *arguments)
        else:
            action(*arguments)
