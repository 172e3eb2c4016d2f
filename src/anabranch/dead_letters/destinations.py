"""The protocols of dead-letter destinations, and the small destinations: a folder, a Kinesis stream, a function.

Errors of AWS become `DeadLetterError` here.
"""

import asyncio
import inspect
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from anabranch._aws.kinesis_client import KinesisByRegion
from anabranch._daemon_threads import DaemonThreads
from anabranch._model.streams import StreamName
from anabranch._ports import LetterDestination
from anabranch._wire.messages import PutRecordsEntry
from anabranch.config import Aws
from anabranch.errors import (
    AccessDeniedError,
    AnabranchError,
    ConfigurationError,
    CredentialsError,
    DeadLetterCode,
    DeadLetterError,
    ServiceError,
    ThrottledError,
)
from anabranch.letters import Letter, decode_letter, encode_letter
from anabranch.limits import RECORD_BYTES_DEFAULT_MAX

T = TypeVar("T")

HOLD_SECONDS: Final = 60.0
"""How long letters stay held by a redrive that has died. A running one renews its hold three times as often."""
RETENTION_HOURS_WANTED: Final = 14 * 24
"""People need time to look at letters. SQS keeps them for at most this long."""


class StoredLetter(msgspec.Struct, frozen=True):
    letter: Letter
    handle: Any
    """By which the box finds the letter again: a row id, a receipt handle, ..."""


class SizedDestination(LetterDestination, Protocol):
    def __str__(self) -> str:
        """Its URL, without secrets."""

    async def limit_bytes(self) -> int | None:
        """The size of the largest letter that it takes, as JSON; None for any size."""
        return None


class LetterBox(SizedDestination, Protocol):
    """A destination that can be read. Letters come in stream order, as far as it can tell."""

    reveals_more: bool = False
    """Whether deleting letters makes later ones visible. If so, callers read again until nothing is left."""
    unreadable: list[str]
    """Describes what was found that is not a letter. It stays there, and is reported."""

    async def count(self) -> int:
        """The approximate number of letters."""

    async def hold(self, owner: str) -> None:
        """Keeps others from redriving until `release`, or for `HOLD_SECONDS`; call it again to renew the hold. Raises
        `DeadLetterError` with the code `locked` if somebody else holds it.
        """

    async def release(self) -> None:
        """Ends the hold. Does nothing if this object has none."""

    def read(self) -> AsyncGenerator[StoredLetter, None]:
        """Each letter once. May include letters that are written meanwhile."""

    async def begin(self, stored: StoredLetter, letter: Letter) -> StoredLetter:
        """Writes the letter with the delivery that is about to begin, so that the count outlives the process."""

    async def replace(self, stored: StoredLetter, letter: Letter) -> None:
        """Writes the counts of a failed redrive into the stored letter. Does nothing if the letter is gone, or if it
        would move behind later letters of its key.
        """

    async def delete(self, stored: StoredLetter) -> None: ...


class OverflowBox(LetterDestination, Protocol):
    """Takes letters of any size, and finds each by a URL of its own."""

    def pointer(self, letter: Letter) -> str:
        """A URL that names the letter in here."""

    async def fetch(self, pointer: str) -> StoredLetter | None:
        """The letter that `pointer` names; None if it is gone."""

    async def delete(self, stored: StoredLetter) -> None: ...


_MISSING: Final = frozenset(
    {"404", "NoSuchBucket", "NonExistentQueue", "QueueDoesNotExist", "ResourceNotFoundException"}
)
"""The last parts of error codes: SQS puts `AWS.SimpleQueueService.` before them."""


def translated(error: AnabranchError, where: str) -> DeadLetterError:
    if isinstance(error, DeadLetterError):
        return error
    if isinstance(error, ThrottledError):
        return DeadLetterError(f"{where} is throttled: {error}", code="throttled")
    if isinstance(error, ServiceError) and error.code.rpartition(".")[2] in _MISSING:
        return DeadLetterError(
            f"{where} does not exist", code="missing", advice="create it, or check the name, the region and the account"
        )
    if isinstance(error, AccessDeniedError | CredentialsError):
        return DeadLetterError(f"{where} cannot be used: {error}", code="access_denied")
    if error.retryable:
        return DeadLetterError(f"{where} did not answer: {error}", code="no_answer")
    return DeadLetterError(f"{where} cannot be used: {error}", code="unusable")


