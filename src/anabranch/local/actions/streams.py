"""Streams: create, delete, describe, list, and change their settings. The settings of the account."""

from collections.abc import Callable
from typing import Final

from anabranch import limits
from anabranch.local.actions.lookups import (
    Answer,
    Request,
    action,
    check_on_demand,
    find_active_stream,
    find_stream,
    find_token,
)
from anabranch.local.actions.resources import check_tags
from anabranch.local.errors import in_use, invalid_argument, limit_exceeded, validation
from anabranch.local.shapes import METRIC_NAMES
from anabranch.local.state.account import COMMITMENT_MS, Account
from anabranch.local.state.identifiers import PageToken, full_shard_id, write_token
from anabranch.local.state.stream import EncryptionChange, Stream, StreamMode

_ON_DEMAND_STREAMS_MAX: Final = 50  # developer guide: on-demand streams per account
_CREATING_MAX: Final = 5  # API reference: streams in CREATING at any time
_PAGE_MAX: Final = 100  # API reference: shards of DescribeStream, streams of ListStreams; also the default
_WARM_THROUGHPUT_MIBPS_MAX: Final = 10 * 1024  # API reference: 10 GiB per second


@action("CreateStream")
def create_stream(account: Account, request: Request, now_ms: int) -> Answer:
    """Provisioned if ShardCount is given, otherwise on demand."""
    name = request["StreamName"]
    if name in account.streams:
        raise in_use(f"Stream {name} under account {account.settings.account_id} already exists.")
    mode, shard_count = _mode_and_count(account, request)
    warm_throughput = _warm_throughput(account, request, mode, now_ms)
    distribution = request.get("RecordDistributionStrategy", "USER_PARTITION_KEY")
    if distribution == "AUTO" and mode != "ON_DEMAND":
        raise invalid_argument("RecordDistributionStrategy AUTO is only supported for on-demand streams.")
    tags = dict(request.get("Tags", {}))
    check_tags(tags)
    account.check_shard_room(shard_count)
    creating = sum(stream.status == "CREATING" for stream in account.streams.values())
    if account.enforces_limits and creating >= _CREATING_MAX:
        raise limit_exceeded(
            f"This request would exceed the limit of {_CREATING_MAX} streams in CREATING of account "
            f"{account.settings.account_id}."
        )
    stream = Stream(
        name=name,
        arn=account.stream_arn(name),
        created_ms=now_ms,
        status="CREATING",
        deadline_ms=None,
        mode=mode,
        tags=tags,
        max_record_kib=request.get("MaxRecordSizeInKiB", limits.RECORD_BYTES_DEFAULT_MAX // limits.KIB),
        warm_throughput_mibps=warm_throughput,
        distribution=distribution,
    )
    stream.open_first_shards(shard_count)
    account.add_stream(stream, now_ms)
    return {}


def _mode_and_count(account: Account, request: Request) -> tuple[StreamMode, int]:
    shard_count = request.get("ShardCount")
    details = request.get("StreamModeDetails")
    mode: StreamMode = details["StreamMode"] if details else "ON_DEMAND" if shard_count is None else "PROVISIONED"
    if mode == "PROVISIONED":
        if shard_count is None:
            raise validation("ShardCount must be provided for a stream in PROVISIONED mode.")
        return mode, shard_count
    if shard_count is not None:
        raise validation("ShardCount must not be provided for a stream in ON_DEMAND mode.")
    present = sum(stream.mode == "ON_DEMAND" for stream in account.streams.values())
    if present >= _ON_DEMAND_STREAMS_MAX:
        raise limit_exceeded(
            f"This request would exceed the limit of {_ON_DEMAND_STREAMS_MAX} on-demand streams of account "
            f"{account.settings.account_id} in {account.settings.region}."
        )
    return mode, limits.ON_DEMAND_SHARD_COUNT


def _warm_throughput(account: Account, request: Request, mode: str, now_ms: int) -> int | None:
    warm_throughput: int | None = request.get("WarmThroughputMiBps")
    if warm_throughput is not None and (mode != "ON_DEMAND" or not account.commitment.is_enabled(now_ms)):
        raise validation(
            "WarmThroughputMiBps needs a stream in ON_DEMAND mode and an account with "
            "MinimumThroughputBillingCommitment enabled."
        )
    return warm_throughput


@action("DeleteStream")
def delete_stream(account: Account, request: Request, now_ms: int) -> Answer:
    """Fails while consumers are registered, unless EnforceConsumerDeletion is set."""
    stream = find_stream(account, request)
    if stream.consumers and not request.get("EnforceConsumerDeletion"):
        raise in_use(
            f"Stream {stream.name} under account {account.settings.account_id} has existing consumers, "
            "they must be deleted first or EnforceConsumerDeletion must be set to true."
        )
    if stream.status != "DELETING":
        account.delete_stream(stream, now_ms)
    return {}


@action("DescribeStream")
def describe_stream(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_stream(account, request)
    stream.forget_expired_shards(account.horizon_ms(stream, now_ms))
    after = request.get("ExclusiveStartShardId", "")
    after = full_shard_id(after) or after
    shards = [] if stream.status == "CREATING" else [s for s in stream.shards.values() if s.shard_id > after]
    limit = min(request.get("Limit", _PAGE_MAX), _PAGE_MAX)
    description = _describe_settings(stream)
    description["Shards"] = [shard.members() for shard in shards[:limit]]
    description["HasMoreShards"] = len(shards) > limit
    return {"StreamDescription": description}


@action("DescribeStreamSummary")
def describe_stream_summary(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_stream(account, request)
    summary = _describe_settings(stream)
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
def list_streams(account: Account, request: Request, now_ms: int) -> Answer:
    """In the order of their names."""
    after = request.get("ExclusiveStartStreamName", "")
    if "NextToken" in request:
        after = find_token(account, request["NextToken"], "ListStreams", now_ms).after
    names = sorted(name for name in account.streams if name > after)
    limit = min(request.get("Limit", _PAGE_MAX), _PAGE_MAX)
    page = names[:limit]
    answer: Answer = {
        "StreamNames": page,
        "HasMoreStreams": len(names) > limit,
        "StreamSummaries": [_summary(account.streams[name]) for name in page],
    }
    if len(names) > limit:
        answer["NextToken"] = write_token(PageToken(operation="ListStreams", after=page[-1], issued_ms=now_ms))
    return answer


def _set_retention(account: Account, request: Request, now_ms: int, *, longer: bool) -> Answer:
    stream, hours = find_active_stream(account, request), request["RetentionPeriodHours"]
    requested = f"Requested retention period ({hours} hours)"
    if hours < limits.RETENTION_HOURS_MIN:
        raise invalid_argument(
            f"Minimum allowed retention period is {limits.RETENTION_HOURS_MIN} hours. {requested} is too short."
        )
    if hours > limits.RETENTION_HOURS_MAX:
        raise invalid_argument(
            f"Maximum allowed retention period is {limits.RETENTION_HOURS_MAX} hours. {requested} is too long."
        )
    if hours < stream.retention_hours if longer else hours > stream.retention_hours:
        wrong, right = ("shorter", "Decrease") if longer else ("longer", "Increase")
        raise invalid_argument(
            f"{requested} for stream {stream.name} can not be {wrong} than "
            f"existing retention period ({stream.retention_hours} hours). Use {right}RetentionPeriod API."
        )
    before_ms = account.horizon_ms(stream, now_ms)
    stream.retention_hours = hours
    # Records that are unreadable before or after the change stay unreadable.
    stream.trimmed_before_ms = max(before_ms, account.horizon_ms(stream, now_ms))
    account.mark_written(stream)
    return {}


@action("IncreaseStreamRetentionPeriod")
def increase_stream_retention_period(account: Account, request: Request, now_ms: int) -> Answer:
    """Records that have already expired stay gone."""
    return _set_retention(account, request, now_ms, longer=True)


@action("DecreaseStreamRetentionPeriod")
def decrease_stream_retention_period(account: Account, request: Request, now_ms: int) -> Answer:
    """Older records become unreadable at once and for good."""
    return _set_retention(account, request, now_ms, longer=False)


@action("StartStreamEncryption")
def start_stream_encryption(account: Account, request: Request, now_ms: int) -> Answer:
    """Marks later records as encrypted. No key is used or checked."""
    return _set_key(account, request, now_ms, request["KeyId"])


@action("StopStreamEncryption")
def stop_stream_encryption(account: Account, request: Request, now_ms: int) -> Answer:
    return _set_key(account, request, now_ms, None)


def _set_key(account: Account, request: Request, now_ms: int, key_id: str | None) -> Answer:
    stream = find_active_stream(account, request)
    if request["EncryptionType"] != "KMS":
        raise invalid_argument("The only valid EncryptionType is KMS.")
    account.update_stream(stream, now_ms, EncryptionChange(key_id))
    return {}


def _set_metrics(
    account: Account, request: Request, now_ms: int, combine: Callable[[set[str], set[str]], set[str]]
) -> Answer:
    stream = find_active_stream(account, request)
    before, named = stream.metrics, set(request["ShardLevelMetrics"])
    stream.metrics = sorted(combine(set(before), set(METRIC_NAMES) if "ALL" in named else named))
    account.update_stream(stream, now_ms)
    return {
        "StreamName": stream.name,
        "CurrentShardLevelMetrics": before,
        "DesiredShardLevelMetrics": stream.metrics,
        "StreamARN": stream.arn,
    }


@action("EnableEnhancedMonitoring")
def enable_enhanced_monitoring(account: Account, request: Request, now_ms: int) -> Answer:
    return _set_metrics(account, request, now_ms, set.union)


@action("DisableEnhancedMonitoring")
def disable_enhanced_monitoring(account: Account, request: Request, now_ms: int) -> Answer:
    return _set_metrics(account, request, now_ms, set.difference)


@action("UpdateStreamMode")
def update_stream_mode(account: Account, request: Request, now_ms: int) -> Answer:
    """The shards stay as they are."""
    stream = find_active_stream(account, request)
    mode = request["StreamModeDetails"]["StreamMode"]
    warm_throughput = _warm_throughput(account, request, mode, now_ms)
    stream.mode = mode
    stream.warm_throughput_mibps = warm_throughput
    if mode == "PROVISIONED":
        stream.distribution = "USER_PARTITION_KEY"
    account.update_stream(stream, now_ms)
    return {}


@action("UpdateStreamRecordDistributionStrategy")
def update_stream_record_distribution_strategy(account: Account, request: Request, now_ms: int) -> Answer:
    """USER_PARTITION_KEY: the key chooses the shard. AUTO: the service does."""
    stream = find_active_stream(account, request)
    check_on_demand("RecordDistributionStrategy", stream)
    stream.distribution = request["RecordDistributionStrategy"]
    account.mark_written(stream)
    return {}


@action("UpdateStreamWarmThroughput")
def update_stream_warm_throughput(account: Account, request: Request, now_ms: int) -> Answer:
    """Stored and returned. It changes no shard here."""
    stream = check_on_demand("Warm throughput", find_active_stream(account, request))
    if not account.commitment.is_enabled(now_ms):
        raise validation("Warm throughput needs an account with MinimumThroughputBillingCommitment enabled.")
    target = request["WarmThroughputMiBps"]
    if target > _WARM_THROUGHPUT_MIBPS_MAX:
        raise limit_exceeded(
            f"Warm throughput of {target} MiBps is over the limit of {_WARM_THROUGHPUT_MIBPS_MAX} MiBps."
        )
    before = stream.warm_throughput_mibps
    stream.warm_throughput_mibps = target
    account.update_stream(stream, now_ms)
    return {
        "StreamARN": stream.arn,
        "StreamName": stream.name,
        "WarmThroughput": {"TargetMiBps": target, "CurrentMiBps": 0 if before is None else before},
    }


@action("UpdateMaxRecordSize")
def update_max_record_size(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_active_stream(account, request)
    stream.max_record_kib = request["MaxRecordSizeInKiB"]
    account.update_stream(stream, now_ms)
    return {}


@action("DescribeLimits")
def describe_limits(account: Account, request: Request, now_ms: int) -> Answer:
    return {
        "ShardLimit": account.settings.shard_limit,
        "OpenShardCount": account.open_shard_count,
        "OnDemandStreamCount": sum(stream.mode == "ON_DEMAND" for stream in account.streams.values()),
        "OnDemandStreamCountLimit": _ON_DEMAND_STREAMS_MAX,
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
