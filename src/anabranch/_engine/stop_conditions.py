"""When a worker stops by itself: at `until`, after `idle_timeout`, or when all its shards have been stopped for a
minute and there is nothing else to take (rule D12).

Checked regularly. In a fleet each worker decides for itself: it does not wait for shards of members that are
heartbeating, for children of unfinished shards, or for shards that it may not take. Any other unfinished shard keeps it
running, because it may be about to take it.
"""

from collections.abc import Callable, Mapping

import msgspec

from anabranch._engine.clock import Scheduler
from anabranch._engine.leases.fleet import Fleet
from anabranch._engine.session import Session
from anabranch._model.leases import LeaseKey, LeaseRow
from anabranch._ports import Clock

CHECK_EVERY_MS = 100
STOPPED_CHECK_EVERY_MS = 1_000
STOPPED_MS_MAX = 60_000
"""How long all shards may be stopped: time for a person to act, or for another worker to hand over a shard."""


class StopConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker stops by itself. By default it does not."""

    at_tip: bool = False
    """When every shard was read to its tip, or to the `until` time."""
    idle_timeout_ms: int | None = None
    """After this long without any work."""
    shards_max: int | None = None

    @property
    def is_set(self) -> bool:
        return self.at_tip or self.idle_timeout_ms is not None


class StopWatcher:
    def __init__(
        self,
        clock: Clock,
        scheduler: Scheduler,
        stop_conditions: StopConditions,
        sessions: Mapping[LeaseKey, Session],
        fleet: Fleet,
        *,
        is_busy: Callable[[], bool],
        on_end: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._conditions = stop_conditions
        self._sessions = sessions
        self._fleet = fleet
        self._is_busy = is_busy
        self._on_end = on_end
        self._active_at_ms = 0
        self._finished_count = 0
        self._watches_stopped = False
        self._all_stopped_at_ms: int | None = None

    def start(self) -> None:
        if self._conditions.is_set:
            self._active_at_ms = self._clock.now_ms()
            self._check()

    def _check(self) -> None:
        now_ms = self._clock.now_ms()
        if self._conditions.at_tip and self._is_at_tip():
            self._on_end("it has reached its end (until=)")
        elif self._is_idle(now_ms):
            self._on_end("it had nothing to do for idle_timeout")
        else:
            self._scheduler.call_at(now_ms + CHECK_EVERY_MS, self._check)

    def watch_stopped(self) -> None:
        """A shard has stopped at a record."""
        if not self._watches_stopped:
            self._watches_stopped = True
            self._check_stopped()

    def _check_stopped(self) -> None:
        now_ms, sessions = self._clock.now_ms(), self._sessions.values()
        stopped_count = sum(session.phase == "stopped" for session in sessions)
        if not stopped_count:
            self._watches_stopped, self._all_stopped_at_ms = False, None
            return
        if stopped_count < len(sessions) or not all(self._is_accounted_for(row) for row in self._unfinished()):
            self._all_stopped_at_ms = None
        elif self._all_stopped_at_ms is None:
            self._all_stopped_at_ms = now_ms
        elif now_ms - self._all_stopped_at_ms >= STOPPED_MS_MAX:
            self._on_end(f"all its shards have been stopped for {STOPPED_MS_MAX // 1000} s")
            return
        self._scheduler.call_at(now_ms + STOPPED_CHECK_EVERY_MS, self._check_stopped)

    def _is_idle(self, now_ms: int) -> bool:
        """No records arrived or finished, nothing runs, and nothing is left to take or read. A shard that could not be
        read yet is not idle.
        """
        finished_count = sum(session.lane.finished_count for session in self._sessions.values())
        moved, self._finished_count = finished_count != self._finished_count, finished_count
        behind = any(session.behind_ms != 0 for session in self._sessions.values() if session.phase == "reading")
        if moved or behind or self._is_busy() or not all(self._is_accounted_for(row) for row in self._unfinished()):
            self._active_at_ms = now_ms
        timeout_ms = self._conditions.idle_timeout_ms
        return timeout_ms is not None and now_ms - self._active_at_ms >= timeout_ms

    def _is_at_tip(self) -> bool:
        return bool(self._fleet.leases) and all(
            self._sessions[row.key].is_at_end if row.key in self._sessions else self._is_accounted_for(row)
            for row in self._unfinished()
        )

    def _unfinished(self) -> list[LeaseRow]:
        return [row for row in self._fleet.leases.values() if not row.is_finished]

    def _is_accounted_for(self, row: LeaseRow) -> bool:
        """Whether this worker holds the shard, or may not take it now."""
        if row.key in self._sessions or self._fleet.is_waiting_or_read(row):
            return True
        limit = self._conditions.shards_max
        return limit is not None and len(self._sessions) >= limit
