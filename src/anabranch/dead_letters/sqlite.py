"""Dead letters in a SQLite file: the default destination, shared by the processes of one machine.

A letter is on disk when `write` returns. Every call runs on the file's own thread, so no event loop blocks.
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from anabranch._daemon_threads import DaemonThreads
from anabranch.dead_letters.destinations import HOLD_SECONDS, LetterBox, StoredLetter
from anabranch.errors import CodecError, DeadLetterError, LeaseStoreInvalidError, UsageError
from anabranch.letters import Letter, decode_letter, encode_letter, stream_order, valid_text
from anabranch.stores.sqlite import (
    LOCKED,
    check_place,
    file_system,
    open_file,
    primary_code,
    sqlite_url,
    use_write_ahead_log,
)

T = TypeVar("T")

_APPLICATION_ID: Final = 0x414C_4554  # "ALET": tells our file from any other
_VERSION: Final = 1
_BUSY_SECONDS: Final = 5.0
"""How long a statement waits while another process writes."""
PAGE_ROWS: Final = 50
"""How many letters one query reads."""

_TABLES: Final = (
    """
    CREATE TABLE letters (
        idempotency_key TEXT PRIMARY KEY, stream_order TEXT NOT NULL, app TEXT NOT NULL, stream TEXT NOT NULL,
        partition_key TEXT, fingerprint TEXT NOT NULL, error_type TEXT NOT NULL, written_seconds REAL NOT NULL,
        redrive_count INTEGER NOT NULL, body TEXT NOT NULL
    )
    """,
    "CREATE UNIQUE INDEX letters_in_order ON letters (stream_order, idempotency_key)",
    # At most one row: `one` is always 1.
    "CREATE TABLE hold (one INTEGER PRIMARY KEY CHECK (one = 1), owner TEXT NOT NULL, expires_seconds REAL NOT NULL)",
)
# A letter that is written again does not replace the stored one, which has the message and the stack of the failure (a
# letter recovered after a crash has neither). One that was redriven more often does.
_WRITE: Final = """
    INSERT INTO letters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (idempotency_key) DO UPDATE SET
    redrive_count = excluded.redrive_count, body = excluded.body WHERE excluded.redrive_count > redrive_count
"""
_HOLD: Final = """
    INSERT INTO hold VALUES (1, ?, ?) ON CONFLICT (one) DO UPDATE SET owner = excluded.owner,
    expires_seconds = excluded.expires_seconds WHERE owner = excluded.owner OR expires_seconds < ?
