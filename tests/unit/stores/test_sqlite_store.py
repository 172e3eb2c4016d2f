import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from blockbuster import BlockBuster

from anabranch._model.leases import AppRow, HeartbeatWrite, LeaseKey, LeaseRow, MemberRow
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.stores import sqlite
from anabranch.stores.sqlite import SqliteLeaseStore

APP = AppRow(app="billing", app_id="id", created_wall_ms=1)
LEASE = LeaseRow(key=LeaseKey("1:orders:2", 0, "shardId-000000000000"))


def member(member_id):
    return MemberRow(member_id=member_id, expiry_ms=10_000)


def with_store(path, check, *, opened=True):
    async def main():
        store = SqliteLeaseStore(path, "billing")
        try:
            if opened:
                await store.open(APP)
            return await check(store)
        finally:
            await store.close()

    return asyncio.run(main())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "leases.db"


def sql(path, statement, *values):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()


# places and files
def test_a_file_that_is_no_database_is_named_and_left_alone(path):
    path.write_text("these are notes of somebody, and no database at all")
    with pytest.raises(LeaseStoreInvalidError, match=r"leases\.db is not a SQLite database: name another file"):
        with_store(path, None)
    assert path.read_text().startswith("these are notes")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(LeaseStoreInvalidError, match="its folder does not exist"):
        with_store(tmp_path / "none" / "leases.db", None)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(LeaseStoreInvalidError, match="cannot be opened"):
        with_store(tmp_path, None)


def test_a_newer_schema_is_refused(path):
    with_store(path, lambda store: store.read_app())
    sql(path, "UPDATE anabranch_meta SET value = '99' WHERE name = 'schema_version'")
    with pytest.raises(LeaseStoreInvalidError, match=r"newer anabranch .schema 99; this one reads up to 2"):
        with_store(path, None)


def test_a_schema_without_a_version_is_refused(path):
    sql(path, "CREATE TABLE anabranch_meta (name TEXT PRIMARY KEY, value TEXT)")
    with pytest.raises(LeaseStoreInvalidError, match="no valid schema_version"):
        with_store(path, None)


def test_the_file_may_be_a_database_of_the_users_own(path):
    sql(path, "CREATE TABLE charges (amount INTEGER)")
    sql(path, "INSERT INTO charges VALUES (5)")
    assert with_store(path, lambda store: store.create_lease(LEASE)) == LEASE
    assert sql(path, "SELECT amount FROM charges") == [(5,)]


def test_looking_for_an_application_makes_nothing(path):
    assert with_store(path, lambda store: store.read_app(), opened=False) is None
    assert not path.exists()
    sql(path, "CREATE TABLE charges (amount INTEGER)")
    assert with_store(path, lambda store: store.read_app(), opened=False) is None
    assert sql(path, "SELECT name FROM sqlite_master") == [("charges",)]
    assert sql(path, "PRAGMA journal_mode") == [("delete",)]


def test_an_application_is_found_without_being_opened(path):
    made = with_store(path, lambda store: store.read_app())
    assert made.app_id == APP.app_id
    assert with_store(path, lambda store: store.read_app(), opened=False) == made


def test_what_was_never_opened_says_so(path):
    sql(path, "CREATE TABLE charges (amount INTEGER)")
    with pytest.raises(UsageError, match=r"leases\.db is not open: call open\(\) first"):
        with_store(path, lambda store: store.read_leases(), opened=False)


def test_tables_that_were_dropped_while_it_was_closed_are_missed(path):
    with_store(path, lambda store: store.read_app())

    async def check(store):
        store._app_id = "id"
        sql(path, "DROP TABLE anabranch_meta")
        await store.read_leases()

    with pytest.raises(LeaseStoreInvalidError, match="holds no leases: open the store first"):
        with_store(path, check, opened=False)


def test_another_application_is_refused(path):
    with pytest.raises(UsageError, match="made for application 'billing', not for 'other'"):
        with_store(path, lambda store: store.open(AppRow(app="other", app_id="x", created_wall_ms=1)))


def test_a_closed_store_says_so(path):
    async def check(store):
        await store.close()
        await store.close()
        await store.read_leases()

    with pytest.raises(UsageError, match="is closed"):
        with_store(path, check)


def test_a_network_file_system_is_refused_before_anything_is_made(path, monkeypatch):
    monkeypatch.setattr(sqlite, "file_system", lambda path: "nfs4")
    with pytest.raises(LeaseStoreInvalidError, match="network file system"):
        with_store(path, None)
    assert not path.exists()


