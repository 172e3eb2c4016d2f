"""Nothing of a shard is started before everything of its parents was finished."""

from anabranch._model.streams import Position
from anabranch.testing.checkers.journal import Call, Checker, ShardOpened, Written

__all__ = ["ParentsFirst"]


class ParentsFirst(Checker):
    promise = "parents first"

    def __init__(self) -> None:
        super().__init__()
        self._parents: dict[str, tuple[str, ...]] = {}
        self._unfinished: dict[str, dict[Position, None]] = {}

    def opened(self, shard: ShardOpened) -> None:
        self._parents[shard.shard_id] = shard.parents

    def written(self, record: Written) -> None:
        self._unfinished.setdefault(record.shard_id, {})[record.position] = None

    def started(self, call: Call) -> None:
        for parent in self._parents.get(call.shard_id, ()):
            if left := self._unfinished.get(parent):
                self.complain(call.at_ms, f"{call} starts, but {len(left)} records of its parent {parent} are left")

    def finished(self, call: Call) -> None:
        self._unfinished[call.shard_id].pop(call.position, None)

    def excused(self, record: Written) -> None:
        self._unfinished[record.shard_id].pop(record.position, None)
