"""Delivers letters again: reads them in key order, calls the handler or puts records back, and removes what succeeded.

Each letter is removed after its delivery, so a redrive that was stopped or killed is resumed by starting it again; the
letter at which it died may be delivered twice (rule D10). A redrive is counted in the letter before it calls, so a
letter that kills the process is not redriven forever. One that fails again is first written to the review destination,
then removed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from random import SystemRandom
from time import monotonic, time
from typing import Final, TypeVar

import msgspec

from anabranch._core.backoff import backoff_ms, retry_in_ms
from anabranch._core.redrive import (
    CUT_OFF_MAX,
    KILLED,
    LetterFilter,
    RedriveOutcome,
    RedriveReport,
    RedriveTally,
    begin_delivery,
    failed_again,
    order_key,
)
from anabranch._engine.tasks import single_cause
from anabranch._ports import LetterDestination
from anabranch.config import Aws
from anabranch.dead_letters.boxes import HOLD_SECONDS, LetterBox, StoredLetter
from anabranch.dead_letters.delivery import LetterDelivery
from anabranch.dead_letters.opening import Redact, delete_overflow, fetch_whole, with_counts
from anabranch.errors import DeadLetterError
from anabranch.letters import Failure, Letter
from anabranch.policies import Retry

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MOVED: Final = {"reviewed": "went to review", "failed": "stays"}
_RETRY_SECONDS_MAX: Final = 30.0
"""For how long a failed call to a destination is retried."""


class RedriveSettings(msgspec.Struct, frozen=True, kw_only=True):
    policy: Retry
    rate: float | None = None
    """Letters per second; None for as fast as it goes."""
    concurrency: int = 8
    """How many keys at once."""
    review: str | None = None
    """Where letters go that fail again."""
    overflow: str | None = None
    """Where such a letter goes if it is too large for the review destination."""
    redact: Redact | None = None
    """Applied to such a letter before it is written: the new failure has a message and a stack of its own."""


class Redrive:
    def __init__(
        self,
        box: LetterBox,
        delivery: LetterDelivery,
        settings: RedriveSettings,
        *,
        review: LetterDestination | None,
        accepts: Callable[[Letter], bool],
        stop: asyncio.Event,
        on_progress: Callable[[RedriveReport], None],
        aws: Aws | None,
    ) -> None:
        self._box = box
        self._delivery = delivery
        self._settings = settings
        self._review = review
        self._accepts = accepts
        self._stop = stop
        self._on_progress = on_progress
        self._aws = aws
        self._tally = RedriveTally()
        self._entropy = SystemRandom()
        self._next_start = 0.0
        self._last_of_key: dict[tuple[str, str, str], asyncio.Task[None]] = {}

    async def run(self, wanted: LetterFilter, owner: str) -> RedriveReport:
        """Delivers until no letter is left, or until it is stopped. Raises `DeadLetterError` if the box or the review
        destination fails, or if somebody else holds the box.
        """
        async with self._holding(owner):
            try:
                async with asyncio.TaskGroup() as group:
                    renewing = group.create_task(self._keep_hold())
                    while await self._deliver_all(wanted) and self._box.reveals_more and not self._stop.is_set():
                        pass
                    renewing.cancel()
            except BaseExceptionGroup as errors:
                raise single_cause(errors) or errors from None
        return self.report

    @property
    def report(self) -> RedriveReport:
        return self._tally.report(len(self._box.unreadable))

    @asynccontextmanager
    async def _holding(self, owner: str) -> AsyncIterator[None]:
        await self._box.hold(owner)
        try:
            yield
        finally:
            with suppress(DeadLetterError):  # it expires by itself
                await self._box.let_go()

    async def _keep_hold(self) -> None:
        renewed_at = monotonic()
        while True:
            await asyncio.sleep(HOLD_SECONDS / 3)
            try:
                await self._box.renew()
            except DeadLetterError as error:
                if error.code == "locked" or not error.retryable or monotonic() - renewed_at > HOLD_SECONDS * 0.8:
                    raise
            else:
                renewed_at = monotonic()

    async def _deliver_all(self, wanted: LetterFilter) -> int:
        """Returns how many letters were read."""
        slots, count = asyncio.Semaphore(self._settings.concurrency), 0
        async with asyncio.TaskGroup() as group, aclosing(self._box.read()) as letters:
            async for stored in letters:
                count += 1
                if self._stop.is_set():
                    break
                if not (wanted.matches(stored.letter) and self._accepts(stored.letter)):
                    continue
                self._tally.add()
                # If a process died during its delivery, it is delivered alone: no other letter can be the cause then.
                needed = self._settings.concurrency if stored.letter.redrives_cut_off else 1
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
        self._on_progress(self.report)

    async def _after(self, previous: asyncio.Task[None] | None, stored: StoredLetter) -> None:
        """Delivers a letter when the earlier one of its key is done."""
        if previous is not None:
            await asyncio.wait([previous])
        letter = stored.letter
        if self._tally.is_held(letter):
            self._tally.settle(letter, "held_back")
            return
        await self._pace()
        if self._stop.is_set():
            return
        try:
            whole = await self._retry(lambda: fetch_whole(stored, self._aws))
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
        begun = await self._retry(lambda: self._box.begin(stored, begin_delivery(letter)))
        failure, calls_at = await self._deliver(whole)
        if failure is None:
            await self._remove(begun)
            self._tally.settle(letter, "delivered")
            _log.info("the letter of record %s was delivered", letter.place)
        elif not self._stop.is_set() or len(calls_at) >= self._settings.policy.attempts:
            await self._settle_failed(begun, whole, failure, calls_at)
        else:
            await self._retry(lambda: self._box.replace(begun, letter))  # stopped, not cut off

    async def _deliver(self, letter: Letter) -> tuple[Failure | None, tuple[float, ...]]:
        """Returns the last failure, None if a call succeeded, and when each call began."""
        calls_at: list[float] = []
        while True:
            calls_at.append(time())
            try:
                await self._delivery.deliver(letter, len(calls_at))
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # this redrive ends; a handler may raise it, too
                failure = Failure.of(error)
                pause_ms = retry_in_ms(self._settings.policy, len(calls_at), self._entropy)
                if pause_ms is None or await self._is_stopped_within(pause_ms / 1000):
                    return failure, tuple(calls_at)
            else:
                return None, tuple(calls_at)

    async def _settle_failed(
        self, stored: StoredLetter, whole: Letter, failure: Failure, calls_at: tuple[float, ...]
    ) -> None:
        outcome = await self._move(stored, whole, failure, calls_at)
        text = f"{failure.error_type}: {failure.message}"
        self._tally.settle(stored.letter, outcome, text)
        _log.warning("the letter of record %s failed again, and %s: %s", stored.letter.place, _MOVED[outcome], text)

    async def _move(
        self, stored: StoredLetter, whole: Letter, failure: Failure, calls_at: tuple[float, ...]
    ) -> RedriveOutcome:
        """Moves the letter to the review destination. Without one, counts the failure in the stored letter, which keeps
        the message and the stack of its first failure.
        """
        review, latest = self._review, failed_again(whole, failure, calls_at)
        if review is not None:
            pointer = await self._retry(lambda: review.write(latest))
            await self._remove(stored, with_overflow=pointer is None)  # otherwise both may point to one object
            return "reviewed"
        counted = with_counts(stored.letter, latest)
        await self._retry(lambda: self._box.replace(stored, counted))
        return "failed"

    async def _remove(self, stored: StoredLetter, *, with_overflow: bool = True) -> None:
        await self._retry(lambda: self._box.delete(stored))
        if with_overflow:
            await self._retry(lambda: delete_overflow(stored.letter, self._aws))

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
        if self._settings.rate is None:
            return
        now = monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 1 / self._settings.rate
        await self._is_stopped_within(start - now)

    async def _is_stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), max(0.0, seconds))
        return self._stop.is_set()
