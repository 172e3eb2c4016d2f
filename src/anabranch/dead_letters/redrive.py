"""`DeadLetters`: reads, redrives and removes the letters of one destination.

A redrive reads letters in key order, calls the handler or puts records back into the stream, and removes what
succeeded. Each letter is removed after its delivery, so a redrive that was stopped or killed is resumed by starting it
again; the letter at which it died may be delivered twice (rule D10). A redrive is counted in the letter before the
handler is called, so a letter that kills the process is not redriven forever. A letter that fails again is first
written to the review destination, then removed.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from time import monotonic, time
from types import TracebackType
from typing import Any, BinaryIO, Final, Protocol, Self, TypeVar

import msgspec

from anabranch._aws.kinesis_client import KinesisByRegion
from anabranch._core.backoff import backoff_ms, retry_pause_ms
from anabranch._core.handling.batches import BatchLimits
from anabranch._core.handling.failures import UndecodableError
from anabranch._core.redrive import (
    CUT_OFF_MAX,
    KILLED,
    LetterFilter,
    LetterGroup,
    RedriveReport,
    RedriveTally,
    begin_delivery,
    failed_again,
    group_letters,
    order_key,
)
from anabranch._engine.clock import SystemClock
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions, TimeLimit
from anabranch._engine.tasks import single_cause
from anabranch._model.kinds import check_types
from anabranch._model.streams import StreamName, parse_stream
from anabranch._ports import LetterDestination
from anabranch._wire.messages import PutRecordsEntry
from anabranch.config import Aws
from anabranch.dead_letters.destinations import HOLD_SECONDS, LetterBox, StoredLetter
from anabranch.dead_letters.opening import (
    LetterWriter,
    delete_overflow,
    fetch_whole,
    open_box,
    open_overflow,
    open_url,
    with_counts,
)
from anabranch.errors import ConfigurationError, DeadLetterError, TransportError
from anabranch.letters import Failure, Letter, encode_letter
from anabranch.policies import DeadLetter, Retry
from anabranch.records import Batch, Context, Record
from anabranch.values import decode_with

T = TypeVar("T")

_log = logging.getLogger(__name__)

ALL: Final = LetterFilter()
REDRIVE_POLICY: Final = Retry(attempts=3, backoff=1.0, backoff_max=60.0)
_UNREACHABLE_PAUSE_SECONDS: Final = 5.0
_RETRY_SECONDS_MAX: Final = 30.0
"""For how long a failed call to a destination is retried."""


# Delivery: to the handler, or back into the stream


class RegisteredHandler(msgspec.Struct, frozen=True):
    """What a redrive needs of a consumer."""

    handler: Callable[..., Any]
    batches: BatchLimits | None
    """None: it handles records."""
    options: HandlerOptions
    app: str | None = None
    streams: tuple[str, ...] = ()
    """Letters of other applications and streams are not for this handler."""

    def takes(self, letter: Letter) -> bool:
        return (self.app is None or letter.app == self.app) and (not self.streams or letter.stream in self.streams)


class HasHandler(Protocol):
    """A Consumer."""

    @property
    def registered_handler(self) -> RegisteredHandler: ...


class HandlerDelivery:
    """Calls the handler as a consumer does: decoded, in a thread if it is a plain function, within its timeout. There
    is no lease, so the fence token is 0; a batch handler gets a batch of one.
    """

    def __init__(self, registered: RegisteredHandler, concurrency: int) -> None:
        self._options = registered.options
        self._is_batch_handler = registered.batches is not None
        self._call = HandlerCall(registered.handler, threads=concurrency)
        self._limit = TimeLimit(SystemClock(), registered.options.policy.timeout)

    async def deliver(self, letter: Letter, attempt: int) -> None:
        """Raises what the handler raises."""
        record: Record[Any] = letter.record()
        if self._options.decode is not None:
            try:
                record = self._options.decode(record)
            except UndecodableError as error:
                raise error.cause from error
        item: Any = record
        if self._is_batch_handler:
            item = Batch(stream=record.stream, shard_id=record.shard_id, records=[record])
        context = Context(attempt=attempt, fence_token=0, deadline=self._limit.seconds)
        async with self._limit.of_call():
            await self._call(item, context, lambda: True)

    async def close(self) -> None:
        self._call.close()


class StreamDelivery:
    """Writes the record's bytes to the stream again, under its key. It arrives as a new record, after all others."""

    def __init__(self, stream: StreamName | None, aws: Aws | None) -> None:
        self._stream = stream
        self._kinesis = KinesisByRegion(aws)

    async def deliver(self, letter: Letter, attempt: int) -> None:  # noqa: ARG002 -- each attempt is the same
        """Raises why the stream did not take the record."""
        record = letter.record()
        entry = PutRecordsEntry(record.data, record.partition_key, record.explicit_hash_key)
        stream = self._stream or parse_stream(letter.stream)
        (result,) = (await self._kinesis.put_records(stream, [entry])).entries
        if result.error_code is not None:
            raise TransportError(f"{stream} did not take the record: {result.error_code}: {result.error_message}")

    async def close(self) -> None:
        await self._kinesis.close()


