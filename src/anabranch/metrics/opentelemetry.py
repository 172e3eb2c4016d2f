"""Metrics for OpenTelemetry: observable instruments, read by the readers that the program has configured.

Only the API is used. `RecordsProcessed` becomes `anabranch.records_processed`, and `anabranch.shard.records_processed`
for each shard (`level="detailed"`). The API does not accept a finished histogram: times and summaries become
`.count` and `.sum`, and times also `.bucket`, by their upper bound (`le`). The program's own metrics are
`anabranch.custom.count` and `.sum`, by the attribute `metric`: no instrument can be created during a collection.
Consumers and producers with the same meter provider share the instruments.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, Final

from anabranch._version import __version__
from anabranch.errors import ConfigurationError
from anabranch.measures import BOUNDS_MS, TimeBuckets
from anabranch.metrics.catalogue import KNOWN_METRICS, Level, Measurement, Metric, Summary
from anabranch.metrics.prometheus import snake_case
from anabranch.metrics.sources import Source, check_level, read_all

_UNITS: Final = {"Count": "1", "None": "1", "Bytes": "By", "Milliseconds": "ms", "Seconds": "s"}
_READING_SECONDS: Final = 0.05
"""One collection asks each instrument in turn: they share a reading that is at most this old."""

_OWN: Final = Metric("", "summary", "None", "Metrics of the program, by the attribute `metric`.", is_own=True)

Point = tuple[str, float, dict[str, str]]
"""Instrument, value, attributes."""


class OpenTelemetry:
    """Creates its instruments in a meter provider: the global one, or `meter_provider=`."""

    def __init__(self, *, level: Level = "summary", meter_provider: Any = None) -> None:
        try:
            from opentelemetry import metrics  # noqa: PLC0415 -- an optional dependency
        except ImportError:
            raise ConfigurationError("OpenTelemetry needs its API: pip install 'anabranch[otel]'") from None
        self.level: Level = check_level(level)
        if meter_provider is not None and not isinstance(meter_provider, metrics.MeterProvider):
            raise ConfigurationError(f"meter_provider is {meter_provider!r}; it must be an OpenTelemetry MeterProvider")
        self._provider = meter_provider

    def start(self, source: Source) -> None:
        from opentelemetry import metrics  # noqa: PLC0415 -- an optional dependency

        provider = metrics.get_meter_provider() if self._provider is None else self._provider
        instruments = _instruments.get(provider)
        if instruments is None:
            instruments = _instruments[provider] = Instruments(provider.get_meter("anabranch", __version__))
        instruments.sources[source] = self.level

    async def stop(self, source: Source) -> None:
        """Keeps the values until the program ends: a reader may ask for them after the stop."""


class Instruments:
    def __init__(self, meter: Any) -> None:
        self.sources: weakref.WeakKeyDictionary[Source, Level] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._points: dict[str, list[Point]] = {}
        create = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
        for metric in (*KNOWN_METRICS, _OWN):
            for of_shard in (False, True):
                for name, kind, unit in parts(metric, of_shard=of_shard):
                    create[kind](name, callbacks=[self._callback(name)], unit=unit, description=metric.text)

    def _callback(self, name: str) -> Callable[[Any], Iterable[Any]]:
        from opentelemetry.metrics import Observation  # noqa: PLC0415 -- an optional dependency

        def observe(_: Any) -> Iterable[Any]:
            return [Observation(value, attributes) for _, value, attributes in self._read().get(name, ())]

        return observe

    def _read(self) -> dict[str, list[Point]]:
        with self._lock:
            if time.monotonic() - self._read_at > _READING_SECONDS:
                self._points = self._collect()
                self._read_at = time.monotonic()
            return self._points

    def _collect(self) -> dict[str, list[Point]]:
        found: dict[str, list[Point]] = {}
        for one in read_all(self.sources, self, OpenTelemetry.__name__):
            for point in points(one):
                found.setdefault(point[0], []).append(point)
        return found


_instruments: "weakref.WeakKeyDictionary[Any, Instruments]" = weakref.WeakKeyDictionary()
"""By meter provider."""


def instrument_name(metric: Metric, *, of_shard: bool) -> str:
    if metric.is_own:
        return "anabranch.custom"
    return f"anabranch.{'shard.' if of_shard else ''}{snake_case(metric.name)}"


def parts(metric: Metric, *, of_shard: bool) -> Iterator[tuple[str, str, str]]:
    """The instruments of one metric: name, kind and unit."""
    name, unit = instrument_name(metric, of_shard=of_shard), _UNITS[metric.unit]
    if metric.kind in {"gauge", "counter"}:
        yield name, metric.kind, unit
    elif not (metric.is_own and of_shard):
        yield f"{name}.count", "counter", "1"
        yield f"{name}.sum", "gauge" if metric.is_own else "counter", unit  # a program's values may be negative
        if metric.kind == "times":
            yield f"{name}.bucket", "counter", "1"


def points(one: Measurement) -> Iterator[Point]:
    name, value, attributes = instrument_name(one.metric, of_shard=one.is_of_shard), one.value, dict(one.labels)
    if one.metric.is_own:
        attributes["metric"] = one.metric.name
    if isinstance(value, TimeBuckets):
        yield f"{name}.count", value.count, attributes
        yield f"{name}.sum", value.total_ms, attributes
        for bound, count in zip([*map(str, BOUNDS_MS), "+Inf"], accumulate(value.counts), strict=True):
            yield f"{name}.bucket", count, {**attributes, "le": bound}
    elif isinstance(value, Summary):
        yield f"{name}.count", value.count, attributes
        yield f"{name}.sum", value.total, attributes
    else:
        yield name, value, attributes
