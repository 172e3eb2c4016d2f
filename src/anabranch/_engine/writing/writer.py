"""The handle that a put returns: a record on its way, awaitable for how it ended.

There may be millions of them, so a handle is the record itself and shares all state with the others of its bundle;
a future exists only while somebody awaits. Awaiting never changes the outcome: a cancelled await leaves the record
on its way.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

import msgspec

from anabranch._core.writing.bundles import RECORD_COST_BYTES, Bundle, Failures, OutgoingRecord, cost_of
from anabranch._core.writing.lanes import Call, check_keys
from anabranch._core.writing.pipeline import Pipeline, WritingRules
from anabranch._engine.clock import Alarm
from anabranch._engine.tasks import BackgroundTask, single_cause
from anabranch._engine.writing.process_exit import tell_at_exit, tell_no_more
from anabranch._model.entropy import Entropy
from anabranch._model.hash_keys import check_partition_key, wrong_partition_key
from anabranch._model.streams import AT_LATEST, Shard, StreamName, parse_stream
from anabranch._ports import Clock, KinesisWriting
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
from anabranch.reports import FlushReport


class Delivery(OutgoingRecord, gc=False, eq=False):
    """A record given to the producer. `await delivery` returns its `PutResult`: delivered, or not and why."""

    def __await__(self) -> Generator[Any, None, PutResult]:
        while not self.bundle.is_settled:
            future = asyncio.get_running_loop().create_future()
            if self.when_moved(lambda future=future: _wake(future)):  # type: ignore[misc]
                yield from future
        return self.result()

    def __repr__(self) -> str:
        if not self.bundle.is_settled:
            state = "on its way"
        else:
            state = "delivered" if self.bundle.sequence_number is not None else "failed"
        return f"<Delivery to {self.bundle.stream}, partition key {self.partition_key!r}: {state}>"

    def done(self) -> bool:
        return self.bundle.is_settled

    def result(self) -> PutResult:
        """How it ended. Looking at a failure acknowledges it."""
        if not self.bundle.is_settled:
            raise asyncio.InvalidStateError("this record is still on its way: await it")
        result = self.put_result
        if not result.delivered:
            self.bundle.failures.see(self)
        return result

    def when_moved(self, callback: Callable[[], None]) -> bool:
        """Calls back once when its bundle is settled, or its records went on in another. False: that has happened."""
        bundle: Bundle = self.bundle
        if bundle.waiters is None:
            bundle.waiters = []
        bundle.waiters.append((self, callback))
        # Looked at after the callback is in place: another thread may be settling the bundle right now.
        return not (bundle.is_settled or bundle is not self.bundle)


def _wake(future: asyncio.Future[None]) -> None:
    loop = future.get_loop()
    if loop is _running_loop():
        _resolve(future)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_resolve, future)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class WrittenStream(msgspec.Struct, frozen=True):
    name: StreamName
    pipeline: Pipeline[Delivery]


class _QueuedPut(msgspec.Struct, frozen=True):
    """A put that waits for room."""

    stream: str
    data: bytes
    partition_key: str
    explicit_hash_key: str | None
    cost_bytes: int
    future: asyncio.Future[Delivery]


class Intake:
    def __init__(
        self,
        clock: Clock,
        make_pipeline: Callable[[str], Pipeline[Delivery]],
        *,
        buffer_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        self.used_bytes = 0
        """What the records on their way weigh, and the failures that nobody has seen."""
        self.streams: dict[str, WrittenStream] = {}
        self.is_awake = False
        """Whether the writer knows already that there is something to do."""
        self._clock = clock
        self._make_pipeline = make_pipeline
        self._buffer_bytes = buffer_bytes
        self._wake = wake
        self._limit_bytes = buffer_bytes
        """As long as puts are taken at once; below zero while others wait, or after the end."""
        self._refusal: AnabranchError | None = None
        self._queue: deque[_QueuedPut] = deque()
        self._turn_ms: int | None = None

    # putting

    def put_nowait(self, stream: str, data: bytes, partition_key: str, explicit_hash_key: str | None) -> Delivery:
        if not isinstance(partition_key, str):
            raise wrong_partition_key(partition_key)
        cost_bytes = len(data) + len(partition_key) + RECORD_COST_BYTES
        if self.used_bytes + cost_bytes > self._limit_bytes:
            check_keys(partition_key, explicit_hash_key)
            raise self._why_not(cost_bytes)
        found = self.streams.get(stream)
        if found is None:
            found = self._open(stream)
        pipeline = found.pipeline
        now_ms = self._turn_ms
        if now_ms is None:
            now_ms = self._read_clock()
        try:
            delivery = pipeline.put(data, partition_key, explicit_hash_key, cost_bytes, now_ms)
            self.used_bytes += cost_bytes
        finally:
            if pipeline.wants_tick and not self.is_awake:
                self._wake()
        return delivery

    def put_some(
        self,
        stream: str,
        items: Iterator[tuple[str, Any]],
        as_is: type | None,
        encode: Callable[[Any], bytes],
        deliveries: list[Delivery],
    ) -> tuple[str, bytes] | None:
        """As `put_nowait` in a loop without a call to spare, until there is no room for the item that is returned."""
        pipeline = (self.streams.get(stream) or self._open(stream)).pipeline
        put, append = pipeline.put, deliveries.append
        now_ms = self._turn_ms or self._read_clock()
        try:
            for partition_key, value in items:
                if not isinstance(partition_key, str):
                    raise wrong_partition_key(partition_key)
                data: Any = value if type(value) is as_is else encode(value)
                cost_bytes = len(data) + len(partition_key) + RECORD_COST_BYTES
                # Looked at for each: the items may come from code that puts records itself.
                used_bytes = self.used_bytes + cost_bytes
                if used_bytes > self._limit_bytes:
                    return partition_key, data
                append(put(data, partition_key, None, cost_bytes, now_ms))
                self.used_bytes = used_bytes
        finally:
            if pipeline.wants_tick and not self.is_awake:
                self._wake()
        return None

    async def put(
        self, stream: str, data: bytes, partition_key: str, explicit_hash_key: str | None, wait_seconds: float | None
    ) -> Delivery:
        """Waits for room only, behind all who wait already."""
        check_partition_key(partition_key)
        cost_bytes = cost_of(data, partition_key)
        if self.used_bytes + cost_bytes <= self._limit_bytes:
            return self.put_nowait(stream, data, partition_key, explicit_hash_key)
        if self._refusal is not None or cost_bytes > self._buffer_bytes:
            raise self._why_not(cost_bytes)
        check_keys(partition_key, explicit_hash_key)  # a mistake is told to its caller now, not when there is room
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._queue.append(_QueuedPut(stream, data, partition_key, explicit_hash_key, cost_bytes, future))
        self._limit_bytes = -1
        self._wake()
        try:
            async with asyncio.timeout(wait_seconds):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # room came at the last moment: the record is on its way
            raise BufferFull(
                f"there was no room in the buffer of {self._buffer_bytes} bytes for {wait_seconds} s"
            ) from None

    def _read_clock(self) -> int:
        """Once for each turn of the event loop: a burst of puts costs one look at the clock."""
        self._turn_ms = now_ms = self._clock.now_ms()
        asyncio.get_running_loop().call_soon(self._forget_clock)
        return now_ms

    def _forget_clock(self) -> None:
        self._turn_ms = None

    def _open(self, stream: str) -> WrittenStream:
        name = parse_stream(stream)
        pipeline = self._make_pipeline(stream)
        pipeline.failures.on_seen = self._wake
        self.streams[stream] = opened = WrittenStream(name, pipeline)
        return opened

    def _why_not(self, cost_bytes: int) -> Exception:
        if self._refusal is not None:
            return self._refusal
        if cost_bytes > self._buffer_bytes:
            return ValueError(
                f"this record needs {cost_bytes} bytes and the buffer has {self._buffer_bytes} in all: raise it"
            )
        if self._holds_failures_only and (failed := self.take_unseen()):
            return failure_of(failed)
        return BufferFull(f"the buffer of {self._buffer_bytes} bytes is full: await put(), or try again later")

    # room

    @property
    def is_empty(self) -> bool:
        """Nothing on its way, and no failure unseen."""
        return not self.used_bytes and not self._queue

    @property
    def last_in_queue(self) -> "asyncio.Future[Delivery] | None":
        return self._queue[-1].future if self._queue else None

    @property
    def _holds_failures_only(self) -> bool:
        return all(stream.pipeline.is_idle for stream in self.streams.values())

    def in_turn(self) -> list[WrittenStream]:
        """Each stream is first once: none is always served last."""
        streams = list(self.streams.values())
        if len(streams) > 1:
            first = next(iter(self.streams))
            self.streams[first] = self.streams.pop(first)
        return streams

    def admit(self) -> None:
        """Gives room to those who wait for it, in the order in which they came."""
        while self._queue:
            queued = self._queue[0]
            if not queued.future.done():
                if self.used_bytes + queued.cost_bytes <= self._buffer_bytes:
                    self._put_queued(queued)
                elif self._holds_failures_only and (failed := self.take_unseen()):
                    queued.future.set_exception(failure_of(failed))
                else:
                    return
            self._queue.popleft()
        if self._refusal is None:
            self._limit_bytes = self._buffer_bytes

    def _put_queued(self, queued: _QueuedPut) -> None:
        try:
            stream = self.streams.get(queued.stream) or self._open(queued.stream)
            delivery = stream.pipeline.put(
                queued.data, queued.partition_key, queued.explicit_hash_key, queued.cost_bytes, self._clock.now_ms()
            )
        except ValueError as error:
            queued.future.set_exception(error)
        else:
            self.used_bytes += queued.cost_bytes
            queued.future.set_result(delivery)

    @property
    def refusal(self) -> AnabranchError | None:
        """Why nothing is taken any more; the first reason stays."""
        return self._refusal

    def stop(self, refusal: AnabranchError) -> None:
        """Who waits for room may still get it; nobody else does."""
        self._limit_bytes = -1
        self._refusal = self._refusal or refusal

    def turn_away(self) -> None:
        """Nobody gets room any more."""
        for queued in self._queue:
            if not queued.future.done():
                queued.future.set_exception(self._why_not(queued.cost_bytes))
        self._queue.clear()

    # failures

    def free(self) -> None:
        """Gives back the room of failures that have been seen."""
        for stream in self.streams.values():
            self.used_bytes -= stream.pipeline.failures.take_freed_bytes()

    def take_unseen(self) -> list[PutResult]:
        failed = [
            record.put_result for stream in self.streams.values() for record in stream.pipeline.failures.see_all()
        ]
        self.free()
        return failed


def failure_of(results: list[PutResult]) -> DeliveryFailed:
    first = results[0]
    more = f", and {len(results) - 1} more" if len(results) > 1 else ""
    return DeliveryFailed(
        f"a record for stream {first.stream} with partition key {first.partition_key!r} was not delivered "
        f"({first.error}){more}",
        results=results,
    )


async def send(kinesis: KinesisWriting, stream: StreamName, call: Call) -> PutRecordsResponse | AnabranchError:
    try:
        return await kinesis.put_records(stream, call.entries)
    except AnabranchError as error:
        return error
    except Exception as error:  # noqa: BLE001 -- supervisor: a fault of ours must not hold back the records of this call
        return TransportError(f"the call ended in an unexpected error: {error!r}")


async def list_stream(
    kinesis: KinesisWriting, stream: StreamName, *, with_summary: bool
) -> tuple[list[Shard], StreamSummary | None] | AnabranchError:
    """All open shards, and the summary if it is wanted and permitted."""
    try:
        summary = await _describe(kinesis, stream) if with_summary else None
        answer = await kinesis.list_shards(stream, shard_filter=AT_LATEST)
        shards = list(answer.shards)
        while answer.next_token is not None:
            answer = await kinesis.list_shards(stream, next_token=answer.next_token)
            shards += answer.shards
    except AnabranchError as error:
        return error
    except Exception as error:  # noqa: BLE001 -- supervisor: the map is asked for again, records go alone meanwhile
        return TransportError(f"the listing ended in an unexpected error: {error!r}")
    return shards, summary


async def _describe(kinesis: KinesisWriting, stream: StreamName) -> StreamSummary | None:
    try:
        return await kinesis.describe_stream_summary(stream)
    except AccessDeniedError:
        return None  # many writers may not describe: then keys decide the shard, as they nearly always do


class _Wait(msgspec.Struct, frozen=True):
    """Somebody waits for a state of the writer, which is looked at after each step."""

    is_over: Callable[[], bool]
    deadline_ms: int | None
    future: asyncio.Future[bool]


class Writer:
    def __init__(
        self,
        kinesis: KinesisWriting,
        clock: Clock,
        entropy: Entropy,
        rules: WritingRules,
        *,
        buffer_bytes: int,
        on_undelivered: Callable[[PutResult], Any] | None,
        emit: Callable[[Event], None],
    ) -> None:
        def make_pipeline(stream: str) -> Pipeline[Delivery]:
            return Pipeline(stream, rules, Delivery, entropy=entropy, notify=emit)

        self.intake = Intake(clock, make_pipeline, buffer_bytes=buffer_bytes, wake=self._wake)
        self._kinesis = kinesis
        self._clock = clock
        self._on_undelivered = on_undelivered
        self._emit = emit
        self._waits: list[_Wait] = []
        self._calls: dict[int, Call] = {}
        self._failure: ProducerError | None = None
        self._is_closing = False
        """Whoever closes is told of the failures that nobody has seen."""
        self._alarm = Alarm(clock)
        self._armed_ms: int | None = None
        self._host = BackgroundTask()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None

    # life

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._host.start(self._run(), "anabranch-producer")

    async def close(self, deadline_ms: int | None) -> FlushReport:
        """Delivers everything, or fails what could not be delivered in time. Raises the failures nobody has seen."""
        self.intake.stop(UsageError("this producer is closed"))
        self._is_closing = True
        try:
            await self._flush(deadline_ms)
        except BaseException:
            self._is_closing = False  # cut off: the log is told instead
            raise
        finally:
            await self._host.cancel()
            tell_no_more(self)
        self._raise_unseen()
        if self._failure is not None:
            raise self._failure
        return FlushReport()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    self._armed_ms = self._step()
                    await self._alarm.wait(self._armed_ms)
        except Exception as error:  # noqa: BLE001 -- supervisor: whatever broke, every record gets its outcome
            if self._loop is None or not self._loop.is_closed():  # else the task is what a loop left behind
                self._fail(error)
        finally:
            self._abandon()
            if not self._is_closing and self._failure is None:
                self.tell_unfinished()

    def tell_unfinished(self) -> None:
        """Nobody will be told by a flush or a close."""
        tell_no_more(self)
        for stream in self.intake.streams.values():
            if record_count := stream.pipeline.count_unfinished():
                self._emit(RecordsAbandoned(stream=str(stream.name), record_count=record_count))

    def _fail(self, error: Exception) -> None:
        cause = single_cause(error)
        failure = ProducerError(f"this producer has failed: {cause!r}")
        failure.__cause__ = cause
        self._failure = failure
        self.intake.stop(failure)
        record_count = sum(stream.pipeline.count_unfinished() for stream in self.intake.streams.values())
        self._emit(WriterFailed(error=repr(cause), record_count=record_count))

    def _abandon(self) -> None:
        """The host ends: what is left gets its outcome, and whoever waits is woken.

        After an unexpected error too, so it relies on nothing but the list of bundles.
        """
        now_ms = self._clock.now_ms()
        failure = None if self._failure is None else str(self._failure)
        self._calls.clear()
        for stream in self.intake.streams.values():
            stream.pipeline.abandon(failure, now_ms)
            self._settle(stream)
        self.intake.stop(UsageError("the event loop of this producer has ended"))
        self.intake.turn_away()
        for wait in self._waits:
            if not wait.future.done():
                wait.future.set_result(wait.is_over())
        self._waits.clear()

    # flushing

    async def flush(self, deadline_ms: int | None) -> FlushReport:
        """A barrier: everything put before is settled when it returns, unless the deadline came first."""
        if self.intake.refusal is not None:
            raise self.intake.refusal
        is_complete = await self._flush(deadline_ms)
        self._raise_unseen()
        if not self._host.is_running and self.intake.refusal is not None:
            raise self.intake.refusal
        return FlushReport(is_complete, 0 if is_complete else self._count_pending())

    async def _flush(self, deadline_ms: int | None) -> bool:
        last = self.intake.last_in_queue
        if last is not None and not await self._until(last.done, deadline_ms):
            return False
        now_ms = self._clock.now_ms()
        try:
            marks = [(stream.pipeline, stream.pipeline.flush(now_ms)) for stream in self.intake.streams.values()]
        finally:
            self._wake()
        return await self._until(lambda: all(pipeline.is_flushed(epoch) for pipeline, epoch in marks), deadline_ms)

    async def _until(self, is_over: Callable[[], bool], deadline_ms: int | None) -> bool:
        if not self._host.is_running:
            return is_over()
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waits.append(_Wait(is_over, deadline_ms, future))
        self._wake()
        return await future

    def _count_pending(self) -> int:
        in_flight = sum(len(bundle.records) for call in self._calls.values() for bundle in call.bundles)
        return in_flight + sum(stream.pipeline.count_waiting() for stream in self.intake.streams.values())

    def _raise_unseen(self) -> None:
        if failed := self.intake.take_unseen():
            raise failure_of(failed)

    # steps

    def _wake(self) -> None:
        if self._host.is_running:
            tell_at_exit(self)
        self.intake.is_awake = True
        self._alarm.ring()

    def _step(self) -> int | None:
        """Everything that can be done now. Returns when there is more to do by time alone."""
        intake = self.intake
        intake.is_awake = True  # what is put during the step is seen by it
        now_ms, wall_ms = self._clock.now_ms(), self._clock.wall_ms()
        intake.free()
        intake.admit()
        for stream in intake.in_turn():
            pipeline = stream.pipeline
            if pipeline.fault is not None:
                raise pipeline.fault
            deadline_ms = pipeline.next_deadline_ms
            while pipeline.wants_tick or (deadline_ms is not None and deadline_ms <= now_ms):
                steps, deadline_ms = pipeline.tick(now_ms, wall_ms), None
                for call in steps.calls:
                    self._calls[id(call)] = call
                    self._spawn(self._send(stream, call))
                if steps.refresh:
                    self._spawn(self._refresh(stream))
                self._settle(stream)
                intake.admit()
        intake.is_awake = False
        if intake.is_empty:
            tell_no_more(self)
        return self._look_at_waits(now_ms)

    def _step_after_answer(self) -> None:
        """What the answer changed is done at once; the host hears of it only if it has to get up earlier, or never."""
        deadline_ms, armed_ms = self._step(), self._armed_ms
        is_right = armed_ms is None if deadline_ms is None else armed_ms is not None and armed_ms <= deadline_ms
        if not is_right:
            self._wake()

    def _look_at_waits(self, now_ms: int) -> int | None:
        deadlines = [stream.pipeline.next_deadline_ms for stream in self.intake.streams.values()]
        for wait in self._waits:
            if wait.future.done():
                continue
            if wait.is_over():
                wait.future.set_result(True)
            elif wait.deadline_ms is not None and now_ms >= wait.deadline_ms:
                wait.future.set_result(False)
            else:
                deadlines.append(wait.deadline_ms)
        self._waits = [wait for wait in self._waits if not wait.future.done()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    async def _send(self, stream: WrittenStream, call: Call) -> None:
        answer = await send(self._kinesis, stream.name, call)
        stream.pipeline.on_answer(call, answer, self._clock.now_ms())
        del self._calls[id(call)]
        self._step_after_answer()

    async def _refresh(self, stream: WrittenStream) -> None:
        listed = await list_stream(self._kinesis, stream.name, with_summary=stream.pipeline.wants_summary)
        now_ms = self._clock.now_ms()
        if isinstance(listed, AnabranchError):
            stream.pipeline.on_listing_failed(listed, now_ms)
        else:
            stream.pipeline.on_listing(*listed, now_ms)
        self._step_after_answer()

    # outcomes

    def _settle(self, stream: WrittenStream) -> None:
        for bundle in stream.pipeline.take_settled():
            try:
                if bundle.is_settled:
                    if bundle.sequence_number is not None:
                        self.intake.used_bytes -= bundle.cost_bytes
                    else:
                        self._offer(bundle)
            finally:
                waiters, bundle.waiters = bundle.waiters, None
                for _, wake in waiters or ():
                    wake()
            bundle.release()
        self.intake.free()

    def _offer(self, bundle: Bundle) -> None:
        """A failure is seen by who awaits it; else the hook may take it; else it waits to be raised."""
        awaited = {id(record) for record, _ in bundle.waiters or ()}
        for record in bundle.records:
            if id(record) in awaited:
                bundle.failures.see(record)
            elif self._on_undelivered is not None:
                self._hand_over(self._on_undelivered, record, bundle.failures)

    def _hand_over(self, hook: Callable[[PutResult], Any], record: Delivery, failures: Failures) -> None:
        failures.see(record)  # before the hook runs: it may put the record again
        try:
            taken = hook(record.put_result)
            if inspect.iscoroutine(taken):
                taken.close()
                raise TypeError("on_undelivered is asynchronous; it must be a plain function")  # noqa: TRY301 -- as below
        except Exception as error:  # noqa: BLE001 -- supervisor: what the hook did not take is raised by the next flush
            self._emit(HookFailed(stream=record.bundle.stream, hook="on_undelivered", error=repr(error)))
            failures.add([record])
            self.intake.used_bytes += cost_of(record.data, record.partition_key)
