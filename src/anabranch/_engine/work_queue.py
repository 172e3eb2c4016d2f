"""Which sessions changed, which may have work, for how long to deliver it, and the `Processor` that takes it."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import StackSummary
from typing import Final

from anabranch._core.session import DeliveryMode, Session, Work
from anabranch._engine.clock import Scheduler
from anabranch._engine.fleet import Fleet
from anabranch._ports import Clock
from anabranch.reasons import Reason
from anabranch.records import Record


@dataclass(eq=False, repr=False)
class Changes:
    """The sessions that changed in this turn of the event loop. Each is processed once, after the turn.

    Readers, runners and iterators add sessions here and call no other part.
    """

    _scheduler: Scheduler
    _process: Callable[[Session, bool], None]
    """Called for each changed session, and whether it may have new work."""
    _sessions: dict[Session, bool] = field(default_factory=dict)

    def finished(self, session: Session) -> None:
        """Records finished, or a call ended."""
        if session not in self._sessions:
            self._add(session, has_work=False)

    def arrived(self, session: Session) -> None:
        """Records arrived, the shard ended, or a partial batch need not wait any more."""
        self._add(session, has_work=True)

    def _add(self, session: Session, *, has_work: bool) -> None:
        if not self._sessions:
            self._scheduler.call_soon(self._process_all)
        self._sessions[session] = has_work

    def _process_all(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session, has_work in sessions.items():
            self._process(session, has_work)


@dataclass(eq=False, repr=False)
class WorkQueue:
    """Serves sessions round-robin, so a busy shard does not starve a quiet one. A session without work leaves, and is
    offered again when that may have changed. Each waiter that finds work wakes the next one, so a page of records does
    not wake thirty runners at once.
    """

    _clock: Clock
    _scheduler: Scheduler
    _fleet: Fleet
    _changes: Changes
    _one_at_a_time: bool
    """A session delivers work only after the last one is finished. The code that finishes it calls `offer`."""
    _held: dict[Session, None] = field(default_factory=dict)
    """Sessions that may not start records, because a quarantined shard is tried alone (rule D5)."""
    # Not a dict: finding its first key gets slower after many deletions at the front.
    _ready: OrderedDict[Session, None] = field(default_factory=OrderedDict)
    _waiters: deque[asyncio.Future[None]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.may_start = self._fleet.may_start
        self.turn = LoopTurn(self._clock)

    # sessions that may have work

    def offer(self, session: Session) -> None:
        self._ready[session] = None
        self.wake()

    def put_back(self, session: Session) -> None:
        """As `offer`, without waking a waiter: the caller checks again before it waits."""
        self._ready[session] = None

    def withdraw(self, session: Session) -> None:
        self._ready.pop(session, None)

    def hold(self, session: Session) -> None:
        self._held[session] = None

    def release(self, session: Session) -> None:
        self._held.pop(session, None)

    def is_held(self, session: Session) -> bool:
        return session in self._held

    def take_session(self) -> Session | None:
        """The next session that may start something, in the step in which the fence is checked (rule L8)."""
        if not self.may_start():
            return None
        while self._ready:
            session, _ = self._ready.popitem(last=False)
            if session.may_start and session not in self._held:
                return session
        return None

    def found_work(self, session: Session) -> None:
        """The session delivered something: it and the others may have more."""
        if not self._one_at_a_time:
            self._ready[session] = None
        if self._waiters and self._ready:
            self.wake()

    def next_of(self, session: Session) -> Work | None:
        """The session's next work. If it has none now, it is offered again later. The caller just read the clock."""
        now_ms = self.turn.now_ms
        work = session.next_work(now_ms)
        if work is not None:
            self.found_work(session)
            if session.letters_due:
                self._changes.finished(session)  # records before this one are not handled
            return work
        if session.skipped:
            self._changes.arrived(session)
            return None
        if (at_ms := session.next_work_at_ms(now_ms)) is not None:
            self.offer_at(session, at_ms)
        self._changes.finished(session)  # it may have skipped records that the previous owner finished
        return None

    def offer_at(self, session: Session, at_ms: int) -> None:
        self._scheduler.call_at(at_ms, lambda: self.offer(session))

    def next(self) -> Work | None:
        """The next work of any session."""
        while (session := self.take_session()) is not None:
            if (work := self.next_of(session)) is not None:
                return work
        return None

    # waiters

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
        """Waits until a session may have work; the caller checks again."""
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
    """Limits how long records are delivered in one go: a handler that never waits would block commits and the stop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now_ms = clock.now_ms()
        """When the clock was last read."""
        self.over_ms = self.now_ms + TURN_MS
        """After this time nothing starts until the loop has run once."""
        self._is_asked = False
        """Whether `_begin` is scheduled."""

    def is_over(self) -> bool:
        """Whether the caller must yield to the event loop before it starts anything else."""
        now_ms = self.now_ms = self._clock.now_ms()
        if now_ms < self.over_ms:
            return False
        if not self._is_asked:
            self._is_asked = True
            asyncio.get_running_loop().call_soon(self._begin)
        return True

    def look(self) -> int:
        """The time now."""
        self.now_ms = self._clock.now_ms()
        return self.now_ms

    def _begin(self) -> None:
        self._is_asked = False
        self.over_ms = self.look() + TURN_MS


@dataclass(eq=False, repr=False)
class Processor:
    """Who handles the records: the runners of a handler (`Dispatcher`), or the caller's own loop (`iteration`).

    The rest of the engine asks it which calls run, and tells it when to stop. The methods here are those of the
    caller's own loop, which the engine can neither start nor cancel.
    """

    queue: WorkQueue
    mode: DeliveryMode
    """How sessions deliver their records."""

    manual_ack = False
    """Whether the caller acknowledges each record."""
    is_loop = True
    """Whether the caller's own loop does the work."""
    is_cancellable = False
    """Whether running calls can be ended."""

    # what runs

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        """Each running call, with its first record. The heartbeat thread asks, too."""
        return []

    def stack_of(self, record: Record[bytes]) -> StackSummary:  # noqa: ARG002 -- unknown here
        """Where in the code the call that starts with this record is."""
        return StackSummary()

    def overdue(self, now_ms: int) -> dict[Session, Reason]:  # noqa: ARG002 -- a loop has no timeout
        """Sessions with a call that ignores its timeout, each with the reason."""
        return {}

    @property
    def is_calling(self) -> bool:
        """Whether the code that asks runs inside a handler call."""
        return False

    def report_finished(self) -> Session | None:
        """Before each commit: a loop reports what is finished (rule M6), and returns the session, to be committed."""
        return None

    def abandon(self) -> tuple[Record[bytes], ...]:
        """The records that a loop holds will not be acknowledged: stops waiting for them. Returns those to report."""
        return ()

    # from start to end

    def start(self) -> None:
        """The worker has joined."""

    def interrupt(self, session: Session | None = None) -> None:
        """Cancels running calls, all or those of one session. Their records count as not started."""

    def revoke(self, session: Session) -> None:
        """The lease is lost: the session's calls no longer count."""
        self.queue.withdraw(session)

    def give_up(self) -> None:
        """Stops waiting for calls that cannot be cancelled."""

    def cancel_all(self) -> None:
        """The worker ends: cancels everything."""

    async def end(self) -> None:
        """Waits for cancelled calls, for a limited time."""

    def release(self) -> None:
        """Stops waiting for calls that ignore their cancellation."""

    def close(self) -> None:
        """The run is over."""
