"""The producer's engine: a buffer for the records of all streams, and one task that sends them.

In each step the task asks every stream that is due which calls to make, starts these calls, and wakes the callers whose
records have an outcome. A step runs after a put, and when a deadline has passed. A response runs a step itself, so its
callers do not wait for the task. There is one timer, and none while the producer is idle.

Puts are queued in call order. While some wait for buffer space, `put_nowait` raises `BufferFull`. Free space goes to
the put that has waited longest. Failures that nobody has seen keep their space; if a full buffer holds nothing else,
the next put raises them.
"""

import asyncio
import inspect
from asyncio import _get_running_loop  # returns None instead of raising
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import msgspec

from anabranch._core.writing.bundles import (
    RECORD_COST_BYTES,
    Bundle,
    OutgoingRecord,
    UnseenFailures,
    WriteOptions,
    cost_of,
)
from anabranch._core.writing.lanes import PutRecordsCall, check_keys
from anabranch._core.writing.stream_writer import StreamWriter, WriteSteps
from anabranch._engine.clock import Alarm
from anabranch._engine.tasks import BackgroundTask, single_cause
from anabranch._engine.writing.process_exit import cancel_report_at_exit, report_at_exit
from anabranch._model.entropy import Entropy
from anabranch._model.hash_keys import wrong_partition_key
from anabranch._model.streams import AT_LATEST, Shard, StreamName, parse_stream
from anabranch._ports import Clock, KinesisWriting
from anabranch._tracing import PutSpan, Tracing
from anabranch._wire.aggregate import TRACE_TAG, Tag
from anabranch._wire.messages import PutRecordsResponse, StreamSummary
from anabranch.errors import (
    AccessDeniedError,
    AnabranchError,
    BufferFull,
    DeliveryFailed,
    ProducerError,
    TransportError,
    UsageError,
)
from anabranch.events import Event, HookFailed, RecordsAbandoned, WriterFailed
from anabranch.records import PutResult
from anabranch.reports import FlushReport, ProducerStatus


class Delivery(OutgoingRecord, gc=False, eq=False):
    """A record given to the producer. `await delivery` returns its `PutResult`: where it was written, or why not.

    Cancelling the await does not cancel the record.
    """

    # There may be millions of deliveries. So each one is the record itself and shares all other state with its bundle.
    # A future exists only while somebody awaits.

    def __await__(self) -> Generator[Any, None, PutResult]:
        while not self.bundle.is_settled:
            future = asyncio.get_running_loop().create_future()
            if self.on_bundle_end(lambda future=future: _wake(future)):  # type: ignore[misc]
                yield from future
        return self.result()

    def __repr__(self) -> str:
        if not self.bundle.is_settled:
            state = "pending"
        else:
            state = "delivered" if self.bundle.sequence_number is not None else "failed"
        return f"<Delivery to {self.bundle.stream}, partition key {self.partition_key!r}: {state}>"

    def done(self) -> bool:
        return self.bundle.is_settled

    def result(self) -> PutResult:
        """The outcome. Reading a failure marks it as seen."""
        if not self.bundle.is_settled:
            raise asyncio.InvalidStateError("this record is still pending: await it")
        failures = self.bundle.failures
        if failures is not None and failures.mark_seen(self):
            failures.owner.on_failure_seen(self)
        return self.put_result

    def on_bundle_end(self, callback: Callable[[], None]) -> bool:
        """Calls back once when its bundle is settled, or when the record moves to another bundle. False if that has
        happened already.
        """
        bundle: Bundle = self.bundle
        if bundle.waiters is None:
            bundle.waiters = []
        bundle.waiters.append((self, callback))
        # Checked after adding the callback: another thread may be settling the bundle right now.
        return not (bundle.is_settled or bundle is not self.bundle)


class TracedDelivery(Delivery, gc=False, eq=False):
    put_span: PutSpan
    carries_parent: bool
    """Whether the trace's parent is sent with the record. Not if the record is too large for an aggregate."""

    @property
    def tags(self) -> tuple[Tag, ...]:
        return (Tag(TRACE_TAG, self.put_span.trace_parent),) if self.carries_parent else ()


