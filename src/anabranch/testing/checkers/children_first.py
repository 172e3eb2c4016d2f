"""Before a shard is written as finished, the lease rows of its children are there: otherwise a crash loses them."""

from anabranch.testing.checkers.journal import Checker, Commit, place

__all__ = ["ChildrenFirst"]


class ChildrenFirst(Checker):
    promise = "children before the end"

    def __init__(self) -> None:
        super().__init__()
        self._created: dict[str, None] = {}

    def created(self, commit: Commit) -> None:
        self._created[commit.shard_id] = None

    def committed(self, commit: Commit) -> None:
        finish = commit.row.finish
        if finish is None:
            return
        names = [place(child, commit.incarnation) for child in finish.children]
        if missing := [name for name in names if name not in self._created]:
            self.complain(commit.at_ms, f"{commit.shard_id} is finished, and {missing[0]} has no row")

    def store_went_back(self) -> None:
        """Rows that were created and then forgotten are created again, or have been."""
