"""What a run reports about itself, decided once a second from its counters: progress, alerts, the lease store, and
shards that stay stopped.

It is pure: measures and the time go in, events come out. What happens to a single shard or call is reported where it
happens.
"""

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import msgspec

from anabranch._core.leases.store_calls import NoAnswer
from anabranch._core.session import Session
from anabranch.alerts import Alert
from anabranch.events import (
    AlertCleared,
    AlertFired,
    ConsumerProgress,
    Event,
    RetentionRunsOut,
    ShardProgress,
    ShardStillStopped,
    StoreAnswered,
    StoreUnanswered,
)
from anabranch.measures import Counters
from anabranch.reasons import Reason, StoppedAtRecord
from anabranch.reports import ConsumerMeasures, FleetStatus, ShardState

PROGRESS_EVERY_MS: Final = 60_000
STILL_STOPPED_EVERY_MS: Final = 300_000
RETENTION_SHARE: Final = 0.25
"""We warn if less than this share of the retention is left before the oldest unfinished record is trimmed."""
STORE_AWAY_AFTER_MS: Final = 2_000
"""Shorter outages are not reported."""
EARLY_MS: Final = 100
"""A check may come this much early and still end the period."""

_NOTHING: Final = Counters()
UNHANDLED_STATES: Final = frozenset({"orphaned", "unowned", "stopped"})

AlertEvent: TypeAlias = AlertFired | AlertCleared


class Lag(msgspec.Struct, frozen=True):
    """The largest lag of several shards, and whose it is."""

    seconds: float
    stream: str
    shard_id: str
    reason: Reason | None = None


class AlertState:
    """One alert: collects the largest lag of each period."""

    def __init__(self, alert: Alert, now_ms: int) -> None:
        self.alert = alert
        self._period_ms = round(alert.period * 1000)
        self._began_ms = now_ms
        self._worst: Lag | None = None
        """The largest lag of this period so far."""
        self._breach_count = 0
        self._since_ms: int | None = None
        """When it fired; None if it is clear."""

    def observe(self, lag: Lag | None, now_ms: int, *, has_shards: bool = True) -> AlertEvent | None:
        """`lag` is None if there is no shard, or nothing is known yet."""
        if lag is not None and (self._worst is None or lag.seconds >= self._worst.seconds):
            self._worst = lag
        if now_ms < self._began_ms + self._period_ms - EARLY_MS:
            return None
        worst, self._worst, self._began_ms = self._worst, None, now_ms
        if worst is None and has_shards:
            return None  # no data for this period: the alert keeps its state
        if worst is not None and worst.seconds > self.alert.lag:
            return self._breached(worst, now_ms)
        return self._passed(worst, now_ms)

    def _breached(self, worst: Lag, now_ms: int) -> AlertFired | None:
        self._breach_count += 1
        if self._since_ms is not None or self._breach_count < self.alert.for_periods:
            return None
        self._since_ms = now_ms
        return AlertFired(
            stream=worst.stream,
            shard_id=worst.shard_id,
            lag=worst.seconds,
            limit=self.alert.lag,
            seconds=self._breach_count * self.alert.period,
            reason=worst.reason,
        )

    def _passed(self, worst: Lag | None, now_ms: int) -> AlertCleared | None:
        self._breach_count, since_ms = 0, self._since_ms
        if since_ms is None:
            return None
        self._since_ms = None
        return AlertCleared(
            stream=None if worst is None else worst.stream,
            shard_id=None if worst is None else worst.shard_id,
            lag=None if worst is None else worst.seconds,
            limit=self.alert.lag,
            seconds=(now_ms - since_ms) / 1000,
        )


def worst_lag(shards: Sequence[ShardState]) -> Lag | None:
    lags = [Lag(shard.lag, shard.stream, shard.shard_id, shard.reason) for shard in shards if shard.lag is not None]
    return max(lags, key=lambda lag: lag.seconds, default=None)


