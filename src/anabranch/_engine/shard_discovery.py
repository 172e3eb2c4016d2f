"""Finds the shards to read: roots at the start of a stream, children at the end of a shard, missed ones by listing.

The core plans (`_core.shards`); this module writes, in an order that survives a crash at any point: a stream is read
only after its root leases exist, and children get their rows before their parent is finished.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from anabranch._core.backoff import backoff_ms
from anabranch._core.leases.machine import lease_row_deleted
from anabranch._core.leases.store_calls import DeleteLease, ReadLease, ReadLeases
from anabranch._core.reading.service_time import HORIZON_MARGIN_SECONDS, TrimHorizon, may_have_lost
from anabranch._core.session import Session
from anabranch._core.shards.graph import ShardGraph, opened_after_horizon, unread_since
from anabranch._core.shards.lifecycle import (
    ShardEnd,
    Start,
    accounted_for,
    classify_missing_shard,
    ends_to_restore,
    had_row,
    listing_filter,
    missing_leases,
    plan_end,
    plan_trimmed,
    propose_stream,
    removable,
    unfinished_shards,
)
from anabranch._engine.checkpointer import Checkpointer
from anabranch._engine.clock import Alarm
from anabranch._engine.fleet import Fleet
from anabranch._model.leases import LeaseRow, StreamRow
from anabranch._model.streams import AT_TRIM_HORIZON, TRIM_HORIZON, Shard, ShardFilter, StreamName
from anabranch._ports import Ports
from anabranch._wire.messages import StreamSummary
from anabranch.config import ConsumerSettings
from anabranch.errors import (
    AnabranchError,
    CredentialsError,
    LeaseStoreError,
    ServiceError,
    StreamDeletedError,
    StreamNotFoundError,
    StreamRecreatedError,
    TransportError,
)
from anabranch.events import DataLost, KeysUnordered, ListingFailed, ListingRecovered, ShardFinished, StreamChanged
from anabranch.reasons import ChildrenUnknown, ChildrenUnlisted

T = TypeVar("T")

RETRY_FOR_MS = 5_000
PAUSE_MS = 200
PAUSE_MAX_MS = 5_000


async def retry_kinesis_call(
    ports: Ports, call: Callable[[], Awaitable[T]], *, retry_answered_ms: int = RETRY_FOR_MS
) -> T:
    """Retries retryable errors with backoff, then raises the last one. Nothing below retries.

    `retry_answered_ms`: how long to retry if the service does respond. Workers that start together are all throttled
    for a while, but an unreachable endpoint should be reported soon.
    """
    begun_ms = ports.clock.now_ms()
    failures = 0
    while True:
        try:
            return await call()
        except AnabranchError as error:
            now_ms = ports.clock.now_ms()
            failures += 1
            pause_ms = backoff_ms(failures, ports.entropy, first_ms=PAUSE_MS, max_ms=PAUSE_MAX_MS)
            patience_ms = max(retry_answered_ms, RETRY_FOR_MS) if isinstance(error, ServiceError) else RETRY_FOR_MS
            if not error.retryable or now_ms + pause_ms >= begun_ms + patience_ms:
                raise
        await ports.clock.sleep_until_ms(now_ms + pause_ms)


CREATING_POLL_MS = 500


async def await_stream(ports: Ports, stream: StreamName, timeout_ms: int) -> StreamSummary:
    """The summary of the stream. Waits while the stream is being created, and while we are throttled."""
    clock = ports.clock
    deadline_ms = clock.now_ms() + timeout_ms
    while True:
        summary = await retry_kinesis_call(
            ports,
            lambda: ports.kinesis.describe_stream_summary(stream),
            retry_answered_ms=deadline_ms - clock.now_ms(),
        )
        if summary.status != "CREATING":
            return summary
        if clock.now_ms() >= deadline_ms:
            raise TransportError(f"stream {stream} is still CREATING after {timeout_ms / 1000:.0f} s (start_timeout)")
        await clock.sleep_until_ms(clock.now_ms() + CREATING_POLL_MS)


async def find_summary(ports: Ports, stream: StreamName) -> StreamSummary | None:
    """None if the stream does not exist."""
    try:
        return await retry_kinesis_call(ports, lambda: ports.kinesis.describe_stream_summary(stream))
    except StreamNotFoundError:
        return None


async def list_all_shards(
    ports: Ports, stream: StreamName, shard_filter: ShardFilter | None, *, retry_answered_ms: int = RETRY_FOR_MS
) -> list[Shard]:
    """All pages of a listing. `retry_answered_ms` applies to each page, as in `retry_kinesis_call`."""
    # The service accepts a filter with the first page only; the token implies it for the others.
    list_page = partial(ports.kinesis.list_shards, stream, shard_filter=shard_filter)
    shards: list[Shard] = []
    while True:
        page = await retry_kinesis_call(ports, list_page, retry_answered_ms=retry_answered_ms)
        shards.extend(page.shards)
        if page.next_token is None:
            return shards
        list_page = partial(ports.kinesis.list_shards, stream, next_token=page.next_token)


async def is_open(ports: Ports, stream: StreamName, shard_id: str) -> bool:
    """Whether a listing shows the shard as open."""
    listed = await list_all_shards(ports, stream, None)
    return any(shard.is_open for shard in listed if shard.shard_id == shard_id)


@dataclass(eq=False, repr=False)
class CoalescedCall:
    """Coalesces concurrent calls: one call serves all who asked before it started, even a thousand shards."""

    _call: Callable[[], Awaitable[object]]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _begun_count: int = 0

    async def wait(self) -> None:
        """Waits for a call that starts after now. An error goes to the waiter that made the call; others call again."""
        asked_at = self._begun_count
        async with self._lock:
            if self._begun_count > asked_at:
                return
            self._begun_count += 1
            try:
                await self._call()
            except BaseException:
                self._begun_count -= 1  # a failed call has no result to share
                raise


END_RETRY_MS = 500
INQUIRY_INTERVAL_MS = 5_000
"""How often to check whether all members have answered that they do not hold the leases without rows."""
TRANSIENT = (ServiceError, TransportError, CredentialsError, LeaseStoreError)
"""Errors that may pass: even a denied access can be granted later."""


class _Settled(NamedTuple):
    """A listing that needed no work."""

    planner: str
    """The member that found this."""
    shard_ids: tuple[str, ...]
    unfinished: tuple[str, ...] | None
    """The shards with an unfinished lease, if listed shards wait for parents. None: each has its row or needs none."""


@dataclass(eq=False, repr=False)
class KnownStream:
    name: StreamName
    row: StreamRow
    horizon: TrimHorizon
    is_placed_by_key: bool
    """Whether the partition key decides the shard of a record, as is usual."""
    graph: ShardGraph = field(default_factory=ShardGraph)
    settled: _Settled | None = None
    """The last listing that needed no work."""
    is_complete: bool = True
    """False if it has still to be listed, or if leases had no row at the last listing."""


@dataclass(eq=False, repr=False)
class ShardDiscovery:
    _ports: Ports
    _fleet: Fleet
    _wanted: tuple[StreamName, ...]
    _start: Start
    _settings: ConsumerSettings
    streams: dict[str, KnownStream] = field(default_factory=dict)
    _checks: dict[str, CoalescedCall] = field(default_factory=dict)
    _is_inquiring: bool = False
    """Whether the last listing found leases without a row that somebody may still hold."""

    def __post_init__(self) -> None:
        self._start_timeout_ms = round(self._settings.start_timeout * 1000)
        self._listings = Alarm(self._ports.clock)

    @property
    def retention_hours(self) -> int:
        """The longest of its streams."""
        return max((stream.horizon.retention_hours for stream in self.streams.values()), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether every listed shard has the row that it needs."""
        return all(stream.is_complete for stream in self.streams.values())

    def list_soon(self) -> None:
        """Lists the shards now: a worker that stops by itself must not overlook one."""
        for stream in self.streams.values():
            stream.is_complete = False
        self._listings.ring()

    # the start

    async def prepare(self) -> None:
        """Makes sure that every stream has its row and its root leases."""
        for stream in self._wanted:
            await self._begin(stream, await await_stream(self._ports, stream, self._start_timeout_ms))

    async def _begin(self, name: StreamName, summary: StreamSummary) -> None:
        proposal = propose_stream(summary, self._start, self._ports.clock.wall_ms() / 1000)
        row = await self._fleet.begin_stream(
            proposal, partial(list_all_shards, self._ports, name, retry_answered_ms=self._start_timeout_ms)
        )
        horizon = TrimHorizon(summary.retention_hours, self._server_seconds(summary))
        is_placed_by_key = summary.record_distribution != "AUTO"
        if not is_placed_by_key:
            self._ports.emit(KeysUnordered(stream=summary.name))
        stream = KnownStream(name, row, horizon, is_placed_by_key=is_placed_by_key)
        self.streams[row.stream_key] = stream
        self._checks[row.stream_key] = CoalescedCall(partial(self._check_stream, stream))

    def _server_seconds(self, summary: StreamSummary) -> float:
        return summary.server_seconds or self._ports.clock.wall_ms() / 1000

    # the end of a shard

    async def finish(self, session: Session, checkpointer: Checkpointer) -> None:
        """All records are finished: creates the children's leases, finishes the shard, takes what can start."""
        ports = self._ports
        while session.state == "finishing":
            planner = self._fleet.member_id
            try:
                end = await self._plan_end(session)
            except TRANSIENT as error:
                end = None
                session.report(ChildrenUnlisted(error=str(error)))
            if end is not None and await self._write_end(session, end, checkpointer, planner):
                ports.emit(ShardFinished(**session.names, children=end.finish.children, reason=end.finish.reason))
                await self._fleet.adopt(session.key, end.finish.children)
                if session.end is not None and session.end.trimmed:
                    # If two parents are trimmed together, each leaves the child to the other: check again now.
                    self._listings.ring()
                return
            await ports.clock.sleep_until_ms(ports.clock.now_ms() + END_RETRY_MS)

    async def _plan_end(self, session: Session) -> ShardEnd | None:
        """None if the children are unknown; the caller retries."""
        stream = self.streams[session.key.stream_key]
        leases = await self._fleet.lease_rows(stream.row)
        if all(lease.key != session.key for lease in leases):
            return None  # the store lost this shard's row: this proves nothing, and the lease loop notices (rule L14)
        read_end = session.end
        assert read_end is not None, "the shard has not ended"
        graph = stream.graph.extended(child_shards=read_end.children, rows=leases)
        through = session.read_through_seconds
        end = None if read_end.trimmed else plan_end(session.row, graph, None, leases, through)
        if end is None:
            listing = await self._list(stream, None)
            scope = {shard.shard_id: shard for shard in listing}
            graph = graph.extended(shards=listing)
            if read_end.trimmed:
                end = plan_trimmed(stream.row, session.row, graph, scope, leases, through)
            else:
                end = plan_end(session.row, graph, scope, leases, through)
        stream.graph = graph
        session.report(ChildrenUnknown() if end is None else None)
        return end

    async def _write_end(self, session: Session, end: ShardEnd, checkpointer: Checkpointer, planner: str) -> bool:
        unheld = await self._fleet.find_unheld(end.restored) if end.restored else ()
        postponed: dict[str, None] = {}
        for row in end.rows:
            is_restored = row.key in end.restored
            may_be_held = is_restored and row.key not in unheld
            if may_be_held or any(parent in postponed for parent in row.waits_for):
                postponed[row.key.shard_id] = None
            elif not await self._create(row, planner, is_restored=is_restored, is_deleted=is_restored):
                return False
        if postponed:
            return False
        key = session.key
        outcome = await checkpointer.write(session, finish=end.finish)
        if outcome == "lost":
            stored = await self._fleet.call(ReadLease(key))
            return stored is not None and stored.is_finished
        return outcome == "written"

    # missing shards and lost records

    async def on_gone(self, session: Session, error: ServiceError) -> None:
        """The service does not know the shard or the position. Checks whether the shard is really gone (rule S3)."""
        await self._check_stream(self.streams[session.key.stream_key], error)
        if not await self._is_gone(session.stream, session.shard_id):
            return
        await self._narrow_loss(session)
        if session.end_trimmed():
            self._report_loss(session)

    async def on_begun(self, session: Session) -> None:
        """Before the first read of a shard: a stream that was created again has shards of the same names."""
        await self._checks[session.key.stream_key].wait()

    async def on_trimmed(self, session: Session) -> None:
        await self._check_stream(self.streams[session.key.stream_key])
        await self._narrow_loss(session)
        self._report_loss(session)

    def _report_loss(self, session: Session) -> None:
        """Reports a range of time whose records may have been trimmed before they were read (rule T4); nobody can know
        whether there were any. It is reported once, because reading continues after it. Call `_check_stream` first: the
        retention period may have been raised.
        """
        horizon_seconds, position = session.horizon.observed_seconds, session.read_after
        if may_have_lost(session.read_through_seconds, horizon_seconds):
            self._ports.emit(
                DataLost(
                    **session.names,
                    from_position=session.row.start.type if position is None else str(position.sequence_number),
                    read_through_seconds=session.read_through_seconds,
                    trimmed_through_seconds=horizon_seconds,
                )
            )

    async def _narrow_loss(self, session: Session) -> None:
        """Narrows down what a child shard that was never read may have lost (rule T4). The rows of its ancestors may
        know more than when its own row was created. Only a listing names its parents, and shows whether it opened after
        the trim horizon and so lost nothing.
        """
        if not session.is_unread_child:
            return
        key, shard_id, stream = session.key, session.shard_id, self.streams[session.key.stream_key]
        if shard_id not in stream.graph.listed:
            listing = await list_all_shards(self._ports, session.stream, None)
            stream.graph = stream.graph.extended(shards=listing)
        found = await self._fleet.call(ReadLeases(with_finished=True))
        graph = stream.graph
        if found is None or shard_id not in graph.listed:
            return
        rows = [row for row in found if row.key == replace(key, shard_id=row.key.shard_id)]
        graph, with_rows = graph.extended(rows=rows), [row.key.shard_id for row in rows]
        since = unread_since(graph, shard_id, rows, with_rows)
        known = [time for time in (since, session.read_through_seconds) if time is not None]
        session.learn_read_through(max(known, default=None))
        horizon_seconds = session.horizon.observed_seconds
        if may_have_lost(session.read_through_seconds, horizon_seconds):
            listing = await list_all_shards(self._ports, session.stream, AT_TRIM_HORIZON)
            if opened_after_horizon(graph, shard_id, [shard.shard_id for shard in listing], with_rows):
                session.learn_read_through(horizon_seconds + HORIZON_MARGIN_SECONDS)

    async def _check_stream(self, stream: KnownStream, error: ServiceError | None = None) -> None:
        """Raises if the stream was deleted, or deleted and created again (rule S3)."""
        ports, row = self._ports, stream.row
        summary = await find_summary(ports, stream.name)
        verdict = classify_missing_shard(row, summary)
        if summary is None or verdict == "stream_deleted":
            ports.emit(StreamChanged(stream=row.name, change="the stream was deleted"))
            raise StreamDeletedError(
                f"stream {row.name} was deleted while this application was reading it; nothing was marked as finished"
            ) from error
        if verdict == "stream_recreated":
            ports.emit(StreamChanged(stream=row.name, change="the stream was deleted and created again"))
            raise StreamRecreatedError(
                f"stream {row.name} was deleted and created again while this application was reading it; "
                "restart the worker to read the new stream"
            ) from error
        stream.horizon.observe(summary.retention_hours, self._server_seconds(summary))

    async def _is_gone(self, stream: StreamName, shard_id: str) -> bool:
        """Whether the service says that the shard does not exist. Any other response proves nothing."""
        try:
            await self._ports.kinesis.get_shard_iterator(stream, shard_id, TRIM_HORIZON)
        except AnabranchError as error:
            return isinstance(error, StreamNotFoundError)
        return False

    # listing

    async def run(self) -> None:
        """Lists the streams regularly. A listing only ever adds shards (rule S5)."""
        clock, interval_ms = self._ports.clock, round(self._settings.polling.listing_interval * 1000)
        next_ms = clock.now_ms() + interval_ms
        failing: set[KnownStream] = set()
        """Streams whose last listing failed."""
        while True:
            now_ms = clock.now_ms()
            await self._listings.wait(min(next_ms, now_ms + INQUIRY_INTERVAL_MS) if self._is_inquiring else next_ms)
            self._is_inquiring = False
            is_due = clock.now_ms() >= next_ms
            for stream in self.streams.values():
                try:
                    await self._list_missing(stream, cleans_up=is_due)
                except TRANSIENT as error:
                    failing.add(stream)
                    stream.is_complete = True
                    self._ports.emit(ListingFailed(stream=stream.row.name, error=str(error)))
                else:
                    if stream in failing:
                        failing.remove(stream)
                        self._ports.emit(ListingRecovered(stream=stream.row.name))
            if is_due:
                next_ms = clock.now_ms() + interval_ms

    async def _list_missing(self, stream: KnownStream, *, cleans_up: bool) -> None:
        listing = await self._list(stream, listing_filter(stream.row.origin))
        if self._is_settled(stream, listing):
            stream.is_complete = True
        else:
            await self._create_missing(stream, listing, cleans_up=cleans_up)

    async def _list(self, stream: KnownStream, shard_filter: ShardFilter | None) -> list[Shard]:
        """A listing, used only if the stream is still the same after it."""
        try:
            listing = await list_all_shards(self._ports, stream.name, shard_filter)
        except StreamNotFoundError as error:
            await self._check_stream(stream, error)
            raise
        await self._check_stream(stream)
        return listing

    def _is_settled(self, stream: KnownStream, listing: list[Shard]) -> bool:
        """Whether this listing needs no work, without reading all rows."""
        fleet, settled, stream_key = self._fleet, stream.settled, stream.row.stream_key
        if settled is None or any(key.stream_key == stream_key for key in fleet.vanished):
            return False
        unfinished = None if settled.unfinished is None else fleet.unfinished(stream_key)
        return settled == _Settled(fleet.member_id, _names(listing), unfinished)

    async def _create_missing(self, stream: KnownStream, listing: list[Shard], *, cleans_up: bool) -> None:
        row, planner = stream.row, self._fleet.member_id
        leases = await self._fleet.lease_rows(row)
        if not leases and not self._fleet.is_read(row.stream_key):
            self._fleet.raise_store_reset()  # we never delete all rows, so the store was reset (rule L14)
        graph = stream.graph = stream.graph.extended(shards=listing, rows=leases)
        scope = {shard.shard_id: shard for shard in listing}
        missing, ends = missing_leases(row, graph, scope, leases), ends_to_restore(row, graph, leases)
        # Leases that never had a row are rare in a listing, so each of these may be held by a member.
        unheld = await self._fleet.find_unheld([lease.key for lease in missing]) if missing else ()
        self._is_inquiring |= len(unheld) < len(missing)
        for lease in (*ends, *(lease for lease in missing if lease.key in unheld)):
            is_deleted = lease.is_finished or had_row(lease, leases)
            if not await self._create(lease, planner, is_restored=True, is_deleted=is_deleted):
                return  # the next listing tries again
        stream.is_complete = not missing
        if not missing and not ends:
            self._fleet.forget_vanished(row.stream_key)
            if all(lease.key.shard_id in scope for lease in leases if lease.is_finished):
                behind = accounted_for(graph, leases)
                have_rows = all(shard_id in behind for shard_id in scope)
                # Others wait for their parents: they are created at their end, or by a listing if they are trimmed.
                unfinished = None if have_rows else unfinished_shards(leases)
                stream.settled = _Settled(planner, _names(listing), unfinished)
        if cleans_up:
            await self._clean_up(stream, graph, leases)

    async def _create(self, lease: LeaseRow, planner: str, *, is_restored: bool, is_deleted: bool) -> bool:
        """Returns False if it was not created or there was no answer. `is_restored`: it may have had a row before, and
        no live member holds it. `is_deleted`: it is known to have had one.
        """
        is_deleted = is_deleted or lease.key in self._fleet.vanished
        row = self._restored(lease) if is_restored else lease
        created = await self._fleet.create_lease(row, member_id=planner)
        if is_deleted and created == row:
            self._ports.emit(lease_row_deleted(row, repeats=not row.is_finished))
        self._fleet.wake()
        return created is not None

    def _restored(self, lease: LeaseRow) -> LeaseRow:
        """As it was last seen, except that a stopped record is tried again (rule L18)."""
        # The row may have been written after it was last seen, and version and fence token must still grow. Both grow
        # less than once a second, so the time in seconds is larger. With epoch 0, the take derives the epoch from the
        # parents and the version.
        seconds = self._ports.clock.wall_ms() // 1000
        if lease.is_finished:
            return replace(lease, version=seconds, epoch=seconds)
        known = self._fleet.vanished.get(lease.key) or lease
        # A worker that started while the row was missing does not know that the shard had stopped before (rule D4).
        return replace(known, owner=None, stopped=None, version=seconds, epoch=0, waits_for=lease.waits_for)

    async def _clean_up(self, stream: KnownStream, graph: ShardGraph, leases: list[LeaseRow]) -> None:
        """Removes finished rows once the service proves that their shards are gone (rules S3, S6)."""
        if not any(lease.is_finished for lease in leases):
            return
        listed = [shard.shard_id for shard in await list_all_shards(self._ports, stream.name, None)]
        for lease in removable(leases, graph, listed):
            same = classify_missing_shard(stream.row, await find_summary(self._ports, stream.name)) == "trimmed"
            if same and await self._is_gone(stream.name, lease.key.shard_id):
                await self._fleet.call(DeleteLease(lease.key, lease.version))


def _names(shards: list[Shard]) -> tuple[str, ...]:
    return tuple(sorted(shard.shard_id for shard in shards))
