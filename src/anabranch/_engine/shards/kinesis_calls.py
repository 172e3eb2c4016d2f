"""Calls to Kinesis that must succeed before anything else can go on: tried again while that may help.

Only retryable errors are; the pause doubles with full jitter, and the deadline ends it with the last error. Nothing
below retries, so this is the only place where these calls are repeated.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from anabranch._engine.outside import Outside
from anabranch.errors import AnabranchError

__all__ = ["patiently"]

T = TypeVar("T")

PAUSE_MS = 200
PAUSE_MAX_MS = 5_000


async def patiently(outside: Outside, call: Callable[[], Awaitable[T]], *, deadline_ms: int) -> T:
    ceiling = PAUSE_MS
    while True:
        try:
            return await call()
        except AnabranchError as error:
            now_ms = outside.clock.now_ms()
            pause_ms = round(outside.entropy.random() * ceiling)
            if not error.retryable or now_ms + pause_ms >= deadline_ms:
                raise
        await outside.clock.sleep_until_ms(now_ms + pause_ms)
        ceiling = min(PAUSE_MAX_MS, 2 * ceiling)
