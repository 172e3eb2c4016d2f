"""OpenTelemetry spans for puts, reads and handler calls, joined by the trace parent that records carry (rule O1).

Only OpenTelemetry's API is used: the program chooses and configures the SDK. Without `trace=` nothing here is created
or called. If the SDK raises, a span is lost and an event reports it; records are still handled and put.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from anabranch._version import __version__
from anabranch.errors import AnabranchError, ConfigurationError
from anabranch.events import Event, ExporterFailed, ExporterRecovered
from anabranch.records import PutResult, Record

EXPORTER: Final = "OpenTelemetry traces"
"""How events name what failed."""
LINKS_MAX: Final = 128
"""How many traces a batch span links to: the SDK's default limit. The rest is counted in an attribute."""


class Fetched(Protocol):
    """A page of records, or an event of a subscription."""

    @property
    def records(self) -> Sequence[Any]: ...


F = TypeVar("F", bound=Fetched | None)


class _Failures:
    """What the SDK raised, as events. `with failures:` around the last step of a span suppresses its error."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._count = 0

    def failed(self, error: Exception) -> None:
        self._count += 1
        if self._count & (self._count - 1) == 0:  # reports the 1st, 2nd, 4th, 8th, ...
            text = f"{type(error).__name__}: {error}"
            self._emit(ExporterFailed(exporter=EXPORTER, error=text, failure_count=self._count))

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.failed(error)
        elif error is None and self._count:
            count, self._count = self._count, 0
            self._emit(ExporterRecovered(exporter=EXPORTER, failure_count=count))
        return isinstance(error, Exception)


class _CurrentSpan:
    """A span around a call. Errors of the call are raised, errors of the SDK are not."""

    def __init__(self, failures: _Failures, start: Callable[[], AbstractContextManager[Any]]) -> None:
        self._failures = failures
        self._start = start
        self._span: Any = None

    def __enter__(self) -> None:
        try:
            span = self._start()
            span.__enter__()
        except Exception as error:  # noqa: BLE001 -- the handler is called without a span
            self._failures.failed(error)
        else:
            self._span = span

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._span is not None:
            with self._failures:
                self._span.__exit__(kind, error, trace)


class PutSpan(NamedTuple):
    """A sampled put, from the call until its record has an outcome."""

    span: Any
    trace_parent: str
    failures: _Failures

    def end(self, result: PutResult) -> None:
        with self.failures:
            self.span.set_attribute("anabranch.attempts", len(result.attempts))
            if result.shard_id is not None:
                self.span.set_attribute("messaging.destination.partition.id", result.shard_id)
                self.span.set_attribute("messaging.message.id", result.sequence_number)
            self._end(result.error)

    def fail(self, error: str) -> None:
        with self.failures:
            self._end(error)

    def _end(self, error: str | None) -> None:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 -- an optional dependency

        if error is not None:
            self.span.set_status(Status(StatusCode.ERROR, error))
        self.span.end()


class Tracing:
    def __init__(self, emit: Callable[[Event], None]) -> None:
        try:
            from opentelemetry import context, trace  # noqa: PLC0415 -- an optional dependency
        except ImportError:
            raise ConfigurationError("trace= needs OpenTelemetry: pip install 'anabranch[otel]'") from None
        self._failures = _Failures(emit)
        self._trace = trace
        self._no_parent = context.Context()
        self._tracer = trace.get_tracer("anabranch", __version__)

    # the producer

    def begin_put(self, stream: str, partition_key: str) -> PutSpan | None:
        """A child of the caller's current span. None if it is not sampled: then its record carries nothing."""
        try:
            span = self._tracer.start_span(
                f"put {stream}",
                kind=self._trace.SpanKind.PRODUCER,
                attributes=_attributes(stream, "send") | {"anabranch.partition_key": partition_key},
            )
            found = span.get_span_context()
            if not (found.is_valid and found.trace_flags.sampled):
                span.end()
                return None
            parent = f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"
        except Exception as error:  # noqa: BLE001 -- the record is put without a span
            self._failures.failed(error)
            return None
        return PutSpan(span, parent, self._failures)

    # the consumer

    async def receive(self, operation: str, stream: str, shard_id: str, fetch: Awaitable[F]) -> F:
        """Awaits one read. Its span is made afterwards, because an empty read needs none."""
        started_ns = time.time_ns()
        try:
            fetched = await fetch
        except AnabranchError as error:
            self._receive_span(operation, stream, shard_id, started_ns, 0, error)
            raise
        if fetched is not None and fetched.records:
            self._receive_span(operation, stream, shard_id, started_ns, len(fetched.records), None)
        return fetched

    def _receive_span(
        self, operation: str, stream: str, shard_id: str, started_ns: int, count: int, error: AnabranchError | None
    ) -> None:
        trace = self._trace
        with self._failures:
            span = self._tracer.start_span(
                f"receive {stream}",
                context=self._no_parent,
                kind=trace.SpanKind.CLIENT,
                start_time=started_ns,
                attributes=_attributes(stream, "receive")
                | {
                    "messaging.operation.name": operation,
                    "messaging.destination.partition.id": shard_id,
                    "messaging.batch.message_count": count,
                },
            )
            if error is not None:
                span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
            span.end()

    def handling(self, record: Record[bytes], attempt: int) -> AbstractContextManager[Any]:
        """A span around one handler call. It belongs to the trace of the put, if the record carries that."""

        def start() -> AbstractContextManager[Any]:
            attributes = {
                "messaging.message.id": record.sequence_number,
                "anabranch.sub_sequence_number": record.sub_sequence_number,
            }
            return self._process_span(record, attempt, attributes, context=self._parent(record.trace_parent))

        return _CurrentSpan(self._failures, start)

    def handling_batch(self, records: Sequence[Record[bytes]], attempt: int) -> AbstractContextManager[Any]:
        """A span around the call with a batch. It links to the traces of its records instead of having one parent."""

        def start() -> AbstractContextManager[Any]:
            parents = list(dict.fromkeys(one.trace_parent for one in records if one.trace_parent is not None))
            links = [self._trace.Link(self._remote(parent)) for parent in parents[:LINKS_MAX]]
            attributes = {"messaging.batch.message_count": len(records), "anabranch.traced_count": len(parents)}
            return self._process_span(records[0], attempt, attributes, context=self._no_parent, links=links)

        return _CurrentSpan(self._failures, start)

    def _process_span(
        self, first: Record[bytes], attempt: int, attributes: dict[str, Any], **options: Any
    ) -> AbstractContextManager[Any]:
        return self._tracer.start_as_current_span(
            f"process {first.stream}",
            kind=self._trace.SpanKind.CONSUMER,
            attributes=_attributes(first.stream, "process")
            | {"messaging.destination.partition.id": first.shard_id, "anabranch.attempt": attempt}
            | attributes,
            **options,
        )

    def _parent(self, trace_parent: str | None) -> Any:
        """Not the current context: that of the task that started the consumer, whose trace would never end."""
        if trace_parent is None:
            return self._no_parent
        return self._trace.set_span_in_context(
            self._trace.NonRecordingSpan(self._remote(trace_parent)), self._no_parent
        )

    def _remote(self, trace_parent: str) -> Any:
        _, trace_id, span_id, flags = trace_parent.split("-")
        trace = self._trace
        return trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
        )


def _attributes(stream: str, operation: str) -> dict[str, Any]:
    return {
        "messaging.system": "aws_kinesis",
        "messaging.destination.name": stream,
        "messaging.operation.type": operation,
    }
