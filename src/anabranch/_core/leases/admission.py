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

A change of `order=` can be rolled out without a stop of the fleet: who is told to joins workers of any order. The lease
rows say in which order they were written, so each owner knows what it may rely on (rule M5). Other streams are never
joined: the fair share counts on every worker to read them all.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from anabranch._core.leases.failure_detector import Stopwatches
from anabranch._core.leases.plan import Seal
from anabranch._core.leases.timing import LeaseTiming
from anabranch._model.leases import MemberRow

__all__ = ["Admission", "Review", "differing_members", "differs", "fingerprint", "namesakes", "precedes"]


_STREAMS: Final = "streams "
_ORDER: Final = "; order "


class Review(msgspec.Struct, frozen=True):
    """What follows from one look at the members."""

    is_admitted: bool = False
    refused_by: MemberRow | None = None
    seals: tuple[Seal, ...] = ()
    """Before the next look: these have shown no life for as long as they may."""


class Admission:
    def __init__(self, me: MemberRow, timing: LeaseTiming, *, any_order: bool = False) -> None:
        """`me` is this member's row, or what it would be: before it is written, looking is no more than a courtesy."""
        self._me = me
        self._any_order = any_order
        self._stopwatches = Stopwatches(timing)
        self._awaited: dict[str, None] | None = None

    def review(self, rows: Sequence[MemberRow], known_dead: Collection[str], now_ms: int) -> Review:
        """All member rows, in an answer received now. `known_dead` are members whose process is gone for certain."""
        self._stopwatches.observe(rows, now_ms)
        live = [row for row in rows if row.state == "live" and row.member_id not in known_dead]
        others = [row for row in live if self._differs(row)]
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
        return any(row.counter and row.member_id != self._me.member_id and not self._differs(row) for row in live)

    def _differs(self, row: MemberRow) -> bool:
        return differs(self._me, row, any_order=self._any_order)


def fingerprint(streams: Iterable[str], order: str) -> str:
    """The settings that a fleet must share, for people to read, too."""
    return f"{_STREAMS}{','.join(sorted(streams))}{_ORDER}{order}"


def differs(me: MemberRow, row: MemberRow, *, any_order: bool = False) -> bool:
    """A newer protocol knows how to live with an older one, not the other way round."""
    if _major(row.protocol) > _major(me.protocol):
        return True
    streams, _, order = me.fingerprint.partition(_ORDER)
    others, _, other_order = row.fingerprint.partition(_ORDER)
    return not _are_same(streams, others) or (order != other_order and not any_order)


def namesakes(worker_id: str, rows: Iterable[MemberRow]) -> list[MemberRow]:
    """Live members of a worker's name. Where nobody else may have it, they are earlier lives of that worker, and over
    (rule L17).
    """
    return [row for row in rows if row.state == "live" and row.worker_id == worker_id]


def precedes(row: MemberRow, other: MemberRow) -> bool:
    """Clocks that differ make this unfair, never undecided: everybody compares the same two numbers."""
    return (row.joined_wall_ms, row.member_id) < (other.joined_wall_ms, other.member_id)


def differing_members(
    me: MemberRow, stopwatches: Stopwatches, now_ms: int, *, any_order: bool = False
) -> list[MemberRow]:
    """Members of another mind that were seen to live a moment ago. There should be none: but a store may have been set
    back, or a worker of another make may not ask.
    """
    return [
        row
        for row in stopwatches.live()
        if differs(me, row, any_order=any_order) and stopwatches.is_beating(row.member_id, now_ms)
    ]


def _major(protocol: str) -> int:
    return int(protocol.partition(".")[0])


def _are_same(streams: str, others: str) -> bool:
    """One may name a stream that the other gives by its ARN; only two ARNs tell streams of one name apart."""
    mine, theirs = (sorted(each.removeprefix(_STREAMS).split(","), key=_name) for each in (streams, others))
    return len(mine) == len(theirs) and all(
        one == other or (_name(one) == _name(other) and not (_is_arn(one) and _is_arn(other)))
        for one, other in zip(mine, theirs, strict=True)
    )


def _name(stream: str) -> str:
    return stream.rpartition("/")[2]


def _is_arn(stream: str) -> bool:
    return stream.startswith("arn:")
