"""How long records are handed out before the event loop turns.

A handler or a loop body that never waits keeps everything else of its process waiting: commits, reads, the stop. So
whoever hands out records looks at the clock before each one, and lets the loop turn in between.
"""

import asyncio
from typing import Final

from anabranch._ports.clock import Clock

__all__ = ["LoopTurn"]

TURN_MS: Final = 20
"""A commit takes the loop some six turns: this must be far shorter than the interval between two."""


class LoopTurn:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.over_ms = clock.now_ms() + TURN_MS
        """From then on nothing is started before the loop has turned."""
        self._is_asked = False
        """Whether the loop will tell when it has turned."""

    def is_over(self) -> bool:
        """The loop should turn before anything else is started; whoever is told so waits for one step of it."""
        if self._clock.now_ms() < self.over_ms:
            return False
        if not self._is_asked:
            self._is_asked = True
            asyncio.get_running_loop().call_soon(self._begin)
        return True

    def _begin(self) -> None:
        self._is_asked = False
        self.over_ms = self._clock.now_ms() + TURN_MS
