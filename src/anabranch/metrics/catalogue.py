"""All metrics by name, and how they are computed from the counters of a consumer or a producer. Pure.

Metrics are named as in CloudWatch, and those of a producer as in the KPL where the KPL has the same metric. Exporters
derive other spellings. A measurement with the label `shard_id` is about one shard, one without it about the whole
process: exporters keep the two apart, so that no sum counts a record twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from anabranch.events import Event, MetricRefused
from anabranch.measures import Counters, TimeBuckets, WriteCounters
from anabranch.reports import ConsumerMeasures, ProducerStatus, ShardState, StreamWrites

Level: TypeAlias = Literal["none", "summary", "detailed"]
"""`none`: nothing; `summary`: the process, or each stream of a producer; `detailed`: each shard as well."""
Kind: TypeAlias = Literal["counter", "gauge", "times", "summary"]
Unit: TypeAlias = Literal["Count", "Bytes", "Milliseconds", "Seconds", "None"]

OWN_NAMES_MAX: Final = 100
"""How many metrics a program may define. More are a sign of a mistake, such as an id in the name."""
VALUE_MAX: Final = 2.0**360
VALUE_MIN: Final = 2.0**-360
"""CloudWatch refuses a whole call if the absolute value of one number in it is outside of these bounds and not 0."""
RESERVED_NAMES: Final = frozenset({"_aws", "ErrorCode", "ShardId", "StreamName"})
"""The embedded metric format uses them for its directive and for our dimensions."""
VALUES_MAX: Final = 1_000
"""How many different values a summary keeps."""


class Metric(msgspec.Struct, frozen=True):
    name: str
    """In CloudWatch."""
    kind: Kind
    unit: Unit
    text: str
    is_own: bool = False
    """Whether the program named it, with `metric()`."""


class Summary(msgspec.Struct):
    """Many values: their count, their sum, and how often each was seen, rounded to two significant digits."""

    count: int = 0
    total: float = 0.0
    values: dict[float, int] = msgspec.field(default_factory=dict)

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        rounded = float(f"{value:.2g}")
        if rounded not in self.values and len(self.values) >= VALUES_MAX:
            rounded = min(self.values, key=lambda known: abs(known - value))
        self.values[rounded] = self.values.get(rounded, 0) + 1

    def plus(self, other: "Summary", sign: int = 1) -> "Summary":
        """The sum of both. With sign -1 and an earlier copy: what was added since."""
        seen = dict.fromkeys([*self.values, *other.values])
        counts = {value: self.values.get(value, 0) + sign * other.values.get(value, 0) for value in seen}
        values = {value: count for value, count in counts.items() if count}
        return Summary(self.count + sign * other.count, self.total + sign * other.total, values)

    def copy(self) -> "Summary":
        return Summary(self.count, self.total, dict(self.values))


Value: TypeAlias = int | float | TimeBuckets | Summary


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    metric: Metric
    value: Value
    """`TimeBuckets` for times in milliseconds, a `Summary` for values that have a mean, else a number."""
    labels: Mapping[str, str] = {}
    """`app`, `stream`, `shard_id` or `code`, as far as they apply."""

    @property
    def is_of_shard(self) -> bool:
        return "shard_id" in self.labels

    @property
    def grows(self) -> bool:
        """Whether it counts since the start, so that two readings can be added or subtracted."""
        return self.metric.kind != "gauge"

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        return self.metric.name, tuple(sorted(self.labels.items()))


def _counter(name: str, text: str, unit: Unit = "Count") -> Metric:
    return Metric(name, "counter", unit, text)


def _gauge(name: str, text: str, unit: Unit = "Count") -> Metric:
    return Metric(name, "gauge", unit, text)


# Metrics in a dictionary are named by the field that has their value.

# a consumer: the process and its shards

_COUNTED: Final = {
    "handled_count": _counter("RecordsProcessed", "Records that were finished."),
    "handled_bytes": _counter("BytesProcessed", "Bytes of finished records.", "Bytes"),
    "read_count": _counter("RecordsRead", "Kinesis records that were read. An aggregate counts as one."),
    "read_bytes": _counter("BytesRead", "Bytes that were read.", "Bytes"),
    "committed_count": _counter("RecordsCommitted", "Finished records that a checkpoint covers."),
    "failed_count": _counter("HandlerErrors", "Failed attempts to handle a record or a batch."),
    "retry_count": _counter("Retries", "Failed attempts after which another one follows."),
    "dead_letter_count": _counter("DeadLetters", "Records that were dead-lettered."),
    "skipped_count": _counter("RecordsSkipped", "Records that were skipped by policy or by an operator."),
    "throttle_count": _counter("ReadThrottles", "Reads that Kinesis refused because of its limits."),
    "read_failure_count": _counter("ReadErrors", "Reads that failed in another way."),
}
PROCESSING_LATENCY: Final = Metric("ProcessingLatency", "times", "Milliseconds", "How long handler calls took.")
ERROR_RATE: Final = Metric("ErrorRate", "summary", "None", "The share of attempts to handle records that failed.")
BEHIND: Final = _gauge(
    "MillisBehindLatest", "How far the last read was behind the tip, as Kinesis reports it.", "Milliseconds"
)
LAG: Final = _gauge("ConsumerLag", "The age of the oldest unfinished record.", "Milliseconds")
RETENTION_LEFT: Final = _gauge("RetentionLeft", "Time until the oldest unfinished record is trimmed.", "Seconds")
CHECKPOINT_AGE: Final = _gauge("CheckpointAge", "Time since the checkpoint was last written.", "Seconds")
UNFINISHED: Final = _gauge("UnfinishedRecords", "Records that were started and are not finished.")
BUFFERED: Final = _gauge("BufferedBytes", "Bytes of records that are read and not finished.", "Bytes")
SUBSCRIPTION_AGE: Final = _gauge("SubscriptionAge", "How long a subscription (fan-out) has been active.", "Seconds")
STALLED: Final = _gauge("StalledShards", "Shards that are stalled, for a reason that status() names.")
ACTIVE_SHARDS: Final = _gauge("ActiveShards", "Shards that this process holds.")
LEASES_HELD: Final = _gauge("LeasesHeld", "Leases that this process holds.")
_OF_PROCESS: Final = {
    "lease_taken_count": _counter("LeasesTaken", "Leases that this process took."),
    "hand_off_count": _counter("HandOffs", "Leases that this process gave to another worker."),
    "lease_lost_count": _counter("LeasesLost", "Leases that this process lost."),
    "budget_used_bytes": _gauge("BudgetUsedBytes", "Bytes of the budget in use, including reads in progress.", "Bytes"),
    "budget_limit_bytes": _gauge("BudgetLimitBytes", "The byte budget.", "Bytes"),
    "dead_letter_age": _gauge("DeadLetterAge", "Time since a record was last dead-lettered.", "Seconds"),
    "store_calls": Metric("StoreCallTime", "times", "Milliseconds", "How long calls to the lease store took."),
    "store_failure_count": _counter("StoreErrors", "Calls to the lease store that failed or had no answer."),
    "store_throttle_count": _counter("StoreThrottles", "Calls that the lease store throttled."),
    "loop_lags": Metric("LoopLag", "times", "Milliseconds", "How late the event loop was."),
}

_OF_SHARD: Final[Mapping[Metric, Callable[[ShardState], float | None]]] = {
    BEHIND: lambda shard: shard.millis_behind_latest,
    LAG: lambda shard: None if shard.lag is None else round(shard.lag * 1_000),
    RETENTION_LEFT: lambda shard: shard.retention_left,
    CHECKPOINT_AGE: lambda shard: shard.checkpoint_age,
    UNFINISHED: lambda shard: shard.unfinished_count,
    BUFFERED: lambda shard: shard.held_bytes,
    SUBSCRIPTION_AGE: lambda shard: None if shard.subscription is None else shard.subscription.seconds,
    STALLED: lambda shard: int(shard.reason is not None),
}
"""The gauges of each shard. The process has the same ones, combined over all of its shards."""


def consumer_measurements(
    measures: ConsumerMeasures, own: Mapping[str, Summary], level: Level
) -> Iterator[Measurement]:
    """`own`: the metrics that the program named."""
    labels = {"app": measures.app}
    shards = measures.shards
    yield from _counted(measures.counters, labels)
    for metric, value_of in _OF_SHARD.items():
        of_shards = [found for shard in shards if (found := value_of(shard)) is not None]
        if of_shards or metric.unit in _SUMMED_UNITS:
            yield Measurement(metric=metric, value=_combined(metric, of_shards), labels=labels)
    yield Measurement(metric=ACTIVE_SHARDS, value=len(shards), labels=labels)
    yield Measurement(metric=LEASES_HELD, value=len(shards), labels=labels)
    yield from _fields(measures, _OF_PROCESS, labels)
    for name, summary in own.items():
        yield Measurement(
            metric=Metric(name, "summary", "None", "A metric of the program.", is_own=True),
            value=summary.copy(),
            labels=labels,
        )
    if level == "detailed":
        for shard in shards:
            yield from _shard_measurements(shard, labels)


def _shard_measurements(shard: ShardState, of_app: Mapping[str, str]) -> Iterator[Measurement]:
    labels = {**of_app, "stream": shard.stream, "shard_id": shard.shard_id}
    yield from _counted(shard.counters, labels)
    for metric, value_of in _OF_SHARD.items():
        if (value := value_of(shard)) is not None:
            yield Measurement(metric=metric, value=value, labels=labels)


def _counted(counters: Counters, labels: Mapping[str, str]) -> Iterator[Measurement]:
    yield from _fields(counters, _COUNTED, labels)
    yield Measurement(metric=PROCESSING_LATENCY, value=counters.calls.copy(), labels=labels)
    # Skipped and dead-lettered records are finished too, but no attempt to handle them succeeded.
    succeeded = counters.handled_count - counters.skipped_count - counters.dead_letter_count
    failed = counters.failed_count
    yield Measurement(metric=ERROR_RATE, value=Summary(succeeded + failed, failed), labels=labels)


def _fields(owner: object, metrics: Mapping[str, Metric], labels: Mapping[str, str]) -> Iterator[Measurement]:
    for name, metric in metrics.items():
        if (value := getattr(owner, name)) is not None:
            yield Measurement(metric=metric, value=value, labels=labels)


# a producer: its streams and their shards, under the KPL's names

_WRITTEN: Final = {
    "delivered_count": _counter("UserRecordsPut", "User records that were delivered."),
    "delivered_bytes": _counter("UserRecordsDataPut", "Bytes of delivered user records, with their keys.", "Bytes"),
    "kinesis_count": _counter("KinesisRecordsPut", "Kinesis records that were delivered."),
    "kinesis_bytes": _counter("KinesisRecordsDataPut", "Bytes of delivered Kinesis records.", "Bytes"),
    "throttle_count": _counter("WriteThrottles", "Kinesis records that a shard refused because of its limits."),
}
_WRITTEN_OF_STREAM: Final = {
    "failed_count": _counter("UserRecordsFailed", "User records that were not delivered."),
    "expired_count": _counter("UserRecordExpired", "User records whose delivery timeout passed."),
    "attempt_count": _counter("Attempts", "Kinesis records that were sent, retries included."),
    "request_count": _counter("Requests", "PutRecords calls."),
    "buffering": Metric("BufferingTime", "times", "Milliseconds", "Time from a put until its record is sent."),
    "requests": Metric("RequestTime", "times", "Milliseconds", "How long PutRecords calls took."),
}
_OF_STREAM: Final = {
    "pending_count": _gauge("UserRecordsPending", "User records without an outcome."),
    "requests_in_flight": _gauge("RequestsInFlight", "PutRecords calls without a response."),
}
_OF_PRODUCER: Final = {
    "buffered_bytes": _gauge("ProducerBufferedBytes", "Bytes of the producer's buffer in use.", "Bytes"),
    "buffer_limit_bytes": _gauge("ProducerBufferLimitBytes", "The size of the producer's buffer.", "Bytes"),
    "waiting_count": _gauge("PutsWaiting", "Puts that wait for buffer space."),
}
RECEIVED: Final = _counter("UserRecordsReceived", "User records that were put.")
ALL_ERRORS: Final = _counter("AllErrors", "Failed attempts to write Kinesis records.")
ERRORS_BY_CODE: Final = _counter("ErrorsByCode", "Failed attempts to write Kinesis records, by error code.")
RETRIES_PER_RECORD: Final = Metric("RetriesPerRecord", "summary", "Count", "Retries per Kinesis record.")
PER_KINESIS_RECORD: Final = Metric(
    "UserRecordsPerKinesisRecord", "summary", "Count", "User records per delivered Kinesis record."
)
KINESIS_PER_REQUEST: Final = Metric(
    "KinesisRecordsPerPutRecordsRequest", "summary", "Count", "Kinesis records per call."
)
USER_PER_REQUEST: Final = Metric("UserRecordsPerPutRecordsRequest", "summary", "Count", "User records per call.")
AGGREGATION_RATIO: Final = Metric(
    "AggregationRatio", "summary", "None", "The share of delivered user records that were aggregated."
)
LIMITER_RATE: Final = _gauge(
    "LimiterRate", "The share of the full rate at which the slowest shard is written to.", "None"
)


def producer_measurements(status: ProducerStatus, level: Level) -> Iterator[Measurement]:
    yield from _fields(status, _OF_PRODUCER, {})
    for stream in status.streams:
        yield from _stream_measurements(stream)
        for shard in stream.shards if level == "detailed" else ():
            labels = {"stream": stream.stream, "shard_id": shard.shard_id}
            yield from _written(shard.counters, labels)
            yield Measurement(metric=LIMITER_RATE, value=shard.rate_share, labels=labels)


def _stream_measurements(stream: StreamWrites) -> Iterator[Measurement]:
    labels, counters = {"stream": stream.stream}, stream.counters
    yield from _written(counters, labels)
    yield from _fields(counters, _WRITTEN_OF_STREAM, labels)
    yield from _fields(stream, _OF_STREAM, labels)
    settled, requests = counters.delivered_count + counters.failed_count, counters.request_count
    for metric, value in (
        (RECEIVED, settled + stream.pending_count),
        (RETRIES_PER_RECORD, Summary(counters.attempt_count - counters.retry_count, counters.retry_count)),
        (PER_KINESIS_RECORD, Summary(counters.kinesis_count, counters.delivered_count)),
        (KINESIS_PER_REQUEST, Summary(requests, counters.attempt_count)),
        (USER_PER_REQUEST, Summary(requests, counters.user_attempt_count)),
        (AGGREGATION_RATIO, Summary(counters.delivered_count, counters.aggregated_count)),
        (LIMITER_RATE, min((shard.rate_share for shard in stream.shards), default=None)),
    ):
        if value is not None:
            yield Measurement(metric=metric, value=value, labels=labels)


def _written(counters: WriteCounters, labels: Mapping[str, str]) -> Iterator[Measurement]:
    yield from _fields(counters, _WRITTEN, labels)
    yield Measurement(metric=ALL_ERRORS, value=sum(counters.errors.values()), labels=labels)
    for code, count in sorted(counters.errors.items()):
        yield Measurement(metric=ERRORS_BY_CODE, value=count, labels={**labels, "code": code})


KNOWN_METRICS: Final = (
    *_COUNTED.values(),
    *_OF_PROCESS.values(),
    *_WRITTEN.values(),
    *_WRITTEN_OF_STREAM.values(),
    *_OF_STREAM.values(),
    *_OF_PRODUCER.values(),
    *(value for value in tuple(globals().values()) if isinstance(value, Metric)),
)


# custom metrics of the program


class OwnMetrics:
    """What the program reports with `metric()`. It never raises: a record must not fail because of a metric."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self.summaries: dict[str, Summary] = {}
        self._emit = emit
        self._refused: set[str] = set()

    def add(self, name: str, value: float) -> None:
        summary = self.summaries.get(name)
        if not abs(value) <= VALUE_MAX:
            self._refuse(name, f"{value} is not a number from -2^360 to 2^360, and CloudWatch accepts no others")
        elif summary is not None:
            summary.add(value if abs(value) >= VALUE_MIN else 0.0)
        elif name in _KNOWN_NAMES:
            self._refuse(name, "the library has a metric of that name; choose another")
        elif name in RESERVED_NAMES:
            self._refuse(name, "CloudWatch's embedded metric format reserves the name; choose another")
        elif len(self.summaries) >= OWN_NAMES_MAX:
            self._refuse(name, f"there are {OWN_NAMES_MAX} metrics already; do not use ids or keys in names")
        else:
            self.summaries[name] = Summary()
            self.add(name, value)

    def _refuse(self, name: str, why: str) -> None:
        if name not in self._refused and len(self._refused) < OWN_NAMES_MAX:
            self._refused.add(name)
            self._emit(MetricRefused(metric=name, why=why))


