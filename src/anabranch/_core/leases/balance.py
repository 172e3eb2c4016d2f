"""Which member should hold which lease: a pure function of the members and the current owners.

Every member computes it from the same rows and performs only its own part, so no leader is needed. The laws, each with
a test:
- fair: members differ by at most one active shard, as far as their `shards_max` and the streams that they read allow;
- stable: once all members have acted on a result, the next result is the same;
- minimal: a lease leaves a live member only if that member holds more than its share;
- deterministic: the order of the inputs does not matter.

Child shards need no rule: the member that finishes their last parent takes them at once (rule S4). Leases without
weight (paused or stopped) need an owner, but are never moved for fairness. Leases that cannot start yet are not passed
in.
"""

from collections.abc import Iterable, Mapping
from heapq import heapify, heapreplace

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
    takers: tuple[str, ...] | None = None
    """The members that may hold it, sorted: those that read its stream. None: all."""


def balance(seats: Iterable[MemberCapacity], claims: Iterable[LeaseDemand]) -> dict[LeaseKey, str]:
    """The desired owner of each lease. A lease that no member has room for is absent."""
    places = sorted(seats, key=lambda seat: seat.member_id)
    everybody = tuple(place.member_id for place in places)
    groups: dict[tuple[str, ...], list[LeaseDemand]] = {}
    for claim in sorted(claims, key=lambda claim: claim.key):
        groups.setdefault(everybody if claim.takers is None else claim.takers, []).append(claim)
    desired: dict[LeaseKey, str] = {}
    loads = dict.fromkeys(everybody, 0)
    # First what few members can hold. The other leases then even out the loads.
    for takers in sorted(groups, key=lambda takers: (len(takers), takers)):
        owners = _balance_group([place for place in places if place.member_id in takers], groups[takers], loads)
        desired.update(owners)
        for claim in groups[takers]:
            if (owner := owners.get(claim.key)) in loads:
                loads[owner] += claim.weight
    return desired


def _balance_group(
    places: list[MemberCapacity], wanted: list[LeaseDemand], loads: Mapping[str, int]
) -> dict[LeaseKey, str]:
    """Shares leases that the same members can hold. `loads` is what the members hold of others."""
    held: dict[str, list[LeaseDemand]] = {seat.member_id: [] for seat in places}
    loose: list[LeaseDemand] = []
    for claim in wanted:
        if claim.owner in held:
            held[claim.owner].append(claim)
        else:
            loose.append(claim)
    moving = {member_id: sum(claim.weight for claim in mine) for member_id, mine in held.items()}
    shares = _shares(places, moving, sum(claim.weight for claim in wanted), loads)
    desired: dict[LeaseKey, str] = {}
    room: dict[str, int] = {}
    for member_id, mine in held.items():
        kept, surplus = _keep(mine, shares[member_id])
        desired.update((claim.key, member_id) for claim in kept)
        room[member_id] = max(0, shares[member_id] - sum(claim.weight for claim in kept))
        loose.extend(surplus)
    _seat(sorted(loose, key=lambda claim: claim.key), room, desired)
    return desired


def _shares(
    places: list[MemberCapacity], moving: dict[str, int], total: int, loads: Mapping[str, int]
) -> dict[str, int]:
    """How many active shards of a group each member should hold.

    All members fill up to the same level, which counts what they hold already of other groups, unless they reach their
    limit before. The remainder goes to the members that hold the most, so that few leases move.
    """
    limits = {
        seat.member_id: total
        if seat.shards_max is None
        else max(0, min(total, seat.shards_max - loads[seat.member_id]))
        for seat in places
    }

    def filled(level: int) -> dict[str, int]:
        return {member_id: min(limit, max(0, level - loads[member_id])) for member_id, limit in limits.items()}

    low, high = 0, total + max((loads[member_id] for member_id in limits), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(filled(middle).values()) <= total:
            low = middle
        else:
            high = middle - 1
    shares, higher = filled(low), filled(low + 1)
    left = total - sum(shares.values())
    rising = [member_id for member_id, share in shares.items() if higher[member_id] > share]
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
    most_first = [(-count, member_id) for member_id, count in room.items()]
    heapify(most_first)
    for claim in loose:
        if most_first and -most_first[0][0] >= claim.weight:
            count, member_id = most_first[0]
            desired[claim.key] = member_id
            heapreplace(most_first, (count + claim.weight, member_id))
        elif claim.owner is not None:
            desired[claim.key] = claim.owner
