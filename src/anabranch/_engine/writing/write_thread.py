"""A thread with its own event loop and producer, for blocking callers.

Callers append records to an inbox under one lock, which keeps the order of the calls, and wait only for space in it. A
task on the loop puts the records into the producer, and waits while the producer's buffer is full. If the producer
rejects a record (only it knows the stream's size limit), the failure is kept until it is seen.

The thread ends with `close`. If the `SyncProducer` is garbage-collected without `close`, the thread ends when
everything is delivered (`retire`), and at the latest at interpreter exit, within `exit_timeout`. When it ends, every
waiting caller gets an outcome.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextvars import Context
from functools import partial
from typing import Any, NamedTuple, Protocol

from anabranch._core.writing.bundles import cost_of
from anabranch._daemon_threads import DaemonThreads
from anabranch._engine.tasks import single_cause
from anabranch._engine.writing.process_exit import cancel_close_at_exit, close_at_exit
from anabranch._engine.writing.writer import Delivery, delivery_failed
from anabranch._model.kinds import check_seconds
from anabranch.errors import AnabranchError, BufferFull, DeliveryFailed, ProducerError, UsageError
from anabranch.limits import MIB
from anabranch.records import Attempt, PutResult
from anabranch.reports import FlushReport

_log = logging.getLogger("anabranch")

_THREAD_COUNT = 2
"""For host names and certificates."""

INBOX_BYTES = 1 * MIB
"""In addition to the producer's buffer."""


class HandedRecord(NamedTuple):
    data: bytes
    partition_key: str
    explicit_hash_key: str | None
    stream: str | None
    context: Context | None = None
    """The caller's, if puts are traced: its span becomes the parent."""


class AsyncProducer(Protocol):
    """The part of `Producer` that the thread uses."""

    @property
    def buffered_bytes(self) -> int: ...

    def start(self) -> object: ...
    def put_nowait(
        self, value: bytes, partition_key: str, *, explicit_hash_key: str | None, stream: str | None
    ) -> Delivery: ...
    def put(
        self, value: bytes, partition_key: str, *, explicit_hash_key: str | None, stream: str | None
    ) -> Coroutine[Any, Any, Delivery]: ...
    async def flush(self, *, deadline: float | None) -> FlushReport: ...
    async def close(self, *, deadline: float | None) -> FlushReport: ...


class SyncDelivery:
    """A record given to a `SyncProducer`."""

    __slots__ = ("_error", "_inner", "_thread", "_waiting", "record")

    def __init__(self, thread: "WriteThread", record: HandedRecord) -> None:
        self.record = record
        self._thread = thread
        self._inner: Delivery | None = None
        self._error: Exception | None = None
        self._waiting: list[Future[PutResult]] = []

    def done(self) -> bool:
        return self._error is not None or (self._inner is not None and self._inner.done())

    def result(self, timeout: float | None = None) -> PutResult:
        """Waits for the outcome, delivered or not. Raises `TimeoutError` after `timeout` seconds."""
        check_seconds("timeout", timeout)
        inner = self._inner
        if inner is not None and inner.done() and (self._thread.is_over or inner.bundle.sequence_number is not None):
            return inner.result()
        future: Future[PutResult] = Future()
        if not self._thread.call_soon(self._attach, future):
            self._attach(future)  # the thread has ended, so there is no race
        return future.result(timeout)

    # on the loop

    def on_taken(self, inner: Delivery | None, error: Exception | None) -> None:
        """The producer accepted the record, or rejected it with an error."""
        self._inner, self._error = inner, error
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            self._attach(future)

    @property
    def rejected_result(self) -> PutResult:
        data, partition_key, explicit_hash_key, stream, _ = self.record
        attempt = Attempt(started_seconds=0.0, duration_seconds=0.0, code="Refused", message=str(self._error))
        return PutResult(
            stream=stream or "", partition_key=partition_key, explicit_hash_key=explicit_hash_key, data=data,
            attempts=(attempt,),
        )  # fmt: skip

    def _attach(self, future: "Future[PutResult]") -> None:
        inner = self._inner
        if self._error is not None:
            self._thread.rejected.pop(id(self), None)
            future.set_exception(self._error)
        elif inner is None:
            self._waiting.append(future)
        elif inner.done():
            future.set_result(inner.result())
        elif not inner.on_bundle_end(lambda: self._attach(future)):
            self._attach(future)


