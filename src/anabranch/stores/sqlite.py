"""The lease store on SQLite: the embedded default, shared by the processes of one machine.

A change reads the rows under the file's write lock, computes the new rows and stores them. Lease commits reach the disk
before they are acknowledged (synchronous=FULL). Heartbeats are in a file of their own with synchronous=NORMAL: after a
power loss no member is left that could rely on them (rule L16).

Every call runs on its file's own thread, so no event loop blocks. If another process holds the lock for too long, the
call raises `LeaseStoreError`, and the caller retries. Nothing is retried here.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import re
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec.structs import replace

from anabranch._model.leases import AppRow, MemberRow, Poll
from anabranch.errors import LeaseError, LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.stores.row_codec import CODECS
from anabranch.stores.row_store import Changed, Found, Kind, Row, RowKey, RowLeaseStore, Scope, Update

_log = logging.getLogger(__name__)

# Where a file may be

NETWORK: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "smb3", "smbfs",
})  # fmt: skip
_MAY_IGNORE_LOCKS: Final = frozenset({"drvfs", "fuse", "fuseblk", "prl_fs", "vboxsf", "virtiofs"})
_EPHEMERAL: Final = frozenset({"overlay", "ramfs", "tmpfs"})
_SPECIAL: Final = re.compile("[%?#]")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")  # /proc/mounts escapes spaces in names


def file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system that holds `path`; None if unknown (no /proc/mounts)."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
    real = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # the later of two mounts hides the earlier one
            best, kind = point, fields[2]
    return kind


def sqlite_url(path: Path) -> str:
    """A URL that parses to this path. The file of an application may have a % in its name."""
    return f"sqlite://{_SPECIAL.sub(lambda match: quote(match[0]), str(path.absolute()))}"


def has_reliable_locks(kind: str | None) -> bool:
    return kind is not None and kind not in NETWORK and not _may_ignore_locks(kind)


def is_ephemeral(kind: str | None) -> bool:
    """Whether files there are lost with the container or at the next reboot."""
    return kind in _EPHEMERAL


def check_place(path: Path, kind: str | None) -> str | None:
    """Refuses network file systems (rule L16). Returns a warning for FUSE and the like, whose locks may not work."""
    if kind in NETWORK:
        raise LeaseStoreInvalidError(
            f"{path} is on a network file system ({kind}), where SQLite's locks and shared memory do not work: "
            "use a file on a local disk, or a lease store for several machines"
        )
    if kind is not None and _may_ignore_locks(kind):
        return (
            f"{path} is on {kind}: if several machines mount it, they do not see each other's locks and handle "
            "records twice; keep the lease file on a local disk"
        )
    return None


def _may_ignore_locks(kind: str) -> bool:
    return kind in _MAY_IGNORE_LOCKS or kind.startswith("fuse.")


# The tables
#
# Leases, streams and commands are in the file that the user names, members and their statuses in `<path>-workers`: a
# long write transaction on the first file cannot delay a heartbeat (rule L16). Table names have a prefix because the
# first file may be the user's own database. A column holds one field of a row (`row_codec`).

VERSION: Final = 2
_WITHOUT_APP_IDS: Final = 1
"""The version of the tables in which rows were stored under the application's name alone."""

_TYPES: Final = {int: "INTEGER", float: "REAL", str: "TEXT"}
_TYPES_OF_NULLABLE: Final = {
    "checkpointed_wall_ms": "INTEGER", "generation": "INTEGER", "millis_behind_latest": "INTEGER",
    "seen_through_seconds": "REAL", "shards_max": "INTEGER", "stopped_wall_ms": "INTEGER",
}  # fmt: skip
"""Of columns that may be NULL; the others are TEXT."""
_META: Final = "CREATE TABLE IF NOT EXISTS anabranch_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
# Each round reads unfinished rows only. Finished ones stay for the stream's retention (rule S6).
_UNFINISHED_LEASES: Final = """
    CREATE INDEX IF NOT EXISTS anabranch_leases_unfinished
    ON anabranch_leases (application, app_id, stream, generation, shard) WHERE completed = 0
"""


