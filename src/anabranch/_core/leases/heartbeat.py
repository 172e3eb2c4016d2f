"""The heartbeat of one member: when the next attempt is due, and what its answer means (rules L1, L2, L4).

The sender of heartbeats owns it (in the engine, a thread). It shares two references with the lease machine: it gets
what to report, and publishes one immutable `HeartbeatStatus`. One attempt is in flight at a time. Attempt numbers
always grow, so a lost response cannot conflict with our retry.

The others watch the counter, so only a write that moved it proves that this member is alive. A registration is
put-if-absent: repeating it changes nothing in the store. So its answer counts from the first attempt, which may be the
one that took effect.
"""

import msgspec
from msgspec.structs import replace

from anabranch._core.leases.store_calls import Moment, NoAnswer, ReadIncarnation, SendHeartbeat, Steps, Wait
from anabranch._core.leases.timing import Ending, Fence, LeaseTiming, StartGate
from anabranch._model.leases import HeartbeatAnswer, HeartbeatWrite, MemberRow


class HeartbeatStatus(msgspec.Struct, frozen=True):
    """The result of the last answers: the fence, and the member's row with the requests in it."""

    fence: Fence
    row: MemberRow | None = None
    trouble: NoAnswer | None = None
    """Why the last heartbeat had no answer; None if it had one."""


class HeartbeatState:
    def __init__(self, member_id: str, timing: LeaseTiming) -> None:
        self.timing = timing
        self.status = HeartbeatStatus(Fence())
        """Published for the lease machine."""
        self.gate = StartGate()
        """Read by all code that starts handler calls."""
        self.report = HeartbeatWrite(member_id=member_id, attempt=0)
        """Written by the lease machine: what the next heartbeat reports."""
        self.next_heartbeat_ms: int | None = None
        """None before the registration, while an attempt is in flight, and after the end."""
        self._attempt = 0
        self._began: tuple[int, int] | None = None
        """When the attempt in flight began, on both clocks. Its answer counts from then."""
        self._storage: str | None = None
        self._is_storage_confirmed = True
        """No call has failed since the storage was last confirmed to be the one that this member registered in."""

    def registered(self, row: MemberRow, storage: str, began: Moment) -> None:
        """`began`: when the registration was first tried. `storage`: what the store identified as just before it."""
        self._storage, self._began = storage, began
        self.answered(row)

    def run(self, moment: Moment) -> Steps[None]:
        """Sends heartbeats from the registration until this member has ended."""
        while self.status.fence.ending is None:
            assert self.next_heartbeat_ms is not None, "not registered, or two senders"
            if moment.now_ms < self.next_heartbeat_ms:
                _, moment = yield Wait(self.next_heartbeat_ms, wakeable=True)
                continue
            write = self.begin(*moment)
            if not self._is_storage_confirmed:
                # After a failed call there may be another storage behind the next one. Its `live` would mean nothing:
                # it may have forgotten that this member was sealed (rule L13).
                storage, moment = yield ReadIncarnation()
                if isinstance(storage, NoAnswer):
                    self.failed(moment.now_ms, storage)
                    continue
                if storage != self._storage:
                    self.end("rolled_back")
                    return
                self._is_storage_confirmed = True
            answer, moment = yield SendHeartbeat(write)
            if isinstance(answer, NoAnswer):
                self._is_storage_confirmed = False
                self.failed(moment.now_ms, answer)
            elif self._shows_roll_back(answer):
                self.end("rolled_back")
            else:
                self.answered(answer.row)

    def _shows_roll_back(self, answer: HeartbeatAnswer) -> bool:
        """Another storage answered, or one that has forgotten a heartbeat that it had acknowledged (rule L13)."""
        if answer.evidence is not None and answer.evidence != self._storage:
            return True
        acknowledged = self.status.row
        if answer.counter_before is None or acknowledged is None:
            return False
        return answer.counter_before < acknowledged.counter

    def begin(self, now_ms: int, wall_ms: int) -> HeartbeatWrite:
        """Call before building the request."""
        self._began, self.next_heartbeat_ms = (now_ms, wall_ms), None
        self._attempt += 1
        return replace(self.report, attempt=self._attempt)

    def answered(self, row: MemberRow | None) -> None:
        """The store answered with the stored row; None if there is no such row."""
        assert self._began is not None, "an answer without an attempt in flight"
        began_now_ms, began_wall_ms = self._began
        self._began = None
        if row is None:
            self.end("missing")
            return
        if row.state != "live":
            self.end(row.state, row)
            return
        fence = self.status.fence.acknowledged(began_now_ms, began_wall_ms, self.timing.fence_ms)
        self._publish(HeartbeatStatus(fence, row))
        if fence.ending is None:
            self.next_heartbeat_ms = began_now_ms + self.timing.heartbeat_interval_ms

    def failed(self, now_ms: int, trouble: NoAnswer) -> None:
        """Timeout or error: the outcome is unknown, so only the time of the next attempt changes."""
        began, self._began = self._began, None
        if began is not None and self.status.fence.ending is None:
            self.status = replace(self.status, trouble=trouble)
            self.next_heartbeat_ms = max(now_ms, began[0] + self.timing.call_deadline_ms)

    def wake(self, now_ms: int) -> None:
        """Send the next heartbeat now, unless one is in flight: there is something to report."""
        if self.next_heartbeat_ms is not None:
            self.next_heartbeat_ms = min(self.next_heartbeat_ms, now_ms)

    def end(self, ending: Ending, row: MemberRow | None = None) -> None:
        """This member has ended: the store says so, or the storage was replaced (rule L13)."""
        self._publish(HeartbeatStatus(self.status.fence.ended(ending), row))
        self.next_heartbeat_ms = None

    def _publish(self, status: HeartbeatStatus) -> None:
        self.gate.limit = status.fence.limit
        self.status = status
