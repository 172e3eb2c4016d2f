"""One shard: a range of hash keys, its parents and children, and its records.

Invariants: the sequence numbers and arrival times of its records only grow, whatever the clock does. A shard closes at
most once. Every record of a closed shard arrived before `closed_ms`, and every record of its children at or after it.
The children's sequence numbers start above the parent's end, because their `created_s` is a later second. That second
may be ahead of the clock. The children accept records at once.
"""

from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import Any, Final

import msgspec

from anabranch._model.hash_keys import HashKeyRange
from anabranch.local.state.identifiers import (
    COUNTER_MAX,
    COUNTER_SHIFT,
    COUNTER_STEP,
    SECOND_SHIFT,
    Timestamp,
    sequence_number_prefix,
    shard_id_of,
)
from anabranch.local.state.throughput import ShardThroughput


class StoredRecord(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename="pascal"):
    """A record as GetRecords returns it."""

    sequence_number: str
    approximate_arrival_timestamp: float
    data: bytes
    partition_key: str | None = None
    """None only for a stream with AUTO distribution, where the key is optional."""
    encryption_type: str | None = None
    """`KMS`, or None if not encrypted."""

    @property
    def size_bytes(self) -> int:
        return len(self.data) + (0 if self.partition_key is None else len(self.partition_key.encode()))

    @property
    def arrival_ms(self) -> int:
        return round(self.approximate_arrival_timestamp * 1000)

    def members(self) -> dict[str, Any]:
        members: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        members["ApproximateArrivalTimestamp"] = Timestamp(self.approximate_arrival_timestamp)
        return members


_arrival_ms: Final = attrgetter("arrival_ms")


class RecordLog:
    """The records of one shard in order, found by sequence number or arrival time.

    Stored as columns: numbers to bisect, records ready to encode, and running totals of bytes, so that "as many as fit
    into 10 MiB" is a search too. Trimming moves `begin`; `free` gives the memory back.
    """

    def __init__(self) -> None:
        self.begin = 0
        """Index of the oldest record that is not trimmed."""
        self.numbers: list[int] = []
        self.records: list[StoredRecord] = []
        self.totals = [0]
        """Bytes before each record, and after the last. The difference of two is the size of the records between."""

    def __len__(self) -> int:
        return len(self.records) - self.begin

    def append(self, number: int, record: StoredRecord, size_bytes: int) -> None:
        self.numbers.append(number)
        self.records.append(record)
        self.totals.append(self.totals[-1] + size_bytes)

    def trim(self, before_ms: int) -> None:
        if self.begin < len(self.records) and self.records[self.begin].arrival_ms < before_ms:
            self.begin = self.index_at_time(before_ms)

    def free(self) -> None:
        """Frees the memory of trimmed records."""
        if self.begin:
            del self.numbers[: self.begin], self.records[: self.begin], self.totals[: self.begin]
            self.begin = 0

    def index_at(self, number: int) -> int:
        """Index of the first record with this number or a later one; the end if there is none."""
        return max(self.begin, bisect_left(self.numbers, number))

    def index_at_time(self, at_ms: int) -> int:
        return bisect_left(self.records, at_ms, self.begin, key=_arrival_ms)

    def end_of_read(self, begin: int, count_max: int, bytes_max: int) -> int:
        """The end of a read that starts at `begin`: within both limits, but at least one record if there is one."""
        end = min(begin + count_max, len(self.records))
        fitting = bisect_right(self.totals, self.totals[begin] + bytes_max, begin, end + 1) - 1
        return min(end, max(begin + 1, fitting))

    def bytes_between(self, begin: int, end: int) -> int:
        return self.totals[end] - self.totals[begin]

    def behind_ms(self, index: int, now_ms: int) -> int:
        """MillisBehindLatest of a reader whose next record is `index`. It is zero only at the tip."""
        return 0 if index == len(self.records) else max(1, now_ms - self.records[index].arrival_ms)


