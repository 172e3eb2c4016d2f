"""The time by the service's clock, estimated from its responses. Ages of records are measured with it (rule O4).

An answer's date has whole seconds, and the time on the way is unknown: each sample is at most the true time, so the
largest counts. It decays slowly, because two clocks may drift apart, and is replaced at once if a clock was set.
"""

from typing import Final

DRIFT_MAX: Final = 0.001
"""How fast two clocks may drift apart: far more than real ones do."""
STEP_SECONDS: Final = 5.0
"""A sample this much lower than expected means that a clock was set."""


class ServiceClock:
    def __init__(self) -> None:
        self._offset_seconds: float | None = None
        """The service's clock minus ours."""
        self._observed_at_ms = 0

    def observe(self, server_seconds: float, now_ms: int) -> None:
        """An answer that was made at this time, or later, has arrived."""
        sample, known = server_seconds - now_ms / 1000, self._offset_seconds
        if known is not None and sample > known - STEP_SECONDS:
            sample = max(sample, known - DRIFT_MAX * (now_ms - self._observed_at_ms) / 1000)
        self._offset_seconds, self._observed_at_ms = sample, now_ms

    def seconds(self, now_ms: int) -> float | None:
        """The service's time now; None before its first answer."""
        return None if self._offset_seconds is None else now_ms / 1000 + self._offset_seconds
