"""The lease store on SQLite: the embedded default, shared by the processes of one machine.

The conditions are those of `_core.leases.rows`: a write reads the row under the file's write lock, computes the new
row and stores it. Lease commits reach the disk before they are acknowledged (synchronous=FULL). Heartbeats are in a
file of their own with synchronous=NORMAL: after a power loss no member is left that could rely on them (rule L16).
"""

import fcntl
import hashlib
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

from msgspec.structs import replace

from anabranch._core.leases import rows
from anabranch._model.leases import (
    AppRow,
    Conflict,
    ControlRow,
    HandOffRequest,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    MemberRow,
    StreamRow,
)
from anabranch._ports import LeaseStore
from anabranch.errors import UsageError
from anabranch.stores import sqlite_tables as tables
from anabranch.stores.sqlite_database import Database, check_place, file_system, has_true_locks
from anabranch.stores.sqlite_tables import Table

__all__ = ["SqliteLeaseStore"]

_NAME_BYTES_MAX = 200  # file systems allow 255
_locks_of_this_process: set[int] = set()  # file descriptors of all `Presence` objects


class Presence:
    """Proves that a process is gone: every member holds a lock on a file of its own (rule L17).

    The kernel releases the lock when the process ends, and keeps it while the process is only stopped. Whoever can lock
    the file of a live row knows that its member will never act again, and seals it without waiting for its expiry. The
    lock is taken before the row is written. A missing file proves nothing.
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

_APPS = Table("anabranch_applications", tables.APP_COLUMNS, 1, tables.app_row)
_STREAMS = Table("anabranch_streams", tables.STREAM_COLUMNS, 2, tables.stream_row)
_LEASES = Table("anabranch_leases", tables.LEASE_COLUMNS, 4, tables.lease_row)
_CONTROLS = Table("anabranch_commands", tables.CONTROL_COLUMNS, 2, tables.control_row)
_MEMBERS = Table("anabranch_members", tables.MEMBER_COLUMNS, 2, tables.member_row)


class SqliteLeaseStore(LeaseStore):
    """Leases in one file, for the processes of one machine.

    `<path>-workers` (heartbeats) and the folder `<path>-workers.d` (locks) belong to it. Several applications can share
    a file, and the file can be your own database.
    """

    def __init__(self, path: str | Path, app: str) -> None:
        self.path = Path(path)
        self.app = app
        beside = f"{self.path.name}-workers"
        self._main = Database(self.path, tables.LEASES, synchronous="FULL", thread_name="anabranch-leases")
        self._workers = Database(
            self.path.with_name(beside), tables.MEMBERS, synchronous="NORMAL", thread_name="anabranch-workers"
        )
        self._presence = Presence(self.path.with_name(f"{beside}.d"))
        self._locks_are_true = False

    def __str__(self) -> str:
        return f"sqlite://{self.path.absolute()}"

    # the application
    async def open(self, app: AppRow) -> AppRow:
        if app.app != self.app:
            raise UsageError(f"this lease store was made for application {self.app!r}, not for {app.app!r}")
        await self._main.run(self._check_place)
        await self._main.create()
        await self._workers.create()
        # Reading needs no lock: a worker can join even if another process was paused inside a write.
        standing = await self.read_app()
        if standing is not None:
            return standing
        made = tables.app_columns(replace(app, incarnation=await self.incarnation()))
        return await self._main.write(lambda connection: _APPS.put_if_absent(connection, made))

    def _check_place(self) -> None:
        kind = file_system(self.path)
        if (warning := check_place(self.path, kind)) is not None:
            _log.warning("%s", warning)
        self._locks_are_true = has_true_locks(kind)

    async def read_app(self) -> AppRow | None:
        if not await self._main.exists():
            return None
        return await self._main.read(lambda connection: _APPS.get(connection, (self.app,)))

    async def incarnation(self) -> str:
        return f"{await self._main.identity()}/{await self._workers.identity()}"

    async def record_incarnation(self, expected: str, incarnation: str) -> AppRow | None:
        def work(connection: sqlite3.Connection) -> AppRow | None:
            stored = _APPS.get(connection, (self.app,))
            row = rows.record_incarnation(stored, expected, incarnation)
            if row is not None and row is not stored:
                _APPS.put(connection, tables.app_columns(row))
            return row

        return await self._main.write(work)

    async def delete_app(self, app_id: str) -> bool:
        standing = await self.read_app()
        if standing is None:
            return False

        def delete_members(connection: sqlite3.Connection) -> list[str] | None:
            members = _MEMBERS.scan(connection, self.app)
            if not rows.may_delete_app(standing, members, app_id):
                return None
            _MEMBERS.delete_all(connection, self.app)
            return [member.member_id for member in members]

        def delete_rest(connection: sqlite3.Connection) -> bool:
            if not rows.may_delete_app(_APPS.get(connection, (self.app,)), (), app_id):
                return False
            for table in (_LEASES, _STREAMS, _CONTROLS, _APPS):
                table.delete_all(connection, self.app)
            return True

        gone = await self._workers.write(delete_members)
        if gone is None:
            return False
        for member_id in gone:
            await self._workers.run(partial(self._presence.withdraw, member_id))
        return await self._main.write(delete_rest)

    async def close(self) -> None:
        await self._main.close()
        await self._workers.close(self._presence.close)

    # members
    async def register_member(self, row: MemberRow) -> MemberRow:
        def work(connection: sqlite3.Connection) -> MemberRow:
            self._presence.announce(row.member_id)
            return _MEMBERS.put_if_absent(connection, tables.member_columns(self.app, row))

        return await self._workers.write(work)

    async def heartbeat(self, write: HeartbeatWrite) -> MemberRow | None:
        return await self._change_member(write.member_id, lambda row: rows.heartbeat(row, write))

    async def read_members(self) -> Sequence[MemberRow]:
        return await self._workers.read(lambda connection: _MEMBERS.scan(connection, self.app))

    async def dead_members(self) -> Sequence[str]:
        if not self._locks_are_true:
            return ()

        def work(connection: sqlite3.Connection) -> Sequence[str]:
            live = (row.member_id for row in _MEMBERS.scan(connection, self.app) if row.state == "live")
            return tuple(member_id for member_id in live if self._presence.is_dead(member_id))

        return await self._workers.read(work)

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        return await self._change_member(member_id, lambda row: rows.seal_member(row, observed_counter))

    async def leave(self, member_id: str) -> MemberRow | None:
        row = await self._change_member(member_id, rows.leave)
        if row is not None and row.state != "live":
            await self._workers.run(lambda: self._presence.withdraw(member_id))
        return row

    async def request_hand_off(self, donor: str, request: HandOffRequest) -> MemberRow | None:
        return await self._change_member(donor, lambda row: rows.request_hand_off(row, request))

    async def delete_member(self, member_id: str) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            key = (self.app, member_id)
            if not rows.may_delete_member(_MEMBERS.get(connection, key)):
                return False
            _MEMBERS.delete(connection, key)
            return True

        is_deleted = await self._workers.write(work)
        if is_deleted:
            await self._workers.run(lambda: self._presence.withdraw(member_id))
        return is_deleted

    async def _change_member(
        self, member_id: str, change: Callable[[MemberRow | None], MemberRow | None]
    ) -> MemberRow | None:
        def work(connection: sqlite3.Connection) -> MemberRow | None:
            stored = _MEMBERS.get(connection, (self.app, member_id))
            row = change(stored)
            if row is not None and row is not stored:
                _MEMBERS.put(connection, tables.member_columns(self.app, row))
            return row

        return await self._workers.write(work)

    # streams
    async def put_stream(self, row: StreamRow, *, app_id: str) -> StreamRow | None:
        def work(connection: sqlite3.Connection) -> StreamRow | None:
            if not self._may_begin(connection, app_id):
                return None
            return _STREAMS.put_if_absent(connection, tables.stream_columns(self.app, row))

        return await self._main.write(work)

    async def write_stream(self, row: StreamRow, expected_version: int, *, app_id: str) -> StreamRow | None:
        def work(connection: sqlite3.Connection) -> StreamRow | None:
            if not self._may_begin(connection, app_id):
                return None
            written = rows.write_stream(_STREAMS.get(connection, (self.app, row.stream_key)), row, expected_version)
            if written is not None:
                _STREAMS.put(connection, tables.stream_columns(self.app, written))
            return written

        return await self._main.write(work)

    async def read_streams(self) -> Sequence[StreamRow]:
        return await self._main.read(lambda connection: _STREAMS.scan(connection, self.app))

    def _may_begin(self, connection: sqlite3.Connection, app_id: str) -> bool:
        return rows.may_begin(_APPS.get(connection, (self.app,)), app_id)

    # leases
    async def create_lease(self, row: LeaseRow, *, app_id: str) -> LeaseRow | None:
        def work(connection: sqlite3.Connection) -> LeaseRow | None:
            if not self._may_begin(connection, app_id):
                return None
            return _LEASES.put_if_absent(connection, tables.lease_columns(self.app, row))

        return await self._main.write(work)

    async def read_leases(self, *, with_finished: bool = False) -> Sequence[LeaseRow]:
        where = "" if with_finished else " AND completed = 0"
        return await self._main.read(lambda connection: _LEASES.scan(connection, self.app, where))

    async def read_lease(self, key: LeaseKey) -> LeaseRow | None:
        return await self._main.read(lambda connection: _LEASES.get(connection, self._lease(key)))

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        def work(connection: sqlite3.Connection) -> LeaseRow | Conflict:
            outcome = rows.take_lease(
                _LEASES.get(connection, self._lease(key)),
                member_id,
                expected_owner=expected_owner,
                expected_version=expected_version,
                epoch_floor=epoch_floor,
            )
            return self._put_lease(connection, outcome)

        return await self._main.write(work)

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        def work(connection: sqlite3.Connection) -> LeaseRow | Conflict:
            stored = _LEASES.get(connection, self._lease(row.key))
            outcome = rows.write_lease(stored, row, member_id=member_id, expected_version=expected_version)
            return self._put_lease(connection, outcome)

        return await self._main.write(work)

    async def delete_lease(self, key: LeaseKey, expected_version: int) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            if not rows.may_delete_lease(_LEASES.get(connection, self._lease(key)), expected_version):
                return False
            _LEASES.delete(connection, self._lease(key))
            return True

        return await self._main.write(work)

    def _put_lease(self, connection: sqlite3.Connection, outcome: LeaseRow | Conflict) -> LeaseRow | Conflict:
        if isinstance(outcome, LeaseRow):
            _LEASES.put(connection, tables.lease_columns(self.app, outcome))
        return outcome

    def _lease(self, key: LeaseKey) -> tuple[str, str, int, str]:
        return (self.app, key.stream_key, key.generation, key.shard_id)

    # commands
    async def put_control(self, row: ControlRow) -> None:
        def work(connection: sqlite3.Connection) -> None:
            _CONTROLS.put_if_absent(connection, tables.control_columns(self.app, row))

        await self._main.write(work)

    async def write_control(self, row: ControlRow) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            written = rows.write_control(_CONTROLS.get(connection, (self.app, row.command_id)), row)
            if written is not None:
                _CONTROLS.put(connection, tables.control_columns(self.app, written))
            return written is not None

        return await self._main.write(work)

    async def read_controls(self) -> Sequence[ControlRow]:
        found = await self._main.read(lambda connection: _CONTROLS.scan(connection, self.app))
        return sorted(found, key=lambda row: (row.requested_wall_ms, row.command_id))


async def applications_in(path: Path) -> list[str]:
    """The applications in a lease file, sorted. Empty if the file or our tables do not exist; creates nothing."""
    database = Database(path, tables.LEASES, synchronous="FULL", thread_name="anabranch-catalogue")
    try:
        if not await database.exists():
            return []
        return await database.read(
            lambda connection: [
                str(name)
                for (name,) in connection.execute("SELECT application FROM anabranch_applications ORDER BY application")
            ]
        )
    finally:
        await database.close()
