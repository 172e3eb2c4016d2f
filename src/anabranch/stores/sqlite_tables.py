"""The SQLite tables, and how rows become columns and back.

Leases, streams and commands are in the file that the user names, members in `<path>-workers`: a long write transaction
on the first file cannot delay a heartbeat (rule L16). Table names have a prefix because the first file may be the
user's own database. Columns are made to be read in SQL: `owner` is a member, `count` grows with every write,
`checkpoint` is the position up to which all records are handled. The few lists are JSON.
"""

import sqlite3
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from anabranch._model.hash_keys import HashKeyRange, parse_hash_key
from anabranch._model.leases import (
    AppRow,
    ControlRow,
    HandOffRequest,
    LeaseRow,
    MemberRow,
    ShardStatus,
    StreamRow,
)
from anabranch._model.streams import Position, StartingPosition, at_timestamp
from anabranch.errors import LeaseStoreInvalidError

VERSION: Final = 2

_META = "CREATE TABLE IF NOT EXISTS anabranch_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"

LEASES: Final = (
    _META,
    """
    CREATE TABLE IF NOT EXISTS anabranch_applications (
        application TEXT PRIMARY KEY,
        app_id TEXT NOT NULL,
        created_wall_ms INTEGER NOT NULL,
        incarnation TEXT NOT NULL,
        watch INTEGER NOT NULL,
        extra TEXT NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS anabranch_streams (
        application TEXT NOT NULL,
        app_id TEXT NOT NULL,
        stream TEXT NOT NULL,
        name TEXT NOT NULL,
        arn TEXT NOT NULL,
        created_seconds REAL NOT NULL,
        origin TEXT NOT NULL,
        generation INTEGER NOT NULL,
        bootstrapped INTEGER NOT NULL,
        count INTEGER NOT NULL,
        extra TEXT NOT NULL,
        PRIMARY KEY (application, app_id, stream)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS anabranch_leases (
        application TEXT NOT NULL,
        app_id TEXT NOT NULL,
        stream TEXT NOT NULL,
        generation INTEGER NOT NULL,
        shard TEXT NOT NULL,
        owner TEXT,
        count INTEGER NOT NULL,
        checkpoint TEXT,
        completed INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        starts_at TEXT NOT NULL,
        waits_for TEXT NOT NULL,
        hash_key_range TEXT,
        frontier TEXT,
        open_keys TEXT NOT NULL,
        seek_epoch INTEGER NOT NULL,
        order_mode TEXT NOT NULL,
        seen_through_seconds REAL,
        finish_reason TEXT,
        children TEXT NOT NULL,
        stopped_reason TEXT,
        stopped_position TEXT,
        stopped_partition_key TEXT,
        stopped_member TEXT,
        stopped_wall_ms INTEGER,
        paused INTEGER NOT NULL,
        takes_without_progress INTEGER NOT NULL,
        records_handled INTEGER NOT NULL,
        checkpointed_wall_ms INTEGER,
        extra TEXT NOT NULL,
        PRIMARY KEY (application, app_id, stream, generation, shard)
    ) WITHOUT ROWID
    """,
    # Each round reads unfinished rows only. Finished ones stay for the stream's retention (rule S6).
    """
    CREATE INDEX IF NOT EXISTS anabranch_leases_unfinished
    ON anabranch_leases (application, app_id, stream, generation, shard) WHERE completed = 0
    """,
    """
    CREATE TABLE IF NOT EXISTS anabranch_commands (
        application TEXT NOT NULL,
        app_id TEXT NOT NULL,
        command TEXT NOT NULL,
        action TEXT NOT NULL,
        stream TEXT,
        generation INTEGER,
        shard TEXT,
        arguments TEXT NOT NULL,
        requested_by TEXT NOT NULL,
        requested_wall_ms INTEGER NOT NULL,
        state TEXT NOT NULL,
        result TEXT NOT NULL,
        extra TEXT NOT NULL,
        PRIMARY KEY (application, app_id, command)
    ) WITHOUT ROWID
    """,
)

