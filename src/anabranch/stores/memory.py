"""Leases in memory: for consumers that keep no position, for tests, and for the simulated store.

The rows live as long as the object. All consumers that get the same object form one fleet. A lock makes each change
atomic, because heartbeats come from their own thread.
"""

import threading
from collections.abc import Sequence

from anabranch._model.leases import AppRow
from anabranch.errors import UsageError
from anabranch.stores.row_store import Changed, Found, Row, RowKey, RowLeaseStore, Scope, Update

Place = tuple[str, str, str]


class MemoryRows:
    """The rows of any number of applications."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.places: dict[Place, dict[RowKey, Row]] = {}
        """By kind, application and `app_id`."""

    def get(self, keys: Sequence[RowKey]) -> list[Row | None]:
        return [self.places.get(key[:3], {}).get(key) for key in keys]

    def scan(self, scopes: Sequence[Scope]) -> list[Row]:
        with self._lock:
            return [row for scope in scopes for row in self.places.get(scope[:3], {}).values() if scope.includes(row)]

    def change(self, keys: Sequence[RowKey], update: Update) -> tuple[Sequence[Row | None], Sequence[Row | None]]:
        with self._lock:
            before = self.get(keys)
            after = update(before)
            for key, row in zip(keys, after, strict=True):
                place = self.places.setdefault(key[:3], {})
                if row is None:
                    place.pop(key, None)
                else:
                    place[key] = row
            return before, after


class MemoryLeaseStore(RowLeaseStore):
    def __init__(self) -> None:
        super().__init__("")
        self.rows = MemoryRows()

    def __str__(self) -> str:
        return "memory://"

    async def open(self, app: AppRow) -> AppRow:
        if app.app != self.app and await self.read_app() is not None:
            raise UsageError(f"this memory store holds application {self.app!r}; make another one for {app.app!r}")
        self.app = app.app
        return await super().open(app)

    async def identity(self) -> str:
        return "memory"  # never changes: the rows end with the process

    async def get(self, keys: Sequence[RowKey]) -> Found:
        return Found(self.rows.get(keys), await self.identity())

    async def scan(self, scopes: Sequence[Scope]) -> Found:
        return Found(self.rows.scan(scopes), await self.identity())

    async def change(self, keys: Sequence[RowKey], update: Update) -> Changed:
        return Changed(*self.rows.change(keys, update), await self.identity())

    async def close(self) -> None:
        """Keeps the rows, because other consumers may share this object."""
