"""The account's minimum throughput billing commitment: the one account-level setting that Kinesis has.

It unlocks warm throughput and more consumers. Once enabled it lasts for at least a day: an earlier DISABLED is
remembered and takes effect then, unless it is enabled again before.
"""

from typing import Any, Final

import msgspec

from anabranch._wire.timestamps import Timestamp

__all__ = ["COMMITMENT_MS", "Commitment"]

COMMITMENT_MS: Final = 24 * 3_600_000


class Commitment(msgspec.Struct, kw_only=True):
    started_ms: int | None = None
    earliest_end_ms: int = 0
    ends_ms: int | None = None
    """When it ended or will end; None while nobody asked for its end."""

    def is_enabled(self, now_ms: int) -> bool:
        return self.started_ms is not None and (self.ends_ms is None or now_ms < self.ends_ms)

    def enable(self, now_ms: int, duration_ms: int) -> None:
        if self.is_enabled(now_ms):
            self.ends_ms = None
        else:
            self.started_ms, self.earliest_end_ms, self.ends_ms = now_ms, now_ms + duration_ms, None

    def disable(self, now_ms: int) -> None:
        if self.is_enabled(now_ms) and self.ends_ms is None:
            self.ends_ms = max(now_ms, self.earliest_end_ms)

    def members(self, now_ms: int) -> dict[str, Any]:
        if self.started_ms is None:
            return {"Status": "DISABLED"}
        members: dict[str, Any] = {"StartedAt": Timestamp.from_milliseconds(self.started_ms)}
        if self.is_enabled(now_ms):
            members["Status"] = "ENABLED" if self.ends_ms is None else "ENABLED_UNTIL_EARLIEST_ALLOWED_END"
            members["EarliestAllowedEndAt"] = Timestamp.from_milliseconds(self.earliest_end_ms)
        else:
            members["Status"] = "DISABLED"
            members["EndedAt"] = Timestamp.from_milliseconds(self.ends_ms or now_ms)
        return members
