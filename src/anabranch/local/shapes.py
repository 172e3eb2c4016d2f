"""The shapes of requests: what a member may be, as AWS's service model writes it down.

Plain values that two readers walk: `serialization` (is it of the right type?) and `validation` (does it keep its
constraints?). The named shapes at the end are those that several operations use; each operation's own structure
stands in its file. Patterns must match the whole text, and are written as the service quotes them.
"""

import re
from typing import Final, TypeAlias

import msgspec

from anabranch.limits import LIST_SHARDS_RESULTS_MAX

__all__ = [
    "BlobShape",
    "BooleanShape",
    "IntegerShape",
    "ListShape",
    "MapShape",
    "Shape",
    "StringShape",
    "StructureShape",
    "TimestampShape",
]


class StringShape(msgspec.Struct, frozen=True, kw_only=True):
    length_min: int | None = None
    length_max: int | None = None
    pattern: str | None = None
    values: tuple[str, ...] | None = None

    def matches(self, text: str) -> bool:
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
NATURAL_INTEGER: Final = IntegerShape(value_min=0)
MAX_RECORD_SIZE_KIB: Final = IntegerShape(value_min=1024, value_max=10_240)
DISTRIBUTION_STRATEGY: Final = StringShape(values=("AUTO", "USER_PARTITION_KEY"))
STREAM_MODE_DETAILS: Final = StructureShape(
    {"StreamMode": StringShape(values=("PROVISIONED", "ON_DEMAND"))}, required=("StreamMode",)
)
TAG_KEY: Final = StringShape(length_min=1, length_max=128)
TAG_MAP: Final = MapShape(key=TAG_KEY, value=StringShape(length_min=0, length_max=256), length_min=1, length_max=200)
TAG_KEYS: Final = ListShape(item=TAG_KEY, length_min=1, length_max=50)
METRICS: Final = ListShape(
    item=StringShape(
        values=(
            "IncomingBytes",
            "IncomingRecords",
            "OutgoingBytes",
            "OutgoingRecords",
            "WriteProvisionedThroughputExceeded",
            "ReadProvisionedThroughputExceeded",
            "IteratorAgeMilliseconds",
            "ALL",
        )
    ),
    length_min=1,
    length_max=7,
)

# A stream is named by its name, its ARN or both; StreamId is reserved by AWS and ignored.
NAMED_STREAM: Final[dict[str, Shape]] = {"StreamName": STREAM_NAME, "StreamARN": STREAM_ARN, "StreamId": STREAM_ID}
STREAM_BY_ARN: Final[dict[str, Shape]] = {"StreamARN": STREAM_ARN, "StreamId": STREAM_ID}
RESOURCE: Final[dict[str, Shape]] = {"ResourceARN": RESOURCE_ARN, "StreamId": STREAM_ID}
