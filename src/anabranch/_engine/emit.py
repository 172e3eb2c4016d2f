"""Where events go: into the log, then to the user's `on_event`, which cannot disturb what it watches.

A failed handler call is logged with its traceback. When many calls fail, as in an outage, tracebacks are left out above
a limit; the events themselves are always logged.
"""

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from anabranch.errors import ConfigurationError
from anabranch.events import Event, HandlerFailed

_log = logging.getLogger("anabranch")

TRACEBACKS_MAX: Final = 10
"""A minute, of first attempts and of last attempts each: many first failures must not hide why a shard stopped."""
_MINUTE_SECONDS: Final = 60.0


def make_emit(on_event: Callable[[Event], Any] | None) -> Callable[[Event], None]:
    check_hook("on_event", on_event, "an event")

    logged_at: dict[bool, deque[float]] = {is_last: deque(maxlen=TRACEBACKS_MAX) for is_last in (False, True)}

    def log_failure(event: HandlerFailed) -> None:
        """With its traceback at the first and the last attempt: those in between would only repeat it."""
        is_last = event.retry_in_ms is None
        if event.exception is None or not (is_last or event.attempt == 1):
            _log.log(event.level, "%s", event)
            return
        times, now = logged_at[is_last], time.monotonic()
        if len(times) == TRACEBACKS_MAX and now - times[0] < _MINUTE_SECONDS:
            _log.log(event.level, "%s (no traceback: %d were logged in the last minute)", event, TRACEBACKS_MAX)
            return
        times.append(now)
        _log.log(event.level, "%s", event, exc_info=event.exception)

    def emit(event: Event) -> None:
        if isinstance(event, HandlerFailed):
            log_failure(event)
        else:
            _log.log(event.level, "%s", event)
        if on_event is not None:
            try:
                on_event(event)
            except Exception:  # noqa: BLE001 -- a user's hook must not end a worker or a writer
                _log.exception("on_event failed for: %s", event)

    return emit


def check_hook(name: str, hook: object, argument: str) -> None:
    """ConfigurationError unless it is None or a plain function: nobody would await an asynchronous one."""
    if hook is None:
        return
    called = (hook, getattr(hook, "__call__", None))  # noqa: B004 -- an object may have one of its own
    if not callable(hook) or any(map(inspect.iscoroutinefunction, called)):
        raise ConfigurationError(f"{name}={hook!r}: it takes a plain function of {argument}, not an asynchronous one")