MEMBERS: Final = (
    _META,
    """
    CREATE TABLE IF NOT EXISTS anabranch_members (
        application TEXT NOT NULL,
        app_id TEXT NOT NULL,
        member TEXT NOT NULL,
        worker TEXT NOT NULL,
        counter INTEGER NOT NULL,
        state TEXT NOT NULL,
        expiry_ms INTEGER NOT NULL,
        protocol TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        shards_max INTEGER,
        load INTEGER NOT NULL,
        lease_version INTEGER NOT NULL,
        reads_healthy INTEGER NOT NULL,
        draining INTEGER NOT NULL,
        wanted TEXT NOT NULL,
        status TEXT NOT NULL,
        streams TEXT NOT NULL,
        joined_wall_ms INTEGER NOT NULL,
        extra TEXT NOT NULL,
        PRIMARY KEY (application, app_id, member)
    ) WITHOUT ROWID
    """,
)


def create_tables(connection: sqlite3.Connection, statements: tuple[str, ...]) -> None:
    """Call inside a write transaction, so that processes that start together create them once."""
    for statement in statements:
        connection.execute(statement)
    connection.execute(
        "INSERT OR IGNORE INTO anabranch_meta VALUES ('schema_version', ?), ('uuid', ?)",
        (str(VERSION), uuid.uuid4().hex),
    )


def check_version(connection: sqlite3.Connection, path: str) -> int | None:
    """The version of our tables; None if they do not exist yet. Refuses tables of a newer version."""
    table = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'anabranch_meta'")
    if table.fetchone() is None:
        return None
    found = connection.execute("SELECT value FROM anabranch_meta WHERE name = 'schema_version'").fetchone()
    if found is None or not str(found[0]).isdigit() or int(found[0]) < 1:
        raise LeaseStoreInvalidError(
            f"{path}: its table anabranch_meta has no valid schema_version (found {found and found[0]!r}, "
            f"expected {VERSION}): restore the file from a backup, or name another one"
        )
    if int(found[0]) > VERSION:
        raise LeaseStoreInvalidError(
            f"{path} was written by a newer anabranch (schema {found[0]}; this one reads up to {VERSION}): "
            "upgrade this worker, or name another file"
        )
    return int(found[0])


def read_app_ids(connection: sqlite3.Connection) -> dict[str, str]:
    """By application. Works for every version."""
    return dict(connection.execute("SELECT application, app_id FROM anabranch_applications"))


def old_app_row(connection: sqlite3.Connection, app: str) -> AppRow | None:
    """From tables of version 1."""
    columns = ("app", "app_id", "created_wall_ms", "incarnation")
    found = connection.execute(
        "SELECT application, app_id, created_wall_ms, incarnation FROM anabranch_applications WHERE application = ?",
        (app,),
    ).fetchone()
    return None if found is None else msgspec.convert(dict(zip(columns, found, strict=True)), AppRow)


def migrate(connection: sqlite3.Connection, statements: tuple[str, ...], app_ids: Mapping[str, str]) -> None:
    """Brings tables of version 1 to the present version. Call inside a write transaction.

    Version 1 stored rows under the application's name alone; `app_ids` says under which id they belong.
    """
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'anabranch_%'")
    names = [str(name) for (name,) in found if name in _MIGRATED]
    connection.execute("DROP INDEX IF EXISTS anabranch_leases_unfinished")
    for name in names:
        connection.execute(f"ALTER TABLE {name} RENAME TO {name}_1")
    create_tables(connection, statements)
    for name in names:
        columns, added = _MIGRATED[name]
        old = [column for column in columns if column not in added and column != "app_id"]
        rows = connection.execute(f"SELECT {', '.join(old)} FROM {name}_1").fetchall()  # noqa: S608 -- constants
        for values in rows:
            row = dict(zip(old, values, strict=True)) | added
            row.setdefault("app_id", app_ids.get(row["application"]))
            if row["app_id"] is not None:
                names_of, marks = ", ".join(row), ", ".join("?" * len(row))
                insert = f"INSERT INTO {name} ({names_of}) VALUES ({marks})"  # noqa: S608 -- constants
                connection.execute(insert, tuple(row.values()))
        connection.execute(f"DROP TABLE {name}_1")
    connection.execute("UPDATE anabranch_meta SET value = ? WHERE name = 'schema_version'", (str(VERSION),))


