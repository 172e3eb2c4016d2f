"""Applies the commands of operators to the leases of this worker, between two commits (rule C3).

`skip` finishes a record without handling it, if the shard is stopped at it, if it waits for a retry, or if its dead
letter is not accepted. `resume` retries the record of a stopped shard. Every worker sees the commands in its polls. The
owner of the lease applies them, and writes the result into the command's row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from anabranch._core.leases.commands import RESUME, CommandOutcome, apply_to_row, is_finished, nothing_to_skip
from anabranch._core.leases.plan import Write
from anabranch._core.leases.store_calls import WriteControl
from anabranch._core.session import Session
from anabranch._engine.checkpointer import Checkpointer
from anabranch._engine.dead_lettering import DeadLettering
from anabranch._engine.dispatcher import report_skipped
from anabranch._engine.fleet import Fleet
from anabranch._engine.work_queue import Changes
from anabranch._model.leases import ControlRow, LeaseKey
from anabranch._model.streams import Position
from anabranch._ports import Ports
from anabranch.events import CommandAnswered

GIVE_UP_MS: Final = 30_000
"""How long a command waits for a record that is being handled."""
RETRY_MS: Final = 500


@dataclass(eq=False, repr=False)
class Commands:
    _ports: Ports
    _fleet: Fleet
    _checkpointer: Checkpointer
    _letters: DeadLettering
    _changes: Changes
    _sessions: Mapping[LeaseKey, Session]
    _seen_ms: dict[str, int] = field(default_factory=dict)
    """When each command was first seen."""
    _busy: dict[str, None] = field(default_factory=dict)

    def due(self, commands: Sequence[ControlRow]) -> list[ControlRow]:
        """The pending commands that this worker must apply and answer now."""
        now_ms = self._ports.clock.now_ms()
        self._seen_ms = {row.command_id: self._seen_ms.get(row.command_id, now_ms) for row in commands}
        due = [row for row in commands if row.key in self._sessions and row.command_id not in self._busy]
        self._busy.update(dict.fromkeys(row.command_id for row in due))
        return due

    async def apply(self, command: ControlRow) -> CommandOutcome | None:
        """None: it is applied later, or by another worker. If the outcome has a row, that row was written, and the
        caller starts the stopped session again from it in this step (rule C3).
        """
        assert command.key is not None
        session = self._sessions.get(command.key)
        if session is None or session.state in {"failed", "stopping", "finishing"}:
            return None  # its state is being written
        if session.state == "stopped":
            return await self._apply_to_stopped(session, command)
        if command.action == RESUME:
            # Until the next commit, its row may still say that it is stopped.
            return CommandOutcome("applied", "the shard is not stopped any more")
        try:
            position = Position.parse(command.arguments.get("position", ""))
        except ValueError:
            return CommandOutcome("refused", f"the command has no valid position: {command.arguments}")
        return await self._skip(session, command, position)

    async def _apply_to_stopped(self, session: Session, command: ControlRow) -> CommandOutcome | None:
        async with self._checkpointer.lock(session):
            while session.state == "stopped":
                outcome = apply_to_row(command, session.row)
                if session.row.stopped is None:
                    return replace(outcome, row=session.row)  # written before, by a write whose answer was lost
                if outcome.row is None:
                    return outcome
                written = await self._fleet.write(Write(outcome.row, session.row.version))
                if written == "written":
                    return outcome
                if written != "again":
                    await self._ports.clock.sleep_until_ms(self._ports.clock.now_ms() + RETRY_MS)
        return None

    async def _skip(self, session: Session, command: ControlRow, position: Position) -> CommandOutcome | None:
        waiting = session.take_waiting(position)
        if waiting is not None:
            session.skip(waiting[0])
        elif not self._letters.skip(session, position):
            return self._explain(session, command, position)
        report_skipped(self._ports, session)
        self._changes.arrived(session)
        if await self._checkpointer.write(session) == "written":
            return CommandOutcome("applied", f"record {position} is skipped")
        return None  # it is skipped here; the next poll finds it finished

    def _explain(self, session: Session, command: ControlRow, position: Position) -> CommandOutcome | None:
        """Why the record cannot be skipped now. None: it may be possible soon."""
        if is_finished(session.row, position):
            return nothing_to_skip(position)
        waited_ms = self._ports.clock.now_ms() - self._seen_ms.get(command.command_id, 0)
        if session.lane.holds(position) and waited_ms < GIVE_UP_MS:
            return None
        why = "it is being handled" if session.lane.holds(position) else "the shard is not stopped at it"
        return CommandOutcome("refused", f"record {position} cannot be skipped: {why}")

    async def answer(self, command: ControlRow, outcome: CommandOutcome | None) -> None:
        try:
            if outcome is None:
                return
            answered = replace(command, state=outcome.state, result=f"{outcome.result} (by {self._fleet.member_id})")
            if not await self._fleet.call(WriteControl(answered)):
                return  # no answer: the next poll repeats the command, which finds that it is done
        finally:
            del self._busy[command.command_id]
        assert command.key is not None
        self._ports.emit(
            CommandAnswered(
                stream=command.key.stream_name,
                shard_id=command.key.shard_id,
                action=command.action,
                position=command.arguments.get("position"),
                requested_by=command.requested_by,
                state=outcome.state,
                result=outcome.result,
            )
        )