def test_on_fuse_a_lock_proves_nothing(path, monkeypatch, caplog):
    monkeypatch.setattr(sqlite, "file_system", lambda path: "fuse.sshfs")

    async def check(store):
        await store.register_member(member("a"))
        store._presence.close()
        return (await store.poll()).known_dead

    assert with_store(path, check) == ()
    assert "is on fuse.sshfs" in caplog.text


# replaced, lost and damaged files
def test_a_file_that_is_gone_is_not_made_again(path):
    async def check(store):
        path.unlink()
        with pytest.raises(LeaseStoreError, match=r"is gone .* do not create it again"):
            await store.create_lease(LEASE)
        with pytest.raises(LeaseStoreError, match="is gone"):
            await store.identity()
        assert not path.exists()
        assert await store.read_app() is None

    with_store(path, check)


def test_a_file_that_was_moved_away_and_back_is_used_again(path):
    async def check(store):
        path.rename(path.with_name("moved"))
        with pytest.raises(LeaseStoreError, match="is gone"):
            await store.read_leases()
        path.with_name("moved").rename(path)
        assert await store.create_lease(LEASE) == LEASE

    with_store(path, check)


@pytest.mark.parametrize("suffix", ["", "-workers"])
def test_a_replaced_file_is_not_used_any_more(path, suffix, tmp_path):
    """SQLite may have mixed the old file's log into the new one; and other processes see another truth."""
    other = tmp_path / f"other.db{suffix}"
    with_store(tmp_path / "other.db", lambda store: store.read_app())

    async def check(store):
        await store.create_lease(LEASE)
        other.replace(path.with_name(path.name + suffix))
        with pytest.raises(LeaseStoreInvalidError, match="was replaced by another file while it was in use"):
            (await store.poll()).members if suffix else await store.read_leases()
        with pytest.raises(LeaseStoreInvalidError, match="stop all workers"):
            await store.identity()

    with_store(path, check)


def test_a_copy_of_the_file_is_another_incarnation(path, tmp_path):
    before = with_store(path, lambda store: store.identity())
    assert with_store(path, lambda store: store.identity()) == before
    shutil.copy(path, tmp_path / "copy.db")
    path.unlink()
    (tmp_path / "copy.db").rename(path)
    assert with_store(path, lambda store: store.identity()) != before


def test_dropped_tables_are_an_error_and_not_made_again(path):
    async def check(store):
        sql(path, "DROP TABLE anabranch_leases")
        await store.read_leases()

    with pytest.raises(LeaseStoreInvalidError, match="its tables do not match this version of anabranch"):
        with_store(path, check)


def test_a_row_that_a_hand_has_broken_is_named(path):
    async def check(store):
        await store.create_lease(LEASE)
        sql(path, "UPDATE anabranch_leases SET checkpoint = 'yesterday'")
        with pytest.raises(
            LeaseStoreInvalidError, match=r"row \(billing, id, 1:orders:2, 0, shardId-0+\) of anabranch_leas"
        ):
            await store.read_leases()
        sql(path, "UPDATE anabranch_leases SET checkpoint = NULL, order_mode = 'any'")
        with pytest.raises(LeaseStoreInvalidError, match="Invalid enum value 'any'"):
            await store.read_lease(LEASE.key)
        sql(path, "UPDATE anabranch_leases SET order_mode = 'shard', starts_at = x'00'")
        with pytest.raises(LeaseStoreInvalidError, match="cannot be read"):
            await store.read_lease(LEASE.key)

    with_store(path, check)


@pytest.mark.parametrize(
    "code, kind, words",
    [
        (sqlite3.SQLITE_BUSY, LeaseStoreError, "locked by another process"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, LeaseStoreError, "locked by another process"),
        (sqlite3.SQLITE_FULL, LeaseStoreError, "disk is full"),
        (sqlite3.SQLITE_IOERR, LeaseStoreError, "disk is full"),
        (sqlite3.SQLITE_CORRUPT, LeaseStoreInvalidError, "damaged"),
        (sqlite3.SQLITE_READONLY, LeaseStoreInvalidError, "read and write access to the file"),
        (None, LeaseStoreInvalidError, "do not match this version"),
    ],
)
def test_every_error_of_sqlite_becomes_ours(code, kind, words, path):
    error = sqlite3.OperationalError("database or disk is full")
    if code is not None:
        error.sqlite_errorcode = code
    found = sqlite.as_lease_error(error, path)
    assert type(found) is kind
    assert words in str(found)
    assert str(path) in str(found)


# locks
def test_a_long_transaction_of_another_process_is_waited_for_and_then_an_error(path, monkeypatch):
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 50)

    async def check(store):
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LeaseStoreError, match="locked by another process") as caught:
                await store.create_lease(LEASE)
            assert caught.value.retryable
            assert await store.read_leases() == []
            await store.register_member(member("a"))
            row = (await store.heartbeat(HeartbeatWrite(member_id="a", attempt=1))).row
            assert row.counter == 1
            other.execute("ROLLBACK")
        assert await store.create_lease(LEASE) == LEASE

    with_store(path, check)


