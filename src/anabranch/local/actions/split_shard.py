"""SplitShard: one open shard becomes two, at a hash key that lies inside of it."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import invalid_argument
from anabranch.local.lookups import check_active, check_provisioned, find_shard_to_change, find_stream
from anabranch.local.shapes import HASH_KEY, NAMED_STREAM, SHARD_ID, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.stream import SplitChange

REQUEST = StructureShape(
    {**NAMED_STREAM, "ShardToSplit": SHARD_ID, "NewStartingHashKey": HASH_KEY},
    required=("ShardToSplit", "NewStartingHashKey"),
)


def split_shard(account: Account, request: Request, now_ms: int) -> Answer:
    stream = check_provisioned("SplitShard", find_stream(account, request))
    shard = find_shard_to_change(account, stream, request["ShardToSplit"], now_ms)
    key = int(request["NewStartingHashKey"])
    start, end = shard.hash_key_range
    if not start + 1 < key < end:
        raise invalid_argument(
            f"NewStartingHashKey {key} used in SplitShard() on shard {shard.shard_id} in "
            f"{account.stream_label(stream)} "
            f"is not both greater than one plus the shard's StartingHashKey {start} "
            f"and less than the shard's EndingHashKey {end}."
        )
    check_active(account, stream)
    account.check_shard_room(1)
    account.update_stream(stream, now_ms, SplitChange(shard.shard_id, str(key)))
    return {}
