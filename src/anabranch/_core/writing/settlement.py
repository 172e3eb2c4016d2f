"""What the result of a PutRecords call means for each Kinesis record in it.

Each attempt gets an `Outcome`, from its entry of the response or from the error of the whole call. `RETRY_TABLE` says
what follows.

If an aggregate landed in another shard than predicted, it counts as delivered only if *all* of its records belong
there. If one does not, consumers skip the whole aggregate, and the others would be lost with it. If the range of that
shard is unknown, the aggregate and its lane wait for the next listing.

`maybe_written`: a request that was sent and not answered may have been written.
"""

import re
from typing import Final, Literal

import msgspec

from anabranch._core.writing.bundles import Bundle
from anabranch._core.writing.shard_map import ShardMap
from anabranch._wire.messages import PutRecordsResultEntry
from anabranch.errors import AnabranchError, InvalidRequestError, ServiceError, TransportError, UnavailableError

_THROTTLED: Final = "ProvisionedThroughputExceededException"
_SHARD_ID: Final = re.compile(r"shardId-\d{12}")


Outcome = Literal[
    "written",
    "written_straddling",
    "written_elsewhere",
    "entry_throttled",
    "entry_failed",
    "call_not_written",
    "call_maybe_written",
    "call_invalid",
    "call_refused",
]
"""What became of an entry; "call": of the whole call, or of an entry whose result says nothing.

- written_straddling: in a shard where not all records of the aggregate belong;
- written_elsewhere: in a shard whose range is not known yet;
- call_not_written: not sent, or rejected for now (over a quota, an expired token, a stream that is changing);
- call_maybe_written: the service failed, did not answer, or its response does not have one result per entry.
"""

NextStep = Literal["deliver", "send_again", "repack", "await_map", "bisect", "fail"]
"""What follows an outcome:

- send_again: the same bytes, before anything newer of the lane;
- repack: send all records again, grouped by the shards they belong to now;
- await_map: decide when the shard map has been refreshed;
- bisect: send smaller calls, then smaller bundles, until the record that the service rejects is found.
"""

Pause = Literal["none", "shard", "shard_if_most_failed", "shard_if_most_throttled", "stream"]
"""What pauses: "if_most" if most of the shard's last records failed, not this one alone. "throttled" also lowers the
rate.
"""


class RetryAction(msgspec.Struct, frozen=True):
    next: NextStep
    maybe_written: bool = False
    pause: Pause = "none"


RETRY_TABLE: Final[dict[Outcome, RetryAction]] = {
    "written": RetryAction("deliver"),
    # Written, but consumers that check ranges skip it. Others may see its records twice.
    "written_straddling": RetryAction("repack", maybe_written=True, pause="shard"),
    "written_elsewhere": RetryAction("await_map", maybe_written=True),
    "entry_throttled": RetryAction("send_again", pause="shard_if_most_throttled"),
    "entry_failed": RetryAction("send_again", pause="shard_if_most_failed"),
    "call_not_written": RetryAction("send_again", pause="stream"),
    "call_maybe_written": RetryAction("send_again", maybe_written=True, pause="stream"),
    "call_invalid": RetryAction("bisect"),
    "call_refused": RetryAction("fail"),
}


def outcome_of_result(result: PutRecordsResultEntry, bundle: Bundle, shard_map: ShardMap, now_ms: int) -> Outcome:
    if result.error_code is not None:
        return "entry_throttled" if result.error_code == _THROTTLED else "entry_failed"
    if result.shard_id is None or result.sequence_number is None:
        return "call_maybe_written"
    if not bundle.is_aggregate:  # any shard is right for a single record
        return "written"
    if bundle.predicted is not None and bundle.predicted.shard_id == result.shard_id:
        return "written"
    actual = shard_map.find(result.shard_id, now_ms)
    if actual is not None:
        return "written" if bundle.is_within(actual) else "written_straddling"
    return "written" if bundle.has_one_hash_key else "written_elsewhere"


def outcome_of_error(error: AnabranchError) -> Outcome:
    match error:
        case InvalidRequestError():
            return "call_invalid"
        case TransportError():
            return "call_maybe_written" if error.maybe_sent else "call_not_written"
        case UnavailableError():
            return "call_maybe_written"
        case ServiceError() if error.retryable:
            return "call_not_written"
        case _:
            return "call_refused"


def refused_shard_id(message: str | None) -> str | None:
    """The shard named in the error message of a throttled entry."""
    found = _SHARD_ID.search(message or "")
    return found[0] if found else None
