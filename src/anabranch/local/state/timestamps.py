"""A number that each protocol writes differently: JSON in seconds, CBOR in milliseconds under tag 1.

`Timestamp` marks it for the encoders. It is a float of seconds since 1970, so readers can use it as a plain number.
"""

import math

from anabranch.errors import CodecError

_YEAR_10000_SECONDS = 253_402_300_800


class Timestamp(float):
    """Seconds since 1970, exact to the millisecond."""

    __slots__ = ()

    @classmethod
    def from_milliseconds(cls, milliseconds: float) -> "Timestamp":
        if not math.isfinite(milliseconds) or abs(milliseconds) >= _YEAR_10000_SECONDS * 1000:
            raise CodecError(f"a timestamp must be milliseconds since 1970, before the year 10000, not {milliseconds}")
        return cls(milliseconds / 1000)

    @property
    def milliseconds(self) -> int:
        return round(self * 1000)

    def __repr__(self) -> str:
        return f"Timestamp({float(self)!r})"