class UnreadableRowError(Exception):
    """A row that this version cannot read: another version wrote it, or a person edited it."""


class Table:
    """The rows of one kind. Its columns are the application and `app_id`, the fields of the codec, and `extra`."""

    def __init__(self, kind: Kind, name: str, key_width: int, *, unfinished: str = "") -> None:
        """The first `key_width` columns are the key. `unfinished` is what a scan without finished rows adds."""
        self.name = name
        self._key_width = key_width
        self._codec = CODECS[kind]
        self.defaults = self._codec.defaults | {"extra": "{}"}
        self._is_of_apps = kind == "app"
        place, own = ("application", "app_id"), self._codec.columns
        columns = self.columns = (*place, *(own[len(place) :] if self._is_of_apps else own), "extra")
        key = columns[:key_width]
        names = ", ".join(columns)
        marks = ", ".join("?" * len(columns))
        where = " AND ".join(f"{column} = ?" for column in key)
        scope = " AND ".join(f"{column} = ?" for column in key[:2])
        order = f" ORDER BY {', '.join(key)}"
        definitions = [f"{column} {_definition(column, self.defaults.get(column, ''))}" for column in columns]
        body = f"{', '.join(definitions)}, PRIMARY KEY ({', '.join(key)})"
        # All names are constants of this module; values are always bound.
        self.create = f"CREATE TABLE IF NOT EXISTS {name} ({body}) WITHOUT ROWID"
        self._get = f"SELECT {names} FROM {name} WHERE {where}"  # noqa: S608 -- see above
        self._scan_all = f"SELECT {names} FROM {name} WHERE {scope}{order}"  # noqa: S608 -- see above
        self._scan_unfinished = f"SELECT {names} FROM {name} WHERE {scope}{unfinished}{order}"  # noqa: S608 -- see above
        self.insert = f"INSERT OR REPLACE INTO {name} ({names}) VALUES ({marks})"  # noqa: S608 -- see above
        self._delete = f"DELETE FROM {name} WHERE {where}"  # noqa: S608 -- see above

    def get(self, connection: sqlite3.Connection, key: RowKey) -> Any:
        found = connection.execute(self._get, self._place(key)).fetchone()
        return None if found is None else self._row(found)

    def scan(self, connection: sqlite3.Connection, scope: Scope) -> list[Any]:
        """Sorted by key."""
        query = self._scan_all if scope.with_finished else self._scan_unfinished
        return [self._row(found) for found in connection.execute(query, self._place(scope))]

    def put(self, connection: sqlite3.Connection, key: RowKey, row: Row) -> None:
        place = () if self._is_of_apps else (key.app, key.app_id)
        extra = msgspec.json.encode(row.extra).decode()
        connection.execute(self.insert, (*place, *self._codec.fields(row).values(), extra))

    def delete(self, connection: sqlite3.Connection, key: RowKey) -> None:
        connection.execute(self._delete, self._place(key))

    def _place(self, place: RowKey | Scope) -> tuple[Any, ...]:
        name = place.name if isinstance(place, RowKey) else ()
        return (place.app, place.app_id, *name)[: self._key_width]

    def _row(self, found: tuple[Any, ...]) -> Any:
        *values, extra = found if self._is_of_apps else found[2:]
        try:
            return self._codec.row(dict(zip(self._codec.columns, values, strict=True)), msgspec.json.decode(extra))
        except (TypeError, ValueError) as error:
            key = ", ".join(map(str, found[: self._key_width]))
            raise UnreadableRowError(f"the row ({key}) of {self.name} cannot be read: {error}") from error


def _definition(column: str, default: Any) -> str:
    """A column may be NULL if that is its default."""
    return _TYPES_OF_NULLABLE.get(column, "TEXT") if default is None else f"{_TYPES[type(default)]} NOT NULL"