def _wake(future: asyncio.Future[None]) -> None:
    loop = future.get_loop()
    if loop is _get_running_loop():
        _resolve(future)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _QueuedPut(msgspec.Struct, frozen=True):
    """A put that waits for buffer space."""

    stream: str
    data: bytes
    partition_key: str
    explicit_hash_key: str | None
    cost_bytes: int
    future: asyncio.Future[Delivery]
    put_span: PutSpan | None


def _put_traced(
    writer: StreamWriter[Delivery],
    data: bytes,
    partition_key: str,
    explicit_hash_key: str | None,
    cost_bytes: int,
    now_ms: int,
    span: PutSpan,
) -> Delivery:
    bundle: Any = None  # `put_record` sets it
    carries_parent = len(data) <= writer.tagged_bytes_max
    record = TracedDelivery(bundle, 0, partition_key, explicit_hash_key, data, now_ms, span, carries_parent)
    return writer.put_record(record, cost_bytes, now_ms)


def delivery_failed(results: list[PutResult]) -> DeliveryFailed:
    first = results[0]
    more = f", and {len(results) - 1} more" if len(results) > 1 else ""
    return DeliveryFailed(
        f"a record for stream {first.stream} with partition key {first.partition_key!r} was not delivered "
        f"({first.error}){more}",
        results=results,
    )


async def _list_stream(
    kinesis: KinesisWriting, stream: StreamName, *, with_summary: bool
) -> tuple[list[Shard], StreamSummary | None] | AnabranchError:
    """All open shards, and the summary if it is wanted and permitted."""
    summary = None
    try:
        if with_summary:
            # Many producers lack this permission. Without a summary we assume that the hash key of a record selects its
            # shard. Only streams with the record distribution AUTO differ.
            with suppress(AccessDeniedError):
                summary = await kinesis.describe_stream_summary(stream)
        answer = await kinesis.list_shards(stream, shard_filter=AT_LATEST)
        shards = list(answer.shards)
        while answer.next_token is not None:
            answer = await kinesis.list_shards(stream, next_token=answer.next_token)
            shards += answer.shards
    except AnabranchError as error:
        return error
    except Exception as error:  # noqa: BLE001 -- supervisor: the listing is retried, records are not aggregated until then
        return TransportError(f"unexpected error while listing shards: {error!r}")
    return shards, summary


def _end_spans(bundle: Bundle) -> None:
    for record in bundle.records:
        if isinstance(record, TracedDelivery):
            record.put_span.end(record.put_result)


