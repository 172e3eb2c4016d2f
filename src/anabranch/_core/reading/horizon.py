"""The trim horizon of a stream, and whether unread records have been trimmed (rule T4).

The service does not report records that were trimmed before they were read: a slow reader simply continues at the
horizon. So each reader remembers until when it has read, by the service's clock, and compares.
"""

from typing import Final

EDGE_SECONDS: Final = 5.0
"""A reader at the horizon (for example at the start of an old stream) counts as this far ahead of it: the horizon moves
between two reads, and the service trims with a delay.
"""


class Horizon:
    """The horizon of one stream, shared by the readers of all its shards."""

    def __init__(self, retention_hours: int, server_seconds: float) -> None:
        self._retention_seconds = retention_hours * 3600
        self.reached_seconds = server_seconds - self._retention_seconds
        """Where it was when the retention was last read."""
        self._looked_seconds = server_seconds

    def look(self, retention_hours: int, server_seconds: float) -> None:
        """The retention was read again. The horizon never goes back: a longer retention restores nothing."""
        self._retention_seconds = retention_hours * 3600
        self.reached_seconds = max(self.reached_seconds, server_seconds - self._retention_seconds)
        self._looked_seconds = max(self._looked_seconds, server_seconds)

    def at(self, server_seconds: float) -> float:
        """The horizon at that time, by the last known retention. For a late answer from before the last look, the
        horizon of the last look does not apply yet.
        """
        by_retention = server_seconds - self._retention_seconds
        return by_retention if server_seconds < self._looked_seconds else max(self.reached_seconds, by_retention)


def may_have_lost(read_through_seconds: float | None, horizon_seconds: float) -> bool:
    """Whether unread records may have been trimmed. Everything that arrived before `read_through_seconds` was read
    (None if unknown), and everything that arrived after the horizon still exists.
    """
    return read_through_seconds is None or horizon_seconds >= read_through_seconds
