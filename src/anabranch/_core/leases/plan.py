"""One round of the lease protocol: from what is believed to what should be done.

Every member plans for itself: it seals who has shown no life, takes what is free and should be its own, asks live
members for what should be its own, and answers what it was asked. Nothing here writes; the steps are performed by the
shell, and `outcome` applies what came of them.

A hand-off needs both sides: the requester's plan and the donor's plan must give the lease to the requester. So a
request that was made from an old view is void, and a donor is never stripped below its share.
"""

from collections.abc import Collection
from typing import Final

from anabranch._core.leases.balance import Claim, Seat, balance
from anabranch._core.leases.book import MOVE_COOL_DOWN_MS, Book, weight
from anabranch._core.leases.steps import DeleteMember, Drain, RequestHandOff, Seal, Step, Take, Write
from anabranch._core.leases.stopwatch import Stopwatches
from anabranch._model.leases import HandOffRequest, LeaseKey, LeaseRow, MemberRow

__all__ = ["ASK_AGAIN_MS", "MEMBER_KEPT_MS", "SETTLING_MS", "plan_round"]

ASK_AGAIN_MS: Final = 10_000
SETTLING_MS: Final = 10_000
"""How long a fleet takes to share anew after a change of its membership."""
MEMBER_KEPT_MS: Final = 3_600_000
"""How long the row of a sealed or left member stays, for people to look at."""


def plan_round(
    book: Book, stopwatches: Stopwatches, now_ms: int, *, may_take: bool, known_dead: Collection[str] = ()
) -> list[Step]:
    """The steps of one round. `may_take` is False while the member is fenced or drains, and while a store that went
    back in time is waited out (rule L13): then it takes nothing and asks for nothing. `known_dead` are members whose
    process is dead for certain, by the kernel's word (rule L17).
    """
    steps: list[Step] = [
        Seal(row.member_id, row.counter)
        for row in stopwatches.sealable(now_ms, known_dead)
        if row.member_id != book.member_id
    ]
    steps.extend(_repeat_parting(book))
    mine = stopwatches.row(book.member_id)
    wanted = () if mine is None else mine.wanted
    _forget_answers(book, wanted)
    is_due = book.plan_again_ms is None or now_ms >= book.plan_again_ms
    if not (book.changed or is_due or any(book.is_unanswered(request) for request in wanted)):
        return steps
    book.changed = False
    book.plan_again_ms = now_ms + ASK_AGAIN_MS
    desired = _desired(book, stopwatches, now_ms)
    book.unplaced = {key: book.unplaced.get(key, now_ms) for key in _unplaced(book, stopwatches, desired)}
    steps.extend(_answer_requests(book, stopwatches, wanted, desired))
    if may_take:
        steps.extend(_take_and_ask(book, stopwatches, desired, now_ms))
    steps.extend(_clean_up(book, stopwatches, now_ms))
    return steps


def _repeat_parting(book: Book) -> list[Step]:
    """A gift or release without an answer is written again, until the store has told what came of it."""
    return [
        Write(holding.parting_row, holding.row.version)
        for holding in book.held.values()
        if holding.parting_row is not None
    ]


def _desired(book: Book, stopwatches: Stopwatches, now_ms: int) -> dict[LeaseKey, str]:
    live = stopwatches.live()
    alive = {row.member_id: row for row in live}
    claims = [
        _claim(book, row, alive, stopwatches.membership_changed_ms, now_ms)
        for row in book.leases.values()
        if not row.is_finished and (row.owner in alive or not book.waits(row))
    ]
    return balance(_seats(live), claims)


def _unplaced(book: Book, stopwatches: Stopwatches, desired: dict[LeaseKey, str]) -> list[LeaseKey]:
    """What could run and nobody may own: limits decide who takes a shard, and never that it need not run (rule S7)."""
    alive = {row.member_id: None for row in stopwatches.live()}
    return [
        key
        for key, row in book.leases.items()
        if not row.is_finished and row.owner not in alive and key not in desired and not book.waits(row)
    ]


