"""UpdateAccountSettings: starts the billing commitment, or asks for its end."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.shapes import StringShape, StructureShape
from anabranch.local.state.account import COMMITMENT_MS, Account

REQUEST = StructureShape(
    {
        "MinimumThroughputBillingCommitment": StructureShape(
            {"Status": StringShape(values=("ENABLED", "DISABLED"))}, required=("Status",)
        )
    },
    required=("MinimumThroughputBillingCommitment",),
)


def update_account_settings(account: Account, request: Request, now_ms: int) -> Answer:
    if request["MinimumThroughputBillingCommitment"]["Status"] == "ENABLED":
        account.commitment.enable(now_ms, account.settings.scaled_ms(COMMITMENT_MS))
    else:
        account.commitment.disable(now_ms)
    account.mark_commitment()
    return {"MinimumThroughputBillingCommitment": account.commitment.members(now_ms)}
