"""Events in the log, and log records as JSON lines for CloudWatch Logs, Loki and the like (`JsonFormatter`)."""

import datetime as dt
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from anabranch._model.kinds import check_hook
from anabranch.events import Event, HandlerFailed
from anabranch.letters import handler_traceback
from anabranch.reasons import Reason

__all__ = ["JsonFormatter"]

_log = logging.getLogger("anabranch")

_TRACEBACKS_PER_MINUTE: Final = 10
"""First and last attempts have a limit each: many first failures must not hide why a shard stopped."""
_MINUTE_SECONDS: Final = 60.0
_STANDARD: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
"""What every log record has. All else was passed as `extra=`."""
DEPTH_MAX: Final = 8
NUMBER_MAX: Final = sys.float_info.max
"""Larger numbers, and those that are not finite, are written as text."""


class JsonFormatter(logging.Formatter):
    """For a logging handler. Fields: `time`, `level`, `logger`, `message`, `process`, what was passed as `extra=` (for
    our events: `event` and its own fields), and `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        created = dt.datetime.fromtimestamp(record.created, dt.UTC)
        document = {
            "time": created.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            "process": record.process,
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in document:
                document[name] = value
        if record.exc_info and record.exc_info[0] is not None:
            document["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            document["stack_trace"] = self.formatStack(record.stack_info)
        # ASCII only: a message can neither break the line nor control a terminal.
        try:
            return json.dumps(document, default=str, allow_nan=False)
        except Exception:  # noqa: BLE001 -- a field that JSON cannot hold must not lose the line
            return json.dumps(_plain(document, DEPTH_MAX))


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 -- the arguments do not fit the text, or their `__str__` failed
        return f"{_text(record.msg)} (its arguments cannot be formatted: {_text(error)})"


def _plain(value: Any, depth: int) -> Any:
    """The value as JSON allows it: keys are text, numbers are finite, and nesting is limited."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and abs(value) <= NUMBER_MAX:
        return value
    if isinstance(value, dict | list | tuple | set | frozenset) and depth == 0:
        return "..."
    if isinstance(value, dict):
        return {_text(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth - 1) for item in value]
    return _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 -- its own `__str__` failed
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def make_emit(on_event: Callable[[Event], Any] | None) -> Callable[[Event], None]:
    """Sends events to the log, with their fields as `extra=`, then to the user's `on_event`, whose errors are logged.
    Failed handler calls are logged with their tracebacks, up to a limit per minute.
    """
    check_hook("on_event", on_event, "an event")
    logged_at: dict[bool, deque[float]] = {is_last: deque(maxlen=_TRACEBACKS_PER_MINUTE) for is_last in (False, True)}

    def traceback_of(event: HandlerFailed) -> tuple[BaseException | None, str]:
        """For the first and the last attempt; attempts in between would repeat it. Without it, a note may say why."""
        is_last = event.retry_in_ms is None
        if event.exception is None or not (is_last or event.attempt == 1):
            return None, ""
        times, now = logged_at[is_last], time.monotonic()
        if len(times) == _TRACEBACKS_PER_MINUTE and now - times[0] < _MINUTE_SECONDS:
            return None, f" (no traceback: {_TRACEBACKS_PER_MINUTE} were logged in the last minute)"
        times.append(now)
        return event.exception, ""

    def emit(event: Event) -> None:
        if _log.isEnabledFor(event.level):
            exception, note = traceback_of(event) if isinstance(event, HandlerFailed) else (None, "")
            shown = None if exception is None else (type(exception), exception, handler_traceback(exception))
            _log.log(event.level, "%s%s", event, note, exc_info=shown, extra=event_fields(event))
        if on_event is not None:
            try:
                on_event(event)
            except Exception:  # noqa: BLE001 -- a user's hook must not end a worker or a producer
                _log.exception("on_event failed for: %s", event)

    return emit


def event_fields(event: Event) -> dict[str, Any]:
    """For a log record: `event`, the name, and the event's fields as plain values. Of a reason, the code."""
    fields: dict[str, Any] = {"event": type(event).__name__}
    for name, value in msgspec.structs.asdict(event).items():
        if isinstance(value, Reason):
            fields[name] = value.code
        elif not isinstance(value, BaseException):
            fields[name] = msgspec.to_builtins(value)
    return fields
