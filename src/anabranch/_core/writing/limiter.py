"""How fast one shard may be written to: two token buckets under one rate that adapts.

A shard takes 1,000 records and 1 MiB a second (GUIDE, quotas). Our part of that is `shard_share`. The rate starts
there and grows back by a twentieth of the share each second. Refusals cut it in two ways:

- Each refused record takes its part of what was sent lately. If one record in fifty is refused, the rate stays as it
  is; if one in five is, it falls by a third within a second. Nothing waits: the record is sent again at once.
- When most of the last few records of a call were refused, the shard is over its limit. The rate is cut by three
  tenths, and the shard rests for a jittered moment that doubles until a record is accepted. So a full shard is not
  asked again and again, and producers that know nothing of each other come to share it.

A record larger than the bucket passes when the bucket is full and leaves a debt: a legal 10 MiB record is never
stuck.
"""

from math import ceil, exp
from typing import Final

from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch.limits import SHARD_WRITE_BURST_BYTES, SHARD_WRITE_BYTES_PER_SECOND, SHARD_WRITE_RECORDS_PER_SECOND

DECREASE: Final = 0.7
INCREASE_PER_MS: Final = 0.05 / 1_000
FACTOR_MIN: Final = 0.02
PAUSE_MIN_MS: Final = 50
PAUSE_MAX_MS: Final = 2_000
SENT_LATELY_MS: Final = 500
"""With this and the increase, up to one refused record in forty leaves the rate as it is."""
RECENT_RECORDS: Final = 6
"""Four refusals in a row are most of them."""


class RefusedShare:
    """The part of the last few records that was not written; the last one weighs most."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share = 0.5

    def add_accepted(self) -> None:
        self._share -= self._share / RECENT_RECORDS

    def add_refused(self) -> None:
        self._share += (1.0 - self._share) / RECENT_RECORDS

    @property
    def is_most(self) -> bool:
        """Also where no record was accepted yet."""
        return self._share >= 0.5


class ShardPace:
    __slots__ = (
        "_bytes", "_bytes_max", "_bytes_per_ms", "_filled_ms", "_records", "_records_max", "_records_per_ms",
        "_rests", "_sent_lately", "factor", "paused_until_ms", "refused_share",
    )  # fmt: skip

    def __init__(self, share: float, now_ms: int) -> None:
        self.factor = 1.0
        """The part of our share that the shard is believed to bear now."""
        self.paused_until_ms = now_ms
        self.refused_share = RefusedShare()
        self._bytes_per_ms = share * SHARD_WRITE_BYTES_PER_SECOND / 1_000
        self._records_per_ms = share * SHARD_WRITE_RECORDS_PER_SECOND / 1_000
        self._bytes = self._bytes_max = share * SHARD_WRITE_BURST_BYTES
        self._records = self._records_max = max(1.0, share * SHARD_WRITE_RECORDS_PER_SECOND)
        self._filled_ms = now_ms
        self._sent_lately = 0.0
        """Records; they fade with their age."""
        self._rests = 0
        """Since a record was last accepted."""

    def open_at_ms(self, size_bytes: int, now_ms: int) -> int:
        """When a record of this size may go: now, or later."""
        self._fill(now_ms)
        if now_ms < self.paused_until_ms:
            return self.paused_until_ms
        missing_bytes = min(size_bytes, self._bytes_max) - self._bytes
        missing_records = 1.0 - self._records
        if missing_bytes <= 0 and missing_records <= 0:
            return now_ms
        wait_ms = max(missing_bytes / self._bytes_per_ms, missing_records / self._records_per_ms) / self.factor
        return now_ms + max(1, ceil(wait_ms))

    def take(self, size_bytes: int) -> None:
        self._bytes -= size_bytes
        self._records -= 1.0
        self._sent_lately += 1.0

    def on_accepted(self) -> None:
        self._rests = 0
        self.refused_share.add_accepted()

    def on_refused(self, now_ms: int, entropy: Entropy, record_count: int = 1) -> bool:
        """A call had records over the shard's limit. True if the shard rests now; refusals during a rest are late."""
        if now_ms < self.paused_until_ms:
            return False
        self._fill(now_ms)
        is_most = self.refused_share.is_most
        kept = DECREASE if is_most else max(DECREASE, 1.0 - record_count / max(1.0, self._sent_lately))
        self.factor = max(FACTOR_MIN, self.factor * kept)
        if is_most:
            self._bytes = min(self._bytes, 0.0)
            self._records = min(self._records, 0.0)
            self.rest(now_ms, entropy)
        return is_most

    def on_failed(self, now_ms: int, entropy: Entropy) -> None:
        """A call had records that failed for a reason that has nothing to do with the shard's load."""
        if self.refused_share.is_most:
            self.rest(now_ms, entropy)

    def rest(self, now_ms: int, entropy: Entropy) -> None:
        if now_ms < self.paused_until_ms:
            return
        self._rests += 1
        self.paused_until_ms = now_ms + backoff_ms(
            self._rests, entropy, first_ms=PAUSE_MIN_MS, max_ms=PAUSE_MAX_MS, min_share=0.5
        )

    def _fill(self, now_ms: int) -> None:
        elapsed_ms = now_ms - self._filled_ms
        if elapsed_ms <= 0:
            return
        self._filled_ms = now_ms
        self._sent_lately *= exp(-elapsed_ms / SENT_LATELY_MS)
        self.factor = min(1.0, self.factor + INCREASE_PER_MS * elapsed_ms)
        self._bytes = min(self._bytes_max, self._bytes + elapsed_ms * self._bytes_per_ms * self.factor)
        self._records = min(self._records_max, self._records + elapsed_ms * self._records_per_ms * self.factor)
