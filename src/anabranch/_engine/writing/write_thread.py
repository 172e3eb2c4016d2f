"""A producer on an event loop of its own, in a thread of its own: what a blocking caller talks to.

Records are handed over under one lock, so the order of calls is the order of queueing, and taken over by the loop's
main task, which waits where the producer has no room. A caller waits for room in the inbox only. Nothing is lost on
the way: what the producer refuses (a size that only it knows) waits here to be seen, like any other failure.

The thread ends by `close`; after everything is delivered, when the producer was dropped without it (`retire`); and at
the latest with the interpreter, within `exit_timeout`. However it ends, nobody is left waiting.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, Protocol

from anabranch._core.writing.bundles import cost_of
from anabranch._daemon_threads import DaemonThreads
from anabranch._engine.tasks import single_cause
from anabranch._engine.writing.process_exit import end_at_exit, end_no_more
from anabranch._engine.writing.writer import Delivery, failure_of
from anabranch._model.kinds import check_seconds
from anabranch.errors import AnabranchError, BufferFull, DeliveryFailed, ProducerError, UsageError
from anabranch.limits import MIB
from anabranch.records import Attempt, PutResult
from anabranch.reports import FlushReport

_log = logging.getLogger("anabranch")

_THREAD_COUNT = 2
"""For names of hosts and for certificates."""

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
        if not self._thread.call_soon(self._attach, future):
            self._attach(future)  # the thread has ended: nobody else touches this
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
    def __init__(
        self, make: Callable[[], AsyncProducer], *, buffer_bytes: int, delivery_timeout: float, exit_timeout: float
    ) -> None:
        """`make` is called on the event loop and returns a producer that has started."""
        self.refused: dict[int, SyncDelivery] = {}
        """Records that the producer did not take; nobody has seen that yet."""
        self._make = make
        self._buffer_bytes = buffer_bytes
        self._delivery_timeout = delivery_timeout
        self._exit_timeout = exit_timeout
        self._process_id = os.getpid()
        self.is_over = False
        """Nothing runs on the loop any more, so nobody else touches what it left."""
        self._lock = threading.RLock()
        """Around `is_over`. A finalizer may need it where its own thread holds it."""
        self._exit: Future[FlushReport] | None = None
        self._failure: ProducerError | None = None
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
        end_at_exit(self)

    @property
    def holds_records(self) -> bool:
        return bool(self._inbox) or self._producer.buffered_bytes > 0

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
                raise self._failure or UsageError("this producer is closed")
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
        return self._wait_for(self._call(self._flush(deadline)))

    def close(self, deadline: float | None) -> FlushReport:
        if not self._begin_closing():
            if self._failure is not None:
                raise self._failure
            return FlushReport()
        try:
            return self._wait_for(self._call(self._close(deadline)))
        finally:
            self.call_soon(self._over.set)
            self._thread.join()

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> bool:
        """On the loop. False if that has ended; what was accepted is called."""
        with self._lock:
            if not self.is_over:
                self._loop.call_soon_threadsafe(callback, *arguments)
            return not self.is_over

    def retire(self) -> None:
        """The producer was dropped: ends the thread after everything is delivered, and logs what was not."""
        if self._process_id == os.getpid():
            self.call_soon(self._begin_retiring)

    def begin_exit(self) -> None:
        self._exit = self._call(self._close(self._exit_timeout)) if self._begin_closing() else None

    def finish_exit(self) -> None:
        try:
            if self._exit is not None:  # else somebody closes it already
                self._wait_for(self._exit, self._exit_timeout + 1.0)
                self.call_soon(self._over.set)
        except AnabranchError as error:
            _log_undelivered("at exit", error)
            self.call_soon(self._over.set)
        except TimeoutError:
            pass  # said below
        self._thread.join(self._exit_timeout if self._exit is None else 1.0)
        if not self.is_over:
            _log.error("at exit: the producer did not end within %g s", self._exit_timeout)

    def _begin_closing(self) -> bool:
        """False if somebody has begun that before."""
        with self._room:
            is_first, self._is_closed = not self._is_closed, True
            self._room.notify_all()
        return is_first

    def _call(self, work: Coroutine[Any, Any, FlushReport]) -> "Future[FlushReport]":
        with self._lock:
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
        return self._is_closed or not self._inbox or self._inbox_bytes + cost_bytes <= INBOX_BYTES

    def _live(self, started: threading.Event) -> None:
        try:
            loop = asyncio.new_event_loop()  # first: should that fail, there is no coroutine yet that nobody awaits
        except OSError as error:
            self._start_failure = error  # for want of file descriptors, most likely
            started.set()
            return
        threads = DaemonThreads(_THREAD_COUNT, "anabranch-producer-io")
        loop.set_default_executor(threads)
        try:
            threads.start()
            loop.run_until_complete(self._main(started))
        except Exception as error:  # noqa: BLE001 -- supervisor: it is raised to all who wait, or come later
            self._fail(error, is_started=started.is_set())
        finally:
            self._end(loop, is_started=started.is_set())
            started.set()  # whatever happened, nobody waits in vain

    def _fail(self, error: Exception, *, is_started: bool) -> None:
        if not is_started:
            self._start_failure = error
            return
        cause = single_cause(error)
        self._failure = ProducerError(f"this producer has failed: {cause!r}")
        self._failure.__cause__ = cause
        _log.critical("the producer's thread failed unexpectedly: %r", cause)

    def _end(self, loop: asyncio.AbstractEventLoop, *, is_started: bool) -> None:
        """Everybody who waits gets an answer, also after an unexpected error."""
        with self._room:
            self._is_closed = True
            left, self._inbox = self._inbox, deque()
            self._room.notify_all()
        for delivery in left:
            self.refused[id(delivery)] = delivery
            delivery.settle(None, self._failure or UsageError("this producer is closed"))
        if left:
            _log.error("%d records were not delivered: the producer's thread has ended", len(left))
        try:
            if is_started:
                loop.run_until_complete(self._close_producer())
        finally:
            with self._lock:
                self.is_over = True
            end_no_more(self)
            loop.run_until_complete(_cancel_others())
            loop.close()

    # on the loop

    async def _main(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._taken = asyncio.Condition()
        self._ending_count = 0
        self._producer = self._make()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            taking = tasks.create_task(self._take_for_ever())
            started.set()
            await self._over.wait()
            taking.cancel()

    async def _close_producer(self) -> None:
        """It is closed already, but for unexpected errors."""
        try:
            await self._producer.close(deadline=self._exit_timeout)
        except AnabranchError as error:
            _log_undelivered("after an unexpected error", error)

    def _begin_retiring(self) -> None:
        self._tasks.create_task(self._retire())

    async def _retire(self) -> None:
        """Not by a close at once: should the interpreter end meanwhile, that is to be a shorter one."""
        await self._log_failures(self._flush(self._delivery_timeout))
        if self._begin_closing():
            await self._log_failures(self._close(0.0))
            self._over.set()

    @staticmethod
    async def _log_failures(end: Coroutine[Any, Any, FlushReport]) -> None:
        try:
            await end
        except DeliveryFailed as error:
            _log_undelivered("a SyncProducer was dropped without close()", error)
        except AnabranchError:
            pass  # it was closed meanwhile, or has failed and said so

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


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # what was accepted by `call_soon` is called


def _log_undelivered(when: str, error: AnabranchError) -> None:
    if isinstance(error, DeliveryFailed):
        _log.error("%s: %d records were not delivered: %s", when, len(error.results), error)
    else:
        _log.error("%s: %s", when, error)
