"""The file behind `--data DIR`: an append-only journal. Every acknowledged change survives `kill -9`.

    magic | entry | entry | ...        entry: length (4) | CRC-32 of the payload (4) | payload      (big-endian)

Entries are opaque bytes, never empty. They are written in order, in batches with one fsync each; `durable` returns when
everything appended so far is on disk. An incomplete entry at the end is dropped: it was never acknowledged. A damaged
one at the end is dropped too, but the file is kept under another name. Damage that is followed by complete entries is
an error, and the file stays as it is; with `salvage`, it is kept under another name, and the complete entries are used.
At each start the journal is rewritten from the present state to a new file, which then replaces the old one. A lock on
the folder keeps other processes out.
"""

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import BinaryIO, Final
from zlib import crc32

from anabranch.errors import ConfigurationError
from anabranch.local.errors import LocalError

logger = logging.getLogger("anabranch.local")

_MAGIC: Final = b"anabranch local kinesis 1\n"
_HEAD: Final = struct.Struct(">II")


class Journal:
    def __init__(self, folder: Path, *, salvage: bool = False) -> None:
        """Creates the folder and takes its lock. Blocks."""
        self.size_bytes = 0
        """Of the file, with all entries that were appended."""
        self._folder = folder
        self._salvage = salvage
        self._damaged_path: Path | None = None
        self._path = folder / "journal"
        self._lock = _take_lock(folder)
        self._file: BinaryIO | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="anabranch-journal")
        self._replacement: list[bytes] | None = None
        """Framed entries that replace the file."""
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
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield from self._entries_in(content)

    def _entries_in(self, content: mmap.mmap) -> Iterator[bytes]:
        position = len(_MAGIC)
        while position < len(content):
            entry = _entry_at(content, position)
            if entry is None:
                position = self._skip_damage(content, position)
            else:
                yield entry
                position += _HEAD.size + len(entry)

    def _skip_damage(self, content: mmap.mmap, position: int) -> int:
        """Where to continue after an entry that is not complete."""
        following = _next_entry(content, position + 1)
        if following is None:
            self._drop_tail(content, position)
            return len(content)
        damage = f"{self._path} is damaged from byte {position} to byte {following}; complete entries follow"
        if not self._salvage:
            raise ConfigurationError(
                f"{damage}. Nothing was changed. Restore the file from a copy, or start with --salvage (salvage=True): "
                "it keeps this file beside the new one, and uses every complete entry"
            )
        logger.warning("%s, the damaged part is lost; the file is kept as %s", damage, self._keep_damaged_file())
        return following

    def _drop_tail(self, content: mmap.mmap, position: int) -> None:
        """An entry that is as long as it says, but has a wrong checksum, may have been acknowledged. None is empty."""
        tail_bytes = len(content) - position
        length = _HEAD.unpack_from(content, position)[0] if tail_bytes >= _HEAD.size else 0
        if not length or tail_bytes != _HEAD.size + length:
            logger.warning("%s: dropped an incomplete entry of %d bytes (never acknowledged)", self._path, tail_bytes)
        else:
            kept = self._keep_damaged_file()
            logger.warning("%s: dropped the last entry, which is damaged; the file is kept as %s", self._path, kept)

    def _keep_damaged_file(self) -> Path:
        if self._damaged_path is None:
            names = (self._folder / f"journal.damaged-{number}" for number in count(1))
            self._damaged_path = next(path for path in names if not path.exists())
            shutil.copyfile(self._path, self._damaged_path)
        return self._damaged_path

    def rewrite(self, entries: Iterable[bytes]) -> None:
        """Replaces the journal by these entries. The old file stays until the new one is on disk."""
        self.size_bytes = self._rewrite(_framed(entry) for entry in entries)

    def _rewrite(self, framed: Iterable[bytes]) -> int:
        new_path = self._folder / "journal.new"
        new = new_path.open("wb")
        new.write(_MAGIC)
        new.writelines(framed)
        new.flush()
        os.fsync(new.fileno())
        new_path.replace(self._path)
        _sync_folder(self._folder)
        old, self._file = self._file, new
        if old is not None:
            old.close()
        return new.tell()

    # While the server runs

    def append(self, entry: bytes) -> None:
        """Never blocks. All entries of one step of the event loop are written together."""
        framed = _framed(entry)
        self._pending.append(framed)
        self.size_bytes += len(framed)
        self._schedule_flush()

    def replace(self, entries: list[bytes]) -> None:
        """Replaces all earlier entries. Later ones follow after `entries`."""
        self._pending = []
        self._replacement = [_framed(entry) for entry in entries]
        self.size_bytes = len(_MAGIC) + sum(map(len, self._replacement))
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
            self._rewrite(replacement)
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
    return _HEAD.pack(len(entry), crc32(entry)) + entry


def _entry_at(content: mmap.mmap, position: int) -> bytes | None:
    """None if there is no complete entry. Zeros, which a crash may leave at the end of a file, are none."""
    begin = position + _HEAD.size
    if begin > len(content):
        return None
    length, checksum = _HEAD.unpack_from(content, position)
    if not 0 < length <= len(content) - begin:
        return None
    entry = content[begin : begin + length]
    return entry if crc32(entry) == checksum else None


def _next_entry(content: mmap.mmap, position: int) -> int | None:
    """Where the next complete entry begins. A length of less than 16 MiB, as all entries have, begins with a zero."""
    while (position := content.find(b"\0", position)) >= 0:
        if _entry_at(content, position) is not None:
            return position
        position += 1
    return None


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
