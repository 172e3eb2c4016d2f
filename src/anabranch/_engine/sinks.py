"""Where a worker's records go: a record handler, a batch handler, or the caller's own loop.

A sink makes the lane of each session, learns when a session may have records, and knows what runs. The worker knows
nothing else about handlers.
"""

from traceback import StackSummary
from typing import Protocol

from anabranch._core.handling.batches import BatchLane, BatchLimits
from anabranch._core.handling.lanes import LaneLimits, RecordLane
from anabranch._engine.handler_calls import task_stack
from anabranch._engine.iteration import RecordIterator
from anabranch._engine.ready_sessions import BatchFeed, ReadySessions
from anabranch._engine.runners import BatchRunners, RecordRunners
from anabranch._engine.session import Session
from anabranch._model.leases import OrderMode
from anabranch.records import Record


class Sink(Protocol):
    ready: ReadySessions
    runner_count: int
    """How many tasks run `run_one`; 0 if the caller's own loop does the work."""
    manual_ack: bool
    """Whether the caller acknowledges each record."""

    def make_lane(self, session: Session) -> RecordLane | BatchLane: ...
    def running(self) -> list[tuple[Session, Record[bytes]]]: ...
    def stack_of(self, record: Record[bytes]) -> StackSummary: ...
    def overdue(self, now_ms: int) -> dict[Session, str]: ...
    def revoke(self, session: Session) -> None: ...
    def interrupt(self, session: Session | None = None) -> None: ...
    def before_commit(self) -> None: ...
    async def run_one(self) -> None: ...


class _HandlerSink:
    """Our runners call the handler."""

    def __init__(self, runners: RecordRunners | BatchRunners, ready: ReadySessions, concurrency: int) -> None:
        self._runners = runners
        self.ready = ready
        self.runner_count = concurrency
        self.manual_ack = False

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        return self._runners.running()

    def stack_of(self, record: Record[bytes]) -> StackSummary:
        return self._runners.stack_of(record)

    def overdue(self, now_ms: int) -> dict[Session, str]:
        return self._runners.overdue(now_ms)

    def revoke(self, session: Session) -> None:
        self._runners.revoke(session)

    def interrupt(self, session: Session | None = None) -> None:
        self._runners.interrupt(session)

    def before_commit(self) -> None:
        """Nothing to do: runners report at once."""

    async def run_one(self) -> None:
        await self._runners.run_one()


class RecordSink(_HandlerSink):
    def __init__(self, runners: RecordRunners, order: OrderMode, limits: LaneLimits, concurrency: int) -> None:
        super().__init__(runners, runners.ready, concurrency)
        self._order: OrderMode = order
        self._limits = limits

    def make_lane(self, session: Session) -> RecordLane:
        return RecordLane(session.row.checkpoint, self._order, session.window, self._limits, session.budget)


class BatchSink(_HandlerSink):
    def __init__(self, runners: BatchRunners, feed: BatchFeed, limits: BatchLimits, concurrency: int) -> None:
        super().__init__(runners, feed.ready, concurrency)
        self._limits = limits

    def make_lane(self, session: Session) -> BatchLane:
        return BatchLane(session.row.checkpoint, session.window, self._limits)


class IteratorSink:
    """The caller's own loop takes records from `iterator`."""

    def __init__(self, iterator: RecordIterator, feed: BatchFeed, limits: BatchLimits) -> None:
        self.iterator = iterator
        self._limits = limits
        self.ready = feed.ready
        self.runner_count = 0
        self.manual_ack = False

    def make_lane(self, session: Session) -> BatchLane:
        return BatchLane(session.row.checkpoint, session.window, self._limits)

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        in_hand = self.iterator.in_hand
        return [] if in_hand is None else [in_hand]

    def stack_of(self, record: Record[bytes]) -> StackSummary:  # noqa: ARG002 -- there is one loop, with one record
        return task_stack(self.iterator.task)

    def overdue(self, now_ms: int) -> dict[Session, str]:  # noqa: ARG002 -- the caller's loop has no timeout
        return {}

    def revoke(self, session: Session) -> None:
        """The iterator checks the lease before each record; the caller keeps the one it has."""
        self.ready.withdraw(session)

    def interrupt(self, session: Session | None = None) -> None:
        """The caller's loop cannot be interrupted."""

    def before_commit(self) -> None:
        self.iterator.settle()

    async def run_one(self) -> None:
        raise AssertionError("the caller's loop takes the records")
