"""The producer at work: pipelines of any number of streams, one buffer over all of them, one task that performs.

observe, plan, perform, apply: the host task asks each pipeline for its steps, starts the calls in its task group and
sleeps until the next deadline, the next put that may go, or the next answer. It is the producer's only timer, and there
is none while nothing is on its way.

Order of calls is order of queueing: while puts wait for room, `put_nowait` is refused, and room is given to who came
first, on this side, before anybody else can take it. Failures that nobody has seen keep their room; when nothing else
is left in a full buffer, the next put raises them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from anabranch._core.writing.aggregation import RECORD_COST_BYTES, Bundle, cost_of
from anabranch._core.writing.collection import Call
from anabranch._core.writing.failures import Failures
from anabranch._core.writing.pipeline import Pipeline, WritingRules
from anabranch._engine.alarm import Alarm
from anabranch._engine.delivery import Delivery
from anabranch._engine.host import Host
from anabranch._engine.sender import list_stream, send
from anabranch._model.entropy import Entropy
from anabranch._model.streams import StreamName, parse_stream
from anabranch._ports.clock import Clock
from anabranch._ports.kinesis_writing import KinesisWriting
from anabranch.errors import AnabranchError, BufferFull, DeliveryFailed, ProducerError, UsageError
from anabranch.events import Event, HookFailed, WriterFailed
from anabranch.records import PutResult
from anabranch.reports import FlushReport

__all__ = ["Writer"]


class _Stream(msgspec.Struct, frozen=True):
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


class _Wait(msgspec.Struct, frozen=True):
    """Somebody waits for a state of the writer; the host looks after each of its steps."""

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
        self.used_bytes = 0
        """What the records on their way weigh, and the failures that nobody has seen."""
        self._kinesis = kinesis
        self._clock = clock
        self._entropy = entropy
        self._rules = rules
        self._buffer_bytes = buffer_bytes
        self._on_undelivered = on_undelivered
        self._emit = emit
        self._streams: dict[str, _Stream] = {}
        self._queue: deque[_QueuedPut] = deque()
        self._waits: list[_Wait] = []
        self._calls: dict[int, tuple[_Stream, Call]] = {}
        self._alarm = Alarm(clock)
        self._is_awake = False
        self._host = Host()
        self._tasks: asyncio.TaskGroup | None = None
        self._refusal: ProducerError | UsageError | None = UsageError("this producer has not been started")

    # life

    def start(self) -> None:
        self._refusal = None
        self._host.start(self._run(), "anabranch-producer")

    @property
    def is_empty(self) -> bool:
        """Nothing on its way, and no failure unseen."""
        return not self.used_bytes and not self._queue

    async def close(self, deadline_ms: int | None) -> FlushReport:
        """Delivers everything, or fails what could not be delivered in time. Raises the failures nobody has seen."""
        if self._refusal is None:
            self._refusal = UsageError("this producer is closed")
        try:
            await self._flush(deadline_ms)
        finally:
            await self._host.cancel()
        self._raise_unseen()
        return FlushReport()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    await self._alarm.wait(self._step())
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 -- supervisor: whatever broke, every record gets its outcome
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self._emit(WriterFailed(error=repr(cause)))
            self._refusal = ProducerError(f"this producer has failed: {cause!r}")
            self._refusal.__cause__ = cause
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """The host ends: what is left gets its outcome, and whoever waits is woken."""
        now_ms = self._clock.now_ms()
        self._refusal = self._refusal or UsageError("the event loop of this producer has ended")
        calls, self._calls = list(self._calls.values()), {}
        for stream in self._streams.values():
            stream.pipeline.abandon([call for owner, call in calls if owner is stream], now_ms)
            self._settle(stream)
        for queued in self._queue:
            if not queued.future.done():
                queued.future.set_exception(self._refusal)
        self._queue.clear()
        for wait in self._waits:
            if not wait.future.done():
                wait.future.set_result(wait.is_over())
        self._waits.clear()

    # putting

    def put_nowait(self, stream: str, data: bytes, partition_key: str, explicit_hash_key: str | None) -> Delivery:
        if self._refusal is not None:
            raise self._refusal
        found = self._streams.get(stream)
        if found is None:
            found = self._open(stream)
        cost_bytes = len(data) + len(partition_key) + RECORD_COST_BYTES
        if self._queue or self.used_bytes + cost_bytes > self._buffer_bytes:
            raise self._why_full(cost_bytes)
        pipeline = found.pipeline
        delivery = pipeline.put(data, partition_key, explicit_hash_key, cost_bytes, self._clock.now_ms())
        self.used_bytes += cost_bytes
        if pipeline.wants_tick and not self._is_awake:
            self._wake()
        return delivery

    async def put(
        self, stream: str, data: bytes, partition_key: str, explicit_hash_key: str | None, wait_seconds: float | None
    ) -> Delivery:
        """Waits for room only, behind all who wait already."""
        cost_bytes = cost_of(data, partition_key)
        if self._refusal is not None or (not self._queue and self.used_bytes + cost_bytes <= self._buffer_bytes):
            return self.put_nowait(stream, data, partition_key, explicit_hash_key)
        if cost_bytes > self._buffer_bytes:
            raise self._why_full(cost_bytes)
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._queue.append(_QueuedPut(stream, data, partition_key, explicit_hash_key, cost_bytes, future))
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

    def _open(self, stream: str) -> _Stream:
        name = parse_stream(stream)
        pipeline = Pipeline(stream, self._rules, Delivery, entropy=self._entropy, notify=self._emit)
        pipeline.failures.on_seen = self._wake
        self._streams[stream] = opened = _Stream(name, pipeline)
        return opened

    def _why_full(self, cost_bytes: int) -> Exception:
        if cost_bytes > self._buffer_bytes:
            return ValueError(
                f"this record needs {cost_bytes} bytes and the buffer has {self._buffer_bytes} in all: raise it"
            )
        if self._holds_failures_only() and (failed := self._take_unseen()):
            return _failed(failed)
        return BufferFull(f"the buffer of {self._buffer_bytes} bytes is full: await put(), or try again later")

    def _holds_failures_only(self) -> bool:
        return all(stream.pipeline.is_idle for stream in self._streams.values())

    def _admit(self) -> None:
        """Gives room to those who wait for it, in the order in which they came."""
        while self._queue:
            queued = self._queue[0]
            if not queued.future.done():
                if self.used_bytes + queued.cost_bytes <= self._buffer_bytes:
                    self._put_queued(queued)
                elif self._holds_failures_only() and (failed := self._take_unseen()):
                    queued.future.set_exception(_failed(failed))
                else:
                    return
            self._queue.popleft()

    def _put_queued(self, queued: _QueuedPut) -> None:
        try:
            stream = self._streams.get(queued.stream) or self._open(queued.stream)
            delivery = stream.pipeline.put(
                queued.data, queued.partition_key, queued.explicit_hash_key, queued.cost_bytes, self._clock.now_ms()
            )
        except ValueError as error:
            queued.future.set_exception(error)
        else:
            self.used_bytes += queued.cost_bytes
            queued.future.set_result(delivery)

    # flushing

    async def flush(self, deadline_ms: int | None) -> FlushReport:
        """A barrier: everything put before is settled when it returns, unless the deadline came first."""
        if self._refusal is not None:
            raise self._refusal
        is_complete = await self._flush(deadline_ms)
        self._raise_unseen()
        if not self._host.is_running and self._refusal is not None:
            raise self._refusal
        return FlushReport(is_complete, 0 if is_complete else self._count_pending())

    async def _flush(self, deadline_ms: int | None) -> bool:
        last = self._queue[-1] if self._queue else None
        if last is not None and not await self._until(last.future.done, deadline_ms):
            return False
        now_ms = self._clock.now_ms()
        marks = [(stream.pipeline, stream.pipeline.flush(now_ms)) for stream in self._streams.values()]
        return await self._until(lambda: all(pipeline.is_flushed(epoch) for pipeline, epoch in marks), deadline_ms)

    async def _until(self, is_over: Callable[[], bool], deadline_ms: int | None) -> bool:
        if not self._host.is_running:
            return is_over()
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waits.append(_Wait(is_over, deadline_ms, future))
        self._wake()
        return await future

    def _count_pending(self) -> int:
        in_flight = sum(len(bundle.records) for _, call in self._calls.values() for bundle in call.bundles)
        return in_flight + sum(stream.pipeline.count_waiting() for stream in self._streams.values())

    def _take_unseen(self) -> list[PutResult]:
        return [record.put_result for stream in self._streams.values() for record in stream.pipeline.failures.see_all()]

    def _raise_unseen(self) -> None:
        if failed := self._take_unseen():
            self._free()
            raise _failed(failed)

    # the host's step

    def _wake(self) -> None:
        self._is_awake = True
        self._alarm.ring()

    def _step(self) -> int | None:
        """Everything that can be done now. Returns when there is more to do by time alone."""
        self._is_awake = True  # what happens during the step is seen by it
        now_ms, wall_ms = self._clock.now_ms(), self._clock.wall_ms()
        self._free()
        self._admit()
        for stream in self._in_turn():
            pipeline = stream.pipeline
            deadline_ms = pipeline.next_deadline_ms
            while pipeline.wants_tick or (deadline_ms is not None and deadline_ms <= now_ms):
                steps, deadline_ms = pipeline.tick(now_ms, wall_ms), None
                for call in steps.calls:
                    self._calls[id(call)] = (stream, call)
                    self._spawn(self._send(stream, call))
                if steps.refresh:
                    self._spawn(self._refresh(stream))
                self._settle(stream)
                self._admit()
        self._is_awake = False
        return self._look_at_waits(now_ms)

    def _in_turn(self) -> Iterator[_Stream]:
        """Each stream is first once: none is always served last."""
        streams = list(self._streams.items())
        if len(streams) > 1:
            first, stream = streams[0]
            del self._streams[first]
            self._streams[first] = stream
        return (stream for _, stream in streams)

    def _look_at_waits(self, now_ms: int) -> int | None:
        deadlines = [stream.pipeline.next_deadline_ms for stream in self._streams.values()]
        waits, self._waits = self._waits, []
        for wait in waits:
            if wait.future.done():
                continue
            if wait.is_over():
                wait.future.set_result(True)
            elif wait.deadline_ms is not None and now_ms >= wait.deadline_ms:
                wait.future.set_result(False)
            else:
                self._waits.append(wait)
                deadlines.append(wait.deadline_ms)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _spawn(self, work: Any) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    async def _send(self, stream: _Stream, call: Call) -> None:
        answer = await send(self._kinesis, stream.name, call)
        del self._calls[id(call)]
        stream.pipeline.on_answer(call, answer, self._clock.now_ms())
        self._wake()

    async def _refresh(self, stream: _Stream) -> None:
        listed = await list_stream(self._kinesis, stream.name, with_summary=stream.pipeline.wants_summary)
        now_ms = self._clock.now_ms()
        if isinstance(listed, AnabranchError):
            stream.pipeline.on_listing_failed(listed, now_ms)
        else:
            stream.pipeline.on_listing(*listed, now_ms)
        self._wake()

    # outcomes

    def _settle(self, stream: _Stream) -> None:
        for bundle in stream.pipeline.take_settled():
            if bundle.is_settled:
                if bundle.sequence_number is not None:
                    self.used_bytes -= bundle.cost_bytes
                else:
                    self._offer(bundle)
            waiters, bundle.waiters = bundle.waiters, None
            bundle.release()
            for _, wake in waiters or ():
                wake()
        self._free()

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
            hook(record.put_result)
        except Exception as error:  # noqa: BLE001 -- supervisor: what the hook did not take is raised by the next flush
            self._emit(HookFailed(stream=record.bundle.stream, hook="on_undelivered", error=repr(error)))
            failures.add([record])
            self.used_bytes += cost_of(record.data, record.partition_key)

    def _free(self) -> None:
        for stream in self._streams.values():
            self.used_bytes -= stream.pipeline.failures.take_freed_bytes()


def _failed(results: list[PutResult]) -> DeliveryFailed:
    first = results[0]
    others = f", and {len(results) - 1} more" if len(results) > 1 else ""
    return DeliveryFailed(
        f"a record for stream {first.stream} with partition key {first.partition_key!r} was not delivered "
        f"({first.error}){others}",
        results=results,
    )
