"""What the records of one read weigh, from arrival until the last of them is finished.

A page's cost is counted against the consumer's byte budget when it arrives (rule B2: a record costs its bytes and 256
more). While records are still to come out of it, the whole page is charged; after that only what is unfinished, so that
one slow record does not hold the room of its thousand neighbours.
"""

from collections.abc import Sequence

from anabranch._model.sequence_numbers import Position
from anabranch._wire.messages import KinesisRecord

__all__ = ["RECORD_OVERHEAD_BYTES", "Page", "page_cost"]

RECORD_OVERHEAD_BYTES = 256


def page_cost(records: Sequence[KinesisRecord]) -> int:
    return sum(len(record.data) + len(record.partition_key) for record in records) + (
        RECORD_OVERHEAD_BYTES * len(records)
    )


class Page:
    __slots__ = ("_drained", "_unfinished_bytes", "after", "charged_bytes", "records")

    def __init__(self, records: Sequence[KinesisRecord], after: Position | None) -> None:
        self.after = after
        """The read resumed from here, and may begin with records up to here."""
        self.records: Sequence[KinesisRecord] = records
        self.charged_bytes = page_cost(records)
        self._unfinished_bytes = 0
        self._drained = False

    def take(self, cost: int) -> None:
        """A record of this page was handed out."""
        self._unfinished_bytes += cost

    def finish(self, cost: int) -> int:
        """A record of this page was finished; returns the bytes that are free again."""
        self._unfinished_bytes -= cost
        return self._settle()

    def drain(self) -> int:
        """Every record of this page was handed out; returns the bytes that are free again."""
        self._drained = True
        self.records = ()
        return self._settle()

    def _settle(self) -> int:
        if not self._drained:
            return 0
        still = min(self.charged_bytes, self._unfinished_bytes)
        freed, self.charged_bytes = self.charged_bytes - still, still
        return freed
