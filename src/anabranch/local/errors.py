"""AWS's errors: a code, a message, an HTTP status.

Messages are AWS's where they are known, because clients match on them.
"""

from datetime import UTC, datetime
from functools import partial
from typing import Final

THROUGHPUT_EXCEEDED: Final = "ProvisionedThroughputExceededException"


class LocalError(Exception):
    """An error that the service returns."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status

    def members(self) -> dict[str, str]:
        """The body of the response, spelled as on AWS."""
        key = "Message" if self.code == "SerializationException" else "message"
        return {"__type": self.code, **({key: self.message} if self.message else {})}


dry_run: Final = partial(
    LocalError, "DryRunOperationException", "Request would have succeeded, but the DryRun flag is set."
)
in_use: Final = partial(LocalError, "ResourceInUseException")
invalid_argument: Final = partial(LocalError, "InvalidArgumentException")
limit_exceeded: Final = partial(LocalError, "LimitExceededException")
not_found: Final = partial(LocalError, "ResourceNotFoundException")
serialization: Final = partial(LocalError, "SerializationException")
validation: Final = partial(LocalError, "ValidationException")


def stream_not_found(stream_name: str, account_id: str) -> LocalError:
    return not_found(f"Stream {stream_name} under account {account_id} not found.")


def shard_not_found(shard_id: str, stream_name: str, account_id: str) -> LocalError:
    """For operations that read a shard. SplitShard and MergeShards have another message."""
    return not_found(f"Shard {shard_id} in stream {stream_name} under account {account_id} does not exist")


def throughput_exceeded(shard_id: str, stream_name: str, account_id: str) -> LocalError:
    return LocalError(THROUGHPUT_EXCEEDED, slot_message(THROUGHPUT_EXCEEDED, shard_id, stream_name, account_id))


def slot_message(code: str, shard_id: str, stream_name: str, account_id: str) -> str:
    """The ErrorMessage for an ErrorCode of one PutRecords entry."""
    if code == "InternalFailure":
        return "Internal Service Failure"
    return f"Rate exceeded for shard {shard_id} in stream {stream_name} under account {account_id}."


def expired_iterator(created_ms: int, now_ms: int, lifetime_ms: int) -> LocalError:
    created, now = _java_date(created_ms), _java_date(now_ms)
    return LocalError(
        "ExpiredIteratorException",
        f"Iterator expired. The iterator was created at time {created} while right now it is {now} "
        f"which is further in the future than the tolerated delay of {lifetime_ms} milliseconds.",
    )


def _java_date(ms: int) -> str:
    """`Mon Nov 16 08:27:04 UTC 2026`, as Java prints a date."""
    when = datetime.fromtimestamp(ms // 1000, UTC)
    weekday_and_month = when.ctime()[:7]  # `Mon Nov`, independent of the locale
    return f"{weekday_and_month} {when.day:02d} {when:%H:%M:%S} UTC {when.year}"
