"""Settings, as frozen values. One error lists all wrong choices and ranges, unless a type is wrong.

Durations are seconds. AWS's quotas are not settings; they are in `limits`.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from anabranch._model.kinds import check_field_types, refuse
from anabranch._model.leases import WORKER_ID_BYTES_MAX
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.limits import SHARD_WRITE_BYTES_PER_SECOND, SHARD_WRITE_RECORDS_PER_SECOND

_REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
_CONSUMER_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_CONSUMER_ARN = re.compile(r"arn:aws[a-z-]*:kinesis:[a-z0-9-]+:[0-9]{12}:stream/[^/]+/consumer/[^/:]+:[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aws:
    """AWS region, endpoint and credentials. Defaults: AWS's chain (environment, profile, container, instance)."""

    region: str | None = None
    profile: str | None = None
    """A profile in the shared AWS configuration files."""
    endpoint_url: str | None = None
    """Another endpoint for Kinesis, such as a local server."""
    session: Any = None
    """A `boto3.Session` or `botocore.session.Session` to take credentials, region and configuration from."""
    credentials: Any = None
    """An object like botocore's: with `get_frozen_credentials()`, or with `access_key`, `secret_key` and `token`."""

    def __post_init__(self) -> None:
        violations: list[str] = []
        if self.region is not None and _REGION.fullmatch(self.region) is None:
            violations.append(f"region: a region looks like eu-west-1, not {self.region!r}")
        if self.profile is not None and self.session is not None:
            violations.append("profile: a session already has a profile; pass one of the two")
        if self.endpoint_url is not None and not _is_endpoint(self.endpoint_url):
            violations.append(f"endpoint_url: an endpoint looks like http://localhost:4567, not {self.endpoint_url!r}")
        if self.session is not None and not callable(getattr(self.session, "get_credentials", None)):
            violations.append(f"session: must be a boto3 or botocore session, not {type(self.session).__name__}")
        if self.credentials is not None and not _are_credentials(self.credentials):
            violations.append(
                "credentials: must be an object with get_frozen_credentials(), or with access_key and secret_key, "
                f"not {type(self.credentials).__name__}"
            )
        refuse(violations)

    def __repr__(self) -> str:
        names = ("region", "profile", "endpoint_url")
        shown = [f"{name}={value!r}" for name in names if (value := getattr(self, name)) is not None]
        shown += [f"{name}=..." for name in ("session", "credentials") if getattr(self, name) is not None]
        return f"Aws({', '.join(shown)})"


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _are_credentials(value: Any) -> bool:
    return callable(getattr(value, "get_frozen_credentials", None)) or all(
        isinstance(getattr(value, name, None), str) for name in ("access_key", "secret_key")
    )


