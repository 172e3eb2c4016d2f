"""Metrics for CloudWatch, in a thread of its own: by PutMetricData, or as log lines in the embedded metric format.

Every `interval` seconds the thread sends what was counted since the last success, so a failed export delays data and
loses none. Times and summaries are sent as values with counts: CloudWatch can compute percentiles from them. Shards
have the dimension ShardId, and StreamName if there are several streams; a producer's streams have StreamName, as the
KPL's metrics do.
"""

import asyncio
import json
import queue
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Final, NamedTuple, TextIO

from anabranch._aws.account import botocore_session, make_client
from anabranch._model.kinds import check_types, refuse
from anabranch.config import Aws
from anabranch.errors import AnabranchError, ConfigurationError
from anabranch.measures import BOUNDS_MS, TimeBuckets
from anabranch.metrics.catalogue import Level, Measurement, Summary, Value, added
from anabranch.metrics.sources import Source, check_level

DATA_PER_CALL_MAX: Final = 500
"""The limits are 1,000 metrics and 1 MB; a datum has about 1 KB with all its values."""
VALUES_PER_DATUM_MAX: Final = 100
"""The limit of the embedded format; PutMetricData takes 150."""
DIMENSIONS_MAX: Final = 27
"""The limit is 30, and three may be ours."""
STOP_SECONDS: Final = 5.0
"""How long the last export may delay a stop."""
_DIMENSIONS: Final = {"stream": "StreamName", "shard_id": "ShardId", "code": "ErrorCode"}
_MIDDLES_MS: Final = (
    0.5,
    *((low + high) / 2 for low, high in pairwise(BOUNDS_MS)),
    1.5 * BOUNDS_MS[-1],
)
"""The value that represents each bucket: its middle."""

Sent = dict[Any, Value]
"""The readings that CloudWatch has received, by metric and labels."""


class Datum(NamedTuple):
    """One metric as CloudWatch takes it."""

    name: str
    unit: str
    dimensions: Mapping[str, str]
    values: list[float]
    counts: list[float]
    """How often each of the values was seen."""


def batches_of(
    measured: list[Measurement], sent: Sent, dimensions: Mapping[str, str]
) -> Iterator[tuple[list[Datum], Sent]]:
    """What changed since `sent`, and all gauges, in batches that fit one call. Each comes with its readings."""
    streams = {one.labels["stream"] for one in measured if "app" in one.labels and "stream" in one.labels}
    data: list[Datum] = []
    readings: Sent = {}
    for one in measured:
        labels = {
            name: one.labels[label]
            for label, name in _DIMENSIONS.items()
            if label in one.labels and (label != "stream" or "app" not in one.labels or len(streams) > 1)
        }
        found = _data_of(one, sent.get(one.key), {**dimensions, **labels})
        if data and len(data) + len(found) > DATA_PER_CALL_MAX:
            yield data, readings
            data, readings = [], {}
        data += found
        if one.grows:
            readings[one.key] = one.value
    yield data, readings


def _data_of(one: Measurement, sent: Value | None, dimensions: Mapping[str, str]) -> list[Datum]:
    value = one.value
    if one.metric.kind == "counter" and not value:
        return []  # CloudWatch charges for each metric
    is_reset = sent is not None and size_of(sent) > size_of(value)  # with a new lease
    if one.grows and sent is not None and not is_reset:
        value = added(value, sent, -1)
    found = list(_values(value).items())
    data = []
    for start in range(0, len(found), VALUES_PER_DATUM_MAX):
        some = found[start : start + VALUES_PER_DATUM_MAX]
        numbers, counts = [float(number) for number, _ in some], [float(count) for _, count in some]
        data.append(Datum(one.metric.name, one.metric.unit, dimensions, numbers, counts))
    return data


def size_of(value: Value) -> float:
    return value if isinstance(value, int | float) else value.count


def _values(value: Value) -> dict[float, int]:
    """Each value, and how often it was seen."""
    if isinstance(value, TimeBuckets):
        return {middle: count for middle, count in zip(_MIDDLES_MS, value.counts, strict=True) if count > 0}
    if isinstance(value, Summary):
        if value.values:
            return {number: count for number, count in value.values.items() if count > 0}
        return {value.total / value.count: value.count} if value.count > 0 else {}
    return {value: 1}


