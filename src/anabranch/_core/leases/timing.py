"""The times of the lease protocol, all derived from the lease expiry (rule L10), and the fence that enforces them.

An owner starts nothing after its fence time, counted from the start of its last acknowledged heartbeat. The others seal
it after its expiry, counted from when they saw its counter move. The owner must be done before the others begin, even
if clocks run fast or slow by 1 %:

    fence / (1 - 1 %) + grace + slack <= expiry / (1 + 1 %)

Two lost heartbeats in a row must not cost an owner its leases:

    heartbeat interval + 3 * call deadline <= fence

`lease_timing` satisfies both for every expiry that the settings allow: 3 s or more.
"""

from typing import Final, Literal

import msgspec

LEASE_EXPIRY_MS_DEFAULT: Final = 10_000
_POLL_MS_PER_MEMBER: Final = 25


class LeaseTiming(msgspec.Struct, frozen=True, kw_only=True):
    expiry_ms: int
    """E: a member whose counter did not move for this long may be sealed."""
    heartbeat_interval_ms: int
    """h: from the start of one heartbeat to the start of the next."""
    call_deadline_ms: int
    """D: the timeout of a store call, which may still take effect later."""
    fence_ms: int
    """F: nothing starts later than this after the start of the last acknowledged heartbeat."""
    grace_ms: int
    """G: how long running handlers may take after the fence."""
    slack_ms: int
    """S: how much time may pass between reading the clock and the call."""
    poll_interval_ms: int
    """p: how often the member rows are read."""
    rows_read_per_second: int = 20_000
    """How many lease rows all members together may read in a second. A DynamoDB partition returns about 34,000."""

    def read_pause_for(self, member_count: int, lease_count: int) -> int:
        """How long a member waits between two reads of all leases, so that a large fleet does not throttle itself."""
        pause_ms = member_count * lease_count * 1_000 // self.rows_read_per_second
        return pause_ms if pause_ms > self.poll_interval_ms else 0

    def poll_interval_for(self, member_count: int) -> int:
        """Reads grow with the square of the fleet (every member reads all rows), so large fleets poll less often. At
        most a quarter of the expiry passes between two polls.
        """
        return max(self.poll_interval_ms, min(member_count * _POLL_MS_PER_MEMBER, self.expiry_ms // 4))


def lease_timing(expiry_ms: int = LEASE_EXPIRY_MS_DEFAULT) -> LeaseTiming:
    return LeaseTiming(
        expiry_ms=expiry_ms,
        heartbeat_interval_ms=expiry_ms // 4,
        call_deadline_ms=expiry_ms * 15 // 100,
        fence_ms=expiry_ms * 7 // 10,
        grace_ms=expiry_ms // 5,
        slack_ms=expiry_ms // 20,
        poll_interval_ms=min(1_000, expiry_ms // 10),
    )


CLOCK_JUMP_MS_MAX: Final = 1_000

Ending = Literal["sealed", "left", "missing", "rolled_back", "forked"]


class Fence(msgspec.Struct, frozen=True):
    """Until when this member may start handler calls (rules L4, L8, L9).

    The heartbeat thread publishes it as one reference; every start reads it without a lock and compares it with the
    clock. Nothing is signalled: a process that was paused for a minute notices by itself, before a signal could reach
    it.

    It counts from *before* the heartbeat was sent, so a slow answer only shortens it. A monotonic clock may stop while
    the machine sleeps. So if the wall clock has run ahead by more than a second since then, the fence has passed.
    """

    valid_until_ms: int | None = None
    """None before the first acknowledged heartbeat, and after the end."""
    wall_ahead_ms: int = 0
    """How far the wall clock was ahead of the monotonic clock when the acknowledged heartbeat began."""
    ending: Ending | None = None
    """How this member ended. Final: it holds nothing any more."""

    @property
    def limit(self) -> tuple[int, int]:
        """Before which time calls may start, and how far the wall clock may be ahead of the monotonic clock then."""
        return (0, 0) if self.valid_until_ms is None else (self.valid_until_ms, self.wall_ahead_ms + CLOCK_JUMP_MS_MAX)

    def acknowledged(self, began_now_ms: int, began_wall_ms: int, fence_ms: int) -> "Fence":
        """The store answered `live` to a heartbeat that began at these times. This also renews a fence that has passed:
        while a member is live in the store, no other member can have its leases.
        """
        if self.ending is not None:
            return self
        valid_until_ms = began_now_ms + fence_ms
        if self.valid_until_ms is not None and valid_until_ms < self.valid_until_ms:
            return self
        return Fence(valid_until_ms, began_wall_ms - began_now_ms)

    def ended(self, ending: Ending) -> "Fence":
        return self if self.ending is not None else Fence(ending=ending)


class StartGate:
    """What is compared before each record. Heartbeats write `limit`; the lease machine closes the gate for good."""

    __slots__ = ("is_closed", "limit")

    def __init__(self) -> None:
        self.limit = (0, 0)
        """See `Fence.limit`. One reference, so that a reader never sees half of it."""
        self.is_closed = False
        """This member has ended."""

    def allows(self, now_ms: int, wall_ms: int) -> bool:
        until_ms, ahead_ms_max = self.limit
        return not self.is_closed and now_ms < until_ms and wall_ms - now_ms <= ahead_ms_max
