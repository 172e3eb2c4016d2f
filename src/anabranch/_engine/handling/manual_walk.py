"""Iterating with acknowledgement by hand: each record is finished when the caller says so, in any order.

What was handed out and not acknowledged is bounded; then nothing more is handed out until some of it is. A record that
is never acknowledged holds the checkpoint where it is, and is handled again by the next owner.
"""

import asyncio
from collections.abc import Callable
from traceback import StackSummary
from typing import Any

from anabranch._core.checkpoints.tracker import Entry
from anabranch._core.handling.lanes import Lane, LaneLimits
from anabranch._engine.handling.failures import OnUndecodable
from anabranch._engine.handling.handling import Decode, UndecodableError
from anabranch._engine.handling.loop_turn import LoopTurn
from anabranch._engine.handling.shelf import Shelf
from anabranch._engine.handling.stacks import task_stack
from anabranch._engine.handling.walk import SLICE
from anabranch._engine.leases.member import Member
from anabranch._engine.outside import Outside
from anabranch._engine.session import Session
from anabranch.errors import UsageError
from anabranch.records import Record

__all__ = ["ManualWalk"]

UNACKNOWLEDGED_MAX = 10_000
"""Records of one shard that may be in the caller's hands at once."""

Name = tuple[str, str, str, int]


class ManualWalk:
    """A sink whose records the caller takes one by one; fulfils `Sink`."""

    by_hand = True

    def __init__(
        self,
        outside: Outside,
        member: Member,
        decode: Decode,
        *,
        on_finished: Callable[[Session], None],
        on_undecodable: OnUndecodable,
    ) -> None:
        self._outside = outside
        self._member = member
        self._decode = decode
        self._on_finished = on_finished
        self._on_undecodable = on_undecodable
        self._in_hand: dict[Name, tuple[Session, Entry]] = {}
        self._lost: set[tuple[str, str]] = set()
        """Shards whose lease was lost with records in hand: they may have been handed out again since."""
        self.task: asyncio.Task[Any] | None = None
        """The caller's, once it is known."""
        self._since_turn = 0
        self.wants_turn = False
        """The event loop should turn before the next is asked for."""
        self._turn = LoopTurn(outside.clock)
        self.shelf = Shelf()
        self.runner_count = 0

    def next_record(self) -> Record[Any] | None:
        """The next record, or None if there is none at this moment; nothing is acknowledged by it."""
        while self._member.may_start(self._turn.over_ms):
            if self._since_turn >= SLICE:
                self._since_turn, self.wants_turn = 0, True
                return None
            taken = self.shelf.take(self._pick)
            if taken is None:
                return None
            self._since_turn += 1
            session, entry = taken
            try:
                decoded = entry.record if self._decode is None else self._decode(entry.record)
            except UndecodableError as error:
                _lane(session).retry_at(entry, self._outside.clock.now_ms())
                _lane(session).stop()
                self._on_undecodable(session, error)
                continue
            self._in_hand[_name(entry.record)] = (session, entry)
            return decoded
        self.wants_turn = self._turn.is_over()
        return None

    def _pick(self, session: Session) -> Entry | None:
        if not session.may_start:
            return None
        lane = _lane(session)
        entry = lane.next(self._outside.clock.now_ms())
        if entry is None:
            session.settle()
            self._on_finished(session)
        return entry

    def ack(self, record: Record[Any]) -> None:
        """This record is finished. One whose lease is lost meanwhile is somebody else's, and nothing happens; nor does
        anything for the second of two acknowledgements, where it was handed out twice because of that.
        """
        found = self._in_hand.pop(_name(record), None)
        if found is None:
            if (record.stream, record.shard_id) in self._lost:
                return
            raise UsageError(
                f"record {record.position} of {record.shard_id} is not waiting to be acknowledged: it was already, or "
                "it did not come from this iteration"
            )
        session, entry = found
        if session.is_live:
            _lane(session).finish(entry)
            session.settle()
            self.shelf.offer(session)
        self._on_finished(session)

    def abandon(self) -> None:
        """What is in hand will not be acknowledged any more: who waits for it is told."""
        sessions = dict.fromkeys(session for session, _ in self._in_hand.values())
        self._in_hand.clear()
        for session in sessions:
            self._on_finished(session)

    # what the worker asks of a sink

    def make_lane(self, session: Session) -> Lane:
        limits = LaneLimits(open_keys_max=UNACKNOWLEDGED_MAX)
        return Lane(session.row.checkpoint, "none", session.window, limits)

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        in_hand = list(self._in_hand.values())  # a copy: the heart's thread asks, too
        return [(session, entry.record) for session, entry in in_hand if session.is_live]

    def stack_of(self, record: Record[bytes]) -> StackSummary:  # noqa: ARG002 -- one loop holds all that is in hand
        return task_stack(self.task)

    def overdue(self, now_ms: int) -> dict[Session, str]:  # noqa: ARG002 -- the caller's loop has no time-out
        return {}

    def revoke(self, session: Session) -> None:
        """What is in the caller's hands cannot be taken back; acknowledging it has no effect any more."""
        self.shelf.withdraw(session)
        self._lost.add((session.stream.name, session.shard_id))

    def interrupt(self, session: Session | None = None) -> None:
        """What is in the caller's hands cannot be interrupted."""

    def before_commit(self) -> None:
        """Every acknowledgement was reported when it was made."""

    async def run_one(self) -> None:
        raise AssertionError("the caller's loop does the walking")


def _lane(session: Session) -> Lane:
    lane = session.lane
    assert isinstance(lane, Lane)
    return lane


def _name(record: Record[Any]) -> Name:
    return record.stream, record.shard_id, record.sequence_number, record.sub_sequence_number