def _check_options(namespace: str | None, interval: float, dimensions: Mapping[str, str]) -> None:
    named = {f"dimensions[{name!r}]": value for name, value in dimensions.items()}
    given = {"namespace": namespace, "interval": interval, **named}
    kinds = {"namespace": str | None, "interval": float, **dict.fromkeys(named, str)}
    violations = check_types(given, kinds)
    if namespace is not None and not 1 <= len(namespace) <= 255:
        violations.append(f"namespace is {namespace!r}; it must have 1 to 255 characters")
    if namespace is not None and namespace.startswith("AWS/"):
        violations.append(f"namespace is {namespace!r}; those that begin with AWS/ belong to AWS")
    if not 1 <= interval <= 3_600:
        violations.append(f"interval is {interval} s; it must be from 1 to 3600 s")
    if len(dimensions) > DIMENSIONS_MAX:
        violations.append(f"dimensions has {len(dimensions)} entries; at most {DIMENSIONS_MAX} are possible")
    if not all(dimensions) or not all(dimensions.values()):
        violations.append("dimensions has an empty name or value; CloudWatch refuses that")
    refuse(violations)


def namespace_of(source: Source) -> str:
    """Replaces what CloudWatch does not allow: the name of an application may have any characters."""
    return re.sub(r"[^0-9A-Za-z._/# -]", "_", source.namespace)[:255]


class _Request(NamedTuple):
    """Asks the thread to export the rest of a source that has ended."""

    source: Source
    done: "Future[None]"
    ends_thread: bool


class CloudWatchThread:
    """What both exporters share: the thread, and what has been sent."""

    def __init__(
        self, *, namespace: str | None, level: Level, interval: float, dimensions: Mapping[str, str] | None
    ) -> None:
        self.level: Level = check_level(level)
        self.namespace = namespace
        self._interval = interval
        self._dimensions = dict(dimensions or {})
        _check_options(namespace, interval, self._dimensions)
        self._sent: dict[Source, Sent] = {}
        self._requests: queue.SimpleQueue[_Request] | None = None
        """To the thread; None if there is none."""

    def start(self, source: Source) -> None:
        self._sent.setdefault(source, {})
        if self._requests is None:
            self._requests = queue.SimpleQueue()
            name = f"anabranch-{type(self).__name__}"
            threading.Thread(target=self._run, args=(self._requests,), name=name, daemon=True).start()

    async def stop(self, source: Source) -> None:
        """Sends the rest. Does not wait for a service that does not answer."""
        requests, done = self._requests, Future[None]()
        if requests is None:
            return
        is_last = self._sent.keys() <= {source}
        if is_last:
            self._requests = None
        requests.put(_Request(source, done, is_last))
        await asyncio.wait([asyncio.wrap_future(done)], timeout=STOP_SECONDS)
        if not done.done():
            source.failed(self, TimeoutError(f"the last export did not end within {STOP_SECONDS:g} s"))

    def _run(self, requests: "queue.SimpleQueue[_Request]") -> None:
        """In the thread."""
        while True:
            try:
                request = requests.get(timeout=self._interval)
            except queue.Empty:
                for source in list(self._sent):
                    self._export(source)
                continue
            self._export(request.source)
            self._forget(request.source)
            request.done.set_result(None)
            if request.ends_thread:
                return

    def _forget(self, source: Source) -> None:
        self._sent.pop(source, None)

    def _export(self, source: Source) -> None:
        try:
            before, now = self._sent.get(source, {}), Sent()
            for data, readings in batches_of(source.read(self.level), before, self._dimensions):
                self._sent[source] = before | now  # in case this part fails
                if data:
                    self._send(source, self.namespace or namespace_of(source), data)
                now |= readings
            self._sent[source] = now
        except Exception as error:  # noqa: BLE001 -- an event, never an outage; the next export sends it
            source.failed(self, error)
        else:
            source.succeeded(self)

    def _send(self, source: Source, namespace: str, data: list[Datum]) -> None:
        """Raises if it did not arrive."""


