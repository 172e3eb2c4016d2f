"""Runs a handler record by record: as many runners as may run at once, each taking one record after another.

The rules: the fence is read in the same step as the hand-over (rule L8); a record is finished when its handler has
returned, and not before; a failed one is tried again by the policy while its key (or its shard) waits, and after the
last attempt the shard stops loudly (rule D4). A call whose lease is lost is cancelled and waited for; nothing of it
counts. A handler that never waits still lets the loop turn: a runner yields after each slice of records.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from anabranch._core.checkpoints.tracker import Entry
from anabranch._core.handling.lanes import Lane
from anabranch._core.handling.retries import retry_in_ms
from anabranch._engine.calls import HandlerCall, NotStarted
from anabranch._engine.handling import Handling
from anabranch._engine.member import Member
from anabranch._engine.outside import Outside
from anabranch._engine.scheduler import Scheduler
from anabranch._engine.session import Session
from anabranch._engine.shelf import Shelf
from anabranch.events import HandlerFailed
from anabranch.records import Context, Record

__all__ = ["RecordRunners"]

SLICE = 100
"""Records that a runner handles before it lets the loop turn."""


class _Runner:
    """One of the tasks that run the handler, and what it runs now."""

    __slots__ = ("entry", "revoked", "session", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.session: Session | None = None
        self.entry: Entry | None = None
        self.revoked = False


class RecordRunners:
    def __init__(
        self,
        outside: Outside,
        member: Member,
        scheduler: Scheduler,
        call: HandlerCall,
        handling: Handling,
        *,
        on_finished: Callable[[Session], None],
        on_failed: Callable[[Session, Record[bytes], str], None],
    ) -> None:
        self._outside = outside
        self._member = member
        self._scheduler = scheduler
        self._call = call
        self._decode = handling.decode
        self._policy = handling.policy
        self._on_finished = on_finished
        self._on_failed = on_failed
        self.shelf = Shelf(one_at_a_time=handling.order == "shard")
        self._runners: list[_Runner] = []

    async def run_one(self) -> None:
        """One runner, for ever."""
        task = asyncio.current_task()
        assert task is not None
        runner = _Runner(task)
        self._runners.append(runner)
        member, shelf, left = self._member, self.shelf, SLICE
        while True:
            taken = shelf.take(self._pick) if member.may_start() else None
            if taken is None:
                await shelf.wait()
                left = SLICE
                continue
            await self._handle(runner, *taken)
            left -= 1
            if not left:
                left = SLICE
                await asyncio.sleep(0)

    def _pick(self, session: Session) -> Entry | None:
        if not session.may_start:
            return None
        lane = session.lane
        assert isinstance(lane, Lane)
        entry = lane.next(self._outside.clock.now_ms())
        if entry is None:
            session.settle()
            session.reason = lane.standstill or session.reason
            deadline_ms = self._outside.clock.now_ms() if lane.scan_is_cut else lane.next_deadline_ms
            if deadline_ms is not None:
                self._scheduler.call_at(deadline_ms, lambda: self.shelf.offer(session))
            self._on_finished(session)  # pulling may have passed over records that the owner before had finished
        return entry

    async def _handle(self, runner: _Runner, session: Session, entry: Entry) -> None:
        runner.session, runner.entry = session, entry
        failure: BaseException | None = None
        try:
            if self._outside.before_call is not None:
                await self._outside.before_call()
            if self._policy.timeout is None:
                await self._start(session, entry)
            else:
                async with asyncio.timeout(self._policy.timeout):
                    await self._start(session, entry)
        except asyncio.CancelledError as error:
            was_revoked = self._take_back_cancellation(runner)
            if runner.task.cancelling():
                raise
            # Not of this task, if it was not revoked: something that the handler waited for was cancelled.
            failure = NotStarted() if was_revoked else error
        except Exception as error:  # noqa: BLE001 -- whatever a handler raises is a failure of its record
            failure = error
        finally:
            runner.session = runner.entry = None
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

    def _start(self, session: Session, entry: Entry) -> Awaitable[Any]:
        call, record = self._call, entry.record
        if self._decode is not None:
            record = self._decode(record)
        if call.direct is not None:
            return call.direct(record)
        context = self._context(session, entry) if call.wants_context else None
        return call(record, context, self._member.may_start)

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
        entry.attempts += 1
        pause_ms = retry_in_ms(self._policy, entry.attempts, self._outside.entropy)
        reason = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
        self._outside.emit(
            HandlerFailed(
                stream=session.stream.name,
                shard_id=session.shard_id,
                position=str(record.position),
                partition_key=record.partition_key,
                attempt=entry.attempts,
                error=reason,
                retry_in_ms=pause_ms,
            )
        )
        lane.retry_at(entry, now_ms + (pause_ms or 0))
        if pause_ms is None:
            lane.stop()
            self._on_failed(session, record, f"its handler failed {entry.attempts} times, the last time with {reason}")
        else:
            self._scheduler.call_at(now_ms + pause_ms, lambda: self.shelf.offer(session))

    def _context(self, session: Session, entry: Entry) -> Context:
        return Context(
            attempt=entry.attempts + 1,
            fence_token=session.row.fence_token,
            millis_behind_latest=session.behind_ms,
            deadline_seconds=self._policy.timeout,
            fenced_at_ms=self._member.pulse.fence.valid_until_ms,
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
        return [
            (runner.session, runner.entry.record)
            for runner in self._runners
            if runner.session is not None and runner.entry is not None
        ]
