"""One look at something outside serves all who asked before it began; who asks while it goes on gets the next.

So a thousand shards that start together cost two calls, and each has an answer that is younger than its question.
"""

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["SharedLook"]


class SharedLook:
    def __init__(self, look: Callable[[], Awaitable[object]]) -> None:
        self._look = look
        self._lock = asyncio.Lock()
        self._begun_count = 0

    async def wait(self) -> None:
        """Until a look has ended that began after this call. What one raises goes to who made it; others look again."""
        asked_at = self._begun_count
        async with self._lock:
            if self._begun_count > asked_at:
                return
            self._begun_count += 1
            try:
                await self._look()
            except BaseException:
                self._begun_count -= 1  # it has seen nothing
                raise
