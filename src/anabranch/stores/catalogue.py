"""Finds applications, in the embedded stores of this machine or in a store given by URL.

For tools that look at applications from outside. Nothing is created here. The error for an unknown application names
the known ones.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, NamedTuple

from anabranch._ports import LeaseStore
from anabranch.config import Aws
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.stores.dynamodb import DynamoDbLeaseStore
from anabranch.stores.redis import RedisLeaseStore
from anabranch.stores.s3 import S3LeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore, applications_in
from anabranch.stores.urls import EMBEDDED_SUFFIX, embedded_file, embedded_folder, leases_from, open_store, shown_url

__all__ = ["StoredApplication", "delete_leftovers", "find_store", "stored_applications"]

_NAMES_SHOWN_MAX: Final = 10


class StoredApplication(NamedTuple):
    app: str
    leases: str
    """The URL of its store."""

    def __repr__(self) -> str:
        return f"StoredApplication({self.app!r}, {shown_url(self.leases)!r})"


async def stored_applications(
    leases: str | None, environ: Mapping[str, str], aws: Aws | None = None
) -> list[StoredApplication]:
    """The applications in the store at the URL; without one, in that of ANABRANCH_LEASES or in the embedded stores."""
    leases = leases or leases_from(environ)
    if leases is not None:
        store = open_store(leases, "", aws)
        names: list[str] = []
        if isinstance(store, SqliteLeaseStore):
            names = await applications_in(store.path)
        elif isinstance(store, DynamoDbLeaseStore | RedisLeaseStore | S3LeaseStore):
            try:
                names = await store.applications()
            finally:
                await store.close()
        return [StoredApplication(name, leases) for name in names]
    found: list[StoredApplication] = []
    for path in sorted(embedded_folder(environ).glob(f"*{EMBEDDED_SUFFIX}")):
        found += [StoredApplication(name, f"sqlite://{path}") for name in await applications_in(path)]
    return found


async def find_store(
    app: str, leases: str | LeaseStore | None, environ: Mapping[str, str], aws: Aws | None = None
) -> LeaseStore:
    """Opens the store of an existing application; raises `LeaseStoreInvalidError` if there is none."""
    leases = leases or leases_from(environ)
    store = _store_of(app, leases, environ, aws)
    try:
        row = await store.read_app()
        if row is not None and row.app == app:
            await store.open(row)
            return store
        is_half_deleted = row is None and bool(await store.leftovers())
    except BaseException:
        await _close(store, leases)
        raise
    await _close(store, leases)
    if is_half_deleted:
        raise LeaseStoreInvalidError(
            f"application {app!r} was deleted, but rows of it are left in {store}",
            code="half_deleted",
            advice=f"delete it again (anabranch apps delete {app})",
        )
    raise LeaseStoreInvalidError(await _advice(app, store, leases, environ, aws))


async def delete_leftovers(
    app: str, leases: str | LeaseStore | None, environ: Mapping[str, str], aws: Aws | None = None
) -> None:
    """Completes deletions of the application that failed half-way."""
    leases = leases or leases_from(environ)
    store = _store_of(app, leases, environ, aws)
    try:
        for app_id in await store.leftovers():
            await store.delete_app(app_id)
    finally:
        await _close(store, leases)


def _store_of(app: str, leases: str | LeaseStore | None, environ: Mapping[str, str], aws: Aws | None) -> LeaseStore:
    return SqliteLeaseStore(embedded_file(app, environ), app) if leases is None else open_store(leases, app, aws)


async def _close(store: LeaseStore, given: object) -> None:
    if store is not given:
        await store.close()


async def _advice(
    app: str, store: LeaseStore, leases: str | LeaseStore | None, environ: Mapping[str, str], aws: Aws | None
) -> str:
    others: list[str] = []
    where, hint = "this store", ""
    if leases is None:
        where, hint = str(embedded_folder(environ)), "; if it names a lease store (leases=), name the same one here"
    elif isinstance(leases, str):
        where = shown_url(leases)
        if isinstance(store, SqliteLeaseStore) and not store.path.exists():
            return f"there is no lease store {shown_url(leases)}: no file {store.path}"
        if isinstance(store, DynamoDbLeaseStore | S3LeaseStore):
            hint = "; if its workers use another region or account (region=, a profile), name the same one here"
    if leases is None or isinstance(leases, str):
        try:
            others = [one.app for one in await stored_applications(leases, environ, aws)]
        except LeaseStoreError:  # a worker need not have the right to list them
            return f"there is no application {app!r} in {where}{hint}"
    missing = f"there is no application {app!r} in {where}"
    if not others:
        return f"{missing}; it has none at all{hint}"
    if similar := get_close_matches(app, others, n=1):
        return f"{missing}: did you mean {similar[0]!r}?"
    shown = ", ".join(others[:_NAMES_SHOWN_MAX])
    more = f" and {len(others) - _NAMES_SHOWN_MAX} more" if len(others) > _NAMES_SHOWN_MAX else ""
    return f"{missing}; there are: {shown}{more}{hint}"
