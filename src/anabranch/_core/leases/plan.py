"""One round of the lease protocol: the steps to perform, and what their answers change.

Every member plans for itself: it seals members that missed their heartbeats, takes free leases, requests leases from
live members, and answers requests. `plan_round` returns steps, the lease machine has them performed (each is one store
call, except `Drain`), and the `apply_*` functions update the lease table.

A hand-off needs two plans. The requester's plan must give it the lease. The donor's plan must give the lease away, and
give the requester at least one lease. So a donor never drops below its share.

Losing a race is an outcome, not an error: another member took the lease first, or the answer to an earlier write was
lost. No answer is an outcome too: the write may have taken effect, or may still do so.

`balance` says which member should hold which lease: a pure function of the members and the current owners. Every member
computes it from the same rows and performs only its own part, so no leader is needed. The laws, each with a test:
- fair: members differ by at most one active shard, as far as their `shards_max` and the streams that they read allow;
- stable: once all members have acted on a result, the next result is the same;
- minimal: a lease leaves a live member only if that member holds more than its share;
- deterministic: the order of the inputs does not matter.

Child shards need no rule: the member that finishes their last parent takes them at once (rule S4). Leases without
weight (paused or stopped) need an owner, but are never moved for fairness. Leases that cannot start yet are not passed
in.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heapreplace
from typing import Final, Literal

import msgspec

from anabranch._core.leases.lease_table import MOVE_COOL_DOWN_MS, LeaseTable, weight
from anabranch._core.leases.members import FailureDetector
from anabranch._core.leases.store_calls import DeleteMember, NoAnswer, RequestHandOff, Seal, TakeLease
from anabranch._core.shards import lifecycle
from anabranch._model.leases import (
    REQUESTS_MAX,
    Conflict,
    HandOffRequest,
    LeaseKey,
    LeaseRow,
    MemberRow,
    short_id,
)

# the balance


class LeaseDemand(msgspec.Struct, frozen=True):
    """A lease that needs an owner."""

    key: LeaseKey
    owner: str | None = None
    """None if it can be taken now; otherwise a live member, draining or not."""
    weight: int = 1
    """1 for an active shard, 0 for one that is paused or stopped."""
    movable: bool = True
    """False for a while after a move, so that members with different views cannot pass a lease back and forth."""
    takers: tuple[str, ...] = ()
    """The members that may hold it, sorted: those that read its stream."""


def balance(limits: Mapping[str, int | None], demands: Iterable[LeaseDemand]) -> dict[LeaseKey, str]:
    """The desired owner of each lease for which a member has room. `limits`: `shards_max` of each member that stays."""
    groups: dict[tuple[str, ...], list[LeaseDemand]] = {}
    for demand in sorted(demands, key=lambda demand: demand.key):
        groups.setdefault(demand.takers, []).append(demand)
    desired: dict[LeaseKey, str] = {}
    loads = dict.fromkeys(limits, 0)
    # First the leases that only few members can hold. The others then even out the loads.
    for takers in sorted(groups, key=lambda takers: (len(takers), takers)):
        owners = _balance_group({name: limits[name] for name in takers if name in limits}, groups[takers], loads)
        desired.update(owners)
        for demand in groups[takers]:
            if (owner := owners.get(demand.key)) in loads:
                loads[owner] += demand.weight
    return desired


def _balance_group(
    limits: Mapping[str, int | None], wanted: list[LeaseDemand], loads: Mapping[str, int]
) -> dict[LeaseKey, str]:
    """`loads`: how many shards of other groups the plan has given each member so far."""
    held: dict[str, list[LeaseDemand]] = {member_id: [] for member_id in limits}
    unassigned: list[LeaseDemand] = []
    for demand in wanted:
        if demand.owner in held:
            held[demand.owner].append(demand)
        else:
            unassigned.append(demand)
    held_counts = {member_id: sum(demand.weight for demand in mine) for member_id, mine in held.items()}
    shares = _shares(limits, held_counts, sum(demand.weight for demand in wanted), loads)
    desired: dict[LeaseKey, str] = {}
    room: dict[str, int] = {}
    for member_id, mine in held.items():
        kept, surplus = _split_surplus(mine, shares[member_id])
        desired.update((demand.key, member_id) for demand in kept)
        room[member_id] = max(0, shares[member_id] - sum(demand.weight for demand in kept))
        unassigned.extend(surplus)
    _assign(sorted(unassigned, key=lambda demand: demand.key), room, desired)
    return desired


def _shares(
    limits: Mapping[str, int | None], held_counts: dict[str, int], total: int, loads: Mapping[str, int]
) -> dict[str, int]:
    """How many active shards of a group each member should hold.

    All members fill up to the same level, unless they reach their limit first. The level includes the shards of other
    groups that the plan has given them. The remainder goes to the members that hold the most above their share, so that
    few leases move.
    """
    rooms = {
        member_id: total if limit is None else max(0, min(total, limit - loads[member_id]))
        for member_id, limit in limits.items()
    }

    def filled(level: int) -> dict[str, int]:
        return {member_id: min(room, max(0, level - loads[member_id])) for member_id, room in rooms.items()}

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


def _split_surplus(mine: list[LeaseDemand], share: int) -> tuple[list[LeaseDemand], list[LeaseDemand]]:
    """Splits a member's leases into kept and surplus. Leases that must not move yet are always kept."""
    kept, surplus = [], []
    count = 0
    for demand in sorted(mine, key=lambda demand: demand.movable):
        if demand.weight == 0 or not demand.movable or count < share:
            kept.append(demand)
            count += demand.weight
        else:
            surplus.append(demand)
    return kept, surplus


