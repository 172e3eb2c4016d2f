"""The file behind `--data DIR`: an append-only journal. Every acknowledged change survives `kill -9`.

    magic | entry | entry | ...        entry: length (4) | CRC-32 of the payload (4) | payload      (big-endian)

Entries are opaque bytes. They are written in order, in batches with one fsync each; `durable` returns when everything
appended so far is on disk. An incomplete entry at the end is dropped: it was never acknowledged. At each start the
journal is rewritten from the present state to a new file, which then replaces the old one. A lock on the folder keeps
other processes out.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final
from zlib import crc32

from anabranch.errors import ConfigurationError
from anabranch.local.errors import LocalError

logger = logging.getLogger("anabranch.local")

_MAGIC: Final = b"anabranch local kinesis 1\n"
_ENTRY: Final = struct.Struct(">II")
_ENTRY_BYTES_MAX: Final = 256 << 20


class Journal:
    def __init__(self, folder: Path) -> None:
        """Creates the folder and takes its lock. Blocks."""
        self._folder = folder
        self._path = folder / "journal"
        self._lock = _take_lock(folder)
        self._file: BinaryIO | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="anabranch-journal")
        self._replacement: list[bytes] | None = None
        self._pending: list[bytes] = []
        self._appended = 0
        self._synced = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._flushing = False
        self._failure: LocalError | None = None

    # At start; these block

    def entries(self) -> Iterator[bytes]:
        """The complete entries of the file."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ConfigurationError(f"{self._path} is not a journal of a local Kinesis: choose another folder")
            while True:
                start = file.tell()
                entry = _read_entry(file)
                if entry is None:
                    torn_bytes = os.fstat(file.fileno()).st_size - start
                    if torn_bytes:
                        logger.warning(
                            "%s: dropped an incomplete entry of %d bytes (never acknowledged)", self._path, torn_bytes
                        )
                    return
                yield entry

    def rewrite(self, entries: Iterable[bytes]) -> None:
        """Replaces the journal by these entries. The old file stays until the new one is on disk."""
        new_path = self._folder / "journal.new"
        new = new_path.open("wb")
        new.write(_MAGIC)
        new.writelines(_framed(entry) for entry in entries)
        new.flush()
        os.fsync(new.fileno())
        new_path.replace(self._path)
        _sync_folder(self._folder)
        old, self._file = self._file, new
        if old is not None:
            old.close()

    # While the server runs

    def append(self, entry: bytes) -> None:
        """Never blocks. All entries of one step of the event loop are written together."""
        self._pending.append(_framed(entry))
        self._schedule_flush()

    def replace(self, entries: list[bytes]) -> None:
        """Replaces all earlier entries. Later ones follow after `entries`."""
        self._pending = []
        self._replacement = entries
        self._schedule_flush()

    @property
    def failure(self) -> LocalError | None:
        """Set after a write failed: no change may be acknowledged any more."""
        return self._failure

    async def durable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._synced < self._appended:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((self._appended, waiter))
            await waiter

    async def close(self) -> None:
        try:
            with contextlib.suppress(LocalError):  # already logged and raised to every waiter
                await self.durable()
        finally:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.shutdown()
        if self._file is not None:
            self._file.close()
        self._lock.close()

    def _schedule_flush(self) -> None:
        self._appended += 1
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        batch, self._pending = b"".join(self._pending), []
        replacement, self._replacement = self._replacement, None
        until = self._appended
        writing = asyncio.get_running_loop().run_in_executor(self._writer, self._write, replacement, batch)
        writing.add_done_callback(lambda done: self._flushed(done, until))

    def _write(self, replacement: list[bytes] | None, batch: bytes) -> None:
        if replacement is not None:
            self.rewrite(replacement)
        assert self._file is not None
        self._file.write(batch)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _flushed(self, writing: "asyncio.Future[None]", until: int) -> None:
        error = None if writing.cancelled() else writing.exception()
        if error is not None:
            logger.error("cannot write %s: %s", self._path, error)
            self._failure = LocalError("InternalFailure", f"The local server cannot write its journal: {error}", 500)
        else:
            self._synced = until
        still_waiting = []
        for target, waiter in self._waiters:
            if waiter.done():
                continue
            if self._failure is not None:
                waiter.set_exception(self._failure)
            elif target <= until:
                waiter.set_result(None)
            else:
                still_waiting.append((target, waiter))
        self._waiters = still_waiting
        if self._synced < self._appended and self._failure is None:
            self._flush()
        else:
            self._flushing = False


def _framed(entry: bytes) -> bytes:
    return _ENTRY.pack(len(entry), crc32(entry)) + entry


def _read_entry(file: BinaryIO) -> bytes | None:
    head = file.read(_ENTRY.size)
    if len(head) < _ENTRY.size:
        return None
    length, checksum = _ENTRY.unpack(head)
    if length > _ENTRY_BYTES_MAX:
        return None
    entry = file.read(length)
    return entry if len(entry) == length and crc32(entry) == checksum else None


def _take_lock(folder: Path) -> BinaryIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+b")
    except OSError as error:
        raise ConfigurationError(f"cannot use {folder} as data folder: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read(20).decode("ascii", "replace").strip() or "unknown"
        lock.close()
        raise ConfigurationError(f"{folder} is in use by another local Kinesis (process {holder})") from None
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()
    return lock


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
