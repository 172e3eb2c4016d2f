"""Runs handlers: `RecordRunners` calls one for each record, `BatchRunners` for each batch, as tasks of `RunnerTasks`.

The fence is checked in the same step that starts a call (rule L8). A record is finished when its handler has returned.
A failed one is retried by the policy; after the last attempt the shard stops (rule D4). If a lease is lost, its calls
are cancelled and do not count.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from traceback import StackSummary
from typing import Any, Final, NamedTuple, Self, TypeAlias

from anabranch._core.backoff import retry_in_ms
from anabranch._core.handling.lanes import RecordLane
from anabranch._core.tracker import Entry
from anabranch._engine.clock import Scheduler
from anabranch._engine.handler_calls import (
    IGNORED_AFTER_MS,
    HandlerCall,
    HandlerOptions,
    NotStarted,
    OnFailed,
    OnUndecodable,
    TimeLimit,
    UndecodableError,
    clear_cancellation,
    failed_attempt,
    refuse_unfinished,
)
from anabranch._engine.leases.fleet import Fleet
from anabranch._engine.ports import Ports
from anabranch._engine.ready_sessions import BatchFeed, LoopTurn, ReadySessions, batch_lane
from anabranch._engine.session import Session
from anabranch._ports import Clock
from anabranch.records import Batch, Context, Record


class RunnerTasks:
    """Owns the tasks that run the handler.

    An async call can ignore its cancellation. In a task group it would keep the worker and its process from ending. So
    tasks get some time to end; those that do not are reported and released: nobody waits for them any more, not even
    `asyncio.run`.
    """

    def __init__(self, clock: Clock, on_failed: Callable[[BaseException], None]) -> None:
        self._clock = clock
        self._on_failed = on_failed
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._released: dict[asyncio.Task[None], None] = {}
        self._cancelled_at_ms: int | None = None
        """When the tasks were cancelled."""
        self._on_ignored_cancel: Callable[[], None] = lambda: None

    def start(
        self, run_one: Callable[[], Coroutine[Any, Any, None]], count: int, *, on_ignored_cancel: Callable[[], None]
    ) -> None:
        """`on_ignored_cancel` is called before tasks are released whose calls still run."""
        self._on_ignored_cancel = on_ignored_cancel
        loop = asyncio.get_running_loop()
        for number in range(count):
            task = loop.create_task(run_one(), name=f"runner {number}")
            self._tasks[task] = None
            task.add_done_callback(self._on_done)

    def __contains__(self, task: asyncio.Task[Any] | None) -> bool:
        return task in self._tasks or task in self._released

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._released.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failed(error)

    def cancel_all(self) -> None:
        if self._cancelled_at_ms is None:
            self._cancelled_at_ms = self._clock.now_ms()
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        """Waits for the cancelled tasks, for a limited time."""
        try:
            while self._tasks and (left_ms := self._left_ms()) > 0:
                await asyncio.wait(self._tasks, timeout=left_ms / 1000)
        finally:
            if self._tasks:
                self._on_ignored_cancel()
                self._release_all()

    def _left_ms(self) -> int:
        assert self._cancelled_at_ms is not None, "end() without cancel_all()"
        return self._cancelled_at_ms + IGNORED_AFTER_MS - self._clock.now_ms()

    def _release_all(self) -> None:
        for task in self._tasks:
            self._released[task] = None
            # asyncio.run cancels all registered tasks at its end and waits for them without a limit.
            asyncio._unregister_task(task)  # noqa: SLF001 -- documented for code that manages tasks itself
            # Suppresses the warning about a pending task, as gather() does.
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 -- there is no other way
        self._tasks = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()


FINISHED: Final = object()
"""Instead of what a call waits for: it has ended."""


@types.coroutine
def resume_call(steps: Generator[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """The rest of a call that was started with `next(call.__await__(), FINISHED)` and waits for something.

    Awaiting a call suspends the whole task where the call waits. Started this way, the runner can first report the
    calls before it, in the same step of the loop.
    """
    while True:
        try:
            yield waits_for
        except GeneratorExit:
            steps.close()  # may already be closed if the task was garbage-collected
            raise
        except BaseException as error:  # noqa: BLE001 -- the call decides what to do with it
            try:
                waits_for = steps.throw(error)  # the call may catch it and wait again
            except StopIteration as ended:
                return ended.value
        else:
            return (yield from steps)


async def raise_later(error: BaseException) -> None:
    """The rest of a call that has already failed."""
    raise error


SLICE = 100
"""Records that a runner handles before it yields to the event loop."""

PLAIN_CALLS_MAX = 63
"""When handlers wait: how many calls are simply awaited before one is stepped by hand again, which costs more."""


class _TurnOver:
    """The session may have more, but the runner must check the lease again or yield to the loop first."""


_TURN_OVER: Final = _TurnOver()


class _Runner:
    """One task that runs the handler, and what it runs now."""

    __slots__ = ("began", "done_count", "is_waiting", "left", "record", "revoked", "session", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.session: Session | None = None
        self.record: Record[bytes] | None = None
        self.revoked = False
        self.left = SLICE
        self.began: Coroutine[Any, Any, None] | None = None
        """The coroutine of the current call, if it was stepped by hand."""
        self.done_count = 0
        """Calls that ended in this step and are not reported yet."""
        self.is_waiting = False
        """Whether a call of this step waits; it is reported separately."""


class _BegunCall(NamedTuple):
    """A started handler call, and the rest of it."""

    entry: Entry
    rest: Awaitable[Any]


_Picked: TypeAlias = Entry | _BegunCall | _TurnOver


class RecordRunners:
    """Calls the handler for each record. While one is retried, its key (or its shard) waits.

    A handler that does not wait leaves no gap in which others could see the lane. So such calls run one after another
    and are reported together, when the step ends or one of them waits. A runner yields to the loop after each slice.
    """

    def __init__(
        self,
        ports: Ports,
        fleet: Fleet,
        scheduler: Scheduler,
        call: HandlerCall,
        options: HandlerOptions,
        *,
        finishes_at_end: bool = False,
        on_finished: Callable[[Session], None],
        on_failed: OnFailed,
        on_undecodable: OnUndecodable,
    ) -> None:
        self._ports = ports
        self._fleet = fleet
        self._scheduler = scheduler
        self._call = call
        self._decode = options.decode
        self._direct = _direct_call(call, options) if ports.before_call is None else None
        self._policy = options.policy
        self._finishes_at_end = finishes_at_end
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._on_undecodable = on_undecodable
        self._limit = TimeLimit(ports.clock, options.policy.timeout)
        self.ready = ReadySessions(one_at_a_time=options.order == "shard")
        self._turn = LoopTurn(ports.clock)
        self._runners: list[_Runner] = []
        self._stride = SLICE
        """How many records to take at once: few if handlers wait."""
        self._plain_calls = self._plain_calls_left = 0

    async def run_one(self) -> None:
        """One runner; never returns."""
        task = asyncio.current_task()
        assert task is not None
        runner = _Runner(task)
        self._runners.append(runner)
        fleet, ready = self._fleet, self.ready
        pick: Callable[[Session], _Picked | None] = partial(self._pick, runner)
        while True:
            if self._turn.is_over():
                await asyncio.sleep(0)
                continue
            taken: tuple[Session, _Picked] | None = ready.take(pick) if fleet.may_start() else None
            if taken is None:
                if task.cancelling():
                    await clear_cancellation(task, self._is_ending)
                await ready.wait()
                runner.left = SLICE
                continue
            session, picked = taken
            if isinstance(picked, _TurnOver):
                ready.put_back(session)
                runner.left = 0
            else:
                await self._handle(runner, session, picked)
                runner.left -= 1
            if task.cancelling():
                await clear_cancellation(task, self._is_ending)
            if runner.left <= 0:
                runner.left = SLICE
                await asyncio.sleep(0)

    def _pick(self, runner: _Runner, session: Session) -> _Picked | None:
        if not session.may_start:
            return None
        clock, lane = self._ports.clock, session.lane
        assert isinstance(lane, RecordLane)
        if self._plain_calls_left:
            self._plain_calls_left -= 1
        elif (call := self._handle_without_waiting(runner, session, lane)) is not None:
            return call
        elif session.is_draining:
            return None
        entry = lane.next(clock.now_ms())
        if entry is not None:
            runner.began = None
            return entry
        if self._finishes_at_end and session.phase == "ended" and (failing := lane.only_failing) is not None:
            self._give_up(session, lane, failing)
            return None
        session.settle()
        deadline_ms = clock.now_ms() if lane.scan_is_cut else lane.next_deadline_ms
        if deadline_ms is not None:
            self._scheduler.call_at(deadline_ms, lambda: self.ready.offer(session))
        self._on_finished(session)  # pulling may have skipped records that the previous owner finished
        return None

    # calls that do not wait

    def _handle_without_waiting(
        self, runner: _Runner, session: Session, lane: RecordLane
    ) -> _BegunCall | _TurnOver | None:
        """Calls the handler for one record after another until one fails or waits, the turn is over, or no such record
        is left.
        """
        clock = self._ports.clock
        while records := lane.upcoming(clock.now_ms(), min(runner.left, self._stride)):
            rest = self._handle_slice(runner, session, records)
            if runner.done_count:
                runner.left -= runner.done_count
                lane.finish_prefix(runner.done_count)
                session.settle()
                self._on_finished(session)
            if rest is not None:
                self._stride = 1
                self._plain_calls = 0 if runner.done_count else min(PLAIN_CALLS_MAX, 2 * self._plain_calls + 1)
                self._plain_calls_left = self._plain_calls
                return _BegunCall(lane.begin(), rest)
            self._stride = min(SLICE, 2 * self._stride)
            cut_short = runner.done_count < len(records) or runner.task.cancelling()
            if cut_short or runner.left <= 0 or lane.one_at_a_time:
                return _TURN_OVER
        return None if self._fleet.may_start() else _TURN_OVER

    def _handle_slice(self, runner: _Runner, session: Session, records: list[Record[bytes]]) -> Awaitable[Any] | None:
        """Returns the rest of the call that failed or waits; None if all ended."""
        runner.session, runner.done_count, runner.is_waiting = session, 0, False
        runner.began = self._call_each(runner, session, records)
        steps = runner.began.__await__()
        try:
            waits_for = next(steps, FINISHED)
        except BaseException as error:  # noqa: BLE001 -- raised again where the call is awaited
            return raise_later(error)
        finally:
            runner.session = runner.record = None
        if waits_for is FINISHED:
            return None
        runner.is_waiting = True
        return resume_call(steps, waits_for)

    async def _call_each(self, runner: _Runner, session: Session, records: list[Record[bytes]]) -> None:
        may_start, turn, cancelling = self._fleet.may_start, self._turn, runner.task.cancelling
        start = self._direct or partial(self._start, session, 0)
        for record in records:
            if session.is_draining or not may_start(turn.over_ms):
                return
            runner.record = record
            result = await start(record)
            if result is not None:
                refuse_unfinished(result)
            if runner.is_waiting:
                return
            runner.done_count += 1
            if cancelling():  # the call cancelled its task: that must not affect the next one
                return

    # calls that wait

    def _begin(self, session: Session, entry: Entry) -> Awaitable[Any]:
        direct, record = self._direct, entry.record
        return self._start(session, entry.attempts, record) if direct is None else direct(record)

    async def _start(self, session: Session, failed_attempts: int, record: Record[bytes]) -> Any:
        if self._ports.before_call is not None:
            await self._ports.before_call()
        decoded = record if self._decode is None else self._decode(record)
        context = self._context(session, failed_attempts) if self._call.wants_context else None
        return await self._call(decoded, context, self._fleet.may_start, self._limit.of_call)

    async def _handle(self, runner: _Runner, session: Session, picked: Entry | _BegunCall) -> None:
        entry, rest = (picked, None) if isinstance(picked, Entry) else picked
        runner.session, runner.record = session, entry.record
        failure: BaseException | None = None
        try:
            if self._policy.timeout is None or self._call.times_itself:
                result = await (rest or self._begin(session, entry))
            else:
                async with self._limit.of_call():
                    result = await (rest or self._begin(session, entry))
            if result is not None:
                refuse_unfinished(result)
        except asyncio.CancelledError as error:
            was_revoked = self._clear_revocation(runner)
            if self._is_ending():
                raise
            # If we did not cancel the call, something that the handler awaited was cancelled.
            failure = NotStarted() if was_revoked else error
        except Exception as error:  # noqa: BLE001 -- any error of a handler is a failed attempt
            failure = error
        finally:
            runner.session = runner.record = None
            self._clear_revocation(runner)
        if failure is None and session.is_live:
            lane = session.lane
            assert isinstance(lane, RecordLane)
            lane.finish(entry)
            session.settle()
            self.ready.put_back(session)
            self._on_finished(session)
        elif session.is_live:
            self._conclude_failure(session, entry, failure)
        else:
            self._on_finished(session)  # a drain may wait for this call

    def _is_ending(self) -> bool:
        return self._scheduler.is_closed or self._call.is_given_up

    def _conclude_failure(self, session: Session, entry: Entry, failure: BaseException | None) -> None:
        lane = session.lane
        assert isinstance(lane, RecordLane)
        assert failure is not None
        if isinstance(failure, NotStarted):
            lane.give_back(entry)
        else:
            self._fail(session, lane, entry, failure)
        self.ready.offer(session)
        self._on_finished(session)

    def _fail(self, session: Session, lane: RecordLane, entry: Entry, failure: BaseException) -> None:
        record, now_ms = entry.record, self._ports.clock.now_ms()
        if isinstance(failure, UndecodableError):
            lane.retry_at(entry, now_ms)
            lane.stop()
            self._on_undecodable(session, failure)
            return
        entry.attempts += 1
        pause_ms = retry_in_ms(self._policy, entry.attempts, self._ports.entropy)
        event = failed_attempt(session, record, failure, attempt=entry.attempts, retry_in_ms=pause_ms)
        self._ports.emit(event)
        lane.retry_at(entry, now_ms + (pause_ms or 0))
        if pause_ms is None:
            lane.stop()
            reason = f"its handler failed {entry.attempts} times, the last time with {event.error}"
            self._on_failed(session, record, reason, failure)
        else:
            self._scheduler.call_at(now_ms + pause_ms, lambda: self.ready.offer(session))

    def _give_up(self, session: Session, lane: RecordLane, failing: Entry) -> None:
        """The shard has ended, and only records that wait for a retry keep its children waiting (rule M4)."""
        lane.stop()
        self._on_failed(
            session,
            failing.record,
            f"its handler failed {failing.attempts} times, and it is not retried at the end of the shard "
            "(at_shard_end='finish')",
            None,
        )

    def _context(self, session: Session, failed_attempts: int) -> Context:
        return Context(
            attempt=failed_attempts + 1,
            fence_token=session.row.fence_token,
            millis_behind_latest=session.behind_ms,
            deadline=self._policy.timeout,
            fenced_at_ms=self._fleet.valid_until_ms,
        )

    def revoke(self, session: Session) -> None:
        """The lease is lost: cancels its running calls. A call in a thread runs on and does not count."""
        self.ready.withdraw(session)
        for runner in self._runners:
            if runner.session is session:
                self._cancel(runner)

    def interrupt(self, session: Session | None = None) -> None:
        """Cancels running calls, all or those of one session: the fence has passed, or a hand-off waits. Their records
        count as not started. Calls in threads cannot be cancelled; they count if the lease is valid when they end.
        """
        if not self._call.is_cancellable:
            return
        for runner in self._runners:
            if runner.session is not None and session in {None, runner.session}:
                self._cancel(runner)

    def _cancel(self, runner: _Runner) -> None:
        if not runner.revoked:
            runner.revoked = True
            runner.task.cancel()

    @staticmethod
    def _clear_revocation(runner: _Runner) -> bool:
        """Lets the runner go on after a call that we cancelled, even if the call ignored that. True if we did."""
        was_revoked, runner.revoked = runner.revoked, False
        if was_revoked:
            runner.task.uncancel()
        return was_revoked

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        """Also called from the heartbeat thread while a call runs here."""
        running = [(runner.session, runner.record) for runner in self._runners]
        return [(session, record) for session, record in running if session is not None and record is not None]

    def stack_of(self, record: Record[bytes]) -> StackSummary:
        """Where the call for this record stands."""
        runner = next((runner for runner in self._runners if runner.record is record), None)
        return StackSummary() if runner is None else self._call.stack(runner.task, runner.began)

    def overdue(self, now_ms: int) -> dict[Session, str]:
        """Sessions with a call that ignores its timeout, each with the reason as text."""
        return {
            runner.session: self._limit.reason(runner.record, self._call.stack(runner.task, runner.began))
            for runner in self._runners
            if runner.session is not None
            and runner.record is not None
            and self._limit.is_ignored_by(runner.task, now_ms)
        }


def _direct_call(call: HandlerCall, options: HandlerOptions) -> Callable[[Record[bytes]], Awaitable[Any]] | None:
    """The handler with the decoder, if it needs only the record."""
    direct, decode = call.direct, options.decode
    if direct is None or decode is None:
        return direct
    return lambda record: direct(decode(record))


NOT_STARTED_PAUSE_MS = 100
"""How often to check whether a batch may start, while it may not."""


class BatchRunners:
    """Calls the handler for each batch: one batch of a shard at a time, several shards at once.

    A failed batch is retried whole; after the last attempt the shard stops at its first record. A batch ends before a
    record that does not decode, and the shard stops there once the batch is handled.
    """

    def __init__(
        self,
        ports: Ports,
        fleet: Fleet,
        feed: BatchFeed,
        call: HandlerCall,
        options: HandlerOptions,
        *,
        finishes_at_end: bool = False,
        on_failed: OnFailed,
        on_undecodable: OnUndecodable,
    ) -> None:
        self._ports = ports
        self._fleet = fleet
        self._feed = feed
        self._call = call
        self._options = options
        self._policy = options.policy
        self._finishes_at_end = finishes_at_end
        self._on_failed = on_failed
        self._on_undecodable = on_undecodable
        self._limit = TimeLimit(ports.clock, options.policy.timeout)
        self._running: dict[asyncio.Task[Any], tuple[Session, list[Record[bytes]]]] = {}
        self._waiting: dict[asyncio.Task[Any], None] = {}
        """Runners that wait before the next attempt: a drain does not wait for them."""
        self._revoked: dict[asyncio.Task[Any], None] = {}

    async def run_one(self) -> None:
        """One runner; never returns."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            if self._feed.turn.is_over():
                await asyncio.sleep(0)
                continue
            taken = self._feed.take()
            if taken is None:
                await self._feed.ready.wait()
            else:
                await self._handle(task, *taken)
                if task.cancelling():
                    await clear_cancellation(task, self._is_ending)
                await asyncio.sleep(0)  # yields to the loop, even if the handler never waits

    async def _handle(self, task: asyncio.Task[Any], session: Session, records: list[Record[bytes]]) -> None:
        """Makes all attempts at one batch."""
        self._running[task] = (session, records)
        try:
            while session.is_live:
                failure = await self._attempt(task, session, records)
                if failure is None:
                    self._feed.finish_through(session, len(records))
                    return
                pause_ms = self._retry_pause_ms(session, records, failure)
                if pause_ms is None:
                    return
                await self._pause(task, session, pause_ms)
        finally:
            del self._running[task]
            self._clear_revocation(task)
            self._feed.on_ended(session)

    async def _pause(self, task: asyncio.Task[Any], session: Session, pause_ms: int) -> None:
        self._waiting[task] = None
        self._feed.on_ended(session)
        try:
            await self._ports.clock.sleep_until_ms(self._ports.clock.now_ms() + pause_ms)
        except asyncio.CancelledError:
            if not self._clear_revocation(task) or self._is_ending():
                raise
        finally:
            del self._waiting[task]

    def _is_ending(self) -> bool:
        return self._feed.is_closed or self._call.is_given_up

    def _clear_revocation(self, task: asyncio.Task[Any]) -> bool:
        """Lets the runner go on after a call that we cancelled, even if the call ignored that. True if we did."""
        was_revoked = task in self._revoked
        if was_revoked:
            del self._revoked[task]
            task.uncancel()
        return was_revoked

    async def _attempt(
        self, task: asyncio.Task[Any], session: Session, records: list[Record[bytes]]
    ) -> BaseException | None:
        """Handles the batch, up to a record that does not decode. Returns the error, if any."""
        if not self._feed.may_go_on(session):
            return NotStarted()
        try:
            if self._ports.before_call is not None:
                await self._ports.before_call()
            decoded, undecodable = self._options.decode_leading(records)
            if not decoded:
                return undecodable
            batch: Batch[Any] = Batch(
                stream=session.stream.name,
                shard_id=session.shard_id,
                records=decoded,
                millis_behind_latest=session.behind_ms,
            )
            async with self._limit.of_call():
                await self._call(batch, self._context(session), self._fleet.may_start)
        except asyncio.CancelledError as error:
            was_revoked = self._clear_revocation(task)
            if self._is_ending():
                raise
            # If we did not cancel the call, something that the handler awaited was cancelled.
            return NotStarted() if was_revoked else error
        except Exception as error:  # noqa: BLE001 -- any error of a handler is a failed attempt
            return error
        return undecodable

    def _retry_pause_ms(self, session: Session, records: list[Record[bytes]], failure: BaseException) -> int | None:
        """How long to wait before the next attempt; None if there is none."""
        if not session.is_live:
            return None
        if isinstance(failure, NotStarted):
            return NOT_STARTED_PAUSE_MS  # fenced or draining: check again until that is over or the lease is lost
        lane, record = batch_lane(session), records[0]
        if isinstance(failure, UndecodableError):
            lane.stop()
            self._feed.finish_through(session, next(n for n, one in enumerate(records) if one is failure.record))
            self._on_undecodable(session, failure)
            return None
        lane.fail()
        pause_ms = retry_in_ms(self._policy, lane.attempts, self._ports.entropy)
        if self._finishes_at_end and session.phase == "ended" and lane.is_last:
            pause_ms = None  # only this batch keeps the shard's children waiting (rule M4)
        failed = failed_attempt(session, record, failure, attempt=lane.attempts, retry_in_ms=pause_ms)
        self._ports.emit(failed)
        if pause_ms is None:
            lane.stop()
            reason = (
                f"the handler of the batch of {len(records)} records that starts here failed {lane.attempts} times, "
                f"the last time with {failed.error}"
            )
            self._on_failed(session, record, reason, failure)
        return pause_ms

    def _context(self, session: Session) -> Context:
        return Context(
            attempt=batch_lane(session).attempts + 1,
            fence_token=session.row.fence_token,
            millis_behind_latest=session.behind_ms,
            deadline=self._policy.timeout,
            fenced_at_ms=self._fleet.valid_until_ms,
        )

    def revoke(self, session: Session) -> None:
        """The lease is lost: cancels its running call."""
        self._feed.ready.withdraw(session)
        for task, (owner, _) in self._running.items():
            if owner is session and task not in self._revoked:
                self._revoked[task] = None
                task.cancel()

    def interrupt(self, session: Session | None = None) -> None:
        """Cancels running calls, all or those of one session: the fence has passed, or a hand-off waits. Their records
        count as not started. Calls in threads cannot be cancelled; they count if the lease is valid when they end.
        """
        if not self._call.is_cancellable:
            return
        for task, (owner, _) in self._running.items():
            if session in {None, owner} and task not in self._revoked:
                self._revoked[task] = None
                task.cancel()

    def stack_of(self, record: Record[bytes]) -> StackSummary:
        """Where the call stands whose batch starts with this record."""
        task = next((task for task, (_, records) in self._running.copy().items() if records[0] is record), None)
        return StackSummary() if task is None else self._call.stack(task)

    def overdue(self, now_ms: int) -> dict[Session, str]:
        """Sessions whose call ignores its timeout, each with the reason as text."""
        return {
            session: self._limit.reason(records[0], self._call.stack(task))
            for task, (session, records) in self._running.items()
            if self._limit.is_ignored_by(task, now_ms)
        }

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        running = list(self._running.items())  # a copy: the heartbeat thread calls this too
        return [(session, records[0]) for task, (session, records) in running if task not in self._waiting]
