"""From the five ways to say where to start reading to a sequence number: the lowest one that will be read."""

from typing import NamedTuple

from anabranch._wire.timestamps import Timestamp
from anabranch.local.errors import LocalError, invalid_argument
from anabranch.local.state.identifiers import parse_sequence_number, shard_id_of
from anabranch.local.state.shard import Shard

__all__ = ["StartingPosition", "resolve_position"]


class StartingPosition(NamedTuple):
    type: str
    sequence_number: str | None
    timestamp: float | None


def resolve_position(shard: Shard, start: StartingPosition, now_ms: int, operation: str, place: str) -> int:
    """`place` names the stream and the account for the messages."""
    _check_combination(start)
    if start.sequence_number is not None:
        number = _checked_number(shard, start.sequence_number, operation, place)
        return number if start.type == "AT_SEQUENCE_NUMBER" else number + 1
    if start.type == "TRIM_HORIZON":
        return shard.starting_sequence_number
    if start.timestamp is not None:
        return _position_at(shard, Timestamp(start.timestamp).milliseconds, now_ms)
    return shard.tip()


def _check_combination(start: StartingPosition) -> None:
    has_number = start.sequence_number is not None
    if start.type.endswith("_SEQUENCE_NUMBER") != has_number:
        also = "and also a" if has_number else "and no"
        raise invalid_argument(
            "Must either specify (1) AT_SEQUENCE_NUMBER or AFTER_SEQUENCE_NUMBER and StartingSequenceNumber or "
            "(2) TRIM_HORIZON or LATEST and no StartingSequenceNumber. "
            f"Request specified {start.type} {also} StartingSequenceNumber."
        )
    if start.type == "AT_TIMESTAMP" and start.timestamp is None:
        raise invalid_argument(
            "Must specify timestampInMillis parameter for iterator of type AT_TIMESTAMP. "
            "Current request has no timestamp parameter."
        )
    if start.type != "AT_TIMESTAMP" and start.timestamp is not None:
        raise invalid_argument(
            f"Request specified {start.type} and also a timestamp: only AT_TIMESTAMP takes a timestamp."
        )


def _checked_number(shard: Shard, text: str, operation: str, place: str) -> int:
    number = int(text)
    parts = parse_sequence_number(number)
    if parts is None:
        raise _invalid(text, shard, operation, place, "")
    if parts.shard_index != shard.index:
        raise invalid_argument(
            f"Invalid StartingSequenceNumber. It encodes {shard_id_of(parts.shard_index)}, "
            f"while it was used in a call to a shard with {shard.shard_id}"
        )
    if parts.created_s != shard.created_s:
        raise _invalid(text, shard, operation, place, " because it did not come from this stream")
    if parts.counter > shard.counter + 1 and number != shard.ending_sequence_number:
        raise _invalid(text, shard, operation, place, " because this shard has no such record yet")
    return number


def _invalid(text: str, shard: Shard, operation: str, place: str, why: str) -> LocalError:
    return invalid_argument(
        f"StartingSequenceNumber {text} used in {operation} on shard {shard.shard_id} in {place} is invalid{why}."
    )


def _position_at(shard: Shard, at_ms: int, now_ms: int) -> int:
    if at_ms > now_ms:
        raise invalid_argument(
            "The timestampInMillis parameter cannot be greater than the currentTimestampInMillis. "
            f"timestampInMillis: {at_ms}, currentTimestampInMillis: {now_ms}"
        )
    log = shard.log
    index = log.index_at_time(at_ms)
    return log.numbers[index] if index < len(log.numbers) else shard.tip()
