"""The heartbeat of one member: which attempt is next, when, and what its answer means (rules L1, L2, L4).

It is owned by whoever sends heartbeats (a thread of its own in the engine) and shares nothing with the book of
leases: what it learns it publishes as one immutable `Pulse`, and what it should report it is given as a value. One
attempt is in flight at a time; attempts only grow, also over failures, so a lost answer is no conflict with oneself.

Only a write that moved the counter is a sign of life: that is what the others watch. A registration is put-if-absent,
so repeating one changes nothing in the store, and its answer counts from the first attempt, which may have been the
one that took effect.
"""

import msgspec
from msgspec.structs import replace

from anabranch._core.leases.timing import Ending, Fence, LeaseTiming
from anabranch._model.leases import Beat, MemberRow


class Pulse(msgspec.Struct, frozen=True):
    """What the last answers say, as one reference: the fence, and the member's row with the requests in it."""

    fence: Fence
    row: MemberRow | None = None


class Heart:
    def __init__(self, member_id: str, timing: LeaseTiming) -> None:
        self.timing = timing
        self.pulse = Pulse(Fence(member_id))
        self.next_beat_ms: int | None = None
        """When to begin the next attempt; None before the member is registered, while one is in flight, and after the
        end.
        """
        self._attempt = 0
        self._began: tuple[int, int] | None = None
        """From when on the answer in flight would count, on both clocks."""
        self._tried_at_ms = 0
        self._first_registration: tuple[int, int] | None = None

    @property
    def member_id(self) -> str:
        return self.pulse.fence.member_id

    def begin(self, now_ms: int, wall_ms: int, report: Beat) -> Beat:
        """An attempt starts now, before its request is built. `report` is what the member says of itself."""
        self._began, self._tried_at_ms, self.next_beat_ms = (now_ms, wall_ms), now_ms, None
        self._attempt += 1
        return replace(report, member_id=self.member_id, attempt=self._attempt)

    def begin_registration(self, now_ms: int, wall_ms: int) -> None:
        """The registration counts as heartbeat number zero, and a repeated one as the first of them."""
        if self._first_registration is None:
            self._first_registration = (now_ms, wall_ms)
        self._began, self._tried_at_ms, self.next_beat_ms = self._first_registration, now_ms, None

    def answered(self, row: MemberRow | None) -> None:
        """The attempt in flight was answered with the row as it stands; None: there is no such row."""
        assert self._began is not None, "an answer without an attempt in flight"
        began_now_ms, began_wall_ms = self._began
        self._began = None
        if row is None:
            self.end("missing")
            return
        if row.state != "live":
            self.end(row.state, row)
            return
        fence = self.pulse.fence.acknowledged(began_now_ms, began_wall_ms, self.timing.fence_ms)
        self.pulse = Pulse(fence, row)
        if fence.ending is None:
            self.next_beat_ms = began_now_ms + self.timing.heartbeat_interval_ms

    def failed(self, now_ms: int) -> None:
        """No answer within the deadline, or an error: nothing is known, so nothing changes but the time of the next
        try.
        """
        if self._began is None:
            return
        self._began = None
        if self.pulse.fence.ending is None:
            self.next_beat_ms = max(now_ms, self._tried_at_ms + self.timing.call_deadline_ms)

    def hasten(self, now_ms: int) -> None:
        """Something worth telling has changed: the next attempt begins now, unless one is in flight."""
        if self.next_beat_ms is not None:
            self.next_beat_ms = min(self.next_beat_ms, now_ms)

    def end(self, ending: Ending, row: MemberRow | None = None) -> None:
        """This member is over: by the store's word, or because the storage itself changed (rule L13)."""
        self.pulse = Pulse(self.pulse.fence.ended(ending), row)
        self.next_beat_ms = None