def _assign(unassigned: list[LeaseDemand], room: dict[str, int], desired: dict[LeaseKey, str]) -> None:
    """Gives each lease without an owner to the member with the most room."""
    most_first = [(-count, member_id) for member_id, count in room.items()]
    heapify(most_first)
    for demand in unassigned:
        if most_first and -most_first[0][0] >= demand.weight:
            count, member_id = most_first[0]
            desired[demand.key] = member_id
            heapreplace(most_first, (count + demand.weight, member_id))
        elif demand.owner is not None:
            desired[demand.key] = demand.owner


# the steps of a round


class Drain(msgspec.Struct, frozen=True):
    """Start no more records of a requested lease and finish the running ones, then transfer it."""

    request: HandOffRequest


class Write(msgspec.Struct, frozen=True):
    """Write a held lease: commit, finish, release or give."""

    row: LeaseRow
    expected_version: int


Step = Seal | TakeLease | RequestHandOff | Drain | Write | DeleteMember


ASK_AGAIN_MS: Final = 10_000
TAKES_MAX: Final = 100
"""Per round. If other workers start meanwhile, this member's share shrinks, so it does not take everything at once."""
SETTLING_MS: Final = 10_000
"""How long a fleet takes to rebalance after a membership change."""
MEMBER_KEPT_MS: Final = 3_600_000
"""How long the row of an ended member stays, for people to look at."""


def plan_round(
    table: LeaseTable, detector: FailureDetector, now_ms: int, *, may_take: bool, known_dead: Collection[str] = ()
) -> list[Step]:
    """The steps of one round. If not `may_take`, it takes and requests nothing: the member is fenced or draining, or
    waits after a rollback of the store (rule L13). `known_dead` are members whose process is known to be dead (rule
    L17).
    """
    steps: list[Step] = [
        Seal(row.member_id, row.counter)
        for row in detector.sealable(now_ms, known_dead)
        if row.member_id != table.member_id
    ]
    steps.extend(  # repeats each release or gift that has no answer yet
        Write(holding.pending_transfer, holding.row.version)
        for holding in table.held.values()
        if holding.pending_transfer is not None
    )
    mine = detector.row(table.member_id)
    wanted = () if mine is None else mine.wanted
    # The requester saw an answer once the request is gone from the row. After that, the same request is a new one.
    for name in [name for name in table.answered if name not in wanted]:
        del table.answered[name]
    is_due = table.plan_again_ms is None or now_ms >= table.plan_again_ms
    if not (table.changed or is_due or table.unanswered(wanted)):
        return steps
    table.changed = False
    table.plan_again_ms = now_ms + ASK_AGAIN_MS
    live = detector.live()
    demands = _demands(table, live, detector.membership_changed_ms, now_ms)
    desired = balance({row.member_id: row.shards_max for row in live if not row.draining}, demands)
    table.unplaced = {  # leases that could run, but no member has room for them (rule S7)
        demand.key: table.unplaced.get(demand.key, now_ms)
        for demand in demands
        if demand.owner is None and demand.key not in desired and table.reads(demand.key)
    }
    steps.extend(_answer_requests(table, wanted, desired))
    if may_take:
        steps.extend(_take_and_ask(table, detector, desired, now_ms))
    steps.extend(_clean_up(table, detector, now_ms))
    return steps


