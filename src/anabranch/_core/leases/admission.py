"""Whether this worker may join the fleet. All workers of an application must share order and protocol (rule U2).

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

from collections.abc import Collection, Iterable, Sequence

import msgspec

from anabranch._core.leases.failure_detector import FailureDetector
from anabranch._core.leases.store_calls import Seal
from anabranch._core.leases.timing import LeaseTiming
from anabranch._model.leases import MemberRow
from anabranch.errors import FleetMismatchError


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
            if not any(row.counter for row in others) and self._has_confirmed_peer(live):
                return Review(is_admitted=True)
            for row in others:
                if not row.counter and joined_before(row, self._me):
                    return Review(refused_by=row)
        names = {row.member_id for row in others}
        due = [row for row in self._detector.sealable(now_ms) if row.member_id in names]
        return Review(is_admitted=not others, seals=tuple(Seal(row.member_id, row.counter) for row in due))

    def _has_confirmed_peer(self, live: list[MemberRow]) -> bool:
        """Whether a confirmed, compatible member exists. Every incompatible worker sees it and leaves."""
        return any(
            row.counter and row.member_id != self._me.member_id and not self._is_incompatible(row) for row in live
        )

    def _is_incompatible(self, row: MemberRow) -> bool:
        return is_incompatible(self._me, row, any_order=self._any_order)


def is_incompatible(me: MemberRow, row: MemberRow, *, any_order: bool = False) -> bool:
    """A newer protocol works with an older one, not the other way round."""
    if _major(row.protocol) > _major(me.protocol):
        return True
    return row.order != me.order and not any_order


def settings_of(row: MemberRow) -> str:
    return f"order {row.order}; protocol {row.protocol}"


def members_with_worker_id(worker_id: str, rows: Iterable[MemberRow]) -> list[MemberRow]:
    """Live members of one worker. Where worker ids are exclusive, they are earlier runs of it, and dead (rule L17)."""
    return [row for row in rows if row.state == "live" and row.worker_id == worker_id]


def joined_before(row: MemberRow, other: MemberRow) -> bool:
    """Clock differences can make this unfair, but all members get the same answer."""
    return (row.joined_wall_ms, row.member_id) < (other.joined_wall_ms, other.member_id)


def incompatible_members(
    me: MemberRow, detector: FailureDetector, now_ms: int, *, any_order: bool = False
) -> list[MemberRow]:
    """Incompatible members whose counters moved recently. There should be none, but the store may have been rolled
    back, or another implementation may not check.
    """
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