_KNOWN_NAMES: Final = frozenset(metric.name for metric in KNOWN_METRICS)


_SUMMED_UNITS: Final = frozenset({"Count", "Bytes"})
_WORST_IS_SMALLEST: Final = frozenset({RETENTION_LEFT.name, LIMITER_RATE.name})


def merged(measured: Iterable[Measurement]) -> list[Measurement]:
    """Combines measurements with the same name and labels: of several consumers or producers, or of several runs."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Measurement] = {}
    for one in measured:
        if (other := found.get(one.key)) is None:
            found[one.key] = one
        else:
            value = added(one.value, other.value) if one.grows else _combined(one.metric, [one.value, other.value])
            found[one.key] = replace(one, value=value)
    return list(found.values())


def _combined(gauge: Metric, values: Sequence[Any]) -> float:
    """The sum of counts and sizes, and the worst value of everything else."""
    combine = sum if gauge.unit in _SUMMED_UNITS else min if gauge.name in _WORST_IS_SMALLEST else max
    combined: float = combine(values)
    return combined


def added(one: Value, other: Any, sign: int = 1) -> Value:
    """The sum of two values of one metric that grows; with sign -1, their difference."""
    if isinstance(one, TimeBuckets | Summary):
        return one.plus(other, sign)
    total: float = one + sign * other
    return total
