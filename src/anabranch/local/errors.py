"""AWS's errors as values to be raised: a code, a message, an HTTP status.

The shell writes `LocalError.members()` into the body, whatever its encoding. One quirk of the service lives here and nowhere else:
a SerializationException calls its message `Message`, all others `message`. Texts are AWS's where they are known, because clients
match on them; the functions below form those that more than one place needs.
"""

from datetime import UTC, datetime

from anabranch.local.timestamp import java_date

__all__ = [
    "LocalError",
    "expired_iterator",
    "in_use",
    "invalid_argument",
    "limit_exceeded",
    "not_found",
    "shard_not_found",
    "slot_message",
    "stream_not_found",
    "throughput_exceeded",
]

INTERNAL_FAILURE = "InternalFailure"
THROUGHPUT_EXCEEDED = "ProvisionedThroughputExceededException"


class LocalError(Exception):
    """An answer of the service that is an error."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status

    def members(self) -> dict[str, str]:
        key = "Message" if self.code == "SerializationException" else "message"
        return {"__type": self.code, key: self.message}


def invalid_argument(message: str) -> LocalError:
    return LocalError("InvalidArgumentException", message)


def not_found(message: str) -> LocalError:
    return LocalError("ResourceNotFoundException", message)


def in_use(message: str) -> LocalError:
    return LocalError("ResourceInUseException", message)


def limit_exceeded(message: str) -> LocalError:
    return LocalError("LimitExceededException", message)


def stream_not_found(stream_name: str, account_id: str) -> LocalError:
    return not_found(f"Stream {stream_name} under account {account_id} not found.")


def shard_not_found(shard_id: str, stream_name: str, account_id: str) -> LocalError:
    """As the calls that read a shard say it; SplitShard and MergeShards have words of their own."""
    return not_found(f"Shard {shard_id} in stream {stream_name} under account {account_id} does not exist")


def throughput_exceeded(shard_id: str, stream_name: str, account_id: str) -> LocalError:
    return LocalError(THROUGHPUT_EXCEEDED, slot_message(THROUGHPUT_EXCEEDED, shard_id, stream_name, account_id))


def slot_message(code: str, shard_id: str, stream_name: str, account_id: str) -> str:
    """The ErrorMessage that goes with an ErrorCode in one slot of a PutRecords answer."""
    if code == INTERNAL_FAILURE:
        return "Internal Service Failure"
    return f"Rate exceeded for shard {shard_id} in stream {stream_name} under account {account_id}."


def expired_iterator(created_ms: int, now_ms: int, lifetime_ms: int) -> LocalError:
    created, now = (java_date(datetime.fromtimestamp(ms // 1000, UTC)) for ms in (created_ms, now_ms))
    return LocalError(
        "ExpiredIteratorException",
        f"Iterator expired. The iterator was created at time {created} while right now it is {now} "
        f"which is further in the future than the tolerated delay of {lifetime_ms} milliseconds.",
    )
