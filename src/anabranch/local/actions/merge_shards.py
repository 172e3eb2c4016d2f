"""MergeShards: two open shards with adjacent ranges become one; the first named is the lower one."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import invalid_argument
from anabranch.local.lookups import check_active, check_provisioned, find_shard_to_change, find_stream
from anabranch.local.shapes import NAMED_STREAM, SHARD_ID, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.stream import MergeChange

REQUEST = StructureShape(
    {**NAMED_STREAM, "ShardToMerge": SHARD_ID, "AdjacentShardToMerge": SHARD_ID},
    required=("ShardToMerge", "AdjacentShardToMerge"),
)


def merge_shards(account: Account, request: Request, now_ms: int) -> Answer:
    stream = check_provisioned("MergeShards", find_stream(account, request))
    shard = find_shard_to_change(account, stream, request["ShardToMerge"], now_ms)
    adjacent = find_shard_to_change(account, stream, request["AdjacentShardToMerge"], now_ms)
    if shard.hash_key_range.end + 1 != adjacent.hash_key_range.start:
        raise invalid_argument(
            f"Shards {shard.shard_id} and {adjacent.shard_id} in {account.stream_label(stream)} "
            "are not an adjacent pair of shards eligible for merging"
        )
    check_active(account, stream)
    account.update_stream(stream, now_ms, MergeChange(shard.shard_id, adjacent.shard_id))
    return {}
