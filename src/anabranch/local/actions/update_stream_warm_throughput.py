"""UpdateStreamWarmThroughput: how much an on-demand stream is ready to take at once. Kept and shown; it changes no
shard here.
"""

from typing import Final

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import limit_exceeded, validation
from anabranch.local.lookups import check_on_demand, find_active_stream
from anabranch.local.shapes import NAMED_STREAM, NATURAL_INTEGER, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({**NAMED_STREAM, "WarmThroughputMiBps": NATURAL_INTEGER}, required=("WarmThroughputMiBps",))

_MIBPS_MAX: Final = 10 * 1024  # API: 10 GiB a second


def update_stream_warm_throughput(account: Account, request: Request, now_ms: int) -> Answer:
    stream = check_on_demand("Warm throughput", find_active_stream(account, request))
    if not account.commitment.is_enabled(now_ms):
        raise validation("Warm throughput needs an account with MinimumThroughputBillingCommitment enabled.")
    target = request["WarmThroughputMiBps"]
    if target > _MIBPS_MAX:
        raise limit_exceeded(f"Warm throughput of {target} MiBps is over the limit of {_MIBPS_MAX} MiBps.")
    before = stream.warm_throughput_mibps
    stream.warm_throughput_mibps = target
    account.update_stream(stream, now_ms)
    return {
        "StreamARN": stream.arn,
        "StreamName": stream.name,
        "WarmThroughput": {"TargetMiBps": target, "CurrentMiBps": 0 if before is None else before},
    }