LetterDelivery = HandlerDelivery | StreamDelivery


# One redrive


class RedriveSettings(msgspec.Struct, frozen=True, kw_only=True):
    policy: Retry
    rate: float | None = None
    """Letters per second; None for no limit."""
    concurrency: int = 8
    """The number of keys that are handled at once."""
    failed: DeadLetter = DeadLetter()
    """`review`: where letters go that fail again. `redact` and `overflow` apply to them as to new ones: the new failure
    has a message and a stack of its own.
    """


@dataclass(kw_only=True)
class Redrive:
    box: LetterBox
    owner: str
    """Who holds the box: others wait until it lets go."""
    delivery: LetterDelivery
    settings: RedriveSettings
    review: LetterDestination | None
    accepts: Callable[[Letter], bool]
    stop: asyncio.Event
    on_progress: Callable[[RedriveReport], None]
    aws: Aws | None

    def __post_init__(self) -> None:
        self._tally = RedriveTally()
        self._entropy = SystemRandom()
        self._next_start = 0.0
        self._last_of_key: dict[tuple[str, str, str], asyncio.Task[None]] = {}

    async def run(self, wanted: LetterFilter) -> RedriveReport:
        """Delivers until no letter is left, or until it is stopped. Raises `DeadLetterError` if the box or the review
        destination fails, or if somebody else holds the box.
        """
        self._tally = RedriveTally()  # a worker runs again and again
        await self.box.hold(self.owner)
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._keep_hold())
                while await self._deliver_all(wanted) and self.box.reveals_more and not self.stop.is_set():
                    pass
                renewing.cancel()
        except BaseExceptionGroup as errors:
            raise single_cause(errors) or errors from None
        finally:
            with suppress(DeadLetterError):  # it expires by itself
                await self.box.release()
        return self.report

    @property
    def report(self) -> RedriveReport:
        return self._tally.report(len(self.box.unreadable))

    async def _keep_hold(self) -> None:
        renewed_at = monotonic()
        while True:
            await asyncio.sleep(HOLD_SECONDS / 3)
            try:
                await self.box.hold(self.owner)
            except DeadLetterError as error:
                if error.code == "locked" or not error.retryable or monotonic() - renewed_at > HOLD_SECONDS * 0.8:
                    raise
            else:
                renewed_at = monotonic()

    async def _deliver_all(self, wanted: LetterFilter) -> int:
        """Returns how many letters were read."""
        slots, count = asyncio.Semaphore(self.settings.concurrency), 0
        async with asyncio.TaskGroup() as group, aclosing(self.box.read()) as letters:
            async for stored in letters:
                count += 1
                if self.stop.is_set():
                    break
                if not (wanted.matches(stored.letter) and self.accepts(stored.letter)):
                    continue
                self._tally.add()
                # A letter whose delivery was cut off is delivered alone: if the process dies again, it is the cause.
                needed = self.settings.concurrency if stored.letter.redrives_cut_off else 1
                for _ in range(needed):
                    await slots.acquire()
                key = order_key(stored.letter)
                task = group.create_task(self._after(self._last_of_key.get(key), stored))
                self._last_of_key[key] = task
                task.add_done_callback(partial(self._on_done, key, slots, needed))
        return count

    def _on_done(
        self, key: tuple[str, str, str], slots: asyncio.Semaphore, needed: int, task: asyncio.Task[None]
    ) -> None:
        for _ in range(needed):
            slots.release()
        if self._last_of_key.get(key) is task:
            del self._last_of_key[key]
        self.on_progress(self.report)

    async def _after(self, previous: asyncio.Task[None] | None, stored: StoredLetter) -> None:
        """Delivers a letter when the earlier one of its key is done."""
        if previous is not None:
            await asyncio.wait([previous])
        letter = stored.letter
        if self._tally.is_held(letter):
            self._tally.settle(letter, "held_back")
            return
        await self._pace()
        if self.stop.is_set():
            return
        try:
            whole = await self._retry(lambda: fetch_whole(stored, self.aws))
        except DeadLetterError as error:
            if error.retryable:
                raise
            self._tally.settle(letter, "without_payload", str(error))
            return
        if whole.payload is None:
            self._tally.settle(letter, "without_payload")
            return
        if letter.redrives_cut_off >= CUT_OFF_MAX:
            await self._settle_failed(stored, whole, KILLED, ())
            return
        begun = await self._retry(lambda: self.box.begin(stored, begin_delivery(letter)))
        failure, calls_at = await self._deliver(whole)
        if failure is None:
            await self._remove(begun)
            self._tally.settle(letter, "delivered")
            _log.info("the letter of record %s was delivered", letter.place)
        elif not self.stop.is_set() or len(calls_at) >= self.settings.policy.attempts:
            await self._settle_failed(begun, whole, failure, calls_at)
        else:
            await self._retry(lambda: self.box.replace(begun, letter))  # stopped, not cut off

    async def _deliver(self, letter: Letter) -> tuple[Failure | None, tuple[float, ...]]:
        """Returns the last failure, None if a call succeeded, and when each call began."""
        calls_at: list[float] = []
        while True:
            calls_at.append(time())
            try:
                await self.delivery.deliver(letter, len(calls_at))
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # this redrive ends; a handler may raise it, too
                failure = Failure.of(error)
                policy, failed_count = self.settings.policy, len(calls_at)
                if failed_count >= policy.attempts:
                    return failure, tuple(calls_at)
                if await _is_set_within(self.stop, retry_pause_ms(policy, failed_count, self._entropy) / 1000):
                    return failure, tuple(calls_at)
            else:
                return None, tuple(calls_at)

    async def _settle_failed(
        self, stored: StoredLetter, whole: Letter, failure: Failure, calls_at: tuple[float, ...]
    ) -> None:
        """Moves the letter to the review destination. Without one, counts the failure in the stored letter, which keeps
        the message and the stack of its first failure.
        """
        review, latest, letter = self.review, failed_again(whole, failure, calls_at), stored.letter
        text = f"{failure.error_type}: {failure.message}"
        if review is not None:
            pointer = await self._retry(lambda: review.write(latest))
            await self._remove(stored, with_overflow=pointer is None)  # otherwise both may point to one object
            self._tally.settle(letter, "reviewed", text)
            _log.warning("the letter of record %s failed again, and went to review: %s", letter.place, text)
        else:
            await self._retry(lambda: self.box.replace(stored, with_counts(letter, latest)))
            self._tally.settle(letter, "failed", text)
            _log.warning("the letter of record %s failed again, and stays: %s", letter.place, text)

    async def _remove(self, stored: StoredLetter, *, with_overflow: bool = True) -> None:
        await self._retry(lambda: self.box.delete(stored))
        if with_overflow:
            await self._retry(lambda: delete_overflow(stored.letter, self.aws))

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retries a call for a while: if it failed, the whole letter would be delivered again."""
        give_up_at, failures = monotonic() + _RETRY_SECONDS_MAX, 0
        while True:
            try:
                return await call()
            except DeadLetterError as error:
                failures += 1
                if not error.retryable or monotonic() > give_up_at:
                    raise
                _log.warning("%s; trying again", error)
                await asyncio.sleep(backoff_ms(failures, self._entropy, first_ms=200, max_ms=5_000) / 1000)

    async def _pace(self) -> None:
        if self.settings.rate is None:
            return
        now = monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 1 / self.settings.rate
        await _is_set_within(self.stop, start - now)


# The facade: it opens the box, and decides nothing


class DeadLetters:
    """The dead letters at a URL: `sqs://NAME`, `s3://bucket/prefix` or `sqlite:///path`.

    An `async with` block closes it. SQS has no list: reading a queue hides its letters from others meanwhile, and for
    up to a minute after a crash, and raises their receive counts.
    """

    def __init__(self, url: str, *, aws: Aws | None = None) -> None:
        check_types({"url": url, "aws": aws}, {"url": str, "aws": Aws | None})
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
        """Describes what was found that is not a letter. It stays there."""
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
        """The approximate number: SQS does not know it exactly."""
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
                    text = "the letter of record %s has no payload: %s is gone, or is not a letter"
                    _log.warning(text, letter.place, pointer)
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
                await box.release()
            await box.close()

    # changing

    async def delete(self, where: LetterFilter) -> int:
        """Deletes letters for good. Returns their number."""
        count = 0
        async with self._reading() as box:
            while True:
                before = count
                async with aclosing(_matching(box, where)) as found:
                    async for stored in found:
                        await box.delete(stored)
                        count += 1
                        await self._delete_overflow(stored.letter)
                if count == before or not box.reveals_more:
                    return count

    async def _delete_overflow(self, letter: Letter) -> None:
        """Anybody may have written the pointer, so a wrong one does not keep other letters from being deleted."""
        try:
            await delete_overflow(letter, self._aws)
        except DeadLetterError as error:
            if error.code not in {"missing", "unusable"}:
                raise
            _log.warning(
                "the letter of record %s was deleted, its object in the overflow was not: %s", letter.place, error
            )

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
        async with self._prepared(delivery, settings, registered.takes, stop, on_progress) as redrive:
            return await redrive.run(where)

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
            target = None if stream is None else parse_stream(stream)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        if dry_run:
            return await self._count(where, lambda _: True)
        delivery = StreamDelivery(target, self._aws)
        async with self._prepared(delivery, settings, lambda _: True, stop, on_progress) as redrive:
            return await redrive.run(where)

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
        if settings.failed.review is None:
            raise ConfigurationError(
                "a worker needs a review destination for letters that keep failing: pass review=, or set "
                "DeadLetter(review=...) in the consumer's policy"
            )
        while not stop.is_set():
            delivery = HandlerDelivery(registered, concurrency)
            try:
                await self._box.check(0)  # creates the file: the worker may start before the consumer
                async with self._prepared(delivery, settings, registered.takes, stop, on_progress) as redrive:
                    while not stop.is_set():
                        await redrive.run(ALL)
                        await _is_set_within(stop, idle)
            except DeadLetterError as error:
                if not error.retryable:
                    raise
                _log.warning("%s; trying again", error)
                await _is_set_within(stop, max(idle, _UNREACHABLE_PAUSE_SECONDS))

    @asynccontextmanager
    async def _prepared(
        self,
        delivery: LetterDelivery,
        settings: RedriveSettings,
        accepts: Callable[[Letter], bool],
        stop: asyncio.Event | None,
        on_progress: Callable[[RedriveReport], None],
    ) -> AsyncIterator[Redrive]:
        """The review destination is open and checked."""
        review = None
        self._unreadable = self._box.unreadable
        try:
            review = self._open_review(settings.failed)
            for warning in [] if review is None else await review.check(0):
                _log.warning("%s", warning)
            yield Redrive(
                box=self._box,
                owner=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
                delivery=delivery,
                settings=settings,
                review=review,
                accepts=accepts,
                stop=stop or asyncio.Event(),
                on_progress=on_progress,
                aws=self._aws,
            )
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

    def _open_review(self, failed: DeadLetter) -> LetterWriter | None:
        if failed.review is None:
            return None
        destination = open_url(failed.review, aws=self._aws)
        if str(destination) == str(self._box):
            raise ConfigurationError(f"the review destination {destination} is where the letters are: name another")
        overflow = None if failed.overflow is None else open_overflow(failed.overflow, self._aws)
        return LetterWriter(destination, redact=failed.redact, overflow=overflow)


async def _matching(box: LetterBox, where: LetterFilter) -> AsyncGenerator[StoredLetter, None]:
    async with aclosing(box.read()) as letters:
        async for stored in letters:
            if where.matches(stored.letter):
                yield stored


async def _is_set_within(stop: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    return stop.is_set()


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
    """The consumer's policy has the overflow, `redact` and, if `review` is None, the review destination."""
    given = {"policy": policy, "rate": rate, "concurrency": concurrency, "review": review}
    kinds = {"policy": Retry, "rate": float | None, "concurrency": int, "review": str | None}
    check_types(given, kinds)
    if rate is not None and not rate > 0:
        raise ConfigurationError(f"rate is {rate}; it must be positive, or None for no limit")
    if concurrency < 1:
        raise ConfigurationError(f"concurrency is {concurrency}; it must be at least 1")
    then = None if registered is None else registered.options.policy.then
    usual = then if isinstance(then, DeadLetter) else DeadLetter()
    failed = replace(usual, review=review or usual.review)
    return RedriveSettings(policy=policy, rate=rate, concurrency=concurrency, failed=failed)
