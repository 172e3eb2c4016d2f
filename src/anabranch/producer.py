"""`Producer` writes to streams, in order per key, and reports one outcome for every record.

A facade: it checks the options and connects the engine's `Writer`, which starts on first use, to AWS.
"""

import asyncio
import random
from asyncio import _get_running_loop  # returns None instead of raising
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, Self

from anabranch._aws.kinesis_client import KinesisByRegion
from anabranch._core.writing.bundles import WriteOptions
from anabranch._engine.clock import SystemClock
from anabranch._engine.writing.writer import Delivery, Writer
from anabranch._event_loops import read_on
from anabranch._model.entropy import Entropy
from anabranch._model.kinds import check_arguments, check_hook, check_seconds, refuse
from anabranch._model.streams import parse_stream, wrong_stream
from anabranch._ports import Clock, KinesisWriting
from anabranch._tracing import Tracing
from anabranch.config import Aws, ProducerSettings
from anabranch.errors import DeliveryFailed, ProducerError, UsageError
from anabranch.events import Event
from anabranch.limits import MIB
from anabranch.logs import make_emit
from anabranch.metrics.catalogue import Level, Measurement, producer_measurements
from anabranch.metrics.sources import Exporter, Exporters, Source, check_level
from anabranch.records import PutResult
from anabranch.reports import FlushReport, HealthReport, ProducerStatus
from anabranch.values import Encoder, ValueT as T, encode_with

__all__ = ["Producer"]

CHECKED_ELSEWHERE: Final = {"stream", "encode", "on_undelivered", "metrics", "on_event"}
"""Parameters whose types `check_arguments` does not check, because their own checks say more."""
UNREADY_AFTER_FAILURES: Final = 3
"""After this many failed requests in a row, the producer is not ready."""


class ProducerPorts(NamedTuple):
    """What the writer needs from outside. A simulation passes its own."""

    kinesis: KinesisWriting
    clock: Clock
    entropy: Entropy
    close: Callable[[], Any] | None = None


