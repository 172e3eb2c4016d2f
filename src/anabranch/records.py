"""Public values: what handlers receive and report, and the result of a write.

All are plain values that a unit test can build. There may be millions of records, so they hold no references to other
objects, and the garbage collector does not track them.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any, Generic, TypeVar

import msgspec

from anabranch._model.streams import BEFORE_FIRST_SUB, Position
from anabranch.errors import ConfigurationError

__all__ = ["Attempt", "Batch", "BatchFailure", "Context", "PutResult", "Record"]

T = TypeVar("T")


class Record(msgspec.Struct, Generic[T], frozen=True, gc=False, kw_only=True):
    """One record as the producer wrote it: a record of the stream, or a sub-record of a KPL aggregate."""

    stream: str
    shard_id: str
    sequence_number: str
    sub_sequence_number: int = BEFORE_FIRST_SUB
    """The index inside an aggregate; -1 for a plain record."""
    partition_key: str
    explicit_hash_key: str | None = None
    """Only for sub-records of an aggregate: the service does not return it."""
    arrival_seconds: float
    """When the service received it, in seconds since 1970. Approximate, and not always increasing."""
    data: bytes
    value: T = None  # type: ignore[assignment]
    """What `decode=` made of the data; the data itself by default."""
    misrouted: bool = False
    """The hash key of this sub-record belongs to another shard: another producer wrote the aggregate during a split."""
    trace_parent: str | None = None
    """The W3C trace parent of its put, if that was traced and the record is in an aggregate of our producer."""

    @property
    def approximate_arrival_timestamp(self) -> datetime:
        return datetime.fromtimestamp(self.arrival_seconds, UTC)

    @property
    def position(self) -> Position:
        return Position(int(self.sequence_number), self.sub_sequence_number)


class Batch(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Records of one shard, in stream order."""

    stream: str
    shard_id: str
    records: list[Record[T]]
    millis_behind_latest: int | None = None

    def __iter__(self) -> Iterator[Record[T]]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


class BatchFailure(Exception):  # noqa: N818 -- it says what the handler reports, not what is wrong with its call
    """A batch handler raises it to say which records failed. The records before the first of them are finished. That
    record and all after it are delivered again, whatever the handler did with them.

    ```python
    raise anabranch.BatchFailure(failed=[record]) from error
    ```
    """

    def __init__(self, failed: Sequence[Record[Any]]) -> None:
        self.failed = tuple(failed)
        if not self.failed or not all(isinstance(record, Record) for record in self.failed):
            raise ConfigurationError(f"BatchFailure(failed={failed!r}): expected at least one record of the batch")
        super().__init__(f"{len(self.failed)} of the batch failed, the first is record {self.failed[0].position}")

    def __reduce__(self) -> tuple[type["BatchFailure"], tuple[Sequence[Record[Any]]]]:
        return type(self), (self.failed,)  # a handler may run in another process


_METRIC_NAME = re.compile("[ -~]{1,200}")


def checked_metric(name: object, value: Any) -> tuple[str, float]:
    """Raises if the name or the type of the value is wrong."""
    if not (isinstance(name, str) and _METRIC_NAME.fullmatch(name)):
        raise ValueError(f"a metric's name is {name!r}; it must have 1 to 200 printable ASCII characters")
    try:
        return name, float(value)
    except OverflowError:  # an integer that is too large: as a float of that size, it is refused with an event
        return name, inf if value > 0 else -inf
    except (TypeError, ValueError):
        raise TypeError(f"the value of metric {name!r} is {value!r}; it must be a number") from None


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The optional second argument of a handler. It is passed if the handler has a second positional parameter, with or
    without a default. Keyword-only parameters and `*args` do not count.
    """

    attempt: int
    """1 for the first call with this record, more for a retry."""
    fence_token: int
    """Grows with every new owner of the shard, and from parent to child. A sink that remembers the highest token can
    refuse late writes of an owner that lost its lease."""
    millis_behind_latest: int | None = None
    """How far the last read of the shard was behind its tip."""
    deadline: float | None = None
    """Seconds that the call may take, if the policy sets a timeout."""
    fenced_at_ms: int | None = None
    """When the lease may expire, on the machine's boot-time clock. Heartbeats extend it."""
    metrics: list[tuple[str, float]] = []
    """What the handler reported with `metric`."""

    def metric(self, name: str, value: float) -> None:
        """Reports a value of a custom metric, from any thread or process. It counts only if the call succeeds."""
        self.metrics.append(checked_metric(name, value))


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to write a record."""

    started_seconds: float
    """Wall-clock time, in seconds since 1970."""
    duration_seconds: float
    code: str | None = None
    """None if the attempt succeeded; otherwise AWS's error code, or ours if the request never reached AWS."""
    message: str | None = None
    request_id: str | None = None


class PutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of writing one record: delivered, failed, or unknown (`maybe_written`)."""

    stream: str
    partition_key: str
    explicit_hash_key: str | None = None
    data: bytes
    shard_id: str | None = None
    """None if it was not delivered."""
    sequence_number: str | None = None
    sub_sequence_number: int = BEFORE_FIRST_SUB
    attempts: tuple[Attempt, ...] = ()
    maybe_written: bool = False
    """The outcome of an attempt is unknown, or the record was written where consumers skip it. If not delivered, the
    record may still be in the stream; if delivered, it may be there twice."""

    @property
    def delivered(self) -> bool:
        return self.sequence_number is not None

    @property
    def error(self) -> str | None:
        """Why it was not delivered, in one line; None if it was delivered."""
        if self.delivered:
            return None
        last: Any = self.attempts[-1] if self.attempts else None
        return "never sent" if last is None else f"{last.code}: {last.message}"
