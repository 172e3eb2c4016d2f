"""What happens next: events in true time, which only the world knows."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

__all__ = ["Agenda"]


class Agenda:
    """Events run in the order of their times; those of one time in the order in which they were noted."""

    __slots__ = ("_events", "_noted", "now_ms")

    def __init__(self) -> None:
        self.now_ms = 0
        self._events: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._noted = 0

    def at(self, time_ms: int, action: Callable[..., Any], *arguments: Any) -> None:
        """At a time that has not passed yet."""
        self._noted += 1
        heappush(self._events, (time_ms, self._noted, action, arguments))

    def after(self, delay_ms: int, action: Callable[..., Any], *arguments: Any) -> None:
        self._noted += 1
        heappush(self._events, (self.now_ms + delay_ms, self._noted, action, arguments))

    def run_until(self, end_ms: int) -> int:
        """How many events ran."""
        events = self._events
        count = 0
        while events and events[0][0] <= end_ms:
            self.now_ms, _, action, arguments = heappop(events)
            action(*arguments)
            count += 1
        self.now_ms = end_ms
        return count
