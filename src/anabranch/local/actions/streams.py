"""Streams: create, delete, describe, list, and change their settings. The settings of the account."""

from typing import Final

from anabranch import limits
from anabranch.local.actions.calls import Answer, Call, action
from anabranch.local.actions.resources import check_tags
from anabranch.local.errors import in_use, invalid_argument, limit_exceeded, validation
from anabranch.local.shapes import METRIC_NAMES
from anabranch.local.state.account import COMMITMENT_MS, SHARD_LIMIT
from anabranch.local.state.identifiers import PageToken, full_shard_id, write_token
from anabranch.local.state.stream import EncryptionChange, Stream, StreamMode

_ON_DEMAND_STREAMS_MAX: Final = 50  # developer guide: on-demand streams per account
_CREATING_MAX: Final = 5  # API reference: streams in CREATING at any time
_PAGE_MAX: Final = 100  # API reference: shards of DescribeStream, streams of ListStreams; also the default
_WARM_THROUGHPUT_MIBPS_MAX: Final = 10 * 1024  # API reference: 10 GiB per second


@action("CreateStream")
def create_stream(call: Call) -> Answer:
    """Provisioned if ShardCount is given, otherwise on demand."""
    name = call.request["StreamName"]
    if name in call.account.streams:
        raise in_use(f"Stream {name} under account {call.account_id} already exists.")
    mode, shard_count = _mode_and_count(call)
    warm_throughput = _warm_throughput(call, mode)
    distribution = call.request.get("RecordDistributionStrategy", "USER_PARTITION_KEY")
    if distribution == "AUTO" and mode != "ON_DEMAND":
        raise invalid_argument("RecordDistributionStrategy AUTO is only supported for on-demand streams.")
    tags = dict(call.request.get("Tags", {}))
    check_tags(tags)
    call.account.check_shard_room(shard_count)
    creating = sum(stream.status == "CREATING" for stream in call.account.streams.values())
    if call.account.enforces_limits and creating >= _CREATING_MAX:
        raise limit_exceeded(
            f"This request would exceed the limit of {_CREATING_MAX} streams in CREATING of account {call.account_id}."
        )
    stream = Stream(
        name=name,
        arn=call.account.stream_arn(name),
        created_ms=call.now_ms,
        status="CREATING",
        mode=mode,
        tags=tags,
        max_record_kib=call.request.get("MaxRecordSizeInKiB", limits.RECORD_BYTES_DEFAULT_MAX // limits.KIB),
        warm_throughput_mibps=warm_throughput,
        distribution=distribution,
    )
    stream.open_first_shards(shard_count)
    call.account.add_stream(stream, call.now_ms)
    return {}


def _mode_and_count(call: Call) -> tuple[StreamMode, int]:
    shard_count = call.request.get("ShardCount")
    details = call.request.get("StreamModeDetails")
    mode: StreamMode = details["StreamMode"] if details else "ON_DEMAND" if shard_count is None else "PROVISIONED"
    if mode == "PROVISIONED":
        if shard_count is None:
            raise validation("ShardCount must be provided for a stream in PROVISIONED mode.")
        return mode, shard_count
    if shard_count is not None:
        raise validation("ShardCount must not be provided for a stream in ON_DEMAND mode.")
    present = sum(stream.mode == "ON_DEMAND" for stream in call.account.streams.values())
    if present >= _ON_DEMAND_STREAMS_MAX:
        raise limit_exceeded(
            f"This request would exceed the limit of {_ON_DEMAND_STREAMS_MAX} on-demand streams of account "
            f"{call.account_id} in {call.account.settings.region}."
        )
    return mode, limits.ON_DEMAND_SHARD_COUNT


def _warm_throughput(call: Call, mode: str) -> int | None:
    warm_throughput: int | None = call.request.get("WarmThroughputMiBps")
    if warm_throughput is not None and (mode != "ON_DEMAND" or not call.account.commitment.is_enabled(call.now_ms)):
        raise validation(
            "WarmThroughputMiBps needs a stream in ON_DEMAND mode and an account with "
            "MinimumThroughputBillingCommitment enabled."
        )
    return warm_throughput


@action("DeleteStream")
def delete_stream(call: Call) -> Answer:
    """Fails while consumers are registered, unless EnforceConsumerDeletion is set."""
    stream = call.find_stream()
    if stream.consumers and not call.request.get("EnforceConsumerDeletion"):
        raise in_use(
            f"Stream {stream.name} under account {call.account_id} has existing consumers, "
            "they must be deleted first or EnforceConsumerDeletion must be set to true."
        )
    if stream.status != "DELETING":
        call.account.delete(stream, stream, call.now_ms)
    return {}


@action("DescribeStream")
def describe_stream(call: Call) -> Answer:
    stream = call.find_stream()
    stream.forget_expired_shards(call.horizon_ms(stream))
    after = call.request.get("ExclusiveStartShardId", "")
    after = full_shard_id(after) or after
    shards = [] if stream.status == "CREATING" else [s for s in stream.shards.values() if s.shard_id > after]
    limit = min(call.request.get("Limit", _PAGE_MAX), _PAGE_MAX)
    description = _describe_settings(stream)
    description["Shards"] = [shard.members() for shard in shards[:limit]]
    description["HasMoreShards"] = len(shards) > limit
    return {"StreamDescription": description}


@action("DescribeStreamSummary")
def describe_stream_summary(call: Call) -> Answer:
    stream = call.find_stream()
    summary = _describe_settings(stream)
    summary["OpenShardCount"] = 0 if stream.status == "CREATING" else stream.open_shard_count
    summary["ConsumerCount"] = len(stream.consumers)
    summary["MaxRecordSizeInKiB"] = stream.max_record_kib
    if stream.mode == "ON_DEMAND":
        summary["RecordDistributionStrategy"] = stream.distribution
        if stream.warm_throughput_mibps is not None and call.account.commitment.is_enabled(call.now_ms):
            summary["WarmThroughput"] = {
                "TargetMiBps": stream.warm_throughput_mibps,
                "CurrentMiBps": stream.warm_throughput_mibps,
            }
    return {"StreamDescriptionSummary": summary}


def _describe_settings(stream: Stream) -> Answer:
    """What DescribeStream and DescribeStreamSummary have in common."""
    members: Answer = {
        **_summary(stream),
        "RetentionPeriodHours": stream.retention_hours,
        "EnhancedMonitoring": [{"ShardLevelMetrics": list(stream.metrics)}],
        "EncryptionType": "NONE" if stream.key_id is None else "KMS",
    }
    if stream.key_id is not None:
        members["KeyId"] = stream.key_id
    return members


def _summary(stream: Stream) -> Answer:
    return {
        "StreamName": stream.name,
        "StreamARN": stream.arn,
        "StreamStatus": stream.status,
        "StreamModeDetails": {"StreamMode": stream.mode},
        "StreamCreationTimestamp": stream.creation_timestamp,
    }


@action("ListStreams")
def list_streams(call: Call) -> Answer:
    """In the order of their names."""
    after = call.request.get("ExclusiveStartStreamName", "")
    if "NextToken" in call.request:
        after = call.read_token().after
    names = sorted(name for name in call.account.streams if name > after)
    limit = min(call.request.get("Limit", _PAGE_MAX), _PAGE_MAX)
    page = names[:limit]
    answer: Answer = {
        "StreamNames": page,
        "HasMoreStreams": len(names) > limit,
        "StreamSummaries": [_summary(call.account.streams[name]) for name in page],
    }
    if len(names) > limit:
        answer["NextToken"] = write_token(PageToken(operation="ListStreams", after=page[-1], issued_ms=call.now_ms))
    return answer


@action("IncreaseStreamRetentionPeriod")
@action("DecreaseStreamRetentionPeriod")
def set_retention_period(call: Call) -> Answer:
    """Records that are unreadable before or after the change stay unreadable."""
    stream, hours = call.find_active_stream(), call.request["RetentionPeriodHours"]
    requested = f"Requested retention period ({hours} hours)"
    if hours < limits.RETENTION_HOURS_MIN:
        raise invalid_argument(
            f"Minimum allowed retention period is {limits.RETENTION_HOURS_MIN} hours. {requested} is too short."
        )
    if hours > limits.RETENTION_HOURS_MAX:
        raise invalid_argument(
            f"Maximum allowed retention period is {limits.RETENTION_HOURS_MAX} hours. {requested} is too long."
        )
    longer = call.operation == "IncreaseStreamRetentionPeriod"
    if hours < stream.retention_hours if longer else hours > stream.retention_hours:
        wrong, right = ("shorter", "Decrease") if longer else ("longer", "Increase")
        raise invalid_argument(
            f"{requested} for stream {stream.name} can not be {wrong} than "
            f"existing retention period ({stream.retention_hours} hours). Use {right}RetentionPeriod API."
        )
    before_ms = call.horizon_ms(stream)
    stream.retention_hours = hours
    stream.trimmed_before_ms = max(before_ms, call.horizon_ms(stream))
    call.account.mark_written(stream)
    return {}


@action("StartStreamEncryption")
@action("StopStreamEncryption")
def set_encryption(call: Call) -> Answer:
    """Marks later records as encrypted. No key is used or checked."""
    stream = call.find_active_stream()
    if call.request["EncryptionType"] != "KMS":
        raise invalid_argument("The only valid EncryptionType is KMS.")
    key_id = call.request["KeyId"] if call.operation == "StartStreamEncryption" else None
    call.account.update_stream(stream, call.now_ms, EncryptionChange(key_id))
    return {}


@action("EnableEnhancedMonitoring")
@action("DisableEnhancedMonitoring")
def set_enhanced_monitoring(call: Call) -> Answer:
    stream = call.find_active_stream()
    before, named = stream.metrics, set(call.request["ShardLevelMetrics"])
    if "ALL" in named:
        named = set(METRIC_NAMES)
    enables = call.operation == "EnableEnhancedMonitoring"
    stream.metrics = sorted({*before} | named if enables else {*before} - named)
    call.account.update_stream(stream, call.now_ms)
    return {
        "StreamName": stream.name,
        "CurrentShardLevelMetrics": before,
        "DesiredShardLevelMetrics": stream.metrics,
        "StreamARN": stream.arn,
    }


@action("UpdateStreamMode")
def update_stream_mode(call: Call) -> Answer:
    """The shards stay as they are."""
    stream = call.find_active_stream()
    mode = call.request["StreamModeDetails"]["StreamMode"]
    warm_throughput = _warm_throughput(call, mode)
    stream.mode = mode
    stream.warm_throughput_mibps = warm_throughput
    if mode == "PROVISIONED":
        stream.distribution = "USER_PARTITION_KEY"
    call.account.update_stream(stream, call.now_ms)
    return {}


def _check_on_demand(what: str, stream: Stream) -> None:
    if stream.mode != "ON_DEMAND":
        raise invalid_argument(f"{what} is only supported for on-demand streams; {stream.name} is {stream.mode}.")


@action("UpdateStreamRecordDistributionStrategy")
def update_stream_record_distribution_strategy(call: Call) -> Answer:
    """USER_PARTITION_KEY: the key chooses the shard. AUTO: the service does."""
    stream = call.find_active_stream()
    _check_on_demand("RecordDistributionStrategy", stream)
    stream.distribution = call.request["RecordDistributionStrategy"]
    call.account.mark_written(stream)
    return {}


@action("UpdateStreamWarmThroughput")
def update_stream_warm_throughput(call: Call) -> Answer:
    """Stored and returned. It changes no shard here."""
    stream = call.find_active_stream()
    _check_on_demand("Warm throughput", stream)
    if not call.account.commitment.is_enabled(call.now_ms):
        raise validation("Warm throughput needs an account with MinimumThroughputBillingCommitment enabled.")
    target = call.request["WarmThroughputMiBps"]
    if target > _WARM_THROUGHPUT_MIBPS_MAX:
        raise limit_exceeded(
            f"Warm throughput of {target} MiBps is over the limit of {_WARM_THROUGHPUT_MIBPS_MAX} MiBps."
        )
    before = stream.warm_throughput_mibps
    stream.warm_throughput_mibps = target
    call.account.update_stream(stream, call.now_ms)
    return {
        "StreamARN": stream.arn,
        "StreamName": stream.name,
        "WarmThroughput": {"TargetMiBps": target, "CurrentMiBps": before or 0},
    }


@action("UpdateMaxRecordSize")
def update_max_record_size(call: Call) -> Answer:
    stream = call.find_active_stream()
    stream.max_record_kib = call.request["MaxRecordSizeInKiB"]
    call.account.update_stream(stream, call.now_ms)
    return {}


@action("DescribeLimits")
def describe_limits(call: Call) -> Answer:
    return {
        "ShardLimit": SHARD_LIMIT,
        "OpenShardCount": call.account.open_shard_count,
        "OnDemandStreamCount": sum(stream.mode == "ON_DEMAND" for stream in call.account.streams.values()),
        "OnDemandStreamCountLimit": _ON_DEMAND_STREAMS_MAX,
    }


@action("DescribeAccountSettings")
def describe_account_settings(call: Call) -> Answer:
    return {"MinimumThroughputBillingCommitment": call.account.commitment.members(call.now_ms)}


@action("UpdateAccountSettings")
def update_account_settings(call: Call) -> Answer:
    if call.request["MinimumThroughputBillingCommitment"]["Status"] == "ENABLED":
        call.account.commitment.enable(call.now_ms, call.account.settings.scaled_ms(COMMITMENT_MS))
    else:
        call.account.commitment.disable(call.now_ms)
    call.account.mark_commitment()
    return {"MinimumThroughputBillingCommitment": call.account.commitment.members(call.now_ms)}
