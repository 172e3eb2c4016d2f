"""From the records of a read to the records that handlers see: opened aggregates, nothing twice.

The rules:
- every source of records passes this one filter: what lies at or before the position that the read resumed from is
  dropped (rule M2). Within a shard records come in order, so after the first that passes the rest need no look;
- a sub-record whose hash key lies outside its shard is delivered and marked, because other writers never send it again;
  an aggregate of our own producer is skipped whole instead, because it does (rule F6);
- aggregates are opened a stretch at a time, when the lane asks.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.sequence_numbers import Position
from anabranch._wire.aggregate import MAGIC, PRODUCER_TAG
from anabranch._wire.deaggregate import Aggregate, open_aggregate
from anabranch._wire.messages import KinesisRecord
from anabranch.records import Record

__all__ = ["MisroutedPolicy", "Unpacker"]

MisroutedPolicy = Literal["by_writer", "deliver", "skip"]

STRETCH = 256
"""Records that are made at once."""


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
        self._until_seconds = until_seconds
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
        stream, shard_id = self._stream, self._shard_id
        plain: list[Record[bytes]] = []
        until = self._until_seconds
        for record in records:
            data = record.data
            if until is not None and (self.reached_until or record.arrival_seconds >= until):
                self.reached_until = True
                break
            first = 0
            if after is not None:
                if (sequence_number := int(record.sequence_number)) < after.sequence_number:
                    continue
                if sequence_number == after.sequence_number:
                    first = after.sub_sequence_number + 1
            if data[:4] == MAGIC and (aggregate := open_aggregate(data)) is not None:
                if plain:
                    yield plain
                    plain = []
                yield from self._unpack_aggregate(record, aggregate, first)
                continue
            if after is not None:
                if Position(sequence_number) <= after:
                    continue
                after = None
            plain.append(
                Record(
                    stream=stream,
                    shard_id=shard_id,
                    sequence_number=record.sequence_number,
                    partition_key=record.partition_key,
                    arrival_seconds=record.arrival_seconds,
                    data=data,
                    value=data,
                )
            )
            if len(plain) >= STRETCH:
                yield plain
                plain = []
        if plain:
            yield plain

    def _unpack_aggregate(
        self, record: KinesisRecord, aggregate: Aggregate, first: int
    ) -> Iterator[list[Record[bytes]]]:
        if first >= len(aggregate):
            return
        strays = frozenset[int]()
        if self._range is not None and (outside := aggregate.misrouted(self._range)):
            marked = PRODUCER_TAG in aggregate.first_tags
            if self._policy == "skip" or (self._policy == "by_writer" and marked):
                self._skipped_aggregate_count += 1
                return
            strays = frozenset(index for index in outside if index >= first)
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
