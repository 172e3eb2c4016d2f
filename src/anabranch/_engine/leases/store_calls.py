"""Calls to the lease store that must succeed before anything else can go on: tried again until they do.

A store that is away delays the start; it does not end it. Each try has a deadline, after which its outcome is unknown:
it may still take effect, so only calls go here that find out by being repeated (reads, and writes of what is not there
yet). What is wrong for good (no database, another schema) raises.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from anabranch._engine.ports import Ports
from anabranch.errors import LeaseStoreError
from anabranch.events import StoreUnanswered

__all__ = ["retry_store_call", "tell_unanswered"]

T = TypeVar("T")

PAUSE_MS: Final = 500
TRIES_MAX: Final = 60


async def retry_store_call(ports: Ports, call: Callable[[], Awaitable[T]], *, deadline_ms: int) -> T:
    """The answer of the first try that gets one within the deadline; the error of the last try, if none does."""
    for attempt in range(TRIES_MAX):
        try:
            async with asyncio.timeout(deadline_ms / 1000):
                return await call()
        except LeaseStoreError as error:
            ports.store_failures.count += 1
            if attempt == TRIES_MAX - 1:
                raise
            tell_unanswered(ports, error, attempt + 1)
        except TimeoutError as error:
            ports.store_failures.count += 1
            if attempt == TRIES_MAX - 1:
                raise LeaseStoreError(
                    f"lease store {ports.store} gave no answer within {deadline_ms} ms, {TRIES_MAX} times in a row"
                ) from None
            tell_unanswered(ports, error, attempt + 1)
        await ports.clock.sleep_until_ms(ports.clock.now_ms() + PAUSE_MS)
    raise AssertionError("unreachable")


def tell_unanswered(ports: Ports, error: Exception, failures: int) -> None:
    """From the second failure on, then ever more seldom: one may be chance."""
    if failures > 1 and failures & (failures - 1) == 0:
        ports.emit(StoreUnanswered(error=str(error) or "it took too long", failure_count=failures))
