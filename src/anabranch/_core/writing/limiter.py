"""How fast we write to one shard: two token buckets with one adaptive rate.

A shard takes 1,000 records and 1 MiB a second (GUIDE, quotas). `shard_share` is our part of that, and records and bytes
can each have a lower limit. This is the full rate. Refused records lower it in two ways, and it recovers by 5 % of the
full rate per second.

- Each refused record lowers the rate by its share of the recently sent records. With one refused record in fifty the
  rate stays the same; with one in five it falls by a third within a second. The record is sent again at once.
- If most of the last few records were refused, the shard is over its limit. The rate falls by three tenths, and
  the shard pauses. The pause has jitter and doubles until a record is accepted. So we do not hammer a full shard, and
  independent producers end up sharing it.

A record larger than the bucket is sent when the bucket is full, and leaves a debt. So a legal 10 MiB record is never
stuck.
"""

from math import ceil, exp
from typing import Final

from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch.config import ProducerSettings
from anabranch.limits import SHARD_WRITE_BURST_BYTES, SHARD_WRITE_BYTES_PER_SECOND, SHARD_WRITE_RECORDS_PER_SECOND

DECREASE: Final = 0.7
INCREASE_PER_MS: Final = 0.05 / 1_000
FACTOR_MIN: Final = 0.02
PAUSE_MIN_MS: Final = 50
PAUSE_MAX_MS: Final = 2_000
SENT_LATELY_MS: Final = 500
"""With this and the increase, one refused record in forty does not lower the rate."""
RECENT_RECORDS: Final = 8
"""Six refused records in a row are always enough for `is_most`. If one in ten is refused at random, that is rare."""


class RefusedShare:
    """The share of the last few records that were not written. The newest has the largest weight."""

    def __init__(self) -> None:
        self._share = 0.45
        """If the very first record is refused, that is enough for `is_most`; after an accepted one, it is not."""

    def add_accepted(self) -> None:
        self._share -= self._share / RECENT_RECORDS

    def add_refused(self) -> None:
        self._share += (1.0 - self._share) / RECENT_RECORDS

    @property
    def is_most(self) -> bool:
        """Whether most of the last records were not written."""
        return self._share >= 0.5


class ShardPace:
    def __init__(self, settings: ProducerSettings, now_ms: int) -> None:
        self.factor = 1.0
        """Our estimate of how much of our share the shard accepts now."""
        self.paused_until_ms = now_ms
        self.refused_share = RefusedShare()
        share = settings.shard_share
        bytes_limit, records_limit = settings.shard_bytes_per_second, settings.shard_records_per_second
        bytes_rate, burst_bytes = share * SHARD_WRITE_BYTES_PER_SECOND, share * SHARD_WRITE_BURST_BYTES
        if bytes_limit is not None and bytes_limit < bytes_rate:
            bytes_rate = burst_bytes = bytes_limit
        records_rate = share * SHARD_WRITE_RECORDS_PER_SECOND
        if records_limit is not None:
            records_rate = min(records_rate, records_limit)
        self._bytes_per_ms = bytes_rate / 1_000
        self._records_per_ms = records_rate / 1_000
        self._bytes = self._bytes_max = burst_bytes
        self._records = self._records_max = max(1.0, records_rate)
        self._filled_ms = now_ms
        self._sent_lately = 0.0
        """The number of records sent. It decays over time."""
        self._pauses = 0
        """Pauses since a record was last accepted."""

    def spent(self, now_ms: int) -> tuple[float, float]:
        """How many bytes and records its buckets are below full."""
        self._fill(now_ms)
        return self._bytes_max - self._bytes, self._records_max - self._records

    def spend(self, size_bytes: float, records: float) -> None:
        """Counts what was sent to this shard before we knew that it was."""
        self._bytes -= size_bytes
        self._records -= records

    def open_at_ms(self, size_bytes: int, now_ms: int) -> int:
        """When a record of this size may be sent: now or later."""
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
        self._pauses = 0
        self.refused_share.add_accepted()

    def on_refused(self, now_ms: int, entropy: Entropy, record_count: int = 1) -> bool:
        """A response had throttled records. True if the shard pauses now. Responses during a pause do not count."""
        if now_ms < self.paused_until_ms:
            return False
        self._fill(now_ms)
        is_most = self.refused_share.is_most
        kept = DECREASE if is_most else max(DECREASE, 1.0 - record_count / max(1.0, self._sent_lately))
        self.factor = max(FACTOR_MIN, self.factor * kept)
        if is_most:
            self._bytes = min(self._bytes, 0.0)
            self._records = min(self._records, 0.0)
            self.pause(now_ms, entropy)
        return is_most

    def on_failed(self, now_ms: int, entropy: Entropy) -> None:
        """A response had records that failed for other reasons than the shard's load."""
        if self.refused_share.is_most:
            self.pause(now_ms, entropy)

    def pause(self, now_ms: int, entropy: Entropy) -> None:
        if now_ms < self.paused_until_ms:
            return
        self._pauses += 1
        self.paused_until_ms = now_ms + backoff_ms(
            self._pauses, entropy, first_ms=PAUSE_MIN_MS, max_ms=PAUSE_MAX_MS, min_share=0.5
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
