"""Calls the handler for each piece of work, a record or a batch, in its own tasks, the runners.

The fence is checked in the same step that starts a call (rule L8). Work is finished when its handler has returned.
After a failed call one decision follows: retry later, stop the shard (rule D4), skip the record, or write it to the
dead letters. While a record waits for its retry or its letter, its key or shard waits and its runner is free. If a
lease is lost, its calls are cancelled and do not count.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from traceback import StackSummary
from typing import Any, Final

from anabranch._core.handling.batches import BatchLimits
from anabranch._core.handling.failures import (
    RetryAt,
    Situation,
    SkipRecord,
    StopShard,
    UndecodableError,
    WriteLetter,
    decide,
    first_failed,
    root_error,
    undecodable,
)
from anabranch._core.session import Session, Work
from anabranch._engine.clock import Scheduler
from anabranch._engine.fleet import Fleet
from anabranch._engine.handler_calls import (
    IGNORED_AFTER_MS,
    HandlerCall,
    HandlerOptions,
    NotStarted,
    TimeLimit,
    clear_cancellation,
    failed_attempt,
    refuse_unfinished,
)
from anabranch._engine.work_queue import Changes, Processor
from anabranch._ports import Ports
from anabranch.events import RecordSkipped
from anabranch.letters import Failure
from anabranch.policies import DeadLetter, Retry
from anabranch.reasons import Reason
from anabranch.records import Batch, BatchFailure, Context, Record

SLICE: Final = 100
"""Records that a runner handles before it yields to the event loop."""
PLAIN_CALLS_MAX: Final = 63
"""If handlers wait, awaiting calls is cheaper than stepping them: up to this many are awaited between two steps."""


@dataclass(eq=False, repr=False, slots=True)
class _Runner:
    """One task that runs the handler, and what it runs now."""

    task: asyncio.Task[Any]
    session: Session | None = None
    record: Record[bytes] | None = None
    """The record, or the first of the batch."""
    revoked: bool = False
    left: int = SLICE
    """How many more records it handles before it yields to the event loop, or 0 if it must yield now."""
    began: Coroutine[Any, Any, None] | None = None
    """The coroutine of the current calls, if it is stepped by hand."""
    done_count: int = 0
    """Calls that have ended since the last report."""
    is_waiting: bool = False
    """Whether the last stepped call waits for something; it is reported separately."""


@dataclass(eq=False, repr=False)
class Dispatcher(Processor):
    """An async call can ignore its cancellation. In a task group it would keep the worker and its process from ending.
    So the runners are not in a group. Those that do not end in time are released.
    """

    is_loop = False

    _ports: Ports
    _changes: Changes
    _options: HandlerOptions
    _fleet: Fleet
    _scheduler: Scheduler
    _call: HandlerCall
    _on_error: Callable[[BaseException], None]
    """Called with an error of a runner itself, not of its handler: it ends the worker."""
    _runners: dict[asyncio.Task[Any], _Runner] = field(default_factory=dict)
    _released: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    _cancelled_at_ms: int | None = None
    _stride: int = SLICE
    """How many records to step at once: few if handlers wait."""
    _plain_calls: int = 0
    _plain_calls_left: int = 0

    def __post_init__(self) -> None:
        ports, self._policy = self._ports, self._options.policy
        self.is_cancellable = self._call.is_cancellable  # a call in a thread cannot be ended
        self._is_batch = isinstance(self.mode, BatchLimits)
        self._tracing = ports.tracing
        is_plain = not self._is_batch and ports.before_call is None and ports.tracing is None
        self._direct = _direct_call(self._call, self._options) if is_plain else None
        self._limit = TimeLimit(ports.clock, self._policy.timeout)

    # the runners

    def start(self) -> None:
        loop, count = asyncio.get_running_loop(), self._options.concurrency
        for number in range(min(count, self._call.process_count or count)):
            task = loop.create_task(self._run(), name=f"runner {number}")
            self._runners[task] = _Runner(task)
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._runners.pop(task, None)
        self._released.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    def give_up(self) -> None:
        self._call.give_up()

    def cancel_all(self) -> None:
        if self._cancelled_at_ms is None:
            self._cancelled_at_ms = self._ports.clock.now_ms()
        for task in self._runners:
            task.cancel()

    async def end(self) -> None:
        assert self._cancelled_at_ms is not None, "end() without cancel_all()"
        until_ms = self._cancelled_at_ms + IGNORED_AFTER_MS
        while self._runners and (left_ms := until_ms - self._ports.clock.now_ms()) > 0:
            await asyncio.wait(self._runners, timeout=left_ms / 1000)

    def release(self) -> None:
        for task in self._runners:
            self._released[task] = None
            # asyncio.run, when it ends, cancels all registered tasks and waits for them without a timeout.
            asyncio._unregister_task(task)  # noqa: SLF001 -- documented for code that manages tasks itself
            # Suppresses the warning about a pending task, as gather() does.
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 -- there is no other way
        self._runners = {}

    def close(self) -> None:
        self._call.close()

    def _is_ending(self) -> bool:
        return self._scheduler.is_closed or self._call.is_given_up

    async def _run(self) -> None:
        """One runner; never returns."""
        task = asyncio.current_task()
        assert task is not None
        runner, queue = self._runners[task], self.queue
        while True:
            if queue.turn.is_over():
                await asyncio.sleep(0)
                continue
            session = queue.take_session()
            if session is None:
                if task.cancelling():
                    await clear_cancellation(task, self._is_ending)
                await queue.wait()
                runner.left = SLICE
                continue
            taken = self._take_work(runner, session)
            if taken is not None:
                await self._perform(runner, *taken)
            if task.cancelling():
                await clear_cancellation(task, self._is_ending)
            if runner.left <= 0:
                runner.left = SLICE
                await asyncio.sleep(0)

    def _take_work(self, runner: _Runner, session: Session) -> tuple[Work, Awaitable[Any] | None] | None:
        """The next work, and the rest of its call if that was begun."""
        if not self._is_batch:
            if self._plain_calls_left:
                self._plain_calls_left -= 1
            else:
                begun = self._handle_without_waiting(runner, session)
                if begun is not None or runner.left <= 0 or not session.may_start:
                    return begun
        work = self.queue.next_of(session)
        if work is None:
            return None
        runner.began = None
        return work, None

    # calls that do not wait: they are started by hand and reported together

    def _handle_without_waiting(self, runner: _Runner, session: Session) -> tuple[Work, Awaitable[Any]] | None:
        """Calls the handler for one record after another until a call fails or waits, the turn is over, or no record
        may start. No other task runs between these calls and sees the lane, so they are reported together. Returns the
        work whose call failed or waits, and the rest of that call.
        """
        turn = self.queue.turn
        now_ms = turn.look()
        while records := session.upcoming(now_ms, min(runner.left, self._stride)):
            rest = self._handle_slice(runner, session, records)
            if runner.done_count:
                began_ms, now_ms = now_ms, turn.look()
                runner.left -= runner.done_count
                session.finish_upcoming(runner.done_count, now_ms - began_ms)
                self._changes.finished(session)
            if rest is not None:
                self._stride = 1
                self._plain_calls = 0 if runner.done_count else min(PLAIN_CALLS_MAX, 2 * self._plain_calls + 1)
                self._plain_calls_left = self._plain_calls
                work = session.begin_upcoming(now_ms)
                self.queue.found_work(session)
                return work, rest
            self._stride = min(SLICE, 2 * self._stride)
            cut_short = runner.done_count < len(records) or runner.task.cancelling()
            if cut_short or runner.left <= 0:
                break
        else:
            if self._fleet.may_start():
                return None
        # The session may have more work, but the runner must check the lease again or yield to the loop first.
        self.queue.put_back(session)
        runner.left = 0
        return None

    def _handle_slice(self, runner: _Runner, session: Session, records: list[Record[bytes]]) -> Awaitable[Any] | None:
        """Returns the rest of the call that failed or waits; None if all calls ended."""
        runner.session, runner.done_count, runner.is_waiting = session, 0, False
        runner.began = self._call_each(runner, session, records)
        steps = runner.began.__await__()
        try:
            waits_for = next(steps, FINISHED)
        except BaseException as error:  # noqa: BLE001 -- raised where the call is awaited
            return raise_later(error)
        finally:
            runner.session = runner.record = None
        if waits_for is FINISHED:
            return None
        runner.is_waiting = True
        return resume_call(steps, waits_for)

    async def _call_each(self, runner: _Runner, session: Session, records: list[Record[bytes]]) -> None:
        may_start, over_ms, cancelling = self._fleet.may_start, self.queue.turn.over_ms, runner.task.cancelling
        start = self._direct or partial(self._call_with_record, session, 0)
        state = session.state
        for record in records:
            if session.state != state or not may_start(over_ms):  # a handler may stop its consumer
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

    # calls that are awaited

    async def _perform(self, runner: _Runner, work: Work, rest: Awaitable[Any] | None) -> None:
        """Makes the call, or awaits the rest of one that was begun, and reports how it ended."""
        session = work.session
        runner.session, runner.record = session, work.records[0]
        runner.left -= SLICE if self._is_batch else 1
        failure: BaseException | None = None
        try:
            if self._policy.timeout is None or self._call.process_count:
                result = await (rest or self._start(work))
            else:
                async with self._limit.of_call():
                    result = await (rest or self._start(work))
            if result is not None:
                refuse_unfinished(result)
        except asyncio.CancelledError as error:
            was_revoked = self._clear_revocation(runner)
            if self._is_ending():
                raise
            # If we did not cancel the call, the handler awaited something that was cancelled.
            failure = NotStarted() if was_revoked else error
        except Exception as error:  # noqa: BLE001 -- any error of a handler is a failed attempt
            failure = error
        finally:
            runner.session = runner.record = None
            self._clear_revocation(runner)
        if failure is None:
            session.finish(work, ended_at_ms=self._ports.clock.now_ms())
            if session.is_live:
                self.queue.put_back(session)
        elif session.is_live:
            self._conclude_failure(work, failure)
            self.queue.offer(session)
        self._changes.finished(session)  # a drain may wait for this call, even if the lease is lost

    def _start(self, work: Work) -> Awaitable[Any]:
        if self._is_batch:
            return self._call_with_batch(work)
        if self._direct is not None:
            return self._direct(work.records[0])
        return self._call_with_record(work.session, work.attempts, work.records[0])

    async def _call_with_record(self, session: Session, failed_attempts: int, record: Record[bytes]) -> Any:
        if self._ports.before_call is not None:
            await self._ports.before_call()
        decode = self._options.decode
        decoded = record if decode is None else decode(record)
        context = self._context(session, failed_attempts) if self._call.wants_context else None
        if self._tracing is None:
            result = await self._call(decoded, context, self._fleet.may_start, self._limit.of_call)
        else:
            with self._tracing.handling(record, failed_attempts + 1):
                result = await self._call(decoded, context, self._fleet.may_start, self._limit.of_call)
        if context is not None and context.metrics:
            self._add_metrics(context)
        return result

    async def _call_with_batch(self, work: Work) -> Any:
        """Handles the batch up to a record that does not decode; raises that error afterwards."""
        if self._ports.before_call is not None:
            await self._ports.before_call()
        decoded, undecodable = self._options.decode_leading(work.records)
        if decoded:
            batch, context = make_batch(work.session, decoded), self._context(work.session, work.attempts)
            tracing = self._tracing
            with nullcontext() if tracing is None else tracing.handling_batch(work.records, work.attempts + 1):
                await self._call(batch, context, self._fleet.may_start, self._limit.of_call)
            self._add_metrics(context)
        if undecodable is not None:
            raise undecodable

    def _context(self, session: Session, failed_attempts: int) -> Context:
        return Context(
            attempt=failed_attempts + 1,
            fence_token=session.row.fence_token,
            millis_behind_latest=session.behind_ms,
            deadline=self._policy.timeout,
            fenced_at_ms=self._fleet.valid_until_ms,
        )

    def _add_metrics(self, context: Context) -> None:
        """Only for a call that succeeded."""
        if self._ports.add_metric is not None:
            for name, value in context.metrics:
                self._ports.add_metric(name, value)

    def _conclude_failure(self, work: Work, failure: BaseException) -> None:
        session, now_ms = work.session, self._ports.clock.now_ms()
        if isinstance(failure, NotStarted):
            session.give_back(work)
            return
        if isinstance(failure, UndecodableError):
            conclude_undecodable(self._ports, self._policy, work, failure)
            return
        records, attempts = work.records, work.attempts + 1
        if isinstance(failure, BatchFailure) and (done_count := first_failed(records, failure)):
            session.finish(work, done_count)
            records = records[done_count:]
        record, failure = records[0], root_error(failure)
        if len(work.records) == 1:
            note_failure(self._ports, self._policy, work, record, failure)
        situation = situation_of(self._ports, session)
        decision = decide(
            self._policy, failure, work.records, situation, attempts=attempts, entropy=self._ports.entropy
        )
        retry_in_ms = decision.pause_ms if isinstance(decision, RetryAt) else None
        session.count_failed_attempt(now_ms - work.started_at_ms, retried=retry_in_ms is not None)
        self._ports.emit(
            failed_attempt(
                session, record, failure, attempt=attempts, retry_in_ms=retry_in_ms, record_count=len(records)
            )
        )
        if isinstance(decision, RetryAt):
            session.retry_at(work, decision.at_ms, halve=decision.halve)
            self.queue.offer_at(session, decision.at_ms)
        elif isinstance(decision, StopShard):
            session.retry_at(work, now_ms)
            session.stop(decision.reason, record, failure)
        else:
            skip_or_dead_letter(self._ports, decision, work, failure, attempts)

    # cancelling

    def revoke(self, session: Session) -> None:
        super().revoke(session)
        for runner in self._runners.values():
            if runner.session is session:
                self._cancel(runner)

    def interrupt(self, session: Session | None = None) -> None:
        """Calls in threads cannot be cancelled. Their results count if the lease is valid when they end."""
        if not self.is_cancellable:
            return
        for runner in self._runners.values():
            if runner.session is not None and session in {None, runner.session}:
                self._cancel(runner)

    def _cancel(self, runner: _Runner) -> None:
        if not runner.revoked:
            runner.revoked = True
            runner.task.cancel()

    @staticmethod
    def _clear_revocation(runner: _Runner) -> bool:
        """Clears our cancellation, so that the runner continues, even if the call ignored it. True if there was one."""
        was_revoked, runner.revoked = runner.revoked, False
        if was_revoked:
            runner.task.uncancel()
        return was_revoked

    # running calls

    @property
    def is_calling(self) -> bool:
        task = asyncio.current_task()
        return task in self._runners or task in self._released or self._call.runs_in_this_thread

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        running = [(runner.session, runner.record) for runner in list(self._runners.values())]
        return [(session, record) for session, record in running if session is not None and record is not None]

    def stack_of(self, record: Record[bytes]) -> StackSummary:
        runner = next((runner for runner in list(self._runners.values()) if runner.record is record), None)
        return StackSummary() if runner is None else self._call.stack(runner.task, runner.began)

    def overdue(self, now_ms: int) -> dict[Session, Reason]:
        return {
            runner.session: self._limit.reason(runner.record, self._call.stack(runner.task, runner.began))
            for runner in self._runners.values()
            if runner.session is not None
            and runner.record is not None
            and self._limit.is_ignored_by(runner.task, now_ms)
        }


def _direct_call(call: HandlerCall, options: HandlerOptions) -> Callable[[Record[bytes]], Awaitable[Any]] | None:
    """The handler together with the decoder; None if it needs more than the record."""
    direct, decode = call.direct, options.decode
    if direct is None or decode is None:
        return direct
    return lambda record: direct(decode(record))


def make_batch(session: Session, records: list[Record[Any]]) -> Batch[Any]:
    return Batch(**session.names, records=records, millis_behind_latest=session.behind_ms)


def conclude_undecodable(ports: Ports, policy: Retry, work: Work, error: UndecodableError) -> None:
    """Finishes the records before the undecodable one. That one gets the policy's last step, without a retry."""
    session, record = work.session, error.record
    index = next(index for index, one in enumerate(work.records) if one is record)
    if index:
        session.finish(work, index)
    session.count_failed_attempt(0, retried=False)
    ports.emit(failed_attempt(session, record, error.cause, attempt=1, retry_in_ms=None))
    decision = undecodable(policy, error, situation_of(ports, session))
    if not isinstance(decision, StopShard):
        note_failure(ports, policy, work, record, error.cause)
        skip_or_dead_letter(ports, decision, work, error.cause, 1, index)
        return
    if not index:
        session.give_back(work)
    session.stop(decision.reason, record, error.cause)


