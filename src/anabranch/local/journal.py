"""The file behind `--data DIR`: an append-only journal. Every acknowledged change survives `kill -9`.

    magic | entry | entry | ...        entry: length (4) | CRC-32 of the payload (4) | payload      (big-endian)

Entries are bytes, never empty. They are written in order, in batches with one fsync each; `durable` returns when all
entries appended so far are on disk. A lock on the folder keeps other processes out.

A crash may leave an incomplete entry at the end. It is dropped, and the file is copied first unless the entry is only
zeros. If complete entries follow a damaged part, that is an error and the file is not changed; with `salvage`, the file
is copied and all complete entries are used. At each start the present state is written to a new file, which then
replaces the old one.
"""

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import re
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
_ENTRY_BYTES_MAX: Final = (1 << 24) - 1
"""More than a PutRecords request or an entry of a snapshot has."""
_LENGTH: Final = re.compile(rb"\0(?!\0\0\0)")
"""Where the length of an entry can begin."""
REMEDY: Final = (
    "Restore the file from a copy, or start with --salvage (salvage=True): it keeps this file beside the new one, and "
    "uses every complete entry"
)


class Journal:
    def __init__(self, folder: Path, *, salvage: bool = False) -> None:
        """Creates the folder and takes its lock. Blocks."""
        self._folder = folder
        self._salvage = salvage
        self._damaged_path: Path | None = None
        self.path = folder / "journal"
        self._lock = _take_lock(folder)
        self._file: BinaryIO | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="anabranch-journal")
        self._replacement: list[bytes] | None = None
        self._pending: list[bytes] = []
        self._appended = 0
        self._synced = 0
        self._flushing = False
        self._flush_ended = asyncio.Event()
        """Replaced after each flush."""
        self.failure: LocalError | None = None
        """Set after a write failed: no change may be acknowledged any more."""

    # At start; these block

    def entries(self) -> Iterator[bytes]:
        """The complete entries of the file."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if file.read(len(_MAGIC)) != _MAGIC:
                if not self._salvage:
                    raise ConfigurationError(
                        f"{self.path} does not begin as a journal of a local Kinesis does. If it is another file, "
                        f"choose another folder. {REMEDY}"
                    )
                logger.warning("%s: the first line is damaged; the file is kept as %s", self.path, self.keep_file())
            if not os.fstat(file.fileno()).st_size:
                return  # cannot be mapped
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
        damage = f"{self.path} is damaged from byte {position} to byte {following}; complete entries follow"
        if not self._salvage:
            raise ConfigurationError(f"{damage}. Nothing was changed. {REMEDY}")
        logger.warning("%s, the damaged part is lost; the file is kept as %s", damage, self.keep_file())
        return following

    def _drop_tail(self, content: mmap.mmap, position: int) -> None:
        """If the file is shorter than its last entry says, that entry was never acknowledged. Otherwise the end was
        damaged later.
        """
        tail_bytes = len(content) - position
        if not content[position:].strip(b"\0"):
            logger.warning("%s: dropped %d zero bytes at the end", self.path, tail_bytes)
            return
        length = _HEAD.unpack_from(content, position)[0] if tail_bytes >= _HEAD.size else _ENTRY_BYTES_MAX
        is_torn = tail_bytes < _HEAD.size + length and length <= _ENTRY_BYTES_MAX
        what = "bytes of an incomplete entry (never acknowledged)" if is_torn else "damaged bytes"
        kept = self.keep_file()
        logger.warning("%s: dropped %d %s at the end; the file is kept as %s", self.path, tail_bytes, what, kept)

    def keep_file(self) -> Path:
        """Copies the file, once, before it is rewritten without its damaged part."""
        if self._damaged_path is None:
            names = (self._folder / f"journal.damaged-{number}" for number in count(1))
            self._damaged_path = next(path for path in names if not path.exists())
            shutil.copyfile(self.path, self._damaged_path)
        return self._damaged_path

    def rewrite(self, entries: Iterable[bytes]) -> None:
        """Replaces the journal by these entries. The old file stays until the new one is on disk."""
        new_path = self._folder / "journal.new"
        new = new_path.open("wb")
        try:
            new.write(_MAGIC)
            new.writelines(map(_framed, entries))
            new.flush()
            os.fsync(new.fileno())
            new_path.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):  # closing tries to write again
                new.close()
            raise
        _sync_folder(self._folder)
        old, self._file = self._file, new
        if old is not None:
            old.close()

    # While the server runs

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def append(self, entry: bytes) -> None:
        """Never blocks. All entries of one step of the event loop are written together."""
        self._pending.append(_framed(entry))
        self._schedule_flush()

    def replace(self, entries: list[bytes]) -> None:
        """Replaces all earlier entries. Later ones follow after `entries`."""
        self._pending = []
        self._replacement = entries
        self._schedule_flush()

    async def durable(self) -> None:
        target = self._appended
        while self.failure is None and self._synced < target:
            await self._flush_ended.wait()
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        try:
            with contextlib.suppress(LocalError):  # already logged and raised to every waiter
                await self.durable()
        finally:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.shutdown()
        if self._file is not None:
            with contextlib.suppress(OSError):  # if a write failed, closing tries it again
                self._file.close()
        self._lock.close()

    def _schedule_flush(self) -> None:
        """After a failed write, which may have left an incomplete entry, nothing more is written."""
        self._appended += 1
        if not self._flushing and self.failure is None:
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
            logger.error("cannot write %s: %s", self.path, error)
            self.failure = LocalError("InternalFailure", f"The local server cannot write its journal: {error}", 500)
        else:
            self._synced = until
        self._flush_ended.set()
        self._flush_ended = asyncio.Event()
        if self._synced < self._appended and self.failure is None:
            self._flush()
        else:
            self._flushing = False


def _framed(entry: bytes) -> bytes:
    return _HEAD.pack(len(entry), crc32(entry)) + entry


def _entry_at(content: mmap.mmap, position: int) -> bytes | None:
    """None if there is no complete entry here, only a damaged part or the zeros that a crash may leave."""
    begin = position + _HEAD.size
    if begin > len(content):
        return None
    length, checksum = _HEAD.unpack_from(content, position)
    if not 0 < length <= len(content) - begin:
        return None
    entry = content[begin : begin + length]
    return entry if crc32(entry) == checksum else None


def _next_entry(content: mmap.mmap, position: int) -> int | None:
    """Where the next complete entry begins.

    An entry must be followed by another length, by zeros up to the end, or by nothing. We check this first: a checksum
    at each position would take quadratic time.
    """
    zeros = len(content[:].rstrip(b"\0"))
    for found in _LENGTH.finditer(content, position):
        begin = found.start()
        if begin + _HEAD.size > len(content):
            break
        end = begin + _HEAD.size + _HEAD.unpack_from(content, begin)[0]
        if (end >= zeros or _LENGTH.match(content, end)) and _entry_at(content, begin) is not None:
            return begin
    return None


def _take_lock(folder: Path) -> BinaryIO:
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("a+b")
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
