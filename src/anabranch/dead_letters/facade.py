"""`DeadLetters`: the letters of one destination. A facade: opens the box, and decides nothing."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from anabranch._core.redrive import LetterFilter, LetterGroup, RedriveReport, RedriveTally, group_letters
from anabranch._engine.handler_calls import HandlerOptions
from anabranch._model.kinds import type_violations
from anabranch._model.streams import parse_stream
from anabranch.config import Aws
from anabranch.dead_letters.boxes import LetterBox, StoredLetter
from anabranch.dead_letters.delivery import (
    HandlerDelivery,
    HasHandler,
    LetterDelivery,
    RegisteredHandler,
    StreamDelivery,
)
from anabranch.dead_letters.opening import (
    LetterWriter,
    delete_overflow,
    fetch_whole,
    open_box,
    open_overflow,
    open_url,
)
from anabranch.dead_letters.redrive import Redrive, RedriveSettings
from anabranch.errors import ConfigurationError, DeadLetterError
from anabranch.letters import Letter, encode_letter
from anabranch.policies import DeadLetter, Retry
from anabranch.values import decode_with

__all__ = ["DeadLetters"]

_log = logging.getLogger(__name__)

ALL: Final = LetterFilter()
REDRIVE_POLICY: Final = Retry(attempts=3, backoff=1.0, backoff_max=60.0)
_UNREACHABLE_PAUSE_SECONDS: Final = 5.0


class DeadLetters:
    """The dead letters at a URL: `sqs://NAME`, `s3://bucket/prefix` or `sqlite:///path`.

    An `async with` block closes it. SQS has no list: reading a queue hides its letters from others meanwhile, and for
    up to a minute after a crash, and raises their receive counts.
    """

    def __init__(self, url: str, *, aws: Aws | None = None) -> None:
        if wrong := type_violations({"url": url, "aws": aws}, {"url": str, "aws": Aws | None}):
            raise ConfigurationError(wrong)
        self._url = url
        self._aws = aws
        self._box = open_box(url, aws=aws)
        self._unreadable = self._box.unreadable

    def __repr__(self) -> str:
        return f"DeadLetters({str(self._box)!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._box.close()

    @property
    def unreadable(self) -> tuple[str, ...]:
        """What was found that is not a letter. It is left there."""
        return tuple(self._unreadable)

    # reading

    async def letters(self, where: LetterFilter = ALL) -> AsyncIterator[Letter]:
        """In stream order, as far as the destination can tell. Letters in an overflow come without their payload;
        `get` has it.
        """
        async with self._reading() as box, aclosing(_matching(box, where)) as found:
            async for stored in found:
                yield stored.letter

    async def count(self) -> int:
        """About how many there are: SQS does not know exactly."""
        return await self._box.count()

    async def groups(self, where: LetterFilter = ALL) -> list[LetterGroup]:
        """By fingerprint, the largest group first."""
        return group_letters([letter async for letter in self.letters(where)])

    async def get(self, letter: str) -> Letter:
        """The whole letter with this idempotency key, or with a key that begins so. If its object in the overflow is
        gone, the letter has no payload, and `overflow` names the object.
        """
        async with self._reading() as box, aclosing(_matching(box, LetterFilter(letter=letter))) as found:
            fitting = [stored async for stored in found]
        if len(fitting) != 1:
            count = f"{len(fitting)} letters begin" if fitting else "no letter begins"
            advice = "give more digits" if fitting else "`anabranch dlq ls --letters` has the first digits of each"
            raise DeadLetterError(f"{count} with {letter!r} in {self._box}", code="missing", advice=advice)
        return await self._whole_if_possible(fitting[0])

    async def export(self, path: str | Path, where: LetterFilter = ALL) -> int:
        """Writes whole letters to a file, one JSON object per line. Returns their number. The file is complete, or not
        there. A letter whose object in the overflow is gone has no payload, and `overflow` names the object.
        """
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with unfinished.open("wb") as file:
                count = await self._export(file, where)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return count

    async def _export(self, file: BinaryIO, where: LetterFilter) -> int:
        count = 0
        async with self._reading() as box, aclosing(_matching(box, where)) as found:
            async for stored in found:
                letter = await self._whole_if_possible(stored)
                if (pointer := letter.overflow) is not None:
                    _log.warning(
                        "the letter of record %s has no payload: %s is gone, or no letter", letter.place, pointer
                    )
                file.write(encode_letter(letter) + b"\n")
                count += 1
        return count

    async def _whole_if_possible(self, stored: StoredLetter) -> Letter:
        try:
            return await fetch_whole(stored, self._aws)
        except DeadLetterError as error:
            if error.code not in {"missing", "unusable"}:
                raise
            return stored.letter

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[LetterBox]:
        """Opens another box, so that closing it does not release what a redrive of this object holds."""
        box = open_box(self._url, aws=self._aws)
        self._unreadable = box.unreadable
        try:
            yield box
        finally:
            with suppress(DeadLetterError):  # what SQS hid comes back by itself
                await box.let_go()
            await box.close()

    # changing

    async def delete(self, where: LetterFilter) -> int:
        """Deletes letters for good. Returns their number."""
        count = 0
        async with self._reading() as box:
            while deleted := await self._delete(box, where):
                count += deleted
                if not box.reveals_more:
                    break
        return count

    async def _delete(self, box: LetterBox, where: LetterFilter) -> int:
        count = 0
        async with aclosing(_matching(box, where)) as found:
            async for stored in found:
                await box.delete(stored)
                await delete_overflow(stored.letter, self._aws)
                count += 1
        return count

    async def redrive(
        self,
        handler: HasHandler | Callable[..., Any],
        *,
        where: LetterFilter = ALL,
        policy: Retry = REDRIVE_POLICY,
        review: str | None = None,
        rate: float | None = None,
        concurrency: int = 8,
        dry_run: bool = False,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[RedriveReport], None] = lambda _: None,
    ) -> RedriveReport:
        """Calls the handler of a consumer, or a function, with the record of each letter. The letters of a key are
        handled in their order; `concurrency` keys at once, `rate` letters per second.

        What succeeds is removed. What fails after the attempts of `policy` goes to the `review` destination (by default
        that of the consumer's `DeadLetter`); without one it stays, and so do the later letters of its key. It can be
        stopped, or killed, at any time and started again.
        """
        registered = _registered(handler)
        settings = _settings(policy, rate, concurrency, review, registered)
        if dry_run:
            return await self._count(where, registered.takes)
        delivery = HandlerDelivery(registered, concurrency)
        async with self._prepared(delivery, settings, registered.takes, stop, on_progress) as run:
            return await run(where)

    async def put_back(
        self,
        stream: str | None = None,
        *,
        where: LetterFilter = ALL,
        policy: Retry = REDRIVE_POLICY,
        review: str | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[RedriveReport], None] = lambda _: None,
    ) -> RedriveReport:
        """Writes the record of each letter to the stream again, with its bytes and key: to its own stream, or to
        another. It arrives there as a new record, after those that came since.
        """
        settings = _settings(policy, rate, 1, review)
        try:
            delivery = StreamDelivery(None if stream is None else parse_stream(stream), self._aws)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        if dry_run:
            return await self._count(where, lambda _: True)
        async with self._prepared(delivery, settings, lambda _: True, stop, on_progress) as run:
            return await run(where)

    async def work(
        self,
        handler: HasHandler | Callable[..., Any],
        *,
        policy: Retry = REDRIVE_POLICY,
        review: str | None = None,
        rate: float | None = None,
        concurrency: int = 8,
        idle: float = 5.0,
        stop: asyncio.Event | None = None,
        on_progress: Callable[[RedriveReport], None] = lambda _: None,
    ) -> None:
        """Redrives letters as they arrive, until `stop` is set. Needs a review destination: without one, a failing
        letter would be tried forever.
        """
        registered, stop = _registered(handler), stop or asyncio.Event()
        settings = _settings(policy, rate, concurrency, review, registered)
        if settings.review is None:
            raise ConfigurationError(
                "a worker needs a review destination for letters that keep failing: pass review=, or set "
                "DeadLetter(review=...) in the consumer's policy"
            )
        while not stop.is_set():
            delivery = HandlerDelivery(registered, concurrency)
            try:
                await self._box.check(0)  # makes a file, as a consumer does: either may start first
                async with self._prepared(delivery, settings, registered.takes, stop, on_progress) as run:
                    while not stop.is_set():
                        await run(ALL)
                        await _wait(stop, idle)
            except DeadLetterError as error:
                if not error.retryable:
                    raise
                _log.warning("%s; trying again", error)
                await _wait(stop, max(idle, _UNREACHABLE_PAUSE_SECONDS))

    @asynccontextmanager
    async def _prepared(
        self,
        delivery: LetterDelivery,
        settings: RedriveSettings,
        accepts: Callable[[Letter], bool],
        stop: asyncio.Event | None,
        on_progress: Callable[[RedriveReport], None],
    ) -> AsyncIterator[Callable[[LetterFilter], Awaitable[RedriveReport]]]:
        """Yields a function that redrives once. The review destination is open and checked."""
        owner, review = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}", None

        def run(where: LetterFilter) -> Awaitable[RedriveReport]:
            redrive = Redrive(
                self._box,
                delivery,
                settings,
                review=review,
                accepts=accepts,
                stop=stop or asyncio.Event(),
                on_progress=on_progress,
                aws=self._aws,
            )
            return redrive.run(where, owner)

        self._unreadable = self._box.unreadable
        try:
            review = self._open_review(settings)
            for warning in [] if review is None else await review.check(0):
                _log.warning("%s", warning)
            yield run
        finally:
            await delivery.close()
            if review is not None:
                await review.close()

    async def _count(self, where: LetterFilter, accepts: Callable[[Letter], bool]) -> RedriveReport:
        tally = RedriveTally()
        async for letter in self.letters(where):
            if accepts(letter):
                tally.add()
        return tally.report(len(self._unreadable))

    def _open_review(self, settings: RedriveSettings) -> LetterWriter | None:
        if settings.review is None:
            return None
        destination = open_url(settings.review, aws=self._aws)
        if str(destination) == str(self._box):
            raise ConfigurationError(f"the review destination {destination} is where the letters are: name another")
        overflow = None if settings.overflow is None else open_overflow(settings.overflow, self._aws)
        return LetterWriter(destination, redact=settings.redact, overflow=overflow)


async def _matching(box: LetterBox, where: LetterFilter) -> AsyncGenerator[StoredLetter, None]:
    async with aclosing(box.read()) as letters:
        async for stored in letters:
            if where.matches(stored.letter):
                yield stored


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


def _registered(handler: HasHandler | Callable[..., Any]) -> RegisteredHandler:
    found: RegisteredHandler | None = getattr(handler, "registered_handler", None)
    if found is not None:
        return found
    if not callable(handler):
        raise ConfigurationError(f"redrive needs a consumer with a handler, or a function, not {handler!r}")
    options = HandlerOptions(order="key", concurrency=1, decode=decode_with(bytes), policy=Retry())
    return RegisteredHandler(handler, None, options)


def _settings(
    policy: Retry,
    rate: float | None,
    concurrency: int,
    review: str | None,
    registered: RegisteredHandler | None = None,
) -> RedriveSettings:
    """The review destination is that of the consumer's policy, unless it is given. The overflow and `redact` always
    are.
    """
    given = {"policy": policy, "rate": rate, "concurrency": concurrency, "review": review}
    kinds = {"policy": Retry, "rate": float | None, "concurrency": int, "review": str | None}
    if wrong := type_violations(given, kinds):
        raise ConfigurationError(wrong)
    if rate is not None and not rate > 0:
        raise ConfigurationError(f"rate is {rate}; it must be positive, or None for no limit")
    if concurrency < 1:
        raise ConfigurationError(f"concurrency is {concurrency}; it must be at least 1")
    then = None if registered is None else registered.options.policy.then
    usual = then if isinstance(then, DeadLetter) else DeadLetter()
    return RedriveSettings(
        policy=policy,
        rate=rate,
        concurrency=concurrency,
        review=review or usual.review,
        overflow=usual.overflow,
        redact=usual.redact,
    )