def read_uuid(connection: sqlite3.Connection) -> str:
    found = connection.execute("SELECT value FROM anabranch_meta WHERE name = 'uuid'").fetchone()
    return "" if found is None else str(found[0])


Row = TypeVar("Row")
Columns = tuple[Any, ...]


class UnreadableRowError(Exception):
    """A row that this version did not write, or that was edited by hand."""


class Table(Generic[Row]):
    def __init__(
        self,
        name: str,
        column_names: tuple[str, ...],
        key_width: int,
        decode: Callable[[Columns], Row],
        *,
        unfinished: str = "",
    ) -> None:
        self.name = name
        self._key_width = key_width
        self._decode = decode
        key = column_names[:key_width]
        names = ", ".join(column_names)
        marks = ", ".join("?" * len(column_names))
        where = " AND ".join(f"{column} = ?" for column in key)
        scope = " AND ".join(f"{column} = ?" for column in key[:2])
        order = f" ORDER BY {', '.join(key)}"
        # All names are constants of this module; values are always bound.
        self._get = f"SELECT {names} FROM {name} WHERE {where}"  # noqa: S608 -- see above
        self._scan_all = f"SELECT {names} FROM {name} WHERE {scope}{order}"  # noqa: S608 -- see above
        self._scan_unfinished = f"SELECT {names} FROM {name} WHERE {scope}{unfinished}{order}"  # noqa: S608 -- see above
        self._put = f"INSERT OR REPLACE INTO {name} ({names}) VALUES ({marks})"  # noqa: S608 -- see above
        self._delete = f"DELETE FROM {name} WHERE {where}"  # noqa: S608 -- see above

    def get(self, connection: sqlite3.Connection, key: Columns) -> Row | None:
        found = connection.execute(self._get, key).fetchone()
        return None if found is None else self._row(found)

    def scan(self, connection: sqlite3.Connection, scope: Columns, *, with_finished: bool = True) -> list[Row]:
        """The rows of a scope (application, and `app_id`), sorted by key."""
        query = self._scan_all if with_finished else self._scan_unfinished
        return [self._row(found) for found in connection.execute(query, scope)]

    def put(self, connection: sqlite3.Connection, values: Columns) -> None:
        connection.execute(self._put, values)

    def delete(self, connection: sqlite3.Connection, key: Columns) -> None:
        connection.execute(self._delete, key)

    def _row(self, found: Columns) -> Row:
        try:
            return self._decode(found)
        except (TypeError, ValueError) as error:
            key = ", ".join(map(str, found[: self._key_width]))
            raise UnreadableRowError(f"the row ({key}) of {self.name} cannot be read: {error}") from error


Fields = dict[str, Any]

APP_COLUMNS: Final = ("application", "app_id", "created_wall_ms", "incarnation", "watch", "extra")
STREAM_COLUMNS: Final = (
    "application", "app_id", "stream", "name", "arn", "created_seconds", "origin", "generation", "bootstrapped",
    "count", "extra",
)  # fmt: skip
LEASE_COLUMNS: Final = (
    "application", "app_id", "stream", "generation", "shard", "owner", "count", "checkpoint", "completed", "epoch",
    "starts_at", "waits_for", "hash_key_range", "frontier", "open_keys", "seek_epoch", "order_mode",
    "seen_through_seconds", "finish_reason", "children", "stopped_reason", "stopped_position", "stopped_partition_key",
    "stopped_member",
    "stopped_wall_ms", "paused", "takes_without_progress", "records_handled", "checkpointed_wall_ms",
    "extra",
)  # fmt: skip
MEMBER_COLUMNS: Final = (
    "application", "app_id", "member", "worker", "counter", "state", "expiry_ms", "protocol", "fingerprint",
    "shards_max", "load", "lease_version", "reads_healthy", "draining", "wanted", "status", "streams",
    "joined_wall_ms", "extra",
)  # fmt: skip
CONTROL_COLUMNS: Final = (
    "application", "app_id", "command", "action", "stream", "generation", "shard", "arguments", "requested_by",
    "requested_wall_ms", "state", "result", "extra",
)  # fmt: skip

