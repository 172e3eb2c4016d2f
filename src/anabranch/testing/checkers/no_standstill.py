"""P7: once the faults are over, everything that was written is handled within a bound."""

from anabranch._model.streams import Position
from anabranch.testing.checkers.journal import Call, Checker, Written

__all__ = ["NoStandstill"]


class NoStandstill(Checker):
    promise = "no standstill"

    def __init__(self) -> None:
        super().__init__()
        self._unfinished: dict[tuple[str, Position], Written] = {}

    @property
    def left_count(self) -> int:
        return len(self._unfinished)

    def written(self, record: Written) -> None:
        self._unfinished[(record.shard_id, record.position)] = record

    def finished(self, call: Call) -> None:
        self._unfinished.pop((call.shard_id, call.position), None)

    def excused(self, record: Written) -> None:
        self._unfinished.pop((record.shard_id, record.position), None)

    def vanished(self, record: Written) -> None:
        self.excused(record)

    def ended(self, at_ms: int) -> None:
        if self._unfinished:
            first = next(iter(self._unfinished.values()))
            self.complain(
                at_ms,
                f"{len(self._unfinished)} records were never finished, the first is {first.partition_key!r} at "
                f"{first.shard_id}/{first.position}",
            )
