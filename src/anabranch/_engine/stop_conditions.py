"""When a worker stops by itself: at `until`, after `idle_timeout`, or if failed records have stopped all its shards for
a minute and it can take no other shard (rule D12).

In a fleet each worker decides for itself. Shards of live members, children of unfinished shards and shards beyond the
worker's limit do not keep it running. Any other unfinished shard does, because the worker may be about to take it.
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
"""While `until` or `idle_timeout` is set."""
STOPPED_CHECK_EVERY_MS = 1_000
"""While some shard is stopped. Otherwise nothing is checked until one is."""
STOPPED_MS_MAX = 60_000
"""How long all shards may be stopped: an operator may resume one, or another worker may hand one over."""


class StopConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker stops although its shards have not failed. By default it does not."""

    at_tip: bool = False
    """Stop when every shard was read to its tip, or to the `until` time."""
    idle_timeout_ms: int | None = None
    """Stop after this long without any work."""

    @property
    def is_set(self) -> bool:
        return self.at_tip or self.idle_timeout_ms is not None


@dataclass(eq=False, repr=False)
class StopWatcher:
    _clock: Clock
    _conditions: StopConditions
    _shards_max: int | None
    """How many shards this worker may hold."""
    _sessions: Mapping[LeaseKey, Session]
    _fleet: Fleet
    _discovery: ShardDiscovery
    _reader: Reader
    _processor: Processor
    _active_at_ms: int = 0
    """When `_is_idle` last found work."""
    _finished_count: int = 0
    """How many records were finished then."""
    _all_stopped_at_ms: int | None = None
    """Since when all shards are stopped; None if they are not."""

    def __post_init__(self) -> None:
        self._alarm = Alarm(self._clock)

    async def run(self) -> str:
        """Waits until the worker should stop. Returns the reason, a clause to follow "because"."""
        self._active_at_ms = self._clock.now_ms()
        while True:
            now_ms = self._clock.now_ms()
            reason = self._end_reason(now_ms) or self._all_stopped_reason(now_ms)
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
            return None  # the rows of some shards may be missing, because they were deleted (rule L18)
        if self._conditions.at_tip and self._is_at_tip():
            return "it has reached its end (until=)"
        if self._conditions.idle_timeout_ms is not None and self._is_idle(now_ms, self._conditions.idle_timeout_ms):
            return "it had nothing to do for idle_timeout"
        return None

    def _all_stopped_reason(self, now_ms: int) -> str | None:
        sessions = self._sessions.values()
        all_stopped = bool(sessions) and all(session.state == "stopped" for session in sessions)
        if not all_stopped or not all(self._is_accounted_for(row) for row in self._unfinished()):
            self._all_stopped_at_ms = None
        elif self._all_stopped_at_ms is None:
            self._all_stopped_at_ms = now_ms
        elif now_ms - self._all_stopped_at_ms >= STOPPED_MS_MAX:
            return f"all its shards have been stopped for {STOPPED_MS_MAX // 1000} s"
        return None

    def _has_work(self) -> bool:
        """Whether records are unread or unfinished, or reading is paused, which hides new records. Records that wait
        for a manual acknowledgement do not count.
        """
        return self._reader.is_paused or any(
            not session.window.is_empty or (session.lane.unfinished_count and not self._processor.manual_ack)
            for session in self._sessions.values()
            if session.is_live
        )

    def _is_idle(self, now_ms: int, timeout_ms: int) -> bool:
        """Whether for this long no record was finished, and nothing was left to take, read or finish."""
        sessions = self._sessions.values()
        finished_count = sum(session.lane.finished_count for session in sessions)
        # `behind_ms` is None before the first read: such a shard may have records, too.
        is_behind = any(session.behind_ms != 0 for session in sessions if session.is_live and session.end is None)
        if (
            finished_count != self._finished_count
            or is_behind
            or self._has_work()
            or not all(self._is_accounted_for(row) for row in self._unfinished())
        ):
            self._active_at_ms, self._finished_count = now_ms, finished_count
        return now_ms - self._active_at_ms >= timeout_ms

    def _is_at_tip(self) -> bool:
        return bool(self._fleet.leases) and all(
            self._sessions[row.key].is_at_end if row.key in self._sessions else self._is_accounted_for(row)
            for row in self._unfinished()
        )

    def _unfinished(self) -> list[LeaseRow]:
        return [row for row in self._fleet.leases.values() if not row.is_finished]

    def _is_accounted_for(self, row: LeaseRow) -> bool:
        """Whether this worker holds the shard, or may not take it now: it does not keep the worker running."""
        if row.key in self._sessions or self._fleet.is_waiting_or_read(row):
            return True
        return self._shards_max is not None and len(self._sessions) >= self._shards_max
