"""What becomes of a Kinesis record after an attempt to write it: one table.

First an attempt is given its `Outcome`, from the slot of the answer or from the error of the whole call; then
`RULINGS` says what follows. An aggregate that landed in another shard than predicted counts only if *all* of its
records belong there: consumers skip an aggregate whole if one of them does not, so the records that do belong would
be lost with it.

`maybe_written` is about what is not known: a call that was sent and never answered may have taken effect.
"""

import re
from enum import Enum, auto
from typing import Final

import msgspec

from anabranch._core.writing.aggregation import Bundle
from anabranch._core.writing.shard_map import ShardMap
from anabranch._wire.messages import PutRecordsResultEntry
from anabranch.errors import AnabranchError, InvalidRequestError, ServiceError, TransportError, UnavailableError

__all__ = ["RULINGS", "Next", "Outcome", "Pause", "Ruling", "outcome_of_error", "outcome_of_slot", "refused_shard_id"]

_THROTTLED_SLOT: Final = "ProvisionedThroughputExceededException"
_SHARD_ID: Final = re.compile(r"shardId-\d{12}")


class Outcome(Enum):
    # the slot says written
    WHERE_PREDICTED = auto()
    ALONE = auto()
    """A single record: it is right wherever the service put it."""
    ELSEWHERE_IN_RANGE = auto()
    ELSEWHERE_STRADDLING = auto()
    ELSEWHERE_UNKNOWN = auto()
    """In a shard whose range is not known yet."""
    # the slot says not written
    SLOT_THROTTLED = auto()
    SLOT_FAILED = auto()
    # the whole call
    CALL_TURNED_AWAY = auto()
    """Over a quota, an expired token, a stream that is changing: not written, and it may work later."""
    CALL_UNAVAILABLE = auto()
    CALL_UNANSWERED = auto()
    CALL_NOT_SENT = auto()
    CALL_INVALID = auto()
    CALL_REFUSED = auto()
    ANSWER_BROKEN = auto()
    """Not one slot for each entry."""


class Next(Enum):
    DELIVERED = auto()
    SEND_AGAIN = auto()
    """The same bytes, before anything newer of its lane."""
    SEND_APART = auto()
    """All of its records, by the shards they belong to now."""
    AWAIT_MAP = auto()
    """Judged again when the map has been refreshed."""
    BISECT = auto()
    """In smaller calls, then in smaller bundles, until the record is found that the service does not accept."""
    FAIL = auto()


class Pause(Enum):
    NONE = auto()
    SHARD = auto()
    """For a moment, as it is the shard that had a problem."""
    SHARD_IF_MOST = auto()
    """For a moment, if it is not this record alone: most of the shard's last records were refused."""
    SHARD_IF_MOST_SLOWER = auto()
    """The same, and at a lower rate from then on."""
    STREAM = auto()


class Ruling(msgspec.Struct, frozen=True):
    next: Next
    maybe_written: bool = False
    pause: Pause = Pause.NONE


RULINGS: Final = {
    Outcome.WHERE_PREDICTED: Ruling(Next.DELIVERED),
    Outcome.ALONE: Ruling(Next.DELIVERED),
    Outcome.ELSEWHERE_IN_RANGE: Ruling(Next.DELIVERED),
    # Written, but consumers that check ranges skip it: others may see its records twice.
    Outcome.ELSEWHERE_STRADDLING: Ruling(Next.SEND_APART, maybe_written=True, pause=Pause.SHARD),
    Outcome.ELSEWHERE_UNKNOWN: Ruling(Next.AWAIT_MAP, maybe_written=True),
    Outcome.SLOT_THROTTLED: Ruling(Next.SEND_AGAIN, pause=Pause.SHARD_IF_MOST_SLOWER),
    Outcome.SLOT_FAILED: Ruling(Next.SEND_AGAIN, pause=Pause.SHARD_IF_MOST),
    Outcome.CALL_TURNED_AWAY: Ruling(Next.SEND_AGAIN, pause=Pause.STREAM),
    Outcome.CALL_UNAVAILABLE: Ruling(Next.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
    Outcome.CALL_UNANSWERED: Ruling(Next.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
    Outcome.CALL_NOT_SENT: Ruling(Next.SEND_AGAIN, pause=Pause.STREAM),
    Outcome.CALL_INVALID: Ruling(Next.BISECT),
    Outcome.CALL_REFUSED: Ruling(Next.FAIL),
    Outcome.ANSWER_BROKEN: Ruling(Next.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
}


def outcome_of_slot(slot: PutRecordsResultEntry, bundle: Bundle, shard_map: ShardMap, now_ms: int) -> Outcome:
    if slot.error_code is not None:
        return Outcome.SLOT_THROTTLED if slot.error_code == _THROTTLED_SLOT else Outcome.SLOT_FAILED
    if slot.shard_id is None or slot.sequence_number is None:
        return Outcome.ANSWER_BROKEN
    if not bundle.is_aggregate:
        return Outcome.ALONE
    if bundle.predicted is not None and bundle.predicted.shard_id == slot.shard_id:
        return Outcome.WHERE_PREDICTED
    actual = shard_map.find(slot.shard_id, now_ms)
    if actual is not None:
        return Outcome.ELSEWHERE_IN_RANGE if bundle.is_within(actual) else Outcome.ELSEWHERE_STRADDLING
    if bundle.has_one_hash_key:
        return Outcome.ELSEWHERE_IN_RANGE
    return Outcome.ELSEWHERE_UNKNOWN


def outcome_of_error(error: AnabranchError) -> Outcome:
    match error:
        case InvalidRequestError():
            return Outcome.CALL_INVALID
        case TransportError():
            return Outcome.CALL_UNANSWERED if error.maybe_sent else Outcome.CALL_NOT_SENT
        case UnavailableError():
            return Outcome.CALL_UNAVAILABLE
        case ServiceError() if error.retryable:
            return Outcome.CALL_TURNED_AWAY
        case _:
            return Outcome.CALL_REFUSED


def refused_shard_id(message: str | None) -> str | None:
    """The shard that a throttled slot's message names."""
    found = _SHARD_ID.search(message or "")
    return found[0] if found else None
