"""Which sessions may have records to deliver, in turn, and how long to deliver before the event loop runs others."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, TypeVar

from anabranch._core.handling.batches import BatchLane
from anabranch._engine.clock import Scheduler
from anabranch._engine.leases.fleet import Fleet
from anabranch._engine.ports import Ports
from anabranch._engine.session import Session
from anabranch._ports import Clock
from anabranch.records import Record

T = TypeVar("T")


class ReadySessions:
    """Serves sessions round-robin, so a busy shard does not starve a quiet one. A session without records leaves, and
    is offered again when that may have changed. Each waiter that finds work wakes the next one, so a page of records
    does not wake thirty runners at once.
    """

    def __init__(self, *, one_at_a_time: bool = False) -> None:
        self._one_at_a_time = one_at_a_time
        """A session delivers more only after the last delivery is finished; whoever finishes it calls `offer`."""
        # Not a dict: finding its first key gets slower after many deletions at the front.
        self._ready: OrderedDict[Session, None] = OrderedDict()
        self._waiters: deque[asyncio.Future[None]] = deque()

    def offer(self, session: Session) -> None:
        self._ready[session] = None
        self.wake()

    def put_back(self, session: Session) -> None:
        """As `offer`, without waking a waiter: the caller checks again before it waits."""
        self._ready[session] = None

    def withdraw(self, session: Session) -> None:
        self._ready.pop(session, None)

    def take(self, pick: Callable[[Session], T | None]) -> tuple[Session, T] | None:
        """The first session, in turn, that has something to deliver, and what it delivers."""
        while self._ready:
            session, _ = self._ready.popitem(last=False)
            picked = pick(session)
            if picked is not None:
                if not self._one_at_a_time:
                    self._ready[session] = None
                if self._waiters and self._ready:
                    self.wake()
                return session, picked
        return None

    def wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        while self._waiters:
            self.wake()

    async def wait(self) -> None:
        """Waits until a session may have records; the caller checks again."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.wake()  # pass the wake-up on
            raise


TURN_MS: Final = 20
"""A commit takes about six turns of the loop: this must be far shorter than the commit interval."""


class LoopTurn:
    """Limits how long records are delivered before the event loop runs other tasks. A handler that never waits would
    otherwise block commits, reads and the stop.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.over_ms = clock.now_ms() + TURN_MS
        """After this time nothing starts until the loop has run once."""
        self._is_asked = False
        """Whether `_begin` is scheduled."""

    def is_over(self) -> bool:
        """Whether the caller must let the loop run before it starts anything else."""
        if self._clock.now_ms() < self.over_ms:
            return False
        if not self._is_asked:
            self._is_asked = True
            asyncio.get_running_loop().call_soon(self._begin)
        return True

    def _begin(self) -> None:
        self._is_asked = False
        self.over_ms = self._clock.now_ms() + TURN_MS


RecordList = list[Record[bytes]]


def batch_lane(session: Session) -> BatchLane:
    lane = session.lane
    assert isinstance(lane, BatchLane)
    return lane


class BatchFeed:
    """Delivers batches for iteration and batch handlers. Shards are served in turn; a shard's next batch is delivered
    after the last one is finished. The fence is checked in the same step as the delivery.
    """

    def __init__(
        self, ports: Ports, fleet: Fleet, scheduler: Scheduler, *, on_finished: Callable[[Session], None]
    ) -> None:
        self._ports = ports
        self.may_start = fleet.may_start
        self.turn = LoopTurn(ports.clock)
        self._scheduler = scheduler
        self.on_ended = on_finished
        """Called when the handler of a batch has ended in any way: a drain may wait for it."""
        self.ready = ReadySessions(one_at_a_time=True)

    @property
    def is_closed(self) -> bool:
        """The worker is ending: nothing more is delivered."""
        return self._scheduler.is_closed

    def offer(self, session: Session) -> None:
        self.ready.offer(session)

    def may_go_on(self, session: Session) -> bool:
        """Whether a delivered batch may (still) be handled."""
        return session.may_start and self.may_start()

    def take(self) -> tuple[Session, RecordList] | None:
        return self.ready.take(self._pick) if self.may_start() else None

    def _pick(self, session: Session) -> RecordList | None:
        if not session.may_start:
            return None
        lane = batch_lane(session)
        now_ms = self._ports.clock.now_ms()
        batch = lane.next(now_ms, ended=session.phase == "ended", no_room=session.reads_blocked(now_ms))
        if batch is None:
            session.settle()
            if (deadline_ms := lane.next_deadline_ms) is not None:
                self._scheduler.call_at(deadline_ms, lambda: self.ready.offer(session))
            self.on_ended(session)
        return batch

    def finish_through(self, session: Session, count: int) -> None:
        """Finishes the first `count` records of the delivered batch."""
        if session.is_live:
            batch_lane(session).finish_through(count)
            session.settle()
            self.on_ended(session)
            self.ready.offer(session)
