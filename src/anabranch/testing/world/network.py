"""The way between a simulated process and a service: messages take time, get lost, come late or twice.

A request takes effect when it arrives, in the service's time and not in its caller's: also after the caller has given
up, is paused, or is dead.
"""

import asyncio
import contextvars
from collections.abc import Callable
from random import Random
from typing import Any

from anabranch.testing.loop import SimulationLoop
from anabranch.testing.world.options import FleetOptions
from anabranch.testing.world.processes import SimulatedProcess

__all__ = ["MESSAGE_SECONDS_MAX", "Network"]

MESSAGE_SECONDS_MAX = 0.030
"""What a message takes at most that is not late."""


class Network:
    def __init__(self, loop: SimulationLoop, options: FleetOptions, random: Random) -> None:
        self._loop = loop
        self._options = options
        self._random = random
        self.is_calm = False
        self.is_closed = False
        self.away_until: dict[str, float] = {}
        """Until when a place answers nobody."""

    async def call(
        self,
        process: SimulatedProcess,
        place: str,
        request: Callable[[], Any],
        no_answer: Callable[[], Exception],
        on_trouble: Callable[[], None] = lambda: None,
    ) -> Any:
        """The answer, or what the service raises; `no_answer()` is raised where a client would give up by itself.
        `on_trouble` is called when the request or its answer is lost, or will come late.
        """
        if self.is_closed:
            raise no_answer()
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self._passes(process, place):
            self._later(self._delay(on_trouble), self._arrive, process, place, request, answer, on_trouble)
            if not self.is_calm and self._random.random() < self._options.repeated:
                self._later(self._delay() + self._random.random() * 5, self._arrive, process, place, request)
        else:
            on_trouble()
        patience = self._loop.call_later(self._random.uniform(3, 8), self._give_up, answer, no_answer)
        try:
            return await answer
        finally:
            patience.cancel()

    def _arrive(
        self,
        process: SimulatedProcess,
        place: str,
        request: Callable[[], Any],
        answer: "asyncio.Future[Any] | None" = None,
        on_trouble: Callable[[], None] = lambda: None,
    ) -> None:
        if self.is_closed or self._loop.time() < self.away_until.get(place, 0.0) or self._is_cut(process, place):
            on_trouble()
            return
        outcome: Any
        try:
            outcome, error = request(), None
        except Exception as raised:  # noqa: BLE001 -- the service's answer, whatever it is, travels to its caller
            outcome, error = None, raised
        if answer is None:
            return
        if self._passes(process, place):
            self._later(self._delay(on_trouble), self._return, answer, outcome, error)
        else:
            on_trouble()

    def _return(self, answer: "asyncio.Future[Any]", outcome: Any, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(outcome)
        else:
            answer.set_exception(error)

    def _give_up(self, answer: "asyncio.Future[Any]", no_answer: Callable[[], Exception]) -> None:
        if not answer.done():
            answer.set_exception(no_answer())

    def _later(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        # Outside of any process: what is under way does not stop with its sender.
        self._loop.call_later(delay, action, *arguments, context=contextvars.Context())

    def _is_cut(self, process: SimulatedProcess, place: str) -> bool:
        return self._loop.time() < process.cut_until.get(place, 0.0)

    def _passes(self, process: SimulatedProcess, place: str) -> bool:
        if self._is_cut(process, place):
            return False
        return self.is_calm or self._random.random() >= self._options.lost

    def _delay(self, on_late: Callable[[], None] = lambda: None) -> float:
        if not self.is_calm and self._random.random() < self._options.late:
            on_late()
            return self._random.uniform(1.5, 14)
        return self._random.uniform(0.001, MESSAGE_SECONDS_MAX)
