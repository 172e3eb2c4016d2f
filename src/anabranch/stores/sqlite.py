"""The lease store on SQLite: the embedded default, shared by the processes of one machine.

A change reads the rows under the file's write lock, computes the new rows and stores them. Lease commits reach the disk
before they are acknowledged (synchronous=FULL). Heartbeats are in a
file of their own with synchronous=NORMAL: after a power loss no member is left that could rely on them (rule L16).
"""

import fcntl
import hashlib
import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from msgspec.structs import replace

from anabranch._model.leases import AppRow, MemberRow, Poll
from anabranch.errors import LeaseStoreInvalidError
from anabranch.stores import sqlite_tables as tables
from anabranch.stores.row_codec import Columns
from anabranch.stores.row_store import Changed, Found, Kind, Row, RowKey, RowLeaseStore, Scope, Update
from anabranch.stores.sqlite_database import Database, check_place, file_system, has_true_locks
from anabranch.stores.sqlite_tables import TABLES

__all__ = ["SqliteLeaseStore"]

_NAME_BYTES_MAX = 200  # file systems allow 255
_locks_of_this_process: set[int] = set()  # file descriptors of all `Presence` objects


class Presence:
    """Proves that a process is gone: every member holds a lock on a file of its own (rule L17).

    The kernel releases the lock when the process ends, and keeps it while the process is only stopped. A process that
    can lock the file of a live row knows that its member will never act again, and seals it without waiting for its
    expiry. The lock is taken before the row is written. A missing file proves nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def announce(self, member_id: str) -> None:
        """Takes the member's lock, until `withdraw` or the end of this process."""
        if member_id in self._held:
            return
        self._folder.mkdir(exist_ok=True)
        descriptor = os.open(self._file(member_id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # already held: the member already counts as alive
            os.close(descriptor)
        else:
            self._held[member_id] = descriptor
            _locks_of_this_process.add(descriptor)

    def withdraw(self, member_id: str) -> None:
        """Releases the member's lock and removes its file."""
        with suppress(FileNotFoundError):
            self._file(member_id).unlink()
        if (descriptor := self._held.pop(member_id, None)) is not None:
            _release(descriptor)

    def is_dead(self, member_id: str) -> bool:
        """True only if the OS has released the lock of the member's process."""
        if member_id in self._held:
            return False
        try:
            descriptor = os.open(self._file(member_id), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: observers do not block each other
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(descriptor)

    def held_by_others(self) -> list[str]:
        """The members whose processes are running, by their locks. Long names are cut."""
        files = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        names = [unquote(file.name) for file in files]
        return [name for name in names if name not in self._held and self._is_locked(name)]

    def _is_locked(self, member_id: str) -> bool:
        return self._file(member_id).exists() and not self.is_dead(member_id)

    def close(self) -> None:
        for descriptor in self._held.values():
            _release(descriptor)
        self._held.clear()

    def _file(self, member_id: str) -> Path:
        name = quote(member_id, safe=" @:+")
        if len(name) > _NAME_BYTES_MAX:
            name = name[: _NAME_BYTES_MAX - 65] + "-" + hashlib.sha256(member_id.encode()).hexdigest()
        return self._folder / name


def _release(descriptor: int) -> None:
    if descriptor in _locks_of_this_process:  # a forked child closed its copies and may reuse the numbers
        _locks_of_this_process.remove(descriptor)
        os.close(descriptor)


def _close_after_fork() -> None:
    for descriptor in _locks_of_this_process:
        os.close(descriptor)
    _locks_of_this_process.clear()


os.register_at_fork(after_in_child=_close_after_fork)


_log = logging.getLogger(__name__)


class SqliteLeaseStore(RowLeaseStore):
    """Leases in one file, for the processes of one machine.

    `<path>-workers` (heartbeats) and the folder `<path>-workers.d` (locks) belong to it. Several applications can share
    a file, and the file can be your own database.
    """

    def __init__(self, path: str | Path, app: str) -> None:
        super().__init__(app)
        self.path = Path(path)
        beside = f"{self.path.name}-workers"
        self._main = Database(self.path, tables.LEASES, synchronous="FULL", thread_name="anabranch-leases")
        self._workers = Database(
            self.path.with_name(beside), tables.MEMBERS, synchronous="NORMAL", thread_name="anabranch-workers"
        )
        self._presence = Presence(self.path.with_name(f"{beside}.d"))
        self._locks_are_true = False

    def __str__(self) -> str:
        return f"sqlite://{self.path.absolute()}"

    # the primitives
    async def identity(self) -> str:
        await self._main.read(self._main.observe)
        await self._workers.read(self._workers.observe)
        return self._evidence

    @property
    def _evidence(self) -> str:
        return f"{self._main.identity}/{self._workers.identity}"

    async def get(self, keys: Sequence[RowKey]) -> Found:
        database = self._database(keys[0].kind)

        def work(connection: sqlite3.Connection) -> list[Row | None]:
            database.observe(connection)
            return [TABLES[key.kind].get(connection, _place(key)) for key in keys]

        return Found(await database.read(work), self._evidence)

    async def scan(self, scopes: Sequence[Scope]) -> Found:
        found: list[Row | None] = []
        for database, together in groupby(scopes, lambda scope: self._database(scope.kind)):
            found += await database.read(partial(_scan, database, list(together)))
        return Found(found, self._evidence)

    async def change(self, keys: Sequence[RowKey], update: Update) -> Changed:
        database = self._database(keys[0].kind)

        def work(connection: sqlite3.Connection) -> Changed:
            database.observe(connection)
            before = [TABLES[key.kind].get(connection, _place(key)) for key in keys]
            after = update(before)
            for key, old, new in zip(keys, before, after, strict=True):
                if new is None and old is not None:
                    TABLES[key.kind].delete(connection, _place(key))
                elif new is not old:
                    TABLES[key.kind].put(connection, key.app, key.app_id, new)
            return Changed(before, after, None)

        changed = await database.write(work)
        return changed._replace(evidence=self._evidence)

    async def close(self) -> None:
        await self._main.close()
        await self._workers.close(self._presence.close)

    def _database(self, kind: Kind) -> Database:
        return self._workers if kind in {"member", "status"} else self._main

    # the application
    async def open(self, app: AppRow) -> AppRow:
        self._check_name(app)
        await self._main.run(self._check_place)
        if await self._workers.version() == _WITHOUT_APP_IDS:
            await self._workers.run(self._check_old_workers)
        await self._main.create()
        await self._workers.create(await self._main.read(tables.read_app_ids))
        await self.identity()
        # Finding the row needs no lock: a worker can join even if another process was paused inside a write.
        return await super().open(app)

    def _check_place(self) -> None:
        kind = file_system(self.path)
        if (warning := check_place(self.path, kind)) is not None:
            _log.warning("%s", warning)
        self._locks_are_true = has_true_locks(kind)

    def _check_old_workers(self) -> None:
        """Workers of an earlier version cannot use the new tables."""
        if held := self._presence.held_by_others():
            raise LeaseStoreInvalidError(
                f"{self.path} was written by an earlier anabranch and is in use by its workers ({', '.join(held)}): "
                "stop them before you start this version, which changes the tables"
            )

    async def read_app(self) -> AppRow | None:
        version = await self._main.version()
        if version is None:
            return None
        if version == _WITHOUT_APP_IDS:
            return await self._main.peek(lambda connection: tables.old_app_row(connection, self.app))
        return await super().read_app()

    async def delete_app(self, app_id: str) -> bool:
        for row in (await self.scan([Scope("member", self.app, app_id)])).rows:
            if isinstance(row, MemberRow):
                await self._workers.run(partial(self._presence.withdraw, row.member_id))
        return await super().delete_app(app_id)

    async def leftovers(self) -> Sequence[str]:
        return await super().leftovers() if await self._main.version() == tables.VERSION else ()

    # members
    async def register_member(self, row: MemberRow) -> MemberRow:
        await self._workers.run(partial(self._presence.announce, row.member_id))
        return await super().register_member(row)

    async def poll(self) -> Poll:
        poll = await super().poll()
        return replace(poll, known_dead=await self._known_dead(poll.members))

    async def _known_dead(self, members: Sequence[MemberRow]) -> tuple[str, ...]:
        if not self._locks_are_true:
            return ()
        live = [row.member_id for row in members if row.state == "live"]
        return await self._workers.run(lambda: tuple(one for one in live if self._presence.is_dead(one)))

    async def leave(self, member_id: str) -> MemberRow | None:
        row = await super().leave(member_id)
        if row is not None and row.state != "live":
            await self._workers.run(partial(self._presence.withdraw, member_id))
        return row

    async def delete_member(self, member_id: str) -> bool:
        is_deleted = await super().delete_member(member_id)
        if is_deleted:
            await self._workers.run(partial(self._presence.withdraw, member_id))
        return is_deleted


_WITHOUT_APP_IDS: Final = 1
"""The version of the tables in which rows were stored under the application's name alone."""


def _place(key: RowKey) -> Columns:
    return (key.app,) if key.kind == "app" else (key.app, key.app_id, *key.name)


def _scan(database: Database, scopes: list[Scope], connection: sqlite3.Connection) -> list[Row | None]:
    database.observe(connection)
    found: list[Row | None] = []
    for scope in scopes:
        place = (scope.app,) if scope.kind == "app" else (scope.app, scope.app_id)
        found += TABLES[scope.kind].scan(connection, place, with_finished=scope.with_finished)
    return found


async def applications_in(path: Path) -> list[str]:
    """The applications in a lease file, sorted. Empty if the file or our tables do not exist; creates nothing."""
    database = Database(path, tables.LEASES, synchronous="FULL", thread_name="anabranch-catalogue")
    try:
        if await database.version() is None:
            return []
        return await database.peek(
            lambda connection: [
                str(name)
                for (name,) in connection.execute("SELECT application FROM anabranch_applications ORDER BY application")
            ]
        )
    finally:
        await database.close()
