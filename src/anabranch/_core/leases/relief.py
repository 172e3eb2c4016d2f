"""One shard that this member cannot read, while it reads others: given to a member that may be able to (rule U7).

It is a gift like any other, but nobody has asked for it. For a while this member does not ask to have it back; if it
becomes free meanwhile, it takes it all the same where that is its share, for nobody else may be there to. A member that
can read nothing at all says so in its heartbeats instead, and the balance leaves it without shards (`plan`).
"""

from typing import Final

from anabranch._core.leases.book import Book
from anabranch._core.leases.stopwatch import Stopwatches
from anabranch._model.leases import HandOffRequest, LeaseKey, MemberRow

__all__ = ["SHUNNED_MS", "plan_relief"]

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
