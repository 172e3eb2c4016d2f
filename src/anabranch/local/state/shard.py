"""One shard: a range of hash keys, a place in the lineage, and its records.

Invariants: sequence numbers and arrival times of its records only grow, whatever the clock does. A shard is open
until it is closed, once. Every record of a closed shard arrived before `closed_ms`, every record of its children
at or after it, and the children's numbers start above its end: they are created in a later second (`created_s`,
which may run ahead of the clock), while they take records at once.
"""

from typing import Any

from anabranch._model.hash_keys import HashKeyRange
from anabranch.local.state.record_log import RecordLog, StoredRecord
from anabranch.local.state.sequence import COUNTER_MAX, COUNTER_SHIFT, COUNTER_STEP, SECOND_SHIFT, prefix
from anabranch.local.state.throughput import ShardThroughput

__all__ = ["Shard", "full_shard_id", "shard_id_of"]


def shard_id_of(index: int) -> str:
    return f"shardId-{index:012d}"


def full_shard_id(text: str) -> str | None:
    """AWS reads the number after the last dash: `0`, `x-0` and `shardId-0` are all shardId-000000000000."""
    digits = text.rpartition("-")[2]
    return shard_id_of(int(digits)) if digits.isascii() and digits.isdigit() else None


class Shard:
    __slots__ = (
        "_last_ms",
        "_prefix",
        "child_ids",
        "closed_ms",
        "counter",
        "created_s",
        "hash_key_range",
        "index",
        "log",
        "opened_ms",
        "parent_ids",
        "shard_id",
        "throughput",
    )

    def __init__(
        self, index: int, hash_key_range: HashKeyRange, opened_ms: int, created_s: int, parent_ids: tuple[str, ...] = ()
    ) -> None:
        self.index = index
        self.shard_id = shard_id_of(index)
        self.hash_key_range = hash_key_range
        self.opened_ms = opened_ms
        self.created_s = created_s
        self.parent_ids = parent_ids
        """ParentShardId, and AdjacentParentShardId after a merge."""
        self.child_ids: tuple[str, ...] = ()
        self.closed_ms: int | None = None
        self.counter = 0
        self.log = RecordLog()
        self.throughput = ShardThroughput()
        self._last_ms = opened_ms
        self._prefix = prefix(created_s, index)

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

    def continuation(self, counter: int, now_ms: int) -> int:
        """A number above the record with this counter and below the next one."""
        return self._number(counter + 1, now_ms)

    def tip(self) -> int:
        """Where the next record will come: above all records so far."""
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
        """Take back a record that was written in an earlier life; once, however often it is told."""
        number = int(record.sequence_number)
        if self.log.numbers and number <= self.log.numbers[-1]:
            return
        self.counter = max(self.counter, number >> COUNTER_SHIFT & COUNTER_MAX)
        self._last_ms = max(self._last_ms, record.arrival_ms)
        self.log.append(number, record, record.size_bytes)

    def close(self, now_ms: int, child_ids: tuple[str, ...]) -> int:
        """No more records. Returns when its children open: past its own last record."""
        newest_ms = self._last_ms + 1 if self.counter else self._last_ms
        self.closed_ms = max(now_ms, newest_ms)
        self.child_ids = child_ids
        return self.closed_ms

    def was_open_at(self, at_ms: int) -> bool:
        return self.opened_ms <= at_ms and (self.closed_ms is None or at_ms < self.closed_ms)

    def is_expired(self, horizon_ms: int) -> bool:
        """Closed for so long that it cannot hold a record any more."""
        return self.closed_ms is not None and self.closed_ms <= horizon_ms

    def to_row(self) -> list[Any]:
        """What the journal keeps of it; records travel in entries of their own."""
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