class WriteThread:
    def __init__(
        self, producer: AsyncProducer, *, buffer_bytes: int, delivery_timeout: float, exit_timeout: float
    ) -> None:
        """Starts the producer on the event loop of the thread."""
        self.is_over = False
        """The loop has ended: its objects can be used without a race."""
        self.rejected: dict[int, SyncDelivery] = {}
        """Records that the producer rejected, until somebody sees that."""
        self._producer = producer
        self._buffer_bytes = buffer_bytes
        self._delivery_timeout = delivery_timeout
        self._exit_timeout = exit_timeout
        self._process_id = os.getpid()
        self._exit: Future[FlushReport] | None = None
        self._failure: ProducerError | None = None
        self._room = threading.Condition()
        """Guards the inbox and `is_over`. Reentrant, because a finalizer may run in the thread that holds it."""
        self._inbox: deque[SyncDelivery | asyncio.Future[None]] = deque()
        """Records in call order. The futures between them are resolved when all records before them were taken."""
        self._inbox_bytes = 0
        self._failed: list[PutResult] = []
        self._is_woken = False
        self._is_closed = False
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        try:
            self._loop = asyncio.new_event_loop()
        except OSError as error:  # most likely: no file descriptors left
            raise _not_started(error) from error
        started = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, args=(started,), name="anabranch-producer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # most likely: no threads left
            self._loop.close()
            raise _not_started(error) from error
        started.wait()
        if self._failure is not None:
            raise _not_started(self._failure.__cause__) from self._failure.__cause__
        close_at_exit(self._begin_exit, self._finish_exit)

    @property
    def holds_records(self) -> bool:
        return self._inbox_bytes > 0 or self._producer.buffered_bytes > 0

    # on any thread

    def put(self, record: HandedRecord, timeout: float | None) -> SyncDelivery:
        cost_bytes = cost_of(record.data, record.partition_key)
        if cost_bytes > self._buffer_bytes:
            raise ValueError(
                f"the record needs {cost_bytes} bytes and the whole buffer has {self._buffer_bytes}: raise buffer_bytes"
            )
        delivery = SyncDelivery(self, record)
        with self._room:
            if not self._room.wait_for(lambda: self._has_room(cost_bytes), timeout):
                raise BufferFull("the buffer is full: wait longer, or try again later")
            if self._is_closed:
                raise self._failure or UsageError("this producer is closed")
            if self._failed:
                failed, self._failed = self._failed, []
                raise delivery_failed(failed)
            self._inbox.append(delivery)
            self._inbox_bytes += cost_bytes
            is_woken, self._is_woken = self._is_woken, True
        if not is_woken:
            self.call_soon(self._wake.set)
        return delivery

    def flush(self, deadline: float | None) -> FlushReport:
        return self._wait_for(self._call(self._flush(deadline)))

    def close(self, deadline: float | None) -> FlushReport:
        if not self._begin_closing():
            if self._failure is not None:
                raise self._failure
            return FlushReport()
        try:
            return self._wait_for(self._call(self._close(deadline)))
        finally:
            self.call_soon(self._over.set)  # also after Ctrl-C in this wait
            self._thread.join()

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> bool:
        """Schedules a call on the loop. False if the loop has ended; otherwise the call is certain to run."""
        with self._room:
            if not self.is_over:
                self._loop.call_soon_threadsafe(callback, *arguments)
            return not self.is_over

    def retire(self) -> None:
        """The `SyncProducer` was garbage-collected: ends the thread when all is delivered, and logs what was not."""
        if self._process_id == os.getpid():
            self.call_soon(lambda: self._tasks.create_task(self._retire()))

    def _begin_exit(self) -> None:
        self._exit = self._call(self._close(self._exit_timeout)) if self._begin_closing() else None

    def _finish_exit(self) -> None:
        try:
            if self._exit is not None:  # otherwise somebody is closing it already
                self._wait_for(self._exit, self._exit_timeout + 1.0)
        except AnabranchError as error:
            _log_undelivered("at exit", error)
        except TimeoutError:
            pass  # logged below
        self._thread.join(self._exit_timeout if self._exit is None else 1.0)
        if not self.is_over:
            _log.error("at exit: the producer did not stop within %g s", self._exit_timeout)

    def _begin_closing(self) -> bool:
        """False if it was called before."""
        with self._room:
            is_first, self._is_closed = not self._is_closed, True
            self._room.notify_all()
        return is_first

    def _call(self, work: Coroutine[Any, Any, FlushReport]) -> "Future[FlushReport]":
        with self._room:
            if not self.is_over:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        over: Future[FlushReport] = Future()
        over.set_exception(self._failure or UsageError("this producer is closed"))
        return over

    def _wait_for(self, end: "Future[FlushReport]", timeout: float | None = None) -> FlushReport:
        try:
            return end.result(timeout)
        except CancelledError:
            raise self._failure or UsageError("this producer is closed") from None

    def _has_room(self, cost_bytes: int) -> bool:
        return self._is_closed or not self._inbox_bytes or self._inbox_bytes + cost_bytes <= INBOX_BYTES

    def _run_loop(self, started: threading.Event) -> None:
        threads = DaemonThreads(_THREAD_COUNT, "anabranch-producer-io")
        self._loop.set_default_executor(threads)
        try:
            threads.start()
            self._loop.run_until_complete(self._main(started))
        except Exception as error:  # noqa: BLE001 -- supervisor: raised to all current and later callers
            cause = single_cause(error)
            self._failure = ProducerError(f"this producer has failed: {cause!r}")
            self._failure.__cause__ = cause
            if started.is_set():
                _log.critical("the producer's thread failed unexpectedly: %r", cause)
        finally:
            self._shut_down()
            started.set()  # the constructor waits for this, also after an error

    def _shut_down(self) -> None:
        """Every waiting caller gets an outcome, also after an unexpected error."""
        with self._room:
            self._is_closed = True
            left = [item for item in self._inbox if isinstance(item, SyncDelivery)]
            self._inbox.clear()
            self._room.notify_all()
        for delivery in left:
            self.rejected[id(delivery)] = delivery
            delivery.on_taken(None, self._failure or UsageError("this producer is closed"))
        if left:
            _log.error("%d records were not delivered: the producer's thread has ended", len(left))
        try:
            self._loop.run_until_complete(self._close_producer())
        finally:
            with self._room:
                self.is_over = True
            cancel_close_at_exit(self._begin_exit)
            self._loop.run_until_complete(_cancel_others())
            self._loop.close()

    # on the loop

    async def _main(self, started: threading.Event) -> None:
        self._producer.start()
        async with self._tasks:
            taking = self._tasks.create_task(self._take_records())
            started.set()
            await self._over.wait()
            taking.cancel()

    async def _close_producer(self) -> None:
        """Does nothing, unless an unexpected error prevented `close`."""
        try:
            await self._producer.close(deadline=self._exit_timeout)
        except AnabranchError as error:
            _log_undelivered("after an unexpected error", error)

    async def _retire(self) -> None:
        """Flushes before it closes: if the interpreter exits meanwhile, the exit hook closes with a shorter timeout."""
        await self._log_failures(self._flush(self._delivery_timeout))
        if self._begin_closing():
            await self._log_failures(self._close(0.0))

    @staticmethod
    async def _log_failures(end: Coroutine[Any, Any, FlushReport]) -> None:
        try:
            await end
        except DeliveryFailed as error:
            _log_undelivered("a SyncProducer was garbage-collected without close()", error)
        except AnabranchError:
            pass  # closed meanwhile, or failed and logged

    async def _take_records(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (item := self._next()) is not None:
                if isinstance(item, SyncDelivery):
                    await self._take(item)
                elif not item.done():
                    item.set_result(None)
                with self._room:
                    self._inbox.popleft()
                    if isinstance(item, SyncDelivery):
                        self._inbox_bytes -= cost_of(item.record.data, item.record.partition_key)
                    self._room.notify_all()

    def _next(self) -> "SyncDelivery | asyncio.Future[None] | None":
        with self._room:
            self._is_woken = bool(self._inbox)
            return self._inbox[0] if self._inbox else None

    async def _take(self, delivery: SyncDelivery) -> None:
        inner, rejection = None, None
        while inner is None and rejection is None:
            try:
                inner = await self._put(delivery.record)
            except DeliveryFailed as failed:  # the buffer was full of unseen failures
                self._failed += failed.results
            except Exception as error:  # noqa: BLE001 -- supervisor: raised by result() or flush()
                rejection = error
                self.rejected[id(delivery)] = delivery
        delivery.on_taken(inner, rejection)

    async def _put(self, record: HandedRecord) -> Delivery:
        data, key, hash_key, stream, context = record
        put_nowait = partial(self._producer.put_nowait, data, key, explicit_hash_key=hash_key, stream=stream)
        try:
            return put_nowait() if context is None else context.run(put_nowait)
        except BufferFull:
            put = self._producer.put(data, key, explicit_hash_key=hash_key, stream=stream)
            return await (put if context is None else self._tasks.create_task(put, context=context))

    async def _flush(self, deadline: float | None) -> FlushReport:
        report = await self._finish(self._producer.flush, deadline)
        self._raise_unseen()
        return report

    async def _close(self, deadline: float | None) -> FlushReport:
        try:
            report = await self._finish(self._producer.close, deadline)
            await self._until_taken()  # a closed producer rejects the rest of the inbox at once
            self._raise_unseen()
        finally:
            self._over.set()
        return report

    async def _finish(
        self, end: Callable[..., Coroutine[Any, Any, FlushReport]], deadline: float | None
    ) -> FlushReport:
        """Calls `end` when the producer has taken all records that were handed over before."""
        started = self._loop.time()
        waited = self._until_taken()
        try:
            async with asyncio.timeout(deadline):
                await waited
        except TimeoutError:
            pass  # the rest stays in the inbox, or the closed producer rejects it
        left = None if deadline is None else max(0.0, deadline - (self._loop.time() - started))
        try:
            report = await end(deadline=left)
        except DeliveryFailed as failed:
            self._failed += failed.results
            report = FlushReport()
        with self._room:
            items = list(self._inbox)
        before = items[: items.index(waited)] if waited in items else []
        if pending_count := sum(isinstance(item, SyncDelivery) for item in before):
            return FlushReport(complete=False, pending_count=report.pending_count + pending_count)
        return report

    def _until_taken(self) -> "asyncio.Future[None]":
        """Resolved when all records that are in the inbox now have been taken."""
        taken: asyncio.Future[None] = self._loop.create_future()
        with self._room:
            self._inbox.append(taken)
        self._wake.set()
        return taken

    def _raise_unseen(self) -> None:
        failed, self._failed = self._failed, []
        failed += [delivery.rejected_result for delivery in self.rejected.values()]
        self.rejected.clear()
        if failed:
            raise delivery_failed(failed)


def _not_started(cause: BaseException | None) -> ProducerError:
    return ProducerError(f"the producer's event loop could not be started: {cause}")


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # runs the calls that `call_soon` accepted


def _log_undelivered(when: str, error: AnabranchError) -> None:
    if isinstance(error, DeliveryFailed):
        _log.error("%s: %d records were not delivered: %s", when, len(error.results), error)
    else:
        _log.error("%s: %s", when, error)
