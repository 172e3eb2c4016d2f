"""UpdateStreamRecordDistributionStrategy: whether keys choose the shard (USER_PARTITION_KEY) or the service does
(AUTO); at once.
"""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.lookups import check_active, check_on_demand, find_stream_by_arn
from anabranch.local.shapes import DISTRIBUTION_STRATEGY, STREAM_BY_ARN, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape(
    {**STREAM_BY_ARN, "RecordDistributionStrategy": DISTRIBUTION_STRATEGY},
    required=("StreamARN", "RecordDistributionStrategy"),
)


def update_stream_record_distribution_strategy(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- an action's form
    stream = check_active(account, find_stream_by_arn(account, request["StreamARN"]))
    check_on_demand("RecordDistributionStrategy", stream)
    stream.distribution = request["RecordDistributionStrategy"]
    account.mark_written(stream)
    return {}
