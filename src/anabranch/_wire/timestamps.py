"""Timestamps on the wire: a number that must be written differently by each protocol.

AWS's JSON has seconds since 1970 as a number (`1.701760153593E9`, whole or not); its CBOR has whole
milliseconds under tag 1. `Timestamp` is the marker by which an encoder knows which of a body's numbers is one.
It is a float of seconds, so whoever reads a body may treat it as the plain number that JSON gives.
"""

import math
from typing import Any

from anabranch.errors import CodecError

_YEAR_10000_SECONDS = 253_402_300_800


class Timestamp(float):
    """Seconds since 1970, kept to the millisecond by both protocols."""

    __slots__ = ()

    @classmethod
    def from_milliseconds(cls, milliseconds: float) -> "Timestamp":
        if not math.isfinite(milliseconds) or abs(milliseconds) >= _YEAR_10000_SECONDS * 1000:
            raise CodecError(f"a timestamp is in milliseconds since 1970 and before the year 10000, not {milliseconds}")
        return cls(milliseconds / 1000)

    @property
    def milliseconds(self) -> int:
        return round(self * 1000)

    def __repr__(self) -> str:
        return f"Timestamp({float(self)!r})"


def json_enc_hook(value: Any) -> float:
    """For `msgspec.json.Encoder(enc_hook=...)`: a Timestamp in seconds, rounded as its CBOR form is."""
    if isinstance(value, Timestamp):
        return value.milliseconds / 1000
    raise TypeError(f"AWS's JSON has no form for a value of type {type(value).__name__}")
