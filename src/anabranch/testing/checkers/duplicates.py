"""P3: what was committed is not handled again by the next holding; only what was finished since the last commit is."""

from anabranch._model.leases import Checkpoint
from anabranch.testing.checkers.coverage import covers
from anabranch.testing.checkers.journal import Call, Checker, Commit, Written

__all__ = ["Duplicates"]


class Duplicates(Checker):
    promise = "few duplicates"

    def __init__(self) -> None:
        super().__init__()
        self.repeats = 0
        self._finished: dict[tuple[str, object], None] = {}
        self._committed: dict[str, Checkpoint] = {}
        self._inherited: dict[tuple[str, int], Checkpoint] = {}
        """What the holdings began with, by shard and fence token."""

    def committed(self, commit: Commit) -> None:
        self._committed[commit.row.key.shard_id] = commit.row.checkpoint

    def started(self, call: Call) -> None:
        holding = (call.shard_id, call.fence_token)
        if holding not in self._inherited:
            self._inherited[holding] = self._committed.get(call.shard_id, Checkpoint())
        if (call.shard_id, call.position) in self._finished:
            self.repeats += 1
        if covers(self._inherited[holding], Written(call.shard_id, call.position, call.partition_key)):
            self.complain(call.at_ms, f"{call} is handled again although it was committed")

    def finished(self, call: Call) -> None:
        self._finished[(call.shard_id, call.position)] = None

    def store_went_back(self) -> None:
        self._committed.clear()
        self._inherited.clear()
