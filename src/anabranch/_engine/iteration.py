"""Iteration by the caller's own loop: `async for` over records or batches, with automatic or manual acknowledgement.

`Iteration` is what the caller holds. It gets its items from a `RecordIterator` (asking for the next item acknowledges
the last one) or a `ManualIterator` (the caller acknowledges). Both are processors: they take the same work as runners.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from traceback import StackSummary
from typing import Any, Final, Generic, TypeVar

from anabranch._core.handling.failures import UndecodableError
from anabranch._core.session import Session, Work
from anabranch._engine.dispatcher import conclude_undecodable, make_batch
from anabranch._engine.handler_calls import HandlerOptions, task_stack
from anabranch._engine.work_queue import Changes, Processor
from anabranch._ports import Ports
from anabranch.errors import UsageError
from anabranch.records import Batch, Record

if sys.version_info >= (3, 12):
    _current_task = asyncio.current_task
else:
    # This runs for each record, and 3.11's own function takes three times as long.
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]  # typeshed has no private names

    _current_task = _current_tasks.get

T = TypeVar("T")


_NOBODY: Final = object()
"""No task uses the iterator."""


def _nothing() -> None:
    return None


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Iteration(AsyncIterator[T], Generic[T]):
    """Not an async generator: a generator whose step is cancelled is over, so a loop with a timeout per step would end
    silently. A cancelled step here has taken nothing, and the next one continues.

    Only one task at a time may use it: a second one would acknowledge what the first still works on. A task that has
    ended does not count, because `asyncio.wait_for` on Python 3.11 makes a task for each step.

    Its maker may hold it weakly, to see whether the caller has dropped it.
    """

    _take_next: Callable[[], T | None]
    """Returns the next item, or None if there is none now."""
    _begin: Callable[[], Awaitable[bool]]
    """Called by the first step. Returns False if the iteration was stopped before."""
    _is_over: Callable[[], Awaitable[bool]]
    """Waits until there may be more items. Returns True if there will be none."""
    _tasks_share: bool
    """Several tasks may use it, because a step acknowledges nothing."""
    _has_begun: bool = False
    _next: Callable[[], T | None] = _nothing
    _loop: asyncio.AbstractEventLoop | None = None
    _task: Any = _NOBODY
    """The task that waits for a step or works on its result."""
    closed: bool = False

    async def __anext__(self) -> T:
        if _current_task(self._loop) is not self._task:
            self._enter()
        while (found := self._next()) is None:
            is_over = True
            try:
                is_over = await self._wait_for_more()
            finally:
                if is_over:
                    self._task = _NOBODY  # the last record is acknowledged, and there is no next
            if is_over:
                raise StopAsyncIteration
        return found

    def _enter(self) -> None:
        if self._tasks_share:
            return
        task = asyncio.current_task()
        if self._task is not _NOBODY and self._task is not task and not self._task.done():
            raise UsageError(
                f"task {self._task.get_name()!r} is using this iterator: asking for the next record acknowledges the "
                "one that it works on. To work on several records at once, use consumer.run(handler), distribute the "
                'records of consumer.batches(), or set Consumer(acknowledge="manual") and call consumer.ack(record)'
            )
        self._loop, self._task = asyncio.get_running_loop(), task

    async def _wait_for_more(self) -> bool:
        """Waits until there may be more items. Returns True if there will be none."""
        if self.closed:
            return True
        if self._has_begun:
            return await self._is_over()
        if not await self._begin():
            self.closed = True
            return True
        self._has_begun, self._next = True, self._take_next
        return False

    async def aclose(self) -> None:
        """Ends the iteration. Does not acknowledge the last item."""
        self.closed = True
        self._next = _nothing


SLICE = 500
"""Records after which we yield to the event loop, even if the caller's loop never waits."""


