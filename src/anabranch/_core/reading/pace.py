"""When a shard may be polled next.

The rules: never more than five reads and 2 MiB a second of a shard, or this application's share of them (AWS counts
all polling applications of a stream together); a large read is followed by the pause that pays for it; at once when
there is more to read; slower and slower while the shard is idle; with growing, jittered pauses while it is throttled
or failing.
"""

from math import ceil

import msgspec

from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch.limits import SHARD_READ_BYTES_PER_SECOND, SHARD_READS_PER_SECOND

__all__ = ["Pace", "PaceLimits"]


THROTTLED_MAX_MS = 2_000


class PaceLimits(msgspec.Struct, frozen=True):
    share: float = 1.0
    """The part of the shard's read quota that this application may use."""
    idle_interval_ms: int = 1000
    """The longest pause between two reads of a shard that has nothing new."""
    backoff_ms: int = 250
    backoff_max_ms: int = 10_000


class Pace:
    """One shard's pace. `next_read_at_ms` is when it may be read; the caller reports each read's end."""

    def __init__(self, limits: PaceLimits, now_ms: int) -> None:
        self._limits = limits
        self._interval_ms = ceil(1000 / (SHARD_READS_PER_SECOND * limits.share))
        self._idle_ms = self._interval_ms
        self._failures = 0
        self.next_read_at_ms = now_ms

    def on_read(self, *, started_at_ms: int, now_ms: int, read_bytes: int, record_count: int, behind_ms: int) -> None:
        """A read succeeded. `behind_ms` is how far behind the tip of the shard it ended."""
        self._failures = 0
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
        """A read was throttled or failed: full jitter over a doubling pause, never less than the normal interval.

        A quota is counted by the second, so waiting longer than two of them for it gains nothing.
        """
        longest = min(self._limits.backoff_max_ms, THROTTLED_MAX_MS) if throttled else self._limits.backoff_max_ms
        self._failures += 1
        pause_ms = backoff_ms(self._failures, entropy, first_ms=self._limits.backoff_ms, max_ms=longest)
        self.next_read_at_ms = now_ms + self._interval_ms + pause_ms

    @property
    def failure_count(self) -> int:
        """Failed reads in a row."""
        return self._failures
