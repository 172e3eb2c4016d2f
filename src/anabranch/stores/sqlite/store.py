"""The lease store on SQLite: reads and writes of rows, each one transaction.

The conditions are those of `_core.leases.rows`: a write reads the row under the file's write lock, asks the function
what it becomes, and stores that. Lease commits reach the disk before they are acknowledged (synchronous=FULL);
heartbeats are in a file of their own with synchronous=NORMAL, since after a loss of power no member is left to heed
them (rule L16).

A take looks at its owner's row first and at the lease second, without one transaction over both files: sealed and
left are final, so what the first read found still holds.
"""

import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from anabranch._core.leases import rows
from anabranch._model.leases import (
    AppRow,
    Beat,
    Conflict,
    ControlRow,
    HandOffRequest,
    LeaseKey,
    LeaseRow,
    MemberRow,
    StreamRow,
)
from anabranch._ports.lease_store import LeaseStore
from anabranch.errors import UsageError
from anabranch.stores.sqlite import columns, schema
from anabranch.stores.sqlite.database import Database
from anabranch.stores.sqlite.place import check_place, file_system, has_true_locks
from anabranch.stores.sqlite.presence import Presence
from anabranch.stores.sqlite.table import Table

__all__ = ["SqliteLeaseStore"]

_log = logging.getLogger(__name__)

_APPS = Table("anabranch_applications", columns.APP_COLUMNS, 1, columns.app_row)
_STREAMS = Table("anabranch_streams", columns.STREAM_COLUMNS, 2, columns.stream_row)
_LEASES = Table("anabranch_leases", columns.LEASE_COLUMNS, 4, columns.lease_row)
_CONTROLS = Table("anabranch_commands", columns.CONTROL_COLUMNS, 2, columns.control_row)
_MEMBERS = Table("anabranch_members", columns.MEMBER_COLUMNS, 2, columns.member_row)


class SqliteLeaseStore(LeaseStore):
    """Leases in one file, for the processes of one machine.

    Beside the file lie `<path>-workers` (heartbeats) and the folder `<path>-workers.d` (locks); the three belong
    together. Several applications may share a file, and it may be a database of your own.
    """

    def __init__(self, path: str | Path, app: str) -> None:
        self.path = Path(path)
        self.app = app
        beside = f"{self.path.name}-workers"
        self._main = Database(self.path, schema.LEASES, synchronous="FULL", thread_name="anabranch-leases")
        self._workers = Database(
            self.path.with_name(beside), schema.MEMBERS, synchronous="NORMAL", thread_name="anabranch-workers"
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
        # Reading comes first: it needs no lock, so a worker can join beside one that was stopped inside a write.
        standing = await self.read_app()
        if standing is not None:
            return standing
        made = columns.app_columns(replace(app, incarnation=await self.incarnation()))
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
                _APPS.put(connection, columns.app_columns(row))
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
            return _MEMBERS.put_if_absent(connection, columns.member_columns(self.app, row))

        return await self._workers.write(work)

    async def heartbeat(self, beat: Beat) -> MemberRow | None:
        return await self._change_member(beat.member_id, lambda row: rows.heartbeat(row, beat))

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
        def is_named(connection: sqlite3.Connection) -> bool:
            found = connection.execute(
                "SELECT 1 FROM anabranch_leases WHERE application = ? AND owner = ? LIMIT 1", (self.app, member_id)
            )
            return found.fetchone() is not None

        named = await self._main.read(is_named)

        def work(connection: sqlite3.Connection) -> bool:
            key = (self.app, member_id)
            if not rows.may_delete_member(_MEMBERS.get(connection, key), is_named_by_a_lease=named):
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
                _MEMBERS.put(connection, columns.member_columns(self.app, row))
            return row

        return await self._workers.write(work)

    # streams
    async def put_stream(self, row: StreamRow, *, app_id: str) -> StreamRow | None:
        def work(connection: sqlite3.Connection) -> StreamRow | None:
            if not self._may_begin(connection, app_id):
                return None
            return _STREAMS.put_if_absent(connection, columns.stream_columns(self.app, row))

        return await self._main.write(work)

    async def write_stream(self, row: StreamRow, expected_version: int, *, app_id: str) -> StreamRow | None:
        def work(connection: sqlite3.Connection) -> StreamRow | None:
            if not self._may_begin(connection, app_id):
                return None
            written = rows.write_stream(_STREAMS.get(connection, (self.app, row.stream_key)), row, expected_version)
            if written is not None:
                _STREAMS.put(connection, columns.stream_columns(self.app, written))
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
            return _LEASES.put_if_absent(connection, columns.lease_columns(self.app, row))

        return await self._main.write(work)

    async def read_leases(self, *, with_finished: bool = False) -> Sequence[LeaseRow]:
        where = "" if with_finished else " AND completed = 0"
        return await self._main.read(lambda connection: _LEASES.scan(connection, self.app, where))

    async def read_lease(self, key: LeaseKey) -> LeaseRow | None:
        return await self._main.read(lambda connection: _LEASES.get(connection, self._lease(key)))

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        owner = None
        if expected_owner is not None:
            owner = await self._workers.read(lambda connection: _MEMBERS.get(connection, (self.app, expected_owner)))

        def work(connection: sqlite3.Connection) -> LeaseRow | Conflict:
            outcome = rows.take_lease(
                _LEASES.get(connection, self._lease(key)),
                owner,
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
            _LEASES.put(connection, columns.lease_columns(self.app, outcome))
        return outcome

    def _lease(self, key: LeaseKey) -> tuple[str, str, int, str]:
        return (self.app, key.stream_key, key.generation, key.shard_id)

    # commands
    async def put_control(self, row: ControlRow) -> None:
        def work(connection: sqlite3.Connection) -> None:
            _CONTROLS.put_if_absent(connection, columns.control_columns(self.app, row))

        await self._main.write(work)

    async def write_control(self, row: ControlRow) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            written = rows.write_control(_CONTROLS.get(connection, (self.app, row.command_id)), row)
            if written is not None:
                _CONTROLS.put(connection, columns.control_columns(self.app, written))
            return written is not None

        return await self._main.write(work)

    async def read_controls(self) -> Sequence[ControlRow]:
        found = await self._main.read(lambda connection: _CONTROLS.scan(connection, self.app))
        return sorted(found, key=lambda row: (row.requested_wall_ms, row.command_id))
