"""How fast one shard may be written to: two token buckets under one rate that adapts.

A shard takes 1,000 records and 1 MiB a second (GUIDE, quotas). Our part of that is `shard_share`. The rate starts
there, is cut by three tenths when the shard refuses a record, and grows back by a twentieth of the share each clean
second: so several producers that know nothing of each other come to share a shard. After a refusal the shard rests
for a jittered moment that doubles while refusals go on, so that they do not come back in step.

A record larger than the bucket passes when the bucket is full and leaves a debt: a legal 10 MiB record is never
stuck.
"""

from math import ceil
from typing import Final

from anabranch._model.entropy import Entropy
from anabranch.limits import SHARD_WRITE_BURST_BYTES, SHARD_WRITE_BYTES_PER_SECOND, SHARD_WRITE_RECORDS_PER_SECOND

__all__ = ["ShardPace"]

DECREASE: Final = 0.7
INCREASE_PER_MS: Final = 0.05 / 1_000
FACTOR_MIN: Final = 0.02
PAUSE_MIN_MS: Final = 50
PAUSE_MAX_MS: Final = 2_000


class ShardPace:
    __slots__ = (
        "_bytes", "_bytes_max", "_bytes_per_ms", "_filled_ms", "_records", "_records_max", "_records_per_ms",
        "_refusals", "factor", "paused_until_ms",
    )  # fmt: skip

    def __init__(self, share: float, now_ms: int) -> None:
        self.factor = 1.0
        """The part of our share that the shard is believed to bear now."""
        self.paused_until_ms = now_ms
        self._bytes_per_ms = share * SHARD_WRITE_BYTES_PER_SECOND / 1_000
        self._records_per_ms = share * SHARD_WRITE_RECORDS_PER_SECOND / 1_000
        self._bytes = self._bytes_max = share * SHARD_WRITE_BURST_BYTES
        self._records = self._records_max = max(1.0, share * SHARD_WRITE_RECORDS_PER_SECOND)
        self._filled_ms = now_ms
        self._refusals = 0

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

    def on_accepted(self) -> None:
        self._refusals = 0

    def on_refused(self, now_ms: int, entropy: Entropy) -> bool:
        """The shard is over its limits. Refusals of one call, or of calls sent before the last rest, count once."""
        if now_ms < self.paused_until_ms:
            return False
        self._fill(now_ms)
        self.factor = max(FACTOR_MIN, self.factor * DECREASE)
        self._bytes = min(self._bytes, 0.0)
        self._records = min(self._records, 0.0)
        self.rest(now_ms, entropy)
        return True

    def rest(self, now_ms: int, entropy: Entropy) -> None:
        """Something went wrong in the shard that has nothing to do with its load."""
        if now_ms < self.paused_until_ms:
            return
        ceiling_ms = min(PAUSE_MAX_MS, PAUSE_MIN_MS << min(self._refusals, 10))
        self._refusals += 1
        self.paused_until_ms = now_ms + ceiling_ms // 2 + 1 + int(ceiling_ms / 2 * entropy.random())

    def _fill(self, now_ms: int) -> None:
        elapsed_ms = now_ms - self._filled_ms
        if elapsed_ms <= 0:
            return
        self._filled_ms = now_ms
        self.factor = min(1.0, self.factor + INCREASE_PER_MS * elapsed_ms)
        self._bytes = min(self._bytes_max, self._bytes + elapsed_ms * self._bytes_per_ms * self.factor)
        self._records = min(self._records_max, self._records + elapsed_ms * self._records_per_ms * self.factor)
