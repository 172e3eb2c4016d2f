"""The tasks that run the handler, and the one who owns them: they start, fail, and end with the worker, if they do end.

A task ends when its call does, and an asynchronous call may take no notice of its cancellation. A worker that waited
for it in its task group would never end, nor would its process. So it gets a while to end in, is named then, and is let
go of: it is kept here until it ends by itself, and nobody waits for it any more, the end of the event loop included.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from traceback import StackSummary
from typing import Any, Final, NamedTuple, Self, TypeAlias

from anabranch._core.backoff import retry_in_ms
from anabranch._core.handling.lanes import Lane
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
from anabranch._engine.leases.member import Member
from anabranch._engine.ports import Ports
from anabranch._engine.ready_sessions import BatchFeed, LoopTurn, ReadySessions, batch_lane
from anabranch._engine.session import Session
from anabranch._ports import Clock
from anabranch.records import Batch, Context, Record


class RunnerTasks:
    def __init__(self, clock: Clock, on_failed: Callable[[BaseException], None]) -> None:
        self._clock = clock
        self._on_failed = on_failed
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._released: dict[asyncio.Task[None], None] = {}
        self._cancelled_at_ms: int | None = None
        """When they were told to end."""
        self._on_ignored_cancel: Callable[[], None] = lambda: None

    def start(
        self, run_one: Callable[[], Coroutine[Any, Any, None]], count: int, *, on_ignored_cancel: Callable[[], None]
    ) -> None:
        """`on_ignored_cancel` is called before tasks are let go of, whose calls still run then."""
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
        """Waits for those that were told to end, for a while."""
        try:
            while self._tasks and (left_ms := self._left_ms()) > 0:
                await asyncio.wait(self._tasks, timeout=left_ms / 1000)
        finally:
            if self._tasks:
                self._on_ignored_cancel()
                self._release_all()

    def _left_ms(self) -> int:
        assert self._cancelled_at_ms is not None, "waits for runners that nobody told to end"
        return self._cancelled_at_ms + IGNORED_AFTER_MS - self._clock.now_ms()

    def _release_all(self) -> None:
        for task in self._tasks:
            self._released[task] = None
            # Whoever ends the loop cancels all tasks that it knows of, and waits for them without an end.
            asyncio._unregister_task(task)  # noqa: SLF001 -- documented, for those who keep tasks themselves
            # It is known to be pending, as to gather(), which does the same; no end of it is worth a warning.
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 -- there is no other way
        self._tasks = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()


FINISHED: Final = object()
"""In place of what a call waits for: it has ended."""


@types.coroutine
def resume_call(steps: Generator[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """The rest of a call that waits for something."""
    while True:
        try:
            yield waits_for
        except GeneratorExit:
            steps.close()  # which may have been done already, where nobody holds the task any more
            raise
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it is meant for the call
            try:
                waits_for = steps.throw(error)  # it may take no notice, and wait again
            except StopIteration as ended:
                return ended.value
        else:
            return (yield from steps)


async def raise_later(error: BaseException) -> None:
    """The rest of a call that has raised an error."""
    raise error


SLICE = 100
"""Records that a runner handles before it lets the loop turn."""

PLAIN_CALLS_MAX = 63
"""Calls that are simply awaited, where handlers wait, before the next is begun by hand again: that costs more."""


class _TurnOver:
    """A session may have more, and others come first: its lease must be looked at again, or the loop has to turn."""


_TURN_OVER: Final = _TurnOver()


class _Runner:
    """One of the tasks that run the handler, and what it runs now."""

    __slots__ = ("began", "done_count", "is_waiting", "left", "record", "revoked", "session", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.session: Session | None = None
        self.record: Record[bytes] | None = None
        self.revoked = False
        self.left = SLICE
        self.began: Coroutine[Any, Any, None] | None = None
        """The call that was begun by hand, if this one was."""
        self.done_count = 0
        """Calls that have ended in this step and are not reported yet."""
        self.is_waiting = False
        """Whether a call of this step has begun to wait: it is reported by itself."""


class _BegunCall(NamedTuple):
    """A call of the handler that has begun, and the rest of it."""

    entry: Entry
    rest: Awaitable[Any]


_Picked: TypeAlias = Entry | _BegunCall | _TurnOver


class RecordRunners:
    def __init__(
        self,
        ports: Ports,
        member: Member,
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
        self._member = member
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
        """How many records are looked at ahead: few, where handlers wait."""
        self._plain_calls = self._plain_calls_left = 0

    async def run_one(self) -> None:
        """One runner, for ever."""
        task = asyncio.current_task()
        assert task is not None
        runner = _Runner(task)
        self._runners.append(runner)
        member, ready = self._member, self.ready
        pick: Callable[[Session], _Picked | None] = partial(self._pick, runner)
        while True:
            if self._turn.is_over():
                await asyncio.sleep(0)
                continue
            taken: tuple[Session, _Picked] | None = ready.take(pick) if member.may_start() else None
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
        assert isinstance(lane, Lane)
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
        self._on_finished(session)  # pulling may have passed over records that the owner before had finished
        return None

    # calls that do not wait

    def _handle_without_waiting(self, runner: _Runner, session: Session, lane: Lane) -> _BegunCall | _TurnOver | None:
        """Calls the handler for one record after another, until one fails or begins to wait, the turn is over, or
        there is nothing more to be handled in this way.
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
        return None if self._member.may_start() else _TURN_OVER

    def _handle_slice(self, runner: _Runner, session: Session, records: list[Record[bytes]]) -> Awaitable[Any] | None:
        """Returns the rest of the call that has failed or begun to wait."""
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
        may_start, turn, cancelling = self._member.may_start, self._turn, runner.task.cancelling
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
            if cancelling():  # what this call has done to the task is not meant for the next one
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
        return await self._call(decoded, context, self._member.may_start, self._limit.of_call)

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
            # Not of this task, if it was not revoked: something that the handler waited for was cancelled.
            failure = NotStarted() if was_revoked else error
        except Exception as error:  # noqa: BLE001 -- whatever a handler raises is a failure of its record
            failure = error
        finally:
            runner.session = runner.record = None
            self._clear_revocation(runner)
        if failure is None and session.is_live:
            lane = session.lane
            assert isinstance(lane, Lane)
            lane.finish(entry)
            session.settle()
            self.ready.put_back(session)
            self._on_finished(session)
        elif session.is_live:
            self._conclude_failure(session, entry, failure)
        else:
            self._on_finished(session)  # who waits for running calls to end is told of this one too

    def _is_ending(self) -> bool:
        return self._scheduler.is_closed or self._call.is_given_up

    def _conclude_failure(self, session: Session, entry: Entry, failure: BaseException | None) -> None:
        lane = session.lane
        assert isinstance(lane, Lane)
        assert failure is not None
        if isinstance(failure, NotStarted):
            lane.give_back(entry)
        else:
            self._fail(session, lane, entry, failure)
        self.ready.offer(session)
        self._on_finished(session)

    def _fail(self, session: Session, lane: Lane, entry: Entry, failure: BaseException) -> None:
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

    def _give_up(self, session: Session, lane: Lane, failing: Entry) -> None:
        """Only records that wait to be tried again keep the children of an ended shard waiting (rule M4)."""
        lane.stop()
        self._on_failed(
            session,
            failing.record,
            f"its handler failed {failing.attempts} times, and at the end of the shard no further attempt is made "
            "(at_shard_end='finish')",
            None,
        )

    def _context(self, session: Session, failed_attempts: int) -> Context:
        return Context(
            attempt=failed_attempts + 1,
            fence_token=session.row.fence_token,
            millis_behind_latest=session.behind_ms,
            deadline=self._policy.timeout,
            fenced_at_ms=self._member.heartbeat_status.fence.valid_until_ms,
        )

    def revoke(self, session: Session) -> None:
        """The session's lease is gone: its running calls are cancelled (a call in a thread runs on, and counts for
        nothing).
        """
        self.ready.withdraw(session)
        for runner in self._runners:
            if runner.session is session:
                self._cancel(runner)

    def interrupt(self, session: Session | None = None) -> None:
        """Cancels what runs, all of it or that of one session: the fence has passed, or a hand-off waits. Its records
        count as not started. A call in a thread cannot be cancelled: it runs on, and counts if it may by its end.
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
        """The runner goes on after a call that was revoked, also after one that took no notice of it."""
        was_revoked, runner.revoked = runner.revoked, False
        if was_revoked:
            runner.task.uncancel()
        return was_revoked

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        """Also asked by the heart's thread, while a call runs in this one."""
        running = [(runner.session, runner.record) for runner in self._runners]
        return [(session, record) for session, record in running if session is not None and record is not None]

    def stack_of(self, record: Record[bytes]) -> StackSummary:
        """Where the call of this record stands."""
        runner = next((runner for runner in self._runners if runner.record is record), None)
        return StackSummary() if runner is None else self._call.stack(runner.task, runner.began)

    def overdue(self, now_ms: int) -> dict[Session, str]:
        """Sessions with a call that takes no notice of its time-out, each with the reason in words."""
        return {
            runner.session: self._limit.reason(runner.record, self._call.stack(runner.task, runner.began))
            for runner in self._runners
            if runner.session is not None
            and runner.record is not None
            and self._limit.is_ignored_by(runner.task, now_ms)
        }


