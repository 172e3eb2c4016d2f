"""What a consumer is told, checked before anything is opened: all that is wrong is named at once."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Final

from anabranch._core.handling.batches import BatchLimits
from anabranch._model.kinds import wrong_kinds
from anabranch._model.streams import StreamName, parse_stream
from anabranch.config import Aws, ConsumerSettings
from anabranch.errors import ConfigurationError
from anabranch.policies import Retry

__all__ = ["batch_limits", "check_kinds", "check_streams"]

KINDS: Final = {
    "app": str | None,
    "idle_timeout": float | None,
    "order": str,
    "concurrency": int,
    "acknowledge": str,
    "on_failure": Retry | None,
    "settings": ConsumerSettings | None,
    "aws": Aws | None,
}
BATCH_KINDS: Final = {"max_records": int, "max_bytes": int, "max_wait": float}


def check_kinds(given: Mapping[str, object]) -> None:
    if wrong := wrong_kinds(given, KINDS):
        raise ConfigurationError(wrong)


def check_streams(
    stream: object,
    *,
    app: str | None,
    start: object,
    until: object,
    idle_timeout: float | None,
    read: str,
) -> tuple[StreamName, ...]:
    violations = []
    names = tuple(stream) if isinstance(stream, Collection) and not isinstance(stream, str) else (stream,)
    streams: list[StreamName] = []
    for name in names:
        if not isinstance(name, str):
            violations.append(f"a stream is named by text, not {name!r}")
            continue
        try:
            streams.append(parse_stream(name))
        except ValueError as error:
            violations.append(str(error))
    if not names:
        violations.append("name at least one stream")
    if len({str(parsed) for parsed in streams}) < len(streams):
        violations.append("a stream is named twice")
    if app is not None and not 1 <= len(app) <= 128:
        violations.append("app must have 1 to 128 characters")
    if read != "polling":
        violations.append(f"read is {read!r}; this version reads by 'polling'")
    for name, value, word in (("start", start, {"latest", "trim_horizon"}), ("until", until, {"tip"})):
        if isinstance(value, datetime):
            if value.tzinfo is None:
                violations.append(f"{name} is a datetime without a time zone: say which, as datetime.now(UTC)")
        elif value is not None and value not in word:
            violations.append(f"{name} is {value!r}; it must be {' or '.join(sorted(map(repr, word)))}, or a datetime")
    if idle_timeout is not None and idle_timeout <= 0:
        violations.append(f"idle_timeout is {idle_timeout}; it must be positive")
    if violations:
        raise ConfigurationError(violations)
    return tuple(streams)


def batch_limits(max_records: int, max_bytes: int, max_wait: float) -> BatchLimits:
    given = {"max_records": max_records, "max_bytes": max_bytes, "max_wait": max_wait}
    if wrong := wrong_kinds(given, BATCH_KINDS):
        raise ConfigurationError(wrong)
    if max_records < 1 or max_bytes < 1 or max_wait < 0:
        raise ConfigurationError(
            f"a batch of max_records={max_records}, max_bytes={max_bytes}, max_wait={max_wait} can never be full: "
            "the first two must be at least 1, the last not negative"
        )
    return BatchLimits(max_records, max_bytes, round(max_wait * 1000))
