"""What a member reports about its shards: lag, rate, and why a shard is stalled.

Stalled shards come first, then those furthest behind. Rates are measured over a fixed interval, independent of how
often reports are made.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from anabranch._core.handling.lanes import RecordLane
from anabranch._engine.session import Session
from anabranch._model.leases import LeaseKey, ShardStatus
from anabranch.events import Event, StandstillBegan
from anabranch.reports import ShardState

REASON_CHARACTERS_MAX: Final = 200
RATE_INTERVAL_MS: Final = 5_000
"""As often as a viewer asks for it, so that no work is missed."""
STALLED_AFTER_MS: Final = 10_000
"""After this long without a finished record, a shard is reported as stalled, with its oldest unfinished record."""
BUDGET_REPORTED_AFTER_MS: Final = 60_000
BUDGET_REPORTED_EVERY_MS: Final = 600_000
"""A full byte budget is normal back-pressure. Only a long wait is reported, once for all shards."""


class _Progress(msgspec.Struct):
    """Progress of one session since the last measurement."""

    session: Session
    measured_at_ms: int
    finished_count: int = 0
    records_per_second: float = 0.0
    progressed_at_ms: int = 0
    is_stalled: bool = False


class ShardReports:
    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._progress: dict[LeaseKey, _Progress] = {}
        self._full_budget_reported_ms: int | None = None

    def report(
        self,
        sessions: Iterable[Session],
        now_ms: int,
        blocked_reason: str | None = None,
        overdue: Mapping[Session, str] = MappingProxyType({}),
    ) -> tuple[ShardStatus, ...]:
        """`blocked_reason`: why all shards of this process are stalled. `overdue`: sessions with a call that ignores
        its timeout, each with the reason.
        """
        progresses = {session.key: self._measure(session, now_ms) for session in sessions}
        self._progress = progresses
        statuses = [self._status(progress, now_ms, blocked_reason, overdue) for progress in progresses.values()]
        self._report_full_budget([progress.session for progress in progresses.values()], now_ms)
        statuses.sort(key=lambda status: (status.reason is None, -(status.millis_behind_latest or 0), status.shard_id))
        return tuple(statuses)

    def states(
        self, sessions: Iterable[Session], now_ms: int, blocked_reason: str | None, overdue: Mapping[Session, str]
    ) -> tuple[ShardState, ...]:
        """For `Consumer.status()` between two reports: measures nothing and emits nothing."""
        return tuple(
            session.state(
                overdue.get(session)
                or _stall_reason(self._last_measured(session, now_ms), now_ms, blocked_reason)
                or _full_budget_reason(session, now_ms)
            )
            for session in sessions
        )

    def _last_measured(self, session: Session, now_ms: int) -> _Progress:
        """The last measurement; a new one if the session is new or has finished records since then."""
        progress = self._progress.get(session.key)
        if (
            progress is None
            or progress.session is not session
            or progress.finished_count != session.lane.finished_count
        ):
            return _Progress(session, now_ms, progressed_at_ms=now_ms)
        return progress

    def _measure(self, session: Session, now_ms: int) -> _Progress:
        progress = self._progress.get(session.key)
        count = session.lane.finished_count
        if progress is None or progress.session is not session:
            return _Progress(session, now_ms, count, progressed_at_ms=now_ms)
        elapsed_ms = now_ms - progress.measured_at_ms
        if count != progress.finished_count or not session.lane.unfinished_count:
            progress.progressed_at_ms = now_ms
        if elapsed_ms >= RATE_INTERVAL_MS:
            progress.records_per_second = round((count - progress.finished_count) * 1000 / elapsed_ms, 1)
            progress.measured_at_ms, progress.finished_count = now_ms, count
        return progress

    def _status(
        self, progress: _Progress, now_ms: int, blocked_reason: str | None, overdue: Mapping[Session, str]
    ) -> ShardStatus:
        session = progress.session
        reason = overdue.get(session) or _stall_reason(progress, now_ms, blocked_reason)
        if reason is not None and not progress.is_stalled and session.is_live:
            # ShardStopped was already emitted for a shard that stopped at a record.
            self._emit(StandstillBegan(stream=session.stream.name, shard_id=session.shard_id, reason=reason))
        progress.is_stalled = reason is not None
        reason = reason or _full_budget_reason(session, now_ms)
        return ShardStatus(
            session.shard_id,
            None if reason is None else reason[:REASON_CHARACTERS_MAX],
            session.behind_ms if session.is_live else None,  # a stopped shard is not read, so its lag is unknown
            progress.records_per_second,
            session.key.stream_key,
        )

    def _report_full_budget(self, sessions: list[Session], now_ms: int) -> None:
        waiting = [session for session in sessions if _budget_wait_ms(session, now_ms) >= BUDGET_REPORTED_AFTER_MS]
        reported_ms = self._full_budget_reported_ms
        if not waiting or (reported_ms is not None and now_ms - reported_ms < BUDGET_REPORTED_EVERY_MS):
            return
        self._full_budget_reported_ms = now_ms
        first = max(waiting, key=lambda session: _budget_wait_ms(session, now_ms))
        count = "1 shard waits" if len(waiting) == 1 else f"{len(waiting)} shards wait"
        self._emit(
            StandstillBegan(
                stream=first.stream.name,
                shard_id=first.shard_id,
                reason=f"{_full_budget_reason(first, now_ms)}; {count}",
            )
        )


def _stall_reason(progress: _Progress, now_ms: int, blocked_reason: str | None) -> str | None:
    """Why the shard is stalled; None if it is not."""
    session = progress.session
    if session.reason is not None:
        return session.reason
    if session.held_for_isolation and not session.window.is_empty:
        return "a quarantined shard is handled alone: this one waits for its turn"
    if blocked_reason is not None:
        return blocked_reason
    request = session.holding.request
    if session.is_draining and request is not None:
        return f"it is being handed over to {request.requester}"
    waited_ms = now_ms - progress.progressed_at_ms
    lane, first = session.lane, session.lane.first_unfinished
    if first is None or waited_ms < STALLED_AFTER_MS:
        return None
    if isinstance(lane, RecordLane) and (full := lane.stall_reason) is not None:
        return full
    waiting = f"record {first.position} of key {first.partition_key!r} has not been finished for {waited_ms // 1000} s"
    return f"the shard has ended and its children wait: {waiting}" if session.phase == "ended" else waiting


def _budget_wait_ms(session: Session, now_ms: int) -> int:
    """How long a shard with no unfinished records has waited for the byte budget; 0 if it does not wait."""
    since_ms = session.budget_full_since_ms
    is_idle = session.is_live and session.lane.first_unfinished is None
    return now_ms - since_ms if since_ms is not None and is_idle else 0


def _full_budget_reason(session: Session, now_ms: int) -> str | None:
    waited_ms, budget = _budget_wait_ms(session, now_ms), session.budget
    if waited_ms < STALLED_AFTER_MS:
        return None
    return (
        f"the byte budget has been full for {waited_ms // 1000} s: "
        f"unfinished records use {budget.used_bytes} of {budget.limit_bytes} bytes"
    )
