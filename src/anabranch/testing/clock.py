"""A clock that a test moves by hand.

It fulfils the engine's clock port: what sleeps on it wakes when `advance` has moved the time so far, and not before.
"""

import asyncio
import heapq
from collections.abc import Callable

__all__ = ["ManualClock"]


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """Starts at `now_ms`; the wall clock is `wall_ahead_ms` ahead of it, until `jump_wall` moves that."""

    def __init__(self, now_ms: int = 0, *, wall_ahead_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._wall_ahead_ms = wall_ahead_ms
        self._timers: list[tuple[int, int, _Timer]] = []
        self._made = 0

    def now_ms(self) -> int:
        return self._now_ms

    def wall_ms(self) -> int:
        return self._now_ms + self._wall_ahead_ms

    async def sleep_until_ms(self, at_ms: int) -> None:
        if at_ms <= self._now_ms:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        timer = self.call_at_ms(at_ms, lambda: None if woken.done() else woken.set_result(None))
        try:
            await woken
        finally:
            timer.cancel()

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> _Timer:
        """Calls back during the `advance` that reaches `at_ms`; during the next one if that has passed."""
        timer = _Timer(callback)
        self._made += 1
        heapq.heappush(self._timers, (at_ms, self._made, timer))
        return timer

    def advance(self, by_ms: int) -> None:
        """Moves the time on, and calls back what comes due, each at its own time."""
        end_ms = self._now_ms + by_ms
        while self._timers and self._timers[0][0] <= end_ms:
            at_ms, _, timer = heapq.heappop(self._timers)
            self._now_ms = max(self._now_ms, at_ms)
            if timer.callback is not None:
                timer.callback()
        self._now_ms = end_ms

    def jump_wall(self, by_ms: int) -> None:
        """Sets the wall clock without any time passing on the other one: NTP, or a suspended machine."""
        self._wall_ahead_ms += by_ms
