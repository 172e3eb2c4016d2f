"""Checks a run once a second, and emits the events that its monitor returns. Decides nothing itself."""

from collections.abc import Mapping
from typing import Final

from anabranch._core.monitor import RunMonitor
from anabranch._core.reading.service_clock import ServiceClock
from anabranch._core.session import Session
from anabranch._engine.fleet import Fleet
from anabranch._model.leases import LeaseKey
from anabranch._ports import Ports
from anabranch.alerts import Alert, tell_alert
from anabranch.measures import ConsumerMeasures

LOOK_EVERY_MS: Final = 1_000


class RunWatch:
    def __init__(
        self,
        ports: Ports,
        fleet: Fleet,
        sessions: Mapping[LeaseKey, Session],
        service_clock: ServiceClock,
        alerts: tuple[Alert, ...],
    ) -> None:
        self._ports = ports
        self._fleet = fleet
        self._sessions = sessions
        self._service_clock = service_clock
        self._marks: dict[Session, int] = {}
        """The sum of each session's counters at the last check. Sessions whose sum is the same are not checked."""
        self._monitor = RunMonitor(alerts, ports.clock.now_ms())

    def look(self) -> bool:
        """Checks only shards whose counters have changed, because there may be thousands. Returns whether to look at
        the measures, too, which cost more.
        """
        now_ms, monitor, emit = self._ports.clock.now_ms(), self._monitor, self._ports.emit
        for session in self._sessions.values():
            counters = session.counters
            mark = counters.read_count + session.lane.finished_count + counters.committed_count + counters.failed_count
            if mark != self._marks.get(session):
                self._marks[session] = mark
                self._look_at(session, now_ms)
            if session.stopped is not None:
                monitor.stopped(session.stream.name, session.shard_id, now_ms)
        monitor.looked(now_ms)
        fleet = self._fleet
        failure_count = fleet.store.failure_count + fleet.heartbeat_store.failure_count
        for event in monitor.look_at_store(failure_count, fleet.store_trouble, now_ms):
            emit(event)
        return monitor.wants_measures(now_ms)

    def look_at_measures(self, measures: ConsumerMeasures) -> None:
        now_ms, emit = self._ports.clock.now_ms(), self._ports.emit
        for event in self._monitor.look(measures, now_ms):
            emit(event)
        for alert, told in self._monitor.look_at_alerts(measures, now_ms):
            tell_alert(emit, alert, told)

    def _look_at(self, session: Session, now_ms: int) -> None:
        lag = session.lag_seconds(self._service_clock.seconds(now_ms))
        event = self._monitor.look_at_shard(session.stream.name, session.shard_id, session.counted, lag, now_ms)
        if event is not None:
            self._ports.emit(event)

    def on_gone(self, session: Session) -> None:
        """The lease of the session is gone."""
        self._marks.pop(session, None)
        event = self._monitor.on_gone(
            session.stream.name, session.shard_id, session.counted, self._ports.clock.now_ms()
        )
        if event is not None:
            self._ports.emit(event)
