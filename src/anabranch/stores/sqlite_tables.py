"""The SQLite tables, and the migration of earlier ones.

Leases, streams and commands are in the file that the user names, members and their statuses in `<path>-workers`: a long
write transaction on the first file cannot delay a heartbeat (rule L16). Table names have a prefix because the first
file may be the user's own database. A column holds one field of a row (`row_codec`).
"""

import sqlite3
import uuid
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from anabranch._model.leases import AppRow
from anabranch.errors import LeaseStoreInvalidError
from anabranch.stores.row_codec import CODECS, Columns, Fields
from anabranch.stores.row_store import Kind

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
        place TEXT NOT NULL,
        other_store TEXT NOT NULL,
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
        consumer_name TEXT,
        consumer_arn TEXT,
        consumer_state TEXT,
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
        counter INTEGER NOT NULL,
        state TEXT NOT NULL,
        expiry_ms INTEGER NOT NULL,
        protocol TEXT NOT NULL,
        order_mode TEXT NOT NULL,
        streams TEXT NOT NULL,
        shards_max INTEGER,
        load INTEGER NOT NULL,
        change_count INTEGER NOT NULL,
        changed TEXT NOT NULL,
        reads_healthy INTEGER NOT NULL,
        draining INTEGER NOT NULL,
        wanted TEXT NOT NULL,
        joined_wall_ms INTEGER NOT NULL,
        extra TEXT NOT NULL,
        PRIMARY KEY (application, app_id, member)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS anabranch_statuses (
        application TEXT NOT NULL,
        app_id TEXT NOT NULL,
        member TEXT NOT NULL,
        revision INTEGER NOT NULL,
        shard_count INTEGER NOT NULL,
        stalled_count INTEGER NOT NULL,
        millis_behind_latest INTEGER,
        records_per_second REAL NOT NULL,
        shards TEXT NOT NULL,
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


class UnreadableRowError(Exception):
    """A row that this version did not write, or that was edited by hand."""


class Table:
    """The rows of one kind. Its first `key_width` columns are the key."""

    def __init__(self, kind: Kind, name: str, key_width: int, *, unfinished: str = "") -> None:
        self.name = name
        self._key_width = key_width
        column_names, self._flatten, self._decode = CODECS[kind]
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

    def get(self, connection: sqlite3.Connection, key: Columns) -> Any:
        found = connection.execute(self._get, key).fetchone()
        return None if found is None else self._row(found)

    def scan(self, connection: sqlite3.Connection, scope: Columns, *, with_finished: bool = True) -> list[Any]:
        """The rows of a scope (application, and `app_id`), sorted by key."""
        query = self._scan_all if with_finished else self._scan_unfinished
        return [self._row(found) for found in connection.execute(query, scope)]

    def put(self, connection: sqlite3.Connection, app: str, app_id: str, row: Any) -> None:
        connection.execute(self._put, self._flatten(app, app_id, row))

    def delete(self, connection: sqlite3.Connection, key: Columns) -> None:
        connection.execute(self._delete, key)

    def _row(self, found: Columns) -> Any:
        try:
            return self._decode(found)
        except (TypeError, ValueError) as error:
            key = ", ".join(map(str, found[: self._key_width]))
            raise UnreadableRowError(f"the row ({key}) of {self.name} cannot be read: {error}") from error


TABLES: Final[dict[Kind, Table]] = {
    "app": Table("app", "anabranch_applications", 1),
    "stream": Table("stream", "anabranch_streams", 3),
    "lease": Table("lease", "anabranch_leases", 5, unfinished=" AND completed = 0"),
    "command": Table("command", "anabranch_commands", 3, unfinished=" AND state = 'pending'"),
    "member": Table("member", "anabranch_members", 3),
    "status": Table("status", "anabranch_statuses", 3),
}

_MIGRATED: Final[dict[str, tuple[tuple[str, ...], Fields]]] = {
    "anabranch_applications": (CODECS["app"].columns, {"watch": 0, "place": "here", "other_store": "", "extra": "{}"}),
    "anabranch_streams": (
        CODECS["stream"].columns,
        {"consumer_name": None, "consumer_arn": None, "consumer_state": None, "extra": "{}"},
    ),
    "anabranch_leases": (CODECS["lease"].columns, {"extra": "{}"}),
    "anabranch_commands": (CODECS["command"].columns, {"extra": "{}"}),
    "anabranch_members": (
        CODECS["member"].columns,
        {"order_mode": "shard", "streams": "", "change_count": 0, "changed": "", "wanted": "", "extra": "{}"},
    ),
}
"""The tables of version 1: their columns now, and the values of those that are new."""