TABLES: Final[dict[Kind, Table]] = {
    "app": Table("app", "anabranch_applications", 1),
    "stream": Table("stream", "anabranch_streams", 3),
    "lease": Table("lease", "anabranch_leases", 5, unfinished=" AND completed = 0"),
    "command": Table("command", "anabranch_commands", 3, unfinished=" AND state = 'pending'"),
    "member": Table("member", "anabranch_members", 3),
    "status": Table("status", "anabranch_statuses", 3),
}
LEASES: Final = (_META, *(TABLES[kind].create for kind in ("app", "stream", "lease", "command")), _UNFINISHED_LEASES)
MEMBERS: Final = (_META, TABLES["member"].create, TABLES["status"].create)
"""The statements that create the tables of the two files."""


def create_tables(connection: sqlite3.Connection, statements: tuple[str, ...]) -> None:
    """Call inside a write transaction, so that processes that start together create them once."""
    for statement in statements:
        connection.execute(statement)
    connection.execute(
        "INSERT OR IGNORE INTO anabranch_meta VALUES ('schema_version', ?), ('uuid', ?)",
        (str(VERSION), uuid.uuid4().hex),
    )


def check_version(connection: sqlite3.Connection, path: Path) -> int | None:
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
    """Migrates tables of version 1, which have no `app_id`: `app_ids` has it. Call inside a write transaction."""
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    tables = [table for table in TABLES.values() if table.name in found]
    connection.execute("DROP INDEX IF EXISTS anabranch_leases_unfinished")
    for table in tables:
        connection.execute(f"ALTER TABLE {table.name} RENAME TO {table.name}_1")
    create_tables(connection, statements)
    for table in tables:
        rows = connection.execute(f"SELECT * FROM {table.name}_1")  # noqa: S608 -- constants
        names = [name for name, *_ in rows.description]
        for values in rows.fetchall():
            old = dict(zip(names, values, strict=True))
            app_id = app_ids.get(old["application"])
            if app_id is not None:
                # Version 1 wrote `wanted` in another form.
                row = table.defaults | old | {"app_id": app_id, "wanted": ""}
                connection.execute(table.insert, [row[column] for column in table.columns])
        connection.execute(f"DROP TABLE {table.name}_1")
    connection.execute("UPDATE anabranch_meta SET value = ? WHERE name = 'schema_version'", (str(VERSION),))


def read_uuid(connection: sqlite3.Connection) -> str:
    found = connection.execute("SELECT value FROM anabranch_meta WHERE name = 'uuid'").fetchone()
    return "" if found is None else str(found[0])


# One file
#
# A read is one transaction. Writes that wait at the same time share one transaction, because the sync to disk costs
# most; each has its own outcome, and one that fails does not undo the others.
#
# Each transaction first checks that the path still names the file that was opened. Otherwise this process would
# write to an unlinked file while others read the new one. A running process never creates a missing file again (rule
# L14). A replaced file ends the use of the store: SQLite may have mixed the old file's log into the new file.

BUSY_TIMEOUT_MS: Final = 1_000  # below the default deadline of one store call
LOCKED: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_WAL_POLL_SECONDS: Final = 0.01
_WRITES_TOGETHER_MAX: Final = 100
"""In one transaction, because other processes wait for its lock."""

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
Waiting = tuple[Work[Any], Future[Any]]


