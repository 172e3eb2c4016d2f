"""What a round of the lease protocol asks to be done, as values.

The plan makes them, the shell performs them (each is one store call, but `Drain`), and `outcome` applies what came of
it.
"""

from collections.abc import Collection, Sequence
from typing import Final, Literal

import msgspec

from anabranch._core.leases.balance import Claim, Seat, balance
from anabranch._core.leases.failure_detector import Stopwatches
from anabranch._core.leases.lease_table import MOVE_COOL_DOWN_MS, Book, weight
from anabranch._model.leases import Conflict, HandOffRequest, LeaseKey, LeaseRow, MemberRow


class Seal(msgspec.Struct, frozen=True):
    """End a member that has shown no life for its own expiry (rule L3)."""

    member_id: str
    observed_counter: int


class Take(msgspec.Struct, frozen=True):
    """Take a lease that is free, or whose owner is over (rule L7)."""

    key: LeaseKey
    expected_owner: str | None
    expected_version: int
    epoch_floor: int = 0
    parents: tuple[LeaseKey, ...] = ()
    """For a shard's first start: read these first. All must be finished or gone, and the floor is raised to their
    highest epoch, so that the fence token only grows along a line of descent (rules S1, U3).
    """


class RequestHandOff(msgspec.Struct, frozen=True):
    """Ask a live member for a lease (rule L12)."""

    donor: str
    request: HandOffRequest


class Drain(msgspec.Struct, frozen=True):
    """Stop starting records of a held lease and finish what runs: it was asked for, and will be given away."""

    request: HandOffRequest


class Write(msgspec.Struct, frozen=True):
    """Write a held lease: a commit, a finish, a release or a give."""

    row: LeaseRow
    expected_version: int


class DeleteMember(msgspec.Struct, frozen=True):
    """Remove the row of a member that has long been over."""

    member_id: str


Step = Seal | Take | RequestHandOff | Drain | Write | DeleteMember


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


Written = Literal["written", "again", "lost", "unknown"]
"""`again`: the lease is still this member's, at another version than it thought; the write may be repeated now."""


def apply_members(book: Book, stopwatches: Stopwatches, rows: Sequence[MemberRow], now_ms: int) -> None:
    """All member rows were received now."""
    if stopwatches.observe(rows, now_ms):
        book.changed = True
        book.read_again()


def apply_leases(book: Book, stopwatches: Stopwatches, rows: Sequence[LeaseRow], now_ms: int) -> None:
    """All unfinished leases were received now."""
    book.observe_leases(rows, now_ms)
    stopwatches.observe_owners(dict.fromkeys(row.owner for row in rows if row.owner is not None), now_ms)


def apply_seal(book: Book, stopwatches: Stopwatches, row: MemberRow | None, now_ms: int) -> None:
    """The member's row as it stands after the attempt to seal it. None: no answer, or no such row."""
    if row is not None and stopwatches.observe_row(row, now_ms, is_answer=True):
        book.changed = True
        book.read_again()


def apply_take(book: Book, step: Take, answer: LeaseRow | Conflict | None, now_ms: int) -> None:
    if answer is None:
        book.doubt(now_ms)
        return
    row = answer.row if isinstance(answer, Conflict) else answer
    if row is None:
        book.read_again()
    elif row.version < step.expected_version:
        book.rolled_back = True
    else:
        book.observe_lease(row, now_ms)
        book.changed = True


def apply_write(book: Book, step: Write, answer: LeaseRow | Conflict | None, now_ms: int) -> Written:
    key = step.row.key
    if key not in book.held:
        return "lost"
    if answer is None:
        return "unknown"
    if not isinstance(answer, Conflict):
        book.acknowledge(answer)
        return "written"
    row = answer.row
    if row is None or row.version < step.expected_version:
        # A lease that this member holds cannot vanish or grow younger: the store forgot what it had acknowledged.
        book.rolled_back = True
        book.held[key].parting_row = None  # a gift that the store refused was not given
        book.drop(key)
        return "lost"
    book.observe_lease(row, now_ms)
    return "again" if key in book.held else "lost"


SHUNNED_MS: Final = 300_000


def plan_relief(book: Book, stopwatches: Stopwatches, key: LeaseKey, now_ms: int) -> HandOffRequest | None:
    """What the member that gets it would have asked. None: there is nobody, or the lease is about to move, or was kept
    for calls that do not end.
    """
    holding = book.held.get(key)
    if holding is None or holding.state != "held" or now_ms < holding.kept_until_ms:
        return None
    able = [row for row in stopwatches.live() if row.member_id != book.member_id and _has_room(row)]
    if not able:
        return None
    return HandOffRequest(key, min(able, key=lambda row: (row.load, row.member_id)).member_id)


def _has_room(row: MemberRow) -> bool:
    return row.reads_healthy and not row.draining and (row.shards_max is None or row.load < row.shards_max)
