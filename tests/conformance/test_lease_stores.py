"""Every store passes the public contract, and the contract catches stores that break it."""

import asyncio
import sqlite3
from contextlib import closing, contextmanager

import pytest
from msgspec.structs import replace

from anabranch._model.leases import Conflict
from anabranch.errors import LeaseStoreError
from anabranch.stores import MemoryLeaseStore, SqliteLeaseStore
from anabranch.stores.memory import MemoryRows
from anabranch.stores.row_store import Changed
from anabranch.testing.lease_store_contract import check_lease_store, member


class MemoryStores:
    """The last store that was made, which a snapshot is of."""

    def make(self, app, kind=MemoryLeaseStore):
        self.last = kind()
        return self.last

    def snapshot(self):
        kept = {place: dict(rows) for place, rows in self.last.rows.places.items()}
        return lambda: setattr(self.last.rows, "places", kept)


def test_the_memory_store_keeps_the_contract():
    stores = MemoryStores()
    check_lease_store(stores.make, durable=False, snapshot=stores.snapshot)


def test_the_sqlite_store_keeps_the_contract(tmp_path):
    path = tmp_path / "leases.db"
    files = (path, path.with_name("leases.db-workers"))

    @contextmanager
    def locked():
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")

    def copy(source, target):
        with closing(sqlite3.connect(source)) as one, closing(sqlite3.connect(target)) as other:
            one.backup(other)

    def snapshot():
        for file in files:
            copy(file, f"{file}.kept")

        def roll_back():
            for file in files:
                copy(f"{file}.kept", file)

        return roll_back

    check_lease_store(lambda app: SqliteLeaseStore(path, app), slow=locked, snapshot=snapshot)


class UpsertingStore(MemoryLeaseStore):
    async def heartbeat(self, beat):
        await self.register_member(member(beat.member_id))
        return await super().heartbeat(beat)


class TakingFromAnybodyStore(MemoryLeaseStore):
    async def take_lease(self, key, member_id, *, expected_owner, expected_version, epoch_floor=0):
        stored = await self.read_lease(key)
        return await super().take_lease(
            key,
            member_id,
            expected_owner=stored and stored.owner,
            expected_version=expected_version,
            epoch_floor=epoch_floor,
        )


class LastWriteWinsStore(MemoryLeaseStore):
    async def write_lease(self, row, *, member_id, expected_version):
        stored = await self.read_lease(row.key)
        if stored is None:
            return Conflict(None)
        return await super().write_lease(row, member_id=member_id, expected_version=stored.version)


class RacyStore(MemoryLeaseStore):
    async def change(self, keys, update):
        found = await self.get(keys)
        await asyncio.sleep(0)
        after = update(found.rows)
        self.rows.change(keys, lambda _: after)
        return Changed(found.rows, after, None)


class NarrowStore(MemoryLeaseStore):
    """Keeps only the fields that it knows."""

    async def change(self, keys, update):
        return await super().change(keys, lambda rows: [row and replace(row, extra={}) for row in update(rows)])


class StoreOfOneLoop(MemoryLeaseStore):
    """Its connection belongs to the loop that opened it."""

    loop = None

    async def change(self, keys, update):
        self.loop = self.loop or asyncio.get_running_loop()
        if self.loop is not asyncio.get_running_loop():
            raise RuntimeError("attached to a different loop")
        return await super().change(keys, update)


class StoreThatBreaksWhenGivenUp(MemoryLeaseStore):
    is_broken = False

    async def change(self, keys, update):
        if self.is_broken:
            raise LeaseStoreError("the connection is in an unknown state")
        self.is_broken = keys[0].kind == "lease"
        await asyncio.sleep(0)
        changed = await super().change(keys, update)
        self.is_broken = False
        return changed


class StoreThatRemembers(MemoryLeaseStore):
    """Answers from a cache."""

    async def scan(self, scopes):
        found = await super().scan(scopes)
        key = repr(scopes)
        if any(scope.kind == "member" for scope in scopes) and len(found.rows) > 1:
            self.seen = getattr(self, "seen", {})
            kept = self.seen.get(key, found)
            self.seen[key] = max(kept, found, key=lambda one: sum(getattr(row, "counter", 0) for row in one.rows))
            return self.seen[key]
        return found


class ForgetfulStore(MemoryLeaseStore):
    async def read_leases(self, *, with_finished=False):
        return await super().read_leases(with_finished=True)


@pytest.mark.parametrize(
    "store, rule",
    [
        (UpsertingStore, "a heartbeat raises the counter of a live row and makes none"),
        (TakingFromAnybodyStore, "a lease is taken from the expected owner at the expected version"),
        (LastWriteWinsStore, "one of many writes of a version holds"),
        (RacyStore, "concurrent creates agree on one row"),
        (NarrowStore, "fields of a newer version are kept"),
        (StoreOfOneLoop, "two event loops use one handle"),
        (StoreThatBreaksWhenGivenUp, "a cancelled call leaves the handle usable"),
        (StoreThatRemembers, "a roll back shows"),
        (ForgetfulStore, "rows are read in order and finished ones only when asked for"),
    ],
)
def test_the_contract_catches_a_store_that_breaks_it(store, rule):
    stores = MemoryStores()
    with pytest.raises(ExceptionGroup, match="of the lease store contract do not hold") as caught:
        check_lease_store(lambda app: stores.make(app, store), durable=False, snapshot=stores.snapshot)
    notes = [note for failure in caught.value.exceptions for note in failure.__notes__]
    assert any(rule in note for note in notes), notes


class NamelessStore(MemoryLeaseStore):
    """Stores all rows under the application's name alone. Its handles share the rows."""

    def __init__(self, rows, app):
        super().__init__()
        self.rows, self.app = rows, app

    async def open(self, app):
        row = await super().open(app)
        self._app_id = "always"
        return row


def test_the_contract_catches_a_store_that_shows_late_writes_in_the_next_application():
    rows = {}

    def make(app):
        return NamelessStore(rows.setdefault(app, MemoryRows()), app)

    with pytest.raises(ExceptionGroup) as caught:
        check_lease_store(make)
    notes = [note for failure in caught.value.exceptions for note in failure.__notes__]
    assert "in the check 'a late write does not show in the next application of the name'" in notes