@dataclass(eq=False, repr=False)
class Writer:
    """Created on the event loop that it runs on."""

    _kinesis: KinesisWriting
    _clock: Clock
    _entropy: Entropy
    _options: WriteOptions
    _: KW_ONLY
    buffer_bytes: int
    on_undelivered: Callable[[PutResult], Any] | None
    emit: Callable[[Event], None]
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self.used_bytes = 0
        """The bytes of pending records, and of failures that nobody has seen."""
        self._streams: dict[str, StreamWriter[Delivery]] = {}
        # the buffer
        self._limit_bytes = self.buffer_bytes
        """The limit for puts that do not wait; -1 (none may be put) while others wait, and after the end."""
        self._queue: deque[_QueuedPut] = deque()
        self._seen: deque[OutgoingRecord] = deque()
        """Failures that were seen, also from other threads. The next step frees their space."""
        self._cached_now_ms: int | None = None
        # the task
        self._loop = asyncio.get_running_loop()
        self._main_task = BackgroundTask()
        self._tasks = asyncio.TaskGroup()
        self._alarm = Alarm(self._clock)
        self._is_awake = False
        """Whether a step is due or running anyway, so a put need not wake the task."""
        self._armed_ms: int | None = None
        """When the timer will wake the task; None if there is no timer."""
        self._flush_alarms: list[Alarm] = []
        """One for each flush that waits. They ring after each step."""
        # the end
        self._stop_error: AnabranchError | None = None
        """Why no new puts are accepted. The first reason stays."""
        self._failure: ProducerError | None = None
        """The unexpected error that ended the task."""
        self._is_closing = False
        """`close` will raise the unseen failures, so they need no log line."""

    # start and end

    def start(self) -> None:
        self._main_task.start(self._run(), "anabranch-producer")

    async def close(self, deadline_ms: int | None) -> FlushReport:
        """Delivers everything, or fails what cannot be delivered in time. Raises the unseen failures."""
        self._stop(UsageError("this producer is closed"))
        self._is_closing = True
        try:
            await self._flush(deadline_ms)
        except BaseException:
            self._is_closing = False  # cancelled: log the failures instead
            raise
        finally:
            await self._main_task.cancel()
            cancel_report_at_exit(self.report_unfinished)
        self._raise_unseen()
        if self._failure is not None:
            raise self._failure
        return FlushReport()

    async def _run(self) -> None:
        try:
            async with self._tasks:
                while True:
                    self._armed_ms = self._step()
                    await self._alarm.wait(self._armed_ms)
        except Exception as error:  # noqa: BLE001 -- supervisor: after any error every record gets an outcome
            if not self._loop.is_closed():  # otherwise the loop ended without finishing this task
                self._fail(error)
        finally:
            self._abandon()
            if not self._is_closing and self._failure is None:
                self.report_unfinished()

    def report_unfinished(self) -> None:
        """Reports records that neither `flush` nor `close` will report."""
        cancel_report_at_exit(self.report_unfinished)
        for writer in self._streams.values():
            if record_count := writer.count_unfinished():
                self.emit(RecordsAbandoned(stream=writer.stream, record_count=record_count))

    def _stop(self, error: AnabranchError) -> None:
        """Rejects new puts. Those that wait for space may still get it."""
        self._limit_bytes = -1
        self._stop_error = self._stop_error or error

    def _fail(self, error: Exception) -> None:
        cause = single_cause(error)
        failure = ProducerError(f"this producer has failed: {cause!r}")
        failure.__cause__ = cause
        self._failure = failure
        self._stop(failure)
        record_count = sum(writer.count_unfinished() for writer in self._streams.values())
        self.emit(WriterFailed(error=repr(cause), record_count=record_count))

    def _abandon(self) -> None:
        """The task ends: the remaining records get an outcome, and all waiters are woken.

        Also runs after an unexpected error, so it relies only on the list of bundles.
        """
        now_ms = self._clock.now_ms()
        failure = None if self._failure is None else str(self._failure)
        for writer in self._streams.values():
            self._perform(writer, writer.abandon(failure, now_ms))
        self._stop(UsageError("the event loop of this producer has ended"))
        for queued in self._queue:
            if not queued.future.done():
                queued.future.set_exception(self._full_error(queued.cost_bytes))
        self._queue.clear()
        for alarm in self._flush_alarms:
            alarm.ring()

    # putting

    def put_nowait(self, stream: str, data: bytes, partition_key: str, explicit_hash_key: str | None) -> Delivery:
        try:
            cost_bytes = len(data) + len(partition_key) + RECORD_COST_BYTES  # `cost_of`, inlined for speed
            if self.used_bytes + cost_bytes > self._limit_bytes:
                check_keys(partition_key, explicit_hash_key)
                raise self._full_error(cost_bytes)
            writer = self._streams.get(stream) or self._open(stream)
            now_ms = self._cached_now_ms or self._cache_now()
            try:
                if self.tracing is None:
                    delivery = writer.put(data, partition_key, explicit_hash_key, cost_bytes, now_ms)
                else:
                    put = self._put_with_span
                    delivery = put(writer, data, partition_key, explicit_hash_key, cost_bytes, now_ms)
                self.used_bytes += cost_bytes
            finally:
                if not self._is_awake and writer.tick_at_ms == 0:
                    self._wake()
        except TypeError:
            if not isinstance(partition_key, str):  # checked only after an error, for speed
                raise wrong_partition_key(partition_key) from None
            raise
        return delivery

    def _put_with_span(
        self,
        writer: StreamWriter[Delivery],
        data: bytes,
        partition_key: str,
        explicit_hash_key: str | None,
        cost_bytes: int,
        now_ms: int,
    ) -> Delivery:
        """Like `StreamWriter.put`, with a span for tracing."""
        assert self.tracing is not None
        span = self.tracing.begin_put(writer.name.name, partition_key)
        if span is None:
            return writer.put(data, partition_key, explicit_hash_key, cost_bytes, now_ms)
        try:
            return _put_traced(writer, data, partition_key, explicit_hash_key, cost_bytes, now_ms, span)
        except Exception as error:
            span.fail(repr(error))
            raise

    def put_some(
        self,
        stream: str,
        items: Iterator[tuple[str, Any]],
        unencoded_type: type | None,
        encode: Callable[[Any], bytes],
        deliveries: list[Delivery],
    ) -> tuple[str, bytes] | None:
        """Like `put_nowait` in a loop, but faster. Returns the first item that does not fit; None if all did.

        A value whose type is exactly `unencoded_type` is put as it is; `encode` gets all others.
        """
        writer = self._streams.get(stream) or self._open(stream)
        put, append = writer.put, deliveries.append
        if self.tracing is not None:
            put = partial(self._put_with_span, writer)
        now_ms = self._cached_now_ms or self._cache_now()
        partition_key: Any = ""
        try:
            for partition_key, value in items:
                data: Any = value if type(value) is unencoded_type else encode(value)
                cost_bytes = len(data) + len(partition_key) + RECORD_COST_BYTES  # `cost_of`, inlined for speed
                # `used_bytes` is read again for each item, because the iterator may put records itself.
                used_bytes = self.used_bytes + cost_bytes
                if used_bytes > self._limit_bytes:
                    return partition_key, data
                append(put(data, partition_key, None, cost_bytes, now_ms))
                self.used_bytes = used_bytes
        except TypeError:
            if not isinstance(partition_key, str):
                raise wrong_partition_key(partition_key) from None
            raise
        finally:
            if not self._is_awake and writer.tick_at_ms == 0:
                self._wake()
        return None

    async def put(
        self, stream: str, data: bytes, partition_key: str, explicit_hash_key: str | None, wait_seconds: float | None
    ) -> Delivery:
        """Waits for buffer space, behind the puts that already wait. Does not wait for the delivery."""
        if not isinstance(partition_key, str):
            raise wrong_partition_key(partition_key)
        cost_bytes = cost_of(data, partition_key)
        if self.used_bytes + cost_bytes <= self._limit_bytes:
            return self.put_nowait(stream, data, partition_key, explicit_hash_key)
        if self._stop_error is not None or cost_bytes > self.buffer_bytes:
            raise self._full_error(cost_bytes)
        check_keys(partition_key, explicit_hash_key)  # raises before the wait, not after it
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        span = None if self.tracing is None else self.tracing.begin_put(stream, partition_key)
        self._queue.append(_QueuedPut(stream, data, partition_key, explicit_hash_key, cost_bytes, future, span))
        self._limit_bytes = -1
        self._wake()
        try:
            async with asyncio.timeout(wait_seconds):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # space was freed just before the timeout, and the record was put
            raise BufferFull(f"no space in the buffer of {self.buffer_bytes} bytes within {wait_seconds} s") from None
        finally:
            if span is not None and (not future.done() or future.cancelled() or future.exception() is not None):
                span.fail("the record was not put")

    def _cache_now(self) -> int:
        """Caches the time for this turn of the event loop, so a burst of puts reads the clock once."""
        self._cached_now_ms = now_ms = self._clock.now_ms()
        asyncio.get_running_loop().call_soon(self._forget_now)
        return now_ms

    def _forget_now(self) -> None:
        self._cached_now_ms = None

    def _open(self, stream: str) -> StreamWriter[Delivery]:
        name = parse_stream(stream)
        writer = StreamWriter(name, self._options, Delivery, self, entropy=self._entropy)
        self._streams[stream] = writer
        return writer

    def status(self) -> ProducerStatus:
        now_ms = self._clock.now_ms()
        return ProducerStatus(
            error=None if self._failure is None else str(self._failure),
            buffered_bytes=self.used_bytes,
            buffer_limit_bytes=self.buffer_bytes,
            waiting_count=len(self._queue),
            streams=tuple(writer.writes(now_ms) for writer in list(self._streams.values())),
        )

    # space

    @property
    def is_empty(self) -> bool:
        """No pending records, no unseen failures and no waiting puts."""
        return not self.used_bytes and not self._queue

    def _admit(self) -> None:
        """Gives free space to waiting puts, first come first served."""
        while self._seen:
            record = self._seen.popleft()
            self.used_bytes -= cost_of(record.data, record.partition_key)
        while self._queue:
            queued = self._queue[0]
            if not queued.future.done():
                if self.used_bytes + queued.cost_bytes <= self.buffer_bytes:
                    self._put_queued(queued)
                elif self._holds_failures_only and (failed := self._take_unseen()):
                    queued.future.set_exception(delivery_failed(failed))
                else:
                    return
            self._queue.popleft()
        if self._stop_error is None:
            self._limit_bytes = self.buffer_bytes

    def _put_queued(self, queued: _QueuedPut) -> None:
        try:
            writer = self._streams.get(queued.stream) or self._open(queued.stream)
            put, span, now_ms = writer.put, queued.put_span, self._clock.now_ms()
            if span is not None:
                put = partial(_put_traced, writer, span=span)
            delivery = put(queued.data, queued.partition_key, queued.explicit_hash_key, queued.cost_bytes, now_ms)
        except ValueError as error:
            queued.future.set_exception(error)
        else:
            self.used_bytes += queued.cost_bytes
            queued.future.set_result(delivery)

    def _full_error(self, cost_bytes: int) -> Exception:
        if self._stop_error is not None:
            return self._stop_error
        if cost_bytes > self.buffer_bytes:
            return ValueError(
                f"the record needs {cost_bytes} bytes and the whole buffer has {self.buffer_bytes}: raise buffer_bytes"
            )
        if self._holds_failures_only and (failed := self._take_unseen()):
            return delivery_failed(failed)
        return BufferFull(f"the buffer of {self.buffer_bytes} bytes is full: await put(), or try again later")

    @property
    def _holds_failures_only(self) -> bool:
        return all(writer.is_idle for writer in self._streams.values())

    def on_failure_seen(self, record: OutgoingRecord) -> None:
        """Called by handles, also in other threads: the space is freed by the next step."""
        self._seen.append(record)
        self._wake()

    def _take_unseen(self) -> list[PutResult]:
        failed = [record for writer in self._streams.values() for record in writer.failures.take_all()]
        for record in failed:
            self.used_bytes -= cost_of(record.data, record.partition_key)
        if failed:
            self._wake()  # others may wait for the space
        return [record.put_result for record in failed]

    def _raise_unseen(self) -> None:
        if failed := self._take_unseen():
            raise delivery_failed(failed)

    # flushing

    async def flush(self, deadline_ms: int | None) -> FlushReport:
        """Waits until everything put before is settled, or until the deadline."""
        if self._stop_error is not None:
            raise self._stop_error
        is_complete = await self._flush(deadline_ms)
        self._raise_unseen()
        if not self._main_task.is_running and self._stop_error is not None:
            raise self._stop_error
        pending_count = 0 if is_complete else sum(writer.count_pending() for writer in self._streams.values())
        return FlushReport(is_complete, pending_count)

    async def _flush(self, deadline_ms: int | None) -> bool:
        if self._queue and not await self._wait_until(self._queue[-1].future.done, deadline_ms):
            return False
        now_ms = self._clock.now_ms()
        try:
            epochs = [(writer, writer.flush(now_ms)) for writer in self._streams.values()]
        finally:
            self._wake()
        return await self._wait_until(lambda: all(writer.is_flushed(epoch) for writer, epoch in epochs), deadline_ms)

    async def _wait_until(self, is_over: Callable[[], bool], deadline_ms: int | None) -> bool:
        alarm = Alarm(self._clock)
        self._flush_alarms.append(alarm)
        try:
            while self._main_task.is_running and not is_over():
                if deadline_ms is not None and self._clock.now_ms() >= deadline_ms:
                    break
                await alarm.wait(deadline_ms)
        finally:
            self._flush_alarms.remove(alarm)
        return is_over()

    # steps

    def _wake(self) -> None:
        if self._main_task.is_running:
            report_at_exit(self.report_unfinished)
        self._is_awake = True
        self._alarm.ring()

    def _step(self) -> int | None:
        """Does everything that can be done now. Returns the time of the next deadline."""
        self._is_awake = True  # this step also handles what is put during it
        now_ms, wall_ms = self._clock.now_ms(), self._clock.wall_ms()
        self._admit()
        for writer in list(self._streams.values()):
            while writer.tick_at_ms is not None and writer.tick_at_ms <= now_ms:
                self._perform(writer, writer.tick(now_ms, wall_ms))
                self._admit()
        self._is_awake = False
        if self.is_empty:
            cancel_report_at_exit(self.report_unfinished)
        for alarm in self._flush_alarms:
            alarm.ring()
        deadlines = (writer.tick_at_ms for writer in self._streams.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _step_after_response(self) -> None:
        """Takes a step now. Wakes the task only if its timer has to change. A timer that is too early may stay, unless
        none is needed.
        """
        deadline_ms, armed_ms = self._step(), self._armed_ms
        timer_is_right = armed_ms is None if deadline_ms is None else armed_ms is not None and armed_ms <= deadline_ms
        if not timer_is_right:
            self._wake()

    async def _send(self, writer: StreamWriter[Delivery], call: PutRecordsCall) -> None:
        response: PutRecordsResponse | AnabranchError
        try:
            response = await self._kinesis.put_records(writer.name, call.entries)
        except AnabranchError as error:
            response = error
        except Exception as error:  # noqa: BLE001 -- supervisor: a bug must not block the records of this call
            response = TransportError(f"unexpected error in PutRecords: {error!r}")
        self._perform(writer, writer.on_response(call, response, self._clock.now_ms()))
        self._step_after_response()

    async def _refresh(self, writer: StreamWriter[Delivery]) -> None:
        listed = await _list_stream(self._kinesis, writer.name, with_summary=writer.wants_summary)
        now_ms = self._clock.now_ms()
        if isinstance(listed, AnabranchError):
            self._perform(writer, writer.on_listing_failed(listed, now_ms))
        else:
            self._perform(writer, writer.on_listing(*listed, now_ms))
        self._step_after_response()

    # what the core decided

    def _perform(self, writer: StreamWriter[Delivery], steps: WriteSteps) -> None:
        while steps.events:
            self.emit(steps.events.popleft())
        for call in steps.calls:
            self._tasks.create_task(self._send(writer, call))
        if steps.refresh:
            self._tasks.create_task(self._refresh(writer))
        while steps.ended:
            bundle = steps.ended.popleft()
            if self.tracing is not None and bundle.is_settled:
                _end_spans(bundle)
            try:
                if bundle.failures is not None:
                    self._report_failures(bundle.failures, bundle)
                elif bundle.is_settled:
                    self.used_bytes -= bundle.cost_bytes
            finally:
                waiters, bundle.waiters = bundle.waiters, None
                for _, wake in waiters or ():
                    wake()
            bundle.release()

    def _report_failures(self, failures: UnseenFailures, bundle: Bundle) -> None:
        """Reports each failure to the tasks that await the record, or else to the hook, or else in the next flush."""
        awaited = {id(record) for record, _ in bundle.waiters or ()}
        for record in bundle.records:
            if id(record) in awaited:
                self._mark_seen(failures, record)
            elif self.on_undelivered is not None:
                self._call_hook(self.on_undelivered, record, failures)

    def _mark_seen(self, failures: UnseenFailures, record: Delivery) -> None:
        if failures.mark_seen(record):
            self.used_bytes -= cost_of(record.data, record.partition_key)

    def _call_hook(self, hook: Callable[[PutResult], Any], record: Delivery, failures: UnseenFailures) -> None:
        self._mark_seen(failures, record)  # first, because the hook may put the record again
        try:
            returned = hook(record.put_result)
            if inspect.iscoroutine(returned):
                returned.close()
                raise TypeError("on_undelivered is an async function; pass a plain function")  # noqa: TRY301 -- as below
        except Exception as error:  # noqa: BLE001 -- supervisor: the next flush raises the failure instead
            self.emit(HookFailed(stream=record.bundle.stream, hook="on_undelivered", error=repr(error)))
            failures.add([record])
            self.used_bytes += cost_of(record.data, record.partition_key)
