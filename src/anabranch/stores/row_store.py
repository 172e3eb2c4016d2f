"""A lease store over five primitives: for every storage that can change a row in a transaction or a script.

A subclass says how rows are read and written (`identity`, `get`, `scan`, `change`, `close`). Which row an operation
concerns, and on which condition it is written, is decided here and in `_core.leases.rows`, once for all stores.

The application's row is stored under the application's name. Every other row is stored under that name and the `app_id`
that this handle opened. So a write that was delayed lands under the old `app_id`, which nobody reads (rule R0).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

from msgspec.structs import replace

from anabranch._core.leases import rows
from anabranch._model.leases import (
    AppRow,
    Conflict,
    ControlRow,
    HeartbeatAnswer,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    LeaseRows,
    MemberRow,
    Place,
    Poll,
    StatusRow,
    StreamRow,
)
from anabranch._ports import LeaseStore
from anabranch.errors import UsageError

Kind = Literal["app", "command", "lease", "member", "status", "stream"]
Row = AppRow | ControlRow | LeaseRow | MemberRow | StatusRow | StreamRow
R = TypeVar("R", bound=Row)
T = TypeVar("T")


class RowKey(NamedTuple):
    """Where a row is stored."""

    kind: Kind
    app: str
    app_id: str
    """Empty for the application's own row."""
    name: tuple[str | int, ...] = ()
    """The id of a member, its status or a command; a stream key; of a lease: stream key, generation, shard id."""


class Scope(NamedTuple):
    """All rows of one kind of one application."""

    kind: Kind
    app: str
    app_id: str
    with_finished: bool = True
    """False: without finished leases, and without commands that are no longer pending."""

    def includes(self, row: Row) -> bool:
        if self.with_finished:
            return True
        if isinstance(row, LeaseRow):
            return not row.is_finished
        return not isinstance(row, ControlRow) or row.state == "pending"


class Found(NamedTuple):
    rows: Sequence[Row | None]
    evidence: str | None
    """The identity of the storage that sent this response; None if the server does not send it with each response."""


class Changed(NamedTuple):
    before: Sequence[Row | None]
    after: Sequence[Row | None]
    evidence: str | None


Update = Callable[[Sequence[Row | None]], Sequence[Row | None]]


