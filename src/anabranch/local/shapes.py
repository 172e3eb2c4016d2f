"""The shapes of requests, from AWS's service model, and `validate`, which checks a request against its shape.

`validate` reports up to ten violations at once, in AWS's words: `2 validation errors detected: Value 'x!' at
'streamName' failed to satisfy constraint: Member must ...; Value ...`. It does not check types: `bodies` does that when
it decodes a body, and Python callers are trusted.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeAlias

import msgspec

from anabranch.limits import LIST_SHARDS_RESULTS_MAX, PUT_RECORDS_ENTRIES_MAX
from anabranch.local.errors import LocalError, validation


class BooleanShape(msgspec.Struct, frozen=True):
    pass


class TimestampShape(msgspec.Struct, frozen=True):
    pass


class IntegerShape(msgspec.Struct, frozen=True, kw_only=True):
    value_min: int | None = None
    value_max: int | None = None


class SizedShape(msgspec.Struct, frozen=True, kw_only=True):
    length_min: int | None = None
    length_max: int | None = None


class BlobShape(SizedShape, frozen=True):
    pass


class StringShape(SizedShape, frozen=True, kw_only=True):
    pattern: str | None = None
    """Of the whole string."""
    values: tuple[str, ...] | None = None


class ListShape(SizedShape, frozen=True, kw_only=True):
    item: "Shape"


class MapShape(SizedShape, frozen=True, kw_only=True):
    key: StringShape
    value: StringShape


class StructureShape(msgspec.Struct, frozen=True):
    members: dict[str, "Shape"]
    required: tuple[str, ...] = ()


Shape: TypeAlias = (
    StringShape | IntegerShape | BooleanShape | BlobShape | TimestampShape | ListShape | MapShape | StructureShape
)

_VIOLATIONS_MAX: Final = 10  # a PutRecords call may have 500 bad records

_NAME: Final = StringShape(length_min=1, length_max=128, pattern=r"[a-zA-Z0-9_.-]+")
_SEQUENCE_NUMBER: Final = StringShape(pattern=r"0|([1-9]\d{0,128})")
_ITERATOR_TYPE: Final = StringShape(
    values=("AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER", "TRIM_HORIZON", "LATEST", "AT_TIMESTAMP")
)
_FILTER_TYPE: Final = StringShape(
    values=("AFTER_SHARD_ID", "AT_TRIM_HORIZON", "FROM_TRIM_HORIZON", "AT_LATEST", "AT_TIMESTAMP", "FROM_TIMESTAMP")
)
_DATA: Final = BlobShape(length_max=10_485_760)
_PARTITION_KEY: Final = StringShape(length_min=1, length_max=256)
_PAGE_SIZE: Final = IntegerShape(value_min=1, value_max=LIST_SHARDS_RESULTS_MAX)
_TAG_KEY: Final = StringShape(length_min=1, length_max=128)
_TAG_VALUE: Final = StringShape(length_min=0, length_max=256)

HASH_KEY: Final = StringShape(pattern=r"0|([1-9]\d{0,38})")
METRIC_NAMES: Final = (
    "IncomingBytes",
    "IncomingRecords",
    "OutgoingBytes",
    "OutgoingRecords",
    "WriteProvisionedThroughputExceeded",
    "ReadProvisionedThroughputExceeded",
    "IteratorAgeMilliseconds",
)

_MEMBERS: Final[dict[str, Shape]] = {
    "AdjacentShardToMerge": _NAME,
    "ConsumerARN": StringShape(
        length_min=1,
        length_max=2048,
        pattern=r"(arn):aws.*:kinesis:.*:\d{12}:.*stream\/[a-zA-Z0-9_.-]+\/consumer\/[a-zA-Z0-9_.-]+:[0-9]+",
    ),
    "ConsumerName": _NAME,
    "Data": _DATA,
    "DryRun": BooleanShape(),
    "EncryptionType": StringShape(values=("NONE", "KMS")),
    "EnforceConsumerDeletion": BooleanShape(),
    "ExclusiveStartShardId": _NAME,
    "ExclusiveStartStreamName": _NAME,
    "ExclusiveStartTagKey": _TAG_KEY,
    "ExplicitHashKey": HASH_KEY,
    "KeyId": StringShape(length_min=1, length_max=2048),
    "Limit": _PAGE_SIZE,
    "MaxRecordSizeInKiB": IntegerShape(value_min=1024, value_max=10_240),
    "MaxResults": _PAGE_SIZE,
    "MinimumThroughputBillingCommitment": StructureShape(
        {"Status": StringShape(values=("ENABLED", "DISABLED"))}, required=("Status",)
    ),
    "NewStartingHashKey": HASH_KEY,
    "NextToken": StringShape(length_min=1, length_max=1_048_576),
    "PartitionKey": _PARTITION_KEY,
    "Policy": StringShape(),
    "RecordDistributionStrategy": StringShape(values=("AUTO", "USER_PARTITION_KEY")),
    "Records": ListShape(
        item=StructureShape(
            {"Data": _DATA, "ExplicitHashKey": HASH_KEY, "PartitionKey": _PARTITION_KEY}, required=("Data",)
        ),
        length_min=1,
        length_max=PUT_RECORDS_ENTRIES_MAX,
    ),
    "ResourceARN": StringShape(
        length_min=1, length_max=2048, pattern=r"arn:aws.*:kinesis:.*:\d{12}:.*(stream|channel)/\S+"
    ),
    "RetentionPeriodHours": IntegerShape(),
    "ScalingType": StringShape(values=("UNIFORM_SCALING",)),
    "SequenceNumberForOrdering": _SEQUENCE_NUMBER,
    "ShardCount": IntegerShape(value_min=1),
    "ShardFilter": StructureShape(
        {"Type": _FILTER_TYPE, "ShardId": _NAME, "Timestamp": TimestampShape()}, required=("Type",)
    ),
    "ShardId": _NAME,
    "ShardIterator": StringShape(length_min=1, length_max=512),
    "ShardIteratorType": _ITERATOR_TYPE,
    "ShardLevelMetrics": ListShape(item=StringShape(values=(*METRIC_NAMES, "ALL")), length_min=1, length_max=7),
    "ShardToMerge": _NAME,
    "ShardToSplit": _NAME,
    "StartingPosition": StructureShape(
        {"Type": _ITERATOR_TYPE, "SequenceNumber": _SEQUENCE_NUMBER, "Timestamp": TimestampShape()}, required=("Type",)
    ),
    "StartingSequenceNumber": _SEQUENCE_NUMBER,
    "StreamARN": StringShape(length_min=1, length_max=2048, pattern=r"arn:aws.*:kinesis:.*:\d{12}:stream/\S+"),
    "StreamCreationTimestamp": TimestampShape(),
    "StreamId": StringShape(length_min=1, length_max=24, pattern=r"[a-z0-9]{20}-[a-z0-9]{3}"),
    "StreamModeDetails": StructureShape(
        {"StreamMode": StringShape(values=("PROVISIONED", "ON_DEMAND"))}, required=("StreamMode",)
    ),
    "StreamName": _NAME,
    "TagKeys": ListShape(item=_TAG_KEY, length_min=1, length_max=50),
    "Tags": MapShape(key=_TAG_KEY, value=_TAG_VALUE, length_min=1, length_max=200),
    "TargetShardCount": IntegerShape(value_min=1),
    "Timestamp": TimestampShape(),
    "WarmThroughputMiBps": IntegerShape(value_min=0),
}
"""A member has one shape in all operations, except Limit in ListTagsForStream."""


def _request(members: str, **others: Shape) -> StructureShape:
    """`members` names the members in AWS's order; a required one ends with an exclamation mark."""
    names = [name.removesuffix("!") for name in members.split()]
    required = tuple(name.removesuffix("!") for name in members.split() if name.endswith("!"))
    return StructureShape({name: others.get(name) or _MEMBERS[name] for name in names}, required)