_STRINGS = msgspec.json.Decoder(tuple[str, ...])
_OPEN_KEYS = msgspec.json.Decoder(tuple[tuple[str, str, int, str], ...])
_WANTED = msgspec.json.Decoder(tuple[HandOffRequest, ...])
_STATUS = msgspec.json.Decoder(tuple[ShardStatus, ...])
_ARGUMENTS = msgspec.json.Decoder(dict[str, str])
_EXTRA = msgspec.json.Decoder(dict[str, Any])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# applications
def app_columns(row: AppRow) -> Columns:
    return (row.app, row.app_id, row.created_wall_ms, row.incarnation, row.watch, _json(row.extra))


def app_row(columns: Columns) -> AppRow:
    column = dict(zip(APP_COLUMNS, columns, strict=True))
    return msgspec.convert(column | {"app": column["application"], "extra": _EXTRA.decode(column["extra"])}, AppRow)


# streams
def stream_columns(app: str, app_id: str, row: StreamRow) -> Columns:
    return (
        app, app_id, row.stream_key, row.name, row.arn, row.created_seconds, _start_text(row.origin), row.generation,
        int(row.bootstrapped), row.version, _json(row.extra),
    )  # fmt: skip


def stream_row(columns: Columns) -> StreamRow:
    column = dict(zip(STREAM_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "stream_key": column["stream"],
            "origin": _start(column["origin"]),
            "bootstrapped": bool(column["bootstrapped"]),
            "version": column["count"],
            "extra": _EXTRA.decode(column["extra"]),
        },
        StreamRow,
    )


# leases
def lease_columns(app: str, app_id: str, row: LeaseRow) -> Columns:
    checkpoint, finish, stopped = row.checkpoint, row.finish, row.stopped
    return (
        app, app_id, row.key.stream_key, row.key.generation, row.key.shard_id, row.owner, row.version,
        _position_text(checkpoint.watermark), int(row.is_finished), row.epoch, _start_text(row.start),
        _json(row.waits_for), _range_text(row.hash_key_range), _position_text(checkpoint.frontier),
        _json([(key.digest.hex(), str(key.first_open), key.attempts, key.state) for key in checkpoint.open_keys]),
        checkpoint.seek_epoch, checkpoint.order, checkpoint.seen_through_seconds,
        finish and finish.reason, _json(finish.children if finish else ()),
        stopped and stopped.reason, stopped and _position_text(stopped.position), stopped and stopped.partition_key,
        stopped and stopped.member_id, stopped and stopped.at_wall_ms,
        int(row.paused), row.takes_without_progress, row.records_handled, row.checkpointed_at_wall_ms,
        _json(row.extra),
    )  # fmt: skip


def lease_row(columns: Columns) -> LeaseRow:
    column = dict(zip(LEASE_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "key": _key(column),
            "start": _start(column["starts_at"]),
            "waits_for": _STRINGS.decode(column["waits_for"]),
            "hash_key_range": _range(column["hash_key_range"]),
            "version": column["count"],
            "checkpoint": {
                "watermark": _position(column["checkpoint"]),
                "frontier": _position(column["frontier"]),
                "open_keys": _open_keys(column["open_keys"]),
                "seek_epoch": column["seek_epoch"],
                "order": column["order_mode"],
                "seen_through_seconds": column["seen_through_seconds"],
            },
            "finish": _finish(column),
            "stopped": _stopped(column),
            "paused": bool(column["paused"]),
            "checkpointed_at_wall_ms": column["checkpointed_wall_ms"],
            "extra": _EXTRA.decode(column["extra"]),
        },
        LeaseRow,
    )


def _key(column: Fields) -> Fields:
    return {"stream_key": column["stream"], "generation": column["generation"], "shard_id": column["shard"]}


def _finish(column: Fields) -> Fields | None:
    if not column["completed"]:
        return None
    return {"reason": column["finish_reason"], "children": _STRINGS.decode(column["children"])}


