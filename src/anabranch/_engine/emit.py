"""Sends events to the log, with their fields as `extra=`, then to the user's `on_event`. Errors in `on_event` are only
logged.

Failed handler calls are logged with their tracebacks, up to a limit per minute. Without a traceback the event is still
logged.
"""

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from anabranch.alerts import Alert
from anabranch.errors import ConfigurationError
from anabranch.events import Event, HandlerFailed
from anabranch.reasons import Reason

_log = logging.getLogger("anabranch")

_TRACEBACKS_PER_MINUTE: Final = 10
"""First and last attempts have a limit each: many first failures must not hide why a shard stopped."""
_MINUTE_SECONDS: Final = 60.0


def make_emit(on_event: Callable[[Event], Any] | None) -> Callable[[Event], None]:
    check_hook("on_event", on_event, "an event")
    logged_at: dict[bool, deque[float]] = {is_last: deque(maxlen=_TRACEBACKS_PER_MINUTE) for is_last in (False, True)}

    def log_failure(event: HandlerFailed) -> None:
        """Adds the traceback for the first and the last attempt; attempts in between would repeat it."""
        is_last = event.retry_in_ms is None
        extra = event_fields(event)
        if event.exception is None or not (is_last or event.attempt == 1):
            _log.log(event.level, "%s", event, extra=extra)
            return
        times, now = logged_at[is_last], time.monotonic()
        if len(times) == _TRACEBACKS_PER_MINUTE and now - times[0] < _MINUTE_SECONDS:
            text = "%s (no traceback: %d were logged in the last minute)"
            _log.log(event.level, text, event, _TRACEBACKS_PER_MINUTE, extra=extra)
            return
        times.append(now)
        _log.log(event.level, "%s", event, exc_info=event.exception, extra=extra)

    def emit(event: Event) -> None:
        if isinstance(event, HandlerFailed):
            log_failure(event)
        elif _log.isEnabledFor(event.level):
            _log.log(event.level, "%s", event, extra=event_fields(event))
        if on_event is not None:
            try:
                on_event(event)
            except Exception:  # noqa: BLE001 -- a user's hook must not end a worker or a producer
                _log.exception("on_event failed for: %s", event)

    return emit


def event_fields(event: Event) -> dict[str, Any]:
    """The fields of a log record: `event`, its name, and its own fields as plain values. A reason is its code; the
    message has its text.
    """
    fields: dict[str, Any] = {"event": type(event).__name__}
    for name, value in msgspec.structs.asdict(event).items():
        if isinstance(value, Reason):
            fields[name] = value.code
        elif not isinstance(value, BaseException):
            fields[name] = msgspec.to_builtins(value)
    return fields


def check_hook(name: str, hook: object, argument: str) -> None:
    """Raises ConfigurationError unless the hook is None or a plain function. Nothing awaits an async one."""
    if hook is None:
        return
    functions = (hook, getattr(hook, "__call__", None))  # noqa: B004 -- the method of a callable object
    if not callable(hook) or any(map(inspect.iscoroutinefunction, functions)):
        raise ConfigurationError(
            f"{name}={hook!r}: expected a plain function that takes {argument}, not an async function"
        )


def check_alerts(alerts: object) -> tuple[Alert, ...]:
    if (
        not isinstance(alerts, Collection)
        or isinstance(alerts, str)
        or not all(isinstance(alert, Alert) for alert in alerts)
    ):
        raise ConfigurationError(f"alerts is {alerts!r}; it must be a list of Alert(lag=...)")
    for alert in alerts:
        check_hook("hook", alert.hook, "an event")
    return tuple(alerts)
