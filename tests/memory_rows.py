"""Faults of a memory store: rows that change as by a fault or another program, and calls that fail."""

import asyncio

from anabranch._model.leases import AppRow, LeaseRow
from anabranch.errors import LeaseStoreError
from anabranch.stores import MemoryLeaseStore
from anabranch.stores.row_store import RowKey


def stored(store, kind):
    """All rows of a type, whatever application they belong to."""
    return [row for rows in store.rows.places.values() for row in rows.values() if isinstance(row, kind)]


def forget(store, *kinds):
    for rows in store.rows.places.values():
        for key in [key for key, row in rows.items() if isinstance(row, kinds)]:
            del rows[key]


def replace_rows(store, kind, change):
    for rows in store.rows.places.values():
        for key, row in list(rows.items()):
            if isinstance(row, kind):
                rows[key] = change(row)


def set_app(store, app):
    """The application's row is this one from now on; None: it is gone."""
    forget(store, AppRow)
    if app is not None:
        store.rows.change([RowKey("app", app.app, "")], lambda _: [app])


def forget_last_lease(store):
    last = max(row.key for row in stored(store, LeaseRow))
    for rows in store.rows.places.values():
        for key in [key for key, row in rows.items() if isinstance(row, LeaseRow) and row.key == last]:
            del rows[key]


class AwayStore(MemoryLeaseStore):
    """A store whose heartbeats can be made to fail."""

    away = False

    async def heartbeat(self, beat):
        if self.away:
            raise LeaseStoreError("away")
        return await super().heartbeat(beat)


class DeafStore(MemoryLeaseStore):
    """A store that, from one moment on, answers no heartbeat."""

    is_deaf = False

    async def heartbeat(self, beat):
        if self.is_deaf:
            await asyncio.Event().wait()
        return await super().heartbeat(beat)


class StoreThatFailsOverIn(MemoryLeaseStore):
    """The call of that name gets an error, once; the calls after it reach another storage."""

    def __init__(self, name):
        super().__init__()
        self.storage, self.is_due, call = "first", False, getattr(self, name)

        async def fail_over(*args, **options):
            if self.is_due:
                self.storage, self.is_due = "second", False
                raise LeaseStoreError("the connection was lost")
            return await call(*args, **options)

        setattr(self, name, fail_over)

    async def identity(self):
        return self.storage
