"""A point in time inside a request or an answer: seconds since 1970 as a float that the body codecs can tell from a number.

JSON writes it as a number of seconds, CBOR as tag 1 with an integer of milliseconds. Nothing here reads a clock.
"""

from datetime import datetime
from typing import Final

__all__ = ["Timestamp", "java_date"]

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Timestamp(float):
    """Seconds since 1970, UTC."""

    __slots__ = ()

    @classmethod
    def from_ms(cls, ms: int) -> "Timestamp":
        return cls(ms / 1000)

    @property
    def ms(self) -> int:
        return round(self * 1000)


def java_date(when: datetime) -> str:
    """`Mon Nov 16 08:27:04 UTC 2026`, as Java prints a date, in English whatever the locale."""
    return f"{_DAYS[when.weekday()]} {_MONTHS[when.month - 1]} {when.day:02d} {when:%H:%M:%S} UTC {when.year}"