def _direct_call(call: HandlerCall, options: HandlerOptions) -> Callable[[Record[bytes]], Awaitable[Any]] | None:
    """The handler itself, behind the decoder, where a call of it needs no more than the record."""
    direct, decode = call.direct, options.decode
    if direct is None or decode is None:
        return direct
    return lambda record: direct(decode(record))


NOT_STARTED_PAUSE_MS = 100
"""Between two looks whether a batch may be started, while it may not."""


class BatchRunners:
    def __init__(
        self,
        ports: Ports,
        member: Member,
        feed: BatchFeed,
        call: HandlerCall,
        options: HandlerOptions,
        *,
        finishes_at_end: bool = False,
        on_failed: OnFailed,
        on_undecodable: OnUndecodable,
    ) -> None:
        self._ports = ports
        self._member = member
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
        """Those whose batch is not with the handler now, and will be again: a drain does not wait for them."""
        self._revoked: dict[asyncio.Task[Any], None] = {}

    async def run_one(self) -> None:
        """One runner, for ever."""
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
                await asyncio.sleep(0)  # a handler that never waits still lets the loop turn

    async def _handle(self, task: asyncio.Task[Any], session: Session, records: list[Record[bytes]]) -> None:
        """All attempts at one batch; the shard waits meanwhile."""
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
        """The runner goes on after a call that was revoked, also after one that took no notice of it."""
        was_revoked = task in self._revoked
        if was_revoked:
            del self._revoked[task]
            task.uncancel()
        return was_revoked

    async def _attempt(
        self, task: asyncio.Task[Any], session: Session, records: list[Record[bytes]]
    ) -> BaseException | None:
        """What went wrong, if anything did. What comes before a record that does not decode is handled then."""
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
                await self._call(batch, self._context(session), self._member.may_start)
        except asyncio.CancelledError as error:
            was_revoked = self._clear_revocation(task)
            if self._is_ending():
                raise
            # Not of this task, if it was not revoked: something that the handler waited for was cancelled.
            return NotStarted() if was_revoked else error
        except Exception as error:  # noqa: BLE001 -- whatever a handler raises is a failure of its batch
            return error
        return undecodable

    def _retry_pause_ms(self, session: Session, records: list[Record[bytes]], failure: BaseException) -> int | None:
        """After how long to try again; None if this batch is not to be tried by this call any more."""
        if not session.is_live:
            return None
        if isinstance(failure, NotStarted):
            return NOT_STARTED_PAUSE_MS  # fenced, or to be handed over: until that is over, or the lease is lost
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
                f"the handler of a batch of {len(records)} records from it on failed {lane.attempts} times, "
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
            fenced_at_ms=self._member.heartbeat_status.fence.valid_until_ms,
        )

    def revoke(self, session: Session) -> None:
        """The session's lease is gone: its running call is cancelled."""
        self._feed.ready.withdraw(session)
        for task, (owner, _) in self._running.items():
            if owner is session and task not in self._revoked:
                self._revoked[task] = None
                task.cancel()

    def interrupt(self, session: Session | None = None) -> None:
        """Cancels what runs, all of it or that of one session: the fence has passed, or a hand-off waits. Its records
        count as not started. A call in a thread cannot be cancelled: it runs on, and counts if it may by its end.
        """
        if not self._call.is_cancellable:
            return
        for task, (owner, _) in self._running.items():
            if session in {None, owner} and task not in self._revoked:
                self._revoked[task] = None
                task.cancel()

    def stack_of(self, record: Record[bytes]) -> StackSummary:
        """Where the call stands whose batch begins with this record."""
        task = next((task for task, (_, records) in self._running.copy().items() if records[0] is record), None)
        return StackSummary() if task is None else self._call.stack(task)

    def overdue(self, now_ms: int) -> dict[Session, str]:
        """Sessions whose call takes no notice of its time-out, each with the reason in words."""
        return {
            session: self._limit.reason(records[0], self._call.stack(task))
            for task, (session, records) in self._running.items()
            if self._limit.is_ignored_by(task, now_ms)
        }

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        running = list(self._running.items())  # a copy: the heart's thread asks, too
        return [(session, records[0]) for task, (session, records) in running if task not in self._waiting]
