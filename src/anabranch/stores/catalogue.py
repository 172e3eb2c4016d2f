"""Finds applications in the embedded stores of this machine or in a store given by URL, and copies one into another
store.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final, NamedTuple

from msgspec.structs import replace

from anabranch._model.leases import AppRow
from anabranch._ports import LeaseStore
from anabranch.config import Aws
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.stores.dynamodb import DynamoDbLeaseStore
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.redis import RedisLeaseStore
from anabranch.stores.row_store import write_all
from anabranch.stores.s3 import S3LeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore
from anabranch.stores.urls import EMBEDDED_SUFFIX, embedded_file, embedded_folder, leases_from, open_store, shown_url

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
    """The applications in the store at the URL `leases`. None: that of ANABRANCH_LEASES, or all embedded stores."""
    leases = leases or leases_from(environ)
    stores: Sequence[LeaseStore]
    if leases is not None:
        stores = [open_store(leases, "", aws)]
    else:
        stores = [SqliteLeaseStore(path, "") for path in sorted(embedded_folder(environ).glob(f"*{EMBEDDED_SUFFIX}"))]
    found: list[StoredApplication] = []
    for store in stores:
        if isinstance(store, SqliteLeaseStore | DynamoDbLeaseStore | RedisLeaseStore | S3LeaseStore):
            try:
                found += [StoredApplication(name, leases or str(store)) for name in await store.applications()]
            finally:
                await store.close()
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
    """Completes earlier deletions of the application that failed halfway."""
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
    """Closes the store, unless the caller passed it as an object."""
    if store is not given:
        await store.close()


async def _advice(
    app: str, store: LeaseStore, leases: str | LeaseStore | None, environ: Mapping[str, str], aws: Aws | None
) -> str:
    hint = ""
    if leases is None:
        where, hint = str(embedded_folder(environ)), "; if its workers set leases=, give the same URL here"
    elif isinstance(leases, str):
        where = shown_url(leases)
        if isinstance(store, SqliteLeaseStore) and not store.path.exists():
            return f"there is no lease store {where}: no file {store.path}"
        if isinstance(store, DynamoDbLeaseStore | S3LeaseStore):
            hint = "; if its workers use another region or account (region=, a profile), use the same one here"
    else:
        return f"there is no application {app!r} in this store"
    missing = f"there is no application {app!r} in {where}"
    try:
        others = [one.app for one in await stored_applications(leases, environ, aws)]
    except LeaseStoreError:  # workers need no permission to list them
        return f"{missing}{hint}"
    if not others:
        return f"{missing}; it has no applications{hint}"
    if similar := get_close_matches(app, others, n=1):
        return f"{missing}: did you mean {similar[0]!r}?"
    shown = ", ".join(others[:_NAMES_SHOWN_MAX])
    more = f" and {len(others) - _NAMES_SHOWN_MAX} more" if len(others) > _NAMES_SHOWN_MAX else ""
    return f"{missing}; existing applications: {shown}{more}{hint}"


# A copy into another store
#
# The application's row is marked as `leaving` in the source, and as `arriving` in the target until all other rows are
# there and have been compared. So a copy that fails halfway can be repeated, and no worker starts with half of the
# leases. Then the row in the source is marked as `moved`, with the identity of the target's storage. A repeated copy
# completes only in that storage, so no other one gets a second copy, even if it has the same URL (in another region,
# account or network).


async def check_copy(source: LeaseStore, target: LeaseStore, app: AppRow) -> None:
    """Raises if the application cannot be copied. `app` is its row in the source."""
    if app.place == "arriving":
        raise UsageError(
            f"application {app.app!r} has not been copied to {source} completely: complete that copy first"
        )
    if isinstance(target, MemoryLeaseStore):
        raise UsageError(f"application {app.app!r} cannot move to {target}, which is lost with its process")
    found = await target.read_app()
    is_arriving = found is not None and (found.app_id, found.place) == (app.app_id, "arriving")
    if app.place == "moved" and not (found is not None and is_arriving and found.incarnation == app.other_storage):
        raise UsageError(f"application {app.app!r} was moved to {app.other_url} already")
    if found is None or is_arriving:
        return
    if found.app_id == app.app_id and found.place == "here":
        raise UsageError(f"application {app.app!r} is already in {target}")
    raise UsageError(
        f"{target} has another application {app.app!r}: delete it there first (anabranch apps delete), or choose "
        "another store"
    )


async def copy_rows(source: LeaseStore, target: LeaseStore, app: AppRow) -> int:
    """Returns the number of leases. Before the call: mark the source as leaving or moved, and stop its workers."""
    arriving = replace(app, place="arriving", other_store=str(source), watch=0)
    found = await target.open(arriving)
    if (found.app_id, found.place) != (app.app_id, "arriving"):
        raise UsageError(f"application {app.app!r} was created in {target} during the copy")
    streams = list(await source.read_streams())
    # Members are not copied, and leases have no owner: the first worker takes them at once.
    leases = [replace(row, owner=None) for row in await source.read_leases(with_finished=True)]
    await write_all(streams, target.put_stream)
    await write_all(leases, target.create_lease)
    await write_all([row for row in await source.read_controls() if row.state == "pending"], target.put_control)
    if list(await target.read_streams()) != streams or list(await target.read_leases(with_finished=True)) != leases:
        raise LeaseStoreError(f"{target} does not have all rows of application {app.app!r}: repeat the copy")
    moved = await source.move_app("leaving", "moved", f"{target}\n{found.incarnation}")
    if moved is None or (moved.place, moved.other_storage) != ("moved", found.incarnation):
        raise UsageError(f"application {app.app!r} was moved elsewhere, or started again, during the copy")
    await target.move_app("arriving", "here", "")
    return len(leases)
