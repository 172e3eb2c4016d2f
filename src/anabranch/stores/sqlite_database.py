"""One SQLite file: where it may be, its connection, and the one thread that uses it.

Every call runs on the file's own thread, so no event loop blocks. A read is one transaction. Writes that wait at the
same time share one transaction, because the sync to disk costs most; each has its own outcome, and one that fails does
not undo the others.

Each transaction first checks that the path still leads to the file that was opened. Otherwise this process would write
to an unlinked file while others read the new one. A running process never creates a missing file again (rule L14). A
replaced file ends the use of the store: SQLite may have mixed the old file's log into the new file.

If another process holds the lock for too long, the call raises `LeaseStoreError`, and the caller retries. Nothing is
retried here.
"""

import asyncio
import os
import re
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import quote

from anabranch.errors import LeaseError, LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.stores import sqlite_tables as tables
from anabranch.stores.sqlite_tables import UnreadableRowError

NETWORK: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "smb3", "smbfs",
})  # fmt: skip
_PASSED_THROUGH: Final = frozenset({"drvfs", "fuse", "fuseblk", "prl_fs", "vboxsf", "virtiofs"})
_FORGETFUL: Final = frozenset({"overlay", "ramfs", "tmpfs"})
_OCTAL = re.compile(r"\\([0-7]{3})")  # /proc/mounts escapes spaces in names


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


def has_true_locks(kind: str | None) -> bool:
    return kind is not None and kind not in NETWORK and not _is_passed_through(kind)


def forgets(kind: str | None) -> bool:
    """Whether files there are lost with the container or at the next reboot."""
    return kind in _FORGETFUL


def check_place(path: Path, kind: str | None) -> str | None:
    """Refuses network file systems (rule L16). Returns a warning for FUSE and the like, whose locks may not work."""
    if kind in NETWORK:
        raise LeaseStoreInvalidError(
            f"{path} is on a network file system ({kind}), where SQLite's locks and shared memory do not work: "
            "use a file on a local disk, or a lease store for several machines"
        )
    if kind is not None and _is_passed_through(kind):
        return (
            f"{path} is on {kind}: if several machines mount it, they do not see each other's locks and handle "
            "records twice; keep the lease file on a local disk"
        )
    return None


def _is_passed_through(kind: str) -> bool:
    return kind in _PASSED_THROUGH or kind.startswith("fuse.")


BUSY_TIMEOUT_MS: Final = 1_000  # below the default deadline of one store call
_WAL_POLL_SECONDS: Final = 0.01
_WRITES_TOGETHER_MAX: Final = 100
"""In one transaction, because other processes wait for its lock."""

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
Waiting = tuple[Work[Any], Future[Any]]


class Database:
    def __init__(
        self, path: Path, tables: tuple[str, ...], *, synchronous: Literal["FULL", "NORMAL"], thread_name: str
    ) -> None:
        self.path = path
        self._tables = tables
        self._synchronous = synchronous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread_name)
        self._process_id = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._identity = (0, 0)
        self.identity = ""
        """The file's own UUID and its inode, as last observed."""
        self._is_closed = False
        self._waiting: deque[Waiting] = deque()

    async def create(self, app_ids: Mapping[str, str] | None = None) -> None:
        """Creates the file and the tables if they do not exist, and migrates tables of an earlier version. `app_ids` is
        needed for that where the applications are in another file.
        """
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
        return await self.run(self._version)

    def observe(self, connection: sqlite3.Connection) -> None:
        """Inside a transaction: notes which storage it is about (rule L13)."""
        self.identity = f"{tables.read_uuid(connection)}:{self._identity[0]}:{self._identity[1]}"

    async def close(self, last: Callable[[], None] | None = None) -> None:
        """Stops the thread after running `last` on it."""
        if self._is_closed or self._process_id != os.getpid():
            return
        self._is_closed = True
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._disconnect)
        if last is not None:
            await loop.run_in_executor(self._thread, last)
        self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[], T]) -> T:
        self._check_usable()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._explained, work)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise UsageError(f"the lease store {self.path} is closed")
        if self._process_id != os.getpid():
            raise UsageError(f"the lease store {self.path} was made in another process: create it after the fork")

    # on the thread
    def _explained(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except sqlite3.Error as error:
            raise explained(error, self.path) from error
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
            outcomes = self._explained(partial(self._transact, "BEGIN IMMEDIATE", partial(self._write_each, group)))
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
                outcomes.append(self._explained(partial(work, connection)))
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
            if tables.check_version(connection, str(self.path)) != tables.VERSION:
                connection.execute("BEGIN IMMEDIATE")
                version = tables.check_version(connection, str(self.path))  # another process may have been faster
                if version is None:
                    tables.create_tables(connection, self._tables)
                elif version != tables.VERSION:
                    known = tables.read_app_ids(connection) if app_ids is None else app_ids
                    tables.migrate(connection, self._tables, known)
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._keep(connection)

    def _version(self) -> int | None:
        if not self.path.exists():
            return None
        with closing(self._open("rw")) as connection:
            return tables.check_version(connection, str(self.path))

    def _peek(self, work: Work[T]) -> T:
        with closing(self._open("rw")) as connection:
            return work(connection)

    def _transact(self, begin: str, work: Work[T]) -> T:
        connection = self._current()
        connection.execute(begin)
        try:
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
            if tables.check_version(connection, str(self.path)) != tables.VERSION:
                connection.close()
                raise LeaseStoreInvalidError(
                    f"{self.path} holds no leases: open the store first; if it was open, its tables were dropped, "
                    "and all workers of the application must be stopped"
                )
            self._keep(connection)
        assert self._connection is not None
        return self._connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        connection = self._open(mode)
        try:
            self._use_write_ahead_log(connection)
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(self, mode: str) -> sqlite3.Connection:
        address = f"file:{quote(str(self.path.absolute()))}?mode={mode}"
        return sqlite3.connect(address, uri=True, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None)

    def _use_write_ahead_log(self, connection: sqlite3.Connection) -> None:
        """SQLite does not wait when two processes switch a new file at once, so we retry here."""
        give_up = time.monotonic() + BUSY_TIMEOUT_MS / 1000
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                if _primary_code(error) not in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                    raise
                if time.monotonic() >= give_up:
                    raise
                time.sleep(_WAL_POLL_SECONDS)
                continue
            if mode != "wal":
                raise LeaseStoreInvalidError(
                    f"{self.path}: SQLite cannot use a write-ahead log there (the mode stays {mode!r}): "
                    "use a file on a local disk"
                )
            return

    def _keep(self, connection: sqlite3.Connection) -> None:
        found = self.path.stat()
        self._identity = (found.st_dev, found.st_ino)
        self._connection = connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the upper bits are the extended code


def explained(error: sqlite3.Error, path: Path) -> LeaseError:
    """SQLite's error with advice on what to do."""
    code = _primary_code(error)
    if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
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
