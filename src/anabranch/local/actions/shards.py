"""Shards: listing, splitting, merging and scaling."""

from typing import Final

import msgspec

from anabranch.limits import UPDATE_SHARD_COUNT_PER_DAY
from anabranch.local.actions.calls import Answer, Call, action
from anabranch.local.errors import invalid_argument, limit_exceeded, stream_not_found
from anabranch.local.state.identifiers import PageToken, Timestamp, full_shard_id, write_token
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import HOUR_MS, MergeChange, ScaleChange, SplitChange, Stream

_PAGE_MAX: Final = 1000  # API reference: also the default
_SHARDS_MAX: Final = 10_000  # API reference: shards of a stream after UpdateShardCount


@action("ListShards")
def list_shards(call: Call) -> Answer:
    """A shard is open from its own opening until its children open, so at any time the open shards cover the hash space
    exactly once. A Timestamp before the trim horizon, or before the creation of the stream, is moved there.
    """
    query = _query(call)
    stream = call.find_stream_by_name(query.stream_name)
    if stream.created_ms != query.stream_created_ms:
        raise stream_not_found(stream.name, call.account_id)
    horizon_ms = call.horizon_ms(stream)
    stream.forget_expired_shards(horizon_ms)
    at_ms = max(query.filter_ms, horizon_ms, stream.created_ms)
    candidates = [] if stream.status == "CREATING" else stream.shards.values()
    shards = [s for s in candidates if s.shard_id > query.after and _is_wanted(s, query.filter_type, at_ms)]
    limit = min(call.request.get("MaxResults", _PAGE_MAX), _PAGE_MAX)
    answer: Answer = {"Shards": [shard.members() for shard in shards[:limit]]}
    if len(shards) > limit:
        following = msgspec.structs.replace(query, after=shards[limit - 1].shard_id, issued_ms=call.now_ms)
        answer["NextToken"] = write_token(following)
    return answer


def _query(call: Call) -> PageToken:
    """The query, in the form that a page token carries to the next page."""
    if "NextToken" in call.request:
        for name in ("StreamName", "ExclusiveStartShardId", "StreamCreationTimestamp", "ShardFilter"):
            if name in call.request:
                raise invalid_argument(f"NextToken and {name} cannot be provided together.")
        return call.read_token()
    stream = call.find_stream()
    call.check_creation_time(stream)
    shard_filter = call.request.get("ShardFilter", {"Type": "FROM_TRIM_HORIZON"})
    kind = shard_filter["Type"]
    after = [text for text in (call.request.get("ExclusiveStartShardId"), shard_filter.get("ShardId")) if text]
    if (kind == "AFTER_SHARD_ID") != ("ShardId" in shard_filter):
        raise invalid_argument(f"ShardFilter of type {kind}: only AFTER_SHARD_ID requires and accepts ShardId.")
    if kind.endswith("_TIMESTAMP") != ("Timestamp" in shard_filter):
        raise invalid_argument(
            f"ShardFilter of type {kind}: only AT_TIMESTAMP and FROM_TIMESTAMP require and accept Timestamp."
        )
    return PageToken(
        operation="ListShards",
        after=max((full_shard_id(text) or text for text in after), default=""),
        issued_ms=call.now_ms,
        stream_name=stream.name,
        stream_created_ms=stream.created_ms,
        filter_type=kind,
        filter_ms=Timestamp(shard_filter.get("Timestamp", 0)).milliseconds,
    )


def _is_wanted(shard: Shard, filter_type: str, at_ms: int) -> bool:
    if filter_type == "AT_LATEST":
        return shard.is_open
    if filter_type.startswith("AT_"):
        return shard.was_open_at(at_ms)
    return shard.closed_ms is None or shard.closed_ms >= at_ms


@action("SplitShard")
def split_shard(call: Call) -> Answer:
    stream, (shard,) = call.find_shards_to_change("ShardToSplit")
    call.check_provisioned(stream)
    key = int(call.request["NewStartingHashKey"])
    start, end = shard.hash_key_range
    if not start + 1 < key < end:
        raise invalid_argument(
            f"NewStartingHashKey {key} used in SplitShard() on shard {shard.shard_id} in "
            f"{call.label(stream)} "
            f"is not both greater than one plus the shard's StartingHashKey {start} "
            f"and less than the shard's EndingHashKey {end}."
        )
    call.check_active(stream)
    call.account.check_shard_room(1)
    call.account.update_stream(stream, call.now_ms, SplitChange(shard.shard_id, str(key)))
    return {}


@action("MergeShards")
def merge_shards(call: Call) -> Answer:
    """ShardToMerge must be the lower of the two."""
    stream, (shard, adjacent) = call.find_shards_to_change("ShardToMerge", "AdjacentShardToMerge")
    call.check_provisioned(stream)
    if shard.hash_key_range.end + 1 != adjacent.hash_key_range.start:
        raise invalid_argument(
            f"Shards {shard.shard_id} and {adjacent.shard_id} in {call.label(stream)} "
            "are not an adjacent pair of shards eligible for merging"
        )
    call.check_active(stream)
    call.account.update_stream(stream, call.now_ms, MergeChange(shard.shard_id, adjacent.shard_id))
    return {}


@action("UpdateShardCount")
def update_shard_count(call: Call) -> Answer:
    """Uniform scaling: at most double or half the shards per call."""
    stream = call.find_active_stream()
    call.check_provisioned(stream)
    present, target = stream.open_shard_count, call.request["TargetShardCount"]
    counts = f"Current open shard count: {present} Target shard count: {target}"
    if target > 2 * present:
        raise limit_exceeded(f"UpdateShardCount cannot scale up over double your current open shard count. {counts}")
    if 2 * target < present:
        raise limit_exceeded(f"UpdateShardCount cannot scale down below half your current open shard count. {counts}")
    if target > max(_SHARDS_MAX, present):
        raise limit_exceeded(f"UpdateShardCount cannot scale over {_SHARDS_MAX} shards in a stream. {counts}")
    call.account.check_shard_room(target - present)
    _check_daily_limit(call, stream)
    call.account.update_stream(stream, call.now_ms, ScaleChange(target))
    return {
        "StreamName": stream.name,
        "CurrentShardCount": present,
        "TargetShardCount": target,
        "StreamARN": stream.arn,
    }


def _check_daily_limit(call: Call, stream: Stream) -> None:
    recent = [called_ms for called_ms in stream.scaled_at_ms if call.now_ms - called_ms < 24 * HOUR_MS]
    if call.account.enforces_limits and len(recent) >= UPDATE_SHARD_COUNT_PER_DAY:
        raise limit_exceeded(
            f"UpdateShardCount can be called {UPDATE_SHARD_COUNT_PER_DAY} times in 24 hours for {call.label(stream)}."
        )
    stream.scaled_at_ms = [*recent, call.now_ms][-UPDATE_SHARD_COUNT_PER_DAY:]
