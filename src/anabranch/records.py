"""Public values: what handlers receive, and the result of a write.

All are plain values that a unit test can build. There may be millions of records, so they hold no references to other
objects, and the garbage collector does not track them.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec

from anabranch._model.streams import BEFORE_FIRST_SUB, Position

__all__ = ["Attempt", "Batch", "Context", "PutResult", "Record"]

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
    record may still be in the stream; if delivered, it may be there twice.
    """

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
