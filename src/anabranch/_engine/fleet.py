"""Before joining: is this worker of one mind with the fleet that is there?

A worker that reads other streams, or in another order, would make leases that the others do not expect (rule U2); one
of a newer protocol may write rows that this one does not understand. Rows of members that died lately look alive for a
while, so a differing one is watched: only one whose counter moves counts.
"""

from anabranch._core.leases.timing import LeaseTiming
from anabranch._engine.member import MemberProfile
from anabranch._engine.outside import Outside
from anabranch._engine.store_calls import insist
from anabranch._model.leases import PROTOCOL, MemberRow
from anabranch.errors import FleetMismatchError

__all__ = ["check_fleet"]


async def check_fleet(outside: Outside, profile: MemberProfile, timing: LeaseTiming) -> None:
    first = await _differing(outside, profile, timing)
    waited_until_ms = outside.clock.now_ms() + max([timing.expiry_ms, *(row.expiry_ms for row in first.values())])
    seen = first
    while seen and outside.clock.now_ms() < waited_until_ms:
        await outside.clock.sleep_until_ms(outside.clock.now_ms() + timing.poll_interval_ms)
        seen = await _differing(outside, profile, timing)
        for member_id, row in seen.items():
            known = first.get(member_id)
            if known is None or row.counter > known.counter:
                raise FleetMismatchError(
                    f"this worker ({profile.fingerprint}; protocol {PROTOCOL}) differs from worker {row.worker_id!r} "
                    f"of the same application, which is running ({row.fingerprint}; protocol {row.protocol}): stop "
                    "that one first, or use another app="
                )


async def _differing(outside: Outside, profile: MemberProfile, timing: LeaseTiming) -> dict[str, MemberRow]:
    rows = await insist(outside, outside.store.read_members, deadline_ms=timing.call_deadline_ms)
    dead = await insist(outside, outside.store.dead_members, deadline_ms=timing.call_deadline_ms)
    return {
        row.member_id: row
        for row in rows
        if row.state == "live" and row.member_id not in dead and _is_other_minded(row, profile)
    }


def _is_other_minded(row: MemberRow, profile: MemberProfile) -> bool:
    return row.fingerprint != profile.fingerprint or _major(row.protocol) > _major(PROTOCOL)


def _major(protocol: str) -> int:
    return int(protocol.partition(".")[0])
