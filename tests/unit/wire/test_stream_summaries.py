import json

from anabranch._model.streams import StreamName
from anabranch._wire.bodies import decode_describe_stream_summary, encode_describe_stream_summary
from anabranch._wire.messages import StreamSummary

REQUIRED = {
    "StreamName": "orders",
    "StreamARN": "arn:x",
    "StreamStatus": "ACTIVE",
    "RetentionPeriodHours": 24,
    "StreamCreationTimestamp": 1.5e9,
    "EnhancedMonitoring": [{"ShardLevelMetrics": []}],
    "OpenShardCount": 4,
}


def test_a_stream_is_asked_for_by_its_name() -> None:
    assert encode_describe_stream_summary(StreamName("orders")) == [b'{"StreamName":"orders"}']


def test_an_old_or_small_service_may_say_only_what_is_required() -> None:
    body = json.dumps({"StreamDescriptionSummary": REQUIRED}).encode()
    assert decode_describe_stream_summary(body, server_seconds=1.0) == StreamSummary(
        name="orders",
        arn="arn:x",
        status="ACTIVE",
        created_seconds=1.5e9,
        retention_hours=24,
        open_shard_count=4,
        server_seconds=1.0,
    )


def test_everything_that_is_said_is_kept() -> None:
    summary = REQUIRED | {
        "StreamModeDetails": {"StreamMode": "ON_DEMAND"},
        "MaxRecordSizeInKiB": 10240,
        "RecordDistributionStrategy": "AUTO",
    }
    decoded = decode_describe_stream_summary(json.dumps({"StreamDescriptionSummary": summary}).encode())
    assert decoded.stream_mode == "ON_DEMAND"
    assert decoded.record_bytes_max == 10 << 20
    assert decoded.record_distribution == "AUTO"
