"""May this worker be a member of the fleet that is there? Workers of one application are of one mind (rule U2).

One that reads other streams, or in another order, would make leases that the others do not expect; one of a newer
protocol may write rows that this one does not understand. Looking before joining is not enough: two that start in the
same moment do not see each other. So each looks again once its row is written, before it does anything else:

- of two, the one whose row was written later sees the other one's. It is admitted only if it sees no member of another
  mind; so two of different minds are never both admitted;
- a member confirms its admission by its first heartbeat. A confirmed one wins against any that is not; between two that
  are not, the one that joined earlier stays, so that they do not both leave. The earlier waits for the other to decide:
  that one may have looked before it could see anybody;
- what came after the first look need not be waited for: it sees this one;
- the row of a member that died lately looks alive for a while. It is watched for its own expiry and then sealed, so
  that it cannot come back; only one whose counter moves counts.
"""

from collections.abc import Collection, Sequence

import msgspec

from anabranch._core.leases.steps import Seal
from anabranch._core.leases.stopwatch import Stopwatches
from anabranch._core.leases.timing import LeaseTiming
from anabranch._model.leases import MemberRow

__all__ = ["Admission", "Review", "differing_members", "differs", "precedes"]


class Review(msgspec.Struct, frozen=True):
    """What follows from one look at the members."""

    is_admitted: bool = False
    refused_by: MemberRow | None = None
    seals: tuple[Seal, ...] = ()
    """Before the next look: these have shown no life for as long as they may."""


class Admission:
    def __init__(self, me: MemberRow, timing: LeaseTiming) -> None:
        """`me` is this member's row, or what it would be: before it is written, looking is no more than a courtesy."""
        self._me = me
        self._stopwatches = Stopwatches(timing)
        self._awaited: dict[str, None] | None = None

    def review(self, rows: Sequence[MemberRow], known_dead: Collection[str], now_ms: int) -> Review:
        """All member rows, in an answer received now. `known_dead` are members whose process is gone for certain."""
        self._stopwatches.observe(rows, now_ms)
        live = [row for row in rows if row.state == "live" and row.member_id not in known_dead]
        others = [row for row in live if differs(self._me, row)]
        if self._awaited is None:
            self._awaited = {row.member_id: None for row in others}
        for row in others:
            if self._stopwatches.is_beating(row.member_id, now_ms):
                return Review(refused_by=row)
        others = [row for row in others if row.member_id in self._awaited]
        if any(row.member_id == self._me.member_id for row in live):
            if not any(row.counter for row in others) and self._is_represented(live):
                return Review(is_admitted=True)
            for row in others:
                if not row.counter and precedes(row, self._me):
                    return Review(refused_by=row)
        names = {row.member_id for row in others}
        due = [row for row in self._stopwatches.sealable(now_ms) if row.member_id in names]
        return Review(is_admitted=not others, seals=tuple(Seal(row.member_id, row.counter) for row in due))

    def _is_represented(self, live: list[MemberRow]) -> bool:
        """A confirmed member of this mind is there: whoever is of another will see it, and go."""
        return any(row.counter and row.member_id != self._me.member_id and not differs(self._me, row) for row in live)


def differs(me: MemberRow, row: MemberRow) -> bool:
    """A newer protocol knows how to live with an older one, not the other way round."""
    return row.fingerprint != me.fingerprint or _major(row.protocol) > _major(me.protocol)


def precedes(row: MemberRow, other: MemberRow) -> bool:
    """Clocks that differ make this unfair, never undecided: everybody compares the same two numbers."""
    return (row.joined_wall_ms, row.member_id) < (other.joined_wall_ms, other.member_id)


def differing_members(me: MemberRow, stopwatches: Stopwatches, now_ms: int) -> list[MemberRow]:
    """Members of another mind that were seen to live a moment ago. There should be none: but a store may have been set
    back, or a worker of another make may not ask.
    """
    return [row for row in stopwatches.live() if differs(me, row) and stopwatches.is_beating(row.member_id, now_ms)]


def _major(protocol: str) -> int:
    return int(protocol.partition(".")[0])