@dataclass(eq=False, repr=False)
class LoopProcessor(Processor):
    """What both kinds of loops share: the caller's task, and when to yield to the event loop."""

    _ports: Ports
    _changes: Changes
    _options: HandlerOptions
    _task: asyncio.Task[Any] | None = None
    """The caller's task, once known."""
    _since_turn: int = 0
    _wants_turn: bool = False

    def begin(self) -> None:
        """The current task is the caller's."""
        self._task = asyncio.current_task()

    @property
    def is_in_body(self) -> bool:
        """Whether the code that asks runs in the caller's task."""
        return self._task is not None and self._task is asyncio.current_task()

    def acknowledge(self) -> None:
        """The loop body has ended. Unless the caller acknowledges records, its record or batch is finished."""

    def take_turn(self) -> bool:
        """Whether to yield to the event loop before asking for the next item. True once."""
        wants_turn, self._wants_turn = self._wants_turn, False
        return wants_turn

    def stack_of(self, record: Record[bytes]) -> StackSummary:  # noqa: ARG002 -- all records are in one loop
        return task_stack(self._task)

    def _next_work(self) -> Work | None:
        if self._since_turn >= SLICE or self.queue.turn.is_over():
            self._since_turn, self._wants_turn = 0, True
            return None
        work = self.queue.next()
        if work is not None:
            self._since_turn += len(work.records)
        return work


@dataclass(eq=False, repr=False)
class RecordIterator(LoopProcessor):
    """Delivers records or batches; asking for the next one acknowledges the last.

    So leaving the loop with `break` or an exception repeats the last record, and `stop()` inside the loop ends it after
    acknowledging that record. If the lease is lost, the rest of the work is dropped.
    """

    _work: Work | None = None
    _handed_out: int = 0
    _acknowledged: int = 0
    _timed_count: int = 0
    """How many of the acknowledged records have been timed, the last at `_timed_at_ms`."""
    _timed_at_ms: int = 0
    _is_in_batches: bool = False
    _undecodable: UndecodableError | None = None
    """The record after the delivered batch does not decode: it gets the policy's last step after the batch."""

    def __post_init__(self) -> None:
        self.next_record: Callable[[], Record[Any] | None] = self._records().__next__
        """Acknowledges the last record. Returns the next one, or None if there is none now."""

    # records

    def _records(self) -> Iterator[Record[Any] | None]:
        """Never ends. A generator, because resuming one is the cheapest step for each record."""
        turn, decode = self.queue.turn, self._options.decode
        may_start = self.queue.may_start
        while True:
            work = self._next_work()
            if work is None:
                yield None
                continue
            session, state = work.session, work.session.state
            self._take(work, 0)
            for place, record in enumerate(work.records, 1):
                if session.state != state or not may_start(turn.over_ms):
                    yield from self._pause(session)
                    if not session.is_live:
                        break
                    state = session.state
                try:
                    decoded = record if decode is None else decode(record)
                except UndecodableError as error:
                    self._conclude(work, error)
                    break
                self._handed_out = place
                yield decoded
                self._acknowledged = place
            self.report_finished()
            self._drop()

    def _pause(self, session: Session) -> Iterator[None]:
        """Until the next record may start, or the lease is lost."""
        while session.is_live and not (session.may_start and self.queue.may_start(self.queue.turn.over_ms)):
            self._wants_turn = self.queue.turn.is_over()
            if not self._wants_turn:
                self._changes.finished(session)  # fenced or draining: a drain checks again whether it is over
            yield None

    # batches

    def next_batch(self) -> Batch[Any] | None:
        """Acknowledges the last batch. Returns the next one, or None if there is none now."""
        self._is_in_batches = True
        self._acknowledged = self._handed_out
        work, undecodable = self._work, self._undecodable
        if work is not None and undecodable is not None:
            self._conclude(work, undecodable)
        self.report_finished()
        while (work := self._next_work()) is not None:
            records, self._undecodable = self._options.decode_leading(work.records)
            if records:
                self._take(work, len(records))
                return make_batch(work.session, records)
            assert self._undecodable is not None, "a batch has at least one record"
            self._conclude(work, self._undecodable)
        return None

    def _conclude(self, work: Work, error: UndecodableError) -> None:
        self._drop()
        if work.session.is_live:
            conclude_undecodable(self._ports, self._options.policy, work, error)
            self.queue.offer(work.session)
            self._changes.finished(work.session)

    # acknowledgement

    def acknowledge(self) -> None:
        self._acknowledged = self._handed_out

    def report_finished(self) -> Session | None:
        """At the end of the work and before each commit."""
        work, count = self._work, self._acknowledged
        if work is None or not count or not work.session.is_live:
            return None  # after a lost lease the delivered record still counts as running until the next step
        self._time(work.session, count)
        work.session.finish(work, count)
        if count == len(work.records):
            self._drop()
            self.queue.offer(work.session)
        self._changes.finished(work.session)
        return work.session

    def _time(self, session: Session, count: int) -> None:
        """So long took the records that were acknowledged since the last time. A batch is one call."""
        new_count, now_ms = count - self._timed_count, self._ports.clock.now_ms()
        if new_count > 0:
            session.count_calls(now_ms - self._timed_at_ms, 1 if self._is_in_batches else new_count)
            self._timed_count, self._timed_at_ms = count, now_ms

    def abandon(self) -> tuple[Record[bytes], ...]:
        work, abandoned = self._work, tuple(record for _, record in self.running())
        self.report_finished()
        self._drop()
        if work is not None:
            self._changes.finished(work.session)
        return abandoned

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        work = self._work
        if work is None or self._handed_out == self._acknowledged:
            return []
        return [(work.session, work.records[self._acknowledged])]

    def _take(self, work: Work, handed_out: int) -> None:
        self._work, self._handed_out, self._acknowledged = work, handed_out, 0
        self._timed_count, self._timed_at_ms = 0, work.started_at_ms

    def _drop(self) -> None:
        self._work, self._undecodable = None, None
        self._handed_out = self._acknowledged = 0


