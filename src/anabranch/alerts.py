"""`Alert`: reports a lag that stays too large, with an event and a call of your function."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from anabranch._model.kinds import check_field_types, check_hook, refuse
from anabranch.errors import ConfigurationError
from anabranch.events import AlertCleared, AlertFired, Event, HookFailed

__all__ = ["Alert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Fires when the largest lag was above `lag` in each of the last `for_periods` periods, and clears after a period
    in which it was not, as a CloudWatch alarm does. Emits `AlertFired` and `AlertCleared`.
    """

    lag: float
    """Seconds."""
    for_periods: int = 2
    period: float = 60.0
    """Seconds."""
    hook: Callable[[AlertFired | AlertCleared], object] | None = None
    """Called with the event, on the event loop. It must not block; an error in it is reported and ignored."""

    def __post_init__(self) -> None:
        check_hook("hook", self.hook, "an event")
        violations = check_field_types(self, but=("hook",))
        if not self.lag > 0:
            violations.append(f"lag is {self.lag}; it must be positive")
        if self.for_periods < 1:
            violations.append(f"for_periods is {self.for_periods}; it must be at least 1")
        if not self.period >= 1:
            violations.append(f"period is {self.period}; it must be at least 1 second")
        refuse(violations)


def check_alerts(alerts: object) -> tuple[Alert, ...]:
    if isinstance(alerts, Collection) and not isinstance(alerts, str):
        found = [alert for alert in alerts if isinstance(alert, Alert)]
        if len(found) == len(alerts):
            return tuple(found)
    raise ConfigurationError(f"alerts is {alerts!r}; it must be a list of Alert(lag=...)")


def report_alert(emit: Callable[[Event], None], alert: Alert, event: AlertFired | AlertCleared) -> None:
    """Emits the event and calls the hook. An error in the hook is only reported, as another event."""
    emit(event)
    if alert.hook is not None:
        try:
            alert.hook(event)
        except Exception as error:  # noqa: BLE001 -- a user's hook must not end a worker
            emit(HookFailed(hook="Alert.hook", error=repr(error)))
