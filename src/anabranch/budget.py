"""A byte budget for all records that a consumer has read and not finished. Several consumers can share one.

A read reserves room for the largest possible response, and gives back the difference when the response arrives (rule
B1). A read at the tip of its shard reserves less, and may overdraw the budget by one response. A reader without room is
called back when there is some; nothing is dropped to make room (promise P5). Records that an unfinished record of their
key holds back may use an eighth of the budget, so that a few shards cannot block all others (rule D6).
"""

from collections import deque
from collections.abc import Callable

from anabranch.errors import ConfigurationError
from anabranch.limits import GET_RECORDS_BYTES_MAX, MIB

__all__ = ["READ_RESERVE_BYTES", "Budget"]

READ_RESERVE_BYTES = 24 * MIB
"""Room for one read: the JSON text and the decoded bytes of a full GetRecords response of 10 MiB (rule B1)."""

TIP_RESERVE_BYTES = 4 * MIB
"""Room for a read of a shard that was at its tip a moment ago: about what its write quota lets it gain."""
TIP_MS_MAX = 1_500
"""How long ago that moment may be."""

assert READ_RESERVE_BYTES > 2 * GET_RECORDS_BYTES_MAX


class Budget:
    """Bytes that may be held at once. Not thread-safe: share it between consumers of one event loop."""

    def __init__(self, limit_bytes: int = 256 * MIB) -> None:
        if limit_bytes < READ_RESERVE_BYTES:
            raise ConfigurationError(
                f"a budget of {limit_bytes} bytes is too small: one read may need {READ_RESERVE_BYTES} bytes"
            )
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.held_back_bytes = 0
        """Bytes of records that are held back by unfinished records of the same keys, over all shards."""
        self.held_back_bytes_max = limit_bytes // 8
        self.tip_reserve_bytes = TIP_RESERVE_BYTES
        self.overdraft_bytes_max = READ_RESERVE_BYTES
        """How far the limit may be exceeded by responses that were larger than their reservation."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def has_room(self, wanted_bytes: int) -> bool:
        return self.used_bytes + wanted_bytes <= self.limit_bytes

    def try_reserve(self, wanted_bytes: int) -> bool:
        if not self.has_room(wanted_bytes):
            return False
        self.used_bytes += wanted_bytes
        if self.used_bytes > self.peak_bytes:  # noqa: PLR1730 -- max() costs more, and this is asked for each poll
            self.peak_bytes = self.used_bytes
        return True

    def try_overdraw(self, wanted_bytes: int) -> bool:
        """Reserves the rest of a response that exceeds its reservation. No other room until that is paid back."""
        if self.used_bytes + wanted_bytes > self.limit_bytes + self.overdraft_bytes_max:
            return False
        self.used_bytes += wanted_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def call_when_free(self, wanted_bytes: int, on_free: Callable[[], None]) -> None:
        """Calls `on_free` once, when there is room, which `on_free` has to reserve. First come, first served."""
        self._waiting.append((wanted_bytes, on_free))

    def release(self, freed_bytes: int) -> None:
        self.used_bytes -= freed_bytes
        assert self.used_bytes >= 0, "more released than reserved"
        while self._waiting and self.has_room(self._waiting[0][0]):
            self._waiting.popleft()[1]()