UNACKNOWLEDGED_MAX = 10_000
"""Unacknowledged records per shard."""

Name = tuple[str, str, str, int]


@dataclass(eq=False, repr=False)
class ManualIterator(LoopProcessor):
    """Delivers records that the caller acknowledges in any order.

    The number of unacknowledged records is limited. A record that is never acknowledged holds the checkpoint back, and
    the next owner handles it again.
    """

    manual_ack = True

    _unacknowledged: dict[Name, Work] = field(default_factory=dict)
    _lost: set[tuple[str, str]] = field(default_factory=set)
    """Shards whose lease was lost with unacknowledged records, which may have been delivered again since."""

    def next_record(self) -> Record[Any] | None:
        """The next record, or None if there is none now."""
        decode = self._options.decode
        while (work := self._next_work()) is not None:
            record = work.records[0]
            try:
                decoded = record if decode is None else decode(record)
            except UndecodableError as error:
                conclude_undecodable(self._ports, self._options.policy, work, error)
                self._changes.finished(work.session)
                continue
            self._unacknowledged[_name(record)] = work
            return decoded
        return None

    def ack(self, record: Record[Any]) -> None:
        """Finishes this record. Ignored if its lease was lost: the record may have been delivered again since."""
        work = self._unacknowledged.pop(_name(record), None)
        if work is None:
            if (record.stream, record.shard_id) in self._lost:
                return
            raise UsageError(
                f"record {record.position} of {record.shard_id} cannot be acknowledged: it already was, or it "
                "did not come from this iteration"
            )
        work.session.finish(work, ended_at_ms=self._ports.clock.now_ms())
        if work.session.is_live:
            self.queue.offer(work.session)
        self._changes.finished(work.session)

    def abandon(self) -> tuple[Record[bytes], ...]:
        works = list(self._unacknowledged.values())
        self._unacknowledged.clear()
        for work in works:
            self._changes.finished(work.session)
        return ()

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        return [(work.session, work.records[0]) for work in list(self._unacknowledged.values()) if work.session.is_live]

    def revoke(self, session: Session) -> None:
        """The caller keeps its records; acknowledging them has no effect any more."""
        super().revoke(session)
        self._lost.add((session.stream.name, session.shard_id))


def _name(record: Record[Any]) -> Name:
    return record.stream, record.shard_id, record.sequence_number, record.sub_sequence_number
