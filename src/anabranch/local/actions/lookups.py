"""The table of operations, and how they find the stream, shard, consumer or position that a request names.

An operation is a function of account, request and time. PutRecords and SubscribeToShard are not in the table, because
they do not return a plain answer.

A lookup raises the service's error if something is missing or not ready. For operations on records, a CREATING stream
does not exist. Operations that change a stream need it to be ACTIVE.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from anabranch.limits import LIST_SHARDS_TOKEN_LIFETIME_MS
from anabranch.local.errors import (
    LocalError,
    in_use,
    invalid_argument,
    not_found,
    shard_not_found,
    stream_not_found,
    validation,
)
from anabranch.local.shapes import REQUESTS
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import (
    PageToken,
    Timestamp,
    full_shard_id,
    parse_sequence_number,
    read_token,
    shard_id_of,
)
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Consumer, Stream

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
Perform: TypeAlias = Callable[[Account, Request, int], Answer]

ACTIONS: Final[dict[str, Perform]] = {}


def action(operation: str) -> Callable[[Perform], Perform]:
    """Registers the decorated function as an operation."""
    assert operation in REQUESTS, f"{operation} has no request shape"
    assert operation not in ACTIONS, f"{operation} is registered twice"

    def register(perform: Perform) -> Perform:
        ACTIONS[operation] = perform
        return perform

    return register


_STREAM_ARN: Final = re.compile(r"arn:[^:]+:kinesis:[^:]*:(?P<account>\d{12}):stream/(?P<name>[^/]+)")
_CONSUMER_ARN: Final = re.compile(
    r"(?P<stream>arn:[^:]+:kinesis:[^:]*:\d{12}:stream/[^/]+)/consumer/(?P<name>[^/:]+):\d+"
)


def find_stream(account: Account, request: Request) -> Stream:
    name, arn = request.get("StreamName"), request.get("StreamARN")
    if name is None and arn is None:
        raise invalid_argument("Either StreamName or StreamARN must be provided.")
    if arn is None:
        return _stream_named(account, str(name))
    stream = find_stream_by_arn(account, arn)
    if name is not None and name != stream.name:
        raise invalid_argument(f"StreamName {name} and StreamARN {arn} do not name the same stream.")
    return stream


def find_stream_by_arn(account: Account, arn: str) -> Stream:
    found = _STREAM_ARN.fullmatch(arn)
    if found is None:
        raise invalid_argument(f"StreamARN {arn} is not the ARN of a stream.")
    if arn != account.stream_arn(found["name"]):
        raise stream_not_found(found["name"], found["account"])
    return _stream_named(account, found["name"])


def find_readable_stream(account: Account, request: Request) -> Stream:
    stream = find_stream(account, request)
    if stream.status == "CREATING":
        raise stream_not_found(stream.name, account.settings.account_id)
    return stream


def find_active_stream(account: Account, request: Request) -> Stream:
    return check_active(account, find_stream(account, request))


def check_active(account: Account, stream: Stream) -> Stream:
    if stream.status != "ACTIVE":
        raise in_use(
            f"Stream {stream.name} under account {account.settings.account_id} not ACTIVE, "
            f"instead in state {stream.status}"
        )
    return stream


def check_active_or_updating(account: Account, stream: Stream) -> Stream:
    """For operations that are allowed during a reshard, but not while CREATING or DELETING."""
    return stream if stream.status == "UPDATING" else check_active(account, stream)


def check_provisioned(operation: str, stream: Stream) -> Stream:
    if stream.mode != "PROVISIONED":
        raise validation(f"{operation} is not supported for stream {stream.name}: its mode is {stream.mode}.")
    return stream


def check_on_demand(what: str, stream: Stream) -> Stream:
    if stream.mode != "ON_DEMAND":
        raise invalid_argument(f"{what} is only supported for on-demand streams; {stream.name} is {stream.mode}.")
    return stream


def find_shard(account: Account, stream: Stream, shard_id: str, now_ms: int) -> Shard:
    shard = stream.shard(shard_id, account.horizon_ms(stream, now_ms))
    if shard is None:
        raise shard_not_found(full_shard_id(shard_id) or shard_id, stream.name, account.settings.account_id)
    return shard


def find_readable_shard(account: Account, request: Request, now_ms: int) -> tuple[Stream, Shard]:
    """The stream and the shard of a read. If there is no such stream, AWS still names the shard."""
    shard_id = _checked_shard_id(account, request, "ShardId")
    try:
        stream = find_readable_stream(account, request)
    except LocalError as error:
        if error.code != "ResourceNotFoundException":
            raise
        raise shard_not_found(shard_id, _stream_name(request), account.settings.account_id) from None
    return stream, find_shard(account, stream, shard_id, now_ms)


def find_shards_to_change(
    account: Account, request: Request, members: tuple[str, ...], now_ms: int
) -> tuple[Stream, list[Shard]]:
    """For SplitShard and MergeShards: the stream, and the open shards that these members name."""
    shard_ids = [_checked_shard_id(account, request, member) for member in members]
    stream = find_stream(account, request)
    return stream, [_find_shard_to_change(account, stream, shard_id, now_ms) for shard_id in shard_ids]


def _checked_shard_id(account: Account, request: Request, member: str) -> str:
    shard_id = full_shard_id(request[member])
    if shard_id is None:
        label = f"stream {_stream_name(request)} under account {account.settings.account_id}"
        raise not_found(f"Could not find shard {request[member]} in {label}.")
    return shard_id


def _stream_name(request: Request) -> str:
    return str(request.get("StreamName") or request.get("StreamARN", "").rpartition("/")[2])


def _find_shard_to_change(account: Account, stream: Stream, shard_id: str, now_ms: int) -> Shard:
    shard = stream.shard(shard_id, account.horizon_ms(stream, now_ms))
    label = account.stream_label(stream)
    if shard is None:
        raise not_found(f"Could not find shard {shard_id} in {label}.")
    if not shard.is_open:
        raise invalid_argument(
            f"Shard {shard.shard_id} in {label} has already been merged or split, "
            "and thus is not eligible for merging or splitting."
        )
    return shard


def find_consumer(account: Account, request: Request) -> tuple[Stream, Consumer]:
    """By ConsumerARN, or by StreamARN and ConsumerName. All three may be given if they agree."""
    arn, name, stream_arn = (request.get(key) for key in ("ConsumerARN", "ConsumerName", "StreamARN"))
    if arn is None:
        if name is None or stream_arn is None:
            raise invalid_argument("Either ConsumerARN, or both StreamARN and ConsumerName, must be provided.")
        stream = find_stream_by_arn(account, stream_arn)
        consumer = stream.consumers.get(name)
        if consumer is None:
            raise not_found(
                f"Consumer {name}, under stream {stream.name}, account {account.settings.account_id} not found."
            )
        return stream, consumer
    stream, consumer = find_consumer_by_arn(account, arn)
    if name not in {None, consumer.name} or stream_arn not in {None, stream.arn}:
        raise invalid_argument(f"ConsumerARN {arn} conflicts with StreamARN {stream_arn} or ConsumerName {name}.")
    return stream, consumer


def find_consumer_by_arn(account: Account, arn: str) -> tuple[Stream, Consumer]:
    found = _CONSUMER_ARN.fullmatch(arn)
    if found is None:
        raise invalid_argument(f"ConsumerARN {arn} is not the ARN of a consumer.")
    stream = find_stream_by_arn(account, found["stream"])
    consumer = stream.consumers.get(found["name"])
    if consumer is None or consumer.arn != arn:
        raise not_found(f"Consumer {arn}, account {account.settings.account_id} not found.")
    return stream, consumer


def find_resource(account: Account, request: Request) -> tuple[Stream, Stream | Consumer]:
    """The stream, and the stream or consumer that ResourceARN names."""
    arn = request["ResourceARN"]
    if ":channel/" in arn:
        raise not_found(f"Resource {arn} not found: channels are not supported by this server.")
    if "/consumer/" in arn:
        return find_consumer_by_arn(account, arn)
    stream = find_stream_by_arn(account, arn)
    return stream, stream


def check_creation_time(account: Account, stream: Stream, request: Request) -> None:
    """StreamCreationTimestamp tells streams apart that had the same name."""
    asked = request.get("StreamCreationTimestamp")
    if asked is not None and int(asked) != int(stream.creation_timestamp):
        raise stream_not_found(stream.name, account.settings.account_id)


def find_token(account: Account, text: str, operation: str, now_ms: int) -> PageToken:
    return read_token(text, operation, now_ms, account.settings.scaled_ms(LIST_SHARDS_TOKEN_LIFETIME_MS))


def _stream_named(account: Account, name: str) -> Stream:
    stream = account.streams.get(name)
    if stream is None:
        raise stream_not_found(name, account.settings.account_id)
    return stream


class StartingPosition(NamedTuple):
    type: str
    sequence_number: str | None
    timestamp: float | None


def resolve_position(shard: Shard, start: StartingPosition, now_ms: int, operation: str, label: str) -> int:
    """The lowest sequence number that will be read. `label` names the stream in error messages."""
    _check_combination(start)
    if start.sequence_number is not None:
        number = _checked_number(shard, start.sequence_number, operation, label)
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


def _checked_number(shard: Shard, text: str, operation: str, label: str) -> int:
    number = int(text)
    parts = parse_sequence_number(number)
    if parts is None:
        raise _invalid(text, shard, operation, label, "")
    if parts.shard_index != shard.index:
        raise invalid_argument(
            f"Invalid StartingSequenceNumber. It encodes {shard_id_of(parts.shard_index)}, "
            f"while it was used in a call to a shard with {shard.shard_id}"
        )
    if parts.created_s != shard.created_s:
        raise _invalid(text, shard, operation, label, " because it did not come from this stream")
    if parts.counter > shard.counter + 1 and number != shard.ending_sequence_number:
        raise _invalid(text, shard, operation, label, " because this shard has no such record yet")
    return number


def _invalid(text: str, shard: Shard, operation: str, label: str, why: str) -> LocalError:
    return invalid_argument(
        f"StartingSequenceNumber {text} used in {operation} on shard {shard.shard_id} in {label} is invalid{why}."
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
