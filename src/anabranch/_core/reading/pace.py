"""When a shard may be polled next, and whether this worker can read at all.

- At most five reads and 2 MiB per second and shard, or this application's share of that: AWS counts all polling
  applications of a stream together. After a large read the pause is longer.
- If there is more to read, the next read follows as soon as the quota allows.
- While the shard is idle, the pauses grow.
- While reads are throttled or fail, the pauses grow with jitter.
"""

from math import ceil
from typing import Final

import msgspec

from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch.limits import SHARD_READ_BYTES_PER_SECOND, SHARD_READS_PER_SECOND

PAUSE_FIRST_MS = 250
PAUSE_MAX_MS = 10_000
THROTTLED_PAUSE_MAX_MS = 2_000
"""AWS counts quotas per second, so a throttled reader need not wait longer."""


class PaceLimits(msgspec.Struct, frozen=True):
    share: float = 1.0
    """The share of the shard's read quota that this application may use."""
    idle_interval_ms: int = 1000
    """The longest pause between reads of an idle shard."""


class Pace:
    """One shard's pace. The shard may be read at `next_read_at_ms`; the caller reports the result of each read."""

    def __init__(self, limits: PaceLimits, now_ms: int) -> None:
        self._limits = limits
        self._interval_ms = ceil(1000 / (SHARD_READS_PER_SECOND * limits.share))
        self._idle_ms = self._interval_ms
        self.failure_count = 0
        """Failed reads in a row."""
        self.next_read_at_ms = now_ms

    def on_read(self, *, started_at_ms: int, now_ms: int, read_bytes: int, record_count: int, behind_ms: int) -> None:
        """`behind_ms` is how far behind the tip of the shard the read ended."""
        self.failure_count = 0
        allowed_at = started_at_ms + self._interval_ms
        paid_at = now_ms + ceil(1000 * read_bytes / (SHARD_READ_BYTES_PER_SECOND * self._limits.share))
        if read_bytes < SHARD_READ_BYTES_PER_SECOND // SHARD_READS_PER_SECOND:
            paid_at = now_ms  # five such reads stay below the quota
        if record_count or behind_ms:
            self._idle_ms = self._interval_ms
            self.next_read_at_ms = max(now_ms, allowed_at, paid_at)
        else:
            self._idle_ms = max(
                self._interval_ms, min(self._limits.idle_interval_ms, self._idle_ms + self._idle_ms // 2)
            )
            self.next_read_at_ms = max(now_ms, started_at_ms + self._idle_ms)

    def on_failure(self, now_ms: int, entropy: Entropy, *, throttled: bool = False) -> None:
        """Full jitter over a doubling pause, never less than the normal interval."""
        longest_ms = THROTTLED_PAUSE_MAX_MS if throttled else PAUSE_MAX_MS
        self.failure_count += 1
        pause_ms = backoff_ms(self.failure_count, entropy, first_ms=PAUSE_FIRST_MS, max_ms=longest_ms)
        self.next_read_at_ms = now_ms + self._interval_ms + pause_ms


UNHEALTHY_AFTER_MS: Final = 60_000
TRY_AGAIN_AFTER_MS: Final = 300_000


class ReadHealth:
    """Whether this worker can read at all. If not, it should not hold shards that others could read (rule U7).

    It is unhealthy after a minute of failures without a success; throttling does not count. An unhealthy worker loses
    its shards, so no read can prove that it has recovered. After five minutes it may try again.
    """

    def __init__(self) -> None:
        self._failing_since_ms: int | None = None
        self._failed_at_ms = 0

    def succeeded(self) -> None:
        self._failing_since_ms = None

    def failed(self, now_ms: int) -> None:
        self._failed_at_ms = now_ms
        if self._failing_since_ms is None:
            self._failing_since_ms = now_ms

    def is_healthy(self, now_ms: int, *, holds_shards: bool) -> bool:
        since_ms = self._failing_since_ms
        if since_ms is None:
            return True
        if not holds_shards and now_ms - self._failed_at_ms >= TRY_AGAIN_AFTER_MS:
            self._failing_since_ms = None
            return True
        return self._failed_at_ms - since_ms < UNHEALTHY_AFTER_MS