class Database:
    def __init__(
        self, path: Path, statements: tuple[str, ...], *, synchronous: Literal["FULL", "NORMAL"], thread_name: str
    ) -> None:
        self.path = path
        self._statements = statements
        self._synchronous = synchronous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread_name)
        self._process_id = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._identity = (0, 0)
        self.identity = ""
        """The file's own UUID and its inode, as the last transaction found them (rule L13)."""
        self._is_closed = False
        self._waiting: deque[Waiting] = deque()

    async def create(self, app_ids: Mapping[str, str] | None = None) -> None:
        """Creates or migrates file and tables. To migrate, `app_ids` is needed if another file has the applications."""
        await self.run(partial(self._create, app_ids))

    async def read(self, work: Work[T]) -> T:
        return await self.run(lambda: self._transact("BEGIN", work))

    async def peek(self, work: Work[T]) -> T:
        """Reads a file of any version, over a connection of its own. It must exist."""
        return await self.run(partial(self._peek, work))

    async def write(self, work: Work[T]) -> T:
        """Returns once the write is on disk."""
        self._check_usable()
        answer: Future[T] = Future()
        self._waiting.append((work, answer))
        self._thread.submit(self._write_waiting)
        return await asyncio.wrap_future(answer)

    async def version(self) -> int | None:
        """The version of our tables; None if the file or they do not exist. Creates nothing."""
        check = partial(check_version, path=self.path)
        return await self.run(lambda: self._peek(check) if self.path.exists() else None)

    async def close(self) -> None:
        if self._is_closed or self._process_id != os.getpid():
            return
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[], T]) -> T:
        self._check_usable()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._translated, work)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise UsageError(f"the lease store {self.path} is closed")
        if self._process_id != os.getpid():
            raise UsageError(f"the lease store {self.path} was made in another process: create it after the fork")

    # on the thread
    def _translated(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except sqlite3.Error as error:
            raise as_lease_error(error, self.path) from error
        except UnreadableRowError as error:
            raise LeaseStoreInvalidError(
                f"{self.path}: {error}; correct it in SQL, or restore the file from a backup"
            ) from error

    def _write_waiting(self) -> None:
        """Called once per write. The first call handles all waiting writes, the others find none."""
        group: list[Waiting] = []
        while self._waiting and len(group) < _WRITES_TOGETHER_MAX:
            work, answer = self._waiting.popleft()
            if answer.set_running_or_notify_cancel():
                group.append((work, answer))
        if not group:
            return
        try:
            outcomes = self._translated(partial(self._transact, "BEGIN IMMEDIATE", partial(self._write_each, group)))
        except Exception as error:  # noqa: BLE001 -- raised where it is awaited
            outcomes = [error] * len(group)
        for (_, answer), outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

    def _write_each(self, group: list[Waiting], connection: sqlite3.Connection) -> list[Any]:
        """The result or error of each write."""
        outcomes: list[Any] = []
        for work, _ in group:
            connection.execute("SAVEPOINT one")
            try:
                outcomes.append(self._translated(partial(work, connection)))
            except Exception as error:
                if not connection.in_transaction or len(group) == 1:
                    raise  # SQLite has rolled back everything, or this was the only write
                connection.execute("ROLLBACK TO one")
                outcomes.append(error)
            connection.execute("RELEASE one")
        return outcomes

    def _create(self, app_ids: Mapping[str, str] | None) -> None:
        if not self.path.parent.is_dir():
            raise LeaseStoreInvalidError(f"{self.path}: its folder does not exist; create it, or name another file")
        self._disconnect()
        connection = self._connect("rwc")
        try:
            if check_version(connection, self.path) != VERSION:
                connection.execute("BEGIN IMMEDIATE")
                version = check_version(connection, self.path)  # another process may have been faster
                if version is None:
                    create_tables(connection, self._statements)
                elif version != VERSION:
                    known = read_app_ids(connection) if app_ids is None else app_ids
                    migrate(connection, self._statements, known)
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._keep(connection)

    def _peek(self, work: Work[T]) -> T:
        with closing(open_file(self.path, "rw", BUSY_TIMEOUT_MS / 1000)) as connection:
            return work(connection)

    def _transact(self, begin: str, work: Work[T]) -> T:
        connection = self._current()
        connection.execute(begin)
        try:
            self.identity = f"{read_uuid(connection)}:{self._identity[0]}:{self._identity[1]}"
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    def _current(self) -> sqlite3.Connection:
        try:
            found = self.path.stat()
        except OSError as error:
            raise LeaseStoreError(
                f"{self.path} is gone ({error.strerror}): running workers do not create it again; "
                "put it back, or stop all workers of the application"
            ) from error
        if self._connection is not None and self._identity != (found.st_dev, found.st_ino):
            raise LeaseStoreInvalidError(
                f"{self.path} was replaced by another file while it was in use: stop all workers of the application, "
                f"restore the file again, remove {self.path.name}-wal and {self.path.name}-shm, and start again"
            )
        if self._connection is None:
            connection = self._connect("rw")
            if check_version(connection, self.path) != VERSION:
                connection.close()
                raise LeaseStoreInvalidError(
                    f"{self.path} holds no leases: open the store first; if it was open, its tables were dropped, "
                    "and all workers of the application must be stopped"
                )
            self._keep(connection)
        assert self._connection is not None
        return self._connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        connection = open_file(self.path, mode, BUSY_TIMEOUT_MS / 1000)
        try:
            self._use_write_ahead_log(connection)
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _use_write_ahead_log(self, connection: sqlite3.Connection) -> None:
        if (mode := use_write_ahead_log(connection, BUSY_TIMEOUT_MS / 1000)) != "wal":
            raise LeaseStoreInvalidError(
                f"{self.path}: SQLite cannot use a write-ahead log there (the mode stays {mode!r}): "
                "use a file on a local disk"
            )

    def _keep(self, connection: sqlite3.Connection) -> None:
        found = self.path.stat()
        self._identity = (found.st_dev, found.st_ino)
        self._connection = connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def open_file(path: Path, mode: str, busy_seconds_max: float) -> sqlite3.Connection:
    """Transactions are begun explicitly."""
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=busy_seconds_max, isolation_level=None)


