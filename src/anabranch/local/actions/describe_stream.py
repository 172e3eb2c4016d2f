"""DescribeStream: a stream with a page of its shards."""

from typing import Final

from anabranch.local.actions.action import Answer, Request
from anabranch.local.descriptions import describe_shard, describe_stream_settings
from anabranch.local.lookups import find_stream
from anabranch.local.shapes import NAMED_STREAM, PAGE_SIZE, SHARD_ID, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import full_shard_id

REQUEST = StructureShape({**NAMED_STREAM, "Limit": PAGE_SIZE, "ExclusiveStartShardId": SHARD_ID})

_PAGE_MAX: Final = 100  # API: also the default


def describe_stream(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_stream(account, request)
    stream.forget_expired_shards(account.horizon_ms(stream, now_ms))
    after = request.get("ExclusiveStartShardId", "")
    after = full_shard_id(after) or after
    shards = [] if stream.status == "CREATING" else [s for s in stream.shards.values() if s.shard_id > after]
    limit = min(request.get("Limit", _PAGE_MAX), _PAGE_MAX)
    description = describe_stream_settings(stream)
    description["Shards"] = [describe_shard(shard) for shard in shards[:limit]]
    description["HasMoreShards"] = len(shards) > limit
    return {"StreamDescription": description}
