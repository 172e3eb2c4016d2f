"""Log records as JSON, one object on each line: for CloudWatch Logs, Loki and the like. Set `JsonFormatter` as the
formatter of a logging handler.
"""

import datetime as dt
import json
import logging
from typing import Final

__all__ = ["JsonFormatter"]

_STANDARD: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
"""What every log record has. All else was passed as `extra=`."""


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
            "message": record.getMessage(),
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
        return json.dumps(document, default=str)
