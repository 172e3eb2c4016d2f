"""P2: a committed checkpoint never says that a record is finished whose handling has not finished."""

from anabranch._model.streams import Position
from anabranch.testing.checkers.coverage import covers
from anabranch.testing.checkers.journal import Call, Checker, Commit, Written

__all__ = ["NoLoss"]


class NoLoss(Checker):
    promise = "no loss"

    def __init__(self) -> None:
        super().__init__()
        self._unfinished: dict[str, dict[Position, Written]] = {}

    def written(self, record: Written) -> None:
        self._unfinished.setdefault(record.shard_id, {})[record.position] = record

    def finished(self, call: Call) -> None:
        self._unfinished[call.shard_id].pop(call.position, None)

    def excused(self, record: Written) -> None:
        self._unfinished[record.shard_id].pop(record.position, None)

    def committed(self, commit: Commit) -> None:
        row = commit.row
        for record in self._unfinished.get(commit.shard_id, {}).values():
            if row.is_finished or covers(row.checkpoint, record):
                self.complain(
                    commit.at_ms,
                    f"{commit.shard_id} is committed up to {row.checkpoint.watermark}, but {record.partition_key!r} "
                    f"at {record.position} was not finished",
                )
                return
