"""Where reading a shard begins: AWS's five iterator types, as GetShardIterator and SubscribeToShard know them.

LATEST is not among those the engine sends: "latest" is pinned to a time once (rule T1), so that a crash before
the first checkpoint loses nothing. It exists for the tools that look at a stream without following it.
"""

from typing import Literal

import msgspec

__all__ = [
    "TRIM_HORIZON",
    "StartingPosition",
    "after_sequence_number",
    "at_sequence_number",
    "at_timestamp",
]

PositionType = Literal["AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER", "AT_TIMESTAMP", "TRIM_HORIZON", "LATEST"]


class StartingPosition(msgspec.Struct, frozen=True):
    type: PositionType
    sequence_number: str | None = None
    timestamp_seconds: float | None = None


TRIM_HORIZON = StartingPosition("TRIM_HORIZON")


def at_sequence_number(sequence_number: int | str) -> StartingPosition:
    return StartingPosition("AT_SEQUENCE_NUMBER", str(sequence_number))


def after_sequence_number(sequence_number: int | str) -> StartingPosition:
    return StartingPosition("AFTER_SEQUENCE_NUMBER", str(sequence_number))


def at_timestamp(seconds: float) -> StartingPosition:
    return StartingPosition("AT_TIMESTAMP", None, seconds)
