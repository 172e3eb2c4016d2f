"""Whether this worker can read at all: one that cannot should not hold shards that others could read (rule U7).

Only failures count that go on: a minute of them without a single success, throttling left out. A worker that has lost
its shards by that reads nothing, so that nothing could prove it well again: after five minutes it may try.
"""

from typing import Final

__all__ = ["TRY_AGAIN_AFTER_MS", "UNHEALTHY_AFTER_MS", "ReadHealth"]

UNHEALTHY_AFTER_MS: Final = 60_000
TRY_AGAIN_AFTER_MS: Final = 300_000


class ReadHealth:
    def __init__(self) -> None:
        self._failing_since_ms: int | None = None
        self._failed_at_ms = 0

    def succeeded(self) -> None:
        self._failing_since_ms = None

    def failed(self, now_ms: int) -> None:
        self._failed_at_ms = now_ms
        if self._failing_since_ms is None:
            self._failing_since_ms = now_ms

    def is_good(self, now_ms: int, *, holds_shards: bool) -> bool:
        since_ms = self._failing_since_ms
        if since_ms is None:
            return True
        if not holds_shards and now_ms - self._failed_at_ms >= TRY_AGAIN_AFTER_MS:
            self._failing_since_ms = None
            return True
        return self._failed_at_ms - since_ms < UNHEALTHY_AFTER_MS