def retention_warnings(where: str, kept_hours: float, stream_hours: int, how: str) -> list[str]:
    wanted = max(stream_hours, RETENTION_HOURS_WANTED)
    if kept_hours >= wanted:
        return []
    days = "14 days are advised" if stream_hours <= RETENTION_HOURS_WANTED else f"the stream keeps {stream_hours} h"
    return [f"{where} deletes letters after {kept_hours:g} h, and {days}: {how}"]


# Destinations


class FolderLetters:
    """The overflow of one machine: letters that are too large for their destination, as files in a folder."""

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
    """Atomic: the file is complete and on disk, or it does not exist."""
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


_THROTTLED: Final = "ProvisionedThroughputExceededException"


class KinesisLetters:
    """A stream of letters, under the partition keys of their records. A letter may be in it twice: readers merge by the
    idempotency key.
    """

    def __init__(self, stream: StreamName, *, aws: Aws | None = None) -> None:
        self._stream = stream
        self._aws = aws
        self._opened: KinesisByRegion | None = None
        self._record_bytes_max = RECORD_BYTES_DEFAULT_MAX

    @property
    def _kinesis(self) -> KinesisByRegion:
        """Opened when it is first needed: it starts threads."""
        if self._opened is None:
            self._opened = KinesisByRegion(self._aws)
        return self._opened

    def __str__(self) -> str:
        return f"kinesis://{self._stream.name}"

    async def check(self, retention_hours: int) -> list[str]:
        try:
            summary = await self._kinesis.describe_stream_summary(self._stream)
        except AnabranchError as error:
            raise translated(error, str(self)) from error
        self._record_bytes_max = summary.record_bytes_max
        how = "raise its retention with `aws kinesis increase-stream-retention-period`"
        return retention_warnings(str(self), summary.retention_hours, retention_hours, how)

    async def limit_bytes(self) -> int | None:
        return self._record_bytes_max - 4 * 256  # the partition key counts, too

    async def write(self, letter: Letter) -> None:
        entry = PutRecordsEntry(encode_letter(letter), letter.partition_key or letter.idempotency_key)
        try:
            (result,) = (await self._kinesis.put_records(self._stream, [entry])).entries
        except AnabranchError as error:
            raise translated(error, str(self)) from error
        if result.error_code is not None:
            code: DeadLetterCode = "throttled" if result.error_code == _THROTTLED else "no_answer"
            raise DeadLetterError(
                f"{self} did not take the letter: {result.error_code}: {result.error_message}", code=code
            )

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()


class FunctionLetters(SizedDestination):
    """An async function that keeps the letter, and returns when it is durable."""

    def __init__(self, function: Callable[[Letter], Awaitable[object]]) -> None:
        """Raises `ConfigurationError` if it is not async: each letter would be written again and again."""
        self._function = function
        called = (inspect.unwrap(function), getattr(function, "__call__", None))  # noqa: B004 -- of a callable object
        if not any(map(inspect.iscoroutinefunction, called)):
            raise ConfigurationError(f"the dead letter function {self} is not async: make it an async def")

    def __str__(self) -> str:
        return str(getattr(self._function, "__qualname__", repr(self._function)))

    async def check(self, retention_hours: int) -> list[str]:  # noqa: ARG002 -- only the function knows
        return []

    async def write(self, letter: Letter) -> None:
        try:
            result: object = self._function(letter)
            if inspect.isawaitable(result):
                await result
        except DeadLetterError:
            raise
        except Exception as error:
            raise DeadLetterError(
                f"the dead letter function {self} failed: {type(error).__name__}: {error}", code="no_answer"
            ) from error
        if not inspect.isawaitable(result):
            raise DeadLetterError(
                f"the dead letter function {self} is not async", code="unusable", advice="make it an async def"
            )

    async def close(self) -> None:
        """The function is the user's."""
