"""The machine's clock.

On Linux `now_ms` reads CLOCK_BOOTTIME, which goes on while the machine is suspended; elsewhere the monotonic clock, and
the fence's one-sided look at the wall clock catches what that one misses (rule L9).
"""

import asyncio
import sys
from collections.abc import Callable
from time import monotonic_ns, time_ns

if sys.platform == "linux":
    from time import CLOCK_BOOTTIME, clock_gettime_ns

__all__ = ["SystemClock"]


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
