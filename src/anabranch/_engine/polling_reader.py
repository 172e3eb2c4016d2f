"""Reads the held shards by polling: one call at a time per shard, all on one scheduler.

A shard is read when its pace allows it, its window has space, and the budget has space for the response: the largest
one, or what a shard at its tip may have gained since its last read. If that is less than a response announces, its
body is received only if the overdraft has room for it (rule B1). A slow or throttled shard never delays another.
Nothing that was accepted is dropped: the read position advances in the step that puts records into the window. A few
tasks do all reads, so a poll creates none.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from anabranch._core.reading.pace import Pace, PaceLimits
from anabranch._core.session import ReadPage, Session
from anabranch._engine.clock import Scheduler
from anabranch._engine.read_results import READ_ERRORS, ReadError, ReadResults
from anabranch._engine.shard_discovery import ShardDiscovery
from anabranch._engine.tasks import start_in_group
from anabranch._ports import Ports
from anabranch.budget import READ_RESERVE_BYTES, TIP_MS_MAX, Budget
from anabranch.errors import (
    AccessDeniedError,
    AnabranchError,
    ExpiredIteratorError,
    InvalidRequestError,
    ServiceError,
    StreamNotFoundError,
    ThrottledError,
)
from anabranch.limits import GET_RECORDS_BYTES_MAX
from anabranch.reasons import PollingDenied, ReadsFailing, ReadsThrottled, Reason
from anabranch.reports import SubscriptionState


@dataclass(eq=False, repr=False)
class _PolledShard:
    session: Session
    pace: Pace
    fallback_reason: Reason | None
    """Why it is polled although it should be subscribed; None without fan-out."""
    iterator: str | None = None
    next_iterator: str | None = None
    """The next iterator, from the last response. It replaces `iterator` when the response is accepted."""
    restart_count: int = 0
    is_busy: bool = False
    """A read is scheduled, waits for the budget, or runs. So a shard is never read twice at once."""
    tip_until_ms: int = 0
    """Until then, a read returns few records: the last one reached the tip."""
    reserved_bytes: int = 0
    """In the budget, for the read that runs."""
    refused_bytes: int = 0
    """The data of the last response, if the budget had no room for it."""


@dataclass(eq=False, repr=False)
class PollingReader:
    _ports: Ports
    _scheduler: Scheduler
    _budget: Budget
    _group: asyncio.TaskGroup
    _discovery: ShardDiscovery
    _results: ReadResults
    _pace: PaceLimits
    _shards: dict[Session, _PolledShard] = field(default_factory=dict)
    _waiting: deque[_PolledShard] = field(default_factory=deque)
    """Shards that wait for the byte budget, first come, first served."""
    _idle_tasks: list[asyncio.Future[_PolledShard]] = field(default_factory=list)
    """Tasks that wait for the next shard to read."""
    is_paused: bool = False

    def add(self, session: Session, fallback_reason: Reason | None = None) -> None:
        """`fallback_reason`: why it is polled although it should be subscribed."""
        if session in self._shards:
            self._shards[session].fallback_reason = fallback_reason
            return
        self._shards[session] = _PolledShard(session, Pace(self._pace, self._ports.clock.now_ms()), fallback_reason)
        self.wake(session)

    def remove(self, session: Session) -> None:
        self._shards.pop(session, None)

    def has(self, session: Session) -> bool:
        return session in self._shards

    def pause(self) -> None:
        """Starts no more reads. What was read is still delivered."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        for session in self._shards:
            self.wake(session)

    def subscription_of(self, session: Session) -> SubscriptionState | None:  # noqa: ARG002 -- polling has none
        """How the shard is subscribed; None without fan-out."""
        return None

    def wake(self, session: Session) -> None:
        """Something changed that may allow a read: space in the window, a declined hand-over."""
        shard = self._shards.get(session)
        if shard is not None and not shard.is_busy and session.state == "reading":
            shard.is_busy = True
            self._scheduler.call_at(shard.pace.next_read_at_ms, partial(self._due, shard))

    # when to read

    def _due(self, shard: _PolledShard) -> None:
        if not self._may_read(shard):
            return
        if self._waiting or not self._reserve(shard, shard.pace.next_read_at_ms):
            self._wait_for_budget(shard)
        else:
            self._start_read(shard)

    def _may_read(self, shard: _PolledShard) -> bool:
        session = shard.session
        if session.state != "reading" or self.is_paused or session.row.paused or not self._is_polled(shard):
            shard.is_busy = False
            return False
        if session.busy_bytes and self._results.pause_if_full(session, GET_RECORDS_BYTES_MAX):
            shard.is_busy = False
            return False
        return True

    def _wanted_bytes(self, shard: _PolledShard, now_ms: int) -> int:
        """Room for the largest response; for less, if the shard was at its tip a moment ago (rule B1)."""
        return self._budget.tip_reserve_bytes if now_ms < shard.tip_until_ms else READ_RESERVE_BYTES

    def _reserve(self, shard: _PolledShard, now_ms: int) -> bool:
        wanted_bytes = self._wanted_bytes(shard, now_ms)
        if not self._budget.try_reserve(wanted_bytes):
            return False
        shard.reserved_bytes = wanted_bytes
        return True

    def _wait_for_budget(self, shard: _PolledShard) -> None:
        now_ms = self._ports.clock.now_ms()
        if not self._waiting:
            self._budget.call_when_free(self._wanted_bytes(shard, now_ms), self._on_budget_freed)
        self._waiting.append(shard)
        self._results.wait_for_budget(shard.session)

    def _is_polled(self, shard: _PolledShard) -> bool:
        """False if it was removed, perhaps while a read was on its way."""
        return self._shards.get(shard.session) is shard

    def _start_read(self, shard: _PolledShard) -> None:
        shard.session.begin_read()
        while self._idle_tasks:
            task = self._idle_tasks.pop()
            if not task.done():
                task.set_result(shard)
                return
        if not start_in_group(self._group, self._read_one_after_another(shard), "reading"):
            self._return_reserve(shard)  # others may share the budget

    def _return_reserve(self, shard: _PolledShard) -> None:
        reserved_bytes, shard.reserved_bytes = shard.reserved_bytes, 0
        self._budget.release(reserved_bytes)

    async def _read_one_after_another(self, shard: _PolledShard) -> None:
        while True:
            await self._read(shard)
            following: asyncio.Future[_PolledShard] = asyncio.get_running_loop().create_future()
            self._idle_tasks.append(following)
            shard = await following

    def _on_budget_freed(self) -> None:
        """Starts one read; other consumers of the budget go next."""
        now_ms = self._ports.clock.now_ms()
        while self._waiting:
            shard = self._waiting[0]
            if self._may_read(shard):
                if self._reserve(shard, now_ms):
                    self._waiting.popleft()
                    self._start_read(shard)
                break
            self._waiting.popleft()
        if self._waiting:
            self._budget.call_when_free(self._wanted_bytes(self._waiting[0], now_ms), self._on_budget_freed)

    # reading

    async def _read(self, shard: _PolledShard) -> None:
        session, clock = shard.session, self._ports.clock
        started_at_ms = clock.now_ms()
        try:
            page = await self._results.traced("GetRecords", session, self._fetch(shard))
            if page is None:
                self._read_again(shard, started_at_ms)
            else:
                await self._results.check(session, page)
                self._accept(shard, page, started_at_ms)
        except ExpiredIteratorError:
            self._forget_iterator(shard)
        except StreamNotFoundError as error:
            self._forget_iterator(shard)
            await self._check_what_is_gone(shard, error)
        except InvalidRequestError as error:
            self._on_failure(shard, error)
            await self._check_what_is_gone(shard, error)  # the stream may have been created again
        except READ_ERRORS as error:
            self._on_failure(shard, error)
        except (AnabranchError, asyncio.CancelledError):
            self.is_paused = True  # the consumer is ending: no other read may use this reservation
            raise
        except Exception as error:  # noqa: BLE001 -- P7: restarted three times, then it ends the consumer
            shard.restart_count += 1
            self._results.report_restart(session, error, shard.restart_count)
            self._forget_iterator(shard)
        finally:
            if shard.reserved_bytes:
                self._return_reserve(shard)
            shard.is_busy = False
        self.wake(session)

    async def _fetch(self, shard: _PolledShard) -> ReadPage | None:
        """None: the budget had no room for the response."""
        kinesis, session, iterator = self._ports.kinesis, shard.session, shard.iterator
        if iterator is None:
            iterator = await kinesis.get_shard_iterator(session.stream, session.shard_id, session.starting_position())
            if session.read_after is None:
                await self._discovery.on_begun(session)
            shard.iterator = iterator
        is_at_tip = shard.reserved_bytes < READ_RESERVE_BYTES
        has_room = partial(self._has_room, shard) if is_at_tip else None
        response = await kinesis.get_records(session.stream, iterator, has_room=has_room)
        if response is None:
            return None
        shard.next_iterator = response.next_shard_iterator
        return ReadPage(
            response.records,
            response.server_seconds or self._ports.clock.wall_ms() / 1000,
            response.millis_behind_latest,
            response.next_shard_iterator is None,
            response.child_shards,
        )

    def _has_room(self, shard: _PolledShard, body_bytes: int) -> bool:
        """Asked before the body of a response is received: its text is in base64, its data is three quarters of that.
        More than was reserved is taken from the overdraft (rule B1).
        """
        data_bytes = body_bytes * 3 // 4
        missing_bytes = body_bytes + data_bytes - shard.reserved_bytes
        if missing_bytes <= 0:
            return True
        if not self._budget.try_overdraw(missing_bytes):
            shard.refused_bytes = data_bytes
            return False
        shard.reserved_bytes += missing_bytes
        return True

    def _read_again(self, shard: _PolledShard, started_at_ms: int) -> None:
        """Reads what was refused again, with room for the largest response, when the read quota allows it."""
        shard.tip_until_ms = 0
        shard.pace.on_read(
            started_at_ms=started_at_ms,
            now_ms=self._ports.clock.now_ms(),
            read_bytes=shard.refused_bytes,
            record_count=1,
            behind_ms=0,
        )

    def _accept(self, shard: _PolledShard, page: ReadPage, started_at_ms: int) -> None:
        reserved_bytes, shard.reserved_bytes = shard.reserved_bytes, 0
        read_bytes = self._results.accept(shard.session, page, reserved_bytes)
        shard.iterator = shard.next_iterator
        shard.tip_until_ms = started_at_ms + TIP_MS_MAX if page.behind_ms == 0 else 0
        shard.restart_count = 0
        shard.pace.on_read(
            started_at_ms=started_at_ms,
            now_ms=self._ports.clock.now_ms(),
            read_bytes=read_bytes,
            record_count=len(page.records),
            behind_ms=page.behind_ms or 0,
        )

    def _forget_iterator(self, shard: _PolledShard) -> None:
        shard.iterator = None
        shard.pace.on_failure(self._ports.clock.now_ms(), self._ports.entropy)

    async def _check_what_is_gone(self, shard: _PolledShard, error: ServiceError) -> None:
        unanswered = await self._results.check_what_is_gone(shard.session, error)
        if unanswered is not None:
            self._on_failure(shard, unanswered)

    def _on_failure(self, shard: _PolledShard, error: ReadError) -> None:
        session, now_ms = shard.session, self._ports.clock.now_ms()
        if not self._is_polled(shard):
            return
        if isinstance(error, ServiceError) and not error.retryable:
            shard.iterator = None
        throttled = isinstance(error, ThrottledError)
        shard.pace.on_failure(now_ms, self._ports.entropy, throttled=throttled)
        if shard.fallback_reason is not None and isinstance(error, AccessDeniedError):
            # It waits for its subscription, and another worker could do no more.
            session.report(PollingDenied(cause=str(shard.fallback_reason), error=str(error)))
            return
        failures = shard.pace.failure_count
        kind = ReadsThrottled if throttled else ReadsFailing
        session.report(kind(error=str(error), failure_count=failures))
        self._results.report(session, error, failures)
