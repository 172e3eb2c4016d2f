"""When a member writes its status row, and what is in it.

The status is for people who look at the fleet (`top`, `explain`); no worker reads it. So it is written when a reason
changes, at most once a minute, and while a viewer runs: viewers renew a mark in the application's row every 5 s, and
every poll shows that row.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from anabranch._model.leases import ShardStatus, StatusRow
from anabranch.reasons import Reason

SHARDS_MAX: Final = 20
SHARDS_BYTES_MAX: Final = 3_600
"""With member id and totals the row stays under 4 KB."""
RENEWED_EVERY_MS: Final = 5_000
"""Between two renewals of a viewer."""
ANSWERED_EVERY_MS: Final = 2_000
"""Between two writes, if several viewers look."""
REASONS_EVERY_MS: Final = 60_000
REASON_CHARACTERS_MAX: Final = 120
"""The limit of each text in a reason, so that many reasons fit."""

Reasons = dict[str, Reason]


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
        """The mark in the application's row, as just read. The first one only sets the baseline."""
        if self._mark is not None and mark != self._mark:
            self._is_awaited = True
        self._mark = mark

    def next_row(self, shards: Sequence[ShardStatus], now_ms: int) -> StatusRow | None:
        """The row to write now, from the worst shard to the best; None if no write is due."""
        if not self._is_due(shards, now_ms):
            return None
        self._revision += 1  # even if the last write had no answer: it may still take effect
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
    return {one.lease: one.reason for one in shards if one.reason is not None}


def _worst(shards: Sequence[ShardStatus]) -> tuple[ShardStatus, ...]:
    """As many as fit, and always the one that is furthest behind: the application's lag is read from it. Reasons can be
    long.
    """
    kept: list[ShardStatus] = []
    room = SHARDS_BYTES_MAX
    furthest = max(shards, key=lambda shard: shard.lag_ms or 0, default=None)
    others = [shard for shard in shards if shard is not furthest]
    worst = [*([] if furthest is None else [furthest]), *others][:SHARDS_MAX]
    for shard in map(_shortened, worst):
        room -= _stored_bytes(_without_text(shard))
        if room < 0:
            break
        kept.append(shard)
    return tuple(kept)


def _shortened(shard: ShardStatus) -> ShardStatus:
    reason = shard.reason
    return shard if reason is None else replace(shard, reason=reason.shortened(REASON_CHARACTERS_MAX))


def shards_json(shards: Sequence[ShardStatus]) -> str:
    """The shards of a status row as stores keep them. The texts of reasons are left out if they do not fit: they are
    only for readers of another version, which do not know the reason.
    """
    whole = [msgspec.to_builtins(shard) for shard in shards]
    kept = whole if _stored_bytes(whole) <= SHARDS_BYTES_MAX else [_without_text(shard) for shard in shards]
    return msgspec.json.encode(kept).decode()


def _without_text(shard: ShardStatus) -> list[Any]:
    fields: list[Any] = msgspec.to_builtins(shard)
    if shard.reason is not None:
        fields[1] = {name: value for name, value in fields[1].items() if name != "text"}
    return fields


def _stored_bytes(document: object) -> int:
    """Its size as JSON in a JSON string, as stores keep it."""
    return len(msgspec.json.encode(msgspec.json.encode(document).decode()))
