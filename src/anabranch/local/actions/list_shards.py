"""ListShards: shards of a stream, by any of the six filters, a page at a time.

A shard is open at a time from the moment it opened until the moment its children did: at any time the shards that
were open then cover the hash space exactly once. Times before the trim horizon, or before the stream, count as
that.
"""

from collections.abc import Callable
from typing import Final

from anabranch._wire.timestamps import Timestamp
from anabranch.limits import LIST_SHARDS_TOKEN_LIFETIME_MS
from anabranch.local.actions.action import Answer, Request
from anabranch.local.descriptions import creation_time, describe_shard
from anabranch.local.errors import invalid_argument, stream_not_found
from anabranch.local.lookups import find_stream
from anabranch.local.shapes import (
    NAMED_STREAM,
    NEXT_TOKEN,
    PAGE_SIZE,
    SHARD_ID,
    TIMESTAMP,
    StringShape,
    StructureShape,
)
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import PageToken, full_shard_id, read_token, write_token
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Stream

_FILTER_TYPES: Final = (
    "AFTER_SHARD_ID",
    "AT_TRIM_HORIZON",
    "FROM_TRIM_HORIZON",
    "AT_LATEST",
    "AT_TIMESTAMP",
    "FROM_TIMESTAMP",
)

REQUEST = StructureShape(
    {
        **NAMED_STREAM,
        "NextToken": NEXT_TOKEN,
        "ExclusiveStartShardId": SHARD_ID,
        "MaxResults": PAGE_SIZE,
        "StreamCreationTimestamp": TIMESTAMP,
        "ShardFilter": StructureShape(
            {"Type": StringShape(values=_FILTER_TYPES), "ShardId": SHARD_ID, "Timestamp": TIMESTAMP},
            required=("Type",),
        ),
    }
)

_PAGE_MAX: Final = 1000  # API: also the default


def list_shards(account: Account, request: Request, now_ms: int) -> Answer:
    question = _question(account, request, now_ms)
    stream = find_stream(account, {"StreamName": question.stream_name})
    if stream.created_ms != question.stream_created_ms:
        raise stream_not_found(stream.name, account.settings.account_id)
    horizon_ms = account.horizon_ms(stream, now_ms)
    stream.forget_expired_shards(horizon_ms)
    wanted = _filter(question, max(horizon_ms, stream.created_ms))
    candidates = [] if stream.status == "CREATING" else stream.shards.values()
    shards = [shard for shard in candidates if shard.shard_id > question.after and wanted(shard)]
    limit = min(request.get("MaxResults", _PAGE_MAX), _PAGE_MAX)
    answer: Answer = {"Shards": [describe_shard(shard) for shard in shards[:limit]]}
    if len(shards) > limit:
        following = PageToken(
            operation="ListShards",
            after=shards[limit - 1].shard_id,
            issued_ms=now_ms,
            stream_name=stream.name,
            stream_created_ms=stream.created_ms,
            filter_type=question.filter_type,
            filter_ms=question.filter_ms,
        )
        answer["NextToken"] = write_token(following)
    return answer


def _question(account: Account, request: Request, now_ms: int) -> PageToken:
    """What is asked for, in the form in which a token carries it on to the next page."""
    if "NextToken" in request:
        for name in ("StreamName", "StreamARN", "ExclusiveStartShardId", "StreamCreationTimestamp", "ShardFilter"):
            if name in request and name != "StreamARN":
                raise invalid_argument(f"NextToken and {name} cannot be provided together.")
        lifetime_ms = account.settings.scaled_ms(LIST_SHARDS_TOKEN_LIFETIME_MS)
        return read_token(request["NextToken"], "ListShards", now_ms, lifetime_ms)
    stream = find_stream(account, request)
    _check_creation(account, stream, request)
    shard_filter = request.get("ShardFilter", {"Type": "FROM_TRIM_HORIZON"})
    kind = shard_filter["Type"]
    after = [text for text in (request.get("ExclusiveStartShardId"), shard_filter.get("ShardId")) if text]
    if (kind == "AFTER_SHARD_ID") != ("ShardId" in shard_filter):
        raise invalid_argument(f"ShardFilter of type {kind}: ShardId goes with AFTER_SHARD_ID, and only with it.")
    if kind.endswith("_TIMESTAMP") != ("Timestamp" in shard_filter):
        raise invalid_argument(
            f"ShardFilter of type {kind}: Timestamp goes with AT_TIMESTAMP and FROM_TIMESTAMP, and only with them."
        )
    return PageToken(
        operation="ListShards",
        after=max((full_shard_id(text) or text for text in after), default=""),
        issued_ms=now_ms,
        stream_name=stream.name,
        stream_created_ms=stream.created_ms,
        filter_type=kind,
        filter_ms=Timestamp(shard_filter.get("Timestamp", 0)).milliseconds,
    )


def _check_creation(account: Account, stream: Stream, request: Request) -> None:
    asked = request.get("StreamCreationTimestamp")
    if asked is not None and int(asked) != int(creation_time(stream)):
        raise stream_not_found(stream.name, account.settings.account_id)


def _filter(question: PageToken, horizon_ms: int) -> Callable[[Shard], bool]:
    at_ms = max(question.filter_ms, horizon_ms)
    match question.filter_type:
        case "AT_LATEST":
            return lambda shard: shard.is_open
        case "AT_TRIM_HORIZON":
            return lambda shard: shard.was_open_at(horizon_ms)
        case "AT_TIMESTAMP":
            return lambda shard: shard.was_open_at(at_ms)
        case "FROM_TIMESTAMP":
            return lambda shard: shard.closed_ms is None or shard.closed_ms >= at_ms
        case _:
            return lambda _: True
