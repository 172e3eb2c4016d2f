"""A process that has worked for an application makes it no second time: after its store was emptied it makes nothing
there that would look like a beginning.
"""

from collections.abc import Iterable

from anabranch.testing.checkers.journal import Checker

__all__ = ["OneBirth"]


class OneBirth(Checker):
    promise = "one birth"

    def __init__(self) -> None:
        super().__init__()
        self._orphans: dict[str, None] = {}

    def store_emptied(self, processes: Iterable[str]) -> None:
        self._orphans |= dict.fromkeys(processes)

    def made(self, at_ms: int, process: str, what: str) -> None:
        if process in self._orphans:
            self.complain(at_ms, f"{process} had worked before the store was emptied, and makes {what} anew")
