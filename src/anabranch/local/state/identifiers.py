"""Values that clients receive and send back: timestamps, shard ids, sequence numbers, shard iterators and page tokens.

Iterators and page tokens are self-contained, so they stay valid after a restart. They hold no secrets.
"""

import math
from base64 import b64decode, b64encode
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

from anabranch.errors import CodecError

T = TypeVar("T")

_YEAR_10000_SECONDS: Final = 253_402_300_800
_SHARD_INDEX_MAX: Final = (1 << 31) - 1


class Timestamp(float):
    """Seconds since 1970, exact to the millisecond. Each protocol writes it differently: JSON in seconds, CBOR in
    milliseconds under tag 1. The encoders recognize it by its type.
    """

    __slots__ = ()

    @classmethod
    def from_milliseconds(cls, milliseconds: float) -> "Timestamp":
        if not math.isfinite(milliseconds) or abs(milliseconds) >= _YEAR_10000_SECONDS * 1000:
            raise CodecError(f"a timestamp must be milliseconds since 1970, before the year 10000, not {milliseconds}")
        return cls(milliseconds / 1000)

    @property
    def milliseconds(self) -> int:
        return round(self * 1000)


def shard_id_of(index: int) -> str:
    return f"shardId-{index:012d}"


def full_shard_id(text: str) -> str | None:
    """AWS reads the number after the last dash: `0`, `x-0` and `shardId-0` all mean shardId-000000000000. None if there
    is no number, or one that is too large.
    """
    digits = text.rpartition("-")[2]
    if not (digits.isascii() and digits.isdigit()) or int(digits) > _SHARD_INDEX_MAX:
        return None
    return shard_id_of(int(digits))


# A sequence number in AWS's layout is one integer of 47 hexadecimal digits, from the most significant:
#
#     2 | second the shard was created: 9 | last digit of the shard's index: 1 | counter: 16 | 00 |
#     second of the record: 9 | shard index: 8 | version, which is 2
#
# Numbers grow with the counter inside a shard, and a child created in a later second starts above its parent's end.
# Records have even counters. The odd counter after a record is a position between it and the next record, which a
# subscription returns as its continuation. A shard starts at counter 0 and a closed shard ends at the highest counter.

COUNTER_MAX: Final = 0x7FFF_FFFF_FFFF_FFFF
COUNTER_STEP: Final = 2

_VERSION: Final = 2
_LEAD: Final = 2 << 184
_INDEX_SHIFT: Final = 4
SECOND_SHIFT: Final = 36
COUNTER_SHIFT: Final = 80
_DIGIT_SHIFT: Final = 144
_CREATED_SHIFT: Final = 148
_SECOND_MASK: Final = (1 << 36) - 1
_INDEX_MASK: Final = (1 << 32) - 1


class SequenceParts(NamedTuple):
    created_s: int
    shard_index: int
    counter: int


def sequence_number_prefix(created_s: int, shard_index: int) -> int:
    """The number with counter and second zero: add `counter << COUNTER_SHIFT` and `second << SECOND_SHIFT`."""
    return (
        _LEAD
        | created_s << _CREATED_SHIFT
        | (shard_index & 0xF) << _DIGIT_SHIFT
        | shard_index << _INDEX_SHIFT
        | _VERSION
    )


def parse_sequence_number(number: int) -> SequenceParts | None:
    """None if the number does not have this layout."""
    if number >> 184 != 2 or number & 0xF != _VERSION:
        return None
    return SequenceParts(
        number >> _CREATED_SHIFT & _SECOND_MASK,
        number >> _INDEX_SHIFT & _INDEX_MASK,
        number >> COUNTER_SHIFT & 0xFFFF_FFFF_FFFF_FFFF,
    )


def may_be_issued(number: int, latest_second: int) -> bool:
    """Whether the service may have issued this number up to that second. Numbers of version 1 are older than ours."""
    has_layout = number >> 184 == 2 and number & 0xF in {1, _VERSION}
    counter, second = number >> COUNTER_SHIFT & 0xFFFF_FFFF_FFFF_FFFF, number >> SECOND_SHIFT & _SECOND_MASK
    return has_layout and counter <= COUNTER_MAX and second <= latest_second


# Iterators and page tokens are JSON in base64: clients must not look inside.


class ShardIterator(msgspec.Struct, frozen=True):
    stream_name: str
    stream_created_ms: int
    shard_index: int
    position: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,60}$")]
    """The lowest sequence number that will be read."""
    issued_ms: int
    nonce: int = 0
    """Makes each iterator unique, as on AWS."""


def decode_iterator(text: str) -> ShardIterator | None:
    """None if the text is not an iterator. Quotes around an iterator are ignored, as on AWS."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1]
    return decode_token(text, ShardIterator)


class PageToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A NextToken. It holds the whole query, because AWS accepts no other parameter beside it."""

    operation: str
    after: str
    """The last name or id of the previous page."""
    issued_ms: int
    stream_name: str = ""
    stream_created_ms: int = 0
    filter_type: str = ""
    filter_ms: int = 0


def write_token(token: PageToken | ShardIterator) -> str:
    return b64encode(msgspec.json.encode(token)).decode()


def decode_token(text: str, kind: type[T]) -> T | None:
    """None if the text is no such token."""
    try:
        return msgspec.json.decode(b64decode(text.encode("ascii"), validate=True), type=kind)
    except (ValueError, RecursionError, msgspec.DecodeError):  # bad base64 and bad UTF-8 are ValueErrors
        return None