def use_write_ahead_log(connection: sqlite3.Connection, seconds_max: float) -> str:
    """Returns the journal mode. SQLite does not wait when two processes switch a new file at once, so we retry here."""
    give_up = time.monotonic() + seconds_max
    while True:
        try:
            return str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
        except sqlite3.OperationalError as error:
            if primary_code(error) not in LOCKED or time.monotonic() >= give_up:
                raise
            time.sleep(_WAL_POLL_SECONDS)


def primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the upper bits are the extended code


def as_lease_error(error: sqlite3.Error, path: Path) -> LeaseError:
    """SQLite's error with advice on what to do."""
    code = primary_code(error)
    if code in LOCKED:
        return LeaseStoreError(
            f"{path} was locked by another process for more than {BUSY_TIMEOUT_MS / 1000:g} s: "
            "keep other transactions on it short"
        )
    if code == sqlite3.SQLITE_NOTADB:
        return LeaseStoreInvalidError(f"{path} is not a SQLite database: name another file, or move this one away")
    if code == sqlite3.SQLITE_CORRUPT:
        return LeaseStoreInvalidError(f"{path} is damaged ({error}): restore it from a backup, or move it away")
    if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_CANTOPEN}:
        return LeaseStoreInvalidError(
            f"{path} cannot be opened and written ({error}): "
            "this user needs read and write access to the file and its folder"
        )
    if code in {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_CONSTRAINT}:
        return LeaseStoreInvalidError(
            f"{path}: its tables do not match this version of anabranch ({error}): "
            "restore the file from a backup, or name another one"
        )
    return LeaseStoreError(f"{path}: {error}")


# The store

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
        others = [name for name in names if name not in self._held and self._file(name).exists()]
        return [name for name in others if not self.is_dead(name)]

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