class RowLeaseStore(LeaseStore, ABC):
    """Implement the five primitives. Each makes at most one attempt and raises `LeaseStoreError` if it fails."""

    def __init__(self, app: str) -> None:
        self.app = app
        self._app_id: str | None = None

    # the primitives

    @abstractmethod
    async def identity(self) -> str:
        """The identity of the storage. A different one means that acknowledged writes may be gone (rule L13)."""

    @abstractmethod
    async def get(self, keys: Sequence[RowKey]) -> Found:
        """The row of each key, None where there is none."""

    @abstractmethod
    async def scan(self, scopes: Sequence[Scope]) -> Found:
        """The rows of all scopes, in any order."""

    @abstractmethod
    async def change(self, keys: Sequence[RowKey], update: Update) -> Changed:
        """Reads the rows, calls `update` with them, and writes what it returns, in one atomic step. None deletes a row;
        the same object leaves it as it is. `update` is a pure function and may be called again.
        """

    @abstractmethod
    async def close(self) -> None: ...

    # the application

    async def open(self, app: AppRow) -> AppRow:
        self._check_name(app)
        row = await self.read_app()
        if row is None:
            made = replace(app, incarnation=await self.identity())
            row = await self._put_row(self._app_key, made)
        self._app_id = row.app_id
        return row

    def _check_name(self, app: AppRow) -> None:
        if app.app != self.app:
            raise UsageError(f"this lease store was made for application {self.app!r}, not for {app.app!r}")

    async def read_app(self) -> AppRow | None:
        return cast("AppRow | None", (await self.get([self._app_key])).rows[0])

    async def record_incarnation(self, expected: str, incarnation: str) -> AppRow | None:
        app_id = self._opened
        return await self._change_row(
            self._app_key, lambda row: rows.record_incarnation(row, app_id, expected, incarnation)
        )

    async def move_app(self, expected: Place, place: Place, other_store: str) -> AppRow | None:
        app_id = self._opened
        return await self._change_row(
            self._app_key, lambda row: rows.move_app(row, app_id, expected, place, other_store)
        )

    async def renew_watch(self) -> None:
        app_id = self._opened
        await self._change_row(self._app_key, lambda row: rows.renew_watch(row, app_id))

    async def delete_app(self, app_id: str) -> bool:
        # Once the application's row is gone, nothing else names its id. So the deletion is recorded first, as a command
        # under the application's name.
        record = ControlRow(command_id=app_id, action="delete")
        record_key = key_of(record, self.app, "")
        await self._put_row(record_key, record)
        is_deleted = await self._delete_row(self._app_key, lambda stored: rows.may_delete_app(stored, app_id))
        for kind in _DELETED:
            found = (await self.scan([Scope(kind, self.app, app_id)])).rows
            keys = [key_of(row, self.app, app_id) for row in found if row is not None]
            for first in range(0, len(keys), _DELETED_TOGETHER_MAX):
                is_deleted = True
                together = keys[first : first + _DELETED_TOGETHER_MAX]
                await self.change(together, lambda stored: [None] * len(stored))
        await self.change([record_key], lambda _: [None])
        return is_deleted

    async def leftovers(self) -> Sequence[str]:
        found = (await self.scan([Scope("command", self.app, "")])).rows
        app = await self.read_app()
        ids = [row.command_id for row in found if isinstance(row, ControlRow)]
        return sorted(app_id for app_id in ids if app is None or app_id != app.app_id)

    async def poll(self) -> Poll:
        app_id = self._opened
        # The application's row is read last: if its id has changed by then, the caller ignores the other rows.
        scopes = [
            Scope("member", self.app, app_id),
            Scope("command", self.app, app_id, with_finished=False),
            Scope("app", self.app, ""),
        ]
        found = await self.scan(scopes)
        app = next((row for row in found.rows if isinstance(row, AppRow)), None)
        commands = [row for row in found.rows if isinstance(row, ControlRow)]
        return Poll(
            app=app,
            members=tuple(sorted((row for row in found.rows if isinstance(row, MemberRow)), key=_name)),
            commands=tuple(sorted(commands, key=requested)),
            evidence=found.evidence,
        )

    # members

    async def register_member(self, row: MemberRow) -> MemberRow:
        return await self._put_row(self._key_of(row), row)

    async def heartbeat(self, write: HeartbeatWrite) -> HeartbeatAnswer:
        key = self._row_key("member", write.member_id)
        changed = await self.change([key], lambda stored: [rows.heartbeat(_member(stored), write)])
        before = _member(changed.before)
        return HeartbeatAnswer(_member(changed.after), None if before is None else before.counter, changed.evidence)

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        key = self._row_key("member", member_id)
        return await self._change_row(key, lambda row: rows.seal_member(row, observed_counter))

    async def leave(self, member_id: str) -> MemberRow | None:
        return await self._change_row(self._row_key("member", member_id), rows.leave)

    async def request_hand_off(self, donor: str, request: str) -> MemberRow | None:
        return await self._change_row(self._row_key("member", donor), lambda row: rows.request_hand_off(row, request))

    async def delete_member(self, member_id: str) -> bool:
        key = self._row_key("member", member_id)
        # An ended member stays so, and no condition over two rows is needed. Its status is deleted first: after a
        # failure, the caller still sees the member and tries again.
        if not rows.may_delete_member(_member((await self.get([key])).rows)):
            return False
        await self.change([self._row_key("status", member_id)], lambda _: [None])
        return await self._delete_row(key, rows.may_delete_member)

    async def write_status(self, row: StatusRow) -> None:
        await self._change_row(self._key_of(row), lambda stored: rows.write_status(stored, row))

    async def read_statuses(self) -> Sequence[StatusRow]:
        return await self._scan_rows(StatusRow)

    # streams

    async def put_stream(self, row: StreamRow) -> StreamRow:
        return await self._put_row(self._key_of(row), row)

    async def write_stream(self, row: StreamRow, expected_version: int) -> StreamRow | None:
        return await self._change_row(
            self._key_of(row), lambda stored: rows.write_stream(stored, row, expected_version)
        )

    async def read_streams(self) -> Sequence[StreamRow]:
        return await self._scan_rows(StreamRow)

    # leases

    async def create_lease(self, row: LeaseRow) -> LeaseRow:
        return await self._put_row(self._key_of(row), row)

    async def read_leases(self, *, with_finished: bool = False) -> LeaseRows:
        found = await self.scan([Scope("lease", self.app, self._opened, with_finished)])
        return LeaseRows(sorted((row for row in found.rows if isinstance(row, LeaseRow)), key=_name), found.evidence)

    async def read_lease(self, key: LeaseKey) -> LeaseRow | None:
        return cast("LeaseRow | None", (await self.get([self._lease_key(key)])).rows[0])

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        take = partial(
            rows.take_lease,
            member_id=member_id,
            expected_owner=expected_owner,
            expected_version=expected_version,
            epoch_floor=epoch_floor,
        )
        return await self._change_row(self._lease_key(key), take)

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        write = partial(rows.write_lease, row=row, member_id=member_id, expected_version=expected_version)
        return await self._change_row(self._key_of(row), write)

    async def delete_lease(self, key: LeaseKey, expected_version: int) -> bool:
        return await self._delete_row(self._lease_key(key), lambda row: rows.may_delete_lease(row, expected_version))

    # commands

    async def put_control(self, row: ControlRow) -> None:
        await self._put_row(self._key_of(row), row)

    async def write_control(self, row: ControlRow) -> bool:
        return await self._change_row(self._key_of(row), lambda stored: rows.write_control(stored, row)) is not None

    async def read_controls(self) -> Sequence[ControlRow]:
        return sorted(await self._scan_rows(ControlRow), key=requested)

    # keys

    @property
    def _opened(self) -> str:
        if self._app_id is None:
            raise UsageError(f"the lease store {self} is not open: call open() first")
        return self._app_id

    @property
    def _app_key(self) -> RowKey:
        return RowKey("app", self.app, "")

    def _row_key(self, kind: Kind, *name: str | int) -> RowKey:
        return RowKey(kind, self.app, self._opened, name)

    def _lease_key(self, key: LeaseKey) -> RowKey:
        return self._row_key("lease", key.stream_key, key.generation, key.shard_id)

    def _key_of(self, row: Row) -> RowKey:
        return key_of(row, self.app, self._opened)

    # operations on one row

    async def _change_row(self, key: RowKey, update: Callable[[Any], T]) -> T:
        """Returns what `update` returns. If that is a row, stores it; None and a `Conflict` change nothing."""

        def write(stored: Sequence[Row | None]) -> Sequence[Row | None]:
            outcome = update(stored[0])
            return [outcome] if isinstance(outcome, Row) else stored

        return update((await self.change([key], write)).before[0])

    async def _put_row(self, key: RowKey, row: R) -> R:
        """Put if absent; returns the stored row."""
        return await self._change_row(key, lambda stored: cast("R", stored or row))

    async def _delete_row(self, key: RowKey, may_delete: Callable[[Any], bool]) -> bool:
        changed = await self.change([key], lambda stored: [None] if may_delete(stored[0]) else stored)
        return may_delete(changed.before[0])

    async def _scan_rows(self, row_type: type[R]) -> list[R]:
        found = await self.scan([Scope(KINDS[row_type], self.app, self._opened)])
        return sorted((row for row in found.rows if isinstance(row, row_type)), key=_name)


