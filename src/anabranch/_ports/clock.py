"""Time, as the engine sees it.

`now_ms` counts on while the machine is suspended (rule L9: CLOCK_BOOTTIME on Linux), has an arbitrary origin
and never goes back; `wall_ms` is for display and for AWS timestamps only, and is never compared with another
machine's. Waiting goes through `sleep_until_ms`, so that a simulation can run hours in milliseconds.
"""

from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "Timer"]


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now_ms(self) -> int: ...
    def wall_ms(self) -> int: ...
    async def sleep_until_ms(self, at_ms: int) -> None: ...

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls back once on the event loop, not before `at_ms`; cheaper than a task that sleeps."""
