"""The machine's clock.

On Linux `now_ms` reads CLOCK_BOOTTIME, which goes on while the machine is suspended; elsewhere the monotonic clock, and
the fence's one-sided look at the wall clock catches what that one misses (rule L9).
"""

import asyncio
import time
from collections.abc import Callable

__all__ = ["SystemClock"]

_NOW: Callable[[], int] = time.monotonic_ns
if hasattr(time, "CLOCK_BOOTTIME"):

    def _boot_time_ns() -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    _NOW = _boot_time_ns


class SystemClock:
    def now_ms(self) -> int:
        return _NOW() // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep_until_ms(self, at_ms: int) -> None:
        await asyncio.sleep(max(0, at_ms - self.now_ms()) / 1000)

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0, at_ms - self.now_ms()) / 1000, callback)