def test_a_new_file_that_is_locked_while_it_changes_to_the_log_is_an_error(path, monkeypatch):
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 50)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LeaseStoreError, match="locked by another process"):
            with_store(path, None)


def test_a_file_that_cannot_keep_a_log_is_refused(path):
    class Stubborn:
        def execute(self, statement):
            assert statement == "PRAGMA journal_mode = WAL"
            return self

        def fetchone(self):
            return ("memory",)

    opened = sqlite.Database(path, (), synchronous="FULL", thread_name="test")
    with pytest.raises(LeaseStoreInvalidError, match="the mode stays 'memory'"):
        opened._use_write_ahead_log(Stubborn())


def test_nothing_blocks_the_loop(path):
    async def check(store):
        await store.register_member(member("a"))
        await store.heartbeat(HeartbeatWrite(member_id="a", attempt=1))
        await store.create_lease(LEASE)
        await store.take_lease(LEASE.key, "a", expected_owner=None, expected_version=0)
        await store.poll()
        await store.leave("a")
        return await store.identity()

    guard = BlockBuster()
    guard.activate()
    try:
        assert with_store(path, check)
    finally:
        guard.deactivate()


def test_a_heartbeat_may_come_from_a_thread_with_a_loop_of_its_own(path):
    async def check(store):
        await store.register_member(member("a"))
        found = []
        beating = threading.Thread(
            target=lambda: found.append(asyncio.run(store.heartbeat(HeartbeatWrite(member_id="a", attempt=1))))
        )
        beating.start()
        await asyncio.to_thread(beating.join)
        return found

    (answer,) = with_store(path, check)
    assert answer.row.counter == 1


def test_a_fork_must_make_its_own_store(path):
    async def check(store):
        store._main._process_id -= 1
        try:
            with pytest.raises(UsageError, match="made in another process"):
                await store.read_leases()
        finally:
            store._main._process_id = os.getpid()

    with_store(path, check)


def test_the_file_can_be_read_in_sql(path):
    async def check(store):
        await store.create_lease(LEASE)
        await store.take_lease(LEASE.key, "host-1/abc", expected_owner=None, expected_version=0)

    with_store(path, check)
    found = sql(
        path,
        'SELECT application, stream, shard, owner, "count", "checkpoint", completed, starts_at FROM anabranch_leases',
    )
    assert found == [("billing", "1:orders:2", "shardId-000000000000", "host-1/abc", 1, None, 0, "TRIM_HORIZON")]


# proof of death
def test_a_member_whose_process_is_gone_is_dead_at_once_and_one_that_left_is_not(path):
    async def check(store):
        for name in ("gone", "left", "lives", "without a file"):
            await store.register_member(member(name))
        await store.leave("left")
        gone = SqliteLeaseStore(path, "billing")
        await gone.open(APP)
        await gone.register_member(member("gone too"))
        await gone.close()  # what the kernel does when a process ends
        store._presence._file("without a file").unlink()
        other = SqliteLeaseStore(path, "billing")
        await other.open(APP)
        sqlite._release(store._presence._held.pop("gone"))
        try:
            return (await store.poll()).known_dead, (await other.poll()).known_dead
        finally:
            await other.close()

    assert with_store(path, check) == (("gone", "gone too"), ("gone", "gone too"))


def test_the_lock_files_of_deleted_members_go_too(path):
    async def check(store):
        long = "x" * 300 + "/y"
        for name in ("a", long):
            await store.register_member(member(name))
            await store.register_member(member(name))
        folder = path.with_name("leases.db-workers.d")
        assert len(list(folder.iterdir())) == 2
        await store.seal_member(long, 0)
        assert await store.delete_member(long)
        await store.leave("a")
        return list(folder.iterdir())

    assert with_store(path, check) == []


def test_a_forked_child_does_not_keep_its_parents_lock(path):
    program = """
import asyncio, os, sys
from anabranch._model.leases import AppRow, MemberRow
from anabranch.stores.sqlite import SqliteLeaseStore
async def main():
    store = SqliteLeaseStore(sys.argv[1], "billing")
    await store.open(AppRow(app="billing", app_id="id", created_wall_ms=1))
    await store.register_member(MemberRow(member_id="parent", expiry_ms=10_000))
asyncio.run(main())
ready, tell = os.pipe()
if os.fork() == 0:
    os.write(tell, b".")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, str(path)], stdin=subprocess.PIPE) as process:
        assert process.wait(30) == -9
        assert with_store(path, lambda store: store.poll()).known_dead == ("parent",)
