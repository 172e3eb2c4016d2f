"""Which members are live, and which workers may join them.

A member may be sealed after its counter has not moved for its expiry, on the observer's own clock (rules L5, L6). No
stored time is ever compared. For each counter value of a member a timer starts when the first answer with that value is
*received*. The member may be sealed when the timer reaches the *victim's* own expiry. A missing row counts as a counter
that does not move. After a gap in observation longer than half of a member's expiry (the store or this process was
away), its timer starts again.

All workers of an application must share order and protocol (rule U2).

Workers with different orders would break the order of keys when a shard moves between them. A newer protocol may write
rows that an older one does not understand. Streams may differ: members take only shards of streams that they read. A
check before joining is not enough, because two workers that start at the same moment do not see each other. So each
checks again after its row is written:

- Of two workers, the one whose row was written later sees the other's row. It is admitted only if it sees no
  incompatible member, so two incompatible members are never both admitted.
- A member confirms its admission with its first heartbeat. A confirmed member wins against an unconfirmed one. Of two
  unconfirmed ones the one that joined earlier stays, so they do not both leave. It waits for the other to decide,
  because the other may have checked before it could see anyone.
- A member that appears after the first check need not be waited for: it sees this one.
- The row of a member that died recently looks alive. It is watched for its own expiry and then sealed, so that it
  cannot return. Only a member whose counter moves counts.

`any_order` allows a rolling change of `order=`: it admits members with any order. Lease rows say in which order they
were written, so each owner knows what it can rely on (rule M5).
"""

from collections.abc import Collection, Sequence

import msgspec

from anabranch._core.leases.store_calls import Seal
from anabranch._core.leases.timing import LeaseTiming
from anabranch._model.leases import MemberRow
from anabranch.errors import FleetMismatchError


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
        """Watches the members that leases name, in an answer received now. Forgets missing ones that none names."""
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
        """Live members whose counter has not moved for their own expiry, or whose process is known to be dead."""
        return [
            watch.row
            for watch in self._watches.values()
            if watch.row is not None
            and watch.row.state == "live"
            and (self._has_expired(watch, now_ms) or watch.row.member_id in known_dead)
        ]

    def has_ended(self, member_id: str, now_ms: int) -> bool:
        """Whether its leases can be taken: it was sealed, left, or its row was missing for longer than any expiry."""
        watch = self._watches.get(member_id)
        if watch is None:
            return False
        if watch.row is None:
            return self._has_expired(watch, now_ms)
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

    def ended_before(self, cutoff_ms: int) -> list[str]:
        """Members that were sealed or left before the cutoff. Their rows can be deleted once no lease names them."""
        return [
            member_id
            for member_id, watch in self._watches.items()
            if watch.row is not None and watch.row.state != "live" and watch.since_ms <= cutoff_ms
        ]

    def row(self, member_id: str) -> MemberRow | None:
        watch = self._watches.get(member_id)
        return None if watch is None else watch.row

    def _has_expired(self, watch: _Watch, now_ms: int) -> bool:
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


class Review(msgspec.Struct, frozen=True):
    """The result of one check of the members."""

    is_admitted: bool = False
    refused_by: MemberRow | None = None
    seals: tuple[Seal, ...] = ()
    """To perform before the next check: these members missed their heartbeats."""


class Admission:
    def __init__(self, me: MemberRow, timing: LeaseTiming, *, any_order: bool = False) -> None:
        """`me` is this member's row. Before it is written, the check is only advisory."""
        self._me = me
        self._any_order = any_order
        self._detector = FailureDetector(timing)
        self._awaited: dict[str, None] | None = None

    def review(self, rows: Sequence[MemberRow], known_dead: Collection[str], now_ms: int) -> Review:
        """All member rows, received now. `known_dead` are members whose process is known to be dead."""
        self._detector.observe(rows, now_ms)
        live = [row for row in rows if row.state == "live" and row.member_id not in known_dead]
        others = [row for row in live if self._is_incompatible(row)]
        if self._awaited is None:
            self._awaited = {row.member_id: None for row in others}
        for row in others:
            if self._detector.is_heartbeating(row.member_id, now_ms):
                return Review(refused_by=row)
        others = [row for row in others if row.member_id in self._awaited]
        if any(row.member_id == self._me.member_id for row in live):
            # Every incompatible worker sees a confirmed peer of this one, and leaves.
            has_confirmed_peer = any(
                row.counter and row.member_id != self._me.member_id and not self._is_incompatible(row) for row in live
            )
            if has_confirmed_peer and not any(row.counter for row in others):
                return Review(is_admitted=True)
            for row in others:
                if not row.counter and joined_before(row, self._me):
                    return Review(refused_by=row)
        names = {row.member_id for row in others}
        due = [row for row in self._detector.sealable(now_ms) if row.member_id in names]
        return Review(is_admitted=not others, seals=tuple(Seal(row.member_id, row.counter) for row in due))

    def _is_incompatible(self, row: MemberRow) -> bool:
        return is_incompatible(self._me, row, any_order=self._any_order)


def is_incompatible(me: MemberRow, row: MemberRow, *, any_order: bool = False) -> bool:
    """A newer protocol works with an older one, not the other way round."""
    if _major(row.protocol) > _major(me.protocol):
        return True
    return row.order != me.order and not any_order


def settings_of(row: MemberRow) -> str:
    return f"order {row.order}; protocol {row.protocol}"


def joined_before(row: MemberRow, other: MemberRow) -> bool:
    """Clock differences can make this unfair, but all members get the same answer."""
    return (row.joined_wall_ms, row.member_id) < (other.joined_wall_ms, other.member_id)


def incompatible_members(
    me: MemberRow, detector: FailureDetector, now_ms: int, *, any_order: bool = False
) -> list[MemberRow]:
    """Live incompatible members. There are some only after a rollback, or if another implementation does not check."""
    return [
        row
        for row in detector.live()
        if is_incompatible(me, row, any_order=any_order) and detector.is_heartbeating(row.member_id, now_ms)
    ]


def mismatch(me: MemberRow, other: MemberRow) -> FleetMismatchError:
    return FleetMismatchError(
        f"this worker ({settings_of(me)}) differs from worker {other.worker_id!r} of the same application, which came "
        f"first ({settings_of(other)}): stop that one, or use another app=; to roll out another order=, start the new "
        "workers with LeaseSettings(any_order=True)"
    )


def _major(protocol: str) -> int:
    return int(protocol.partition(".")[0])
