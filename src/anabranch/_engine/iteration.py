"""Iteration by the caller's own loop: `async for` over records or batches, with automatic or manual acknowledgement.

`Iteration` is what the caller holds. It gets its items from a `RecordIterator` (asking for the next item acknowledges
the last one) or a `ManualIterator` (the caller acknowledges).
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from traceback import StackSummary
from typing import Any, Final, Generic, TypeVar

from anabranch._core.handling.lanes import LaneLimits, RecordLane
from anabranch._core.tracker import Entry
from anabranch._engine.handler_calls import Decode, HandlerOptions, OnUndecodable, UndecodableError, task_stack
from anabranch._engine.leases.fleet import Fleet
from anabranch._engine.ports import Ports
from anabranch._engine.ready_sessions import BatchFeed, LoopTurn, ReadySessions
from anabranch._engine.session import Session
from anabranch.errors import UsageError
from anabranch.records import Batch, Record

if sys.version_info >= (3, 12):
    _current_task = asyncio.current_task
else:
    # This runs for each record, and 3.11's own function takes three times as long.
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]  # typeshed has no private names

    _current_task = _current_tasks.get

T = TypeVar("T")
Begin = Callable[[], Awaitable[Callable[[], T | None]]]


_NOBODY: Final = object()
"""No task uses the iterator."""


class Iteration(AsyncIterator[T], Generic[T]):
    """Not an async generator: a generator whose step is cancelled is over, so a loop with a timeout per step would end
    silently. A cancelled step here has taken nothing, and the next one continues.

    Only one task at a time may use it: a second one would acknowledge what the first still works on. A task that has
    ended does not count, because `asyncio.wait_for` on Python 3.11 makes a task for each step.

    Its maker may hold it weakly, to see whether the caller has dropped it.
    """

    __slots__ = ("__weakref__", "_begin", "_is_over", "_loop", "_next", "_task", "_tasks_share", "closed", "is_stopped")

    def __init__(self, begin: Begin[T], is_over: Callable[[], Awaitable[bool]], *, tasks_share: bool = False) -> None:
        self._begin: Begin[T] | None = begin
        self._is_over = is_over
        self._next: Callable[[], T | None] = _nothing
        """Returns the next item, or None if there is none now."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: Any = _NOBODY
        """The task that waits for a step or works on its result."""
        self._tasks_share = tasks_share
        """Several tasks may use it, because a step acknowledges nothing."""
        self.closed = False
        self.is_stopped: Callable[[], bool] = lambda: False
        """Whether it was stopped before its first step."""

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
        if self._begin is None:
            return await self._is_over()
        if self.is_stopped():
            self.closed = True
            return True
        self._next = await self._begin()
        self._begin = None
        return False

    async def aclose(self) -> None:
        """Ends the iteration. Does not acknowledge the last item."""
        self.closed = True
        self._next = _nothing


def _nothing() -> None:
    return None


SLICE = 500
"""Records after which we yield to the event loop, even if the caller's loop never waits."""