def _seats(live: list[MemberRow]) -> list[Seat]:
    """Members that drain get nothing; nor do those that cannot read, while others can."""
    staying = [row for row in live if not row.draining]
    healthy = [row for row in staying if row.reads_healthy]
    return [Seat(row.member_id, row.shards_max) for row in (healthy or staying)]


def _claim(book: Book, row: LeaseRow, alive: dict[str, MemberRow], changed_ms: int, now_ms: int) -> Claim:
    owner = row.owner if row.owner in alive else None
    moved_ms, previous = book.moved.get(row.key, (None, None))
    # A lease that was taken over from a dead member has not been moved: fairness after a crash need not wait. Nor need
    # members that come and go: what moves because of them, for a while after each, does not cool down.
    cooling = (
        moved_ms is not None
        and previous in alive
        and moved_ms - changed_ms > SETTLING_MS
        and now_ms - moved_ms < MOVE_COOL_DOWN_MS
    )
    holding = book.held.get(row.key)
    kept = holding is not None and now_ms < holding.kept_until_ms
    return Claim(row.key, owner, 0 if book.waits(row) else weight(row), not (cooling or kept))


def _forget_answers(book: Book, wanted: tuple[HandOffRequest, ...]) -> None:
    """An answer has arrived when its request is gone from the row; the same request after that is a new one."""
    for request in [request for request in book.answered if request not in wanted]:
        del book.answered[request]


def _answer_requests(
    book: Book, stopwatches: Stopwatches, wanted: tuple[HandOffRequest, ...], desired: dict[LeaseKey, str]
) -> list[Step]:
    steps: list[Step] = []
    for request in wanted:
        if not book.is_unanswered(request):
            continue
        holding = book.held.get(request.key)
        requester = stopwatches.row(request.requester)
        is_void = (
            holding is None
            or holding.state != "held"
            or weight(holding.row) == 0
            or requester is None
            or requester.state != "live"
            or desired.get(request.key) != request.requester
        )
        if is_void:
            book.answered[request] = None
        else:
            book.drain(request)
            steps.append(Drain(request))
    return steps


def _take_and_ask(book: Book, stopwatches: Stopwatches, desired: dict[LeaseKey, str], now_ms: int) -> list[Step]:
    steps: list[Step] = []
    mine = [book.leases[key] for key, member_id in desired.items() if member_id == book.member_id]
    # Those on which owners died come first: nothing of the others is started before their rows say that it is not they
    # who end this one, should one of the others do that (rule D5).
    for row in sorted(mine, key=lambda row: -row.takes_without_progress):
        key = row.key
        if key in book.held:
            continue
        if row.owner is None or stopwatches.is_over(row.owner, now_ms):
            steps.append(Take(key, row.owner, row.version, book.epoch_floors.get(key, 0), _unread_parents(row)))
        elif (donor := stopwatches.row(row.owner)) is not None and _may_ask(book, key, donor, now_ms):
            book.asked[key] = now_ms
            steps.append(RequestHandOff(donor.member_id, HandOffRequest(key, book.member_id)))
    for key in [key for key, asked_ms in book.asked.items() if now_ms - asked_ms > 3 * ASK_AGAIN_MS]:
        del book.asked[key]
    return steps


def _unread_parents(row: LeaseRow) -> tuple[LeaseKey, ...]:
    if row.checkpoint.watermark is not None:
        return ()
    return tuple(LeaseKey(row.key.stream_key, row.key.generation, shard_id) for shard_id in row.waits_for)


def _may_ask(book: Book, key: LeaseKey, donor: MemberRow, now_ms: int) -> bool:
    """Once in a while, and not while the donor still has the request before it, nor for what could not be read here."""
    if now_ms < book.shunned.get(key, 0):
        return False
    asked_ms = book.asked.get(key)
    if asked_ms is None:
        return True
    return now_ms - asked_ms >= ASK_AGAIN_MS and HandOffRequest(key, book.member_id) not in donor.wanted


def _clean_up(book: Book, stopwatches: Stopwatches, now_ms: int) -> list[Step]:
    long_over = stopwatches.over_since(now_ms - MEMBER_KEPT_MS)
    if not long_over:
        return []
    named = {row.owner for row in book.leases.values()}
    return [DeleteMember(member_id) for member_id in long_over if member_id not in named]