def _demands(table: LeaseTable, live: list[MemberRow], changed_ms: int, now_ms: int) -> list[LeaseDemand]:
    """The leases that have a live owner, or can be taken now. The members last changed at `changed_ms`."""
    alive = {row.member_id: None for row in live}
    takers: dict[str, tuple[str, ...]] = {}
    demands: list[LeaseDemand] = []
    for row in table.leases.values():
        if row.is_finished:
            continue
        key, owner = row.key, row.owner if row.owner in alive else None
        is_waiting = bool(lifecycle.open_parents(row, table.leases))
        if owner is None and is_waiting:
            continue
        if key.stream_key not in takers:
            takers[key.stream_key] = _takers(live, key.stream_key)
        moved_ms, previous = table.moved.get(key, (None, None))
        # Only moves between live members cool down, so that a fleet rebalances quickly after a crash. Moves shortly
        # after a membership change do not cool down either.
        is_cooling = (
            moved_ms is not None
            and previous in alive
            and moved_ms - changed_ms > SETTLING_MS
            and now_ms - moved_ms < MOVE_COOL_DOWN_MS
        )
        holding = table.held.get(key)
        is_kept = holding is not None and now_ms < holding.kept_until_ms
        demand_weight = 0 if is_waiting else weight(row)
        demands.append(LeaseDemand(key, owner, demand_weight, not (is_cooling or is_kept), takers[key.stream_key]))
    return demands


def _takers(live: list[MemberRow], stream_key: str) -> tuple[str, ...]:
    """The members that may get leases of a stream: they read it, do not drain, and can read, unless none can."""
    staying = [row for row in live if not row.draining and row.reads(stream_key)]
    healthy = [row for row in staying if row.reads_healthy]
    return tuple(row.member_id for row in healthy or staying)


def _answer_requests(table: LeaseTable, wanted: tuple[str, ...], desired: dict[LeaseKey, str]) -> list[Step]:
    """Drains a requested lease if this member's plan gives it away, to any member, and gives the requester enough
    leases. Other requests are void. Members that read the leases at different times agree sooner on how many leases
    each of them gets than on which ones.
    """
    steps: list[Step] = []
    if not (unanswered := table.unanswered(wanted)):
        return steps
    given = {
        key: desired[key]
        for key, holding in table.held.items()
        if holding.state == "held" and weight(holding.row) and desired.get(key, table.member_id) != table.member_id
    }
    planned_counts = Counter(given.values())
    keys = {key.short_name: key for key in given}
    requesters = {short_id(member_id): member_id for member_id in planned_counts}
    for name in unanswered:
        key_name, _, requester_name = name.rpartition(":")
        key, requester = keys.get(key_name), requesters.get(requester_name)
        if key is None or requester is None or not planned_counts[requester]:
            table.answered[name] = None
            continue
        del keys[key_name]
        planned_counts[requester] -= 1
        request = HandOffRequest(key, requester)
        table.drain(request)
        steps.append(Drain(request))
    return steps


def _take_and_ask(
    table: LeaseTable, detector: FailureDetector, desired: dict[LeaseKey, str], now_ms: int
) -> list[Step]:
    steps: list[Step] = []
    requests: dict[str, int] = {}
    take_count = 0
    mine = [table.leases[key] for key, member_id in desired.items() if member_id == table.member_id]
    # Suspect shards first: their rows must say that they are held in quarantine before records of other shards start.
    # Otherwise a crash caused by another shard would be counted against them (rule D5).
    for row in sorted(mine, key=lambda row: -row.takes_without_progress):
        key = row.key
        if key in table.held:
            continue
        if row.owner is None or detector.has_ended(row.owner, now_ms):
            if take_count == TAKES_MAX:
                table.changed = True
                continue
            take_count += 1
            steps.append(TakeLease(key, table.member_id, row.owner, row.version))
        elif (donor := detector.row(row.owner)) is not None and _may_ask(table, key, donor, now_ms):
            count = requests.get(donor.member_id, len(donor.wanted))
            if count >= REQUESTS_MAX:
                continue  # the others are requested when the donor has answered these
            requests[donor.member_id] = count + 1
            table.asked[key] = now_ms
            steps.append(RequestHandOff(donor.member_id, HandOffRequest(key, table.member_id)))
    for key in [key for key, asked_ms in table.asked.items() if now_ms - asked_ms > 3 * ASK_AGAIN_MS]:
        del table.asked[key]
    return steps