class Producer(Generic[T]):
    """Writes records to one or more streams, and reports the outcome of each record.

    `put` only waits for buffer space and returns a `Delivery`. Await that to learn where the record was written, or why
    it was not. Failures that are neither awaited nor passed to `on_undelivered` are raised by the next `flush()`, or
    when `async with` ends.
    """

    restart_reason: Final[str | None] = None
    """Why health checks should restart the process: always None, because a restart does not help a producer."""

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
        violations = check_arguments(Producer.__init__, locals(), but=CHECKED_ELSEWHERE)
        if stream is not None:
            try:
                parse_stream(stream)
            except ValueError as error:
                violations.append(f"stream: {error}")
        if linger < 0:
            violations.append(f"linger is {linger} s; it must not be negative")
        if delivery_timeout <= 0:
            violations.append(f"delivery_timeout is {delivery_timeout} s; it must be positive")
        if buffer_bytes < MIB:
            violations.append(f"buffer_bytes is {buffer_bytes}; it must be at least {MIB}")
        settings = settings or ProducerSettings()
        if settings.trace == "wrap" and aggregate is None:
            violations.append(
                "trace='wrap' sends single records as aggregates, but aggregate=None forbids aggregates: set "
                "trace=True, or omit aggregate="
            )
        refuse(violations)
        check_hook("on_undelivered", on_undelivered, "a PutResult")
        self._stream = stream
        self._encode = encode_with(encode)
        self._unencoded_type = bytes if encode is bytes else None
        """Values of exactly this type are written as they are."""
        self._buffer_bytes = buffer_bytes
        self._on_undelivered = on_undelivered
        self._emit = make_emit(on_event)
        self._options = WriteOptions(
            order=order,
            aggregate=aggregate,
            linger_ms=round(linger * 1_000),
            delivery_timeout_ms=round(delivery_timeout * 1_000),
            settings=settings,
        )
        self._tracing = Tracing(self._emit) if settings.trace else None
        self._aws = aws
        self._ports: ProducerPorts | None = None
        self._writer: Writer | None = None
        self._last_writer: Writer | None = None
        """As `_writer`, but kept after `close`, for `status()`."""
        name = stream or "producer"
        self.exporters = Exporters(
            metrics, Source(name, self._measure, self._emit, namespace="AnabranchProducer", aws=aws)
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    @property
    def buffered_bytes(self) -> int:
        """How much of `buffer_bytes` is in use."""
        return 0 if self._writer is None else self._writer.used_bytes

    def status(self) -> ProducerStatus:
        """The use of the buffer, and for each stream how many records are pending, delivered, failed and throttled. Can
        be called from any thread, also after `close`.
        """
        writer, loop = self._last_writer, self._loop
        if writer is None:
            return ProducerStatus(error=None, buffered_bytes=0, buffer_limit_bytes=self._buffer_bytes, waiting_count=0)
        return read_on(loop, writer.status) if loop is not None and loop.is_running() else writer.status()

    def health(self) -> HealthReport:
        """Whether it can write: not failed, not closed, and for no stream did the last three requests fail."""
        try:
            status = self.status()
        except (TimeoutError, RuntimeError) as error:  # its event loop is busy, or was just closed
            return HealthReport(live=True, ready=False, reasons=(str(error),))
        reasons = [] if status.error is None else [status.error]
        if self._is_closed:
            reasons.append("the producer is closed")
        reasons += [
            f"{stream.stream}: {stream.failures_in_a_row} requests in a row failed"
            for stream in status.streams
            if stream.failures_in_a_row >= UNREADY_AFTER_FAILURES
        ]
        return HealthReport(live=True, ready=not reasons, reasons=tuple(reasons))

    def metrics(self, level: Level = "detailed") -> list[Measurement]:
        """All counters and gauges, as exporters see them. Can be called from any thread."""
        return self.exporters.source.read(check_level(level))

    def _measure(self, level: Level) -> Iterable[Measurement]:
        return producer_measurements(self.status(), level)

    def start(self) -> Self:
        """Starts the producer on the running event loop. Optional: the first `put` does it, too."""
        self._running_writer()
        return self

    # putting

    async def put(
        self,
        value: T,
        partition_key: str,
        *,
        explicit_hash_key: str | None = None,
        stream: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 -- limits the wait for buffer space only
    ) -> Delivery:
        """Buffers a record. Waits while the buffer is full, and raises `BufferFull` after `timeout` seconds."""
        if timeout is not None:
            check_seconds("timeout", timeout)
        return await self._running_writer().put(
            stream_or_default(stream, self._stream), self._encode(value), partition_key, explicit_hash_key, timeout
        )

    def put_nowait(
        self, value: T, partition_key: str, *, explicit_hash_key: str | None = None, stream: str | None = None
    ) -> Delivery:
        """Buffers a record without waiting. Raises `BufferFull` if the buffer is full."""
        writer = self._writer
        if writer is None or _get_running_loop() is not self._loop:
            writer = self._running_writer()
        # Both lines save a function call for each record in the usual case.
        data: Any = value if type(value) is self._unencoded_type else self._encode(value)
        name = self._stream if stream is None and self._stream is not None else stream_or_default(stream, None)
        return writer.put_nowait(name, data, partition_key, explicit_hash_key)

    async def put_and_wait(
        self, value: T, partition_key: str, *, explicit_hash_key: str | None = None, stream: str | None = None
    ) -> PutResult:
        """Puts a record and waits for its outcome. Raises `DeliveryFailed` if it was not delivered."""
        delivery = await self.put(value, partition_key, explicit_hash_key=explicit_hash_key, stream=stream)
        return require_delivered(await delivery)

    async def put_many(self, items: Iterable[tuple[str, T]], *, stream: str | None = None) -> list[Delivery]:
        """Buffers `(partition_key, value)` pairs in order. Waits while the buffer is full."""
        writer, name = self._running_writer(), stream_or_default(stream, self._stream)
        deliveries: list[Delivery] = []
        rest = iter(items)
        # `put_some` stops at the first item for which the buffer has no room; `put` waits for it.
        while (unfit := writer.put_some(name, rest, self._unencoded_type, self._encode, deliveries)) is not None:
            partition_key, data = unfit
            deliveries.append(await writer.put(name, data, partition_key, None, None))
        return deliveries

    # flushing and closing

    async def flush(self, *, deadline: float | None = None) -> FlushReport:
        """Waits until every record put so far has its outcome, for at most `deadline` seconds. Raises `DeliveryFailed`
        with the failures that were not awaited, passed to `on_undelivered` or raised before.
        """
        check_seconds("deadline", deadline)
        if self._writer is None:
            return FlushReport()
        return await self._running_writer().flush(self._deadline_ms(deadline))

    async def close(self, *, deadline: float | None = None) -> FlushReport:
        """Waits until every record has its outcome, then frees all resources. Records that are not delivered within
        `deadline` seconds (`delivery_timeout` by default) fail. Raises `DeliveryFailed` as `flush` does.
        """
        check_seconds("deadline", deadline)
        self._is_closed = True
        writer, self._writer = self._writer, None
        if writer is None:
            return FlushReport()
        try:
            seconds = self._options.delivery_timeout_ms / 1_000 if deadline is None else deadline
            return await writer.close(self._deadline_ms(seconds))
        finally:
            ports, self._ports = self._ports, None
            try:
                await self.exporters.stop()
            finally:  # also if `stop` was cancelled
                if ports is not None and ports.close is not None:
                    await ports.close()

    async def __aenter__(self) -> Self:
        self._running_writer()
        assert self._ports is not None
        if isinstance(self._ports.kinesis, KinesisByRegion):
            try:  # raise here if the region or credentials are missing, not at the first record
                await self._ports.kinesis.client(parse_stream(self._stream).region if self._stream else None)
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.close()
        except ProducerError as failed:
            if error is None:
                raise
            add_undelivered_note(error, failed)

    # the writer

    def _running_writer(self) -> Writer:
        """The writer, which is started if needed. It keeps running when the calling task ends."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError("Producer needs a running event loop; without one, use SyncProducer") from None
        if self._is_closed:
            raise UsageError("this producer is closed")
        if self._writer is not None and self._loop is not loop:
            if not (self._loop is not None and self._loop.is_closed() and self._writer.is_empty):
                raise UsageError("this producer runs on another event loop: create one producer per loop")
            self._writer = None  # between two calls of asyncio.run: the old loop is closed, and no record was pending
        if self._writer is None:
            self._ports = ports = self._open_ports()
            writer = Writer(
                ports.kinesis,
                ports.clock,
                ports.entropy,
                self._options,
                buffer_bytes=self._buffer_bytes,
                on_undelivered=self._on_undelivered,
                emit=self._emit,
                tracing=self._tracing,
            )
            writer.start()
            if self._last_writer is not None:
                self.exporters.source.begin_run()  # the new writer counts from zero; the exported totals must not
            self._writer = self._last_writer = writer
            self._loop = loop
            self.exporters.start()
        return self._writer

    def _open_ports(self) -> ProducerPorts:
        kinesis = KinesisByRegion(self._aws)
        return ProducerPorts(kinesis, SystemClock(), random.SystemRandom(), kinesis.close)

    def _deadline_ms(self, seconds: float | None) -> int | None:
        if seconds is None or self._ports is None:
            return None
        return self._ports.clock.now_ms() + round(seconds * 1_000)


def stream_or_default(given: str | None, default: str | None) -> str:
    """The stream of a call. Raises `UsageError` if there is none."""
    stream = default if given is None else given
    if stream is None:
        raise UsageError("no stream: pass one to the producer, or to put(..., stream='orders')")
    if not isinstance(stream, str):
        raise wrong_stream(stream)
    return stream


def require_delivered(result: PutResult) -> PutResult:
    """Returns the result, or raises `DeliveryFailed`."""
    if not result.delivered:
        raise DeliveryFailed(
            f"the record with partition key {result.partition_key!r} was not delivered: {result.error}",
            results=[result],
        )
    return result


def add_undelivered_note(error: BaseException, failed: ProducerError) -> None:
    """Adds the failures to `error` as a note. It ended the `with` block and is raised, so `failed` cannot be."""
    error.add_note(f"the producer also has undelivered records: {failed}")
