"""The shapes of requests, from AWS's service model, and `validate`, which checks a request against its shape.

`validate` reports up to ten violations at once, in AWS's words: `2 validation errors detected: Value 'x!' at
'streamName' failed to satisfy constraint: Member must ...; Value ...`. It does not check types: `bodies` does that when
it decodes a body, and Python callers are trusted. A shape that only one operation uses is defined beside it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from anabranch.limits import LIST_SHARDS_RESULTS_MAX
from anabranch.local.errors import LocalError


class StringShape(msgspec.Struct, frozen=True, kw_only=True):
    length_min: int | None = None
    length_max: int | None = None
    pattern: str | None = None
    values: tuple[str, ...] | None = None

    def matches(self, text: str) -> bool:
        """The pattern must match the whole string."""
        return self.pattern is None or re.fullmatch(self.pattern, text) is not None


class IntegerShape(msgspec.Struct, frozen=True, kw_only=True):
    value_min: int | None = None
    value_max: int | None = None


class BooleanShape(msgspec.Struct, frozen=True):
    pass


class BlobShape(msgspec.Struct, frozen=True, kw_only=True):
    length_max: int


class TimestampShape(msgspec.Struct, frozen=True):
    pass


class ListShape(msgspec.Struct, frozen=True, kw_only=True):
    item: "Shape"
    length_min: int
    length_max: int


class MapShape(msgspec.Struct, frozen=True, kw_only=True):
    key: StringShape
    value: StringShape
    length_min: int
    length_max: int


class StructureShape(msgspec.Struct, frozen=True):
    members: dict[str, "Shape"]
    required: tuple[str, ...] = ()


Shape: TypeAlias = (
    StringShape | IntegerShape | BooleanShape | BlobShape | TimestampShape | ListShape | MapShape | StructureShape
)

_NAME_PATTERN: Final = r"[a-zA-Z0-9_.-]+"
_VIOLATIONS_MAX: Final = 10  # a PutRecords call may have 500 bad records

BOOLEAN: Final = BooleanShape()
TIMESTAMP: Final = TimestampShape()

STREAM_NAME: Final = StringShape(length_min=1, length_max=128, pattern=_NAME_PATTERN)
STREAM_ARN: Final = StringShape(length_min=1, length_max=2048, pattern=r"arn:aws.*:kinesis:.*:\d{12}:stream/\S+")
STREAM_ID: Final = StringShape(length_min=1, length_max=24, pattern=r"[a-z0-9]{20}-[a-z0-9]{3}")
RESOURCE_ARN: Final = StringShape(
    length_min=1, length_max=2048, pattern=r"arn:aws.*:kinesis:.*:\d{12}:.*(stream|channel)/\S+"
)
CONSUMER_NAME: Final = StringShape(length_min=1, length_max=128, pattern=_NAME_PATTERN)
CONSUMER_ARN: Final = StringShape(
    length_min=1,
    length_max=2048,
    pattern=r"(arn):aws.*:kinesis:.*:\d{12}:.*stream\/[a-zA-Z0-9_.-]+\/consumer\/[a-zA-Z0-9_.-]+:[0-9]+",
)
SHARD_ID: Final = StringShape(length_min=1, length_max=128, pattern=_NAME_PATTERN)
HASH_KEY: Final = StringShape(pattern=r"0|([1-9]\d{0,38})")
SEQUENCE_NUMBER: Final = StringShape(pattern=r"0|([1-9]\d{0,128})")
PARTITION_KEY: Final = StringShape(length_min=1, length_max=256)
DATA: Final = BlobShape(length_max=10_485_760)
NEXT_TOKEN: Final = StringShape(length_min=1, length_max=1_048_576)
PAGE_SIZE: Final = IntegerShape(value_min=1, value_max=LIST_SHARDS_RESULTS_MAX)
ITERATOR_TYPE: Final = StringShape(
    values=("AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER", "TRIM_HORIZON", "LATEST", "AT_TIMESTAMP")
)
ENCRYPTION_TYPE: Final = StringShape(values=("NONE", "KMS"))
KEY_ID: Final = StringShape(length_min=1, length_max=2048)
POSITIVE_INTEGER: Final = IntegerShape(value_min=1)
NON_NEGATIVE_INTEGER: Final = IntegerShape(value_min=0)
MAX_RECORD_SIZE_KIB: Final = IntegerShape(value_min=1024, value_max=10_240)
DISTRIBUTION_STRATEGY: Final = StringShape(values=("AUTO", "USER_PARTITION_KEY"))
STREAM_MODE_DETAILS: Final = StructureShape(
    {"StreamMode": StringShape(values=("PROVISIONED", "ON_DEMAND"))}, required=("StreamMode",)
)
TAG_KEY: Final = StringShape(length_min=1, length_max=128)
TAG_MAP: Final = MapShape(key=TAG_KEY, value=StringShape(length_min=0, length_max=256), length_min=1, length_max=200)
TAG_KEYS: Final = ListShape(item=TAG_KEY, length_min=1, length_max=50)
METRIC_NAMES: Final = (
    "IncomingBytes",
    "IncomingRecords",
    "OutgoingBytes",
    "OutgoingRecords",
    "WriteProvisionedThroughputExceeded",
    "ReadProvisionedThroughputExceeded",
    "IteratorAgeMilliseconds",
)
METRICS: Final = ListShape(item=StringShape(values=(*METRIC_NAMES, "ALL")), length_min=1, length_max=7)

# Members that name a stream (by name, ARN or both) or a resource. AWS reserves StreamId; it is ignored.
STREAM_BY_NAME_OR_ARN: Final[dict[str, Shape]] = {
    "StreamName": STREAM_NAME,
    "StreamARN": STREAM_ARN,
    "StreamId": STREAM_ID,
}
STREAM_BY_ARN: Final[dict[str, Shape]] = {"StreamARN": STREAM_ARN, "StreamId": STREAM_ID}
RESOURCE_BY_ARN: Final[dict[str, Shape]] = {"ResourceARN": RESOURCE_ARN, "StreamId": STREAM_ID}


def validate(shape: StructureShape, request: Mapping[str, Any]) -> None:
    violations: list[str] = []
    for violation in _structure_violations(shape, request, ""):
        violations.append(violation)
        if len(violations) == _VIOLATIONS_MAX:
            break
    if violations:
        raise _validation_error(violations)


def null_member(path: str) -> LocalError:
    """The error for a missing member that is required only in some states of the stream."""
    return _validation_error([_violation(None, path, "not be null")])


def _validation_error(violations: list[str]) -> LocalError:
    errors = "error" if len(violations) == 1 else "errors"
    return LocalError("ValidationException", f"{len(violations)} validation {errors} detected: {'; '.join(violations)}")


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
    match shape:
        case StringShape():
            yield from _string_violations(shape, value, path)
        case IntegerShape():
            if shape.value_min is not None and value < shape.value_min:
                yield _violation(value, path, f"have value greater than or equal to {shape.value_min}")
            if shape.value_max is not None and value > shape.value_max:
                yield _violation(value, path, f"have value less than or equal to {shape.value_max}")
        case BlobShape():
            if len(value) > shape.length_max:
                yield _violation(value, path, f"have length less than or equal to {shape.length_max}")
        case ListShape():
            yield from _length_violations(shape.length_min, shape.length_max, value, path)
            for index, item in enumerate(value, 1):
                yield from _violations(shape.item, item, f"{path}.{index}.member")
        case MapShape():
            yield from _length_violations(shape.length_min, shape.length_max, value, path)
            for key, member in value.items():
                yield from _string_violations(shape.key, key, f"{path}.key")
                yield from _string_violations(shape.value, member, f"{path}.{key}.member")
        case StructureShape():
            yield from _structure_violations(shape, value, f"{path}.")
        case _:  # booleans and timestamps have no constraints
            return


def _string_violations(shape: StringShape, value: str, path: str) -> Iterator[str]:
    if shape.values is not None and value not in shape.values:
        yield _violation(value, path, f"satisfy enum value set: [{', '.join(shape.values)}]")
    if not shape.matches(value):
        yield _violation(value, path, f"satisfy regular expression pattern: {shape.pattern}")
    yield from _length_violations(shape.length_min, shape.length_max, value, path)


def _length_violations(length_min: int | None, length_max: int | None, value: Any, path: str) -> Iterator[str]:
    if length_min is not None and len(value) < length_min:
        yield _violation(value, path, f"have length greater than or equal to {length_min}")
    if length_max is not None and len(value) > length_max:
        yield _violation(value, path, f"have length less than or equal to {length_max}")
