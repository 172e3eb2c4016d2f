"""What the result of a PutRecords call means for each Kinesis record in it.

Each attempt gets an `Outcome`, from its entry of the response or from the error of the whole call. `RETRY_TABLE` says
what follows.

If an aggregate landed in another shard than predicted, it counts only if *all* of its records belong there. Consumers
skip the whole aggregate if one record does not, so the others would be lost with it. If the range of that shard is
unknown, the aggregate waits for the next listing, and its lane waits with it.

`maybe_written` covers what we cannot know: a request that was sent and not answered may have been written.
"""

import re
from enum import Enum, auto
from typing import Final

import msgspec

from anabranch._core.writing.bundles import Bundle
from anabranch._core.writing.shard_map import ShardMap
from anabranch._wire.messages import PutRecordsResultEntry
from anabranch.errors import (
    AnabranchError,
    InvalidRequestError,
    ServiceError,
    TransportError,
    UnavailableError,
)

_THROTTLED: Final = "ProvisionedThroughputExceededException"
_SHARD_ID: Final = re.compile(r"shardId-\d{12}")


class Outcome(Enum):
    __hash__ = object.__hash__  # Enum's own is a Python function, and every record's outcome is looked up

    # the entry was written
    WRITTEN = auto()
    WRITTEN_STRADDLING = auto()
    """In a shard where not all records of the aggregate belong."""
    WRITTEN_ELSEWHERE = auto()
    """In a shard whose range is not known yet."""
    # the entry was not written
    ENTRY_THROTTLED = auto()
    ENTRY_FAILED = auto()
    # the whole call; or one entry whose result says nothing
    CALL_NOT_WRITTEN = auto()
    """It was not sent, or was rejected for now (over a quota, an expired token, a stream that is changing)."""
    CALL_MAYBE_WRITTEN = auto()
    """The service failed, did not answer, or its response does not have one result per entry."""
    CALL_INVALID = auto()
    CALL_REFUSED = auto()


class NextStep(Enum):
    DELIVERED = auto()
    SEND_AGAIN = auto()
    """The same bytes, before anything newer of the lane."""
    REPACK = auto()
    """Send all records again, grouped by the shards they belong to now."""
    AWAIT_MAP = auto()
    """Decide when the shard map has been refreshed."""
    BISECT = auto()
    """Send smaller calls, then smaller bundles, until the record that the service rejects is found."""
    FAIL = auto()


class Pause(Enum):
    NONE = auto()
    SHARD = auto()
    SHARD_IF_MOST_FAILED = auto()
    """Only if most of the shard's last records failed, not this one alone."""
    SHARD_IF_MOST_THROTTLED = auto()
    """The same, and lower the rate."""
    STREAM = auto()


class RetryAction(msgspec.Struct, frozen=True):
    next: NextStep
    maybe_written: bool = False
    pause: Pause = Pause.NONE


RETRY_TABLE: Final = {
    Outcome.WRITTEN: RetryAction(NextStep.DELIVERED),
    # Written, but consumers that check ranges skip it. Others may see its records twice.
    Outcome.WRITTEN_STRADDLING: RetryAction(NextStep.REPACK, maybe_written=True, pause=Pause.SHARD),
    Outcome.WRITTEN_ELSEWHERE: RetryAction(NextStep.AWAIT_MAP, maybe_written=True),
    Outcome.ENTRY_THROTTLED: RetryAction(NextStep.SEND_AGAIN, pause=Pause.SHARD_IF_MOST_THROTTLED),
    Outcome.ENTRY_FAILED: RetryAction(NextStep.SEND_AGAIN, pause=Pause.SHARD_IF_MOST_FAILED),
    Outcome.CALL_NOT_WRITTEN: RetryAction(NextStep.SEND_AGAIN, pause=Pause.STREAM),
    Outcome.CALL_MAYBE_WRITTEN: RetryAction(NextStep.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
    Outcome.CALL_INVALID: RetryAction(NextStep.BISECT),
    Outcome.CALL_REFUSED: RetryAction(NextStep.FAIL),
}


def outcome_of_result(result: PutRecordsResultEntry, bundle: Bundle, shard_map: ShardMap, now_ms: int) -> Outcome:
    if result.error_code is not None:
        return Outcome.ENTRY_THROTTLED if result.error_code == _THROTTLED else Outcome.ENTRY_FAILED
    if result.shard_id is None or result.sequence_number is None:
        return Outcome.CALL_MAYBE_WRITTEN
    if not bundle.is_aggregate:  # any shard is right for a single record
        return Outcome.WRITTEN
    if bundle.predicted is not None and bundle.predicted.shard_id == result.shard_id:
        return Outcome.WRITTEN
    actual = shard_map.find(result.shard_id, now_ms)
    if actual is not None:
        return Outcome.WRITTEN if bundle.is_within(actual) else Outcome.WRITTEN_STRADDLING
    return Outcome.WRITTEN if bundle.has_one_hash_key else Outcome.WRITTEN_ELSEWHERE


def outcome_of_error(error: AnabranchError) -> Outcome:
    match error:
        case InvalidRequestError():
            return Outcome.CALL_INVALID
        case TransportError():
            return Outcome.CALL_MAYBE_WRITTEN if error.maybe_sent else Outcome.CALL_NOT_WRITTEN
        case UnavailableError():
            return Outcome.CALL_MAYBE_WRITTEN
        case ServiceError() if error.retryable:
            return Outcome.CALL_NOT_WRITTEN
        case _:
            return Outcome.CALL_REFUSED


def refused_shard_id(message: str | None) -> str | None:
    """The shard named in the error message of a throttled entry."""
    found = _SHARD_ID.search(message or "")
    return found[0] if found else None
