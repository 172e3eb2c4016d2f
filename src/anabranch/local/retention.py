"""Changing how long a stream keeps its records: what both directions have in common."""

from collections.abc import Mapping
from typing import Any

from anabranch.limits import RETENTION_HOURS_MAX, RETENTION_HOURS_MIN
from anabranch.local.errors import invalid_argument
from anabranch.local.shapes import NAMED_STREAM, IntegerShape, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.stream import Stream

__all__ = ["RETENTION_REQUEST", "checked_hours", "set_retention"]

RETENTION_REQUEST = StructureShape(
    {**NAMED_STREAM, "RetentionPeriodHours": IntegerShape()}, required=("RetentionPeriodHours",)
)


def checked_hours(request: Mapping[str, Any]) -> int:
    hours: int = request["RetentionPeriodHours"]
    if hours < RETENTION_HOURS_MIN:
        raise invalid_argument(
            f"Minimum allowed retention period is {RETENTION_HOURS_MIN} hours. "
            f"Requested retention period ({hours} hours) is too short."
        )
    if hours > RETENTION_HOURS_MAX:
        raise invalid_argument(
            f"Maximum allowed retention period is {RETENTION_HOURS_MAX} hours. "
            f"Requested retention period ({hours} hours) is too long."
        )
    return hours


def set_retention(account: Account, stream: Stream, hours: int, now_ms: int) -> None:
    before_ms = account.horizon_ms(stream, now_ms)
    stream.retention_hours = hours
    # What is out of reach before or after the change stays so.
    stream.trimmed_before_ms = max(before_ms, account.horizon_ms(stream, now_ms))
    account.mark_written(stream)
