"""What happens after a failed handler call: retries, and what follows the last attempt.

The default ends in `Stop`: if a record keeps failing, its shard stops there and reports it. Nothing is skipped
silently.
"""

from dataclasses import dataclass, field

from anabranch._model.kinds import field_type_violations
from anabranch.errors import ConfigurationError

__all__ = ["Retry", "Stop"]


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the shard at the failed record, keep its lease, and report it. A process that starts later retries it
    once.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Retry with growing, jittered pauses. The record's key (or its shard) waits meanwhile."""

    attempts: int = 3
    """Total calls, including the first. Retry counts survive failover."""
    backoff: float = 0.2
    """The longest first pause in seconds. It doubles with every attempt."""
    backoff_max: float = 30.0
    timeout: float | None = None
    """Seconds that one call may take. An async handler is cancelled, and a process is killed; a thread cannot be
    stopped. The next attempt starts after this one has ended. While a call keeps running, its shard is stalled."""
    then: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        if violations := field_type_violations(self):
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
