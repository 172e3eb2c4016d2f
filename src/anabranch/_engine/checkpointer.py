"""Commits the finished records of all shards.

One write per lease at a time, computed when it is sent, so an older position never overwrites a newer one. While the
store is slow or unreachable, handling continues, commits are late, and an event reports that.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from anabranch._core.leases.plan import Write, Written
from anabranch._core.session import Session
from anabranch._engine.clock import Alarm
from anabranch._engine.fleet import Fleet
from anabranch._engine.work_queue import Processor
from anabranch._model.leases import Finish, LeaseRow
from anabranch._ports import Ports
from anabranch.config import CheckpointSettings
from anabranch.events import CheckpointFailed, CheckpointRecovered

WRITES_AT_ONCE = 16
MEMORY_INTERVAL = 1.0
"""Seconds between commits to a store that saves them later: what it saves is at most this old."""
ADOPTIONS_MAX = 3
"""How often a write is repeated because an earlier write with a lost response turned out to have succeeded."""


@dataclass(eq=False, repr=False)
class Checkpointer:
    """Commits every interval, sooner if many records are finished, and at once when a shard ends or is handed over."""

    _ports: Ports
    _fleet: Fleet
    _settings: CheckpointSettings
    _processor: Processor
    _dirty: dict[Session, None] = field(default_factory=dict)
    _locks: dict[Session, asyncio.Lock] = field(default_factory=dict)
    _failing_since_ms: int | None = None
    has_lost: bool = False
    """A lease was lost during the stop, with finished records that were not committed."""

    def __post_init__(self) -> None:
        store, interval = self._ports.store, self._settings.interval
        if interval is None:
            # A store that keeps commits in memory decides itself how often it saves them.
            interval = MEMORY_INTERVAL if store.publish_interval else store.checkpoint_interval
        self._interval_ms = round(interval * 1000)
        self._alarm = Alarm(self._ports.clock)

    def mark_dirty(self, session: Session) -> None:
        """Records of this session finished."""
        self._dirty[session] = None
        if session.uncommitted_count >= self._settings.records or session.awaits_commit:
            self._alarm.ring()

    def forget(self, session: Session) -> None:
        self._dirty.pop(session, None)
        self._locks.pop(session, None)

    def lock(self, session: Session) -> asyncio.Lock:
        """One write of a lease row at a time (rule L7)."""
        return self._locks.setdefault(session, asyncio.Lock())

    async def run(self) -> None:
        clock = self._ports.clock
        while True:
            await self._alarm.wait(clock.now_ms() + self._interval_ms)
            while not await self.commit_all():
                # Retrying at once would call a failing store for every finished record.
                await clock.sleep_until_ms(clock.now_ms() + self._interval_ms)

    async def commit_all(self) -> bool:
        """Commits everything that is finished. Returns False if something is left."""
        if (reported := self._processor.report_finished()) is not None:
            self._dirty[reported] = None
        sessions, self._dirty = self._dirty, {}
        writers_max = min(WRITES_AT_ONCE, len(sessions))
        waiting = deque(sessions)
        if writers_max <= 1:
            answered = await self._commit_each(waiting)
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._commit_each(waiting)) for _ in range(writers_max)]
            answered = all(task.result() for task in tasks)
        # If the store is unreachable, each try takes a whole timeout: the rest goes first next time.
        self._dirty = dict.fromkeys([*waiting, *self._dirty])
        return answered

    async def _commit_each(self, waiting: deque[Session]) -> bool:
        """Commits one session after another. Returns False, and leaves the rest, if the store did not answer."""
        while waiting:
            session = waiting.popleft()
            if await self.write(session) == "unknown":
                self._dirty[session] = None
                return False
        return True

    async def write(self, session: Session, *, finish: Finish | None = None) -> Written:
        async with self.lock(session):
            for _ in range(ADOPTIONS_MAX):
                pending_transfer = session.holding.pending_transfer
                if session.state in {"lost", "finished"}:
                    return "lost"
                row, count = self.plan(session, finish=finish)
                # An unanswered hand-over carries the last commit: like a commit, it is repeated every interval.
                row = row if pending_transfer is None else pending_transfer
                if row == session.row:
                    session.committed(count)  # also if an earlier write succeeded but its response was lost
                    return "written"
                outcome = await self._fleet.write(Write(row, session.row.version))
                if outcome != "unknown" and pending_transfer is not None:
                    self._report_success(session)
                    return "lost"  # given away: the row was planned before, without what the caller wants to write
                if outcome == "written":
                    session.committed(count)
                    session.count_crash(counted=session.crash_counted and not self._fleet.is_draining)
                    self._report_success(session)
                if outcome == "unknown":
                    self._report_failure(session)
                elif outcome == "lost" and self._fleet.is_draining and count > session.committed_count:
                    self.has_lost = True
                if outcome != "again":
                    return outcome
            return "unknown"

    def plan(
        self, session: Session, *, finish: Finish | None = None, transferring: bool = False
    ) -> tuple[LeaseRow, int]:
        """The row to write now, and how many finished records it covers."""
        return session.plan_commit(
            self._ports.clock.wall_ms(), finish=finish, transferring=transferring, leaving=self._fleet.is_draining
        )

    def _report_success(self, session: Session) -> None:
        since_ms, self._failing_since_ms = self._failing_since_ms, None
        if since_ms is not None:
            seconds = (self._ports.clock.now_ms() - since_ms) / 1000
            self._ports.emit(CheckpointRecovered(**session.names, seconds=seconds))

    def _report_failure(self, session: Session) -> None:
        if self._failing_since_ms is None:
            self._failing_since_ms = self._ports.clock.now_ms()
            self._ports.emit(
                CheckpointFailed(**session.names, error=self._fleet.trouble or "the lease store did not answer")
            )
