"""What the records of one read weigh, from arrival until the last of them is finished.

A page's cost is counted against the consumer's byte budget when it arrives (rule B2: a record costs its bytes and 256
more). While records are still to come out of it, the whole page is charged; after that only what is unfinished, so that
one slow record does not hold the room of its thousand neighbours.
"""

from collections.abc import Sequence

import msgspec

from anabranch._model.sequence_numbers import Position
from anabranch._wire.messages import KinesisRecord
from anabranch.records import Record

__all__ = ["RECORD_OVERHEAD_BYTES", "Page", "Portion", "cost_of"]

RECORD_OVERHEAD_BYTES = 256


def cost_of(records: Sequence[KinesisRecord] | Sequence[Record[bytes]]) -> int:
    # Lists, not generators: this is done for every record, and a list costs half of it.
    return sum([len(record.data) + len(record.partition_key) for record in records]) + (
        RECORD_OVERHEAD_BYTES * len(records)
    )


class Page:
    __slots__ = ("_drained", "_unfinished_bytes", "after", "charged_bytes", "records")

    def __init__(self, records: Sequence[KinesisRecord], after: Position | None) -> None:
        self.after = after
        """The read resumed from here, and may begin with records up to here."""
        self.records: Sequence[KinesisRecord] = records
        self.charged_bytes = cost_of(records)
        self._unfinished_bytes = 0
        self._drained = False

    def take(self, cost: int) -> None:
        """Records of this page are handed out from now on."""
        self._unfinished_bytes += cost

    def finish(self, cost: int) -> int:
        """Records of this page were finished; returns the bytes that are free again."""
        self._unfinished_bytes -= cost
        return self._settle() if self._drained else 0

    def drain(self) -> int:
        """Every record of this page was handed out; returns the bytes that are free again."""
        self._drained = True
        self.records = ()
        return self._settle()

    def _settle(self) -> int:
        still = min(self.charged_bytes, self._unfinished_bytes)
        freed, self.charged_bytes = self.charged_bytes - still, still
        return freed


class Portion(msgspec.Struct, frozen=True, gc=False):
    """Records of one page that were handed out together, and whose end is reported together."""

    records: list[Record[bytes]]
    data_bytes: int
    page: Page
    cost: int
