"""What follows a read, however it was made: a page is checked and accepted, a failure is reported.

Both readers use it. It decides neither when nor how a shard is read.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

from anabranch._core.reading.pace import ReadHealth
from anabranch._core.reading.service_time import ServiceClock
from anabranch._core.session import BUDGET_FULL_MS, ReadPage, Session
from anabranch._engine.clock import Scheduler
from anabranch._engine.fleet import Fleet
from anabranch._engine.shard_discovery import ShardDiscovery, is_open
from anabranch._engine.work_queue import Changes
from anabranch._model.leases import LeaseKey
from anabranch._ports import Ports
from anabranch._tracing import Fetched
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.errors import CredentialsError, ServiceError, ThrottledError, TransportError
from anabranch.events import ReadFailed, ReadRecovered, TaskRestarted

F = TypeVar("F", bound=Fetched | None)

RESTARTS_MAX = 3
WINDOW_BYTES_MAX = 20 << 20

ReadError: TypeAlias = ServiceError | TransportError | CredentialsError
"""What a read may raise. Everything else ends the consumer."""
READ_ERRORS = (ServiceError, TransportError, CredentialsError)


@dataclass(eq=False, repr=False)
class _Failing:
    since_ms: int
    count: int = 0
    throttled: bool = False
    health: ReadHealth = field(default_factory=ReadHealth)


@dataclass(eq=False, repr=False)
class ReadResults:
    _ports: Ports
    _scheduler: Scheduler
    _budget: Budget
    _fleet: Fleet
    _discovery: ShardDiscovery
    _changes: Changes
    _sessions: Mapping[LeaseKey, Session]
    _service_clock: ServiceClock
    _health: ReadHealth = field(default_factory=ReadHealth)
    """Of all shards together."""
    _failing: dict[Session, _Failing] = field(default_factory=dict)
    """Shards whose last read failed, by polling or by subscription."""

    @property
    def is_healthy(self) -> bool:
        """Whether this worker can read at all (rule U7)."""
        return self._health.is_healthy(self._ports.clock.now_ms(), holds_shards=bool(self._sessions))

    def busy_bytes_max(self, page_bytes_max: int) -> int:
        """A shard that holds this much is not read until it holds less (rule D6). Each shard gets a share of the
        budget, such that one more read fits even if all shards hold their maximum and one page each. With too many
        shards for that, each may hold half of its share.
        """
        budget = self._budget
        free_bytes = budget.limit_bytes - budget.held_back_bytes_max - READ_RESERVE_BYTES
        share = free_bytes // max(1, len(self._sessions))
        return max(1, min(WINDOW_BYTES_MAX, max(share - page_bytes_max, share // 2)))

    def pause_if_full(self, session: Session, page_bytes_max: int) -> bool:
        """Whether the shard holds so much that it is not read. It is woken when it holds less."""
        bytes_max = self.busy_bytes_max(page_bytes_max)
        if session.busy_bytes < bytes_max:
            return False
        session.pause_reading(below_bytes=bytes_max)
        self._changes.arrived(session)  # no more records for now: a partial batch need not wait
        return True

    def wait_for_budget(self, session: Session) -> None:
        """A read waits for the byte budget. If that takes long, partial batches are delivered."""
        now_ms = self._ports.clock.now_ms()
        session.wait_for_budget(now_ms)
        self._scheduler.call_at(now_ms + BUDGET_FULL_MS, partial(self._check_blocked, session))

    def _check_blocked(self, session: Session) -> None:
        if session.state == "reading" and session.reads_blocked(self._ports.clock.now_ms()):
            self._changes.arrived(session)

    # a page

    def traced(self, operation: str, session: Session, read: Awaitable[F]) -> Awaitable[F]:
        tracing = self._ports.tracing
        if tracing is None:
            return read
        return tracing.receive(operation, session.stream.name, session.shard_id, read)

    async def check(self, session: Session, page: ReadPage) -> None:
        """Confirms what a page says about an end or a gap, before it is accepted. Most pages need no check."""
        # A page without continuation and children is the end of a shard, or faulty (KCL handles that too). A listing
        # decides: believing a faulty response would leave an open shard unread.
        if page.is_end and not page.children and await is_open(self._ports, session.stream, session.shard_id):
            raise TransportError("a read reported the end of the shard, but ListShards shows it open: reading it again")
        if session.may_have_lost(page):
            await self._discovery.on_trimmed(session)

    def accept(self, session: Session, page: ReadPage, reserved_bytes: int) -> int:
        """Accepts all records of the page in one step, and returns their size."""
        # A record's arrival time is more exact than the date of the response. An event of a subscription has no date:
        # its time is rounded up to the second.
        arrived_seconds = page.records[-1].arrival_seconds if page.records else 0.0
        answered_seconds = page.server_seconds if page.made_seconds is None else page.server_seconds - 1
        self._service_clock.observe(max(answered_seconds, arrived_seconds), self._ports.clock.now_ms())
        if (failing := self._failing.pop(session, None)) is not None:
            seconds = (self._ports.clock.now_ms() - failing.since_ms) / 1000
            recovered = ReadRecovered(
                **session.names, throttled=failing.throttled, failure_count=failing.count, seconds=seconds
            )
            self._ports.emit(recovered)
        read_bytes = session.add_page(page, reserved_bytes)
        self._health.succeeded()
        if page.records or page.is_end or session.has_unwritten_progress:
            self._changes.arrived(session)
        return read_bytes

    # a failure

    async def check_what_is_gone(self, session: Session, error: ServiceError) -> ReadError | None:
        """The service does not know the shard or the position: checks why. Returns the error if the check failed."""
        try:
            await self._discovery.on_gone(session, error)
        except READ_ERRORS as unanswered:
            return unanswered  # the next read checks again
        if session.end is not None:
            self._changes.arrived(session)  # no more records: all may already be finished
        return None

    def report(self, session: Session, error: ReadError, failure_count: int) -> None:
        now_ms = self._ports.clock.now_ms()
        throttled = isinstance(error, ThrottledError)
        session.count_failed_read(throttled=throttled)
        failing = self._failing.setdefault(session, _Failing(now_ms))
        failing.count, failing.throttled = failing.count + 1, throttled
        if not throttled:
            self._health.failed(now_ms)
            failing.health.failed(now_ms)
            if self.is_healthy and not failing.health.is_healthy(now_ms, holds_shards=True):
                # Only this shard keeps failing: another worker may be able to read it (rule U7).
                self._fleet.give_unreadable(session.key)
        if failure_count & (failure_count - 1) == 0:  # reports the 1st, 2nd, 4th, 8th, ...
            self._ports.emit(ReadFailed(**session.names, error=str(error), failure_count=failure_count))

    def forget(self, session: Session) -> None:
        """The lease is gone."""
        self._failing.pop(session, None)

    def report_restart(self, session: Session, error: Exception, restart_count: int) -> None:
        """Reports an unexpected error. After a few restarts the error ends the consumer (P7)."""
        if restart_count > RESTARTS_MAX:
            raise error
        self._ports.emit(TaskRestarted(**session.names, task="reading", error=repr(error), restart=restart_count))
