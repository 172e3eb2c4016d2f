"""When a member writes its status row, and what is in it.

The status is for people who look at the fleet (`top`, `explain`); no worker reads it. So it is written when a reason
changes, at most once a minute, and when somebody looks: viewers renew a mark in the application's row every 5 s, and
every poll shows that row.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from anabranch._model.leases import ShardStatus, StatusRow

SHARDS_MAX: Final = 20
SHARDS_BYTES_MAX: Final = 3_600
"""With member id and totals the row stays under 4 KB."""
RENEWED_EVERY_MS: Final = 5_000
"""Between two renewals of a viewer."""
ANSWERED_EVERY_MS: Final = 2_000
"""Between two writes, if several viewers look."""
REASONS_EVERY_MS: Final = 60_000

Reasons = dict[tuple[str, str], str]


class StatusReporter:
    """Decides for one member when its status is written."""

    def __init__(self, member_id: str) -> None:
        self._member_id = member_id
        self._revision = 0
        self._reasons: Reasons = {}
        self._written_ms: int | None = None
        self._mark: int | None = None
        self._is_awaited = False

    def observe_mark(self, mark: int) -> None:
        """The mark in the application's row, as just read. The first one only tells where it stands."""
        if self._mark is not None and mark != self._mark:
            self._is_awaited = True
        self._mark = mark

    def next_row(self, shards: Sequence[ShardStatus], now_ms: int) -> StatusRow | None:
        """The row to write now, from the worst shard to the best; None if no write is due."""
        if not self._is_due(shards, now_ms):
            return None
        self._revision += 1  # also if the last write had no answer: it may still take effect
        lags = [shard.millis_behind_latest for shard in shards if shard.millis_behind_latest is not None]
        return StatusRow(
            member_id=self._member_id,
            revision=self._revision,
            shard_count=len(shards),
            stalled_count=sum(shard.reason is not None for shard in shards),
            millis_behind_latest=max(lags, default=None),
            records_per_second=round(sum(shard.records_per_second for shard in shards), 1),
            shards=_worst(shards),
        )

    def _is_due(self, shards: Sequence[ShardStatus], now_ms: int) -> bool:
        if not self._is_awaited and _reasons(shards) == self._reasons:
            return False
        every_ms = ANSWERED_EVERY_MS if self._is_awaited else REASONS_EVERY_MS
        return self._written_ms is None or now_ms - self._written_ms >= every_ms

    def written(self, shards: Sequence[ShardStatus], now_ms: int) -> None:
        """The last row was acknowledged; it was made of these shards."""
        self._reasons = _reasons(shards)
        self._written_ms = now_ms
        self._is_awaited = False


def _reasons(shards: Sequence[ShardStatus]) -> Reasons:
    return {(one.stream_key, one.shard_id): one.reason for one in shards if one.reason is not None}


def _worst(shards: Sequence[ShardStatus]) -> tuple[ShardStatus, ...]:
    """As many as fit. Names of streams and reasons can be long; stores keep the list as JSON in a JSON string."""
    kept: list[ShardStatus] = []
    room = SHARDS_BYTES_MAX
    for shard in shards[:SHARDS_MAX]:
        room -= len(msgspec.json.encode(msgspec.json.encode(shard).decode()))
        if room < 0:
            break
        kept.append(shard)
    return tuple(kept)
