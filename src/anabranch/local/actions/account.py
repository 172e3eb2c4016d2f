"""Account-level operations: limits and the billing commitment."""

from anabranch.local.actions.registry import Answer, Request, action
from anabranch.local.actions.streams import ON_DEMAND_STREAMS_MAX
from anabranch.local.state.account import COMMITMENT_MS, Account


@action("DescribeLimits")
def describe_limits(account: Account, request: Request, now_ms: int) -> Answer:
    return {
        "ShardLimit": account.settings.shard_limit,
        "OpenShardCount": account.open_shard_count,
        "OnDemandStreamCount": sum(stream.mode == "ON_DEMAND" for stream in account.streams.values()),
        "OnDemandStreamCountLimit": ON_DEMAND_STREAMS_MAX,
    }


@action("DescribeAccountSettings")
def describe_account_settings(account: Account, request: Request, now_ms: int) -> Answer:
    return {"MinimumThroughputBillingCommitment": account.commitment.members(now_ms)}


@action("UpdateAccountSettings")
def update_account_settings(account: Account, request: Request, now_ms: int) -> Answer:
    if request["MinimumThroughputBillingCommitment"]["Status"] == "ENABLED":
        account.commitment.enable(now_ms, account.settings.scaled_ms(COMMITMENT_MS))
    else:
        account.commitment.disable(now_ms)
    account.mark_commitment()
    return {"MinimumThroughputBillingCommitment": account.commitment.members(now_ms)}
