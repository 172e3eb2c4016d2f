"""From the names in a request to the things they mean, or the service's error for what is not there or not ready.

Streams go by name, by ARN or by both; consumers by ARN, or by name within a stream. The calls that carry records
do not see a stream before it is ACTIVE for the first time; the calls that change a stream want it ACTIVE now.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from anabranch.local.errors import in_use, invalid_argument, not_found, shard_not_found, stream_not_found, validation
from anabranch.local.state.account import Account
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Consumer, Stream

__all__ = [
    "check_active",
    "check_on_demand",
    "check_provisioned",
    "check_settled",
    "find_active_stream",
    "find_consumer",
    "find_consumer_by_arn",
    "find_readable_stream",
    "find_resource",
    "find_shard",
    "find_shard_to_change",
    "find_stream",
    "find_stream_by_arn",
]

_STREAM_ARN: Final = re.compile(r"arn:[^:]+:kinesis:[^:]*:(?P<account>\d{12}):stream/(?P<name>[^/]+)")
_CONSUMER_ARN: Final = re.compile(
    r"(?P<stream>arn:[^:]+:kinesis:[^:]*:\d{12}:stream/[^/]+)/consumer/(?P<name>[^/:]+):\d+"
)


def find_stream(account: Account, request: Mapping[str, Any]) -> Stream:
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


def find_readable_stream(account: Account, request: Mapping[str, Any]) -> Stream:
    stream = find_stream(account, request)
    if stream.status == "CREATING":
        raise stream_not_found(stream.name, account.settings.account_id)
    return stream


def find_active_stream(account: Account, request: Mapping[str, Any]) -> Stream:
    return check_active(account, find_stream(account, request))


def check_active(account: Account, stream: Stream) -> Stream:
    if stream.status != "ACTIVE":
        raise in_use(
            f"Stream {stream.name} under account {account.settings.account_id} not ACTIVE, "
            f"instead in state {stream.status}"
        )
    return stream


def check_settled(account: Account, stream: Stream) -> Stream:
    """For what may be done beside a reshard, but not to a stream that is not there yet or is going."""
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
        raise shard_not_found(shard_id, stream.name, account.settings.account_id)
    return shard


def find_shard_to_change(account: Account, stream: Stream, shard_id: str, now_ms: int) -> Shard:
    """For SplitShard and MergeShards, which say it in other words and want an open one."""
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


def find_consumer(account: Account, request: Mapping[str, Any]) -> tuple[Stream, Consumer]:
    """By ConsumerARN, or by StreamARN and ConsumerName; all three may be given if they agree."""
    arn, name, stream_arn = (request.get(key) for key in ("ConsumerARN", "ConsumerName", "StreamARN"))
    if arn is None:
        if name is None or stream_arn is None:
            raise invalid_argument("Either ConsumerARN, or both StreamARN and ConsumerName, must be provided.")
        stream = find_stream_by_arn(account, stream_arn)
        consumer = stream.consumers.get(name)
        if consumer is None:
            raise not_found(f"Consumer {name}, under stream {stream.name}, account {_owner(account)} not found.")
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
        raise not_found(f"Consumer {arn}, account {_owner(account)} not found.")
    return stream, consumer


def find_resource(account: Account, request: Mapping[str, Any]) -> tuple[Stream, Stream | Consumer]:
    """What ResourceARN names, and the stream that it belongs to."""
    arn = request["ResourceARN"]
    if ":channel/" in arn:
        raise not_found(f"Resource {arn} not found: channels are not part of this server.")
    if "/consumer/" in arn:
        return find_consumer_by_arn(account, arn)
    stream = find_stream_by_arn(account, arn)
    return stream, stream


def _owner(account: Account) -> str:
    return account.settings.account_id


def _stream_named(account: Account, name: str) -> Stream:
    stream = account.streams.get(name)
    if stream is None:
        raise stream_not_found(name, account.settings.account_id)
    return stream
