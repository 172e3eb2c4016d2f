"""Runs a handler record by record: as many runners as may run at once, each taking one record after another.

The rules: the fence is read in the same step as the hand-over (rule L8); a record is finished when its handler has
returned, and not before; a failed one is tried again by the policy while its key (or its shard) waits, and after the
last attempt the shard stops loudly (rule D4). A call whose lease is lost is cancelled and waited for; nothing of it
counts. A handler that never waits still lets the loop turn: a runner yields after each slice of records.

Where a handler does not wait, nobody else can look at the lane between one record and the next. So such calls are made
one after another, and reported together when the step ends or one of them begins to wait.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from traceback import StackSummary
from typing import Any, Final, NamedTuple, TypeAlias

from anabranch._core.checkpoints.tracker import Entry
from anabranch._core.handling.lanes import Lane
from anabranch._core.handling.retries import retry_in_ms
from anabranch._engine.handling.begun_calls import FINISHED, failed, going_on
from anabranch._engine.handling.calls import HandlerCall, NotStarted, refuse_unfinished, take_back_cancellation
from anabranch._engine.handling.failures import OnFailed, OnUndecodable, failed_attempt
from anabranch._engine.handling.handling import Handling, UndecodableError
from anabranch._engine.handling.loop_turn import LoopTurn
from anabranch._engine.handling.shelf import Shelf
from anabranch._engine.handling.time_limit import TimeLimit
from anabranch._engine.leases.member import Member
from anabranch._engine.outside import Outside
from anabranch._engine.scheduler import Scheduler
from anabranch._engine.session import Session
from anabranch.records import Context, Record

__all__ = ["RecordRunners"]

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
        outside: Outside,
        member: Member,
        scheduler: Scheduler,
        call: HandlerCall,
        handling: Handling,
        *,
        finishes_at_end: bool = False,
        on_finished: Callable[[Session], None],
        on_failed: OnFailed,
        on_undecodable: OnUndecodable,
    ) -> None:
        self._outside = outside
        self._member = member
        self._scheduler = scheduler
        self._call = call
        self._decode = handling.decode
        self._direct = _direct_call(call, handling) if outside.before_call is None else None
        self._policy = handling.policy
        self._finishes_at_end = finishes_at_end
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._on_undecodable = on_undecodable
        self._limit = TimeLimit(outside.clock, handling.policy.timeout)
        self.shelf = Shelf(one_at_a_time=handling.order == "shard")
        self._turn = LoopTurn(outside.clock)
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
        member, shelf = self._member, self.shelf
        pick: Callable[[Session], _Picked | None] = partial(self._pick, runner)
        while True:
            if self._turn.is_over():
                await asyncio.sleep(0)
                continue
            taken: tuple[Session, _Picked] | None = shelf.take(pick) if member.may_start() else None
            if taken is None:
                if task.cancelling():
                    await take_back_cancellation(task, self._is_ending)
                await shelf.wait()
                runner.left = SLICE
                continue
            session, picked = taken
            if isinstance(picked, _TurnOver):
                shelf.put_back(session)
                runner.left = 0
            else:
                await self._handle(runner, session, picked)
                runner.left -= 1
            if task.cancelling():
                await take_back_cancellation(task, self._is_ending)
            if runner.left <= 0:
                runner.left = SLICE
                await asyncio.sleep(0)

    def _pick(self, runner: _Runner, session: Session) -> _Picked | None:
        if not session.may_start:
            return None
        clock, lane = self._outside.clock, session.lane
        assert isinstance(lane, Lane)
        if self._plain_calls_left:
            self._plain_calls_left -= 1
        elif (call := self._handle_at_once(runner, session, lane)) is not None:
            return call
        elif session.drains:
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
            self._scheduler.call_at(deadline_ms, lambda: self.shelf.offer(session))
        self._on_finished(session)  # pulling may have passed over records that the owner before had finished
        return None

    # calls that do not wait

    def _handle_at_once(self, runner: _Runner, session: Session, lane: Lane) -> _BegunCall | _TurnOver | None:
        """Calls the handler for one record after another, until one fails or begins to wait, the turn is over, or
        there is nothing more to be handled in this way.
        """
        clock = self._outside.clock
        while records := lane.upcoming(clock.now_ms(), min(runner.left, self._stride)):
            rest = self._handle_stretch(runner, session, records)
            if runner.done_count:
                runner.left -= runner.done_count
                lane.pass_over(runner.done_count)
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

    def _handle_stretch(self, runner: _Runner, session: Session, records: list[Record[bytes]]) -> Awaitable[Any] | None:
        """Returns the rest of the call that has failed or begun to wait."""
        runner.session, runner.done_count, runner.is_waiting = session, 0, False
        runner.began = self._call_each(runner, session, records)
        steps = runner.began.__await__()
        try:
            waits_for = next(steps, FINISHED)
        except BaseException as error:  # noqa: BLE001 -- raised again where the call is awaited
            return failed(error)
        finally:
            runner.session = runner.record = None
        if waits_for is FINISHED:
            return None
        runner.is_waiting = True
        return going_on(steps, waits_for)

    async def _call_each(self, runner: _Runner, session: Session, records: list[Record[bytes]]) -> None:
        may_start, turn, cancelling = self._member.may_start, self._turn, runner.task.cancelling
        start = self._direct or partial(self._start, session, 0)
        for record in records:
            if session.drains or not may_start(turn.over_ms):
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
        if self._outside.before_call is not None:
            await self._outside.before_call()
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
            was_revoked = self._take_back_cancellation(runner)
            if self._is_ending():
                raise
            # Not of this task, if it was not revoked: something that the handler waited for was cancelled.
            failure = NotStarted() if was_revoked else error
        except Exception as error:  # noqa: BLE001 -- whatever a handler raises is a failure of its record
            failure = error
        finally:
            runner.session = runner.record = None
            self._take_back_cancellation(runner)
        if failure is None and session.is_live:
            lane = session.lane
            assert isinstance(lane, Lane)
            lane.finish(entry)
            session.settle()
            self.shelf.put_back(session)
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
        self.shelf.offer(session)
        self._on_finished(session)

    def _fail(self, session: Session, lane: Lane, entry: Entry, failure: BaseException) -> None:
        record, now_ms = entry.record, self._outside.clock.now_ms()
        if isinstance(failure, UndecodableError):
            lane.retry_at(entry, now_ms)
            lane.stop()
            self._on_undecodable(session, failure)
            return
        entry.attempts += 1
        pause_ms = retry_in_ms(self._policy, entry.attempts, self._outside.entropy)
        event = failed_attempt(session, record, failure, attempt=entry.attempts, retry_in_ms=pause_ms)
        self._outside.emit(event)
        lane.retry_at(entry, now_ms + (pause_ms or 0))
        if pause_ms is None:
            lane.stop()
            reason = f"its handler failed {entry.attempts} times, the last time with {event.error}"
            self._on_failed(session, record, reason, failure)
        else:
            self._scheduler.call_at(now_ms + pause_ms, lambda: self.shelf.offer(session))

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
        self.shelf.withdraw(session)
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
    def _take_back_cancellation(runner: _Runner) -> bool:
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


def _direct_call(call: HandlerCall, handling: Handling) -> Callable[[Record[bytes]], Awaitable[Any]] | None:
    """The handler itself, behind the decoder, where a call of it needs no more than the record."""
    direct, decode = call.direct, handling.decode
    if direct is None or decode is None:
        return direct
    return lambda record: direct(decode(record))
