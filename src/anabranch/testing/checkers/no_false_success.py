"""P7: a run that ends by itself reports no success while a shard that it holds is stopped at a record (rule D12)."""

from anabranch._model.leases import Stopped
from anabranch.testing.checkers.journal import Checker, Commit

__all__ = ["NoFalseSuccess"]


class NoFalseSuccess(Checker):
    promise = "no false success"

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[str, str | None] = {}
        self._stopped: dict[str, Stopped] = {}

    def owned(self, process: str | None, commit: Commit) -> None:
        self._owners[commit.shard_id] = process

    def committed(self, commit: Commit) -> None:
        if commit.row.stopped is None:
            self._stopped.pop(commit.shard_id, None)
        else:
            self._stopped[commit.shard_id] = commit.row.stopped

    def store_went_back(self) -> None:
        self._owners.clear()
        self._stopped.clear()

    def succeeded(self, at_ms: int, process: str) -> None:
        for shard_id, stopped in self._stopped.items():
            if self._owners.get(shard_id) == process:
                self.complain(
                    at_ms,
                    f"{process} ended by itself and reported success, but {shard_id} is stopped at {stopped.position}: "
                    f"{stopped.reason}",
                )