class RecordIterator:
    """Delivers records or batches; asking for the next one acknowledges the last.

    So leaving the loop with `break` or an exception repeats the last record, and `stop()` inside the loop ends it after
    acknowledging that record. If the lease is lost, the rest of the slice is dropped.
    """

    def __init__(
        self,
        feed: BatchFeed,
        options: HandlerOptions,
        *,
        on_undecodable: OnUndecodable,
    ) -> None:
        self._feed = feed
        self._options = options
        self._on_undecodable = on_undecodable
        self._undecodable: UndecodableError | None = None
        """The error of the record after the delivered batch: the shard stops there once the batch is acknowledged."""
        self._session: Session | None = None
        self._slice: list[Record[bytes]] = []
        self._handed_out = 0
        self._acknowledged = 0
        self.task: asyncio.Task[Any] | None = None
        """The caller's task, once known."""
        self._since_turn = 0
        self.wants_turn = False
        """Yield to the event loop before asking for the next item."""
        self.next_record: Callable[[], Record[Any] | None] = self._records().__next__
        """Acknowledges the last record. Returns the next one, or None if there is none now."""

    # records

    def _records(self) -> Iterator[Record[Any] | None]:
        """Never ends. A generator, because resuming one is the cheapest step for each record."""
        turn, decode = self._feed.turn, self._options.decode
        may_start = self._feed.may_start
        while True:
            taken = None if self._is_to_turn() else self._feed.take()
            if taken is None:
                yield None
                continue
            session, self._slice = taken
            self._since_turn += len(self._slice)
            self._session, self._handed_out, self._acknowledged = session, 0, 0
            for place, record in enumerate(self._slice, 1):
                while session.is_live and (session.is_draining or not may_start(turn.over_ms)):
                    self.wants_turn = turn.is_over()
                    if not self.wants_turn:
                        self._feed.on_ended(session)  # fenced or draining: both may end without that
                    yield None
                if not session.is_live:
                    break
                try:
                    decoded = record if decode is None else decode(record)
                except UndecodableError as error:
                    self._stop_at(session, error)
                    break
                self._handed_out = place
                yield decoded
                self._acknowledged = place
            self.settle()
            self._drop()

    # batches

    def next_batch(self) -> Batch[Any] | None:
        """Acknowledges the last batch. Returns the next one, or None if there is none now."""
        self._acknowledged = self._handed_out
        session, undecodable = self._session, self._undecodable
        self.settle()
        if session is not None and undecodable is not None and session.is_live:
            self._stop_at(session, undecodable)
        while True:
            taken = None if self._is_to_turn() else self._feed.take()
            if taken is None:
                return None
            session, records = taken
            self._since_turn += len(records)
            self._session, self._slice, self._acknowledged = session, records, 0
            records, self._undecodable = self._options.decode_leading(records)
            if records:
                self._handed_out = len(records)
                return Batch(
                    stream=session.stream.name,
                    shard_id=session.shard_id,
                    records=records,
                    millis_behind_latest=session.behind_ms,
                )
            assert self._undecodable is not None, "a batch has at least one record"
            self._stop_at(session, self._undecodable)

    def _is_to_turn(self) -> bool:
        if self._since_turn < SLICE and not self._feed.turn.is_over():
            return False
        self._since_turn, self.wants_turn = 0, True
        return True

    def _stop_at(self, session: Session, error: UndecodableError) -> None:
        self.settle()
        self._drop()
        self._on_undecodable(session, error)

    # acknowledgement

    def acknowledge(self) -> None:
        """The loop body has ended: its record or batch is finished."""
        self._acknowledged = self._handed_out

    def settle(self) -> None:
        """Reports acknowledged records: at the end of a slice and before each commit."""
        session = self._session
        if session is None or not self._acknowledged or not session.is_live:
            return  # after a lost lease the delivered record still counts as running until the next step
        done = self._acknowledged == len(self._slice)
        count = self._acknowledged
        if done:
            self._drop()
        self._feed.finish_through(session, count)

    def abandon(self) -> None:
        """The delivered records will not be acknowledged: stops waiting for them."""
        session = self._session
        self.settle()
        self._drop()
        if session is not None:
            self._feed.on_ended(session)

    @property
    def in_hand(self) -> tuple[Session, Record[bytes]] | None:
        """The first delivered record that is not acknowledged."""
        if self._session is None or self._handed_out == self._acknowledged:
            return None
        return self._session, self._slice[self._acknowledged]

    def _drop(self) -> None:
        self._session, self._slice, self._undecodable = None, [], None
        self._handed_out = self._acknowledged = 0


UNACKNOWLEDGED_MAX = 10_000
"""Unacknowledged records per shard."""

Name = tuple[str, str, str, int]


