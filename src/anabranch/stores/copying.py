"""Copies the rows of a stopped application into another lease store, so that its workers continue there.

The application's row is marked as `leaving` in the source, and as `arriving` in the target until all other rows are
there and have been compared. So a copy that ends half-way can be repeated, and no worker starts with half of the
leases. Then the row in the source is marked as `moved`, with the storage that it moved to: only there, a copy is
completed. So no second store gets a copy, even if it has the same URL (in another region, account or network).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

from anabranch._model.leases import AppRow
from anabranch._ports import LeaseStore
from anabranch.errors import LeaseStoreError, UsageError
from anabranch.stores.memory import MemoryLeaseStore

T = TypeVar("T")

_WRITTEN_TOGETHER_MAX: Final = 16


async def check_copy(source: LeaseStore, target: LeaseStore, app: AppRow) -> None:
    """Raises if the application cannot be copied. `app` is its row in the source."""
    if app.place == "arriving":
        raise UsageError(f"application {app.app!r} has not arrived in {source} yet: complete that copy first")
    if isinstance(target, MemoryLeaseStore):
        raise UsageError(f"application {app.app!r} cannot move to {target}, which keeps nothing")
    found = await target.read_app()
    is_arriving = found is not None and (found.app_id, found.place) == (app.app_id, "arriving")
    if app.place == "moved" and not (found is not None and is_arriving and found.incarnation == app.other_storage):
        raise UsageError(f"application {app.app!r} was moved to {app.other_url} already")
    if found is None or is_arriving:
        return
    if found.app_id == app.app_id and found.place == "here":
        raise UsageError(f"application {app.app!r} is in {target} already")
    raise UsageError(
        f"{target} has an application {app.app!r} of its own: delete it there first (anabranch apps delete), or name "
        "another store"
    )


async def copy_rows(source: LeaseStore, target: LeaseStore, app: AppRow) -> int:
    """Returns the number of leases. The source is marked as leaving or moved, and no worker runs there."""
    arriving = replace(app, place="arriving", other_store=str(source), watch=0)
    found = await target.open(arriving)
    if (found.app_id, found.place) != (app.app_id, "arriving"):
        raise UsageError(f"somebody created application {app.app!r} in {target} at the same moment")
    streams = list(await source.read_streams())
    # Members stay behind: the first worker takes its leases at once.
    leases = [replace(row, owner=None) for row in await source.read_leases(with_finished=True)]
    await _write_all(streams, target.put_stream)
    await _write_all(leases, target.create_lease)
    await _write_all([row for row in await source.read_controls() if row.state == "pending"], target.put_control)
    if list(await target.read_streams()) != streams or list(await target.read_leases(with_finished=True)) != leases:
        raise LeaseStoreError(f"{target} does not have all rows of application {app.app!r}: repeat the copy")
    moved = await source.move_app("leaving", "moved", f"{target}\n{found.incarnation}")
    if moved is None or (moved.place, moved.other_storage) != ("moved", found.incarnation):
        raise UsageError(f"application {app.app!r} was moved elsewhere, or started again, at the same moment")
    await target.move_app("arriving", "here", "")
    return len(leases)


async def _write_all(rows: Sequence[T], write: Callable[[T], Awaitable[object]]) -> None:
    for first in range(0, len(rows), _WRITTEN_TOGETHER_MAX):
        writes = map(write, rows[first : first + _WRITTEN_TOGETHER_MAX])
        for outcome in await asyncio.gather(*writes, return_exceptions=True):  # all have ended, then the first error
            if isinstance(outcome, BaseException):
                raise outcome
