"""What every check gets: handles on one application's rows, and `expect`, which says what was wrong in words."""

from collections.abc import Callable
from typing import Any

from anabranch._model.leases import AppRow, Checkpoint, LeaseKey, LeaseRow, MemberRow
from anabranch._model.sequence_numbers import Position
from anabranch._ports.lease_store import LeaseStore

__all__ = ["APP_ID", "STREAM", "Arena", "MakeStore", "at", "expect", "lease", "lease_key", "member"]

MakeStore = Callable[[str], LeaseStore]

APP_ID = "first"
"""Of the application that `open` makes."""
STREAM = "123456789012:orders:1700000000"


class Arena:
    """One application of its own for each check. `open` gives a further handle on the same rows, as another process
    would have; a store that keeps nothing gives the same handle again.
    """

    def __init__(self, make_store: MakeStore, app: str, *, durable: bool) -> None:
        self._make_store = make_store
        self._durable = durable
        self._stores: list[LeaseStore] = []
        self.app = app

    def make(self) -> LeaseStore:
        if not self._stores or self._durable:
            self._stores.append(self._make_store(self.app))
        return self._stores[-1]

    async def open(self) -> LeaseStore:
        store = self.make()
        await store.open(self.app_row())
        return store

    def app_row(self, app_id: str = APP_ID) -> AppRow:
        return AppRow(app=self.app, app_id=app_id, created_wall_ms=1_700_000_000_000)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
        self._stores.clear()


def expect(holds: bool, rule: str, found: Any = None) -> None:  # noqa: FBT001 -- reads as an assertion
    """Not `assert`, which vanishes under -O: a contract that was not checked must not pass."""
    if not holds:
        raise AssertionError(rule if found is None else f"{rule}; found {found!r}")


def member(member_id: str, **fields: Any) -> MemberRow:
    return MemberRow(member_id=member_id, worker_id=f"worker of {member_id}", expiry_ms=10_000, **fields)


def lease_key(number: int = 0, generation: int = 0) -> LeaseKey:
    return LeaseKey(STREAM, generation, f"shardId-{number:012d}")


def lease(number: int = 0, **fields: Any) -> LeaseRow:
    return LeaseRow(key=lease_key(number), **fields)


def at(sequence_number: int) -> Checkpoint:
    return Checkpoint(watermark=Position(sequence_number))