# AWS reserves StreamId; it is ignored.
_STREAM: Final = "StreamName StreamARN StreamId"
_BY_STREAM_ARN: Final = "StreamARN! StreamId"
_CONSUMER: Final = "StreamARN StreamId ConsumerName ConsumerARN"
_RESOURCE: Final = "ResourceARN! StreamId"

STREAM: Final = _request(_STREAM)
REQUESTS: Final[dict[str, StructureShape]] = {
    "AddTagsToStream": _request(f"{_STREAM} Tags!"),
    "CreateStream": _request(
        "StreamName! ShardCount StreamModeDetails Tags "
        "WarmThroughputMiBps MaxRecordSizeInKiB RecordDistributionStrategy"
    ),
    "DecreaseStreamRetentionPeriod": _request(f"{_STREAM} RetentionPeriodHours!"),
    "DeleteResourcePolicy": _request(_RESOURCE),
    "DeleteStream": _request(f"{_STREAM} EnforceConsumerDeletion"),
    "DeregisterStreamConsumer": _request(_CONSUMER),
    "DescribeAccountSettings": _request(""),
    "DescribeLimits": _request(""),
    "DescribeStream": _request(f"{_STREAM} Limit ExclusiveStartShardId"),
    "DescribeStreamConsumer": _request(_CONSUMER),
    "DescribeStreamSummary": _request(_STREAM),
    "DisableEnhancedMonitoring": _request(f"{_STREAM} ShardLevelMetrics!"),
    "EnableEnhancedMonitoring": _request(f"{_STREAM} ShardLevelMetrics!"),
    "GetRecords": _request("ShardIterator! Limit StreamARN StreamId DryRun"),
    "GetResourcePolicy": _request(_RESOURCE),
    "GetShardIterator": _request(f"{_STREAM} ShardId! ShardIteratorType! StartingSequenceNumber Timestamp DryRun"),
    "IncreaseStreamRetentionPeriod": _request(f"{_STREAM} RetentionPeriodHours!"),
    "ListShards": _request(f"{_STREAM} NextToken ExclusiveStartShardId MaxResults StreamCreationTimestamp ShardFilter"),
    "ListStreamConsumers": _request(f"{_BY_STREAM_ARN} NextToken MaxResults StreamCreationTimestamp"),
    "ListStreams": _request("Limit ExclusiveStartStreamName NextToken"),
    "ListTagsForResource": _request(_RESOURCE),
    "ListTagsForStream": _request(
        f"{_STREAM} ExclusiveStartTagKey Limit", Limit=IntegerShape(value_min=1, value_max=50)
    ),
    "MergeShards": _request(f"{_STREAM} ShardToMerge! AdjacentShardToMerge!"),
    "PutRecord": _request(f"{_STREAM} Data! PartitionKey ExplicitHashKey SequenceNumberForOrdering DryRun"),
    "PutRecords": _request(f"Records! {_STREAM} DryRun"),
    "PutResourcePolicy": _request(f"{_RESOURCE} Policy!"),
    "RegisterStreamConsumer": _request(f"{_BY_STREAM_ARN} ConsumerName! Tags"),
    "RemoveTagsFromStream": _request(f"{_STREAM} TagKeys!"),
    "SplitShard": _request(f"{_STREAM} ShardToSplit! NewStartingHashKey!"),
    "StartStreamEncryption": _request(f"{_STREAM} EncryptionType! KeyId!"),
    "StopStreamEncryption": _request(f"{_STREAM} EncryptionType! KeyId!"),
    "SubscribeToShard": _request("ConsumerARN! StreamId ShardId! StartingPosition! DryRun"),
    "TagResource": _request(f"{_RESOURCE} Tags!"),
    "UntagResource": _request(f"{_RESOURCE} TagKeys!"),
    "UpdateAccountSettings": _request("MinimumThroughputBillingCommitment!"),
    "UpdateMaxRecordSize": _request("StreamARN StreamId MaxRecordSizeInKiB!"),
    "UpdateShardCount": _request(f"{_STREAM} TargetShardCount! ScalingType!"),
    "UpdateStreamMode": _request(f"{_BY_STREAM_ARN} StreamModeDetails! WarmThroughputMiBps"),
    "UpdateStreamRecordDistributionStrategy": _request(f"{_BY_STREAM_ARN} RecordDistributionStrategy!"),
    "UpdateStreamWarmThroughput": _request(f"{_STREAM} WarmThroughputMiBps!"),
}
"""Every operation, except those of channels, which are not supported."""


