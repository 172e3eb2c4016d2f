"""DescribeAccountSettings: the account's billing commitment."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.shapes import StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({})


def describe_account_settings(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- action's form
    return {"MinimumThroughputBillingCommitment": account.commitment.members(now_ms)}
