"""The time by the service's clock (rule O4), and the trim horizon, which moves with it (rule T4)."""

from typing import Final

DRIFT_MAX: Final = 0.001
"""How fast two clocks may drift apart: far more than real ones do."""
STEP_SECONDS: Final = 5.0
"""A sample this much lower than expected means that a clock was set."""


class ServiceClock:
    """Estimates the service's time from its responses. Ages of records are measured with it.

    A response's date has whole seconds, and its time on the way is unknown. So a sample is never ahead of the true
    time, and the largest offset is the best estimate. It decreases slowly, because two clocks may drift apart. If a
    clock was set, the next sample replaces it at once.
    """

    def __init__(self) -> None:
        self._offset_seconds: float | None = None
        """The service's clock minus ours."""
        self._observed_at_ms = 0

    def observe(self, server_seconds: float, now_ms: int) -> None:
        """An answer has arrived that the service made at `server_seconds` or later."""
        sample, known = server_seconds - now_ms / 1000, self._offset_seconds
        if known is not None and sample > known - STEP_SECONDS:
            sample = max(sample, known - DRIFT_MAX * (now_ms - self._observed_at_ms) / 1000)
        self._offset_seconds, self._observed_at_ms = sample, now_ms

    def seconds(self, now_ms: int) -> float | None:
        """The service's time now; None before its first answer."""
        return None if self._offset_seconds is None else now_ms / 1000 + self._offset_seconds


HORIZON_MARGIN_SECONDS: Final = 5.0
"""A reader at the horizon counts as this far ahead of it: the horizon moves on until its next read, and Kinesis trims
late. Otherwise each start at the beginning of an old stream would report a loss.
"""


class TrimHorizon:
    """The trim horizon of one stream, by the service's clock.

    Kinesis does not report that records were trimmed before they were read: a slow reader just continues at the trim
    horizon. So each reader keeps the arrival time up to which it has read everything, and compares it with the horizon.
    """

    def __init__(self, retention_hours: int, server_seconds: float) -> None:
        self._retention_seconds = retention_hours * 3600
        self.observed_seconds = server_seconds - self._retention_seconds
        """The horizon when the retention was last read."""
        self._observed_at_seconds = server_seconds

    @property
    def retention_hours(self) -> int:
        return self._retention_seconds // 3600

    def observe(self, retention_hours: int, server_seconds: float) -> None:
        """Takes a newly read retention. The horizon never moves back: a longer retention restores nothing."""
        self._retention_seconds = retention_hours * 3600
        self.observed_seconds = max(self.observed_seconds, server_seconds - self._retention_seconds)
        self._observed_at_seconds = max(self._observed_at_seconds, server_seconds)

    def at(self, server_seconds: float) -> float:
        """The horizon at that time. `observed_seconds` does not apply to a late response from before `observe`."""
        by_retention = server_seconds - self._retention_seconds
        return by_retention if server_seconds < self._observed_at_seconds else max(self.observed_seconds, by_retention)


def may_have_lost(read_through_seconds: float | None, horizon_seconds: float) -> bool:
    """Whether records that arrived after `read_through_seconds` (None if unknown) may have been trimmed unread."""
    return read_through_seconds is None or horizon_seconds >= read_through_seconds
