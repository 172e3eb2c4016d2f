"""The machine's clock.

On Linux `now_ms` reads CLOCK_BOOTTIME, which goes on while the machine is suspended; elsewhere the monotonic clock, and
the fence's one-sided look at the wall clock catches what that one misses (rule L9).
"""

import asyncio
import heapq
import sys
from collections.abc import Callable
from time import monotonic_ns, time_ns

from anabranch._ports import Clock, Timer

if sys.platform == "linux":
    from time import CLOCK_BOOTTIME, clock_gettime_ns


class SystemClock:
    if sys.platform == "linux":  # here and not in a function of its own: the fence asks before every record

        def now_ms(self) -> int:
            return clock_gettime_ns(CLOCK_BOOTTIME) // 1_000_000

    else:

        def now_ms(self) -> int:
            return monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        return time_ns() // 1_000_000

    async def sleep_until_ms(self, at_ms: int) -> None:
        await asyncio.sleep(max(0, at_ms - self.now_ms()) / 1000)

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0, at_ms - self.now_ms()) / 1000, callback)


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


SLOT_MS = 5


class Scheduler:
    def __init__(self, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        self._clock = clock
        self._on_error = on_error
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._timer: Timer | None = None
        self._armed_ms: int | None = None
        self._closed = False

    def call_at(self, at_ms: int, callback: Callable[[], None]) -> None:
        """Calls back once, at that time or at most a slot later. It cannot be taken back: the callback looks again."""
        if self._closed:
            return
        at_ms += -at_ms % SLOT_MS
        self._number += 1
        heapq.heappush(self._heap, (at_ms, self._number, callback))
        self._arm(at_ms)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, at_ms: int) -> None:
        """Unless it is armed for an earlier time."""
        if self._armed_ms is not None and self._armed_ms <= at_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_ms = at_ms
        self._timer = self._clock.call_at_ms(at_ms, self._fire)

    def _fire(self) -> None:
        self._timer, self._armed_ms = None, None
        now_ms = self._clock.now_ms()
        while self._heap and self._heap[0][0] <= now_ms:
            callback = heapq.heappop(self._heap)[2]
            try:
                callback()
            except Exception as error:  # noqa: BLE001 -- P7: the event loop would log it and forget the timetable
                self._on_error(error)
        if self._heap and not self._closed:
            self._arm(self._heap[0][0])
