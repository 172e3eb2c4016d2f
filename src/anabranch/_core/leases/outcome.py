"""What comes of a step, applied to the book.

Losing a race is an outcome, not an error: somebody else took the lease first, or the answer of an own earlier write was
lost and shows up now. No answer at all (`None`) is an outcome too: the write may have taken effect, or may yet do so.
"""

from collections.abc import Sequence
from typing import Literal

from anabranch._core.leases.book import Book
from anabranch._core.leases.steps import Take, Write
from anabranch._core.leases.stopwatch import Stopwatches
from anabranch._model.leases import Conflict, LeaseRow, MemberRow

__all__ = ["Written", "apply_leases", "apply_members", "apply_seal", "apply_take", "apply_write"]

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
