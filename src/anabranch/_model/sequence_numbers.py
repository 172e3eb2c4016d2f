"""Sequence numbers and positions in a shard.

A sequence number is a decimal integer of up to 129 digits; AWS's are larger than 128 bits, so they are Python
integers here and strings on the wire and in records. A `Position` also counts the sub-records of a KPL
aggregate: all of them share their record's sequence number and are told apart by a sub-sequence number from 0.
`BEFORE_FIRST_SUB` sorts before all of them.

Positions of one shard are ordered; positions of different shards are not comparable, and nothing here compares them.
"""

import re
from typing import Final, NamedTuple

__all__ = ["BEFORE_FIRST_SUB", "Position", "is_sequence_number", "parse_sequence_number"]

BEFORE_FIRST_SUB: Final = -1

_SEQUENCE_NUMBER = re.compile(r"0|[1-9][0-9]{0,128}")  # API: pattern of SequenceNumber
_SUB_SEQUENCE_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # KCL keeps it in 64 bits


def is_sequence_number(text: str) -> bool:
    return _SEQUENCE_NUMBER.fullmatch(text) is not None


def parse_sequence_number(text: str) -> int:
    if not is_sequence_number(text):
        raise ValueError(f"a sequence number is a decimal integer without leading zeros, not {text!r}")
    return int(text)


class Position(NamedTuple):
    """A place in one shard: at this record, or at one sub-record of an aggregate. Ordered as a tuple is."""

    sequence_number: int
    sub_sequence_number: int = BEFORE_FIRST_SUB

    def __str__(self) -> str:
        if self.sub_sequence_number == BEFORE_FIRST_SUB:
            return str(self.sequence_number)
        return f"{self.sequence_number}:{self.sub_sequence_number}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        """The opposite of `str`: `49590…` or `49590…:3`."""
        number, colon, sub = text.partition(":")
        if colon and _SUB_SEQUENCE_NUMBER.fullmatch(sub) is None:
            raise ValueError(
                f"a position is a sequence number, or one with ':' and a sub-sequence number, not {text!r}"
            )
        return cls(parse_sequence_number(number), int(sub) if colon else BEFORE_FIRST_SUB)
