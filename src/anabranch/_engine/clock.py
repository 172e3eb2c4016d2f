"""Time in the engine: the machine's clock, a wait that can be cut short, and one timer for many callbacks."""

import asyncio
import heapq
import sys
from collections.abc import Callable
from functools import partial
from time import monotonic, monotonic_ns, time, time_ns

from anabranch._ports import Clock, Timer

if sys.platform == "linux":
    from time import CLOCK_BOOTTIME, clock_gettime, clock_gettime_ns

    _now_seconds = partial(clock_gettime, CLOCK_BOOTTIME)
    _now_ns = partial(clock_gettime_ns, CLOCK_BOOTTIME)
else:
    _now_seconds, _now_ns = monotonic, monotonic_ns


class SystemClock:
    """On Linux `now_ms` reads CLOCK_BOOTTIME, which keeps running while the machine is suspended. Elsewhere it reads
    the monotonic clock, and the fence also compares the wall clock (rule L9).
    """

    def now_ms(self) -> int:
        return _now_ns() // 1_000_000

    def is_before(self, at_ms: int, wall_ahead_ms_max: int) -> bool:
        # Floats cost half of whole milliseconds here, and this is asked before each record.
        now_ms = _now_seconds() * 1000.0
        return now_ms < at_ms and time() * 1000.0 - now_ms <= wall_ahead_ms_max

    def wall_ms(self) -> int:
        return time_ns() // 1_000_000

    async def sleep_until_ms(self, at_ms: int) -> None:
        await asyncio.sleep(max(0, at_ms - self.now_ms()) / 1000)

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0, at_ms - self.now_ms()) / 1000, callback)


class Alarm:
    """Waits for a time or for `ring`. One waiter at a time. A `ring` without a waiter ends the next wait at once."""

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
        """Waits until `ring` is called, or until that time."""
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
TURN_CALLBACKS_MAX = 32
"""How many callbacks run in one turn of the event loop: thousands may be due at once, and would block it."""


class Scheduler:
    """A heap of callbacks with one timer for the earliest, instead of a task or timer per shard: 2,000 idle shards cost
    a few microseconds per poll. Times are rounded up to slots of 5 ms, so one wake-up serves many callbacks. An error
    in a callback goes to `on_error` and does not affect the others.
    """

    def __init__(self, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        self._clock = clock
        self._on_error = on_error
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._timer: Timer | None = None
        self._armed_ms: int | None = None
        self.is_closed = False

    def call_at(self, at_ms: int, callback: Callable[[], None]) -> None:
        """Calls back once, at most one slot late. Cannot be cancelled; the callback checks whether it still applies."""
        if self.is_closed:
            return
        at_ms += -at_ms % SLOT_MS
        self._number += 1
        heapq.heappush(self._heap, (at_ms, self._number, callback))
        self._arm(at_ms)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Calls back once, after this turn of the event loop."""
        asyncio.get_running_loop().call_soon(self._call, callback)

    def close(self) -> None:
        self.is_closed = True
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, at_ms: int) -> None:
        """Does nothing if the timer is already set for an earlier time."""
        if self._armed_ms is not None and self._armed_ms <= at_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_ms = at_ms
        self._timer = self._clock.call_at_ms(at_ms, self._fire)

    def _fire(self) -> None:
        self._timer, self._armed_ms = None, None
        now_ms = self._clock.now_ms()
        for _ in range(TURN_CALLBACKS_MAX):
            if not self._heap or self._heap[0][0] > now_ms:
                break
            self._call(heapq.heappop(self._heap)[2])
        if self._heap and not self.is_closed:
            self._arm(self._heap[0][0])

    def _call(self, callback: Callable[[], None]) -> None:
        if self.is_closed:
            return
        try:
            callback()
        except Exception as error:  # noqa: BLE001 -- P7: otherwise the loop logs it and the later callbacks never run
            self._on_error(error)