def _stopped(column: Fields) -> Fields | None:
    if column["stopped_reason"] is None:
        return None
    return {
        "reason": column["stopped_reason"],
        "position": _position(column["stopped_position"]),
        "partition_key": column["stopped_partition_key"],
        "member_id": column["stopped_member"],
        "at_wall_ms": column["stopped_wall_ms"],
    }


def _open_keys(text: str) -> list[Fields]:
    return [
        {
            "digest": bytes.fromhex(digest),
            "first_open": Position.parse(first_open),
            "attempts": attempts,
            "state": state,
        }
        for digest, first_open, attempts, state in _OPEN_KEYS.decode(text)
    ]


# members
def member_columns(app: str, app_id: str, row: MemberRow) -> Columns:
    return (
        app, app_id, row.member_id, row.worker_id, row.counter, row.state, row.expiry_ms, row.protocol, row.fingerprint,
        row.shards_max, row.load, row.lease_version, int(row.reads_healthy), int(row.draining),
        _json(row.wanted), _json(row.status), _json(row.streams), row.joined_wall_ms, _json(row.extra),
    )  # fmt: skip


def member_row(columns: Columns) -> MemberRow:
    column = dict(zip(MEMBER_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "member_id": column["member"],
            "worker_id": column["worker"],
            "reads_healthy": bool(column["reads_healthy"]),
            "draining": bool(column["draining"]),
            "wanted": _WANTED.decode(column["wanted"]),
            "status": _STATUS.decode(column["status"]),
            "streams": _STRINGS.decode(column["streams"]),
            "extra": _EXTRA.decode(column["extra"]),
        },
        MemberRow,
    )


# commands
def control_columns(app: str, app_id: str, row: ControlRow) -> Columns:
    key = row.key
    return (
        app, app_id, row.command_id, row.action, key and key.stream_key, key and key.generation, key and key.shard_id,
        _json(row.arguments), row.requested_by, row.requested_wall_ms, row.state, row.result, _json(row.extra),
    )  # fmt: skip


def control_row(columns: Columns) -> ControlRow:
    column = dict(zip(CONTROL_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "command_id": column["command"],
            "key": None if column["stream"] is None else _key(column),
            "arguments": _ARGUMENTS.decode(column["arguments"]),
            "extra": _EXTRA.decode(column["extra"]),
        },
        ControlRow,
    )


# values
def _position_text(position: Position | None) -> str | None:
    return None if position is None else str(position)


def _position(text: str | None) -> Position | None:
    return None if text is None else Position.parse(text)


def _range_text(hash_key_range: HashKeyRange | None) -> str | None:
    return None if hash_key_range is None else f"{hash_key_range.start}-{hash_key_range.end}"


def _range(text: str | None) -> HashKeyRange | None:
    if text is None:
        return None
    start, _, end = text.partition("-")
    return HashKeyRange(parse_hash_key(start), parse_hash_key(end))


def _start_text(start: StartingPosition) -> str:
    """`TRIM_HORIZON`, `AT_TIMESTAMP 1700000000.5`, `AFTER_SEQUENCE_NUMBER 49590…`."""
    if start.timestamp_seconds is not None:
        return f"{start.type} {start.timestamp_seconds!r}"
    return start.type if start.sequence_number is None else f"{start.type} {start.sequence_number}"


def _start(text: str) -> StartingPosition:
    kind, _, argument = text.partition(" ")
    if kind == "AT_TIMESTAMP":
        return at_timestamp(float(argument))
    return msgspec.convert({"type": kind, "sequence_number": argument or None}, StartingPosition)


_MIGRATED: Final[dict[str, tuple[tuple[str, ...], Fields]]] = {
    "anabranch_applications": (APP_COLUMNS, {"watch": 0, "extra": "{}"}),
    "anabranch_streams": (STREAM_COLUMNS, {"extra": "{}"}),
    "anabranch_leases": (LEASE_COLUMNS, {"extra": "{}"}),
    "anabranch_commands": (CONTROL_COLUMNS, {"extra": "{}"}),
    "anabranch_members": (MEMBER_COLUMNS, {"streams": "[]", "extra": "{}"}),
}
"""The tables of version 1: their columns now, and the values of those that are new."""
