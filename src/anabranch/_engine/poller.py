"""Polls the held shards: one call at a time per shard, all on one scheduler.

A shard is read when its pace allows it, its window has space, and the budget has space for the largest response. A slow
or throttled shard never delays another. Nothing that was read is dropped: the read position advances in the step that
puts records into the window.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from anabranch._core.reading.pace import ReadHealth
from anabranch._engine.clock import Scheduler
from anabranch._engine.ports import Ports
from anabranch._engine.session import BUDGET_FULL_MS, Session
from anabranch._engine.shard_discovery import ShardDiscovery, is_open
from anabranch._engine.tasks import start_in_group
from anabranch._model.leases import LeaseKey
from anabranch._wire.messages import GetRecordsResponse
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.errors import (
    AnabranchError,
    CredentialsError,
    ExpiredIteratorError,
    InvalidRequestError,
    ServiceError,
    StreamNotFoundError,
    ThrottledError,
    TransportError,
)
from anabranch.events import ReadFailed, TaskRestarted
from anabranch.limits import GET_RECORDS_BYTES_MAX

RESTARTS_MAX = 3
WINDOW_BYTES_MAX = 20 << 20


class Poller:
    def __init__(
        self,
        ports: Ports,
        scheduler: Scheduler,
        budget: Budget,
        group: asyncio.TaskGroup,
        discovery: ShardDiscovery,
        *,
        on_records: Callable[[Session], None],
        on_unreadable: Callable[[Session], None],
    ) -> None:
        self._ports = ports
        self._scheduler = scheduler
        self._budget = budget
        self._group = group
        self._discovery = discovery
        self._on_records = on_records
        self._on_unreadable = on_unreadable
        self._waiting: deque[Session] = deque()
        self._sessions: dict[Session, ReadHealth] = {}
        self._restarts: dict[LeaseKey, int] = {}
        self.paused = False
        self._health = ReadHealth()
        """Of all shards together."""

    def add(self, session: Session) -> None:
        self._sessions[session] = ReadHealth()
        session.on_settled = lambda: self.wake(session)
        self.wake(session)

    def remove(self, session: Session) -> None:
        self._sessions.pop(session, None)
        session.on_settled = lambda: None

    @property
    def healthy(self) -> bool:
        return self._health.is_good(self._ports.clock.now_ms(), holds_shards=bool(self._sessions))

    def wake(self, session: Session) -> None:
        """Something changed that may allow a read: space in the window, a resumed shard."""
        if not session.in_read and session.phase == "reading":
            session.in_read, session.read_below_bytes = True, 0
            self._scheduler.call_at(session.pace.next_read_at_ms, lambda: self._due(session))

    def _busy_bytes_max(self) -> int:
        """A shard that holds this much is not read until it holds less (rule D6). Each shard gets a share of the
        budget, such that one more read fits even if all shards hold their maximum and one response each. With too many
        shards for that, each may hold half of its share.
        """
        budget = self._budget
        free_bytes = budget.limit_bytes - budget.held_back_bytes_max - READ_RESERVE_BYTES
        share = free_bytes // max(1, len(self._sessions))
        return max(1, min(WINDOW_BYTES_MAX, max(share - GET_RECORDS_BYTES_MAX, share // 2)))

    def _due(self, session: Session) -> None:
        """`in_read` is set from here until the read ends, so a shard is never read twice at once."""
        if session.phase != "reading" or session.is_draining or self.paused or session.row.paused:
            session.in_read = False
        elif session.busy_bytes >= (most_bytes := self._busy_bytes_max()):
            session.in_read, session.read_below_bytes = False, most_bytes  # settle() wakes it
            self._on_records(session)  # no more records for now: a partial batch need not wait
        elif not self._budget.try_reserve(READ_RESERVE_BYTES):
            if not self._waiting:
                self._budget.call_when_free(READ_RESERVE_BYTES, self._on_budget_freed)
            self._waiting.append(session)
            session.budget_full_since_ms = now_ms = self._ports.clock.now_ms()
            self._scheduler.call_at(now_ms + BUDGET_FULL_MS, lambda: self._check_blocked(session))
        else:
            session.budget_full_since_ms = None
            if not start_in_group(self._group, self._read(session), f"read {session.shard_id}"):
                self._budget.release(READ_RESERVE_BYTES)  # others may share the budget

    def _check_blocked(self, session: Session) -> None:
        if session.phase == "reading" and session.reads_blocked(self._ports.clock.now_ms()):
            self._on_records(session)

    def _on_budget_freed(self) -> None:
        """Starts one read; other consumers of the budget go next."""
        while self._waiting:
            session = self._waiting.popleft()
            self._due(session)
            if session.in_read:
                break
        if self._waiting:
            self._budget.call_when_free(READ_RESERVE_BYTES, self._on_budget_freed)

    async def _read(self, session: Session) -> None:
        started_at_ms = self._ports.clock.now_ms()
        reserved = READ_RESERVE_BYTES
        try:
            response = await self._call(session)
            if response.next_shard_iterator is None and not response.child_shards:
                await self._confirm_end(session)
            server_seconds = response.server_seconds or self._ports.clock.wall_ms() / 1000
            if session.may_have_lost(response, server_seconds):
                await self._discovery.on_trimmed(session)
            if session.phase == "reading":
                reserved = 0
                session.record_read(response, server_seconds)
                self._accept(session, response, server_seconds, started_at_ms)
        except ExpiredIteratorError:
            session.iterator = None
            session.pace.on_failure(self._ports.clock.now_ms(), self._ports.entropy)
        except StreamNotFoundError as error:
            session.iterator = None
            session.pace.on_failure(self._ports.clock.now_ms(), self._ports.entropy)
            await self._check_what_is_gone(session, error)
        except InvalidRequestError as error:
            self._on_failure(session, error)
            await self._check_what_is_gone(session, error)  # perhaps another stream has this name now
        except (ServiceError, TransportError, CredentialsError) as error:
            self._on_failure(session, error)
        except (AnabranchError, asyncio.CancelledError):
            self.paused = True  # the consumer is ending: no other read may use this reservation
            raise
        except Exception as error:  # noqa: BLE001 -- P7: restarted three times, then it ends the consumer
            self._on_unexpected(session, error)
        finally:
            self._budget.release(reserved)
            session.in_read = False
        self.wake(session)

    async def _check_what_is_gone(self, session: Session, error: ServiceError) -> None:
        try:
            await self._discovery.on_gone(session, error)
        except (ServiceError, TransportError, CredentialsError) as unanswered:
            self._on_failure(session, unanswered)  # the next read checks again
            return
        if session.phase == "ended":
            self._on_records(session)  # no more records: all may already be finished

    async def _confirm_end(self, session: Session) -> None:
        """A response without next iterator and children is the end of a shard, or faulty (KCL handles that too). A
        listing decides: believing a faulty response would leave an open shard unread.
        """
        if await is_open(self._ports, session.stream, session.shard_id):
            raise TransportError(
                "GetRecords reported the end of the shard, but ListShards shows it open: reading it again"
            )

    async def _call(self, session: Session) -> GetRecordsResponse:
        kinesis = self._ports.kinesis
        if session.iterator is None:
            iterator = await kinesis.get_shard_iterator(session.stream, session.shard_id, session.starting_position())
            if session.read_after is None:
                await self._discovery.on_begun(session)
            session.iterator = iterator
        return await kinesis.get_records(session.stream, session.iterator)

    def _accept(
        self, session: Session, response: GetRecordsResponse, server_seconds: float, started_at_ms: int
    ) -> None:
        now_ms = self._ports.clock.now_ms()
        read_bytes = session.accept(response.records, READ_RESERVE_BYTES)
        session.iterator = response.next_shard_iterator
        session.behind_ms = response.millis_behind_latest
        session.read_at_seconds = server_seconds
        session.reason = None
        session.pace.on_read(
            started_at_ms=started_at_ms,
            now_ms=now_ms,
            read_bytes=read_bytes,
            record_count=len(response.records),
            behind_ms=response.millis_behind_latest or 0,
        )
        self._health.succeeded()
        if session in self._sessions:
            self._sessions[session].succeeded()
        self._restarts.pop(session.key, None)
        if response.next_shard_iterator is None:
            session.children = response.child_shards
            session.move("end")
        self._on_records(session)

    def _on_failure(self, session: Session, error: ServiceError | TransportError | CredentialsError) -> None:
        now_ms = self._ports.clock.now_ms()
        if isinstance(error, ServiceError) and not error.retryable:
            session.iterator = None
        if not isinstance(error, ThrottledError):
            self._health.failed(now_ms)
            self._check_health(session, now_ms)
        session.pace.on_failure(now_ms, self._ports.entropy, throttled=isinstance(error, ThrottledError))
        failures = session.pace.failure_count
        session.reason = str(error)
        if failures & (failures - 1) == 0:  # reports the 1st, 2nd, 4th, 8th, ...
            self._ports.emit(
                ReadFailed(
                    stream=session.stream.name,
                    shard_id=session.shard_id,
                    error=str(error),
                    failure_count=failures,
                )
            )

    def _on_unexpected(self, session: Session, error: Exception) -> None:
        restart = self._restarts[session.key] = self._restarts.get(session.key, 0) + 1
        if restart > RESTARTS_MAX:
            raise error
        session.iterator = None
        session.pace.on_failure(self._ports.clock.now_ms(), self._ports.entropy)
        self._ports.emit(
            TaskRestarted(
                stream=session.stream.name,
                shard_id=session.shard_id,
                task="reading",
                error=repr(error),
                restart=restart,
            )
        )

    def _check_health(self, session: Session, now_ms: int) -> None:
        """If only this shard keeps failing, another worker may be able to read it (rule U7)."""
        health = self._sessions.get(session)
        if health is None:
            return
        health.failed(now_ms)
        if self.healthy and not health.is_good(now_ms, holds_shards=True):
            self._on_unreadable(session)
