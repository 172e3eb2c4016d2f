"""When a worker stops by itself: at `until`, after `idle_timeout`, or when all its shards have been stopped for a
minute and there is nothing else to take (rule D12).

In a fleet each worker decides for itself. It does not wait for shards of live members, for children of unfinished
shards, or for shards beyond its limit. Any other unfinished shard keeps it running, because it may be about to take it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from anabranch._core.session import Session
from anabranch._engine.clock import Alarm
from anabranch._engine.fanout_reader import Reader
from anabranch._engine.fleet import Fleet
from anabranch._engine.shard_discovery import ShardDiscovery
from anabranch._engine.work_queue import Processor
from anabranch._model.leases import LeaseKey, LeaseRow
from anabranch._ports import Clock

CHECK_EVERY_MS = 100
STOPPED_CHECK_EVERY_MS = 1_000
STOPPED_MS_MAX = 60_000
"""How long all shards may be stopped: an operator may resume one, or another worker may hand one over."""


class StopConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker stops by itself. By default it does not."""

    at_tip: bool = False
    """When every shard was read to its tip, or to the `until` time."""
    idle_timeout_ms: int | None = None
    """After this long without any work."""

    @property
    def is_set(self) -> bool:
        return self.at_tip or self.idle_timeout_ms is not None


@dataclass(eq=False, repr=False)
class StopWatcher:
    _clock: Clock
    _conditions: StopConditions
    _shards_max: int | None
    _sessions: Mapping[LeaseKey, Session]
    _fleet: Fleet
    _discovery: ShardDiscovery
    _reader: Reader
    _processor: Processor
    _active_at_ms: int = 0
    _finished_count: int = 0
    _all_stopped_at_ms: int | None = None

    def __post_init__(self) -> None:
        self._alarm = Alarm(self._clock)

    async def run(self) -> str:
        """Returns why the worker should stop."""
        self._active_at_ms = self._clock.now_ms()
        while True:
            now_ms = self._clock.now_ms()
            reason = self._end_reason(now_ms) or self._stopped_reason(now_ms)
            if reason is not None:
                return reason
            if self._conditions.is_set:
                await self._alarm.wait(now_ms + CHECK_EVERY_MS)
            elif any(session.state == "stopped" for session in self._sessions.values()):
                await self._alarm.wait(now_ms + STOPPED_CHECK_EVERY_MS)
            else:
                await self._alarm.wait()

    def notify(self) -> None:
        """A shard has stopped at a record."""
        self._alarm.ring()

    def _end_reason(self, now_ms: int) -> str | None:
        if not self._discovery.is_complete:
            return None  # the row of a shard may have been deleted (rule L18)
        if self._conditions.at_tip and self._is_at_tip():
            return "it has reached its end (until=)"
        if self._conditions.is_set and self._is_idle(now_ms):
            return "it had nothing to do for idle_timeout"
        return None

    def _stopped_reason(self, now_ms: int) -> str | None:
        sessions = self._sessions.values()
        all_stopped = bool(sessions) and all(session.state == "stopped" for session in sessions)
        if not all_stopped or not all(self._is_accounted_for(row) for row in self._unfinished()):
            self._all_stopped_at_ms = None
        elif self._all_stopped_at_ms is None:
            self._all_stopped_at_ms = now_ms
        elif now_ms - self._all_stopped_at_ms >= STOPPED_MS_MAX:
            return f"all its shards have been stopped for {STOPPED_MS_MAX // 1000} s"
        return None

    def _is_busy(self) -> bool:
        """Whether there is work, or reading is paused. Records that wait for a manual acknowledgement do not count."""
        return self._reader.is_paused or any(
            not session.window.is_empty or (session.lane.unfinished_count and not self._processor.manual_ack)
            for session in self._sessions.values()
            if session.is_live
        )

    def _is_idle(self, now_ms: int) -> bool:
        """No records arrived or finished, and nothing is left to take or read. A shard not yet read is not idle."""
        sessions = self._sessions.values()
        finished_count = sum(session.lane.finished_count for session in sessions)
        moved, self._finished_count = finished_count != self._finished_count, finished_count
        behind = any(session.behind_ms != 0 for session in sessions if session.is_live and session.end is None)
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
        return self._shards_max is not None and len(self._sessions) >= self._shards_max
