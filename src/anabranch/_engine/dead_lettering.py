"""Writes records that could not be handled to the dead letters, in three steps (rule D1).

1. The lease row records that a letter is being written for the record.
2. The letter is written. A failed write is retried until it succeeds; until then the record's key or shard is stalled,
   and the fleet status shows the error.
3. The record is finished.

After a crash, the next owner of the shard continues with the next step.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from anabranch._core.backoff import backoff_ms
from anabranch._core.handling.failures import error_text
from anabranch._core.session import PendingLetter, Session
from anabranch._engine.checkpointer import Checkpointer
from anabranch._engine.clock import Alarm
from anabranch._engine.fleet import Fleet
from anabranch._engine.shard_discovery import ShardDiscovery
from anabranch._engine.work_queue import Changes, WorkQueue
from anabranch._model.streams import Position
from anabranch._ports import LetterDestination, Ports
from anabranch.errors import AnabranchError, DeadLetterError
from anabranch.events import DeadLettersWarning, RecordDeadLettered
from anabranch.letters import Letter, make_letter
from anabranch.reasons import LetterNotWritten, Reason
from anabranch.records import Record

PAUSE_FIRST_MS: Final = 500
PAUSE_MAX_MS: Final = 30_000
WRITE_SECONDS_MAX: Final = 60.0
"""A slower write counts as failed and is retried. This is safe: writing a letter twice makes no second letter."""


@dataclass(eq=False, repr=False)
class _OpenLetter:
    """A letter that is not finished yet."""

    session: Session
    pending: PendingLetter
    alarm: Alarm
    """Ends the pause before the next attempt early."""
    is_writing: bool = True
    """False during the pause after a failed attempt."""
    is_skipped: bool = False
    """An operator has skipped the record: no letter is needed."""
    reason: LetterNotWritten | None = None
    """Why the last attempt failed."""


@dataclass(eq=False, repr=False)
class DeadLettering:
    _ports: Ports
    _fleet: Fleet
    _checkpointer: Checkpointer
    _queue: WorkQueue
    _changes: Changes
    _discovery: ShardDiscovery
    _open: dict[tuple[Session, Position], _OpenLetter] = field(default_factory=dict)
    _last_written_ms: int | None = None

    @property
    def _destination(self) -> LetterDestination:
        destination = self._ports.letters
        if destination is None:
            raise DeadLetterError(
                "an earlier worker began to write a record to the dead letters, but this consumer has no destination",
                code="unusable",
                advice="set on_failure=Retry(then=DeadLetter(...)) as before, or skip the record",
            )
        return destination

    async def check(self, retention_hours: int) -> None:
        """Called once at the start. Raises if the destination can never work; warns if it is only unreachable now."""
        if self._ports.letters is None:
            return
        try:
            warnings = await self._ports.letters.check(retention_hours)
        except DeadLetterError as error:
            if not error.retryable:
                raise
            warnings = [str(error)]
        for warning in warnings:
            self._ports.emit(DeadLettersWarning(destination=str(self._ports.letters), warning=warning))

    # status

    def records_in_progress(self) -> list[tuple[Session, Record[bytes]]]:
        """Records whose letters are being written now."""
        return [
            (letter.session, letter.pending.record)
            for letter in self._open.values()
            if letter.is_writing and letter.pending.record is not None and letter.session.is_live
        ]

    @property
    def seconds_since_last_letter(self) -> float | None:
        """None if this worker has written no letter."""
        if self._last_written_ms is None:
            return None
        return (self._ports.clock.now_ms() - self._last_written_ms) / 1_000

    def reasons(self) -> dict[Session, Reason]:
        """Why letters could not be written, for each session that has such letters."""
        return {letter.session: letter.reason for letter in self._open.values() if letter.reason is not None}

    def skip(self, session: Session, position: Position) -> bool:
        """Skips a record whose letter failed to be written. False if it has no such letter, or a write is running."""
        letter = self._open.get((session, position))
        if letter is None or letter.is_writing:
            return False
        letter.is_skipped = True
        letter.alarm.ring()
        session.finish_letter(letter.pending, skipped=True)
        return True

    # the three steps

    async def write(self, session: Session, pending: PendingLetter) -> None:
        letter = _OpenLetter(session, pending, Alarm(self._ports.clock))
        self._open[(session, pending.position)] = letter
        try:
            if await self._commit(session) and await self._deliver(letter):
                session.finish_letter(pending)
                self._last_written_ms = self._ports.clock.now_ms()
                self._report(session, pending)
        finally:
            del self._open[(session, pending.position)]
            if session.is_live:
                self._queue.offer(session)
            self._changes.finished(session)

    async def _commit(self, session: Session) -> bool:
        """Records in the lease row that the letter is being written. False if the lease is lost."""
        clock, failures = self._ports.clock, 0
        while session.is_live:
            if await self._checkpointer.write(session) == "written":
                return True
            failures += 1
            await clock.sleep_until_ms(clock.now_ms() + self._pause_ms(failures))
        return False

    async def _deliver(self, letter: _OpenLetter) -> bool:
        """Retries until the letter is durable. False if the lease is lost, or the record was skipped."""
        clock, failures = self._ports.clock, 0
        while letter.session.is_live and not letter.is_skipped:
            if self._fleet.may_start():  # not while heartbeats are late: the lease may expire
                error = await self._try_to_write(letter)
                if error is None:
                    return letter.session.is_live
                letter.reason = self._reason(letter.pending, error)
            failures += 1
            letter.is_writing = False
            self._changes.finished(letter.session)  # a drain does not wait during the pause
            await letter.alarm.wait(clock.now_ms() + self._pause_ms(failures))
            letter.is_writing = not letter.is_skipped
        return False

    async def _try_to_write(self, letter: _OpenLetter) -> str | None:
        """Returns the error, or None if the letter is durable."""
        try:
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await self._destination.write(self._make_letter(letter))
        except TimeoutError:
            return f"no answer within {WRITE_SECONDS_MAX:.0f} s"
        except AnabranchError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 -- the destination may be the user's function
            return error_text(error)
        letter.reason = None
        return None

    def _make_letter(self, letter: _OpenLetter) -> Letter:
        session, pending = letter.session, letter.pending
        return make_letter(
            app=self._fleet.app.app,
            stream=session.stream.name,
            stream_created_seconds=self._discovery.streams[session.key.stream_key].row.created_seconds,
            shard_id=session.shard_id,
            sequence_number=str(pending.position.sequence_number),
            sub_sequence_number=pending.position.sub_sequence_number,
            record=pending.record,
            failure=pending.failure,
            attempts=pending.attempts,
            attempted_seconds=pending.attempted_seconds,
            written_seconds=self._ports.clock.wall_ms() / 1000,
            recovered=pending.recovered,
        )

    def _pause_ms(self, failures: int) -> int:
        return backoff_ms(failures, self._ports.entropy, first_ms=PAUSE_FIRST_MS, max_ms=PAUSE_MAX_MS, min_share=0.5)

    def _reason(self, pending: PendingLetter, error: str) -> LetterNotWritten:
        return LetterNotWritten(
            position=str(pending.position),
            partition_key=None if pending.record is None else pending.record.partition_key,
            destination="the destination" if self._ports.letters is None else str(self._ports.letters),
            error=error,
        )

    def _report(self, session: Session, pending: PendingLetter) -> None:
        self._ports.emit(
            RecordDeadLettered(
                **session.names,
                position=str(pending.position),
                partition_key=None if pending.record is None else pending.record.partition_key,
                attempts=pending.attempts,
                error_type=pending.failure.error_type,
                destination=str(self._ports.letters),
                recovered=pending.recovered,
            )
        )
