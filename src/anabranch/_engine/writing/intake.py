"""Where records enter: one buffer over all streams, and who waits for room in it.

Order of calls is order of queueing: while puts wait for room, `put_nowait` is refused, and room is given to who came
first, on this side, before anybody else can take it. Failures that nobody has seen keep their room; when nothing else
is left in a full buffer, the next put raises them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from anabranch._core.writing.aggregation import RECORD_COST_BYTES, cost_of
from anabranch._core.writing.pipeline import Pipeline
from anabranch._core.writing.routing import check_keys
from anabranch._engine.writing.delivery import Delivery
from anabranch._model.hash_keys import check_partition_key, wrong_partition_key
from anabranch._model.streams import StreamName, parse_stream
from anabranch._ports.clock import Clock
from anabranch.errors import AnabranchError, BufferFull, DeliveryFailed
from anabranch.records import PutResult

__all__ = ["Intake", "WrittenStream", "failure_of"]


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
