"""The trim horizon of a stream, and whether it has passed what was read (rule T4).

The service says nothing of records that fell out of retention before anybody read them: a reader that stood still goes
on at the horizon as if nothing had been in between. So each reader keeps the time up to which it has read, by the
service's clock, and compares.
"""

from typing import Final

__all__ = ["EDGE_SECONDS", "Horizon", "may_have_lost"]

EDGE_SECONDS: Final = 5.0
"""A reader at the very horizon, as at the start in a stream that is full, counts as so far ahead of it: the horizon
moves between any two of its reads, and the service trims when it gets to it.
"""


class Horizon:
    """Of one stream, shared by all readers of its shards; each look at the stream says what its retention is now."""

    def __init__(self, retention_hours: int, server_seconds: float) -> None:
        self._retention_seconds = retention_hours * 3600
        self.reached_seconds = server_seconds - self._retention_seconds
        """Where it was at the last look."""
        self._looked_seconds = server_seconds

    def look(self, retention_hours: int, server_seconds: float) -> None:
        """It never goes back: a longer retention does not bring back what is gone."""
        self._retention_seconds = retention_hours * 3600
        self.reached_seconds = max(self.reached_seconds, server_seconds - self._retention_seconds)
        self._looked_seconds = max(self._looked_seconds, server_seconds)

    def at(self, server_seconds: float) -> float:
        """What arrived before is gone at that time, by the retention that was last seen. An answer may be late: what
        had reached its end by the last look may still have been there when it was given.
        """
        by_retention = server_seconds - self._retention_seconds
        return by_retention if server_seconds < self._looked_seconds else max(self.reached_seconds, by_retention)


def may_have_lost(read_through_seconds: float | None, horizon_seconds: float) -> bool:
    """Whether records may have gone unread: everything that arrived before `read_through_seconds` was read (None: who
    knows), and what arrived after the horizon is still there.
    """
    return read_through_seconds is None or horizon_seconds >= read_through_seconds
