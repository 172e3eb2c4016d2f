"""The way between workers and the store: messages get lost, late, repeated, or do not pass at all.

A call is answered once, or given up by its caller at its deadline; giving up does not take the request back. A request
that reaches another storage than the one its connection was made to has no effect: the caller gets the new storage's
name, as a client does that connects anew.
"""

from collections.abc import Callable
from random import Random
from typing import Any, Final

from anabranch.testing.tick.agenda import Agenda
from anabranch.testing.tick.options import WorldOptions
from anabranch.testing.tick.process import Lane, Process
from anabranch.testing.tick.store import TickStore

__all__ = ["NO_ANSWER", "Link", "Reconnected"]


class _NoAnswer:
    pass


NO_ANSWER: Final = _NoAnswer()


class Reconnected:
    """The storage behind the connection is another one; the request had no effect."""

    __slots__ = ("incarnation",)

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation


class _Call:
    __slots__ = ("answered", "done", "lane", "request")

    def __init__(self, lane: Lane, request: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.lane = lane
        self.request = request
        self.done = done
        self.answered = False


class Link:
    """One process's connection to the store."""

    calm = False
    """Set for all links when the faults are over."""

    def __init__(
        self, agenda: Agenda, store: TickStore, process: Process, options: WorldOptions, random: Random
    ) -> None:
        self.cut_until_ms = 0
        self.incarnations = dict.fromkeys(("heart", "main"), store.incarnation)
        """The storage that each lane's own connection was made to."""
        self._agenda = agenda
        self._store = store
        self._process = process
        self._options = options
        self._random = random
        self._lag_phase_ms = random.randrange(60_000)

    def call(self, lane: Lane, deadline_ms: int, request: Callable[[], Any], done: Callable[[Any], None]) -> None:
        call = _Call(lane, request, done)
        self._process.at(self._process.now_ms() + deadline_ms, lane, self._give_up, call)
        if self._passes():
            self._agenda.after(self._delay_ms(), self._arrive, call, self.incarnations[lane])
            if self._random.random() < self._options.repeated and not self.calm:
                self._agenda.after(
                    self._delay_ms() + self._random.randrange(5_000), self._arrive, call, self.incarnations[lane]
                )

    def lag_ms(self) -> int:
        """How old the next read is: its replica stands still for a while, then catches up at once, again and again."""
        limit_ms = self._options.lag_ms_max
        return (self._agenda.now_ms + self._lag_phase_ms) % limit_ms if limit_ms and not self.calm else 0

    def _passes(self) -> bool:
        if self._agenda.now_ms < self.cut_until_ms:
            return False
        return self.calm or self._random.random() >= self._options.lost

    def _delay_ms(self) -> int:
        if self._random.random() < self._options.late and not self.calm:
            return self._random.randrange(1_500, 14_000)
        return self._random.randrange(1, 30)

    def _arrive(self, call: _Call, incarnation: str) -> None:
        if self._agenda.now_ms < self.cut_until_ms or self._store.is_away:
            return
        self._store.now_ms = self._agenda.now_ms
        answer = call.request() if incarnation == self._store.incarnation else Reconnected(self._store.incarnation)
        if self._passes():
            self._agenda.after(self._delay_ms(), self._return, call, answer)

    def _return(self, call: _Call, answer: Any) -> None:
        if self._agenda.now_ms >= self.cut_until_ms:
            self._process.receive(call.lane, self._answer, call, answer)

    def _answer(self, call: _Call, answer: Any) -> None:
        if not call.answered:
            call.answered = True
            if isinstance(answer, Reconnected):
                self.incarnations[call.lane] = answer.incarnation
            call.done(answer)

    def _give_up(self, call: _Call) -> None:
        if not call.answered:
            call.answered = True
            call.done(NO_ANSWER)
