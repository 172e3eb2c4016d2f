"""What a redrive decides: which letters it selects, how it groups them, and which wait for an earlier one of their key.

Letters come in stream order, and those of one key are redriven one after another. A letter that fails again and stays
where it is holds back the later ones of its key (rule D10).
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from anabranch.letters import Failure, Letter

CUT_OFF_MAX: Final = 3
"""If the process died in this many redrives of a letter, the letter counts as failed."""
KILLED: Final = Failure(
    error_type="ProcessDied",
    message="the process died, or was killed, in each of three redrives of this letter",
    fingerprint="process-died",
)

RedriveOutcome: TypeAlias = Literal["delivered", "reviewed", "failed", "held_back", "without_payload"]


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the letters that match all given values."""

    fingerprint: str | None = None
    """The fingerprint of the failure, or its first digits."""
    key: str | None = None
    """The partition key of the record."""
    letter: str | None = None
    """The idempotency key of the letter, or its first digits."""
    since_seconds: float | None = None
    """Written at that time or later, in seconds since 1970."""
    until_seconds: float | None = None

    def matches(self, letter: Letter) -> bool:
        return (
            (self.fingerprint is None or letter.fingerprint.startswith(self.fingerprint))
            and (self.key is None or letter.partition_key == self.key)
            and (self.letter is None or letter.idempotency_key.startswith(self.letter))
            and (self.since_seconds is None or letter.written_seconds >= self.since_seconds)
            and (self.until_seconds is None or letter.written_seconds < self.until_seconds)
        )


class LetterGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The letters of one kind of failure."""

    fingerprint: str
    error_type: str
    message: str
    """Of the newest letter."""
    count: int
    keys: int
    """How many partition keys they have."""
    first_seconds: float
    last_seconds: float
    redriven: int
    """How many of them were redriven before, and failed again."""


def group_letters(letters: Iterable[Letter]) -> list[LetterGroup]:
    """The largest group first."""
    members: dict[str, list[Letter]] = {}
    for letter in letters:
        members.setdefault(letter.fingerprint, []).append(letter)
    groups = [_group(fingerprint, found) for fingerprint, found in members.items()]
    return sorted(groups, key=lambda group: (-group.count, group.fingerprint))


def _group(fingerprint: str, found: list[Letter]) -> LetterGroup:
    newest = max(found, key=lambda letter: letter.written_seconds)
    return LetterGroup(
        fingerprint=fingerprint,
        error_type=newest.error_type,
        message=newest.message,
        count=len(found),
        keys=len({(letter.stream, letter.partition_key) for letter in found}),
        first_seconds=min(letter.written_seconds for letter in found),
        last_seconds=newest.written_seconds,
        redriven=sum(letter.redrive_count > 0 for letter in found),
    )


def order_key(letter: Letter) -> tuple[str, str, str]:
    """Letters with the same order key are redriven one after another. A letter without a partition key has its own."""
    return letter.app, letter.stream, letter.partition_key or letter.idempotency_key


def begin_delivery(letter: Letter) -> Letter:
    """The letter as it is stored before the handler is called (rule D10)."""
    return replace(letter, redrives_cut_off=letter.redrives_cut_off + 1)


def failed_again(letter: Letter, failure: Failure, calls_at: tuple[float, ...]) -> Letter:
    """The letter after a failed redrive: with the added attempts and the last failure."""
    return replace(
        letter,
        **msgspec.structs.asdict(failure),
        attempts=letter.attempts + len(calls_at),
        attempted_seconds=(*letter.attempted_seconds, *calls_at),
        redrive_count=letter.redrive_count + 1,
        redrives_cut_off=0,
    )


class RedriveReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many letters were selected, and what became of them."""

    matched: int = 0
    delivered: int = 0
    """Handled again, or put back into the stream; removed from here."""
    reviewed: int = 0
    """Failed again, and moved to the review destination."""
    failed: int = 0
    """Failed again, and left here."""
    held_back: int = 0
    """Left here, because an earlier letter of the same key was."""
    without_payload: int = 0
    """Left here: the payload was trimmed from the stream or redacted."""
    unreadable: int = 0
    """Entries here that are not dead letters."""
    last_error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether none of the selected letters is left here."""
        return self.matched == self.delivered + self.reviewed


class RedriveTally:
    """Counts outcomes, and knows which keys are held back."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._held_keys: set[tuple[str, str, str]] = set()
        self._last_error: str | None = None

    def add(self) -> None:
        self._counts["matched"] += 1

    def is_held(self, letter: Letter) -> bool:
        return order_key(letter) in self._held_keys

    def settle(self, letter: Letter, outcome: RedriveOutcome, error: str | None = None) -> None:
        self._counts[outcome] += 1
        if outcome == "failed":
            self._held_keys.add(order_key(letter))
        self._last_error = error or self._last_error

    def report(self, unreadable: int = 0) -> RedriveReport:
        return RedriveReport(**self._counts, unreadable=unreadable, last_error=self._last_error)
