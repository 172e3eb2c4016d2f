"""Calls to the lease store that must succeed before anything else can go on: tried again until they do.

A store that is away delays the start; it does not end it. What is wrong for good (no database, another schema) raises.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from anabranch._engine.outside import Outside
from anabranch.errors import LeaseStoreError

__all__ = ["insist"]

T = TypeVar("T")

PAUSE_MS = 500
TRIES_MAX = 60


async def insist(outside: Outside, call: Callable[[], Awaitable[T]]) -> T:
    for attempt in range(TRIES_MAX):
        try:
            return await call()
        except LeaseStoreError:
            if attempt == TRIES_MAX - 1:
                raise
        await outside.clock.sleep_until_ms(outside.clock.now_ms() + PAUSE_MS)
    raise AssertionError("unreachable")
