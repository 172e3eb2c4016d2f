"""What follows a failed handler call: how often it is tried again, and what happens after the last attempt.

The default ends in `Stop`: the shard stands still loudly, its lease kept and the record named. Nothing is skipped in
silence.
"""

from dataclasses import dataclass, field

from anabranch._model.kinds import wrong_fields
from anabranch.errors import ConfigurationError

__all__ = ["Retry", "Stop"]


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the shard at the record that failed, keep its lease, and say so. A process that starts later tries it again,
    once.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Try again with growing, jittered pauses; the record's key (or its shard) waits meanwhile."""

    attempts: int = 3
    """Calls in all, the first included. Failed ones are counted over fail-overs, too."""
    backoff: float = 0.2
    """The longest first pause in seconds; it doubles with every attempt."""
    backoff_max: float = 30.0
    timeout: float | None = None
    """Seconds that one call may take. An asynchronous handler is cancelled and a process killed; a thread cannot be
    ended. The next attempt starts after this one has ended: where it goes on, that is the reason of the standstill."""
    then: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        if violations := wrong_fields(self):
            raise ConfigurationError(violations)
        if self.attempts < 1:
            violations.append(f"attempts is {self.attempts}; it must be at least 1")
        if not 0 <= self.backoff <= self.backoff_max:
            violations.append(
                f"backoff is {self.backoff} and backoff_max {self.backoff_max}; "
                "backoff must not be negative, nor larger than backoff_max"
            )
        if self.timeout is not None and not self.timeout > 0:
            violations.append(f"timeout is {self.timeout}; it must be positive, or None for no limit")
        if violations:
            raise ConfigurationError(violations)
