"""Waiting for a time or for a call, whichever is first: what every loop of the engine sleeps on."""

import asyncio

from anabranch._ports.clock import Clock

__all__ = ["Alarm"]


class Alarm:
    """One waiter at a time. A ring that nobody waits for is kept: the next wait returns at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiter: asyncio.Future[None] | None = None
        self._rung = False

    def ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        else:
            self._rung = True

    async def wait(self, until_ms: int | None = None) -> None:
        """Until the alarm rings, or until the time if one is given."""
        if self._rung:
            self._rung = False
            return
        if until_ms is not None and until_ms <= self._clock.now_ms():
            return
        self._waiter = asyncio.get_running_loop().create_future()
        timer = None if until_ms is None else self._clock.call_at_ms(until_ms, self._on_time)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _on_time(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
