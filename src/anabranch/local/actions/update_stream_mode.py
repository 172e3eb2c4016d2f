"""UpdateStreamMode: between provisioned and on demand; the shards stay as they are."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import validation
from anabranch.local.lookups import check_active, find_stream_by_arn
from anabranch.local.shapes import NATURAL_INTEGER, STREAM_BY_ARN, STREAM_MODE_DETAILS, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape(
    {**STREAM_BY_ARN, "StreamModeDetails": STREAM_MODE_DETAILS, "WarmThroughputMiBps": NATURAL_INTEGER},
    required=("StreamARN", "StreamModeDetails"),
)


def update_stream_mode(account: Account, request: Request, now_ms: int) -> Answer:
    stream = check_active(account, find_stream_by_arn(account, request["StreamARN"]))
    mode, warm_throughput = request["StreamModeDetails"]["StreamMode"], request.get("WarmThroughputMiBps")
    if warm_throughput is not None and (mode != "ON_DEMAND" or not account.commitment.is_enabled(now_ms)):
        raise validation(
            "WarmThroughputMiBps is only valid when the mode is updated to ON_DEMAND in an account with "
            "MinimumThroughputBillingCommitment enabled."
        )
    stream.mode = mode
    stream.warm_throughput_mibps = warm_throughput
    if mode == "PROVISIONED":
        stream.distribution = "USER_PARTITION_KEY"
    account.update_stream(stream, now_ms)
    return {}
