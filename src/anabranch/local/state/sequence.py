"""Sequence numbers in AWS's layout: one integer of 47 hexadecimal digits, from the most significant:

    2 | second the shard was created: 9 | last digit of the shard's index: 1 | counter: 16 | 00 |
    second of the record: 9 | shard index: 8 | version, which is 2

So numbers grow with the counter inside a shard, and a child that was created in a later second starts above its
parent's end. Records have even counters: the odd one after a record is a place between it and the next, which a
subscription gives as its continuation. A shard starts at counter 0 and a closed one ends at the highest counter.
"""

from typing import Final, NamedTuple

__all__ = ["COUNTER_MAX", "COUNTER_SHIFT", "COUNTER_STEP", "SECOND_SHIFT", "SequenceParts", "parse", "prefix"]

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
    second: int


def prefix(created_s: int, shard_index: int) -> int:
    """The number with counter and second left at zero: add `counter << COUNTER_SHIFT` and `second << SECOND_SHIFT`."""
    return (
        _LEAD
        | created_s << _CREATED_SHIFT
        | (shard_index & 0xF) << _DIGIT_SHIFT
        | shard_index << _INDEX_SHIFT
        | _VERSION
    )


def parse(number: int) -> SequenceParts | None:
    """What a number encodes; None for one that this layout cannot have made."""
    if number >> 184 != 2 or number & 0xF != _VERSION:
        return None
    return SequenceParts(
        number >> _CREATED_SHIFT & _SECOND_MASK,
        number >> _INDEX_SHIFT & _INDEX_MASK,
        number >> COUNTER_SHIFT & 0xFFFF_FFFF_FFFF_FFFF,
        number >> SECOND_SHIFT & _SECOND_MASK,
    )
