"""How the lease core talks to the store: one call after another, each with the time of its answer.

The base of `LeaseMachine`. It repeats calls without an answer, counts failures, and recognises the application. It
knows nothing of leases.
"""

from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

from anabranch._core.backoff import backoff_ms
from anabranch._core.leases.store_calls import Moment, NoAnswer, ReadApp, Steps, StoreCall, Wait
from anabranch._model.entropy import Entropy
from anabranch._model.leases import AppRow
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.events import StoreAnswered, StoreReset, StoreUnanswered

T = TypeVar("T")

RETRY_MS: Final = 500
THROTTLED_RETRY_MS_MAX: Final = 8_000
TRIES_MAX: Final = 60
FAILURES_REPORTED_MIN: Final = 2
"""From so many failures in a row on, they are reported. A single one may be chance."""


class StoreDialogue:
    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        self.app = AppRow(app="", app_id="", created_wall_ms=0)
        """As it was opened."""
        self.trouble: NoAnswer | None = None
        """Why the last store call had no answer; None if it had one."""
        self._moment = Moment(0, 0)
        self._changes: list[Any] = []
        self._failure_count = 0
        """Store calls without an answer. After one, the next call may reach another storage (rule L13)."""

    def ask(self, call: StoreCall[T], moment: Moment) -> Steps[T | NoAnswer]:
        """A read, or a write whose outcome no lease depends on."""
        self._moment = moment
        return (yield from self._ask(call))

    def _ask(self, call: StoreCall[T]) -> Steps[T | NoAnswer]:
        try:
            answer = yield call
        except BaseException:
            self._failure_count += 1  # cancelled, or refused for good: it may have taken effect
            raise
        self._moment = answer.moment
        value: T | NoAnswer = answer.value
        if isinstance(value, NoAnswer):
            self._failure_count += 1
            self.trouble = value
        else:
            self.trouble = None
        return value

    def _ask_until_answered(self, make: Callable[[], StoreCall[T]]) -> Steps[T]:
        """The answer of the first try that has one. An unreachable store delays a start, which gives up in the end."""
        return (yield from self._repeat(lambda: self._ask(make())))

    def _repeat(self, attempt: Callable[[], Steps[T | NoAnswer]]) -> Steps[T]:
        """The result of the first attempt in which every call has an answer."""
        began_ms = self._moment.now_ms
        for tries in range(1, TRIES_MAX + 1):
            result = yield from attempt()
            if not isinstance(result, NoAnswer):
                if tries > FAILURES_REPORTED_MIN:
                    seconds = (self._moment.now_ms - began_ms) / 1000
                    self._changes.append(StoreAnswered(failure_count=tries - 1, seconds=seconds))
                return result
            self._report_unanswered(tries)
            yield from self._wait(self._retry_pause_ms(tries))
        assert self.trouble is not None
        raise LeaseStoreError(f"{self.trouble.error}, {TRIES_MAX} times in a row", code=self.trouble.code)

    def _retry_pause_ms(self, failures: int) -> int:
        """Workers that start together throttle each other, so their pauses grow and differ."""
        if self.trouble is None or self.trouble.code != "throttled":
            return RETRY_MS
        return backoff_ms(failures, self._entropy, first_ms=RETRY_MS, max_ms=THROTTLED_RETRY_MS_MAX, min_share=0.5)

    def _wait(self, duration_ms: int, *, wakeable: bool = False) -> Steps[None]:
        self._moment = (yield Wait(self._moment.now_ms + duration_ms, wakeable=wakeable)).moment

    def _report_unanswered(self, failures: int) -> None:
        """From the second failure on, then less and less often."""
        if failures >= FAILURES_REPORTED_MIN and failures & (failures - 1) == 0:
            assert self.trouble is not None
            error, code = self.trouble.error, self.trouble.code
            self._changes.append(StoreUnanswered(error=error, code=code, failure_count=failures))

    # the application

    def _find_app(self) -> Steps[AppRow | NoAnswer]:
        """Raises if the application is gone, or another is in its place (rule L14)."""
        app = yield from self._ask(ReadApp())
        return app if isinstance(app, NoAnswer) else self._recognise(app)

    def _recognise(self, app: AppRow | None) -> AppRow:
        if app is None or app.app_id != self.app.app_id:
            self.raise_store_reset()
        return self._check_place(app)

    def _check_place(self, app: AppRow) -> AppRow:
        """Raises unless the application lives in this store. A copy and a start may run at the same time: each checks
        this after its own write.
        """
        if app.place == "moved":
            raise LeaseStoreInvalidError(
                f"application {app.app!r} was moved to {app.other_url}",
                code="moved",
                advice="name that store in leases=",
            )
        if app.place != "here":
            way = "moved to" if app.place == "leaving" else "copied here from"
            raise LeaseStoreInvalidError(
                f"application {app.app!r} is being {way} {app.other_url}, and the copy is not complete",
                code="moved",
                advice="repeat `anabranch apps copy`",
            )
        return app

    def raise_store_reset(self) -> NoReturn:
        """The application is gone from the store, or is another one. Nothing is created in its place (rule L14)."""
        self._changes.append(StoreReset())
        raise LeaseStoreInvalidError(
            f"the lease store no longer holds application {self.app.app!r} as this worker knows it: it was "
            "emptied, restored or replaced. Nothing was created in its place; check the store, then start again."
        )
