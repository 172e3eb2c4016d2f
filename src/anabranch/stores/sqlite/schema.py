"""The tables, and which versions of them this release reads.

Two files belong together: leases, streams and commands in the named one, members in `<path>-workers`, so that a
long write transaction on the first cannot hold up a heartbeat (rule L16). The tables carry our prefix because the
first file may be the user's own database. Column names are meant to be read in SQL: `owner` is a member, `count`
grows with every write, `checkpoint` is the position up to which everything is handled.
"""

import sqlite3
import uuid
from typing import Final

from anabranch.errors import LeaseStoreInvalidError

__all__ = ["LEASES", "MEMBERS", "VERSION", "check_version", "create_tables", "read_uuid"]

VERSION: Final = 1

_META = "CREATE TABLE IF NOT EXISTS anabranch_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"

LEASES: Final = (
    _META,
    """
    CREATE TABLE IF NOT EXISTS anabranch_applications (
        application TEXT PRIMARY KEY,
        app_id TEXT NOT NULL,
        created_wall_ms INTEGER NOT NULL,
        incarnation TEXT NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS anabranch_streams (
        application TEXT NOT NULL,
        stream TEXT NOT NULL,
        name TEXT NOT NULL,
        arn TEXT NOT NULL,
        created_seconds REAL NOT NULL,
        origin TEXT NOT NULL,
        generation INTEGER NOT NULL,
        bootstrapped INTEGER NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (application, stream)
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS anabranch_leases (
        application TEXT NOT NULL,
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
        PRIMARY KEY (application, stream, generation, shard)
    ) WITHOUT ROWID
    """,
    # Rounds read unfinished rows only, however many finished ones wait for the stream's retention (rule S6).
    """
    CREATE INDEX IF NOT EXISTS anabranch_leases_unfinished
    ON anabranch_leases (application, stream, generation, shard) WHERE completed = 0
    """,
    """
    CREATE TABLE IF NOT EXISTS anabranch_commands (
        application TEXT NOT NULL,
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
        PRIMARY KEY (application, command)
    ) WITHOUT ROWID
    """,
)

MEMBERS: Final = (
    _META,
    """
    CREATE TABLE IF NOT EXISTS anabranch_members (
        application TEXT NOT NULL,
        member TEXT NOT NULL,
        worker TEXT NOT NULL,
        counter INTEGER NOT NULL,
        state TEXT NOT NULL,
        expiry_ms INTEGER NOT NULL,
        protocol TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        generation INTEGER NOT NULL,
        shards_max INTEGER,
        load INTEGER NOT NULL,
        lease_version INTEGER NOT NULL,
        reads_healthy INTEGER NOT NULL,
        draining INTEGER NOT NULL,
        wanted TEXT NOT NULL,
        status TEXT NOT NULL,
        joined_wall_ms INTEGER NOT NULL,
        PRIMARY KEY (application, member)
    ) WITHOUT ROWID
    """,
)


def create_tables(connection: sqlite3.Connection, statements: tuple[str, ...]) -> None:
    """Inside a write transaction, so that processes that start together make them once."""
    for statement in statements:
        connection.execute(statement)
    connection.execute(
        "INSERT OR IGNORE INTO anabranch_meta VALUES ('schema_version', ?), ('uuid', ?)",
        (str(VERSION), uuid.uuid4().hex),
    )


def check_version(connection: sqlite3.Connection, path: str) -> bool:
    """False where our tables have not been made yet; refuses what a newer release wrote."""
    table = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'anabranch_meta'")
    if table.fetchone() is None:
        return False
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
    return True


def read_uuid(connection: sqlite3.Connection) -> str:
    found = connection.execute("SELECT value FROM anabranch_meta WHERE name = 'uuid'").fetchone()
    return "" if found is None else str(found[0])
