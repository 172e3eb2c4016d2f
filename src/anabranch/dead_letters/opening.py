"""Finds the destination of a URL or a function, and prepares each letter before it is written: redacts it, and stores
it in the overflow if it is too large.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from msgspec.structs import replace

from anabranch._model.kinds import refuse
from anabranch._model.streams import parse_stream
from anabranch.config import Aws
from anabranch.dead_letters.destinations import (
    FolderLetters,
    FunctionLetters,
    KinesisLetters,
    LetterBox,
    OverflowBox,
    SizedDestination,
    StoredLetter,
)
from anabranch.dead_letters.s3 import S3Letters
from anabranch.dead_letters.sqlite import SqliteLetters
from anabranch.dead_letters.sqs import SqsLetters
from anabranch.errors import CodecError, ConfigurationError, DeadLetterError
from anabranch.letters import Letter, encode_letter
from anabranch.stores.urls import container_platform, embedded_folder, local_path, sqlite_path, url_options

LetterFunction: TypeAlias = Callable[[Letter], Awaitable[object]]
Redact: TypeAlias = Callable[[Letter], Letter]

LETTERS_SUFFIX: Final = ".letters.db"
KNOWN_URLS: Final = "sqs://queue, s3://bucket/prefix, sqlite:///path/to/letters.db or kinesis://stream"
KNOWN: Final = f"{KNOWN_URLS}, or an async function that takes a Letter"
_QUEUE: Final = re.compile(r"[a-zA-Z0-9_-]{1,80}|[a-zA-Z0-9_-]{1,75}\.fifo")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MESSAGE_SHOWN: Final = 200


class LetterWriter:
    """The destination as the engine uses it. Redacts each letter, and stores one that is too large in the overflow,
    with a pointer to it in the destination.
    """

    def __init__(
        self,
        destination: SizedDestination,
        *,
        redact: Redact | None = None,
        overflow: OverflowBox | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self._destination = destination
        self._warnings = warnings
        self._redact = redact
        self._overflow = overflow

    def __str__(self) -> str:
        return str(self._destination)

    async def check(self, retention_hours: int) -> list[str]:
        warnings = [*self._warnings, *await self._destination.check(retention_hours)]
        if self._overflow is not None:
            warnings += await self._overflow.check(retention_hours)
        return warnings

    async def write(self, letter: Letter) -> str | None:
        if self._redact is not None:
            letter = _redacted(letter, self._redact)
        limit = await self._destination.limit_bytes()
        size = 0 if limit is None else len(encode_letter(letter))
        if limit is None or size <= limit:
            await self._destination.write(letter)
            return None
        if self._overflow is None:
            raise DeadLetterError(
                f"the letter of record {letter.place} has {size:,} bytes, and {self} takes {limit:,}",
                code="too_large",
                advice="set DeadLetter(overflow='s3://bucket/prefix'), or 'file:///folder' on one machine",
            )
        await self._overflow.write(letter)
        pointer = self._overflow.pointer(letter)
        small = replace(letter, payload=None, stack="", message=letter.message[:_MESSAGE_SHOWN], overflow=pointer)
        await self._destination.write(small)
        return pointer

    async def close(self) -> None:
        await self._destination.close()
        if self._overflow is not None:
            await self._overflow.close()


def _redacted(letter: Letter, redact: Redact) -> Letter:
    try:
        redacted = redact(letter)
    except Exception as error:
        raise DeadLetterError(
            f"redact= raised {type(error).__name__}", code="unusable", advice="a letter is not written without it"
        ) from error
    if getattr(redacted, "idempotency_key", None) != letter.idempotency_key:
        raise DeadLetterError(
            f"redact= returned {type(redacted).__name__}, not the letter with other content",
            code="unusable",
            advice="return msgspec.structs.replace(letter, payload=..., message=..., stack=...)",
        )
    return redacted


def open_destination(
    given: str | LetterFunction | None,
    *,
    app: str,
    environ: Mapping[str, str],
    aws: Aws | None = None,
    leases_path: Path | None = None,
    redact: Redact | None = None,
    overflow: str | None = None,
) -> LetterWriter:
    """The destination of `DeadLetter(...)`. Nothing is opened or called yet: wrong values raise `ConfigurationError`.

    `leases_path` is the file of the leases, if they are in one: without a URL the letters are in a file beside it.
    """
    destination: SizedDestination
    warnings = []
    if given is None:
        destination = SqliteLetters(path := default_path(app, environ, leases_path))
        if leases_path is None:
            warnings = [f"they are in {path}, which workers on other machines do not share: name a destination"]
    elif isinstance(given, str):
        destination = open_url(given, aws=aws)
    elif callable(given):
        destination = FunctionLetters(given)
    else:
        raise ConfigurationError(f"{given!r} is not a dead-letter destination: pass {KNOWN}")
    if redact is not None and not callable(redact):
        raise ConfigurationError(f"redact={redact!r} must be a function that takes a Letter and returns one")
    large = None if overflow is None else open_overflow(overflow, aws)
    return LetterWriter(destination, redact=redact, overflow=large, warnings=warnings)


def default_path(app: str, environ: Mapping[str, str], leases_path: Path | None = None) -> Path:
    """The file of an application without a URL. In a container it is refused, as the leases' file is (rule U1)."""
    name = f"{quote(app, safe=' @+')}{LETTERS_SUFFIX}"
    if leases_path is not None:
        return leases_path.parent / name
    if (platform := container_platform(environ)) is not None:
        raise ConfigurationError(
            f"the dead letters of application {app!r} have no destination, and this is {platform}, where a file inside "
            f"the container is lost with it: write DeadLetter('sqs://{app}-failures'), or another of {KNOWN}"
        )
    folder = embedded_folder(environ)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / name


