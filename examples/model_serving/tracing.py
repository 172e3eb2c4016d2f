"""Traces: one covers a hand from the gateway to the letter's way back, across processes and both streams.

`configure` chooses OpenTelemetry's SDK and samples one hand in a hundred (or as `OTEL_TRACES_SAMPLER_ARG` says). Here
the spans go to a file, if `ASL_TRACES` names a folder; a deployment sets an OTLP exporter instead. anabranch carries
the trace through the streams.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SAMPLED = float(os.environ.get("OTEL_TRACES_SAMPLER_ARG", "0.01"))

tracer = trace.get_tracer("model-serving")


class FileExporter(SpanExporter):
    def __init__(self, file: Path) -> None:
        self._file = file

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._file.open("a") as file:
            for span in spans:
                line = {
                    "trace": f"{span.context.trace_id:032x}",
                    "span": f"{span.context.span_id:016x}",
                    "parent": None if span.parent is None else f"{span.parent.span_id:016x}",
                    "name": span.name,
                    "program": span.resource.attributes["service.name"],
                    "start_ns": span.start_time,
                    "milliseconds": round((span.end_time - span.start_time) / 1e6, 2),
                }
                file.write(json.dumps(line) + "\n")
        return SpanExportResult.SUCCESS


def configure(program: str) -> None:
    provider = TracerProvider(
        resource=Resource.create({"service.name": program}), sampler=ParentBased(TraceIdRatioBased(SAMPLED))
    )
    if "ASL_TRACES" in os.environ:
        file = Path(os.environ["ASL_TRACES"]) / f"{program}-{os.getpid()}.jsonl"
        provider.add_span_processor(SimpleSpanProcessor(FileExporter(file)))
    trace.set_tracer_provider(provider)


def start_span(name: str, trace_parent: str | None) -> Span:
    """A span in the trace of a record. A batch has records of many traces, so each gets a span of its own."""
    if trace_parent is None:
        return trace.INVALID_SPAN
    return tracer.start_span(name, TraceContextTextMapPropagator().extract({"traceparent": trace_parent}))


def whole_traces(folder: Path) -> list[list[dict]]:
    """The traces that cover the whole way, each ordered by time."""
    spans = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    traces: dict[str, list[dict]] = {}
    for span in sorted(spans, key=lambda span: span["start_ns"]):
        traces.setdefault(span["trace"], []).append(span)
    return [
        found for found in traces.values() if {"receive hand", "predict", "send letter"} <= {s["name"] for s in found}
    ]
