"""Hands out batches of one shard after another, for iteration and for batch handlers.

A shard's next batch is handed out only after this one is finished; different shards are served in turn. The fence is
read in the same step as the hand-over.
"""

from collections.abc import Callable

from anabranch._core.handling.batches import BatchLane
from anabranch._engine.handling.loop_turn import LoopTurn
from anabranch._engine.handling.shelf import Shelf
from anabranch._engine.leases.member import Member
from anabranch._engine.outside import Outside
from anabranch._engine.scheduler import Scheduler
from anabranch._engine.session import Session
from anabranch.records import Record

__all__ = ["BatchFeed", "batch_lane"]

Stretch = list[Record[bytes]]


def batch_lane(session: Session) -> BatchLane:
    lane = session.lane
    assert isinstance(lane, BatchLane)
    return lane


class BatchFeed:
    def __init__(
        self, outside: Outside, member: Member, scheduler: Scheduler, *, on_finished: Callable[[Session], None]
    ) -> None:
        self._outside = outside
        self.may_start = member.may_start
        self.turn = LoopTurn(outside.clock)
        self._scheduler = scheduler
        self.on_ended = on_finished
        """Called when a batch is with its handler no more, however that ended: a drain may wait for it."""
        self.shelf = Shelf(one_at_a_time=True)

    @property
    def is_closed(self) -> bool:
        """Everything ends: nothing more is handed out."""
        return self._scheduler.is_closed

    def offer(self, session: Session) -> None:
        self.shelf.offer(session)

    def may_go_on(self, session: Session) -> bool:
        """Whether more of a batch that is out may be started."""
        return session.may_start and self.may_start()

    def take(self) -> tuple[Session, Stretch] | None:
        return self.shelf.take(self._pick) if self.may_start() else None

    def _pick(self, session: Session) -> Stretch | None:
        if not session.may_start:
            return None
        lane = batch_lane(session)
        now_ms = self._outside.clock.now_ms()
        batch = lane.next(now_ms, ended=session.phase == "ended", no_room=session.has_no_room(now_ms))
        if batch is None:
            session.settle()
            if (deadline_ms := lane.next_deadline_ms) is not None:
                self._scheduler.call_at(deadline_ms, lambda: self.shelf.offer(session))
            self.on_ended(session)
        return batch

    def finish_through(self, session: Session, count: int) -> None:
        """The first `count` records of the batch that is out are finished."""
        if session.is_live:
            batch_lane(session).finish_through(count)
            session.settle()
            self.on_ended(session)
            self.shelf.offer(session)