_DELETED: tuple[Kind, ...] = ("member", "status", "stream", "lease", "command")
_DELETED_TOGETHER_MAX = 100
_WRITTEN_TOGETHER_MAX = 16


def _name(row: Row) -> tuple[str | int, ...]:
    match row:
        case MemberRow() | StatusRow():
            return (row.member_id,)
        case LeaseRow():
            return (row.key.stream_key, row.key.generation, row.key.shard_id)
        case StreamRow():
            return (row.stream_key,)
        case ControlRow():
            return (row.command_id,)
        case AppRow():
            return ()


def key_of(row: Row, app: str, app_id: str) -> RowKey:
    """Where a row is stored. `app_id` is empty for the application's own row."""
    return RowKey(KINDS[type(row)], app, app_id, _name(row))


KINDS: dict[type, Kind] = {
    AppRow: "app",
    ControlRow: "command",
    LeaseRow: "lease",
    MemberRow: "member",
    StatusRow: "status",
    StreamRow: "stream",
}


def _member(stored: Sequence[Row | None]) -> MemberRow | None:
    return cast("MemberRow | None", stored[0])


async def write_all(rows: Sequence[T], write: Callable[[T], Awaitable[object]]) -> None:
    """Performs a few writes at a time. Raises the first error, after all writes of its group have ended."""
    for first in range(0, len(rows), _WRITTEN_TOGETHER_MAX):
        writes = map(write, rows[first : first + _WRITTEN_TOGETHER_MAX])
        for outcome in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def requested(row: ControlRow) -> tuple[int, str]:
    return row.requested_wall_ms, row.command_id