class Shard:
    def __init__(
        self, index: int, hash_key_range: HashKeyRange, opened_ms: int, created_s: int, parent_ids: tuple[str, ...] = ()
    ) -> None:
        self.index = index
        self.shard_id = shard_id_of(index)
        self.hash_key_range = hash_key_range
        self.opened_ms = opened_ms
        self.created_s = created_s
        self.parent_ids = parent_ids
        """ParentShardId, and after a merge AdjacentParentShardId."""
        self.child_ids: tuple[str, ...] = ()
        self.closed_ms: int | None = None
        self.counter = 0
        self.log = RecordLog()
        self.throughput = ShardThroughput()
        self._last_ms = opened_ms
        self._prefix = sequence_number_prefix(created_s, index)

    @property
    def is_open(self) -> bool:
        return self.closed_ms is None

    @property
    def starting_sequence_number(self) -> int:
        return self._prefix + (self.created_s << SECOND_SHIFT)

    @property
    def ending_sequence_number(self) -> int | None:
        if self.closed_ms is None:
            return None
        return self._number(COUNTER_MAX, self.closed_ms)

    @property
    def latest_second(self) -> int:
        """The highest second in the sequence numbers of its records so far. It may be ahead of the clock."""
        return max(self._last_ms // 1000, self.created_s)

    def continuation(self, counter: int, now_ms: int) -> int:
        """A number above the record with this counter and below the next record."""
        return self._number(counter + 1, now_ms)

    def tip(self) -> int:
        """A position above all records so far and at or below the next one."""
        return self._prefix + ((self.counter + 1) << COUNTER_SHIFT)

    def append(
        self, data: bytes, partition_key: str | None, size_bytes: int, now_ms: int, encryption_type: str | None
    ) -> StoredRecord:
        arrival_ms = self._last_ms = max(now_ms, self._last_ms)
        self.counter += COUNTER_STEP
        number = self._number(self.counter, arrival_ms)
        record = StoredRecord(str(number), arrival_ms / 1000, data, partition_key, encryption_type)
        self.log.append(number, record, size_bytes)
        return record

    def restore(self, record: StoredRecord) -> None:
        """Adds a record from the journal. A record that is already there is ignored."""
        number = int(record.sequence_number)
        if self.log.numbers and number <= self.log.numbers[-1]:
            return
        self.counter = max(self.counter, number >> COUNTER_SHIFT & COUNTER_MAX)
        self._last_ms = max(self._last_ms, record.arrival_ms)
        self.log.append(number, record, record.size_bytes)

    @property
    def closes_from_ms(self) -> int:
        """The earliest time at which it can close, which is after its last record."""
        return self._last_ms + 1 if self.counter else self._last_ms

    def was_open_at(self, at_ms: int) -> bool:
        return self.opened_ms <= at_ms and (self.closed_ms is None or at_ms < self.closed_ms)

    def is_expired(self, horizon_ms: int) -> bool:
        """Closed so long ago that all its records are past the trim horizon."""
        return self.closed_ms is not None and self.closed_ms <= horizon_ms

    def members(self) -> dict[str, Any]:
        members: dict[str, Any] = {"ShardId": self.shard_id}
        members.update(zip(("ParentShardId", "AdjacentParentShardId"), self.parent_ids, strict=False))
        start, end = self.hash_key_range
        members["HashKeyRange"] = {"StartingHashKey": str(start), "EndingHashKey": str(end)}
        numbers = members["SequenceNumberRange"] = {"StartingSequenceNumber": str(self.starting_sequence_number)}
        if self.ending_sequence_number is not None:
            numbers["EndingSequenceNumber"] = str(self.ending_sequence_number)
        return members

    def to_row(self) -> list[Any]:
        """The shard in the journal, without its records: they have their own entries."""
        start, end = self.hash_key_range
        return [
            self.index,
            str(start),
            str(end),
            self.opened_ms,
            self.created_s,
            self.parent_ids,
            self.child_ids,
            self.closed_ms,
            self.counter,
            self._last_ms,
        ]

    @classmethod
    def from_row(cls, row: list[Any]) -> "Shard":
        index, start, end, opened_ms, created_s, parent_ids, child_ids, closed_ms, counter, last_ms = row
        shard = cls(index, HashKeyRange(int(start), int(end)), opened_ms, created_s, tuple(parent_ids))
        shard.child_ids = tuple(child_ids)
        shard.closed_ms = closed_ms
        shard.counter = counter
        shard._last_ms = last_ms
        return shard

    def _number(self, counter: int, at_ms: int) -> int:
        second = max(at_ms // 1000, self.created_s)
        return self._prefix + (counter << COUNTER_SHIFT) + (second << SECOND_SHIFT)
