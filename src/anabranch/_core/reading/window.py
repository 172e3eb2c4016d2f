"""The records of one shard that were read and not yet handed out: a bounded stretch of the stream.

Pages go in as reads arrive and come out as single records, in order, made when they are asked for. The window counts
what it holds, so that reading stops when it is full (back-pressure) and the byte budget is never overdrawn; it drops
nothing until it is cleared.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from anabranch._core.reading.pages import RECORD_OVERHEAD_BYTES, Page
from anabranch._core.reading.unpacking import Unpacker
from anabranch._model.sequence_numbers import Position
from anabranch._wire.messages import KinesisRecord
from anabranch.records import Record

__all__ = ["Window", "record_cost"]


def record_cost(record: Record[bytes]) -> int:
    return len(record.data) + len(record.partition_key) + RECORD_OVERHEAD_BYTES


class Window:
    def __init__(self, unpacker: Unpacker) -> None:
        self._unpacker = unpacker
        self._pages: deque[Page] = deque()
        self._page: Page | None = None
        self._stretches: Iterator[list[Record[bytes]]] = iter(())
        self._stretch: list[Record[bytes]] = []
        self._index = 0
        self._held_bytes = 0
        """Charged and not yet free."""
        self._freed_bytes = 0
        self._cleared = False
        self.waiting_bytes = 0
        """Charged for pages from which nothing has been handed out yet."""

    def accept(self, records: Sequence[KinesisRecord], after: Position | None) -> int:
        """All records of one read that resumed after the given position; returns the bytes that they are charged."""
        if self._cleared:
            return 0
        page = Page(records, after)
        self._pages.append(page)
        self._held_bytes += page.charged_bytes
        self.waiting_bytes += page.charged_bytes
        return page.charged_bytes

    def pull(self) -> tuple[Record[bytes], Page] | None:
        """The next record in stream order and the page to report its end to; None if nothing is left."""
        while self._index >= len(self._stretch):
            if not self._advance():
                return None
        record = self._stretch[self._index]
        self._index += 1
        page = self._page
        assert page is not None
        page.take(record_cost(record))
        return record, page

    def peek(self) -> Record[bytes] | None:
        """The record that `pull` would return."""
        while self._index >= len(self._stretch):
            if not self._advance():
                return None
        return self._stretch[self._index]

    def _advance(self) -> bool:
        while True:
            stretch = next(self._stretches, None)
            if stretch is not None:
                self._stretch, self._index = stretch, 0
                return True
            if self._page is not None:
                self._free(self._page.drain())
                self._page = None
                self._stretch, self._index = [], 0
            if not self._pages:
                return False
            self._page = self._pages.popleft()
            self.waiting_bytes -= self._page.charged_bytes
            self._stretches = self._unpacker.unpack(self._page.records, self._page.after)

    def finish(self, record: Record[bytes], page: Page) -> None:
        if not self._cleared:
            self._free(page.finish(record_cost(record)))

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
        self._stretches, self._stretch, self._index = iter(()), [], 0
        self.waiting_bytes = 0

    @property
    def is_empty(self) -> bool:
        return self.peek() is None
