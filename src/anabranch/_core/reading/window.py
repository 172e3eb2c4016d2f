"""The records of one shard that were read and not yet handed out: a bounded stretch of the stream.

Pages go in as reads arrive, and records come out in order, made when they are asked for: one by one, or as many
together as somebody has use for. The window counts what it holds, so that reading stops when it is full (back-pressure)
and the byte budget is never overdrawn; it drops nothing until it is cleared.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from anabranch._core.reading.pages import RECORD_OVERHEAD_BYTES, Page, Portion, cost_of
from anabranch._core.reading.unpacking import Unpacker
from anabranch._model.sequence_numbers import Position
from anabranch._wire.messages import KinesisRecord
from anabranch.records import Record

__all__ = ["Window"]


class Window:
    def __init__(self, unpacker: Unpacker) -> None:
        self._unpacker = unpacker
        self._pages: deque[Page] = deque()
        self._page: Page | None = None
        self._stretches: Iterator[list[Record[bytes]]] = iter(())
        self._stretch: list[Record[bytes]] = []
        self._index = 0
        self._data_ends: list[int] = []
        """Where the payload of each record of the stretch ends, if they are laid one after another."""
        self._stretch_cost = 0
        self._held_bytes = 0
        """Charged and not yet free."""
        self._freed_bytes = 0
        self._cleared = False

    def accept(self, records: Sequence[KinesisRecord], after: Position | None) -> int:
        """All records of one read that resumed after the given position; returns the bytes that they are charged."""
        if self._cleared:
            return 0
        page = Page(records, after)
        self._pages.append(page)
        self._held_bytes += page.charged_bytes
        return page.charged_bytes

    def pull(self) -> tuple[Record[bytes], Page] | None:
        """The next record in stream order and the page to report its end to; None if nothing is left."""
        if self.is_empty:
            return None
        record = self._stretch[self._index]
        self._index += 1
        assert self._page is not None
        return record, self._page

    def pull_some(self, count_max: int, data_bytes_max: int) -> Portion | None:
        """The next records in stream order, all of one page: no more than that, but at least one if there is one."""
        if self.is_empty:
            return None
        page, start, ends = self._page, self._index, self._data_ends
        assert page is not None
        stop = self._index = self._reach(count_max, data_bytes_max)
        if stop - start == len(self._stretch):
            return Portion(self._stretch, ends[stop], page, self._stretch_cost)
        records = self._stretch[start:stop]
        return Portion(records, ends[stop] - ends[start], page, cost_of(records))

    def peek_some(self, count_max: int, data_bytes_max: int) -> list[Record[bytes]]:
        """The records that `pull_some` would return."""
        return [] if self.is_empty else self._stretch[self._index : self._reach(count_max, data_bytes_max)]

    def _reach(self, count_max: int, data_bytes_max: int) -> int:
        """Where the records end that fit; one does in any case."""
        start, ends = self._index, self._data_ends
        fitting = bisect_right(ends, ends[start] + data_bytes_max) - 1
        return min(max(fitting, start + 1), start + count_max, len(self._stretch))

    def peek(self) -> Record[bytes] | None:
        """The record that `pull` would return."""
        return None if self.is_empty else self._stretch[self._index]

    @property
    def is_empty(self) -> bool:
        return self._index >= len(self._stretch) and not self._advance()

    def _advance(self) -> bool:
        while True:
            stretch = next(self._stretches, None)
            if stretch is not None:
                self._show(stretch)
                assert self._page is not None
                self._page.take(self._stretch_cost)
                return True
            if self._page is not None:
                self._free(self._page.drain())
                self._page = None
                self._show([])
            if not self._pages:
                return False
            self._page = self._pages.popleft()
            self._stretches = self._unpacker.unpack(self._page.records, self._page.after)

    def _show(self, stretch: list[Record[bytes]]) -> None:
        self._stretch, self._index = stretch, 0
        self._data_ends = [0, *accumulate([len(record.data) for record in stretch])]
        key_bytes = sum([len(record.partition_key) for record in stretch])
        self._stretch_cost = self._data_ends[-1] + key_bytes + RECORD_OVERHEAD_BYTES * len(stretch)

    def finish(self, record: Record[bytes], page: Page) -> None:
        freed_bytes = page.finish(len(record.data) + len(record.partition_key) + RECORD_OVERHEAD_BYTES)
        if freed_bytes and not self._cleared:
            self._free(freed_bytes)

    def finish_some(self, portion: Portion) -> None:
        if not self._cleared:
            self._free(portion.page.finish(portion.cost))

    def _free(self, freed_bytes: int) -> None:
        self._held_bytes -= freed_bytes
        self._freed_bytes += freed_bytes

    def collect_freed(self) -> int:
        """The bytes that became free since the last call: to be given back to the budget."""
        freed, self._freed_bytes = self._freed_bytes, 0
        return freed

    def clear(self) -> None:
        """Forgets everything for good (the shard is stopped or lost) and frees all its bytes.

        Those of records that were handed out too: nobody reports their end any more. What arrives later is forgotten.
        """
        self._cleared = True
        self._free(self._held_bytes)
        self._pages.clear()
        self._page = None
        self._stretches = iter(())
        self._show([])
