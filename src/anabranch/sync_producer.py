"""`SyncProducer`: the producer for code without an event loop, such as Flask, Django, scripts and threads.

A facade over a `Producer` in its own thread, which starts on first use in each process. A forked child starts its own
thread. If the producer held records at the fork, the child raises, because the parent writes them.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Final, Generic, Literal, Self

from anabranch._core.writing.lanes import check_keys
from anabranch._engine.writing.write_thread import HandedRecord, SyncDelivery, WriteThread
from anabranch._model.kinds import check_seconds
from anabranch._model.streams import parse_stream
from anabranch.config import Aws, ProducerSettings
from anabranch.errors import ProducerError, UsageError
from anabranch.events import Event
from anabranch.limits import MIB
from anabranch.metrics.catalogue import Level, Measurement, producer_measurements
from anabranch.metrics.sources import Exporter, Exporters, check_level
from anabranch.producer import Producer, add_undelivered_note, require_delivered, stream_or_default
from anabranch.records import PutResult
from anabranch.reports import FlushReport, HealthReport, ProducerStatus
from anabranch.values import Encoder, ValueT as T, encode_with

__all__ = ["SyncProducer"]


class SyncProducer(Generic[T]):
    """Like `Producer`, for code without an event loop: blocking, thread-safe, started on first use in a process.

    `on_undelivered` and `on_event` are called in the producer's thread. If a program exits without `close`, its records
    are still delivered within `ProducerSettings(exit_timeout=...)`, and what is not delivered is logged.
    """

    restart_reason: Final[str | None] = None
    """As `Producer.restart_reason`."""

    def __init__(
        self,
        stream: str | None = None,
        *,
        order: Literal["key", "none"] = "key",
        aggregate: Literal["shard", "key"] | None = "shard",
        linger: float = 0.1,
        delivery_timeout: float = 120.0,
        buffer_bytes: int = 64 * MIB,
        encode: Encoder[T] = bytes,  # type: ignore[assignment]
        on_undelivered: Callable[[PutResult], Any] | None = None,
        settings: ProducerSettings | None = None,
        aws: Aws | None = None,
        metrics: Sequence[Exporter] = (),
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        given = {**locals()}
        del given["self"], given["encode"]  # values are encoded here: the `Producer` gets bytes
        self._make: Callable[[], Producer[bytes]] = partial(Producer, **given)
        self._producer = self._make()
        """Runs in the thread, from the first put on."""
        self._stream = stream
        self._encode = encode_with(encode)
        self._buffer_bytes = buffer_bytes
        self._delivery_timeout = delivery_timeout
        self._exit_timeout = (settings or ProducerSettings()).exit_timeout
        self._is_traced = settings is not None and settings.trace is not False
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._thread: WriteThread | None = None
        self._is_closed = False

    def put(
        self,
        value: T,
        partition_key: str,
        *,
        explicit_hash_key: str | None = None,
        stream: str | None = None,
        timeout: float | None = None,
    ) -> SyncDelivery:
        """Buffers a record, and waits if the buffer is full: for `timeout` seconds, then it raises `BufferFull`."""
        check_seconds("timeout", timeout)
        check_keys(partition_key, explicit_hash_key)
        if stream is not None:
            parse_stream(stream)
        stream_or_default(stream, self._stream)
        context = copy_context() if self._is_traced else None
        record = HandedRecord(self._encode(value), partition_key, explicit_hash_key, stream, context)
        return self._running().put(record, timeout)

    def put_nowait(
        self, value: T, partition_key: str, *, explicit_hash_key: str | None = None, stream: str | None = None
    ) -> SyncDelivery:
        """Like `put`, but never waits: raises `BufferFull` if the buffer is full."""
        return self.put(value, partition_key, explicit_hash_key=explicit_hash_key, stream=stream, timeout=0.0)

    def put_and_wait(
        self, value: T, partition_key: str, *, explicit_hash_key: str | None = None, stream: str | None = None
    ) -> PutResult:
        """Puts a record and waits for its outcome. Raises `DeliveryFailed` if it was not delivered."""
        delivery = self.put(value, partition_key, explicit_hash_key=explicit_hash_key, stream=stream)
        return require_delivered(delivery.result())

    def put_many(self, items: Iterable[tuple[str, T]], *, stream: str | None = None) -> list[SyncDelivery]:
        """Puts `(partition_key, value)` pairs in order, and waits while the buffer is full."""
        return [self.put(value, partition_key, stream=stream) for partition_key, value in items]

    def status(self) -> ProducerStatus:
        """The state of this producer, as `Producer.status`."""
        return self._producer.status()

    def health(self) -> HealthReport:
        """Whether it can write, as `Producer.health`."""
        report = self._producer.health()
        if self._is_closed and report.ready:  # the `Producer` was never started, or still delivers
            return HealthReport(live=True, ready=False, reasons=("the producer is closed",))
        return report

    @property
    def exporters(self) -> Exporters:
        """What a `HealthApp` reads."""
        return self._producer.exporters

    def metrics(self, level: Level = "detailed") -> list[Measurement]:
        """All counters and gauges, as `Producer.metrics`."""
        return list(producer_measurements(self.status(), check_level(level)))

    def flush(self, *, deadline: float | None = None) -> FlushReport:
        """Waits until every record put so far, by any thread, has its outcome, for at most `deadline` seconds. Raises
        `DeliveryFailed` with the failures that were not awaited, passed to `on_undelivered` or raised before.
        """
        check_seconds("deadline", deadline)
        if self._thread is None:
            return FlushReport()
        return self._running().flush(deadline)

    def close(self, *, deadline: float | None = None) -> FlushReport:
        """Waits until every record has its outcome, then ends the thread. Records that are not delivered within
        `deadline` seconds (`delivery_timeout` by default) fail. Raises `DeliveryFailed` as `flush` does.
        """
        check_seconds("deadline", deadline)
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
        if thread is None or self._process_id != os.getpid():
            return FlushReport()
        return thread.close(self._delivery_timeout if deadline is None else deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except ProducerError as failed:
            if error is None:
                raise
            add_undelivered_note(error, failed)

    def _running(self) -> WriteThread:
        if self._process_id != os.getpid():
            self._after_fork()
        with self._lock:
            if self._is_closed:
                raise UsageError("this producer is closed")
            if self._thread is None:
                try:
                    self._thread = WriteThread(
                        self._producer,
                        buffer_bytes=self._buffer_bytes,
                        delivery_timeout=self._delivery_timeout,
                        exit_timeout=self._exit_timeout,
                    )
                except ProducerError:
                    self._producer = self._make()  # the failed start has closed it; the next put tries again
                    raise
                weakref.finalize(self, self._thread.retire).atexit = False
            return self._thread

    def _after_fork(self) -> None:
        """The child has no thread, and its copy of the lock may be held by a thread that does not exist here."""
        if self._thread is not None and self._thread.holds_records:
            raise UsageError(
                "this process was forked while the producer held records, which the parent process writes: "
                "call flush() before the fork, or create the producer after it"
            )
        self._lock = threading.Lock()
        self._thread = None
        self._producer = self._make()
        self._process_id = os.getpid()
