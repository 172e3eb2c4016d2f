"""Failed records that nobody has seen yet.

Every failure stays here, with its record and its place in the buffer, until somebody looks: whoever awaits its
delivery, the `on_undelivered` that took it, or the `flush` that raised it. So no failure is lost, and failures that
are never looked at fill the buffer instead of the memory.

With `order="key"`, seeing a failure is also what acknowledges it. Until then every later record of its key fails
too: to write them would put them before the one that their sender may want to send again.
"""

from collections.abc import Callable, Iterable

from anabranch._core.writing.aggregation import OutgoingRecord, cost_of

__all__ = ["Failures"]


class Failures:
    __slots__ = ("_unseen", "blocks_keys", "freed_bytes", "keys", "on_seen")

    def __init__(self, *, blocks_keys: bool) -> None:
        self.blocks_keys = blocks_keys
        self.keys: dict[str, None] = {}
        """Keys whose later records fail too."""
        self.freed_bytes = 0
        """What failures that were seen gave back to the buffer, until the engine takes it."""
        self.on_seen: Callable[[], None] | None = None
        """Called when the buffer has got room by it."""
        self._unseen: dict[int, OutgoingRecord] = {}

    def __len__(self) -> int:
        return len(self._unseen)

    def add(self, records: Iterable[OutgoingRecord]) -> None:
        for record in records:
            self._unseen[id(record)] = record
            if self.blocks_keys:
                self.keys[record.partition_key] = None

    def see(self, record: OutgoingRecord) -> None:
        """Its failure has come to the knowledge of whoever wrote it. One is enough to acknowledge its key."""
        if self._unseen.pop(id(record), None) is not None:
            self.freed_bytes += cost_of(record.data, record.partition_key)
            self.keys.pop(record.partition_key, None)
            if self.on_seen is not None:
                self.on_seen()

    def see_all(self) -> list[OutgoingRecord]:
        records = list(self._unseen.values())
        for record in records:
            self.see(record)
        return records

    def take_freed_bytes(self) -> int:
        freed, self.freed_bytes = self.freed_bytes, 0
        return freed
