"""Streams, shards, and positions in a shard.

A sequence number is a decimal integer of up to 129 digits: an integer in positions, a string on the wire and in
records. Only positions of the same shard can be compared.
"""

import re
from typing import Final, Literal, NamedTuple

import msgspec

from anabranch._model.hash_keys import HashKeyRange
from anabranch.limits import STREAM_NAME_CHARACTERS_MAX

BEFORE_FIRST_SUB: Final = -1

_SEQUENCE_NUMBER = re.compile(r"0|[1-9][0-9]{0,128}")  # API: pattern of SequenceNumber
_SUB_SEQUENCE_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # KCL keeps it in 64 bits


def parse_sequence_number(text: str) -> int:
    if _SEQUENCE_NUMBER.fullmatch(text) is None:
        raise ValueError(f"a sequence number is a decimal integer without leading zeros, not {text!r}")
    return int(text)


class Position(NamedTuple):
    """A record, or one sub-record of a KPL aggregate. Sub-records share the sequence number of their aggregate, and are
    numbered from 0. `BEFORE_FIRST_SUB` sorts before all of them.
    """

    sequence_number: int
    sub_sequence_number: int = BEFORE_FIRST_SUB

    def __str__(self) -> str:
        if self.sub_sequence_number == BEFORE_FIRST_SUB:
            return str(self.sequence_number)
        return f"{self.sequence_number}:{self.sub_sequence_number}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Parses the result of `str`: `49590…` or `49590…:3`."""
        number, colon, sub = text.partition(":")
        if colon and _SUB_SEQUENCE_NUMBER.fullmatch(sub) is None:
            raise ValueError(
                f"a position is a sequence number, or one with ':' and a sub-sequence number, not {text!r}"
            )
        return cls(parse_sequence_number(number), int(sub) if colon else BEFORE_FIRST_SUB)


class StartingPosition(msgspec.Struct, frozen=True):
    """Where reading begins, as in GetShardIterator and SubscribeToShard.

    The engine never sends LATEST: it stores "latest" as a time, so that a crash before the first checkpoint loses
    nothing (rule T1). LATEST is for tools that only look at a stream.
    """

    type: Literal["AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER", "AT_TIMESTAMP", "TRIM_HORIZON", "LATEST"]
    sequence_number: str | None = None
    timestamp_seconds: float | None = None


TRIM_HORIZON = StartingPosition("TRIM_HORIZON")


def at_sequence_number(sequence_number: int | str) -> StartingPosition:
    return StartingPosition("AT_SEQUENCE_NUMBER", str(sequence_number))


def after_sequence_number(sequence_number: int | str) -> StartingPosition:
    return StartingPosition("AFTER_SEQUENCE_NUMBER", str(sequence_number))


def at_timestamp(seconds: float) -> StartingPosition:
    return StartingPosition("AT_TIMESTAMP", None, seconds)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A shard as the service lists it. Only its end changes, once, when the shard is closed."""

    shard_id: str
    hash_key_range: HashKeyRange
    starting_sequence_number: int
    ending_sequence_number: int | None = None
    """None while the shard is open."""
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None
    """Only for the child of a merge."""

    @property
    def is_open(self) -> bool:
        return self.ending_sequence_number is None

    @property
    def parent_shard_ids(self) -> tuple[str, ...]:
        """Two after a merge, one after a split, none for a root. Parents may already be trimmed."""
        return tuple(parent for parent in (self.parent_shard_id, self.adjacent_parent_shard_id) if parent is not None)


def shard_index(shard_id: str) -> int:
    """The number in `shardId-000000000042`."""
    prefix, dash, digits = shard_id.rpartition("-")
    if not (dash and prefix and digits.isascii() and digits.isdigit()):
        raise ValueError(f"a shard id looks like shardId-000000000042, not {shard_id!r}")
    return int(digits)


class ShardFilter(msgspec.Struct, frozen=True):
    """Which shards ListShards returns. The service has more types."""

    type: Literal["AT_LATEST", "AT_TRIM_HORIZON", "FROM_TIMESTAMP"]
    timestamp_seconds: float | None = None


AT_LATEST = ShardFilter("AT_LATEST")
AT_TRIM_HORIZON = ShardFilter("AT_TRIM_HORIZON")


_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
_ARN = re.compile(
    r"arn:(?P<partition>aws[a-z-]*):kinesis:(?P<region>[a-z0-9-]+):(?P<account>[0-9]{12}):stream/(?P<name>[^/]+)"
)


class StreamName(msgspec.Struct, frozen=True):
    """A stream's name, or its ARN with region and account."""

    name: str
    arn: str | None = None
    region: str | None = None
    account_id: str | None = None

    def __str__(self) -> str:
        return self.arn or self.name


def wrong_stream(given: object) -> TypeError:
    return TypeError(f"stream is {given!r}; it must be text: a stream's name or its ARN")


def parse_stream(text: str) -> StreamName:
    if not isinstance(text, str):
        raise wrong_stream(text)
    text = str.__str__(text)  # it may be of a subclass, which the codecs refuse
    if text.startswith("arn:"):
        if (found := _ARN.fullmatch(text)) is None:
            raise ValueError(
                f"a stream's ARN looks like arn:aws:kinesis:eu-west-1:123456789012:stream/orders, not {text!r}"
            )
        name, arn, region, account = found["name"], text, found["region"], found["account"]
    else:
        name, arn, region, account = text, None, None, None
    if _NAME.fullmatch(name) is None or len(name) > STREAM_NAME_CHARACTERS_MAX:
        raise ValueError(f"a stream's name has 1 to 128 letters, digits, '_', '.' and '-', not {name!r}")
    return StreamName(name, arn, region, account)
