"""The records of one shard that were read but not handed out yet: unpacked, in order, and counted in bytes.

Pages go in as reads arrive. Records come out in stream order, unpacked when they are asked for. The window counts what
it holds, so that reading pauses when it is full and the byte budget is never exceeded. It drops nothing until it is
cleared.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Position
from anabranch._wire.aggregate import MAGIC, PRODUCER_TAG, Aggregate, open_aggregate
from anabranch._wire.messages import KinesisRecord
from anabranch.records import Record

SLICE_RECORDS = 500
"""Records that are unpacked at once: the size of a batch, so that a batch rarely needs several slices."""


class Unpacked(NamedTuple):
    """Records that were unpacked at once; never empty."""

    records: list[Record[bytes]]
    place: int | None = None
    """If none of them was in an aggregate: the place of the first one in its read."""


@dataclass(eq=False, repr=False)
class Unpacker:
    """Turns the records of a read into the records that handlers see.

    - Records at or before the position that the read resumed from are dropped (rule M2). A shard's records are in
      order, so only the first ones need a check.
    - A sub-record whose hash key is outside its shard is delivered and marked. An aggregate of our own producer is
      skipped instead, because the producer sends it again (rule F6).
    """

    _stream: str
    _shard_id: str
    _range: HashKeyRange | None
    misrouted: Literal["by_writer", "deliver", "skip"] = "by_writer"
    """What becomes of records of other shards in aggregates."""
    until_seconds: float | None = None
    reached_until: bool = False
    """A record that arrived at or after `until_seconds` was seen; it and all later ones are ignored."""
    _misrouted_count: int = 0
    _skipped_aggregate_count: int = 0

    def take_counts(self) -> tuple[int, int]:
        """Since the last call: misrouted sub-records that were delivered, and aggregates that were skipped."""
        counts = self._misrouted_count, self._skipped_aggregate_count
        self._misrouted_count = self._skipped_aggregate_count = 0
        return counts

    def unpack(self, records: Sequence[KinesisRecord], after: Position | None) -> Iterator[Unpacked]:
        """The records after the given position, in order."""
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
        for at in range(start, len(records), SLICE_RECORDS):
            some = records[at : at + SLICE_RECORDS]
            made = self._plain(some, but=MAGIC)
            if len(made) == len(some):
                yield Unpacked(made, at)
            else:
                yield from self._open(some)

    def _before(self, until_seconds: float, records: Sequence[KinesisRecord]) -> Sequence[KinesisRecord]:
        for index, record in enumerate(records):
            if self.reached_until or record.arrival_seconds >= until_seconds:
                self.reached_until = True
                return records[:index]
        return records

    def _plain(self, records: Sequence[KinesisRecord], *, but: bytes | None = None) -> list[Record[bytes]]:
        """All records whose first four bytes are not the given ones, in one pass: most streams have no aggregates."""
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
            if (data := record.data)[:4] != but  # faster than startswith()
        ]

    def _open(self, records: Sequence[KinesisRecord], first: int | None = None) -> Iterator[Unpacked]:
        """Records and aggregates. `first`: the first new sub-record of the record at which the read resumed."""
        made: list[Record[bytes]] = []
        for record in records:
            aggregate = open_aggregate(record.data)
            if aggregate is not None:
                for some in self._unpack_aggregate(record, aggregate, first or 0):
                    made += some
                    if len(made) >= SLICE_RECORDS:
                        yield Unpacked(made)
                        made = []
            elif first is None:
                made += self._plain((record,))
        if made:
            yield Unpacked(made)

    def _unpack_aggregate(
        self, record: KinesisRecord, aggregate: Aggregate, first: int
    ) -> Iterator[list[Record[bytes]]]:
        if first >= len(aggregate):
            return
        strays = frozenset[int]()
        if self._range is not None and (ports := aggregate.misrouted(self._range)):
            marked = PRODUCER_TAG in aggregate.first_tags
            if self.misrouted == "skip" or (self.misrouted == "by_writer" and marked):
                self._skipped_aggregate_count += 1
                return
            strays = frozenset(index for index in ports if index >= first)
            self._misrouted_count += len(strays)
        stream, shard_id = self._stream, self._shard_id
        sequence_number, arrival_seconds = record.sequence_number, record.arrival_seconds
        for start in range(first, len(aggregate), SLICE_RECORDS):
            made = [
                Record(
                    stream=stream,
                    shard_id=shard_id,
                    sequence_number=sequence_number,
                    sub_sequence_number=index,
                    partition_key=partition_key,
                    explicit_hash_key=explicit_hash_key,
                    arrival_seconds=arrival_seconds,
                    data=data,
                    value=data,
                )
                for index, (partition_key, explicit_hash_key, data) in enumerate(
                    aggregate.sub_records(start, start + SLICE_RECORDS), start
                )
            ]
            _mark(made, start, strays, aggregate.trace_parents)
            yield made


def _mark(made: list[Record[bytes]], start: int, strays: Collection[int], trace_parents: Mapping[int, str]) -> None:
    """Few sub-records are misrouted or traced: they are replaced, so that the others cost nothing."""
    if not strays and not trace_parents:
        return
    for place, record in enumerate(made):
        index = start + place
        if index in strays or index in trace_parents:
            made[place] = replace(record, misrouted=index in strays, trace_parent=trace_parents.get(index))


def _number(record: KinesisRecord) -> int:
    return int(record.sequence_number)


RECORD_OVERHEAD_BYTES = 256


class Sizes:
    """The sizes of consecutive records, as running totals: the size of any part of them is a subtraction."""

    __slots__ = ("_data_ends", "_key_ends")

    def __init__(self, records: Sequence[KinesisRecord] | Sequence[Record[bytes]]) -> None:
        # Lists cost half of generators here, and this runs for every record.
        self._data_ends = list(accumulate([len(record.data) for record in records], initial=0))
        self._key_ends = list(accumulate([len(record.partition_key) for record in records], initial=0))

    def data_bytes(self, start: int, stop: int) -> int:
        return self._data_ends[stop] - self._data_ends[start]

    def cost(self, start: int, stop: int) -> int:
        """What records cost in the byte budget: their bytes and 256 more (rule B2)."""
        key_bytes = self._key_ends[stop] - self._key_ends[start]
        return self.data_bytes(start, stop) + key_bytes + RECORD_OVERHEAD_BYTES * (stop - start)

    def reach(self, start: int, stop: int, data_bytes_max: int) -> int:
        """The end of the records from `start` whose data fits; `stop` at most, and at least one record."""
        fitting = bisect_right(self._data_ends, self._data_ends[start] + data_bytes_max, start + 1, stop + 1) - 1
        return max(fitting, start + 1)


NO_SIZES: Final = Sizes(())
NO_SLICES: Final = iter(tuple[Unpacked]())


class Page:
    """The records of one read, and what they are charged in the byte budget.

    The whole page is charged until its last record is handed out. After that only unfinished records are charged, so
    one slow record does not keep the space of all its neighbours.
    """

    __slots__ = ("_drained", "_unfinished_bytes", "after", "charged_bytes", "records", "sizes")

    def __init__(self, records: Sequence[KinesisRecord], after: Position | None) -> None:
        self.after = after
        """The position that the read resumed from. The page may begin with records up to it."""
        self.records: Sequence[KinesisRecord] = records
        self.sizes = Sizes(records)
        self.charged_bytes = self.sizes.cost(0, len(records))
        self._unfinished_bytes = 0
        self._drained = False

    def take(self, cost: int) -> None:
        """Records of this page are about to be handed out."""
        self._unfinished_bytes += cost

    def finish(self, cost: int) -> int:
        """Records of this page are finished; returns the freed bytes."""
        self._unfinished_bytes -= cost
        return self._settle() if self._drained else 0

    def drain(self) -> int:
        """All records of this page were handed out; returns the freed bytes."""
        self._drained = True
        self.records, self.sizes = (), NO_SIZES
        return self._settle()

    def _settle(self) -> int:
        still = min(self.charged_bytes, self._unfinished_bytes)
        freed, self.charged_bytes = self.charged_bytes - still, still
        return freed


NO_PAGE: Final = Page((), None)


class RecordSlice(msgspec.Struct, frozen=True, gc=False):
    """Records of one page that are handed out and finished together."""

    records: list[Record[bytes]]
    data_bytes: int
    page: Page
    cost: int


class Window:
    def __init__(self, unpacker: Unpacker) -> None:
        self._unpacker = unpacker
        self._pages: deque[Page] = deque()
        self._page = NO_PAGE
        self._slices: Iterator[Unpacked] = NO_SLICES
        self._slice: list[Record[bytes]] = []
        self._sizes = NO_SIZES
        """Of the records in the slice, which begin there at `_first`."""
        self._index = self._first = 0
        self.held_bytes = 0
        """Charged, and not returned to the budget yet."""
        self._freed_bytes = 0
        """Those of them that `collect_freed` will return."""
        self._cleared = False

    def accept(self, records: Sequence[KinesisRecord], after: Position | None) -> int:
        """Adds the records of one read that resumed after the given position; returns the charged bytes."""
        if self._cleared:
            return 0
        page = Page(records, after)
        self._pages.append(page)
        self.held_bytes += page.charged_bytes
        return page.charged_bytes

    def pull(self) -> tuple[Record[bytes], Page] | None:
        """The next record and its page, or None."""
        if self.is_empty:
            return None
        record = self._slice[self._index]
        self._index += 1
        return record, self._page

    def pull_some(self, count_max: int, data_bytes_max: int) -> RecordSlice | None:
        """The next records of one page, up to the limits, but at least one if there is one."""
        if self.is_empty:
            return None
        page, start, first, sizes = self._page, self._index, self._first, self._sizes
        stop = self._index = self._reach(count_max, data_bytes_max)
        records = self._slice if stop - start == len(self._slice) else self._slice[start:stop]
        data_bytes, cost = sizes.data_bytes(first + start, first + stop), sizes.cost(first + start, first + stop)
        return RecordSlice(records, data_bytes, page, cost)

    def peek_some(self, count_max: int, data_bytes_max: int) -> list[Record[bytes]]:
        """The records that `pull_some` would return."""
        return [] if self.is_empty else self._slice[self._index : self._reach(count_max, data_bytes_max)]

    def _reach(self, count_max: int, data_bytes_max: int) -> int:
        """The end of the records that fit; at least one always does."""
        stop, first = min(self._index + count_max, len(self._slice)), self._first
        return self._sizes.reach(first + self._index, first + stop, data_bytes_max) - first

    def peek(self) -> Record[bytes] | None:
        """The record that `pull` would return."""
        return None if self.is_empty else self._slice[self._index]

    @property
    def is_empty(self) -> bool:
        return self._index >= len(self._slice) and not self._advance()

    def _advance(self) -> bool:
        while True:
            some = next(self._slices, None)
            if some is not None:
                self._show(some)
                return True
            if self._page is not NO_PAGE:
                self._freed_bytes += self._page.drain()
                self._show_nothing()
            if not self._pages:
                return False
            self._page = self._pages.popleft()
            self._slices = self._unpacker.unpack(self._page.records, self._page.after)

    def _show_nothing(self) -> None:
        self._page = NO_PAGE
        self._slices, self._slice, self._sizes, self._index, self._first = NO_SLICES, [], NO_SIZES, 0, 0

    def _show(self, some: Unpacked) -> None:
        records, place = some
        self._slice, self._index = records, 0
        self._sizes, self._first = (Sizes(records), 0) if place is None else (self._page.sizes, place)
        self._page.take(self._sizes.cost(self._first, self._first + len(records)))

    def finish(self, record: Record[bytes], page: Page) -> None:
        freed_bytes = page.finish(len(record.data) + len(record.partition_key) + RECORD_OVERHEAD_BYTES)
        if freed_bytes and not self._cleared:
            self._freed_bytes += freed_bytes

    def finish_some(self, pulled: RecordSlice) -> None:
        if not self._cleared:
            self._freed_bytes += pulled.page.finish(pulled.cost)

    def collect_freed(self) -> int:
        """The bytes freed since the last call, to return to the budget."""
        freed, self._freed_bytes = self._freed_bytes, 0
        self.held_bytes -= freed
        return freed

    def clear(self) -> None:
        """Drops everything and frees all bytes, also of records that were handed out. Later pages are ignored."""
        self._cleared = True
        self._freed_bytes = self.held_bytes
        self._pages.clear()
        self._show_nothing()
