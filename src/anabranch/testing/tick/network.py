"""The way between workers and the store: messages get lost, late, repeated, or do not pass at all.

A call is answered once, or given up by its caller at its deadline; giving up does not take the request back. A request
that reaches another storage than the one its connection was made to has no effect: the caller gets the new storage's
name, as a client does that connects anew.
"""

from collections.abc import Callable
from typing import Any, Final

from anabranch.testing.tick.agenda import Agenda
from anabranch.testing.tick.dice import Dice
from anabranch.testing.tick.options import WorldOptions
from anabranch.testing.tick.process import Lane, Process
from anabranch.testing.tick.store import TickStore

__all__ = ["NO_ANSWER", "Link", "Reconnected"]

_PROMPT_MS = 30
_LATE = (0.15, 1.4)
"""In expiries."""


class _NoAnswer:
    pass


NO_ANSWER: Final = _NoAnswer()


class Reconnected:
    """The storage behind the connection is another one; the request had no effect."""

    __slots__ = ("incarnation",)

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation


class _Call:
    __slots__ = ("answered", "begun_ms", "deadline_ms", "done", "lane", "request")

    def __init__(
        self, lane: Lane, begun_ms: int, deadline_ms: int, request: Callable[[], Any], done: Callable[[Any], None]
    ) -> None:
        self.lane = lane
        self.begun_ms = begun_ms
        self.deadline_ms = deadline_ms
        self.request = request
        self.done = done
        self.answered = False


class Link:
    """One process's connection to the store."""

    def __init__(self, agenda: Agenda, store: TickStore, process: Process, options: WorldOptions, dice: Dice) -> None:
        self.cut_until_ms = 0
        self.calm = False
        """Whether the faults are over."""
        self.incarnations = dict.fromkeys(("heart", "main"), store.incarnation)
        """The storage that each lane's own connection was made to."""
        self._agenda = agenda
        self._store = store
        self._process = process
        self._dice = dice
        self._lost = options.lost
        self._late_ms = options.expiries(*_LATE)
        self._late_above = 1 - options.late
        self._repeated = options.repeated
        self._lag_ms_max = options.lag_ms_max
        self._lag_phase_ms = dice.between(0, 60_000)

    def calm_down(self) -> None:
        """The faults are over; messages on their way stay as they are."""
        self.calm = True
        self.cut_until_ms = 0
        self._lost, self._late_above, self._repeated, self._lag_ms_max = 0.0, 1.0, 0.0, 0

    def call(self, lane: Lane, deadline_ms: int, request: Callable[[], Any], done: Callable[[Any], None]) -> None:
        call = _Call(lane, self._process.now_ms(), deadline_ms, request, done)
        self._send(call, self._arrive, call, self.incarnations[lane])
        if self._repeated and self._dice.random() < self._repeated:
            self._agenda.after(self._dice.between(1, 5_000), self._arrive, call, self.incarnations[lane])

    def lag_ms(self) -> int:
        """How old the next read is: its replica stands still for a while, then catches up at once, again and again."""
        limit_ms = self._lag_ms_max
        return (self._agenda.now_ms + self._lag_phase_ms) % limit_ms if limit_ms else 0

    def _send(self, call: _Call, arrive: Callable[..., None], *arguments: Any) -> None:
        """One message of a call, there or back. Only where one does not come in time does the caller's deadline matter:
        most calls need no timer.
        """
        if self._agenda.now_ms < self.cut_until_ms:
            self._wait_in_vain(call)
            return
        fate = self._dice.random()
        delay_ms = 1 + int(fate * _PROMPT_MS)
        if fate < self._lost:
            self._wait_in_vain(call)
            return
        if fate > self._late_above:
            delay_ms = self._dice.between(*self._late_ms)
            self._wait_in_vain(call)
        self._agenda.after(delay_ms, arrive, *arguments)

    def _arrive(self, call: _Call, incarnation: str) -> None:
        store = self._store
        if self._agenda.now_ms < self.cut_until_ms or store.is_away:
            self._wait_in_vain(call)
            return
        store.now_ms = self._agenda.now_ms
        answer = call.request() if incarnation == store.incarnation else Reconnected(store.incarnation)
        self._send(call, self._return, call, answer)

    def _return(self, call: _Call, answer: Any) -> None:
        if self._agenda.now_ms < self.cut_until_ms:
            self._wait_in_vain(call)
        else:
            self._process.receive(call.lane, self._answer, call, answer)

    def _answer(self, call: _Call, answer: Any) -> None:
        if not call.answered:
            call.answered = True
            if isinstance(answer, Reconnected):
                self.incarnations[call.lane] = answer.incarnation
            call.done(answer)

    def _wait_in_vain(self, call: _Call) -> None:
        """A message was lost or is late: the caller may give up, at its deadline."""
        if not call.answered:
            self._process.at(call.begun_ms + call.deadline_ms, call.lane, self._give_up, call)

    def _give_up(self, call: _Call) -> None:
        if not call.answered:
            call.answered = True
            call.done(NO_ANSWER)