def validate(shape: StructureShape, request: Mapping[str, Any]) -> None:
    violations = list(islice(_structure_violations(shape, request, ""), _VIOLATIONS_MAX))
    if violations:
        raise _validation_error(violations)


def null_member(path: str) -> LocalError:
    """The error for a missing member that is required only in some states of the stream."""
    return _validation_error([_violation(None, path, "not be null")])


def _validation_error(violations: list[str]) -> LocalError:
    errors = "error" if len(violations) == 1 else "errors"
    return validation(f"{len(violations)} validation {errors} detected: {'; '.join(violations)}")


def _violation(value: Any, path: str, constraint: str) -> str:
    text = "null" if value is None else f"'{_java_text(value)}'"
    return f"Value {text} at '{path}' failed to satisfy constraint: Member must {constraint}"


def _java_text(value: Any) -> str:
    """The value as Java prints it."""
    if isinstance(value, bytes):
        return f"java.nio.HeapByteBuffer[pos=0 lim={len(value)} cap={len(value)}]"
    if isinstance(value, list):
        return f"[{', '.join(map(_java_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_java_text(key)}={_java_text(member)}" for key, member in value.items()) + "}"
    return str(value)


def _structure_violations(shape: StructureShape, value: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, member_shape in shape.members.items():
        member_path = f"{path}{name[0].lower()}{name[1:]}"
        member = value.get(name)
        if member is not None:
            yield from _violations(member_shape, member, member_path)
        elif name in shape.required:
            yield _violation(None, member_path, "not be null")


def _violations(shape: Shape, value: Any, path: str) -> Iterator[str]:
    """In AWS's order. Booleans and timestamps have no constraints."""
    if isinstance(shape, StringShape):
        if shape.values is not None and value not in shape.values:
            yield _violation(value, path, f"satisfy enum value set: [{', '.join(shape.values)}]")
        if shape.pattern is not None and re.fullmatch(shape.pattern, value) is None:
            yield _violation(value, path, f"satisfy regular expression pattern: {shape.pattern}")
    if isinstance(shape, SizedShape):
        if shape.length_min is not None and len(value) < shape.length_min:
            yield _violation(value, path, f"have length greater than or equal to {shape.length_min}")
        if shape.length_max is not None and len(value) > shape.length_max:
            yield _violation(value, path, f"have length less than or equal to {shape.length_max}")
    match shape:
        case IntegerShape():
            if shape.value_min is not None and value < shape.value_min:
                yield _violation(value, path, f"have value greater than or equal to {shape.value_min}")
            if shape.value_max is not None and value > shape.value_max:
                yield _violation(value, path, f"have value less than or equal to {shape.value_max}")
        case ListShape():
            for index, item in enumerate(value, 1):
                yield from _violations(shape.item, item, f"{path}.{index}.member")
        case MapShape():
            for key, member in value.items():
                yield from _violations(shape.key, key, f"{path}.key")
                yield from _violations(shape.value, member, f"{path}.{key}.member")
        case StructureShape():
            yield from _structure_violations(shape, value, f"{path}.")
