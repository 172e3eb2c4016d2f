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


def balance(members: Iterable[MemberCapacity], demands: Iterable[LeaseDemand]) -> dict[LeaseKey, str]:
    """The desired owner of each lease. A lease that no member has room for is absent."""
    members = sorted(members, key=lambda member: member.member_id)
    everybody = tuple(member.member_id for member in members)
    groups: dict[tuple[str, ...], list[LeaseDemand]] = {}
    for demand in sorted(demands, key=lambda demand: demand.key):
        groups.setdefault(everybody if demand.takers is None else demand.takers, []).append(demand)
    desired: dict[LeaseKey, str] = {}
    loads = dict.fromkeys(everybody, 0)
    # First the leases that only few members can hold. The others then even out the loads.
    for takers in sorted(groups, key=lambda takers: (len(takers), takers)):
        owners = _balance_group([member for member in members if member.member_id in takers], groups[takers], loads)
        desired.update(owners)
        for demand in groups[takers]:
            if (owner := owners.get(demand.key)) in loads:
                loads[owner] += demand.weight
    return desired


def _balance_group(
    members: list[MemberCapacity], wanted: list[LeaseDemand], loads: Mapping[str, int]
) -> dict[LeaseKey, str]:
    """Divides leases among the members that can hold them. `loads`: how many shards of other groups
    the plan has given each member so far.
    """
    held: dict[str, list[LeaseDemand]] = {member.member_id: [] for member in members}
    loose: list[LeaseDemand] = []
    for demand in wanted:
        if demand.owner in held:
            held[demand.owner].append(demand)
        else:
            loose.append(demand)
    held_counts = {member_id: sum(demand.weight for demand in mine) for member_id, mine in held.items()}
    shares = _shares(members, held_counts, sum(demand.weight for demand in wanted), loads)
    desired: dict[LeaseKey, str] = {}
    room: dict[str, int] = {}
    for member_id, mine in held.items():
        kept, surplus = _keep(mine, shares[member_id])
        desired.update((demand.key, member_id) for demand in kept)
        room[member_id] = max(0, shares[member_id] - sum(demand.weight for demand in kept))
        loose.extend(surplus)
    _assign(sorted(loose, key=lambda demand: demand.key), room, desired)
    return desired


def _shares(
    members: list[MemberCapacity], held_counts: dict[str, int], total: int, loads: Mapping[str, int]
) -> dict[str, int]:
    """How many active shards of a group each member should hold.

    All members fill up to the same level, unless they reach their limit first. The level includes the shards of other
    groups that the plan has given them. The remainder goes to the members that hold the most above their share, so that
    few leases move.
    """
    limits = {
        member.member_id: total
        if member.shards_max is None
        else max(0, min(total, member.shards_max - loads[member.member_id]))
        for member in members
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
    for member_id in sorted(rising, key=lambda name: (shares[name] - held_counts[name], name))[:left]:
        shares[member_id] += 1
    return shares


def _keep(mine: list[LeaseDemand], share: int) -> tuple[list[LeaseDemand], list[LeaseDemand]]:
    """Splits a member's leases into kept and surplus. Leases that must not move yet are always kept."""
    kept, surplus = [], []
    count = 0
    for demand in sorted(mine, key=lambda demand: demand.movable):
        if demand.weight == 0:
            kept.append(demand)
        elif not demand.movable or count < share:
            kept.append(demand)
            count += demand.weight
        else:
            surplus.append(demand)
    return kept, surplus


def _assign(loose: list[LeaseDemand], room: dict[str, int], desired: dict[LeaseKey, str]) -> None:
    """Gives each lease without an owner to the member with the most room."""
    most_first = [(-count, member_id) for member_id, count in room.items()]
    heapify(most_first)
    for demand in loose:
        if most_first and -most_first[0][0] >= demand.weight:
            count, member_id = most_first[0]
            desired[demand.key] = member_id
            heapreplace(most_first, (count + demand.weight, member_id))
        elif demand.owner is not None:
            desired[demand.key] = demand.owner
