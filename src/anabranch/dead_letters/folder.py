"""The overflow of one machine: letters that are too large for their destination, as files in a folder."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote, urlsplit

from anabranch._daemon_threads import DaemonThreads
from anabranch.dead_letters.boxes import StoredLetter
from anabranch.errors import DeadLetterError
from anabranch.letters import Letter, decode_letter, encode_letter

T = TypeVar("T")


class FolderLetters:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._thread = DaemonThreads(1, "anabranch-overflow")

    def __str__(self) -> str:
        return f"file://{self._folder}"

    async def check(self, retention_hours: int) -> list[str]:  # noqa: ARG002 -- a folder keeps letters forever
        if not self._folder.is_dir() or not os.access(self._folder, os.W_OK):
            raise DeadLetterError(f"{self} is not a writable folder", code="missing", advice="create it")
        return []

    def pointer(self, letter: Letter) -> str:
        return f"file://{quote(str(self._file(letter)))}"

    async def fetch(self, pointer: str) -> StoredLetter | None:
        path = Path(unquote(urlsplit(pointer).path))
        try:
            return StoredLetter(decode_letter(await self._run(path.read_bytes)), path)
        except FileNotFoundError:
            return None

    async def write(self, letter: Letter) -> None:
        await self._run(lambda: _write_file(self._file(letter), encode_letter(letter)))

    async def delete(self, stored: StoredLetter) -> None:
        await self._run(lambda: stored.handle.unlink(missing_ok=True))

    async def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _file(self, letter: Letter) -> Path:
        return self._folder / f"{letter.idempotency_key}.json"

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DeadLetterError(f"{self}: {error.strerror}", code="no_answer") from error


def _write_file(path: Path, body: bytes) -> None:
    """Whole and on disk, or not at all."""
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileNotFoundError:
        raise DeadLetterError(f"file://{path.parent} is gone", code="missing", advice="create it") from None
