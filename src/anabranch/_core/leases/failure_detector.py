"""Which members may be sealed, judged by watching their counters on the observer's own clock (rules L5, L6).

No stored time is ever compared. For each counter value of a member a timer starts when the first answer with that value
is *received*. The member may be sealed when the timer reaches the *victim's* own expiry. A missing row counts as a
counter that does not move.

After a gap in observation longer than half of a member's expiry (the store or this process was away), its timer starts
again.
"""

from collections.abc import Collection, Sequence

import msgspec

from anabranch._core.leases.timing import LeaseTiming
from anabranch._model.leases import MemberRow


class _Watch(msgspec.Struct):
    row: MemberRow | None
    """None if a lease names this member but it has no row."""
    since_ms: int
    expiry_ms: int
    moved: bool = False
    """Whether its counter was seen to move."""


class FailureDetector:
    def __init__(self, timing: LeaseTiming) -> None:
        self._timing = timing
        self._watches: dict[str, _Watch] = {}
        self._read_at_ms: int | None = None
        self.expiry_ms_max = timing.expiry_ms
        """The longest expiry seen so far: how long to wait when nothing is known (rule L13)."""
        self.membership_changed_ms = 0
        """When a member last joined, left or started draining."""
        self.ended_count = 0
        """How many members were seen to end, or went missing."""

    def observe(self, rows: Sequence[MemberRow], now_ms: int) -> bool:
        """All member rows, received now. True if plans could change: a member joined, left or reported news."""
        if self._read_at_ms is not None:
            self._restart_after_gap(now_ms - self._read_at_ms, now_ms)
        self._read_at_ms = now_ms
        changed = False
        for row in rows:
            watch = self._watches.get(row.member_id)
            if watch is None or watch.row is not row:
                changed |= self.observe_row(row, now_ms)
        if len(rows) < len(self._watches):
            changed |= self._miss_others(rows, now_ms)
        return changed

    def observe_row(self, row: MemberRow, now_ms: int, *, is_answer: bool = False) -> bool:
        """One member's row, received now. A row older than one already seen is ignored, unless it answers a write. A
        sealed row keeps its last counter. So a live row with a higher counter is a new row: the old one was deleted,
        and a late registration created it again.
        """
        watch = self._watches.get(row.member_id)
        if watch is None:
            self._watches[row.member_id] = _Watch(row, now_ms, row.expiry_ms)
            self.expiry_ms_max = max(self.expiry_ms_max, row.expiry_ms)
            self.membership_changed_ms = now_ms
            self.ended_count += row.state != "live"
            return True
        seen = watch.row
        if seen is None:
            watch.row, watch.since_ms, watch.expiry_ms = row, now_ms, row.expiry_ms
            self.membership_changed_ms = now_ms
            return True
        is_older = row.state == "live" and row.counter < seen.counter + (seen.state != "live")
        if is_older and not is_answer:
            return False
        if row.counter != seen.counter:
            watch.since_ms, watch.moved = now_ms, True
        watch.row = row
        if row.state != seen.state or row.draining != seen.draining:
            self.membership_changed_ms = now_ms
            self.ended_count += row.state != seen.state
            return True
        return row.change_count != seen.change_count or row.reads_healthy != seen.reads_healthy

    def observe_owners(self, owners: Collection[str], now_ms: int) -> None:
        """The members that leases name, in an answer received now. One without a row is watched from now on; a missing
        one that no lease names is forgotten.
        """
        for member_id in owners:
            self.watch(member_id, now_ms)
        for member_id in [name for name, watch in self._watches.items() if watch.row is None and name not in owners]:
            del self._watches[member_id]

    def watch(self, member_id: str, now_ms: int) -> None:
        """A lease names this member."""
        if member_id not in self._watches:
            self._watches[member_id] = _Watch(None, now_ms, self.expiry_ms_max)

    def forget(self) -> None:
        """The storage was replaced (rule L13): counters seen before mean nothing."""
        self._watches.clear()
        self._read_at_ms = None

    def sealable(self, now_ms: int, known_dead: Collection[str] = ()) -> list[MemberRow]:
        """Live members whose counter has not moved for their own expiry, or whose process is known to be dead. Their
        rows hold the counter to seal at.
        """
        return [
            watch.row
            for watch in self._watches.values()
            if watch.row is not None
            and watch.row.state == "live"
            and (self._is_due(watch, now_ms) or watch.row.member_id in known_dead)
        ]

    def is_over(self, member_id: str, now_ms: int) -> bool:
        """Whether this member's leases can be taken: it was sealed, left, or was missing for longer than any expiry."""
        watch = self._watches.get(member_id)
        if watch is None:
            return False
        if watch.row is None:
            return self._is_due(watch, now_ms)
        return watch.row.state != "live"

    def is_heartbeating(self, member_id: str, now_ms: int) -> bool:
        """Whether its counter moved recently. A live row alone may belong to a member that just died."""
        watch = self._watches.get(member_id)
        if watch is None or watch.row is None or watch.row.state != "live" or not watch.moved:
            return False
        return now_ms - watch.since_ms <= watch.expiry_ms // 2

    def live(self) -> list[MemberRow]:
        """Sorted by id, so that all observers of the same rows make the same plan."""
        rows = [watch.row for watch in self._watches.values() if watch.row is not None and watch.row.state == "live"]
        return sorted(rows, key=lambda row: row.member_id)

    def over_since(self, cutoff_ms: int) -> list[str]:
        """Members that were sealed or left before the cutoff. Their rows can be deleted once no lease names them."""
        return [
            member_id
            for member_id, watch in self._watches.items()
            if watch.row is not None and watch.row.state != "live" and watch.since_ms <= cutoff_ms
        ]

    def row(self, member_id: str) -> MemberRow | None:
        watch = self._watches.get(member_id)
        return None if watch is None else watch.row

    def _is_due(self, watch: _Watch, now_ms: int) -> bool:
        """Uses the victim's expiry, not the observer's: during a deployment they can differ."""
        return now_ms - watch.since_ms >= watch.expiry_ms

    def _restart_after_gap(self, gap_ms: int, now_ms: int) -> None:
        polls_ms = 3 * self._timing.poll_interval_for(len(self._watches))
        if gap_ms <= polls_ms:
            # A large fleet may poll less often than half of an expiry; it must still be able to seal.
            return
        for watch in self._watches.values():
            if gap_ms > watch.expiry_ms // 2:
                watch.since_ms, watch.moved = now_ms, False

    def _miss_others(self, rows: Sequence[MemberRow], now_ms: int) -> bool:
        present = {row.member_id for row in rows}
        missed = False
        for member_id, watch in self._watches.items():
            if watch.row is not None and member_id not in present:
                watch.row, watch.since_ms = None, now_ms
                self.membership_changed_ms = now_ms
                self.ended_count += 1
                missed = True
        return missed
