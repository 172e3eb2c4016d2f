"""Which member should hold which lease: a pure function of who is there and who holds what.

Every member computes it from the same rows and acts on its own part only, so no leader is needed. Laws, each a test:
- fair: members differ by at most one moving shard, as far as their `shards_max` allow;
- stable: what it has decided it decides again, once everybody acted on it;
- minimal: a lease leaves a live member only if that member holds more than its share;
- deterministic: the order of its inputs does not matter.

Children need no rule of their own: who finishes their last parent takes them at once (rule S4), and what is fair stays.
Leases without weight (paused, stopped) need an owner, but count for nothing and are never moved for fairness. Leases
that cannot run yet are not given to it at all.
"""

from collections.abc import Iterable

import msgspec

from anabranch._model.leases import LeaseKey

__all__ = ["Claim", "Seat", "balance"]


class Seat(msgspec.Struct, frozen=True):
    """A live member that can hold leases; one that drains has no seat."""

    member_id: str
    shards_max: int | None = None


class Claim(msgspec.Struct, frozen=True):
    """A lease to be held by somebody."""

    key: LeaseKey
    owner: str | None = None
    """None where it can be taken now; otherwise a live member, with a seat or without."""
    weight: int = 1
    """1 while its shard moves, 0 while it stands still on purpose."""
    movable: bool = True
    """False for a while after a move, so that two views that differ cannot throw a lease to and fro."""


def balance(seats: Iterable[Seat], claims: Iterable[Claim]) -> dict[LeaseKey, str]:
    """The holder of each lease as it should be; a lease that nobody has room for is absent."""
    places = sorted(seats, key=lambda seat: seat.member_id)
    wanted = sorted(claims, key=lambda claim: claim.key)
    held: dict[str, list[Claim]] = {seat.member_id: [] for seat in places}
    loose: list[Claim] = []
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


def _shares(places: list[Seat], moving: dict[str, int], total: int) -> dict[str, int]:
    """How many moving shards each member should hold.

    Shares are filled like water: all rise together, a full member stays behind. What does not divide goes to those that
    hold the most already, so that as little as possible moves.
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


def _keep(mine: list[Claim], share: int) -> tuple[list[Claim], list[Claim]]:
    """What a member keeps of its own, and what is over. Leases that must not move yet are kept first, even too many."""
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


def _seat(loose: list[Claim], room: dict[str, int], desired: dict[LeaseKey, str]) -> None:
    """Hands out what has no holder, each to the member that has most room."""
    for claim in loose:
        member_id = min(room, key=lambda name: (-room[name], name), default=None)
        if member_id is not None and room[member_id] >= claim.weight:
            desired[claim.key] = member_id
            room[member_id] -= claim.weight
        elif claim.owner is not None:
            desired[claim.key] = claim.owner