def _may_ask(table: LeaseTable, key: LeaseKey, donor: MemberRow, now_ms: int) -> bool:
    """At intervals, not while the donor still has the request, and not for a shard that could not be read here."""
    if now_ms < table.not_wanted_until.get(key, 0):
        return False
    asked_ms = table.asked.get(key)
    if asked_ms is None:
        return True
    return now_ms - asked_ms >= ASK_AGAIN_MS and HandOffRequest(key, table.member_id).short_name not in donor.wanted


def _clean_up(table: LeaseTable, detector: FailureDetector, now_ms: int) -> list[Step]:
    ended = detector.ended_before(now_ms - MEMBER_KEPT_MS)
    if not ended:
        return []
    named = {row.owner for row in table.leases.values()}
    return [DeleteMember(member_id) for member_id in ended if member_id not in named]


Written = Literal["written", "again", "lost", "unknown"]
"""`again`: this member still owns the lease, but at another version; repeat the write now."""


def apply_members(table: LeaseTable, detector: FailureDetector, rows: Sequence[MemberRow], now_ms: int) -> None:
    ended_count = detector.ended_count
    if detector.observe(rows, now_ms):
        table.changed = True
    for row in rows:
        if detector.row(row.member_id) is row:  # not an older one than was seen before
            table.observe_changes(row)
    if detector.ended_count != ended_count:
        table.read_again()  # its row may not list its last changes


def apply_seal(table: LeaseTable, detector: FailureDetector, row: MemberRow | None, now_ms: int) -> None:
    """`row` is the member's row after the attempt. None if there was no answer or there is no such row."""
    if row is not None and detector.observe_row(row, now_ms, is_answer=True):
        table.changed = True
        table.read_again()


def apply_take(table: LeaseTable, step: TakeLease, answer: LeaseRow | Conflict | NoAnswer, now_ms: int) -> None:
    if isinstance(answer, NoAnswer):
        table.expect_late_take(step.key, now_ms)
        return
    row = answer.row if isinstance(answer, Conflict) else answer
    if row is None:
        table.read_again()
    elif row.version < step.expected_version:
        table.rolled_back = True
    else:
        table.observe_lease(row, now_ms)
        table.changed = True


def apply_write(table: LeaseTable, step: Write, answer: LeaseRow | Conflict | NoAnswer, now_ms: int) -> Written:
    key = step.row.key
    if key not in table.held:
        return "lost"
    if isinstance(answer, NoAnswer):
        return "unknown"
    if not isinstance(answer, Conflict):
        table.acknowledge(answer)
        return "written"
    row = answer.row
    if row is None or row.version < step.expected_version:
        # A held lease cannot go back in version, and its row cannot vanish: the store was rolled back.
        table.rolled_back = True
        table.held[key].pending_transfer = None  # the store refused the gift
        table.drop(key)
        return "lost"
    table.observe_lease(row, now_ms)
    return "again" if key in table.held else "lost"


NOT_WANTED_MS: Final = 300_000
"""How long this member does not request an unreadable shard back. If the shard becomes free, it still takes it."""


def give_unreadable(table: LeaseTable, detector: FailureDetector, key: LeaseKey, now_ms: int) -> HandOffRequest | None:
    """Give a shard that this member cannot read, while it reads others, to a member that may be able to (rule U7).

    Returns the request that the new owner would have made. None if no member has room, or if the lease is about to move
    or was kept after a drain that timed out. A member that can read nothing reports that in its heartbeats instead, and
    the balance leaves it without shards.
    """
    holding = table.held.get(key)
    if holding is None or holding.state != "held" or now_ms < holding.kept_until_ms:
        return None
    able = [
        row
        for row in detector.live()
        if row.member_id != table.member_id and row.reads(key.stream_key) and _has_room(row)
    ]
    if not able:
        return None
    return HandOffRequest(key, min(able, key=lambda row: (row.load, row.member_id)).member_id)


def _has_room(row: MemberRow) -> bool:
    return row.reads_healthy and not row.draining and (row.shards_max is None or row.load < row.shards_max)
