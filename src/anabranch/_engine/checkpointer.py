"""Commits finished records, and waits for running calls before a shard moves or the worker stops.

One write per lease at a time, computed when it is sent, so an older position never overwrites a newer one. A slow or
unreachable store delays commits and emits an event; it stops nothing else.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from anabranch._core.leases.plan import Write, Written
from anabranch._engine.clock import Alarm
from anabranch._engine.leases.fleet import Fleet
from anabranch._engine.ports import Ports
from anabranch._engine.session import Session
from anabranch._model.leases import Finish, LeaseRow
from anabranch._ports import Clock
from anabranch.config import CheckpointSettings
from anabranch.events import CheckpointFailed
from anabranch.records import Record

WRITES_AT_ONCE = 16
SEEN_THROUGH_EVERY_SECONDS = 3600
"""`seen_through_seconds` is written with each commit that advances, and otherwise once an hour."""
ADOPTIONS_MAX = 3
"""How often a write is repeated because an earlier write with a lost response turned out to have succeeded."""


class Checkpointer:
    """Commits every interval, sooner if many records are finished, and at once when a shard ends or is handed over."""

    def __init__(
        self,
        ports: Ports,
        fleet: Fleet,
        settings: CheckpointSettings,
        *,
        before_commit: Callable[[], None],
    ) -> None:
        self._ports = ports
        self._fleet = fleet
        self._before_commit = before_commit
        """Makes the sink report finished records (rule M6): iteration does not report each one."""
        interval = ports.store.checkpoint_interval if settings.interval is None else settings.interval
        self._interval_ms = round(interval * 1000)
        self._records_max = settings.records
        self._dirty: dict[Session, None] = {}
        self._alarm = Alarm(ports.clock)
        self._failing = False
        self.has_lost = False
        """A lease was lost during the stop, with finished records that were not committed."""

    def mark_dirty(self, session: Session) -> None:
        """Records of this session finished."""
        self._dirty[session] = None
        uncommitted_count = session.lane.finished_count - session.committed_count
        if uncommitted_count >= self._records_max or (uncommitted_count and session.lane.one_at_a_time):
            self._alarm.ring()

    def forget(self, session: Session) -> None:
        self._dirty.pop(session, None)

    async def run(self) -> None:
        clock = self._ports.clock
        while True:
            await self._alarm.wait(clock.now_ms() + self._interval_ms)
            while not await self.commit_all():
                # Retrying at once would call a failing store for every finished record.
                await clock.sleep_until_ms(clock.now_ms() + self._interval_ms)

    async def commit_all(self) -> bool:
        """Commits everything that is finished. Returns False if something is left."""
        self._before_commit()
        sessions, self._dirty = list(self._dirty), {}
        for start in range(0, len(sessions), WRITES_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                some = sessions[start : start + WRITES_AT_ONCE]
                tasks = [group.create_task(self.commit(session)) for session in some]
            if not all(task.result() for task in tasks):
                # The store is unreachable and each try takes a whole timeout: the rest goes first next time.
                self._dirty = dict.fromkeys([*sessions[start + WRITES_AT_ONCE :], *self._dirty])
                return False
        return True

    async def commit(self, session: Session) -> bool:
        """Returns True if the finished records are committed, or the lease is no longer ours."""
        outcome = await self.write(session)
        if outcome == "unknown":
            self._dirty[session] = None
        return outcome != "unknown"

    async def write(self, session: Session, *, finish: Finish | None = None) -> Written:
        async with session.commit_lock:
            for _ in range(ADOPTIONS_MAX):
                pending_transfer = session.holding.pending_transfer
                # The lease loop repeats an unanswered hand-over, and so does a stop: it carries the last commit.
                if session.phase in {"lost", "finished"} or (
                    pending_transfer is not None and not self._fleet.is_draining
                ):
                    return "lost"
                row, count = self.next_row(session, finish=finish)
                row = row if pending_transfer is None else pending_transfer
                if row == session.row:
                    session.committed_count = count  # also if an earlier write succeeded but its response was lost
                    return "written"
                outcome = await self._fleet.write(Write(row, session.row.version))
                if outcome == "written":
                    session.committed_count = count
                    session.crash_counted = session.crash_counted and not self._fleet.is_draining
                    self._failing = False
                if outcome == "unknown":
                    self._report_failure(session)
                elif outcome == "lost" and self._fleet.is_draining and count > session.committed_count:
                    self.has_lost = True
                if outcome != "again":
                    return outcome
            return "unknown"

    def next_row(
        self,
        session: Session,
        *,
        finish: Finish | None = None,
        transferring: bool = False,
    ) -> tuple[LeaseRow, int]:
        """The lease row to write now, and how many finished records it covers. `transferring`: the lease is about to be
        released or given away.
        """
        row, count = session.row, session.lane.finished_count
        if session.phase == "stopped":
            return row, count  # a later commit must not undo the stop (rule D4)
        stopped = session.stop_row
        before, known = row.checkpoint, row.checkpoint.seen_through_seconds
        seen = session.seen_through_seconds or known
        checkpoint = session.lane.checkpoint(seen)
        advanced = checkpoint.watermark != before.watermark or checkpoint.frontier != before.frontier
        if not advanced and finish is None and seen and known and seen - known < SEEN_THROUGH_EVERY_SECONDS:
            checkpoint = replace(checkpoint, seen_through_seconds=known)
        # Reaching the tip counts as progress (rule D5). So does a stop: counting starts again when a process that
        # starts later retries the record (rule D4).
        takes = row.takes_without_progress
        if advanced or session.is_at_tip or stopped is not None:
            takes = 0
        elif transferring:
            takes += not session.crash_counted  # the next owner counts instead of this one
        elif self._fleet.is_draining:
            takes = max(
                0, takes - session.crash_counted
            )  # a graceful stop is no crash; the next owner counts itself when it takes the lease
        unchanged = checkpoint == row.checkpoint and finish is None and stopped in (None, row.stopped)
        if unchanged and (takes == row.takes_without_progress or row.takes_without_progress <= 1):
            return row, count
        return replace(
            row,
            checkpoint=checkpoint,
            finish=finish,
            stopped=stopped,
            owner=None if finish is not None else row.owner,
            takes_without_progress=takes,
            records_handled=row.records_handled + count - session.committed_count,
            checkpointed_at_wall_ms=self._ports.clock.wall_ms(),
        ), count

    def _report_failure(self, session: Session) -> None:
        if not self._failing:
            self._failing = True
            self._ports.emit(
                CheckpointFailed(
                    stream=session.stream.name,
                    shard_id=session.shard_id,
                    error=f"the lease store did not accept it ({self._fleet.trouble or 'no answer'}); retrying "
                    f"every {self._interval_ms} ms, nothing is lost",
                )
            )


Running = Callable[[], list[tuple[Session, Record[bytes]]]]

FINAL_WRITE_MS = 10_000
FINAL_WRITE_PAUSE_MS = 200


class Drainer:
    """Waits for running calls, up to a deadline: of one shard that is handed over or stopped, or of all shards when the
    worker stops.
    """

    def __init__(self, clock: Clock, running: Running) -> None:
        self._clock = clock
        self._running = running
        self._alarms: dict[Alarm, None] = {}
        self._latest_ms: int | None = None

    @property
    def has_waiters(self) -> bool:
        return bool(self._alarms)

    def notify(self) -> None:
        """A call has ended."""
        for alarm in self._alarms:
            alarm.ring()

    def shorten_deadline(self, deadline_ms: int) -> None:
        """Ends all waits at this time at the latest."""
        self._latest_ms = deadline_ms
        self.notify()

    def still_running(self, sessions: Sequence[Session]) -> list[Record[bytes]]:
        return [record for session, record in self._running() if session in sessions]

    async def wait(self, sessions: Sequence[Session], deadline_ms: int) -> list[Record[bytes]]:
        """Starts no more records of these sessions, waits for running calls, returns those left at the deadline."""
        for session in sessions:
            session.is_draining = True
        alarm = Alarm(self._clock)
        self._alarms[alarm] = None
        try:
            while left := self.still_running(sessions):
                until_ms = deadline_ms if self._latest_ms is None else min(deadline_ms, self._latest_ms)
                if self._clock.now_ms() >= until_ms:
                    break
                await alarm.wait(until_ms)
        finally:
            del self._alarms[alarm]
        return left

    async def write_until_accepted(self, write: Callable[[], Awaitable[bool]], deadline_ms: int) -> bool:
        """Repeats a write until the store accepts it or the time is up: a lost response must not cost the last commit
        or leave leases to expire.
        """
        give_up_ms = min(deadline_ms, self._clock.now_ms() + FINAL_WRITE_MS)
        while not await write():
            pause_until_ms = self._clock.now_ms() + FINAL_WRITE_PAUSE_MS
            if pause_until_ms >= min(give_up_ms, self._latest_ms or give_up_ms):
                return False
            await self._clock.sleep_until_ms(pause_until_ms)
        return True
