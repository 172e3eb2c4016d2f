"""Changes the rows of a memory store directly, as a fault or another program would."""

from anabranch._model.leases import AppRow, LeaseRow
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
