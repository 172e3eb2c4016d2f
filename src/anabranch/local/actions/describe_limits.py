"""DescribeLimits: how many shards and on-demand streams the account has, and may have."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.actions.create_stream import ON_DEMAND_STREAMS_MAX
from anabranch.local.shapes import StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({})


def describe_limits(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- an action's form
    return {
        "ShardLimit": account.settings.shard_limit,
        "OpenShardCount": account.open_shard_count,
        "OnDemandStreamCount": sum(stream.mode == "ON_DEMAND" for stream in account.streams.values()),
        "OnDemandStreamCountLimit": ON_DEMAND_STREAMS_MAX,
    }
