"""Metrics for Prometheus: a collector of the `prometheus-client` library, read at each scrape.

`RecordsProcessed` becomes `anabranch_records_processed_total`, and `anabranch_shard_records_processed_total` for each
shard (`level="detailed"`). Times are in seconds, as Prometheus wants them. All consumers and producers that use one
registry share one collector, because a registry rejects duplicate names.
"""

import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from copy import copy
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Final

from msgspec.structs import replace

from anabranch.errors import ConfigurationError
from anabranch.measures import BOUNDS_MS, TimeBuckets
from anabranch.metrics.catalogue import Level, Measurement, Metric, Summary, added
from anabranch.metrics.sources import Source, check_level, read_all

_LABELS: Final = ("app", "stream", "shard_id", "code", "worker")
_SCALES: Final = {"Milliseconds": (0.001, "_seconds"), "Seconds": (1, "_seconds"), "Bytes": (1, "_bytes")}
_BOUNDS: Final = (*(str(bound_ms / 1_000) for bound_ms in BOUNDS_MS), "+Inf")
_WORD: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake_case(name: str) -> str:
    """`RecordsProcessed` as `records_processed`; what is no letter or digit becomes an underscore."""
    return re.sub(r"\W", "_", _WORD.sub("_", name), flags=re.ASCII).lower()


class Prometheus:
    """Registers the metrics in a registry of `prometheus-client`: the default one, or `registry=`."""

    def __init__(self, *, level: Level = "summary", registry: Any = None) -> None:
        client = _client()
        self.level: Level = check_level(level)
        self.registry = client.REGISTRY if registry is None else registry
        if not callable(getattr(self.registry, "register", None)):
            raise ConfigurationError(f"registry is {registry!r}; it must be a prometheus_client.CollectorRegistry")

    def start(self, source: Source) -> None:
        collector_of(self.registry).sources[source] = self.level

    async def stop(self, source: Source) -> None:
        """Keeps the values: counters must not disappear from later scrapes."""


def _client() -> Any:
    try:
        import prometheus_client  # noqa: PLC0415 -- an optional dependency
    except ImportError:
        raise ConfigurationError("Prometheus needs its client library: pip install 'anabranch[prometheus]'") from None
    return prometheus_client


class Collector:
    """The collector interface of `prometheus-client`: `collect` yields families, each with all of its samples."""

    def __init__(self) -> None:
        self.sources: weakref.WeakKeyDictionary[Source, Level] = weakref.WeakKeyDictionary()

    def describe(self) -> Iterable[Any]:
        """Empty, because the names are known only when there is something to collect."""
        return []

    def collect(self) -> Iterator[Any]:
        if not _is_muted.get():
            yield from families(read_all(self.sources, self, Prometheus.__name__))


_is_muted: ContextVar[bool] = ContextVar("anabranch_collectors_are_muted", default=False)
"""Set while only the program's own metrics are collected."""
_collectors: "weakref.WeakKeyDictionary[Any, Collector]" = weakref.WeakKeyDictionary()
"""By registry."""


def collector_of(registry: Any) -> Collector:
    collector = _collectors.get(registry)
    if collector is None:
        collector = _collectors[registry] = Collector()
        registry.register(collector)
    return collector


def text_of_all(sources: Mapping[Source, Level], registries: Collection[Any]) -> bytes:
    """Everything in several registries and these sources as one page, with each series once."""
    every: dict[Source, Level] = dict(sources)
    for registry in registries:
        for source, level in list(collector_of(registry).sources.items()):
            every[source] = level if every.get(source) != "detailed" else "detailed"
    found = list(families(read_all(every, text_of_all, Prometheus.__name__)))
    token = _is_muted.set(True)
    try:
        for registry in registries:
            found += registry.collect()
    finally:
        _is_muted.reset(token)
    return text_of(found)


def text_of(found: Iterable[Any]) -> bytes:
    """Families in Prometheus's text format: those of one name together, and each series once."""
    merged: dict[str, Any] = {}
    samples: dict[str, dict[Any, Any]] = {}
    for family in found:
        merged.setdefault(family.name, copy(family))
        series = samples.setdefault(family.name, {})
        for sample in family.samples:
            series.setdefault((sample.name, tuple(sorted(sample.labels.items()))), sample)
    for name, family in merged.items():
        family.samples = list(samples[name].values())
    return bytes(_client().generate_latest(SimpleNamespace(collect=merged.values)))


def families(measured: Iterable[Measurement]) -> Iterator[Any]:
    """`prometheus-client`'s families of the measurements, samples of one name together. Metrics of the program whose
    names differ only in letters that Prometheus does not allow become one.
    """
    series: dict[tuple[str, tuple[str, ...]], Measurement] = {}
    for one in measured:
        key = family_name(one.metric, of_shard=one.is_of_shard), tuple(_texts(one.labels))
        other = series.get(key)
        series[key] = one if other is None else replace(other, value=added(other.value, one.value))
    found: dict[str, Any] = {}
    for (name, _), one in series.items():
        if name not in found:
            found[name] = _family(name, one.metric, of_shard=one.is_of_shard)
        _add_sample(found[name], one)
    return iter(found.values())


def family_name(metric: Metric, *, of_shard: bool) -> str:
    scope = "custom_" if metric.is_own else "shard_" if of_shard else ""
    suffix = _SCALES.get(metric.unit, (1, ""))[1]
    words = snake_case(metric.name)
    if metric.unit == "Milliseconds":
        words = words.removeprefix("millis_")
    has_unit = suffix.removeprefix("_") in words.split("_")
    return f"anabranch_{scope}{words}{'' if has_unit else suffix}"


def _family(name: str, metric: Metric, *, of_shard: bool) -> Any:
    from prometheus_client import core  # noqa: PLC0415 -- an optional dependency

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "times": core.HistogramMetricFamily,
        "summary": core.SummaryMetricFamily,
    }
    return kinds[metric.kind](name, f"{metric.text}{' Of each shard.' if of_shard else ''}", labels=_LABELS)


def _add_sample(family: Any, one: Measurement) -> None:
    labels, scale = _texts(one.labels), _SCALES.get(one.metric.unit, (1, ""))[0]
    if isinstance(one.value, TimeBuckets):
        buckets = list(zip(_BOUNDS, accumulate(one.value.counts), strict=True))
        family.add_metric(labels, buckets=buckets, sum_value=one.value.total_ms * scale)
    elif isinstance(one.value, Summary):
        family.add_metric(labels, count_value=one.value.count, sum_value=one.value.total * scale)
    else:
        family.add_metric(labels, one.value * scale)


def _texts(labels: Mapping[str, str]) -> list[str]:
    """The values of all labels. Prometheus treats an empty one as missing."""
    return [labels.get(name, "") for name in _LABELS]
