"""Runs a handler record by record: as many runners as may run at once, each taking one record after another.

The rules: the fence is read in the same step as the hand-over (rule L8); a record is finished when its handler has
returned, and not before; a failed one is tried again by the policy while its key (or its shard) waits, and after the
last attempt the shard stops loudly (rule D4). A call whose lease is lost is cancelled and waited for; nothing of it
counts.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from anabranch._core.checkpoints.tracker import Entry
from anabranch._core.handling.lanes import Lane
from anabranch._core.handling.retries import retry_in_ms
from anabranch._engine.calls import HandlerCall, NotStarted
from anabranch._engine.member import Member
from anabranch._engine.outside import Outside
from anabranch._engine.scheduler import Scheduler
from anabranch._engine.session import Session
from anabranch._engine.shelf import Shelf
from anabranch.events import HandlerFailed
from anabranch.policies import Retry
from anabranch.records import Context, Record

__all__ = ["RecordRunners"]


class RecordRunners:
    def __init__(
        self,
        outside: Outside,
        member: Member,
        scheduler: Scheduler,
        call: HandlerCall,
        decode: Callable[[Record[bytes]], Record[Any]],
        policy: Retry,
        *,
        on_finished: Callable[[Session], None],
        on_failed: Callable[[Session, Record[bytes], str], None],
    ) -> None:
        self._outside = outside
        self._member = member
        self._scheduler = scheduler
        self._call = call
        self._decode = decode
        self._policy = policy
        self._on_finished = on_finished
        self._on_failed = on_failed
        self.shelf = Shelf()
        self._running: dict[asyncio.Task[Any], tuple[Session, Entry]] = {}
        self._revoked: dict[asyncio.Task[Any], None] = {}

    async def run_one(self) -> None:
        """One runner, for ever."""
        while True:
            taken = self.shelf.take(self._pick) if self._member.may_start() else None
            if taken is None:
                await self.shelf.wait()
            else:
                await self._handle(*taken)

    def _pick(self, session: Session) -> Entry | None:
        if not session.may_start:
            return None
        lane = session.lane
        assert isinstance(lane, Lane)
        entry = lane.next(self._outside.clock.now_ms())
        if entry is None:
            session.settle()
            session.reason = lane.standstill or session.reason
            if (deadline_ms := lane.next_deadline_ms) is not None:
                self._scheduler.call_at(deadline_ms, lambda: self.shelf.offer(session))
            self._on_finished(session)  # pulling may have passed over records that the owner before had finished
        return entry

    async def _handle(self, session: Session, entry: Entry) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = (session, entry)
        entry.attempts += 1
        failure: BaseException | None = None
        try:
            if self._outside.before_call is not None:
                await self._outside.before_call()
            async with asyncio.timeout(self._policy.timeout):
                await self._call(self._decode(entry.record), self._context(session, entry), self._member.may_start)
        except asyncio.CancelledError:
            if task not in self._revoked:
                raise
            del self._revoked[task]
            task.uncancel()
            failure = NotStarted()
        except Exception as error:  # noqa: BLE001 -- whatever a handler raises is a failure of its record
            failure = error
        finally:
            del self._running[task]
        self._conclude(session, entry, failure)

    def _conclude(self, session: Session, entry: Entry, failure: BaseException | None) -> None:
        if not session.is_live:
            return
        lane = session.lane
        assert isinstance(lane, Lane)
        if failure is None:
            lane.finish(entry)
            session.settle()
        elif isinstance(failure, NotStarted):
            entry.attempts -= 1
            lane.give_back(entry)
        else:
            self._fail(session, lane, entry, failure)
        self.shelf.offer(session)
        self._on_finished(session)

    def _fail(self, session: Session, lane: Lane, entry: Entry, failure: BaseException) -> None:
        record, now_ms = entry.record, self._outside.clock.now_ms()
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
            attempt=entry.attempts,
            fence_token=session.row.fence_token,
            millis_behind_latest=session.behind_ms,
            deadline_seconds=self._policy.timeout,
            fenced_at_ms=self._member.pulse.fence.valid_until_ms,
        )

    def offer(self, session: Session) -> None:
        self.shelf.offer(session)

    def revoke(self, session: Session) -> None:
        """The session's lease is gone: its running calls are cancelled (a call in a thread runs on, and counts for
        nothing).
        """
        self.shelf.withdraw(session)
        for task, (owner, _) in self._running.items():
            if owner is session and task not in self._revoked:
                self._revoked[task] = None
                task.cancel()

    def interrupt(self) -> None:
        """The fence has passed: everything that runs is cancelled, and may be started again if the fence lifts."""
        for task in self._running:
            if task not in self._revoked:
                self._revoked[task] = None
                task.cancel()

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        return [(session, entry.record) for session, entry in self._running.values()]
