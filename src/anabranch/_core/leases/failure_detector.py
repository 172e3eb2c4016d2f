"""Who may be sealed, judged by watching counters on the observer's own clock (rules L5, L6).

No stored time is ever compared. A stopwatch runs for each (member, counter) from the moment the first answer that
showed this counter was *received*; a member may be sealed when it reads the *victim's* own expiry. A row that is not
there counts as a counter that stands still from the first answer without it.

After a silence longer than half of a member's expiry (the store was away, or this process was) its stopwatch starts
anew: what was not watched cannot be held against anybody.
"""

from collections.abc import Collection, Sequence

import msgspec

from anabranch._core.leases.timing import LeaseTiming
from anabranch._model.leases import MemberRow


class _Watch(msgspec.Struct):
    row: MemberRow | None
    """None: a lease names this member, and there is no row of it."""
    since_ms: int
    expiry_ms: int
    moved: bool = False
    """Whether its counter was ever seen to move."""


class Stopwatches:
    def __init__(self, timing: LeaseTiming) -> None:
        self._timing = timing
        self._watches: dict[str, _Watch] = {}
        self._read_at_ms: int | None = None
        self.expiry_ms_max = timing.expiry_ms
        """The longest expiry ever seen: what has to be waited out where nothing is known (rule L13)."""
        self.membership_changed_ms = 0
        """When a member was last seen to come, to go, or to begin to go."""

    def observe(self, rows: Sequence[MemberRow], now_ms: int) -> bool:
        """All member rows, in an answer received now. True if a member came, went, or changed what others plan by."""
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
        """One member's row, in an answer received now. A row older than one already seen is ignored, unless it answers
        a write: then it is what stands. A sealed row has its last counter: a live one with a higher counter is not the
        same row, for somebody has deleted that one, and a late registration made it anew.
        """
        watch = self._watches.get(row.member_id)
        if watch is None:
            self._watches[row.member_id] = _Watch(row, now_ms, row.expiry_ms)
            self.expiry_ms_max = max(self.expiry_ms_max, row.expiry_ms)
            self.membership_changed_ms = now_ms
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
            return True
        return row.lease_version != seen.lease_version or row.reads_healthy != seen.reads_healthy

    def observe_owners(self, owners: Collection[str], now_ms: int) -> None:
        """The members that leases name, in an answer received now. One without a row is watched from now on; a missing
        one that no lease names is forgotten.
        """
        for member_id in owners:
            if member_id not in self._watches:
                self._watches[member_id] = _Watch(None, now_ms, self.expiry_ms_max)
        for member_id in [name for name, watch in self._watches.items() if watch.row is None and name not in owners]:
            del self._watches[member_id]

    def forget(self) -> None:
        """The store is not the one it was (rule L13): counters seen in it mean nothing any more."""
        self._watches.clear()
        self._read_at_ms = None

    def sealable(self, now_ms: int, known_dead: Collection[str] = ()) -> list[MemberRow]:
        """Live members whose counter has stood still for their own expiry, or whose process is known to be dead; their
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
        """Whether this member's leases can be taken: sealed, left, or missing for longer than any expiry."""
        watch = self._watches.get(member_id)
        if watch is None:
            return False
        if watch.row is None:
            return self._is_due(watch, now_ms)
        return watch.row.state != "live"

    def is_beating(self, member_id: str, now_ms: int) -> bool:
        """Whether this member was seen to live a moment ago. A live row alone may be that of one that just died."""
        watch = self._watches.get(member_id)
        if watch is None or watch.row is None or watch.row.state != "live" or not watch.moved:
            return False
        return now_ms - watch.since_ms <= watch.expiry_ms // 2

    def live(self) -> list[MemberRow]:
        """In the order of their ids, so that every observer of the same rows plans the same."""
        rows = [watch.row for watch in self._watches.values() if watch.row is not None and watch.row.state == "live"]
        return sorted(rows, key=lambda row: row.member_id)

    def over_since(self, cutoff_ms: int) -> list[str]:
        """Sealed and left members not heard of since the cutoff: their rows can go once no lease names them."""
        return [
            member_id
            for member_id, watch in self._watches.items()
            if watch.row is not None and watch.row.state != "live" and watch.since_ms <= cutoff_ms
        ]

    def row(self, member_id: str) -> MemberRow | None:
        watch = self._watches.get(member_id)
        return None if watch is None else watch.row

    def _is_due(self, watch: _Watch, now_ms: int) -> bool:
        """By the victim's expiry, never by the observer's: in the middle of a deploy a fleet has both."""
        return now_ms - watch.since_ms >= watch.expiry_ms

    def _restart_after_gap(self, gap_ms: int, now_ms: int) -> None:
        polls_ms = 3 * self._timing.poll_interval_for(len(self._watches))
        if gap_ms <= polls_ms:
            # A fleet so large that it polls less often than half of an expiry must still be able to seal.
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
                missed = True
        return missed
