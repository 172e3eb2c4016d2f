"""DescribeStreamSummary: a stream without its shards."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.descriptions import describe_stream_settings
from anabranch.local.lookups import find_stream
from anabranch.local.shapes import NAMED_STREAM, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({**NAMED_STREAM})


def describe_stream_summary(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_stream(account, request)
    summary = describe_stream_settings(stream)
    summary["OpenShardCount"] = 0 if stream.status == "CREATING" else stream.open_shard_count
    summary["ConsumerCount"] = len(stream.consumers)
    summary["MaxRecordSizeInKiB"] = stream.max_record_kib
    if stream.mode == "ON_DEMAND":
        summary["RecordDistributionStrategy"] = stream.distribution
        if stream.warm_throughput_mibps is not None and account.commitment.is_enabled(now_ms):
            summary["WarmThroughput"] = {
                "TargetMiBps": stream.warm_throughput_mibps,
                "CurrentMiBps": stream.warm_throughput_mibps,
            }
    return {"StreamDescriptionSummary": summary}