class ManualIterator:
    """Delivers records that the caller acknowledges in any order; a `Sink`.

    The number of unacknowledged records is limited. A record that is never acknowledged holds the checkpoint back, and
    the next owner handles it again.
    """

    manual_ack = True

    def __init__(
        self,
        ports: Ports,
        fleet: Fleet,
        decode: Decode,
        *,
        on_finished: Callable[[Session], None],
        on_undecodable: OnUndecodable,
    ) -> None:
        self._ports = ports
        self._fleet = fleet
        self._decode = decode
        self._on_finished = on_finished
        self._on_undecodable = on_undecodable
        self._in_hand: dict[Name, tuple[Session, Entry]] = {}
        self._lost: set[tuple[str, str]] = set()
        """Shards whose lease was lost with unacknowledged records, which may have been delivered again since."""
        self.task: asyncio.Task[Any] | None = None
        """The caller's task, once known."""
        self._since_turn = 0
        self.wants_turn = False
        """Yield to the event loop before asking for the next item."""
        self._turn = LoopTurn(ports.clock)
        self.ready = ReadySessions()
        self.runner_count = 0

    def next_record(self) -> Record[Any] | None:
        """The next record, or None if there is none now."""
        while self._fleet.may_start(self._turn.over_ms):
            if self._since_turn >= SLICE:
                self._since_turn, self.wants_turn = 0, True
                return None
            taken = self.ready.take(self._pick)
            if taken is None:
                return None
            self._since_turn += 1
            session, entry = taken
            try:
                decoded = entry.record if self._decode is None else self._decode(entry.record)
            except UndecodableError as error:
                _lane(session).retry_at(entry, self._ports.clock.now_ms())
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
        entry = lane.next(self._ports.clock.now_ms())
        if entry is None:
            session.settle()
            self._on_finished(session)
        return entry

    def ack(self, record: Record[Any]) -> None:
        """Finishes this record. Ignored if its lease was lost: the record may have been delivered again since."""
        found = self._in_hand.pop(_name(record), None)
        if found is None:
            if (record.stream, record.shard_id) in self._lost:
                return
            raise UsageError(
                f"record {record.position} of {record.shard_id} cannot be acknowledged: it already was, or it "
                "did not come from this iteration"
            )
        session, entry = found
        if session.is_live:
            _lane(session).finish(entry)
            session.settle()
            self.ready.offer(session)
        self._on_finished(session)

    def abandon(self) -> None:
        """The delivered records will not be acknowledged: stops waiting for them."""
        sessions = dict.fromkeys(session for session, _ in self._in_hand.values())
        self._in_hand.clear()
        for session in sessions:
            self._on_finished(session)

    # the Sink protocol

    def make_lane(self, session: Session) -> RecordLane:
        limits = LaneLimits(open_keys_max=UNACKNOWLEDGED_MAX)
        return RecordLane(session.row.checkpoint, "none", session.window, limits)

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        in_hand = list(self._in_hand.values())  # a copy: the heartbeat thread calls this too
        return [(session, entry.record) for session, entry in in_hand if session.is_live]

    def stack_of(self, record: Record[bytes]) -> StackSummary:  # noqa: ARG002 -- all records are in one loop
        return task_stack(self.task)

    def overdue(self, now_ms: int) -> dict[Session, str]:  # noqa: ARG002 -- the caller's loop has no timeout
        return {}

    def revoke(self, session: Session) -> None:
        """The caller keeps its records; acknowledging them has no effect any more."""
        self.ready.withdraw(session)
        self._lost.add((session.stream.name, session.shard_id))

    def interrupt(self, session: Session | None = None) -> None:
        """The caller's loop cannot be interrupted."""

    def before_commit(self) -> None:
        """Nothing to do: acknowledgements are reported at once."""

    async def run_one(self) -> None:
        raise AssertionError("the caller's loop takes the records")


def _lane(session: Session) -> RecordLane:
    lane = session.lane
    assert isinstance(lane, RecordLane)
    return lane


def _name(record: Record[Any]) -> Name:
    return record.stream, record.shard_id, record.sequence_number, record.sub_sequence_number