def situation_of(ports: Ports, session: Session) -> Situation:
    now_ms, clock = ports.clock.now_ms(), session.service_clock
    return Situation(now_ms, session.outage, session.success_count, clock.seconds(now_ms))


def note_failure(ports: Ports, policy: Retry, work: Work, record: Record[bytes], error: BaseException) -> None:
    """Keeps the failure for a dead letter, if the policy writes them."""
    if isinstance(policy.then, DeadLetter):
        clock = ports.clock
        started_ms = clock.wall_ms() - (clock.now_ms() - work.started_at_ms)
        work.session.note_failure(record, started_ms / 1000, Failure.of(error))


def skip_or_dead_letter(
    ports: Ports,
    decision: SkipRecord | WriteLetter,
    work: Work,
    error: BaseException,
    attempts: int,
    index: int = 0,
) -> None:
    """Skips the record of the work, or sends it to the dead letters."""
    if isinstance(decision, SkipRecord):
        work.session.skip(work, index)
        report_skipped(ports, work.session)
    else:
        work.session.dead_letter(work, Failure.of(error), attempts, index)


def report_skipped(ports: Ports, session: Session) -> None:
    """Emits the events of skipped records, before another record of the session starts."""
    for record in session.take_skipped():
        ports.emit(RecordSkipped(**session.names, position=str(record.position), partition_key=record.partition_key))


FINISHED: Final = object()
"""A call has ended: the value in place of what it would wait for."""


@types.coroutine
def resume_call(steps: Generator[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """The rest of a call that was started with `next(call.__await__(), FINISHED)` and waits for something.

    Awaiting a call suspends the whole task as soon as the call waits. If it is stepped instead, the runner can first
    report the calls before it, in the same step of the loop.
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
    """Raises its error when it is awaited: the rest of a call that has already failed."""
    raise error
