"""What a member reports about its shards: lag, rate, and why a shard is stalled.

Stalled shards come first, then those whose subscription is not active, then those with the largest lag. Rates are
measured over a fixed interval, independent of how often reports are made.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from anabranch._core.handling.lanes import RecordLane
from anabranch._core.reading.service_time import ServiceClock
from anabranch._core.session import Session
from anabranch._engine.dead_lettering import DeadLettering
from anabranch._engine.fanout_reader import Reader
from anabranch._engine.handler_calls import describe_stack
from anabranch._engine.work_queue import Processor
from anabranch._model.leases import ShardStatus, SubscriptionStatus
from anabranch._model.streams import Position
from anabranch.events import Event, ShardRecovered, ShardStalled
from anabranch.reasons import (
    BudgetFull,
    HandedOver,
    HandledAlone,
    PausedInStore,
    Reason,
    RecordInHandler,
    RecordUnfinished,
    WaitsForIsolatedShard,
)
from anabranch.records import Record
from anabranch.reports import ShardState

RATE_INTERVAL_MS: Final = 5_000
"""While somebody watches the fleet, status rows are written at this interval too. So each record is in a shown rate."""
STALLED_AFTER_MS: Final = 10_000
"""After this long without a finished record, a shard is reported as stalled, with its oldest unfinished record."""
BUDGET_REPORTED_AFTER_MS: Final = 60_000
"""A full byte budget is normal back-pressure. Only a long wait for it is reported, once for all shards."""
BUDGET_REPORTED_EVERY_MS: Final = 600_000


class _Progress(msgspec.Struct):
    """Progress of one session since the last measurement."""

    session: Session
    measured_at_ms: int
    finished_count: int = 0
    records_per_second: float = 0.0
    progressed_at_ms: int = 0
    reason: Reason | None = None
    """Why it is stalled, as last reported; None if it is not stalled."""
    stalled_at_ms: int = 0


class _FullBudget(msgspec.Struct, frozen=True):
    """A reported wait for the byte budget. The report names one of the shards that wait."""

    session: Session
    reason: BudgetFull
    since_ms: int


class _HandlerState:
    """What the handler and the dead-letter destination are doing now. It explains why shards are stalled."""

    def __init__(self, processor: Processor, now_ms: int, letter_reasons: Mapping[Session, Reason]) -> None:
        self.processor = processor
        self.stuck: Mapping[Session, Reason] = {**letter_reasons, **processor.overdue(now_ms)}
        """Sessions with a call that ignores its timeout, or with a letter that its destination does not accept."""
        self._running: dict[tuple[Session, Position], Record[bytes]] = {}
        """The records that are in a handler call."""
        if not processor.manual_ack:  # with manual acknowledgement, an unfinished record need not be in a call
            self._running = {(session, record.position): record for session, record in processor.running()}

    def unfinished_reason(self, session: Session, first: Record[bytes], seconds: int) -> Reason:
        """Why this record, the first unfinished one of its shard, is not finished."""
        children_wait = session.end is not None  # the shard was read to its end
        position, partition_key = str(first.position), first.partition_key
        running = self._running.get((session, first.position))
        if running is None:
            return RecordUnfinished(
                position=position, partition_key=partition_key, seconds=seconds, children_wait=children_wait
            )
        return RecordInHandler(
            position=position,
            partition_key=partition_key,
            seconds=seconds,
            children_wait=children_wait,
            at=describe_stack(self.processor.stack_of(running)),
        )


@dataclass(eq=False, repr=False)
class ShardReports:
    _emit: Callable[[Event], None]
    _processor: Processor
    _reader: Reader
    _service_clock: ServiceClock
    _letters: DeadLettering
    _progress: dict[Session, _Progress] = field(default_factory=dict)
    _full_budget_reported_ms: int | None = None
    _full_budget: _FullBudget | None = None
    """The reported wait that has not ended; None if there is none."""

    def report(
        self, sessions: Iterable[Session], now_ms: int, blocked: Reason | None = None
    ) -> tuple[ShardStatus, ...]:
        """Measures all shards, emits events for what changed, and returns the status of each shard, the worst first.

        `blocked`: why all shards of this process are stalled; None if they are not.
        """
        handler = _HandlerState(self._processor, now_ms, self._letters.reasons())
        self._progress = {session: self._measure(session, now_ms) for session in sessions}
        statuses = [self._status(progress, now_ms, blocked, handler) for progress in self._progress.values()]
        self._report_full_budget(now_ms)
        statuses.sort(
            key=lambda status: (status.reason is None, _is_subscribed(status), -(status.lag_ms or 0), status.lease)
        )
        return tuple(statuses)

    def states(
        self, sessions: Iterable[Session], now_ms: int, blocked: Reason | None = None, *, wall_ms: int
    ) -> tuple[ShardState, ...]:
        """For `Consumer.status()` and metrics. Uses the measurements of the last report, and emits nothing."""
        handler = _HandlerState(self._processor, now_ms, self._letters.reasons())
        service_seconds = self._service_clock.seconds(now_ms)
        return tuple(
            session.describe(
                _stall_reason(self._last_measured(session, now_ms), now_ms, blocked, handler)
                or _full_budget_reason(session, now_ms),
                self._reader.subscription_of(session),
                wall_ms=wall_ms,
                service_seconds=service_seconds,
            )
            for session in sessions
        )

    def _last_measured(self, session: Session, now_ms: int) -> _Progress:
        """The last measurement; a new one if the session is new or has finished records since then."""
        progress = self._progress.get(session)
        if progress is None or progress.finished_count != session.lane.finished_count:
            return _Progress(session, now_ms, progressed_at_ms=now_ms)
        return progress

    def _measure(self, session: Session, now_ms: int) -> _Progress:
        progress, count = self._progress.get(session), session.lane.finished_count
        if progress is None:
            return _Progress(session, now_ms, count, progressed_at_ms=now_ms)
        elapsed_ms = now_ms - progress.measured_at_ms
        if count != progress.finished_count or not session.lane.unfinished_count:
            progress.progressed_at_ms = now_ms
        if elapsed_ms >= RATE_INTERVAL_MS:
            progress.records_per_second = round((count - progress.finished_count) * 1000 / elapsed_ms, 1)
            progress.measured_at_ms, progress.finished_count = now_ms, count
        return progress

    def _status(self, progress: _Progress, now_ms: int, blocked: Reason | None, handler: _HandlerState) -> ShardStatus:
        session = progress.session
        reason = _stall_reason(progress, now_ms, blocked, handler)
        service_seconds = self._service_clock.seconds(now_ms)
        self._report_stall(progress, reason, service_seconds, now_ms)
        reason = reason or _full_budget_reason(session, now_ms)
        lag = session.lag_seconds(service_seconds)
        left = session.retention_left_seconds(lag, service_seconds)
        through = None if lag is None or service_seconds is None else round(service_seconds - lag, 1)
        return ShardStatus(
            session.key.short_name,
            reason,
            millis_behind_latest=session.behind_ms if session.is_live else None,  # a stopped shard is not read
            records_per_second=progress.records_per_second,
            subscription=self._subscription(session),
            lag_ms=None if lag is None else round(lag * 1000),
            retention_left_seconds=None if left is None else round(left),
            handled_through_seconds=through,
        )

    def _report_stall(
        self, progress: _Progress, reason: Reason | None, service_seconds: float | None, now_ms: int
    ) -> None:
        """Emits an event if the shard stalled, is stalled for another reason now, or has recovered. A hand-over is not
        reported as a stall, because every deployment causes some. If a record delays it, that record is reported.
        """
        if isinstance(reason, HandedOver):
            reason = None
        session, before = progress.session, progress.reason
        progress.reason = reason
        if reason is None and before is not None:
            seconds, lag = (now_ms - progress.stalled_at_ms) / 1000, session.lag_seconds(service_seconds)
            self._emit(ShardRecovered(**session.names, reason=before, seconds=seconds, lag=lag))
        elif reason is not None and (before is None or before.code != reason.code):
            if before is None:
                progress.stalled_at_ms = now_ms
            if session.stopped is None:  # otherwise ShardStopped has reported it
                self._emit(ShardStalled(**session.names, reason=reason))

    def _subscription(self, session: Session) -> SubscriptionStatus | None:
        found = self._reader.subscription_of(session)
        if found is None:
            return None
        seconds, ago = found.seconds, found.event_seconds_ago
        return SubscriptionStatus(
            found.state,
            seconds=None if seconds is None else round(seconds),
            renewal_count=found.renewal_count,
            event_seconds_ago=None if ago is None else round(ago, 1),
            reason_code=None if found.reason is None else found.reason.code,
        )

    def _report_full_budget(self, now_ms: int) -> None:
        """Emits an event for the shard that has waited longest, and one when no shard waits any more."""
        waiting = [
            session for session in self._progress if _budget_wait_ms(session, now_ms) >= BUDGET_REPORTED_AFTER_MS
        ]
        reported_ms = self._full_budget_reported_ms
        if not waiting:
            full, self._full_budget = self._full_budget, None
            if full is not None:
                session, seconds = full.session, (now_ms - full.since_ms) / 1000
                lag = session.lag_seconds(self._service_clock.seconds(now_ms)) if session.is_live else None
                self._emit(ShardRecovered(**session.names, reason=full.reason, seconds=seconds, lag=lag))
            return
        if reported_ms is not None and now_ms - reported_ms < BUDGET_REPORTED_EVERY_MS:
            return
        self._full_budget_reported_ms = now_ms
        first = max(waiting, key=lambda session: _budget_wait_ms(session, now_ms))
        reason = _full_budget_reason(first, now_ms, shard_count=len(waiting))
        assert reason is not None
        since_ms = self._full_budget.since_ms if self._full_budget else now_ms - _budget_wait_ms(first, now_ms)
        self._full_budget = _FullBudget(first, reason, since_ms)
        self._emit(ShardStalled(**first.names, reason=reason))


def _is_subscribed(status: ShardStatus) -> bool:
    """True also for a shard that needs no subscription."""
    return status.subscription is None or status.subscription.state == "active"


def _stall_reason(progress: _Progress, now_ms: int, blocked: Reason | None, handler: _HandlerState) -> Reason | None:
    """Why the shard is stalled; None if it is not."""
    session, row = progress.session, progress.session.row
    if session.stopped is not None:
        return session.stopped.reason
    if (reason := handler.stuck.get(session) or session.reason) is not None:
        return reason
    if handler.processor.queue.is_held(session) and not session.window.is_empty:
        if session.lane.one_at_a_time:
            return HandledAlone(owner_count=row.takes_without_progress - session.crash_counted)
        return WaitsForIsolatedShard()
    if blocked is not None:
        return blocked
    if row.paused:
        return PausedInStore()
    request, waited_ms = session.holding.request, now_ms - progress.progressed_at_ms
    lane, first = session.lane, session.lane.first_unfinished
    if first is None or waited_ms < STALLED_AFTER_MS:
        # A hand-over is the reason only until a record has delayed it for so long.
        return HandedOver(to_member=request.requester) if session.state == "draining" and request is not None else None
    if isinstance(lane, RecordLane) and (lane_reason := lane.stall_reason) is not None:
        return lane_reason
    return handler.unfinished_reason(session, first, waited_ms // 1000)


def _budget_wait_ms(session: Session, now_ms: int) -> int:
    """How long a shard with no unfinished records has waited for the byte budget; 0 if it does not wait."""
    since_ms = session.budget_full_since_ms
    if since_ms is None or not session.is_live or session.lane.first_unfinished is not None:
        return 0
    return now_ms - since_ms


def _full_budget_reason(session: Session, now_ms: int, *, shard_count: int = 1) -> BudgetFull | None:
    """None if the shard does not wait for the byte budget, or only for a short time."""
    waited_ms, budget = _budget_wait_ms(session, now_ms), session.budget
    if waited_ms < STALLED_AFTER_MS:
        return None
    return BudgetFull(
        seconds=waited_ms // 1000,
        used_bytes=budget.used_bytes,
        limit_bytes=budget.limit_bytes,
        shard_count=shard_count,
    )
