"""Commits what is finished: every interval, sooner when much is, and at once where the shard ends or is handed over.

The rules: one write in flight for each lease; what is written is computed when it is written, so an older
position never follows a newer one; a store that is slow or away delays commits and shows as an event, and stops
nothing else.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from anabranch._core.leases.plan import Write, Written
from anabranch._engine.clock import Alarm
from anabranch._engine.leases.lease_loop import LeaseLoop
from anabranch._engine.ports import Ports
from anabranch._engine.session import Session
from anabranch._model.leases import Finish, LeaseRow
from anabranch._ports import Clock
from anabranch.config import CheckpointSettings
from anabranch.events import CheckpointFailed
from anabranch.records import Record

WRITES_AT_ONCE = 16
SEEN_THROUGH_EVERY_SECONDS = 3600
"""How far a shard was seen through goes with each commit that advances; for that alone there is one an hour."""
ADOPTIONS_MAX = 3
"""How often a write is repeated because an earlier one's lost answer showed up."""


class Checkpointer:
    def __init__(
        self,
        ports: Ports,
        leases: LeaseLoop,
        settings: CheckpointSettings,
        *,
        before_commit: Callable[[], None],
    ) -> None:
        self._ports = ports
        self._leases = leases
        self._before_commit = before_commit
        """Makes the sink report what is finished (rule M6). A loop over records does not report each one."""
        self._interval_ms = round(settings.interval * 1000)
        self._records_max = settings.records
        self._dirty: dict[Session, None] = {}
        self._alarm = Alarm(ports.clock)
        self._failing = False
        self.has_lost = False
        """While this worker stopped, a lease turned out to be lost of which finished records were not committed."""

    def mark_dirty(self, session: Session) -> None:
        """Records of this session were finished."""
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
                # A store that refuses at once would be asked again for every record that is finished.
                await clock.sleep_until_ms(clock.now_ms() + self._interval_ms)

    async def commit_all(self) -> bool:
        """Everything that is finished and not committed; True if all of it is now."""
        self._before_commit()
        sessions, self._dirty = list(self._dirty), {}
        for start in range(0, len(sessions), WRITES_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                some = sessions[start : start + WRITES_AT_ONCE]
                tasks = [group.create_task(self.commit(session)) for session in some]
            if not all(task.result() for task in tasks):
                # The store is away, and each try costs a deadline: the rest is first in line the next time.
                self._dirty = dict.fromkeys([*sessions[start + WRITES_AT_ONCE :], *self._dirty])
                return False
        return True

    async def commit(self, session: Session) -> bool:
        """True if everything that was finished when it was called is committed, or the lease is not ours any more."""
        outcome = await self.write(session)
        if outcome == "unknown":
            self._dirty[session] = None
        return outcome != "unknown"

    async def write(self, session: Session, *, finish: Finish | None = None) -> Written:
        async with session.commit_lock:
            for _ in range(ADOPTIONS_MAX):
                pending_transfer = session.holding.pending_transfer
                # A gift without an answer is repeated by the lease loop, and by who leaves: it carries the last commit.
                if session.phase in {"lost", "finished"} or (
                    pending_transfer is not None and not self._leases.draining
                ):
                    return "lost"
                row, count = self.next_row(session, finish=finish)
                row = row if pending_transfer is None else pending_transfer
                if row == session.row:
                    session.committed_count = count  # also by a write whose answer was lost, and whose row was adopted
                    return "written"
                outcome = await self._leases.write(Write(row, session.row.version))
                if outcome == "written":
                    session.committed_count = count
                    session.crash_counted = session.crash_counted and not self._leases.draining
                    self._failing = False
                if outcome == "unknown":
                    self._report_failure(session)
                elif outcome == "lost" and self._leases.draining and count > session.committed_count:
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
        """The lease row to write now, and how many finished records it covers. `transferring`: it is about to be
        released or given away.
        """
        row, count = session.row, session.lane.finished_count
        if session.phase == "stopped":
            return row, count  # its stop was the last word: a later commit must not take it back (rule D4)
        stopped = session.stop_row
        before, known = row.checkpoint, row.checkpoint.seen_through_seconds
        seen = session.seen_through_seconds or known
        checkpoint = session.lane.checkpoint(seen)
        advanced = checkpoint.watermark != before.watermark or checkpoint.frontier != before.frontier
        if not advanced and finish is None and seen and known and seen - known < SEEN_THROUGH_EVERY_SECONDS:
            checkpoint = replace(checkpoint, seen_through_seconds=known)
        # A shard that has nothing to do kills nobody: an owner that saw its tip has made progress (rule D5). Nor does
        # one that is stopped: it is counted anew when a process that starts later tries it again (rule D4).
        takes = row.takes_without_progress
        if advanced or session.is_at_tip or stopped is not None:
            takes = 0
        elif transferring:
            takes += not session.crash_counted  # by a gift the next owner counts in the place of this one
        elif self._leases.draining:
            takes = max(0, takes - session.crash_counted)  # it ends in order; the next one counts itself by its take
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
                    error=f"the lease store did not take it ({self._leases.trouble or 'no answer'}); it is tried "
                    f"again every {self._interval_ms} ms, and nothing is lost meanwhile",
                )
            )


Running = Callable[[], list[tuple[Session, Record[bytes]]]]

FINAL_WRITE_MS = 10_000
FINAL_WRITE_PAUSE_MS = 200


class Drainer:
    def __init__(self, clock: Clock, running: Running) -> None:
        self._clock = clock
        self._running = running
        self._alarms: dict[Alarm, None] = {}
        self._latest_ms: int | None = None

    @property
    def has_waiters(self) -> bool:
        return bool(self._alarms)

    def notify(self) -> None:
        """A call ended."""
        for alarm in self._alarms:
            alarm.ring()

    def shorten_deadline(self, deadline_ms: int) -> None:
        """Nothing is waited for any longer than this, whatever was said before."""
        self._latest_ms = deadline_ms
        self.notify()

    def still_running(self, sessions: Sequence[Session]) -> list[Record[bytes]]:
        return [record for session, record in self._running() if session in sessions]

    async def wait(self, sessions: Sequence[Session], deadline_ms: int) -> list[Record[bytes]]:
        """Starts nothing more of these sessions and waits for what runs; what still runs at the deadline."""
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
        """Repeats a write until the store has taken it, or time is up: one lost answer must not cost what was finished
        since the last commit, nor the expiry of the leases.
        """
        give_up_ms = min(deadline_ms, self._clock.now_ms() + FINAL_WRITE_MS)
        while not await write():
            pause_until_ms = self._clock.now_ms() + FINAL_WRITE_PAUSE_MS
            if pause_until_ms >= min(give_up_ms, self._latest_ms or give_up_ms):
                return False
            await self._clock.sleep_until_ms(pause_until_ms)
        return True