class CloudWatch(CloudWatchThread):
    """Sends metrics by PutMetricData. Needs the permission `cloudwatch:PutMetricData`."""

    def __init__(
        self,
        *,
        namespace: str | None = None,
        level: Level = "summary",
        interval: float = 60.0,
        dimensions: Mapping[str, str] | None = None,
        aws: Aws | None = None,
    ) -> None:
        """`namespace` is `Anabranch/<app>` by default, `AnabranchProducer` for a producer. `dimensions` are added to
        every metric. With an `interval` below 60 seconds, metrics have a resolution of one second. `aws`: the
        account, if it is not that of the streams.
        """
        super().__init__(namespace=namespace, level=level, interval=interval, dimensions=dimensions)
        if aws is not None and not isinstance(aws, Aws):
            raise ConfigurationError(f"aws is {aws!r}; it must be an Aws")
        self._aws = aws
        self._resolution = 60 if interval >= 60 else 1
        self._clients: dict[Source, Any] = {}

    def _send(self, source: Source, namespace: str, data: list[Datum]) -> None:
        client = self._clients.get(source)
        if client is None:
            client = self._clients[source] = _client(self._aws or source.aws or Aws())
        now = time.time()
        client.put_metric_data(Namespace=namespace, MetricData=[self._as_request(datum, now) for datum in data])

    def _as_request(self, datum: Datum, now: float) -> dict[str, Any]:
        return {
            "MetricName": datum.name,
            "Dimensions": [{"Name": name, "Value": value} for name, value in datum.dimensions.items()],
            "Timestamp": now,
            "Values": datum.values,
            "Counts": datum.counts,
            "Unit": datum.unit,
            "StorageResolution": self._resolution,
        }

    def _forget(self, source: Source) -> None:
        super()._forget(source)
        client = self._clients.pop(source, None)
        if client is not None:
            client.close()


def _client(aws: Aws) -> Any:
    """Blocks: it reads files, and may ask for credentials."""
    from botocore.config import Config  # noqa: PLC0415 -- botocore is loaded when first needed

    config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})
    return make_client(botocore_session(aws), aws, "cloudwatch", config)


class EmbeddedMetrics(CloudWatchThread):
    """Writes log lines from which CloudWatch makes metrics: for Lambda, ECS and everything else whose standard output
    goes to CloudWatch Logs. Needs no permission of its own.
    """

    def __init__(
        self,
        *,
        namespace: str | None = None,
        level: Level = "summary",
        interval: float = 60.0,
        dimensions: Mapping[str, str] | None = None,
        output: TextIO | None = None,
    ) -> None:
        """`output` is standard output by default. The other options are those of `CloudWatch`."""
        super().__init__(namespace=namespace, level=level, interval=interval, dimensions=dimensions)
        if output is not None and not callable(getattr(output, "write", None)):
            raise ConfigurationError(f"output is {output!r}; it must be a text file")
        self._output = output

    def _send(self, source: Source, namespace: str, data: list[Datum]) -> None:  # noqa: ARG002 -- one output for all
        output = self._output or sys.stdout
        if output is None:
            raise AnabranchError("this process has no standard output")
        now_ms = time.time_ns() // 1_000_000
        lines = [json.dumps(document) for document in embedded_documents(namespace, data, now_ms)]
        output.write("".join(f"{line}\n" for line in lines))
        output.flush()


def embedded_documents(namespace: str, data: list[Datum], now_ms: int) -> Iterator[dict[str, Any]]:
    """One document for all metrics with the same dimensions. As the format demands, at most 100 in each, and each name
    once.
    """
    groups: dict[Any, list[Datum]] = {}
    repeats: Counter[Any] = Counter()
    for datum in data:
        dimensions = tuple(datum.dimensions.items())
        repeats[dimensions, datum.name] += 1
        groups.setdefault((dimensions, repeats[dimensions, datum.name]), []).append(datum)
    for (dimensions, _), members in groups.items():
        for start in range(0, len(members), 100):
            some = members[start : start + 100]
            directive = {
                "Namespace": namespace,
                "Dimensions": [[name for name, _ in dimensions]],
                "Metrics": [{"Name": datum.name, "Unit": datum.unit} for datum in some],
            }
            values = {
                datum.name: datum.values[0]
                if datum.counts == [1.0]
                else {"Values": datum.values, "Counts": datum.counts}
                for datum in some
            }
            yield {"_aws": {"Timestamp": now_ms, "CloudWatchMetrics": [directive]}, **dict(dimensions), **values}
