"""What happens after a failed handler call: retries, and what follows the last attempt.

The default ends in `Stop`: if a record keeps failing, its shard stops there and reports it. Nothing is skipped
silently. `Skip` and `DeadLetter` continue after the record, but stop the shard if the failures look like an outage.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from anabranch._model.kinds import check_field_types, refuse


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the shard at the failed record, keep its lease, and report it. A worker that starts later retries the record
    once; `anabranch apps skip` and `apps resume` continue without a restart.
    """


@dataclass(frozen=True, slots=True)
class Skip:
    """Continue without the failed record. It is counted and reported in an event, but not kept. After 20 skips in a row
    without one success, or 100 in a minute, the shard stops: that looks like an outage.
    """


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Write the failed record with its error to a destination, and continue when it is durable there. After 20 letters
    in a row without one success, or `per_minute` in a minute, the shard stops: that looks like an outage.
    """

    url: str | Callable[[Any], Any] | None = None
    """`sqs://NAME`, `kinesis://NAME`, `s3://bucket/prefix`, `sqlite:///path`, or an async function that takes the
    letter and returns when it is durable. None: a SQLite file beside the leases."""
    review: str | None = None
    """The destination of letters that fail again in a redrive."""
    overflow: str | None = None
    """Where a letter is stored if it is too large for the destination, which then gets a pointer: `s3://bucket/prefix`
    or `file:///folder`. None: the shard stalls, and its reason says why."""
    per_minute: int = 100
    redact: Callable[[Any], Any] | None = None
    """Called with each letter before it is written; returns the letter to write, for example without its payload."""

    def __post_init__(self) -> None:
        violations = check_field_types(self, but=("url", "redact"))
        url, redact = cast("object", self.url), cast("object", self.redact)
        if not (url is None or isinstance(url, str) or callable(url)):
            violations.append(f"url is {url!r}; it must be a URL as text, an async function, or None")
        if not (redact is None or callable(redact)):
            violations.append(f"redact is {redact!r}; it must be a function that takes a letter, or None")
        if self.per_minute < 1:
            violations.append(f"per_minute is {self.per_minute}; it must be at least 1")
        refuse(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Retry with growing, jittered pauses. The record's key (or its shard) waits meanwhile."""

    attempts: int = 3
    """Total calls, including the first. Retry counts survive failover."""
    backoff: float = 0.2
    """The upper bound of the first pause in seconds. It doubles with every attempt."""
    backoff_max: float = 30.0
    max_age: float | None = None
    """Seconds since the record arrived, by the service's clock. An older record is not retried."""
    timeout: float | None = None
    """Seconds that one call may take. An async handler is cancelled, and a process is killed; a thread cannot be
    stopped. The next attempt starts after this one has ended. While a call keeps running, its shard is stalled."""
    give_up_on: tuple[type[BaseException], ...] = ()
    """Errors after which a record is not retried. A batch is not retried as a whole: it is split in half at once."""
    then: Stop | Skip | DeadLetter = field(default_factory=Stop)
    """What follows the last attempt, and a payload that does not decode, which is never retried."""

    def __post_init__(self) -> None:
        violations, errors = check_field_types(self, but=("give_up_on",)), cast("object", self.give_up_on)
        if not isinstance(errors, tuple) or not all(map(_is_error, errors)):
            violations.append(
                f"give_up_on is {errors!r}; it must be a tuple of exception classes, such as (ValueError,)"
            )
        if self.attempts < 1:
            violations.append(f"attempts is {self.attempts}; it must be at least 1")
        if not 0 <= self.backoff <= self.backoff_max:
            violations.append(
                f"backoff is {self.backoff} and backoff_max {self.backoff_max}; "
                "backoff must not be negative, nor larger than backoff_max"
            )
        for name, seconds in (("max_age", self.max_age), ("timeout", self.timeout)):
            if seconds is not None and not seconds > 0:
                violations.append(f"{name} is {seconds}; it must be positive, or None for no limit")
        refuse(violations)


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)
