"""Writes that wait at the same time share one transaction, and each has an outcome of its own."""

import asyncio
import sqlite3
import threading
from contextlib import asynccontextmanager, closing

import pytest

from anabranch._model.leases import AppRow, Conflict, LeaseKey, LeaseRow, MemberRow
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.stores.sqlite import SqliteLeaseStore

KEYS = [LeaseKey("1:orders:2", 0, f"shardId-{number:012}") for number in range(8)]


class World:
    """A store with a lease for each key, all held; and a hand on its thread."""

    def __init__(self, store, path):
        self.store = store
        self.path = path
        self.statements = []

    @asynccontextmanager
    async def busy(self):
        """While the file's thread has something else to do: what is asked for meanwhile waits."""
        go_on = threading.Event()
        busy = asyncio.create_task(self.store._main.run(go_on.wait))
        await asyncio.sleep(0)
        try:
            yield
        finally:
            go_on.set()
            await busy

    def write(self, row):
        return asyncio.create_task(self.store.write_lease(row, member_id="m#1", expected_version=row.version))

    def sql(self, statement):
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            return connection.execute(statement).fetchall()


def with_world(tmp_path, check):
    async def main():
        path = tmp_path / "leases.db"
        store = SqliteLeaseStore(path, "billing")
        world = World(store, path)
        await store.open(AppRow(app="billing", app_id="1", created_wall_ms=1))
        await store.register_member(MemberRow(member_id="m#1", expiry_ms=10_000))
        rows = []
        for key in KEYS:
            await store.create_lease(LeaseRow(key=key))
            rows.append(await store.take_lease(key, "m#1", expected_owner=None, expected_version=0))
        await store._main.run(lambda: store._main._connection.set_trace_callback(world.statements.append))
        await check(world, rows)
        await store.close()

    asyncio.run(main())


def test_writes_that_wait_together_are_committed_together(tmp_path):
    async def check(world, rows):
        async with world.busy():
            writes = [world.write(row) for row in rows]
            await asyncio.sleep(0)
            assert not any(write.done() for write in writes)
        outcomes = await asyncio.gather(*writes)
        assert [outcome.version for outcome in outcomes] == [2] * len(KEYS)
        assert world.statements.count("COMMIT") == 1
        assert world.sql("SELECT DISTINCT count FROM anabranch_leases") == [(2,)]

    with_world(tmp_path, check)


def test_a_write_is_answered_by_what_those_before_it_in_the_same_transaction_have_left(tmp_path):
    async def check(world, rows):
        async with world.busy():
            first, second = world.write(rows[0]), world.write(rows[0])
            await asyncio.sleep(0)
        assert (await first).version == 2
        assert await second == Conflict(await first)

    with_world(tmp_path, check)


def test_a_write_that_fails_undoes_nothing_of_the_others(tmp_path):
    async def check(world, rows):
        world.sql(f"UPDATE anabranch_leases SET checkpoint = 'by hand' WHERE shard = '{KEYS[1].shard_id}'")
        async with world.busy():
            writes = [world.write(row) for row in rows[:3]]
            await asyncio.sleep(0)
        with pytest.raises(LeaseStoreInvalidError, match="correct it in SQL"):
            await writes[1]
        assert [(await write).version for write in (writes[0], writes[2])] == [2, 2]
        assert world.statements.count("COMMIT") == 1

    with_world(tmp_path, check)


def test_what_does_not_reach_the_disk_is_an_error_for_all_of_them(tmp_path):
    async def check(world, rows):
        path = world.path.rename(tmp_path / "elsewhere.db")
        async with world.busy():
            writes = [world.write(row) for row in rows]
            await asyncio.sleep(0)
        for write in writes:
            with pytest.raises(LeaseStoreError, match="is gone"):
                await write
        path.rename(world.path)
        assert world.sql("SELECT DISTINCT count FROM anabranch_leases") == [(1,)]

    with_world(tmp_path, check)


def test_a_write_that_was_given_up_before_its_turn_is_not_made(tmp_path):
    async def check(world, rows):
        async with world.busy():
            given_up, other = world.write(rows[0]), world.write(rows[1])
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.sleep(0)
        assert (await other).version == 2
        assert (await world.store.read_lease(KEYS[0])).version == 1
        async with world.busy():
            alone = world.write(rows[2])
            await asyncio.sleep(0)
            alone.cancel()
            await asyncio.sleep(0)
        assert (await world.store.read_lease(KEYS[2])).version == 1

    with_world(tmp_path, check)
