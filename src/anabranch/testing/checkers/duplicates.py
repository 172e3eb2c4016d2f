"""P3: what was committed is not handled again by the next holding; only what was finished since the last commit is.
After a process has ended in order, nothing is that it had finished.
"""

from anabranch._model.leases import Checkpoint
from anabranch._model.sequence_numbers import Position
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
        self._finished_by: dict[str, dict[str, dict[Position, None]]] = {}
        """What each process has finished of the shards that it did not lose, by process and shard."""
        self._tokens: dict[tuple[str, str], int] = {}
        """The token that each process last started something of a shard with."""
        self._lost: dict[tuple[str, str], int] = {}
        """The token that each process last lost a shard with: what it finishes with that is nobody's word any more."""
        self._settled: dict[tuple[str, Position], str] = {}
        """What was finished by a process that has ended in order, and its name."""

    def committed(self, commit: Commit) -> None:
        self._committed[commit.shard_id] = commit.row.checkpoint

    def started(self, call: Call) -> None:
        holding = (call.shard_id, call.fence_token)
        self._tokens[(call.process, call.shard_id)] = call.fence_token
        if holding not in self._inherited:
            self._inherited[holding] = self._committed.get(call.shard_id, Checkpoint())
        if (call.shard_id, call.position) in self._finished:
            self.repeats += 1
        if covers(self._inherited[holding], Written(call.shard_id, call.position, call.partition_key)):
            self.complain(call.at_ms, f"{call} is handled again although it was committed")
        elif (who := self._settled.get((call.shard_id, call.position))) is not None:
            self.complain(call.at_ms, f"{call} is handled again although {who} had finished it and ended in order")

    def finished(self, call: Call) -> None:
        self._finished[(call.shard_id, call.position)] = None
        if call.fence_token > self._lost.get((call.process, call.shard_id), -1):
            self._finished_by.setdefault(call.process, {}).setdefault(call.shard_id, {})[call.position] = None

    def lost(self, process: str, shard_id: str) -> None:
        self._lost[(process, shard_id)] = self._tokens.get((process, shard_id), -1)
        self._finished_by.get(process, {}).pop(shard_id, None)

    def stopped(self, at_ms: int, process: str, used_bytes: int) -> None:
        del at_ms, used_bytes
        for shard_id, positions in self._finished_by.get(process, {}).items():
            self._settled |= dict.fromkeys(((shard_id, position) for position in positions), process)

    def store_went_back(self) -> None:
        self._committed.clear()
        self._inherited.clear()
        self._finished_by.clear()
        self._settled.clear()
