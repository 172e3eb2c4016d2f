"""A shard's checkpoint only advances, its version and epoch only grow, and its end is final."""

from anabranch._model.leases import LeaseRow
from anabranch.testing.checkers.journal import Checker, Commit

__all__ = ["CheckpointAdvances"]


class CheckpointAdvances(Checker):
    promise = "checkpoints advance"

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[object, LeaseRow] = {}

    def committed(self, commit: Commit) -> None:
        row, shard_id, before = commit.row, commit.shard_id, self._rows.get(commit.row.key)
        self._rows[row.key] = row
        if before is None:
            return
        old, new = before.checkpoint, row.checkpoint
        goes_back = old.watermark is not None and (new.watermark is None or new.watermark < old.watermark)
        if goes_back and new.seek_epoch == old.seek_epoch:
            self.complain(commit.at_ms, f"{shard_id} goes back from {old.watermark} to {new.watermark}")
        if row.version <= before.version or row.epoch < before.epoch:
            self.complain(commit.at_ms, f"{shard_id} goes back to version {row.version}, epoch {row.epoch}")
        if before.is_finished:
            self.complain(commit.at_ms, f"{shard_id} is written after its end")

    def store_went_back(self) -> None:
        self._rows.clear()
