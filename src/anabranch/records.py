"""The public values: what handlers receive, and what a write ends as.

All are plain values that a unit test can build. A record holds no reference to the batch, the consumer or a
tracker: there may be millions of them, so they are slim and not tracked by the garbage collector.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec

from anabranch._model.sequence_numbers import BEFORE_FIRST_SUB, Position

__all__ = ["Attempt", "Batch", "Context", "PutResult", "Record"]

T = TypeVar("T")


class Record(msgspec.Struct, Generic[T], frozen=True, gc=False, kw_only=True):
    """One record as its producer wrote it: a record of the stream, or one sub-record of a KPL aggregate."""

    stream: str
    shard_id: str
    sequence_number: str
    sub_sequence_number: int = BEFORE_FIRST_SUB
    """Its index inside an aggregate; -1 for a record that was written alone."""
    partition_key: str
    explicit_hash_key: str | None = None
    """Known for sub-records of an aggregate only: the service does not return it."""
    arrival_seconds: float
    """When the service took it, in seconds since 1970; approximate, and not always increasing."""
    data: bytes
    value: T = None  # type: ignore[assignment]
    """What `decode=` made of the data; the data itself by default."""
    misrouted: bool = False
    """The hash key of this sub-record lies outside its shard's range: other writers' aggregates that straddled a
    split.
    """

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
    """What a handler may want to know beside the record: passed to every handler whose second parameter can be given by
    place, with a default or without. Keyword-only parameters and `*args` do not ask for it.
    """

    attempt: int
    """1 for the first call with this record, more for a retry."""
    fence_token: int
    """Grows with every owner of the record's line of shards: a sink that remembers the highest one seen can refuse a
    late write of an owner that lost its lease."""
    millis_behind_latest: int | None = None
    """How far the last read of the shard was behind its tip."""
    deadline: float | None = None
    """Seconds that the call may take, where the policy sets a time-out."""
    fenced_at_ms: int | None = None
    """When the lease may lapse, on the machine's boot-time clock; later heartbeats move it on."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try to write a record."""

    started_seconds: float
    """Wall-clock time, in seconds since 1970."""
    duration_seconds: float
    code: str | None = None
    """None for the attempt that succeeded; else AWS's code, or ours for what never reached AWS."""
    message: str | None = None
    request_id: str | None = None


class PutResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the writing of one record ended: delivered, failed, or left open by the service (`maybe_written`)."""

    stream: str
    partition_key: str
    explicit_hash_key: str | None = None
    data: bytes
    shard_id: str | None = None
    """None where it was not delivered."""
    sequence_number: str | None = None
    sub_sequence_number: int = BEFORE_FIRST_SUB
    attempts: tuple[Attempt, ...] = ()
    maybe_written: bool = False
    """An attempt with this record was left open by the service, or landed where consumers skip it. Not delivered, the
    record may be in the stream all the same; delivered, it may be there twice.
    """

    @property
    def delivered(self) -> bool:
        return self.sequence_number is not None

    @property
    def error(self) -> str | None:
        """Why it was not delivered, in one line; None if it was."""
        if self.delivered:
            return None
        last: Any = self.attempts[-1] if self.attempts else None
        return "never sent" if last is None else f"{last.code}: {last.message}"
