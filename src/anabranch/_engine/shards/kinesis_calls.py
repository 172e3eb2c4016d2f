"""Calls to Kinesis that must succeed before anything else can go on: tried again while that may help.

Only retryable errors are; the pause doubles with full jitter, and the deadline ends it with the last error. A service
that answers "not now" is worth a longer wait than one that does not answer: a fleet that starts at once is throttled as
a whole, while an endpoint that nobody reaches should be named soon. Nothing below retries, so this is the only place
where these calls are repeated.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from anabranch._core.backoff import backoff_ms
from anabranch._engine.outside import Outside
from anabranch.errors import AnabranchError, ServiceError

__all__ = ["PATIENCE_MS", "patiently"]

T = TypeVar("T")

PATIENCE_MS = 5_000
PAUSE_MS = 200
PAUSE_MAX_MS = 5_000


async def patiently(outside: Outside, call: Callable[[], Awaitable[T]], *, answered_ms: int = PATIENCE_MS) -> T:
    """`answered_ms`: how long a service is asked again that answers with an error which may pass, if longer than
    others.
    """
    begun_ms = outside.clock.now_ms()
    failures = 0
    while True:
        try:
            return await call()
        except AnabranchError as error:
            now_ms = outside.clock.now_ms()
            failures += 1
            pause_ms = backoff_ms(failures, outside.entropy, first_ms=PAUSE_MS, max_ms=PAUSE_MAX_MS)
            patience_ms = max(answered_ms, PATIENCE_MS) if isinstance(error, ServiceError) else PATIENCE_MS
            if not error.retryable or now_ms + pause_ms >= begun_ms + patience_ms:
                raise
        await outside.clock.sleep_until_ms(now_ms + pause_ms)