"""
"""Takes or renews the hold, unless another owner has one that has not expired. The last parameter is the time now."""


class SqliteLetters(LetterBox):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = DaemonThreads(1, "anabranch-letters")
        self._connection: sqlite3.Connection | None = None
        self._owner: str | None = None
        self.unreadable: list[str] = []
        self._is_closed = False

    def __str__(self) -> str:
        return sqlite_url(self.path)

    async def check(self, retention_hours: int) -> list[str]:  # noqa: ARG002 -- a file keeps letters forever
        try:
            warning = check_place(self.path, file_system(self.path.parent))
        except LeaseStoreInvalidError as error:
            raise DeadLetterError(str(error), code="unusable") from None
        await self._execute("SELECT count(*) FROM hold", create=True)  # creates the file, or checks the one that exists
        return [] if warning is None else [warning]

    async def write(self, letter: Letter) -> None:
        # SQLite refuses text with a lone surrogate. The body has the original key.
        partition_key = None if letter.partition_key is None else valid_text(letter.partition_key)
        await self._execute(
            _WRITE, letter.idempotency_key, stream_order(letter), letter.app, letter.stream, partition_key,
            letter.fingerprint, letter.error_type, letter.written_seconds, letter.redrive_count,
            encode_letter(letter).decode(), create=True,
        )  # fmt: skip

    async def count(self) -> int:
        ((number,),) = await self._execute("SELECT count(*) FROM letters")
        return int(number)

    async def hold(self, owner: str) -> None:
        now = time.time()
        parameters = (owner, now + HOLD_SECONDS, now)

        def take(connection: sqlite3.Connection) -> tuple[str, float]:
            connection.execute(_HOLD, parameters)
            row: tuple[str, float] = connection.execute("SELECT owner, expires_seconds FROM hold").fetchone()
            return row

        holder, expires_seconds = await self._run(take)
        if holder != owner:
            raise DeadLetterError(
                f"{self} is being redriven by {holder}",
                code="locked",
                advice=f"wait until it has ended; if it was killed, for {expires_seconds - now:.0f} s",
            )
        self._owner = owner

    async def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            await self._execute("DELETE FROM hold WHERE owner = ?", owner)

    async def read(self) -> AsyncGenerator[StoredLetter, None]:
        self.unreadable.clear()
        after = ("", "")
        query = """
            SELECT stream_order, idempotency_key, body FROM letters WHERE (stream_order, idempotency_key) > (?, ?)
            ORDER BY stream_order, idempotency_key LIMIT ?
        """
        while rows := await self._execute(query, *after, PAGE_ROWS):
            for order, idempotency_key, body in rows:
                after = (order, idempotency_key)
                try:
                    yield StoredLetter(decode_letter(body), idempotency_key)
                except CodecError as error:
                    self.unreadable.append(f"row {idempotency_key}: {error}")

    async def begin(self, stored: StoredLetter, letter: Letter) -> StoredLetter:
        await self.replace(stored, letter)
        return StoredLetter(letter, stored.handle)

    async def replace(self, stored: StoredLetter, letter: Letter) -> None:
        query = "UPDATE letters SET redrive_count = ?, body = ? WHERE idempotency_key = ?"
        await self._execute(query, letter.redrive_count, encode_letter(letter).decode(), stored.handle)

    async def delete(self, stored: StoredLetter) -> None:
        await self._execute("DELETE FROM letters WHERE idempotency_key = ?", stored.handle)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.wrap_future(self._thread.submit(self._disconnect))
            self._thread.shutdown(wait=False)

    async def _execute(self, query: str, *parameters: object, create: bool = False) -> list[Any]:
        """Runs one statement in its own transaction; returns its rows."""
        return await self._run(lambda connection: connection.execute(query, parameters).fetchall(), create=create)

    async def _run(self, work: Callable[[sqlite3.Connection], T], *, create: bool = False) -> T:
        """Runs `work` on the thread, in a transaction. `create`: creates the file if there is none."""
        if self._is_closed:
            raise UsageError(f"{self} is closed")
        return await asyncio.wrap_future(self._thread.submit(self._transact, work, create=create))

    # On the thread

    def _transact(self, work: Callable[[sqlite3.Connection], T], *, create: bool) -> T:
        """Runs `work` in a transaction. Errors of SQLite become `DeadLetterError`."""
        try:
            connection = self._connect(create=create)
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
            return result
        except sqlite3.Error as error:
            code = primary_code(error)
            if code in LOCKED:
                raise DeadLetterError(f"{self} is locked by another process", code="no_answer") from error
            if code == sqlite3.SQLITE_FULL:
                raise DeadLetterError(f"{self}: the disk is full", code="no_answer", advice="free space") from error
            if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN}:
                raise DeadLetterError(f"{self} cannot be opened or written: {error}", code="access_denied") from error
            raise DeadLetterError(f"{self} cannot be used: {error}", code="unusable") from error

    def _connect(self, *, create: bool) -> sqlite3.Connection:
        if self._connection is not None and self.path.exists():
            return self._connection
        # If the file was removed, it may be created again: it had nothing but letters.
        self._disconnect()
        if not self.path.parent.is_dir():
            raise DeadLetterError(f"{self}: its folder does not exist", code="missing", advice="create it")
        if not create and not self.path.exists():
            raise DeadLetterError(f"there is no file {self.path}", code="missing", advice="check the path")
        connection = open_file(self.path, "rwc", _BUSY_SECONDS)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Creates the tables in an empty file. Raises if the file is not ours, or of another version."""
        use_write_ahead_log(connection, _BUSY_SECONDS)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (table_count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not table_count:
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        elif application_id != _APPLICATION_ID:
            raise DeadLetterError(
                f"{self.path} is not a file of dead letters", code="unusable", advice="name another file"
            )
        elif version != _VERSION:
            raise DeadLetterError(f"{self.path} was written by a newer version", code="unusable", advice="upgrade")
        connection.execute("COMMIT")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
