"""Times as people write them (`-15m`, `2026-01-31T09:30`, `now`, `horizon`, `latest`), and as they read them."""

import argparse
import datetime as dt
import re
import time
from typing import Final, Literal

__all__ = ["ago", "end_argument", "join_spans", "lag", "rate", "start_argument", "timestamp"]

Start = Literal["latest", "trim_horizon"] | dt.datetime

_SPAN = re.compile(r"-?(\d+(?:\.\d+)?)([smhdw])")
_SPAN_WORD = re.compile(r"-\d+(?:\.\d+)?[smhdw]")
_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_STARTS: Final[dict[str, Literal["latest", "trim_horizon"]]] = {
    "latest": "latest",
    "horizon": "trim_horizon",
    "trim_horizon": "trim_horizon",
}
_ACCEPTED: Final = "-15m (also s, h, d, w) or an ISO time such as 2026-01-31T09:30Z"


def join_spans(words: list[str]) -> list[str]:
    """`--from -15m` becomes `--from=-15m`: argparse would take a span for an option."""
    joined: list[str] = []
    for word in words:
        takes_value = bool(joined) and joined[-1].startswith("--") and len(joined[-1]) > 2 and "=" not in joined[-1]
        if takes_value and "--" not in joined and _SPAN_WORD.fullmatch(word):
            joined[-1] = f"{joined[-1]}={word}"
        else:
            joined.append(word)
    return joined


def start_argument(text: str) -> Start:
    word = text.lower().replace("-", "_")
    if word in _STARTS:
        return _STARTS[word]
    moment = _moment(text, f"horizon, latest, {_ACCEPTED}")
    if moment.timestamp() > time.time():
        raise argparse.ArgumentTypeError(f"{text!r} is in the future: leave it out for what comes from now on")
    return moment


def end_argument(text: str) -> dt.datetime:
    moment = _moment(text, f"now, {_ACCEPTED}")
    if moment.timestamp() > time.time():
        raise argparse.ArgumentTypeError(f"{text!r} is in the future: leave it out, and end it by Ctrl-C")
    return moment


def _moment(text: str, accepted: str) -> dt.datetime:
    now = dt.datetime.now(dt.UTC)
    if text.lower() == "now":
        return now
    try:
        if span := _SPAN.fullmatch(text):
            return now - dt.timedelta(seconds=float(span[1]) * _UNITS[span[2]])
        return dt.datetime.fromisoformat(text).astimezone(dt.UTC)  # without a zone it is the machine's own time
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write {accepted}") from None


def timestamp(seconds: float) -> str:
    """To the millisecond, in UTC."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def lag(millis: int | None) -> str:
    """How far behind, in a few characters."""
    return "-" if millis is None else ago(millis / 1000)


def rate(records_per_second: float) -> str:
    return f"{records_per_second:.1f}" if 0 < records_per_second < 10 else f"{records_per_second:.0f}"


def ago(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, length in (("min", 60), ("h", 3_600)):
        if seconds < 60 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d" if seconds >= 172_800 else f"{seconds / 3_600:.1f} h"