class SqliteLeaseStore(RowLeaseStore):
    """Leases in one file, for the processes of one machine.

    `<path>-workers` (heartbeats) and the folder `<path>-workers.d` (locks) belong to it. Several applications can share
    a file, and the file can be your own database.
    """

    def __init__(self, path: str | Path, app: str) -> None:
        super().__init__(app)
        self.path = Path(path)
        beside = f"{self.path.name}-workers"
        self._main = Database(self.path, LEASES, synchronous="FULL", thread_name="anabranch-leases")
        self._workers = Database(
            self.path.with_name(beside), MEMBERS, synchronous="NORMAL", thread_name="anabranch-workers"
        )
        self._presence = Presence(self.path.with_name(f"{beside}.d"))
        self._locks_are_reliable = False

    def __str__(self) -> str:
        return sqlite_url(self.path)

    # the primitives
    async def identity(self) -> str:
        await self._main.read(read_uuid)
        await self._workers.read(read_uuid)
        return self._evidence

    @property
    def _evidence(self) -> str:
        return f"{self._main.identity}/{self._workers.identity}"

    async def get(self, keys: Sequence[RowKey]) -> Found:
        found = await self._database(keys[0].kind).read(partial(_get, keys))
        return Found(found, self._evidence)

    async def scan(self, scopes: Sequence[Scope]) -> Found:
        found: list[Row | None] = []
        for database, together in groupby(scopes, lambda scope: self._database(scope.kind)):
            found += await database.read(partial(_scan, list(together)))
        return Found(found, self._evidence)

    async def change(self, keys: Sequence[RowKey], update: Update) -> Changed:
        def work(connection: sqlite3.Connection) -> tuple[Sequence[Row | None], Sequence[Row | None]]:
            before = _get(keys, connection)
            after = update(before)
            for key, old, new in zip(keys, before, after, strict=True):
                if new is None:
                    TABLES[key.kind].delete(connection, key)
                elif new is not old:
                    TABLES[key.kind].put(connection, key, new)
            return before, after

        before, after = await self._database(keys[0].kind).write(work)
        return Changed(before, after, self._evidence)

    async def close(self) -> None:
        await self._main.close()
        await self._workers.close()
        self._presence.close()

    def _database(self, kind: Kind) -> Database:
        return self._workers if kind in {"member", "status"} else self._main

    # the application
    async def open(self, app: AppRow) -> AppRow:
        self._check_name(app)
        await self._main.run(self._check_place)
        if await self._workers.version() == _WITHOUT_APP_IDS:
            await self._workers.run(self._check_old_workers)
        await self._main.create()
        await self._workers.create(await self._main.read(read_app_ids))
        await self.identity()
        # Finding the row needs no lock: a worker can join even if another process was paused inside a write.
        return await super().open(app)

    def _check_place(self) -> None:
        kind = file_system(self.path)
        if (warning := check_place(self.path, kind)) is not None:
            _log.warning("%s", warning)
        self._locks_are_reliable = has_reliable_locks(kind)

    def _check_old_workers(self) -> None:
        """Workers of an earlier version cannot use the tables of this one."""
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
            return await self._main.peek(lambda connection: old_app_row(connection, self.app))
        return await super().read_app()

    async def delete_app(self, app_id: str) -> bool:
        for row in (await self.scan([Scope("member", self.app, app_id)])).rows:
            if isinstance(row, MemberRow):
                await self._workers.run(partial(self._presence.withdraw, row.member_id))
        return await super().delete_app(app_id)

    async def leftovers(self) -> Sequence[str]:
        return await super().leftovers() if await self._main.version() == VERSION else ()

    async def applications(self) -> list[str]:
        """The applications in the file, sorted. Creates nothing."""
        if await self._main.version() is None:
            return []
        query = "SELECT application FROM anabranch_applications ORDER BY application"
        return await self._main.peek(lambda connection: [name for (name,) in connection.execute(query)])

    # members
    async def register_member(self, row: MemberRow) -> MemberRow:
        await self._workers.run(partial(self._presence.announce, row.member_id))
        return await super().register_member(row)

    async def poll(self) -> Poll:
        poll = await super().poll()
        if not self._locks_are_reliable:
            return poll
        live = [row.member_id for row in poll.members if row.state == "live"]
        dead = await self._workers.run(lambda: tuple(one for one in live if self._presence.is_dead(one)))
        return replace(poll, known_dead=dead)

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


def _get(keys: Sequence[RowKey], connection: sqlite3.Connection) -> list[Row | None]:
    return [TABLES[key.kind].get(connection, key) for key in keys]


def _scan(scopes: Sequence[Scope], connection: sqlite3.Connection) -> list[Row | None]:
    return [row for scope in scopes for row in TABLES[scope.kind].scan(connection, scope)]