def open_url(url: str, *, aws: Aws | None = None) -> LetterBox | KinesisLetters:
    """Raises `ConfigurationError` if it names no destination."""
    scheme, _, _ = url.partition(":")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigurationError(f"{url!r} is not a dead-letter destination: pass {KNOWN_URLS}") from None
    if scheme == "sqlite":
        return SqliteLetters(sqlite_path(url, repr(url)))
    if scheme == "kinesis":
        try:
            return KinesisLetters(parse_stream(url.removeprefix("kinesis://")), aws=aws)
        except ValueError as error:
            raise ConfigurationError(f"{url!r}: write kinesis://STREAM: {error}") from None
    violations: list[str] = []
    options = url_options(parts, repr(url), ("region", "endpoint"), violations)
    refuse(violations)
    at = {"region": options.get("region"), "endpoint_url": options.get("endpoint")}
    name, path = unquote(parts.netloc), unquote(parts.path).strip("/")
    if scheme == "sqs":
        if _QUEUE.fullmatch(name) is None or path:
            raise ConfigurationError(f"{url!r}: write sqs://NAME, the name of a queue, not its URL")
        return SqsLetters(name, aws=aws, **at)
    if scheme == "s3":
        if _BUCKET.fullmatch(name) is None:
            raise ConfigurationError(f"{url!r}: write s3://bucket/prefix")
        return S3Letters(name, path, aws=aws, **at)
    hint = "" if ":" in url or not url else f"; for a file, write sqlite:{url}"
    raise ConfigurationError(f"{url!r} is not a dead-letter destination: pass {KNOWN_URLS}{hint}")


def open_box(url: str, *, aws: Aws | None = None) -> LetterBox:
    """A destination that can be read."""
    box = open_url(url, aws=aws)
    if isinstance(box, KinesisLetters):
        raise ConfigurationError(
            f"{url}: a stream of letters is read with a consumer, not with `dlq`: "
            "Consumer(stream, app=...), and decode_letter(record.data) of anabranch.letters for each record"
        )
    return box


def open_overflow(url: str, aws: Aws | None = None) -> OverflowBox:
    if url.startswith("file:"):
        return FolderLetters(local_path(url, f"overflow={url!r}"))
    box = open_url(url, aws=aws)
    if "endpoint" in dict(parse_qsl(urlsplit(url).query)):
        raise ConfigurationError(f"overflow={url!r}: set the endpoint in AWS_ENDPOINT_URL_S3, for readers to find it")
    if not isinstance(box, S3Letters):
        raise ConfigurationError(f"overflow={url!r} must be s3://bucket/prefix or file:///folder: they take any size")
    return box


async def fetch_whole(stored: StoredLetter, aws: Aws | None = None) -> Letter:
    """The letter, from the overflow if only a pointer is here."""
    if (pointer := stored.letter.overflow) is None:
        return stored.letter
    async with _in_overflow(pointer, aws) as (_, found):
        if found is None:
            raise DeadLetterError(f"{pointer} is gone: the letter has no payload any more", code="missing")
        return with_counts(found.letter, stored.letter)


def with_counts(letter: Letter, counted: Letter) -> Letter:
    """`letter` with the counts of `counted`. Counts are in the box, even if the whole letter is in the overflow."""
    return replace(
        letter,
        attempts=counted.attempts,
        attempted_seconds=counted.attempted_seconds,
        redrive_count=counted.redrive_count,
        redrives_cut_off=counted.redrives_cut_off,
    )


async def delete_overflow(letter: Letter, aws: Aws | None = None) -> None:
    """Deletes the letter's object in the overflow. Call it after the pointer is deleted."""
    if (pointer := letter.overflow) is None:
        return
    async with _in_overflow(pointer, aws) as (box, found):
        if found is not None:
            await box.delete(found)


@asynccontextmanager
async def _in_overflow(pointer: str, aws: Aws | None) -> AsyncIterator[tuple[OverflowBox, StoredLetter | None]]:
    """The overflow, and the letter that the pointer names; None if it is gone."""
    try:
        box = open_overflow(pointer, aws)
    except ConfigurationError as error:
        raise DeadLetterError(f"the letter's pointer is wrong: {error}", code="unusable") from error
    try:
        yield box, await box.fetch(pointer)
    except CodecError as error:
        raise DeadLetterError(f"{pointer}: {error}", code="unusable") from error
    finally:
        await box.close()
