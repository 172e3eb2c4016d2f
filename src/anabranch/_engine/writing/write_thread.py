"""A producer on an event loop of its own, in a thread of its own: what a blocking caller talks to.

Records are handed over under one lock, so the order of calls is the order of queueing, and taken over by the loop's
main task, which waits where the producer has no room. A caller waits for room in the inbox only. Nothing is lost on
the way: what the producer refuses (a size that only it knows) waits here to be seen, like any other failure.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from anabranch._core.writing.aggregation import cost_of
from anabranch._engine.writing.delivery import Delivery
from anabranch._engine.writing.intake import failure_of
from anabranch._model.kinds import check_seconds
from anabranch.errors import BufferFull, DeliveryFailed, ProducerError, UsageError
from anabranch.limits import MIB
from anabranch.records import Attempt, PutResult
from anabranch.reports import FlushReport

__all__ = ["HandedRecord", "SyncDelivery", "WriteThread"]

INBOX_BYTES = 1 * MIB
"""What may be handed over and not taken yet, beside the buffer itself."""


class HandedRecord(NamedTuple):
    data: bytes
    partition_key: str
    explicit_hash_key: str | None
    stream: str | None


class AsyncProducer(Protocol):
    """What the thread runs."""

    @property
    def buffered_bytes(self) -> int: ...

    def put_nowait(
        self, value: bytes, partition_key: str, *, explicit_hash_key: str | None, stream: str | None
    ) -> Delivery: ...
    async def put(
        self, value: bytes, partition_key: str, *, explicit_hash_key: str | None, stream: str | None
    ) -> Delivery: ...
    async def flush(self, *, deadline: float | None) -> FlushReport: ...
    async def close(self, *, deadline: float | None) -> FlushReport: ...


class SyncDelivery:
    """A record given to a `SyncProducer`."""

    __slots__ = ("_inner", "_refusal", "_thread", "_waiting", "record")

    def __init__(self, thread: "WriteThread", record: HandedRecord) -> None:
        self.record = record
        self._thread = thread
        self._inner: Delivery | None = None
        self._refusal: Exception | None = None
        self._waiting: list[Future[PutResult]] = []

    def done(self) -> bool:
        return self._refusal is not None or (self._inner is not None and self._inner.done())

    def result(self, timeout: float | None = None) -> PutResult:
        """How it ended, delivered or not; waits for that. `TimeoutError` if it takes longer than `timeout` seconds."""
        check_seconds("timeout", timeout)
        inner = self._inner
        if inner is not None and inner.done() and (self._thread.is_over or inner.bundle.sequence_number is not None):
            return inner.result()
        future: Future[PutResult] = Future()
        self._thread.call_soon(self._attach, future)
        return future.result(timeout)

    # on the loop

    def settle(self, inner: Delivery | None, refusal: Exception | None) -> None:
        """It is with the producer now, or the producer did not take it."""
        self._inner, self._refusal = inner, refusal
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            self._attach(future)

    @property
    def refused_result(self) -> PutResult:
        data, partition_key, explicit_hash_key, stream = self.record
        attempt = Attempt(started_seconds=0.0, duration_seconds=0.0, code="Refused", message=str(self._refusal))
        return PutResult(
            stream=stream or "", partition_key=partition_key, explicit_hash_key=explicit_hash_key, data=data,
            attempts=(attempt,),
        )  # fmt: skip

    def _attach(self, future: "Future[PutResult]") -> None:
        inner = self._inner
        if self._refusal is not None:
            self._thread.refused.pop(id(self), None)
            future.set_exception(self._refusal)
        elif inner is None:
            self._waiting.append(future)
        elif inner.done():
            future.set_result(inner.result())
        elif not inner.when_moved(lambda: self._attach(future)):
            self._attach(future)


class WriteThread:
    def __init__(self, make: Callable[[], AsyncProducer], *, buffer_bytes: int) -> None:
        self.refused: dict[int, SyncDelivery] = {}
        """Records that the producer did not take; nobody has seen that yet."""
        self._make = make
        self._buffer_bytes = buffer_bytes
        self._room = threading.Condition()
        self._inbox: deque[SyncDelivery] = deque()
        self._inbox_bytes = 0
        self._handed_count = self._taken_count = 0
        self._failed: list[PutResult] = []
        self._is_told = False
        self._is_closed = False
        self._start_failure: Exception | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(started,), name="anabranch-producer", daemon=True)
        self._thread.start()
        started.wait()
        if self._start_failure is not None:
            raise ProducerError(
                f"the producer's event loop could not be started: {self._start_failure}"
            ) from self._start_failure

    @property
    def holds_records(self) -> bool:
        return bool(self._inbox) or self._producer.buffered_bytes > 0

    @property
    def is_over(self) -> bool:
        """The thread has ended, so nobody else touches what it left."""
        return not self._thread.is_alive()

    # on any thread

    def put(self, record: HandedRecord, timeout: float | None) -> SyncDelivery:
        cost_bytes = cost_of(record.data, record.partition_key)
        if cost_bytes > self._buffer_bytes:
            raise ValueError(
                f"this record needs {cost_bytes} bytes and the buffer has {self._buffer_bytes} in all: raise it"
            )
        delivery = SyncDelivery(self, record)
        with self._room:
            if not self._room.wait_for(lambda: self._has_room(cost_bytes), timeout):
                raise BufferFull("the buffer is full: wait longer, or try again later")
            if self._is_closed:
                raise UsageError("this producer is closed")
            if self._failed:
                failed, self._failed = self._failed, []
                raise failure_of(failed)
            self._inbox.append(delivery)
            self._inbox_bytes += cost_bytes
            self._handed_count += 1
            is_told, self._is_told = self._is_told, True
        if not is_told:
            self.call_soon(self._wake.set)
        return delivery

    def flush(self, deadline: float | None) -> FlushReport:
        return self._call(self._flush(deadline))

    def close(self, deadline: float | None) -> FlushReport:
        with self._room:
            if self._is_closed:
                return FlushReport()
            self._is_closed = True
            self._room.notify_all()
        try:
            return self._call(self._close(deadline))
        finally:
            self.call_soon(self._over.set)
            self._thread.join()

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)

    def _call(self, work: Coroutine[Any, Any, FlushReport]) -> FlushReport:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _has_room(self, cost_bytes: int) -> bool:
        return self._is_closed or not self._inbox or self._inbox_bytes + cost_bytes <= INBOX_BYTES

    def _live(self, started: threading.Event) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.get_loop()  # first: should that fail, there is no coroutine yet that nobody awaits
                runner.run(self._main(started))
        except Exception as error:
            if started.is_set():
                raise
            self._start_failure = error  # for want of file descriptors, most likely
        finally:
            started.set()  # whatever happened, nobody waits in vain

    # on the loop

    async def _main(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._taken = asyncio.Condition()
        self._ending_count = 0
        self._producer = self._make()
        started.set()
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(self._take_for_ever())
            await self._over.wait()
            taking.cancel()

    async def _take_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (delivery := self._next()) is not None:
                await self._take(delivery)
                if self._ending_count:
                    async with self._taken:
                        self._taken.notify_all()

    def _next(self) -> SyncDelivery | None:
        with self._room:
            self._is_told = bool(self._inbox)
            return self._inbox[0] if self._inbox else None

    async def _take(self, delivery: SyncDelivery) -> None:
        inner, refusal = None, None
        while inner is None and refusal is None:
            try:
                inner = await self._give(delivery.record)
            except DeliveryFailed as failed:  # the buffer was full of failures that nobody had seen
                self._failed += failed.results
            except Exception as error:  # noqa: BLE001 -- supervisor: it is raised to who asks for this record, or by flush
                refusal = error
                self.refused[id(delivery)] = delivery
        delivery.settle(inner, refusal)
        with self._room:
            self._inbox.popleft()
            self._inbox_bytes -= cost_of(delivery.record.data, delivery.record.partition_key)
            self._taken_count += 1
            self._room.notify_all()

    async def _give(self, record: HandedRecord) -> Delivery:
        data, key, hash_key, stream = record
        try:
            return self._producer.put_nowait(data, key, explicit_hash_key=hash_key, stream=stream)
        except BufferFull:
            return await self._producer.put(data, key, explicit_hash_key=hash_key, stream=stream)

    async def _flush(self, deadline: float | None) -> FlushReport:
        report = await self._ending(self._producer.flush, deadline)
        self._raise_unseen()
        return report

    async def _close(self, deadline: float | None) -> FlushReport:
        report = await self._ending(self._producer.close, deadline)
        await self._until_taken(self._handed_count)  # a closed producer refuses at once what had no room in time
        self._raise_unseen()
        return report

    async def _ending(
        self, end: Callable[..., Coroutine[Any, Any, FlushReport]], deadline: float | None
    ) -> FlushReport:
        """Ends by `end`, after everything that was handed over before has been taken."""
        started, handed_count = self._loop.time(), self._handed_count
        try:
            async with asyncio.timeout(deadline):
                await self._until_taken(handed_count)
        except TimeoutError:
            pass  # what was not taken in time stays where it is, or is refused by a producer that closes
        left = None if deadline is None else max(0.0, deadline - (self._loop.time() - started))
        try:
            report = await end(deadline=left)
        except DeliveryFailed as failed:
            self._failed += failed.results
            report = FlushReport()
        pending_count = handed_count - self._taken_count
        if pending_count > 0:
            return FlushReport(complete=False, pending_count=report.pending_count + pending_count)
        return report

    async def _until_taken(self, handed_count: int) -> None:
        self._ending_count += 1
        try:
            async with self._taken:
                await self._taken.wait_for(lambda: self._taken_count >= handed_count)
        finally:
            self._ending_count -= 1

    def _raise_unseen(self) -> None:
        failed, self._failed = self._failed, []
        failed += [delivery.refused_result for delivery in self.refused.values()]
        self.refused.clear()
        if failed:
            raise failure_of(failed)
