"""A file of the previous version is migrated when it is opened. The dumps were made by that version."""

import asyncio
import fcntl
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from anabranch._model.leases import Checkpoint, Finish, HeartbeatWrite, LeaseKey, OpenKey
from anabranch._model.streams import Position
from anabranch.errors import LeaseStoreInvalidError
from anabranch.stores.sqlite import SqliteLeaseStore

DUMPS = Path(__file__).with_name("schema_1")
STREAM = "123456789012:orders:1700000000"
MEMBER = "w1#00000000000000000000000000000000"


@pytest.fixture
def path(tmp_path):
    for name, dump in (("leases.db", "leases.sql"), ("leases.db-workers", "leases-workers.sql")):
        with closing(sqlite3.connect(tmp_path / name)) as connection:
            connection.executescript((DUMPS / dump).read_text())
    return tmp_path / "leases.db"


def versions(path):
    found = []
    for file in (path, path.with_name(f"{path.name}-workers")):
        with closing(sqlite3.connect(file)) as connection:
            found += connection.execute("SELECT value FROM anabranch_meta WHERE name = 'schema_version'").fetchone()
    return found


async def check_rows(path, app, app_id):
    store = SqliteLeaseStore(path, app)
    try:
        row = await store.read_app()
        assert row.app_id == app_id
        opened = await store.open(replace(row, app_id="never used"))
        assert opened == row
        poll = await store.poll()
        assert [(one.member_id, one.state, one.counter) for one in poll.members] == [(MEMBER, "left", 7)]
        assert [one.command_id for one in poll.commands] == ["c1"]
        (stream,) = await store.read_streams()
        assert (stream.stream_key, stream.bootstrapped, stream.version) == (STREAM, True, 1)
        first, second = await store.read_leases(with_finished=True)
        assert first.finish == Finish("end", ("shardId-000000000001",))
        number = 10**56
        assert second.checkpoint == Checkpoint(
            Position(number + 7, 3),
            Position(number + 9),
            (OpenKey(b"\x00\xff345678", Position(number + 8), 2),),
            1,
            "key",
            1_700_000_001.5,
        )
        assert (second.owner, second.version, second.epoch, second.records_handled) == (MEMBER, 4, 4, 9)
        assert second.stopped.partition_key == "user-1"
        taken = await store.take_lease(
            LeaseKey(STREAM, 0, "shardId-000000000001"), "b", expected_owner=MEMBER, expected_version=4
        )
        assert taken.owner == "b"
    finally:
        await store.close()


def test_the_rows_of_the_previous_version_are_all_there(path):
    assert asyncio.run(SqliteLeaseStore(path, "").applications()) == ["audit", "billing"]
    assert versions(path) == ["1", "1"]
    asyncio.run(check_rows(path, "billing", "a" * 32))
    assert versions(path) == ["2", "2"]
    asyncio.run(check_rows(path, "audit", "b" * 32))


def test_a_migration_that_stopped_between_the_two_files_continues(path):
    async def open_main_only():
        store = SqliteLeaseStore(path, "billing")
        await store._main.create()
        await store.close()

    asyncio.run(open_main_only())
    assert versions(path) == ["2", "1"]
    asyncio.run(check_rows(path, "billing", "a" * 32))


def test_two_processes_that_open_it_at_once_migrate_it_once(path):
    async def both():
        stores = [SqliteLeaseStore(path, "billing") for _ in range(2)]
        rows = await asyncio.gather(*(store.read_app() for store in stores))
        await asyncio.gather(*(store.open(row) for store, row in zip(stores, rows, strict=True)))
        for store in stores:
            await store.close()

    asyncio.run(both())
    asyncio.run(check_rows(path, "billing", "a" * 32))


def test_a_file_that_workers_of_the_previous_version_use_is_left_alone(path):
    folder = path.with_name("leases.db-workers.d")
    folder.mkdir()
    with (folder / "w1%23abc").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LeaseStoreInvalidError, match=r"in use by its workers \(w1#abc\): stop them before"):
            asyncio.run(check_rows(path, "billing", "a" * 32))
        assert versions(path) == ["1", "1"]
    asyncio.run(check_rows(path, "billing", "a" * 32))


def test_a_heartbeat_is_written_to_a_migrated_row(path):
    async def main():
        store = SqliteLeaseStore(path, "billing")
        with closing(sqlite3.connect(f"{path}-workers", isolation_level=None)) as connection:
            connection.execute("UPDATE anabranch_members SET state = 'live'")
        await store.open(await store.read_app())
        row = (await store.heartbeat(HeartbeatWrite(member_id=MEMBER, attempt=8))).row
        await store.close()
        return row.counter

    assert asyncio.run(main()) == 8
