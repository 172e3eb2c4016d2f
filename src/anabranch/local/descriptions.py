"""How streams, shards and consumers are written in answers. Members that AWS leaves out are absent."""

from typing import Any

from anabranch._wire.timestamps import Timestamp
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Consumer, Stream

__all__ = ["describe_consumer", "describe_shard", "describe_stream_settings", "list_tags"]


def describe_shard(shard: Shard) -> dict[str, Any]:
    members: dict[str, Any] = {"ShardId": shard.shard_id}
    members.update(zip(("ParentShardId", "AdjacentParentShardId"), shard.parent_ids, strict=False))
    start, end = shard.hash_key_range
    members["HashKeyRange"] = {"StartingHashKey": str(start), "EndingHashKey": str(end)}
    numbers = members["SequenceNumberRange"] = {"StartingSequenceNumber": str(shard.starting_sequence_number)}
    if shard.ending_sequence_number is not None:
        numbers["EndingSequenceNumber"] = str(shard.ending_sequence_number)
    return members


def describe_stream_settings(stream: Stream) -> dict[str, Any]:
    """What DescribeStream and DescribeStreamSummary have in common."""
    members: dict[str, Any] = {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "StreamStatus": stream.status,
        "StreamModeDetails": {"StreamMode": stream.mode},
        "RetentionPeriodHours": stream.retention_hours,
        "StreamCreationTimestamp": creation_time(stream),
        "EnhancedMonitoring": [{"ShardLevelMetrics": list(stream.metrics)}],
        "EncryptionType": "NONE" if stream.key_id is None else "KMS",
    }
    if stream.key_id is not None:
        members["KeyId"] = stream.key_id
    return members


def creation_time(stream: Stream | Consumer) -> Timestamp:
    """Whole seconds, as the service keeps them."""
    return Timestamp(stream.created_ms // 1000)


def describe_consumer(consumer: Consumer) -> dict[str, Any]:
    return {
        "ConsumerName": consumer.name,
        "ConsumerARN": consumer.arn,
        "ConsumerStatus": consumer.status,
        "ConsumerCreationTimestamp": creation_time(consumer),
    }


def list_tags(tags: dict[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": tags[key]} for key in sorted(tags)]
