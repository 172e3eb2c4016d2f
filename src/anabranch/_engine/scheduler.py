"""One timetable for the polls and deadlines of all shards.

A heap of callbacks and a single timer for the earliest of them, instead of a task or a timer a shard: two thousand idle
shards cost a few microseconds a poll. Times are rounded up to slots of five milliseconds, so that one wake serves many.
An error of a callback is told to the owner and keeps no other callback from its time.
"""

import heapq
from collections.abc import Callable

from anabranch._ports.clock import Clock, Timer

__all__ = ["Scheduler"]

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
