"""Which member should hold which lease: a pure function of the members and the current owners.

Every member computes it from the same rows and performs only its own part, so no leader is needed. The laws, each with
a test:
- fair: members differ by at most one active shard, as far as their `shards_max` allow;
- stable: once all members have acted on a result, the next result is the same;
- minimal: a lease leaves a live member only if that member holds more than its share;
- deterministic: the order of the inputs does not matter.

Child shards need no rule: the member that finishes their last parent takes them at once (rule S4). Leases without
weight (paused or stopped) need an owner, but are never moved for fairness. Leases that cannot start yet are not passed
in.
"""

from collections.abc import Iterable

import msgspec

from anabranch._model.leases import LeaseKey


class MemberCapacity(msgspec.Struct, frozen=True):
    """A live member that can hold leases. A draining member is not passed in."""

    member_id: str
    shards_max: int | None = None


class LeaseDemand(msgspec.Struct, frozen=True):
    """A lease that needs an owner."""

    key: LeaseKey
    owner: str | None = None
    """None if it can be taken now; otherwise a live member, draining or not."""
    weight: int = 1
    """1 for an active shard, 0 for one that is paused or stopped."""
    movable: bool = True
    """False for a while after a move, so that members with different views cannot pass a lease back and forth."""


def balance(seats: Iterable[MemberCapacity], claims: Iterable[LeaseDemand]) -> dict[LeaseKey, str]:
    """The desired owner of each lease. A lease that no member has room for is absent."""
    places = sorted(seats, key=lambda seat: seat.member_id)
    wanted = sorted(claims, key=lambda claim: claim.key)
    held: dict[str, list[LeaseDemand]] = {seat.member_id: [] for seat in places}
    loose: list[LeaseDemand] = []
    for claim in wanted:
        if claim.owner in held:
            held[claim.owner].append(claim)
        else:
            loose.append(claim)
    moving = {member_id: sum(claim.weight for claim in mine) for member_id, mine in held.items()}
    shares = _shares(places, moving, sum(claim.weight for claim in wanted))
    desired: dict[LeaseKey, str] = {}
    room: dict[str, int] = {}
    for member_id, mine in held.items():
        kept, surplus = _keep(mine, shares[member_id])
        desired.update((claim.key, member_id) for claim in kept)
        room[member_id] = max(0, shares[member_id] - sum(claim.weight for claim in kept))
        loose.extend(surplus)
    _seat(sorted(loose, key=lambda claim: claim.key), room, desired)
    return desired


def _shares(places: list[MemberCapacity], moving: dict[str, int], total: int) -> dict[str, int]:
    """How many active shards each member should hold.

    All shares grow together until a member reaches its limit. The remainder goes to the members that hold the most
    already, so that few leases move.
    """
    shares = dict.fromkeys(moving, 0)
    limits = {seat.member_id: total if seat.shards_max is None else min(seat.shards_max, total) for seat in places}
    left = total
    rising = [seat.member_id for seat in places if limits[seat.member_id] > 0]
    while rising and left >= len(rising):
        step = min(left // len(rising), *(limits[member_id] - shares[member_id] for member_id in rising))
        for member_id in rising:
            shares[member_id] += step
        left -= step * len(rising)
        rising = [member_id for member_id in rising if shares[member_id] < limits[member_id]]
    for member_id in sorted(rising, key=lambda name: (-moving[name], name))[:left]:
        shares[member_id] += 1
    return shares


def _keep(mine: list[LeaseDemand], share: int) -> tuple[list[LeaseDemand], list[LeaseDemand]]:
    """Splits a member's leases into kept and surplus. Leases that must not move yet are always kept."""
    kept, surplus = [], []
    count = 0
    for claim in sorted(mine, key=lambda claim: claim.movable):
        if claim.weight == 0:
            kept.append(claim)
        elif not claim.movable or count < share:
            kept.append(claim)
            count += claim.weight
        else:
            surplus.append(claim)
    return kept, surplus


def _seat(loose: list[LeaseDemand], room: dict[str, int], desired: dict[LeaseKey, str]) -> None:
    """Gives each lease without an owner to the member with the most room."""
    for claim in loose:
        member_id = min(room, key=lambda name: (-room[name], name), default=None)
        if member_id is not None and room[member_id] >= claim.weight:
            desired[claim.key] = member_id
            room[member_id] -= claim.weight
        elif claim.owner is not None:
            desired[claim.key] = claim.owner
