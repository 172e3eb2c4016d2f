"""Isolates shards whose owners keep dying, and finally stops them (rule D5).

A record that kills its process (a crash in C code, out of memory) kills every worker that tries it, and interrupts that
worker's other shards. After two owners without progress a shard is a suspect. Before a suspect's record starts, all
other records of this worker are finished and committed, and each of the suspect's first records is committed before the
next. So the deadly record interrupts nothing else, and is the first one after the checkpoint. After five owners the
shard stops there and names the record. A suspect that survives a turn at full speed is cleared: its earlier owners did
not get that far, and probably died for other reasons.

An idle suspect cannot have caused a crash, so its row does not count its owner's death. Otherwise one deadly record
would in the end stop all shards of its worker. Suspects and other shards take turns, so neither starves.

With manual acknowledgement records may stay unacknowledged for long, so such shards are not isolated, only stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from anabranch._core.leases.plan import Write
from anabranch._core.session import COMMITTED_ONE_BY_ONE, Session
from anabranch._engine.checkpointer import Checkpointer
from anabranch._engine.clock import Alarm
from anabranch._engine.fleet import Fleet
from anabranch._engine.work_queue import Changes, Processor
from anabranch._model.leases import LeaseKey
from anabranch._ports import Ports
from anabranch.events import ShardSuspected
from anabranch.reasons import StoppedByCrashes

SUSPECT_AFTER: Final = 2
OWNERS_MAX: Final = 5
TURN_MS: Final = 1_000
CHECK_MS: Final = 50
REST_MS_MAX: Final = 60_000


@dataclass(eq=False, repr=False)
class Quarantine:
    _ports: Ports
    _fleet: Fleet
    _checkpointer: Checkpointer
    _processor: Processor
    _changes: Changes
    _sessions: Mapping[LeaseKey, Session]
    _suspects: dict[Session, int] = field(default_factory=dict)
    """Each with the number of owners that died at it."""
    _counted: dict[Session, None] = field(default_factory=dict)
    """Suspects whose row counts this worker as a dead owner: those just taken, and the one that runs alone."""
    _alone: Session | None = None
    """The suspect whose turn it is."""
    _rest_ms: int = TURN_MS

    def __post_init__(self) -> None:
        self._queue = self._processor.queue
        self._alarm = Alarm(self._ports.clock)

    # which sessions

    def add(self, session: Session) -> None:
        """For every session, when its lease is taken."""
        owners = session.row.takes_without_progress - 1
        if owners >= SUSPECT_AFTER and not self._processor.manual_ack:
            self._suspects[session] = owners
            self._counted[session] = None
            session.isolate(isolated=True)
            self._ports.emit(ShardSuspected(**session.names, owner_count=owners))
            self._hold_all()
            self._alarm.ring()
        elif self._is_held(session):
            self._queue.hold(session)

    def _hold_all(self) -> None:
        for session in self._sessions.values():
            self._queue.hold(session)

    def has_given_up_on(self, session: Session) -> bool:
        """Whether the shard is not even read: one more owner died while it read the shard to name the record."""
        return session.row.takes_without_progress - 1 >= (OWNERS_MAX if self._processor.manual_ack else OWNERS_MAX + 1)

    def remove(self, session: Session) -> None:
        """For every session, when its lease is gone."""
        self._suspects.pop(session, None)
        self._counted.pop(session, None)
        self._queue.release(session)
        self._alarm.ring()

    def notify(self) -> None:
        """A call ended, or records arrived."""
        if self._suspects or self._alone is not None:  # a suspect that is lost while it is tried leaves _suspects
            self._alarm.ring()

    def _clear_at_tip(self) -> None:
        """Clears suspects that were read to the tip."""
        for session in list(self._suspects):
            if session.is_at_tip and not session.uncommitted_count:
                self._clear_suspect(session)

    def _clear_suspect(self, session: Session) -> None:
        if self._suspects.pop(session, None) is not None:
            session.isolate(isolated=False)
            self._release(session)

    def _is_held(self, session: Session) -> bool:
        return session in self._suspects or self._alone is not None or bool(self._counted)

    def _release(self, session: Session) -> None:
        if self._is_held(session):
            self._queue.hold(session)
        else:
            self._queue.release(session)
            self._queue.offer(session)

    # turns

    async def run(self) -> None:
        while True:
            self._clear_at_tip()
            await self._uncount_all()
            suspect = self._next()
            if suspect is None:
                await self._alarm.wait()
                continue
            if self._fleet.is_performing:
                await self._sleep(CHECK_MS)  # the row of a lease that is being taken counts this owner, too
                continue
            await self._try_alone(suspect)
            await self._uncount_all()
            if len(self._sessions) > len(self._suspects):
                await self._sleep(self._rest_ms)

    def _next(self) -> Session | None:
        """The suspect with work at which the fewest owners died."""
        ready = [session for session in self._suspects if session.may_start and not session.is_idle]
        return min(ready, key=lambda session: self._suspects[session], default=None)

    async def _try_alone(self, suspect: Session) -> None:
        self._alone = suspect
        self._hold_all()
        if not await self._wait_until_idle():
            return
        await self._commit_all()
        await self._count_crash(suspect)
        if self._fleet.is_performing or len(self._counted) > 1:
            return
        if self._suspects.get(suspect, 0) >= OWNERS_MAX:
            self._stop_at_next_record(suspect)
            return
        clock, at_full_speed = self._ports.clock, suspect.committed_count >= COMMITTED_ONE_BY_ONE
        until_ms = clock.now_ms() + TURN_MS
        while suspect in self._suspects and suspect.may_start and not suspect.is_idle and clock.now_ms() < until_ms:
            finished_count = suspect.lane.finished_count
            self._queue.release(suspect)
            self._queue.offer(suspect)
            await self._alarm.wait(until_ms)
            if suspect.awaits_commit:
                await self._commit_all()
            self._clear_at_tip()
            if suspect.lane.finished_count == finished_count:
                await self._sleep(CHECK_MS)  # the record waits for its retry: checking again now would busy-loop
        if self._sessions.get(suspect.key) is suspect:
            self._queue.hold(suspect)
        while self._processor.running():
            await self._alarm.wait()
        await self._commit_all()
        if at_full_speed:
            self._clear_suspect(suspect)

    async def _wait_until_idle(self) -> bool:
        """Waits for running calls while nothing new starts. Each wait that was too short doubles the next one."""
        clock = self._ports.clock
        until_ms = clock.now_ms() + self._rest_ms
        while self._processor.running():
            if clock.now_ms() >= until_ms:
                self._rest_ms = min(2 * self._rest_ms, REST_MS_MAX)
                return False
            await self._alarm.wait(until_ms)
        self._rest_ms = TURN_MS
        return True

    def _stop_at_next_record(self, suspect: Session) -> None:
        record = suspect.next_record(self._ports.clock.now_ms())
        if record is not None:
            owners = self._suspects.pop(suspect)
            reason = StoppedByCrashes(
                position=str(record.position), partition_key=record.partition_key, owner_count=owners
            )
            suspect.stop(reason, record)
            self._changes.finished(suspect)

    async def _sleep(self, pause_ms: int) -> None:
        await self._ports.clock.sleep_until_ms(self._ports.clock.now_ms() + pause_ms)

    # the count in the rows

    async def _commit_all(self) -> None:
        while not await self._checkpointer.commit_all():
            await self._sleep(TURN_MS)

    async def _count_crash(self, suspect: Session) -> None:
        """Counts this owner: if the process dies from now on, this suspect is the cause."""
        if suspect in self._suspects and suspect not in self._counted:
            self._counted[suspect] = None
            await self._write_count(suspect, crash_counted=True)

    async def _uncount_all(self) -> None:
        """All suspects are idle, so a crash from now on has another cause. Then the other shards continue."""
        if not self._counted and self._alone is None:
            return
        while self._counted:
            session = next(iter(self._counted))
            await self._write_count(session, crash_counted=False)
            self._counted.pop(session, None)
        self._alone = None
        for session in self._sessions.values():
            self._release(session)

    async def _write_count(self, session: Session, *, crash_counted: bool) -> None:
        """Writes whether the row counts this owner; retries until the store answers."""
        while True:
            async with self._checkpointer.lock(session):
                if session not in self._suspects or not session.is_live or session.holding.pending_transfer is not None:
                    return
                written, takes = "written", self._suspects[session] + crash_counted
                if session.row.takes_without_progress not in {0, takes}:
                    row = replace(session.row, takes_without_progress=takes)
                    written = await self._fleet.write(Write(row, session.row.version))
                if written not in {"unknown", "again"}:
                    session.count_crash(counted=crash_counted)
                    return
            await self._sleep(CHECK_MS)