def _is_worker_id(name: str) -> bool:
    """Whether the name is short and needs no escapes in JSON, which would make the stored row longer."""
    is_short = 0 < len(name.encode(errors="replace")) <= WORKER_ID_BYTES_MAX
    return is_short and name.isprintable() and not set(name) & set('"\\')


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    worker_id: str | None = None
    """A name for people, at most 64 bytes in UTF-8; by default host name and process id. Ownership ignores it."""
    worker_id_exclusive: bool = False
    """Set it only if the platform guarantees that no two processes ever run with the same `worker_id`, not even briefly
    or during a network partition. Then a restarted worker takes its shards back at once, with every store. If the
    guarantee is broken, records are handled twice and out of order."""
    expiry: float = 10.0
    """A worker without heartbeats for this long loses its shards. A shorter expiry recovers faster from crashes, but
    tolerates only shorter pauses. The heartbeat interval and all other times follow from it. Same default as KCL."""
    max_shards: int | None = None
    """How many shards this worker holds at most; None for its fair share."""
    stall_limit: float = 120.0
    """If the event loop is blocked for this long, the worker gives up its shards."""
    drain_deadline: float = 20.0
    """How long a stop or a hand-off waits for running handler calls. Then a stop cancels them; for a hand-off see
    `hand_off`. The default leaves 10 s of Kubernetes's default grace period for the last commits."""
    hand_off: Literal["keep", "force"] = "keep"
    """If handler calls outlast `drain_deadline` while another worker waits for the shard: `keep` keeps the shard;
    `force` cancels the calls, and gives the shard away when they have ended. Its new owner repeats their records.
    Calls in threads cannot be cancelled, so we wait for them."""
    on_zombie: Literal["report", "exit"] = "report"
    """If a handler call outlives its lease: `report` emits an event and lets it run; `exit` ends the process at once,
    before another worker can start the same record. For sinks that cannot check the fence token."""
    create: Literal["if_missing", "never"] = "if_missing"
    """Whether to create the application if the store does not have it. Use `never` in production: an emptied store or a
    misspelt name is then an error, and not a new application that starts over."""
    any_order: bool = False
    """Whether this worker joins workers with another `order=`, for a rolling change; without it, it refuses to start.
    Meanwhile each shard has the order of its owner, and `OrderChanged` reports what a change of owners repeats."""

    def __post_init__(self) -> None:
        violations = check_field_types(self)
        if self.expiry < 3.0:
            violations.append(f"expiry is {self.expiry} s; it must be at least 3 s")
        if self.max_shards is not None and self.max_shards < 1:
            violations.append(f"max_shards is {self.max_shards}; it must be at least 1, or None for a fair share")
        if self.stall_limit < self.expiry:
            violations.append(
                f"stall_limit is {self.stall_limit} s; it must not be shorter than expiry, {self.expiry} s"
            )
        if self.drain_deadline <= 0:
            violations.append(f"drain_deadline is {self.drain_deadline} s; it must be positive")
        if self.worker_id is not None and not _is_worker_id(self.worker_id):
            violations.append(
                f"worker_id is {self.worker_id!r}; it must have 1 to {WORKER_ID_BYTES_MAX} bytes in UTF-8, all "
                "printable, without quotation marks and backslashes: every heartbeat writes it"
            )
        if self.worker_id_exclusive and self.worker_id is None:
            violations.append("worker_id_exclusive needs a worker_id that no other process has")
        refuse(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollingSettings:
    shard_share: float = 1.0
    """The share of each shard's read quota (5 reads and 2 MiB per second, for all polling applications of a stream)
    that this application may use."""
    idle_interval: float = 1.0
    """The longest pause between two reads of an idle shard. Longer means fewer calls and more latency. KCL: 1 s."""
    listing_interval: float = 30.0
    """How often to list the stream's shards, to find those that no read has named."""
    misrouted: Literal["by_writer", "deliver", "skip"] = "by_writer"
    """What to do with aggregates that contain records of another shard. `by_writer` delivers and marks them, but skips
    those of our own producer, which sends them again."""

    def __post_init__(self) -> None:
        violations = check_field_types(self)
        if not 0 < self.shard_share <= 1:
            violations.append(f"shard_share is {self.shard_share}; it must be above 0 and at most 1")
        if not 0.2 <= self.idle_interval <= 60:
            violations.append(f"idle_interval is {self.idle_interval} s; it must be from 0.2 to 60 s")
        if self.listing_interval < 1:
            violations.append(f"listing_interval is {self.listing_interval} s; it must be at least 1 s")
        refuse(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutSettings:
    """For `read="fanout"`. By default an application registers one consumer per stream, and keeps it."""

    consumer_name: str | None = None
    """The name of the stream consumer; None for `anabranch-<app>-<8 hex digits>`. It is registered if it is missing.
    Two applications must not share one."""
    consumer_arn: str | None = None
    """The ARN of a registered consumer, for credentials that may only subscribe. It is never registered or removed."""
    deregister_on_stop: bool = False
    """Whether the last worker to stop removes the consumer that the application registered. The next start waits until
    a new one is active. A registered consumer costs money while nobody reads."""

    def __post_init__(self) -> None:
        violations = check_field_types(self)
        if self.consumer_name is not None and _CONSUMER_NAME.fullmatch(self.consumer_name) is None:
            violations.append(
                f"consumer_name is {self.consumer_name!r}; it must have 1 to 128 letters, digits, '_', '.' and '-'"
            )
        if self.consumer_arn is not None and _CONSUMER_ARN.fullmatch(self.consumer_arn) is None:
            violations.append(
                "consumer_arn: a consumer's ARN looks like "
                "arn:aws:kinesis:eu-west-1:123456789012:stream/orders/consumer/billing:1700000000, "
                f"not {self.consumer_arn!r}"
            )
        if self.consumer_arn is not None and (self.consumer_name is not None or self.deregister_on_stop):
            violations.append("consumer_arn excludes consumer_name and deregister_on_stop: it is managed elsewhere")
        refuse(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    interval: float | None = None
    """How often finished records are committed. After a crash, records finished since the last commit are repeated.
    None: the lease store's own value (memory, SQLite and Redis: 1 s, DynamoDB: 10 s, S3: 60 s)."""
    records: int = 10_000
    """Commit earlier when this many records of a shard are finished."""
    replay_bytes_max: int = 256 << 20
    """With order="key": how many bytes after an unfinished record may be finished. A crash repeats them."""

    def __post_init__(self) -> None:
        violations = check_field_types(self)
        if self.interval is not None and not 0.01 <= self.interval <= 300:
            violations.append(f"interval is {self.interval} s; it must be from 0.01 to 300 s")
        if self.records < 1:
            violations.append(f"records is {self.records}; it must be at least 1")
        if self.replay_bytes_max < 1 << 20:
            violations.append(f"replay_bytes_max is {self.replay_bytes_max}; it must be at least 1 MiB")
        refuse(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    leases: LeaseSettings = field(default_factory=LeaseSettings)
    polling: PollingSettings = field(default_factory=PollingSettings)
    fanout: FanOutSettings = field(default_factory=FanOutSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    budget: Budget | int = 256 << 20
    """How many bytes of records may be unfinished. Consumers of one event loop can share a `Budget`."""
    start_timeout: float = 120.0
    """How long the start waits while a stream is being created, or while the service throttles or fails."""
    at_shard_end: Literal["wait", "finish"] = "wait"
    """When a closed shard has only records left that wait for a retry, its children wait, too. `wait` retries these
    records as `on_failure` says; `finish` applies its last step (`then`) at once."""
    health_host: str = "0.0.0.0"  # noqa: S104 -- probes come from outside the container
    """The address on which `health_port=` listens; by default all of this machine."""
    trace: bool = False
    """Whether to make OpenTelemetry spans for reads and handler calls. Needs the extra `otel`."""

    def __post_init__(self) -> None:
        violations = check_field_types(self)
        if isinstance(self.budget, int) and self.budget < READ_RESERVE_BYTES:
            violations.append(f"budget is {self.budget} bytes; one read may need {READ_RESERVE_BYTES}")
        if self.start_timeout < 0:
            violations.append(f"start_timeout is {self.start_timeout} s; it must not be negative")
        refuse(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    shard_share: float = 1.0
    """The share of each shard's write quota (1,000 records and 1 MiB per second) that this producer may use. Several
    producers adapt to each other; a lower share leaves room from the start. Until the shards are listed, a lower share
    and the two limits below apply to the stream as if it were one shard."""
    shard_bytes_per_second: float | None = None
    """The most bytes that it writes to each shard in a second, if below its share."""
    shard_records_per_second: float | None = None
    """The most Kinesis records (an aggregate is one) that it writes to each shard in a second, if below its share."""
    requests_in_flight: int = 8
    """Concurrent PutRecords calls per stream. More give more throughput over long round trips."""
    after_failure: Literal["fail", "continue"] = "fail"
    """With order="key", what becomes of later records of a key whose record failed: `fail` fails them too, until that
    failure has been seen (awaited, taken by on_undelivered, or raised by flush); `continue` writes them."""
    aggregate_partition_key: str | None = None
    """The partition key of aggregates, seen by readers that do not deaggregate; None for that of the first record. The
    KPL uses "a". It does not choose the shard."""
    trace: bool | Literal["wrap"] = False
    """Whether to make an OpenTelemetry span for each put, and to send its trace parent with sampled records that are
    aggregated. `"wrap"` sends it with single records too: each becomes an aggregate of one, so use it only if all
    consumers deaggregate. Needs the extra `otel`."""
    exit_timeout: float = 10.0
    """When a program ends without closing its `SyncProducer`: the seconds that delivering the rest may take."""

    def __post_init__(self) -> None:
        violations = check_field_types(self)
        if self.exit_timeout < 0:
            violations.append(f"exit_timeout is {self.exit_timeout} s; it must not be negative")
        if not 0 < self.shard_share <= 1:
            violations.append(f"shard_share is {self.shard_share}; it must be above 0 and at most 1")
        for name, quota in (
            ("shard_bytes_per_second", SHARD_WRITE_BYTES_PER_SECOND),
            ("shard_records_per_second", SHARD_WRITE_RECORDS_PER_SECOND),
        ):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit <= quota:
                violations.append(f"{name} is {limit}; it must be above 0 and at most {quota}, a shard's quota")
        if not 1 <= self.requests_in_flight <= 64:
            violations.append(f"requests_in_flight is {self.requests_in_flight}; it must be from 1 to 64")
        if self.aggregate_partition_key is not None and not 1 <= len(self.aggregate_partition_key) <= 256:
            violations.append("aggregate_partition_key must have 1 to 256 characters")
        refuse(violations)
