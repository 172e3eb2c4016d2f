"""The records of one shard, in order, found by sequence number or by arrival time.

Columns instead of rows: numbers to bisect, records ready to be encoded, and running totals of bytes so that "as
many as fit into 10 MiB" is a search too. Numbers and arrival times only grow. Trimming moves the beginning; memory
is given back in large steps.
"""

from bisect import bisect_left, bisect_right
from typing import Any, Final

import msgspec

from anabranch._wire.timestamps import Timestamp

__all__ = ["RecordLog", "StoredRecord"]

_TRIM_STEP: Final = 1024


class StoredRecord(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename="pascal"):
    """A record as GetRecords answers it. Members that AWS leaves out are absent in its JSON, too."""

    sequence_number: str
    approximate_arrival_timestamp: float
    data: bytes
    partition_key: str | None = None
    """None only where the stream distributes by itself and the writer gave none."""
    encryption_type: str | None = None
    """`KMS`, or None for a record that was not encrypted."""

    @property
    def size_bytes(self) -> int:
        return len(self.data) + (0 if self.partition_key is None else len(self.partition_key.encode()))

    @property
    def arrival_ms(self) -> int:
        return round(self.approximate_arrival_timestamp * 1000)

    def members(self) -> dict[str, Any]:
        members: dict[str, Any] = {
            "SequenceNumber": self.sequence_number,
            "ApproximateArrivalTimestamp": Timestamp(self.approximate_arrival_timestamp),
            "Data": self.data,
        }
        if self.partition_key is not None:
            members["PartitionKey"] = self.partition_key
        if self.encryption_type is not None:
            members["EncryptionType"] = self.encryption_type
        return members


class RecordLog:
    __slots__ = ("_bytes", "begin", "numbers", "records", "totals")

    def __init__(self) -> None:
        self.begin = 0
        """Index of the oldest record that was not trimmed."""
        self._bytes = 0  # all bytes ever appended
        self.numbers: list[int] = []
        self.records: list[StoredRecord] = []
        self.totals: list[int] = []
        """Bytes appended before each record: a difference of two is the size of what lies between."""

    def __len__(self) -> int:
        return len(self.records) - self.begin

    def append(self, number: int, record: StoredRecord, size_bytes: int) -> None:
        self.numbers.append(number)
        self.records.append(record)
        self.totals.append(self._bytes)
        self._bytes += size_bytes

    def trim(self, before_ms: int) -> None:
        """Forget the records that arrived before this time."""
        begin = self.begin
        records = self.records
        if begin == len(records) or records[begin].arrival_ms >= before_ms:
            return
        begin = bisect_left(records, before_ms, begin, key=_arrival_ms)
        if begin >= _TRIM_STEP and begin * 2 >= len(records):
            del self.numbers[:begin], self.records[:begin], self.totals[:begin]
            begin = 0
        self.begin = begin

    def index_at(self, number: int) -> int:
        """Where the first record with this number or a later one stands, or would stand."""
        return max(self.begin, bisect_left(self.numbers, number))

    def index_at_time(self, at_ms: int) -> int:
        return bisect_left(self.records, at_ms, self.begin, key=_arrival_ms)

    def index_after(self, begin: int, count_max: int, bytes_max: int) -> int:
        """The end of a read that starts at `begin`: bounded both ways, but at least one record if there is any."""
        end = min(begin + count_max, len(self.records))
        if end > begin + 1 and self.bytes_between(begin, end) > bytes_max:
            # totals[i] is where record i starts, so the last index whose start fits is where the read may end.
            end = max(begin + 1, bisect_right(self.totals, self.totals[begin] + bytes_max, begin, end) - 1)
        return end

    def bytes_between(self, begin: int, end: int) -> int:
        if begin >= end:
            return 0
        return (self.totals[end] if end < len(self.totals) else self._bytes) - self.totals[begin]

    def behind_ms(self, index: int, now_ms: int) -> int:
        """MillisBehindLatest of a reader that comes next to this record: zero at the tip and only there."""
        return 0 if index == len(self.records) else max(1, now_ms - self.records[index].arrival_ms)


def _arrival_ms(record: StoredRecord) -> int:
    return record.arrival_ms
