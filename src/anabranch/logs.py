"""Log records as JSON, one object on each line: for CloudWatch Logs, Loki and the like. Set `JsonFormatter` as the
formatter of a logging handler.
"""

import datetime as dt
import json
import logging
import sys
from typing import Any, Final

__all__ = ["JsonFormatter"]

_STANDARD: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
"""What every log record has. All else was passed as `extra=`."""
DEPTH_MAX: Final = 8
NUMBER_MAX: Final = sys.float_info.max
"""Larger ones, and those that are not finite, are written as text."""


class JsonFormatter(logging.Formatter):
    """The fields `time`, `level`, `logger`, `message` and `process`, those that were passed as `extra=` (of an event of
    anabranch: `event` and its own fields), and `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = dt.datetime.fromtimestamp(record.created, dt.UTC)
        document = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
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
        # ASCII only: whatever is in a message, it stays on one line and controls no terminal.
        try:
            return json.dumps(document, default=str, allow_nan=False)
        except Exception:  # noqa: BLE001 -- whatever somebody logs, the line is not lost
            return json.dumps(_plain(document, DEPTH_MAX))


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 -- its arguments do not fit, or cannot be shown
        return f"{_text(record.msg)} (its arguments cannot be formatted: {_text(error)})"


def _plain(value: Any, depth: int) -> Any:
    """The value as JSON allows it: keys are texts, numbers are finite, and what contains itself ends somewhere."""
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
    except Exception as error:  # noqa: BLE001 -- a defect of what was logged
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
