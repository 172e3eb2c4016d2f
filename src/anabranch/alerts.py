"""`Alert`: when a lag is too large for too long. What happens then is an event and a call of your function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from anabranch._model.kinds import field_type_violations
from anabranch.errors import ConfigurationError
from anabranch.events import AlertCleared, AlertFired

__all__ = ["Alert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Fires when the largest lag was above `lag` in each of the last `for_periods` periods, and clears after a period
    in which it was not, as an alarm in CloudWatch does. The events `AlertFired` and `AlertCleared` say so.
    """

    lag: float
    """Seconds."""
    for_periods: int = 2
    period: float = 60.0
    """Seconds."""
    hook: Callable[[AlertFired | AlertCleared], object] | None = None
    """Called with the event, on the event loop. It must not block; an error in it is reported and ignored."""

    def __post_init__(self) -> None:
        violations = field_type_violations(self, but=("hook",))
        hook = cast("object", self.hook)
        if hook is not None and not callable(hook):
            violations.append(f"hook is {hook!r}; it must be a function that takes an event, or None")
        if violations:
            raise ConfigurationError(violations)
        if not self.lag > 0:
            violations.append(f"lag is {self.lag}; it must be positive")
        if self.for_periods < 1:
            violations.append(f"for_periods is {self.for_periods}; it must be at least 1")
        if not self.period >= 1:
            violations.append(f"period is {self.period}; it must be at least 1 second")
        if violations:
            raise ConfigurationError(violations)
