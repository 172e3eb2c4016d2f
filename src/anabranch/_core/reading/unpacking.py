"""From the records of a read to the records that handlers see: opened aggregates, nothing twice.

The rules:
- every source of records passes this one filter: what lies at or before the position that the read resumed from is
  dropped (rule M2). Within a shard records come in order, so after the first that passes the rest need no look;
- a sub-record whose hash key lies outside its shard is delivered and marked, because other writers never send it again;
  an aggregate of our own producer is skipped whole instead, because it does (rule F6);
- records are made, and aggregates opened, a stretch at a time, when the lane asks.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.sequence_numbers import Position
from anabranch._wire.aggregate import MAGIC, PRODUCER_TAG, Aggregate, open_aggregate
from anabranch._wire.messages import KinesisRecord
from anabranch.records import Record

__all__ = ["MisroutedPolicy", "Unpacker"]

MisroutedPolicy = Literal["by_writer", "deliver", "skip"]

STRETCH = 500
"""Records that are made at once: as many as are in a batch, so that one is rarely made of several pieces."""


class Unpacker:
    def __init__(
        self,
        stream: str,
        shard_id: str,
        hash_key_range: HashKeyRange | None,
        misrouted: MisroutedPolicy = "by_writer",
        *,
        until_seconds: float | None = None,
    ) -> None:
        self._stream = stream
        self._shard_id = shard_id
        self._range = hash_key_range
        self._policy: MisroutedPolicy = misrouted
        self.until_seconds = until_seconds
        self.reached_until = False
        """A record that arrived at or after the given time was seen: it and all after it are left alone."""
        self._misrouted_count = 0
        self._skipped_aggregate_count = 0

    def take_counts(self) -> tuple[int, int]:
        """Since the last call: sub-records delivered although they belong to another shard, and aggregates left out
        whole because their producer sends them again.
        """
        counts = self._misrouted_count, self._skipped_aggregate_count
        self._misrouted_count = self._skipped_aggregate_count = 0
        return counts

    def unpack(self, records: Sequence[KinesisRecord], after: Position | None) -> Iterator[list[Record[bytes]]]:
        """Stretches of the records that lie after the given position, in order; an empty stretch is never returned."""
        if self.until_seconds is not None:
            records = self._before(self.until_seconds, records)
        start = 0
        if after is not None:
            start = next(
                (n for n, record in enumerate(records) if _number(record) >= after.sequence_number), len(records)
            )
            if start < len(records) and _number(records[start]) == after.sequence_number:
                yield from self._open(records[start : start + 1], after.sub_sequence_number + 1)
                start += 1
        for at in range(start, len(records), STRETCH):
            stretch = records[at : at + STRETCH]
            made = self._plain(stretch, but=MAGIC)
            if len(made) == len(stretch):
                yield made
            else:
                yield from self._open(stretch)

    def _before(self, until_seconds: float, records: Sequence[KinesisRecord]) -> Sequence[KinesisRecord]:
        for index, record in enumerate(records):
            if self.reached_until or record.arrival_seconds >= until_seconds:
                self.reached_until = True
                return records[:index]
        return records

    def _plain(self, records: Sequence[KinesisRecord], *, but: bytes | tuple[()] = ()) -> list[Record[bytes]]:
        """As they are, but for those that begin with the given bytes: one pass, as most streams have no aggregates."""
        stream, shard_id = self._stream, self._shard_id
        return [
            Record(
                stream=stream,
                shard_id=shard_id,
                sequence_number=record.sequence_number,
                partition_key=record.partition_key,
                arrival_seconds=record.arrival_seconds,
                data=data,
                value=data,
            )
            for record in records
            if not (data := record.data).startswith(but)
        ]

    def _open(self, records: Sequence[KinesisRecord], first: int | None = None) -> Iterator[list[Record[bytes]]]:
        """Any records. With `first`, they were read before: of aggregates what lies from that place on is new, of plain
        records nothing.
        """
        made: list[Record[bytes]] = []
        for record in records:
            aggregate = open_aggregate(record.data)
            if aggregate is not None:
                for some in self._unpack_aggregate(record, aggregate, first or 0):
                    made += some
                    if len(made) >= STRETCH:
                        yield made
                        made = []
            elif first is None:
                made += self._plain((record,))
        if made:
            yield made

    def _unpack_aggregate(
        self, record: KinesisRecord, aggregate: Aggregate, first: int
    ) -> Iterator[list[Record[bytes]]]:
        if first >= len(aggregate):
            return
        strays = frozenset[int]()
        if self._range is not None and (ports := aggregate.misrouted(self._range)):
            marked = PRODUCER_TAG in aggregate.first_tags
            if self._policy == "skip" or (self._policy == "by_writer" and marked):
                self._skipped_aggregate_count += 1
                return
            strays = frozenset(index for index in ports if index >= first)
            self._misrouted_count += len(strays)
        for start in range(first, len(aggregate), STRETCH):
            yield [
                Record(
                    stream=self._stream,
                    shard_id=self._shard_id,
                    sequence_number=record.sequence_number,
                    sub_sequence_number=index,
                    partition_key=partition_key,
                    explicit_hash_key=explicit_hash_key,
                    arrival_seconds=record.arrival_seconds,
                    data=data,
                    value=data,
                    misrouted=index in strays,
                )
                for index, (partition_key, explicit_hash_key, data) in enumerate(
                    aggregate.sub_records(start, start + STRETCH), start
                )
            ]


def _number(record: KinesisRecord) -> int:
    return int(record.sequence_number)
