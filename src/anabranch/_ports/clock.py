"""Time, as the engine sees it.

`now_ms` counts on while the machine is suspended (rule L9: CLOCK_BOOTTIME on Linux), has an arbitrary origin
and never goes back; `wall_ms` is for display and for AWS timestamps only, and is never compared with another
machine's. Waiting goes through `sleep_until_ms`, so that a simulation can run hours in milliseconds.
"""

from typing import Protocol

__all__ = ["Clock"]


class Clock(Protocol):
    def now_ms(self) -> int: ...
    def wall_ms(self) -> int: ...
    async def sleep_until_ms(self, at_ms: int) -> None: ...
