"""Runs a handler batch by batch: one batch of a shard at a time, several shards at once.

A batch whose handler fails is tried again whole, by the policy; after the last attempt its shard stops loudly at the
batch's first record. A batch ends before a record that does not decode; when it is handled, the shard stops at that
record. A batch whose lease is lost is cancelled, and nothing of it counts.
"""

import asyncio
from traceback import StackSummary
from typing import Any

from anabranch._core.handling.retries import retry_in_ms
from anabranch._engine.handling.batch_feed import BatchFeed, batch_lane
from anabranch._engine.handling.calls import HandlerCall, NotStarted, take_back_cancellation
from anabranch._engine.handling.failures import OnFailed, OnUndecodable, failed_attempt
from anabranch._engine.handling.handling import Handling, UndecodableError
from anabranch._engine.handling.time_limit import TimeLimit
from anabranch._engine.leases.member import Member
from anabranch._engine.outside import Outside
from anabranch._engine.session import Session
from anabranch.records import Batch, Context, Record

__all__ = ["BatchRunners"]

NOT_STARTED_PAUSE_MS = 100
"""Between two looks whether a batch may be started, while it may not."""


class BatchRunners:
    def __init__(
        self,
        outside: Outside,
        member: Member,
        feed: BatchFeed,
        call: HandlerCall,
        handling: Handling,
        *,
        finishes_at_end: bool = False,
        on_failed: OnFailed,
        on_undecodable: OnUndecodable,
    ) -> None:
        self._outside = outside
        self._member = member
        self._feed = feed
        self._call = call
        self._handling = handling
        self._policy = handling.policy
        self._finishes_at_end = finishes_at_end
        self._on_failed = on_failed
        self._on_undecodable = on_undecodable
        self._limit = TimeLimit(outside.clock, handling.policy.timeout)
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
                await self._feed.shelf.wait()
            else:
                await self._handle(task, *taken)
                if task.cancelling():
                    await take_back_cancellation(task, self._is_ending)
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
                pause_ms = self._judge(session, records, failure)
                if pause_ms is None:
                    return
                await self._pause(task, session, pause_ms)
        finally:
            del self._running[task]
            self._take_back_cancellation(task)
            self._feed.on_ended(session)

    async def _pause(self, task: asyncio.Task[Any], session: Session, pause_ms: int) -> None:
        self._waiting[task] = None
        self._feed.on_ended(session)
        try:
            await self._outside.clock.sleep_until_ms(self._outside.clock.now_ms() + pause_ms)
        except asyncio.CancelledError:
            if not self._take_back_cancellation(task) or self._is_ending():
                raise
        finally:
            del self._waiting[task]

    def _is_ending(self) -> bool:
        return self._feed.is_closed or self._call.is_given_up

    def _take_back_cancellation(self, task: asyncio.Task[Any]) -> bool:
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
            if self._outside.before_call is not None:
                await self._outside.before_call()
            decoded, undecodable = self._handling.decode_leading(records)
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
            was_revoked = self._take_back_cancellation(task)
            if self._is_ending():
                raise
            # Not of this task, if it was not revoked: something that the handler waited for was cancelled.
            return NotStarted() if was_revoked else error
        except Exception as error:  # noqa: BLE001 -- whatever a handler raises is a failure of its batch
            return error
        return undecodable

    def _judge(self, session: Session, records: list[Record[bytes]], failure: BaseException) -> int | None:
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
        pause_ms = retry_in_ms(self._policy, lane.attempts, self._outside.entropy)
        if self._finishes_at_end and session.phase == "ended" and lane.is_last:
            pause_ms = None  # only this batch keeps the shard's children waiting (rule M4)
        failed = failed_attempt(session, record, failure, attempt=lane.attempts, retry_in_ms=pause_ms)
        self._outside.emit(failed)
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
        self._feed.shelf.withdraw(session)
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