class FleetLag:
    """The worst lag of a fleet. The lag of a shard that no worker handles is often unknown. It then counts as the
    time since the shard was first seen unhandled.
    """

    def __init__(self) -> None:
        self._unhandled_ms: dict[tuple[str, str], int] = {}
        """Unhandled shards, and since when they are."""

    def observe(self, status: FleetStatus, now_ms: int) -> Lag | None:
        """None if no lag is known."""
        unhandled = {(shard.stream, shard.shard_id) for shard in status.shards if shard.state in UNHANDLED_STATES}
        self._unhandled_ms = {key: self._unhandled_ms.get(key, now_ms) for key in sorted(unhandled)}
        lags: list[Lag] = []
        for shard in status.unfinished_shards:
            seconds, since_ms = shard.lag, self._unhandled_ms.get((shard.stream, shard.shard_id))
            if seconds is None and since_ms is not None:
                seconds = (now_ms - since_ms) / 1000
            if seconds is not None:
                lags.append(Lag(seconds, shard.stream, shard.shard_id, shard.reason))
        return max(lags, key=lambda lag: lag.seconds, default=None)


class RunMonitor:
    def __init__(self, alerts: Sequence[Alert], now_ms: int) -> None:
        self._alerts = [AlertState(alert, now_ms) for alert in alerts]
        self._flowed: dict[Session, Counters] = {}
        """The counters of each shard when its progress was last reported."""
        self._looked_ms = now_ms
        self._progress_ms = now_ms
        self._counted = Counters()
        """The counters at the last progress line."""
        self._stopped_ms: dict[tuple[str, str], int] = {}
        self._retention_reported: dict[tuple[str, str], float] = {}
        """The seconds left at the last warning about a shard."""
        self._troubled_since_ms: int | None = None
        self._troubled_count = 0
        """Failed store calls before the present outage."""
        self._is_outage_reported = False

    def wants_measures(self, now_ms: int) -> bool:
        """Whether `look` needs the measures of all shards this time. Collecting them costs time for each shard."""
        return bool(self._alerts or self._stopped_ms) or self._is_progress_due(now_ms)

    def look(self, measures: ConsumerMeasures, now_ms: int) -> list[Event]:
        """Progress of the whole run, shards that stay stopped, and shards that are about to lose records."""
        found = [*self._still_stopped(measures.shards, now_ms), *self._retention(measures.shards)]
        if self._is_progress_due(now_ms):
            found.append(self._progress(measures, now_ms))
        return found

    def _is_progress_due(self, now_ms: int) -> bool:
        return now_ms >= self._progress_ms + PROGRESS_EVERY_MS - EARLY_MS

    def look_at_alerts(self, measures: ConsumerMeasures, now_ms: int) -> list[tuple[Alert, AlertEvent]]:
        """The alerts that fire or clear now."""
        lag, has_shards = worst_lag(measures.shards), bool(measures.shards)
        events = [(state.alert, state.observe(lag, now_ms, has_shards=has_shards)) for state in self._alerts]
        return [(alert, event) for alert, event in events if event is not None]

    # throughput

    def look_at_sessions(
        self, sessions: Iterable[Session], service_seconds: float | None, now_ms: int
    ) -> list[ShardProgress]:
        """The progress of each shard since the last look, if there is any."""
        found: list[ShardProgress] = []
        for session in sessions:
            now, before = session.counters, self._flowed.get(session, _NOTHING)
            now_counts = now.read_count, session.lane.finished_count, now.committed_count, now.failed_count
            # All counters are copied and compared only if one of these has grown: there may be thousands of shards.
            if now_counts != (before.read_count, before.handled_count, before.committed_count, before.failed_count):
                found += self._shard_progress(session, session.lag_seconds(service_seconds), now_ms)
            if session.stopped is not None:
                self._stopped_ms.setdefault((session.stream.name, session.shard_id), now_ms)
        self._looked_ms = now_ms
        return found

    def on_gone(self, session: Session, now_ms: int) -> list[ShardProgress]:
        """The lease is gone: the shard's progress since the last look."""
        found = self._shard_progress(session, None, now_ms)
        self._flowed.pop(session, None)
        return found

    def _shard_progress(self, session: Session, lag: float | None, now_ms: int) -> list[ShardProgress]:
        counters, before = session.counted, self._flowed.get(session, _NOTHING)
        if counters == before:
            return []
        self._flowed[session] = counters
        new = counters.since(before)
        return [
            ShardProgress(
                **session.names,
                seconds=(now_ms - self._looked_ms) / 1000,
                read_count=new.read_count,
                read_bytes=new.read_bytes,
                handled_count=new.handled_count,
                handled_bytes=new.handled_bytes,
                committed_count=new.committed_count,
                failed_count=new.failed_count,
                calls=new.calls,
                lag=lag,
            )
        ]

    def _progress(self, measures: ConsumerMeasures, now_ms: int) -> ConsumerProgress:
        new, seconds = measures.counters.since(self._counted), (now_ms - self._progress_ms) / 1000
        self._counted, self._progress_ms = measures.counters, now_ms
        shards = measures.shards
        worst = max(shards, key=lambda shard: (shard.reason is not None, shard.lag or 0.0), default=None)
        left = [shard.retention_left for shard in shards if shard.retention_left is not None]
        return ConsumerProgress(
            worst_shard=None if worst is None else f"{worst.stream}/{worst.shard_id}",
            handled_count=new.handled_count,
            seconds=seconds,
            records_per_second=round(new.handled_count / seconds, 1),
            lag=measures.lag,
            retention_left=min(left, default=None),
            shard_count=len(shards),
            stalled_count=sum(shard.reason is not None for shard in shards),
            failed_count=new.failed_count,
            reason=None if worst is None else worst.reason,
        )

    # conditions that last

    def _still_stopped(self, shards: Sequence[ShardState], now_ms: int) -> list[Event]:
        events: list[Event] = []
        stopped_ms: dict[tuple[str, str], int] = {}
        for shard in shards:
            stream, shard_id, reason = shard.stream, shard.shard_id, shard.reason
            if not isinstance(reason, StoppedAtRecord):
                continue
            since_ms = self._stopped_ms.get((stream, shard_id), now_ms)
            if now_ms >= since_ms + STILL_STOPPED_EVERY_MS:
                since_ms = now_ms
                events.append(ShardStillStopped(stream=stream, shard_id=shard_id, reason=reason, lag=shard.lag))
            stopped_ms[stream, shard_id] = since_ms
        self._stopped_ms = stopped_ms
        return events

    def _retention(self, shards: Sequence[ShardState]) -> list[Event]:
        """Warns about shards that are about to lose records, and again each time the time left has halved."""
        events: list[Event] = []
        reported: dict[tuple[str, str], float] = {}
        for shard in shards:
            key, left, lag = (shard.stream, shard.shard_id), shard.retention_left, shard.lag
            if left is None or lag is None or left > (lag + left) * RETENTION_SHARE:
                continue
            before = self._retention_reported.get(key)
            if before is None or left <= before / 2:
                before = left
                events.append(
                    RetentionRunsOut(
                        stream=shard.stream, shard_id=shard.shard_id, seconds=left, lag=lag, reason=shard.reason
                    )
                )
            reported[key] = before
        self._retention_reported = reported
        return events

    def look_at_store(self, failure_count: int, trouble: NoAnswer | None, now_ms: int) -> list[Event]:
        """Reports once that the store does not respond (`trouble`), and once that it responds again."""
        if trouble is None:
            since_ms, self._troubled_since_ms = self._troubled_since_ms, None
            count, self._troubled_count = failure_count - self._troubled_count, failure_count
            if since_ms is None or not self._is_outage_reported:
                return []
            self._is_outage_reported = False
            return [StoreAnswered(failure_count=count, seconds=(now_ms - since_ms) / 1000)]
        if self._troubled_since_ms is None:
            self._troubled_since_ms = now_ms
        if self._is_outage_reported or now_ms - self._troubled_since_ms < STORE_AWAY_AFTER_MS:
            return []
        self._is_outage_reported = True
        failed_count = failure_count - self._troubled_count
        return [StoreUnanswered(error=trouble.error, code=trouble.code, failure_count=failed_count)]
