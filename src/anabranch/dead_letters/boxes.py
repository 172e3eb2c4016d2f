"""The protocols of the destinations of dead letters, and `DeadLetterError` for what AWS answers."""

from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol

import msgspec

from anabranch._ports import LetterDestination
from anabranch.errors import (
    AccessDeniedError,
    AnabranchError,
    CredentialsError,
    DeadLetterError,
    ServiceError,
    ThrottledError,
)
from anabranch.letters import Letter

HOLD_SECONDS: Final = 60.0
"""How long letters stay held by a redrive that has died. A running one renews its hold three times as often."""
RETENTION_HOURS_WANTED: Final = 14 * 24
"""People need time to look at letters: SQS cannot keep them for longer."""


class StoredLetter(msgspec.Struct, frozen=True):
    letter: Letter
    handle: Any
    """What the box needs to find the letter again."""


class SizedDestination(LetterDestination, Protocol):
    def __str__(self) -> str:
        """Its URL, without secrets."""

    async def limit_bytes(self) -> int | None:
        """The size of the largest letter that it takes, as JSON; None for any size."""


class LetterBox(SizedDestination, Protocol):
    """A destination that can be read. Letters come in stream order, as far as it can tell."""

    reveals_more: bool
    """Whether deleting letters makes later ones visible. If so, callers read again until nothing is left."""
    unreadable: list[str]
    """What was found that is not a letter. It is left there, and reported."""

    async def count(self) -> int:
        """About how many letters there are."""

    async def hold(self, owner: str) -> None:
        """Keeps others from redriving until `let_go`, or until the hold is not renewed in time. Raises
        `DeadLetterError` with the code `locked` if somebody else holds it.
        """

    async def renew(self) -> None:
        """Raises as `hold` does if the hold was lost."""

    async def let_go(self) -> None: ...

    def read(self) -> AsyncGenerator[StoredLetter, None]:
        """Each letter once. May include letters that are written meanwhile."""

    async def begin(self, stored: StoredLetter, letter: Letter) -> StoredLetter:
        """Writes the letter with the delivery that is about to begin, so that the count outlives the process."""

    async def replace(self, stored: StoredLetter, letter: Letter) -> None:
        """Writes the counts of a failed redrive into the stored letter. Does nothing if it is gone, or if it would lose
        its place among the letters of its key.
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
    """A failed call to AWS, as what it means for dead letters."""
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
