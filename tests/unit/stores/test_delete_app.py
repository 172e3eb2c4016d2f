"""An application whose deletion failed at any step is deleted by the next try, and nothing of it is left."""

import asyncio
import itertools
import sqlite3
from contextlib import closing, suppress

import pytest

from anabranch._model.leases import AppRow, ControlRow, LeaseKey, LeaseRow, MemberRow, StatusRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON
from anabranch.application import Application
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.stores import DynamoDbLeaseStore, MemoryLeaseStore, SqliteLeaseStore
from memory_dynamodb import FailingDynamoDb, MemoryClients

APP = AppRow(app="billing", app_id="first", created_wall_ms=1)


class Failing:
    """Its connection breaks at the given call, before that takes effect or after it."""

    calls_left = None
    breaks = "before"

    async def scan(self, scopes):
        return await self._try(super().scan(scopes))

    async def change(self, keys, update):
        return await self._try(super().change(keys, update))

    async def _try(self, call):
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left == 0:
                if self.breaks == "before":
                    call.close()
                else:
                    await call
                raise LeaseStoreError("the connection broke")
        return await call


class FailingMemoryStore(Failing, MemoryLeaseStore):
    def row_count(self):
        return sum(len(rows) for rows in self.rows.places.values())


class FailingSqliteStore(Failing, SqliteLeaseStore):
    def row_count(self):
        count = len(list(self.path.parent.glob("*.d/*")))
        for file in (self.path, self.path.with_name(f"{self.path.name}-workers")):
            with closing(sqlite3.connect(file)) as connection:
                named = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
                tables = [name for (name,) in named if name != "anabranch_meta"]
                count += sum(connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables)
        return count


class FailingDynamoDbStore(DynamoDbLeaseStore):
    def __init__(self, database):
        super().__init__("billing")
        self.database = database
        self.table._clients = MemoryClients(database)

    @property
    def calls_left(self):
        return self.database.calls_left

    @calls_left.setter
    def calls_left(self, calls):
        self.database.calls_left = calls

    @property
    def breaks(self):
        return self.database.breaks

    @breaks.setter
    def breaks(self, breaks):
        self.database.breaks = breaks

    def row_count(self):
        return len(self.database.tables["anabranch"])


@pytest.fixture(params=["memory", "sqlite", "dynamodb"])
def make_store(request, tmp_path):
    memory, database = FailingMemoryStore(), FailingDynamoDb()
    makers = {
        "memory": lambda: memory,
        "sqlite": lambda: FailingSqliteStore(tmp_path / "leases.db", "billing"),
        "dynamodb": lambda: FailingDynamoDbStore(database),
    }
    return makers[request.param]


async def fill(store):
    await store.open(APP)
    await store.put_stream(
        StreamRow(stream_key="1:orders:1", name="orders", arn="", created_seconds=1.0, origin=TRIM_HORIZON)
    )
    # Two calls delete them, but on DynamoDB each row needs its own.
    lease_count = 20 if isinstance(store, DynamoDbLeaseStore) else 101
    keys = [LeaseKey("1:orders:1", 0, f"shardId-{number:012d}") for number in range(lease_count)]
    await asyncio.gather(*(store.create_lease(LeaseRow(key=key)) for key in keys))
    for name in ("a#1", "b#1"):
        await store.register_member(MemberRow(member_id=name, expiry_ms=10_000))
        await store.write_status(StatusRow(member_id=name, revision=1))
        await store.leave(name)
    await store.register_member(MemberRow(member_id="killed#1", expiry_ms=10_000))
    await store.seal_member("killed#1", 0)
    await store.put_control(ControlRow(command_id="c", action="pause"))


async def half_deleted(store, calls, breaks=None):
    """Its deletion has failed in the call after these."""
    await fill(store)
    store.calls_left, store.breaks = calls, breaks or store.breaks
    with pytest.raises(LeaseStoreError):
        await store.delete_app("first")
    store.calls_left = None
    return store


@pytest.mark.parametrize("breaks", ["before", "after"])
def test_a_deletion_that_failed_at_any_step_continues_in_another_process(make_store, breaks):
    async def main():
        for step in itertools.count(1):
            store = make_store()
            await fill(store)
            store.calls_left, store.breaks = step, breaks
            has_failed = True
            with suppress(LeaseStoreError):
                await store.delete_app("first")
                has_failed = False
            store.calls_left = None
            is_empty = store.row_count() == 0
            await store.close()
            store = make_store()
            app = await store.read_app()
            assert list(await store.leftovers()) == ([] if app or is_empty else ["first"])
            await store.delete_app("first")
            assert store.row_count() == 0
            assert list(await store.leftovers()) == []
            await store.close()
            if not has_failed:
                return step
        raise AssertionError("unreachable")

    assert asyncio.run(main()) > 12  # steps: the record, the application, and a scan and a change of each kind of row


def test_leftovers_are_deleted_beside_a_new_application_of_the_name(make_store):
    async def main():
        store = await half_deleted(make_store(), 4)
        new = await store.open(AppRow(app="billing", app_id="second", created_wall_ms=2))
        await store.register_member(MemberRow(member_id="c#1", expiry_ms=10_000))
        assert list(await store.leftovers()) == ["first"]
        assert await store.delete_app("first")
        assert await store.read_app() == new
        assert [row.member_id for row in (await store.poll()).members] == ["c#1"]
        await store.delete_app("second")
        assert store.row_count() == 0
        await store.close()

    asyncio.run(main())


def test_a_deletion_that_failed_before_it_deleted_anything_names_no_leftovers(make_store):
    async def main():
        store = await half_deleted(make_store(), 1, "after")
        assert (await store.read_app()).app_id == "first"
        assert list(await store.leftovers()) == []
        await store.close()

    asyncio.run(main())


def test_an_application_whose_deletion_failed_is_deleted_by_the_next_try(make_store):
    async def main():
        store = await half_deleted(make_store(), 6)
        with pytest.raises(LeaseStoreInvalidError, match="was deleted, but rows of it are left") as caught:
            await Application("billing", leases=store).status()
        assert caught.value.code == "half_deleted"
        async with Application("billing", leases=store) as application:
            await application.delete()
            assert store.row_count() == 0
            with pytest.raises(LeaseStoreInvalidError, match="there is no application 'billing'"):
                await application.delete()
        await store.close()

    asyncio.run(main())


def test_a_deletion_also_ends_an_earlier_one_of_the_name(make_store):
    async def main():
        store = await half_deleted(make_store(), 6)
        await store.open(AppRow(app="billing", app_id="second", created_wall_ms=2))
        await Application("billing", leases=store).delete()
        assert store.row_count() == 0
        await store.close()

    asyncio.run(main())
