"""Until when this member may start handler calls (rules L4, L8, L9).

A fence is an immutable value that the heartbeat's thread publishes as one reference and that every start reads,
without a lock. It is compared with the clock immediately before each start and never signalled: a process that was
stopped for a minute finds out by its own look at the clock, before anybody could have told it.

It counts from the moment *before* the heartbeat was sent, so that a slow answer only shortens it. Clocks that stand
still while a machine is suspended are caught from one side: where the wall clock has run ahead by more than a second
since that moment, time has passed that the other clock did not count.
"""

from typing import Final, Literal

import msgspec

__all__ = ["CLOCK_JUMP_MS_MAX", "Ending", "Fence"]

CLOCK_JUMP_MS_MAX: Final = 1_000

Ending = Literal["sealed", "left", "missing", "rolled_back", "forked"]


class Fence(msgspec.Struct, frozen=True):
    member_id: str
    valid_until_ms: int | None = None
    """None before the first acknowledgement, and after the end."""
    wall_ahead_ms: int = 0
    """How far the wall clock was ahead of the other one when the acknowledged heartbeat began."""
    ending: Ending | None = None
    """Set once, for good: this member holds nothing any more."""

    def may_start(self, now_ms: int, wall_ms: int) -> bool:
        return (
            self.valid_until_ms is not None
            and now_ms < self.valid_until_ms
            and wall_ms - now_ms - self.wall_ahead_ms <= CLOCK_JUMP_MS_MAX
        )

    def acknowledged(self, began_now_ms: int, began_wall_ms: int, fence_ms: int) -> "Fence":
        """After the store said `live` to a heartbeat that began at these times. It also lifts a fence that has passed:
        while a member is live in the store, nobody else can have its leases.
        """
        if self.ending is not None:
            return self
        valid_until_ms = began_now_ms + fence_ms
        if self.valid_until_ms is not None and valid_until_ms < self.valid_until_ms:
            return self
        return Fence(self.member_id, valid_until_ms, began_wall_ms - began_now_ms)

    def ended(self, ending: Ending) -> "Fence":
        return self if self.ending is not None else Fence(self.member_id, None, 0, ending)
