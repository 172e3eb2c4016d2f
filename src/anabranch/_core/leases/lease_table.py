"""What one member knows about the leases: the rows it saw, the leases it holds, the writes without an answer.

- The highest version of a lease counts. An older row in a later answer is a late answer, and ignored.
- A row that names this member but is not held is adopted: the answer to a take was lost, or the lease was given to this
  member (rules L7, L12).
- A lease is *transferring* from when its release or gift is sent until the answer is known. A write without an answer
  may still take effect, and then another member may hold the lease at once. So no record of a transferring lease is
  started again, and the same write is repeated until the store answers.
- An answer older than what the store acknowledged before proves that the store was rolled back (rule L13).
- Members name the leases that they change, and number these changes. Each member reads the named ones. It reads all if
  it missed a number, if a member ended, which may not have named its last changes, and once a minute (rule R0). In a
  large fleet such a read waits for its turn. Until then the member plans with what it knows: a take whose row is
  outdated fails and returns the present one.

It knows nothing of heartbeats: the fence decides whether held leases may be worked on.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from anabranch._model.leases import (
    CHANGED_MAX,
    LOOK_PREFIX,
    HandOffRequest,
    LeaseKey,
    LeaseRow,
    LookRequest,
    MemberRow,
    Stopped,
    parse_short_name,
)

LEASES_READ_INTERVAL_MS: Final = 60_000
MOVE_COOL_DOWN_MS: Final = 60_000
FINISHED_KEPT_MS: Final = 600_000
"""How long a finished lease is remembered: a late answer from before its end must not revive it."""


class Holding(msgspec.Struct):
    """A lease that this member owns, as far as it knows."""

    row: LeaseRow
    state: Literal["held", "draining", "transferring"] = "held"
    request: HandOffRequest | None = None
    """Which member it is drained for; None for a release."""
    pending_transfer: LeaseRow | None = None
    """The row that releases it or gives it away, sent but not answered yet."""
    is_transfer_unknown: bool = False
    """That write was sent and got no answer: it may have taken effect."""
    kept_until_ms: int = 0
    """No hand-off before this time. Set when a drain timed out, because each attempt stalls the shard for that long."""


class Inquiry(msgspec.Struct):
    """Asks all live members to look at their own leases, because some leases have no row (rule L18)."""

    request: LookRequest
    keys: dict[LeaseKey, None]
    """The leases that had no row when it began, without those that a member has seen or named since then."""
    members: frozenset[str]
    """The members that were live when it began. One that joins later finds no row, so it cannot hold such a lease
    unless the row is created again; then it names the lease.
    """
    asked: dict[str, None] = {}
    """The members whose rows have contained the request."""
    answered_ms: int | None = None
    """Since when all of them that are still live have answered."""


class LeaseTable:
    def __init__(self, member_id: str, expiry_ms: int) -> None:
        self.member_id = member_id
        self.streams: Collection[str] | None = None
        """Keys of the streams that this member reads; None: all. Every member plans the leases of all streams."""
        self.leases: dict[LeaseKey, LeaseRow] = {}
        self.held: dict[LeaseKey, Holding] = {}
        """In the order of taking."""
        self.changed = True
        """Whether a new plan could differ from the last one."""
        self.plan_again_ms: int | None = None
        """When to plan again even if nothing changed: cool-downs end, unanswered requests are repeated."""
        self.change_count = 0
        """How many leases this member has created or changed; heartbeats report it."""
        self.changed_last: deque[str] = deque(maxlen=CHANGED_MAX)
        """The short names of the last ones. Others read those, instead of all leases."""
        self.rolled_back = False
        """The store lost acknowledged writes (rule L13): drop everything and join as a new member."""
        self.answered: dict[str, None] = {}
        """Short names of the requests that heartbeats report as answered, until the member's row has them no more."""
        self.asked: dict[LeaseKey, int] = {}
        """Leases that this member requested, and when."""
        self.not_wanted_until: dict[LeaseKey, int] = {}
        """Leases that could not be read here, and until when this member does not request them."""
        self.moved: dict[LeaseKey, tuple[int, str]] = {}
        """Leases that changed owners: when, and the previous owner."""
        self.unplaced: dict[LeaseKey, int] = {}
        """Leases for which no member had room in the last plan, and since when."""
        self.epoch_floors: dict[LeaseKey, int] = {}
        """Epochs that a rolled-back store lost: takes go above them."""
        self._stopped_before: dict[LeaseKey, Stopped] = {}
        self._expiry_ms = expiry_ms
        self._read_at_ms: int | None = None
        self._read_again = True
        self._no_read_before_ms = 0
        self.vanished: dict[LeaseKey, LeaseRow | None] = {}
        """Unfinished leases that were missing when all leases were read: finished meanwhile, or deleted. Listing the
        shards and reading all rows tells which. None: never seen, but a child that has not started waits for it.
        """
        self.inquiry: Inquiry | None = None
        self._finished_ms: dict[LeaseKey, int] = {}
        """Finished leases, and when a read of all leases first showed that they are."""
        self._change_counts: dict[str, int] = {}
        """How many changes of each other member are known."""
        self._changed_by_others: dict[LeaseKey, None] = {}
        """Leases that others have changed and that were not read since."""
        self._possibly_taken: dict[LeaseKey, int] = {}
        """Leases that may be this member's although the answer to its take is missing, and until when."""

    def become(self, member_id: str) -> None:
        """Continue as a new member after the old one ended. It holds nothing, and its rows may be outdated."""
        self.member_id = member_id
        self.held.clear()
        self.answered.clear()
        self.asked.clear()
        self.inquiry = None
        self.change_count = 0
        self.changed_last.clear()
        self.rolled_back = False
        self.changed = self._read_again = True
        self._no_read_before_ms = 0

    def forget(self) -> None:
        """The storage was replaced: versions mean nothing now. Epochs stay, because handlers have seen them."""
        for key, row in self.leases.items():
            self.epoch_floors[key] = max(row.epoch, self.epoch_floors.get(key, 0))
        self.leases.clear()
        self.vanished.clear()
        self.moved.clear()
        self._change_counts.clear()
        self._changed_by_others.clear()
        self._possibly_taken.clear()

    def reads(self, key: LeaseKey) -> bool:
        """Whether this member reads the lease's stream."""
        return self.streams is None or key.stream_key in self.streams

    # reading

    def observe_changes(self, row: MemberRow) -> None:
        """Takes a member's row. The leases that it has changed since its last row are read next."""
        missed_count = row.change_count - self._change_counts.get(row.member_id, 0)
        if missed_count <= 0 or row.member_id == self.member_id:
            return
        self._change_counts[row.member_id] = row.change_count
        known = dict.fromkeys([*(self.streams or ()), *(key.stream_key for key in self.leases)])
        keys = [parse_short_name(name, known) for name in row.changed[-missed_count:]]
        if self._is_gap(missed_count, row) or None in keys:
            self.read_again()
            self.inquiry = None
        else:
            self._changed_by_others.update(dict.fromkeys(key for key in keys if key is not None))
            self._void_inquiry(self._changed_by_others)

    def _void_inquiry(self, keys: Iterable[LeaseKey]) -> None:
        """These leases have, or had, a row again: a member may have taken them, even if it is missing once more."""
        if self.inquiry is not None:
            for key in keys:
                self.inquiry.keys.pop(key, None)

    def _is_gap(self, missed_count: int, row: MemberRow) -> bool:
        """Whether the member has changed more than it names."""
        return missed_count > len(row.changed)

    def wants_all_leases(self, now_ms: int) -> bool:
        """Whether to read all leases. The cost grows with the shards, so not in every round."""
        if now_ms < self._no_read_before_ms:
            return False
        if self._read_again or self._read_at_ms is None or len(self.leases_to_read(now_ms)) > CHANGED_MAX:
            return True
        return now_ms - self._read_at_ms >= LEASES_READ_INTERVAL_MS

    def delay_read(self, until_ms: int) -> None:
        """Other members read all leases first."""
        self._no_read_before_ms = until_ms

    @property
    def has_read_all(self) -> bool:
        """Whether this member has ever read all leases. It plans nothing before."""
        return self._read_at_ms is not None

    def leases_to_read(self, now_ms: int) -> list[LeaseKey]:
        """The leases to read by key, if not all are read."""
        self._possibly_taken = {key: until_ms for key, until_ms in self._possibly_taken.items() if now_ms < until_ms}
        return [*self._changed_by_others, *(key for key in self._possibly_taken if key not in self._changed_by_others)]

    def read_again(self) -> None:
        self._read_again = True

    def expect_late_take(self, key: LeaseKey, now_ms: int) -> None:
        """A take got no answer. Reads the lease by key for as long as the take may still take effect."""
        self._possibly_taken[key] = now_ms + 2 * self._expiry_ms

    def observe_read(self, key: LeaseKey, row: LeaseRow | None, now_ms: int) -> None:
        """A lease that was read by its key."""
        self._changed_by_others.pop(key, None)
        if row is not None:
            self.observe_lease(row, now_ms)
        elif key in self.leases and not self.leases[key].is_finished:
            self.read_again()

    def observe_leases(self, rows: Sequence[LeaseRow], now_ms: int) -> None:
        """All unfinished leases, received now."""
        if self._read_at_ms is None:
            self._stopped_before = {row.key: row.stopped for row in rows if row.stopped is not None}
        self._read_again = False
        self._read_at_ms = now_ms
        self._changed_by_others.clear()
        for row in rows:
            self.observe_lease(row, now_ms)
        present = {row.key for row in rows}
        gone = [key for key, row in self.leases.items() if key not in present and not row.is_finished]
        for key in gone:
            if key not in self.held:  # finished by another member, or deleted
                self.vanished[key] = self.leases[key]
                self._forget_lease(key)
        self._finished_ms = {
            key: self._finished_ms.get(key, now_ms) for key, row in self.leases.items() if row.is_finished
        }
        for key, since_ms in self._finished_ms.items():
            if now_ms - since_ms > FINISHED_KEPT_MS:
                self._forget_lease(key)

    def _forget_lease(self, key: LeaseKey) -> None:
        for known in (self.leases, self.moved, self.asked, self.not_wanted_until):
            known.pop(key, None)
        self.changed = True

    def observe_lease(self, row: LeaseRow, now_ms: int) -> None:
        known = self.leases.get(row.key)
        if known is not None and row.version <= known.version:
            return
        self.leases[row.key] = row
        self.vanished.pop(row.key, None)
        self._void_inquiry([row.key])
        if (
            known is None
            or known.owner != row.owner
            or known.is_finished != row.is_finished
            or weight(known) != weight(row)
        ):
            self.changed = True
        if known is not None and known.owner != row.owner:
            self.asked.pop(row.key, None)
            if known.owner is not None:
                self.moved[row.key] = (now_ms, known.owner)
        holding = self.held.get(row.key)
        if row.owner != self.member_id or row.is_finished or not self.reads(row.key):
            if holding is not None:
                self.drop(row.key)
        elif holding is None or holding.row.epoch != row.epoch:
            # A different epoch is a new holding: the lease left and came back while an answer was missing.
            if holding is not None:
                self.drop(row.key)
            self.hold(row)
        else:
            # Only this member writes rows that name it: its own write took effect, and the answer was lost.
            holding.row = row

    # holding

    def hold(self, row: LeaseRow) -> None:
        self.leases[row.key] = row
        self.held[row.key] = Holding(row)
        self.asked.pop(row.key, None)
        self.report_change(row.key)

    def drop(self, key: LeaseKey) -> None:
        """This member no longer owns the lease: nothing may be started or committed."""
        holding = self.held.pop(key)
        if holding.request is not None:
            self.answered[holding.request.short_name] = None
        self.report_change(key)

    def drop_transferred(self, key: LeaseKey) -> None:
        """The transfer got no answer, and the row is gone: another member may hold the lease, and restore the row."""
        holding = self.held[key]
        if holding.pending_transfer is not None:
            self.leases[key] = holding.pending_transfer
        self.drop(key)
        self.read_again()

    def report_change(self, key: LeaseKey) -> None:
        """This member has created a lease, or changed one in a way that concerns the plans of others."""
        self.change_count += 1
        self.changed_last.append(key.short_name)
        self.changed = True

    def lose_all(self) -> None:
        """This member has ended. An unanswered gift may have come too late, so it does not count."""
        for holding in self.held.values():
            holding.pending_transfer = None
        self.held.clear()

    def acknowledge(self, row: LeaseRow) -> None:
        """The store accepted this member's write of a held lease."""
        known = self.leases[row.key]
        self.leases[row.key] = row
        if row.owner == self.member_id and not row.is_finished:
            self.held[row.key].row = row
            if weight(known) != weight(row):
                self.report_change(row.key)
        else:
            self.drop(row.key)

    # giving

    def drain(self, request: HandOffRequest) -> None:
        holding = self.held[request.key]
        holding.state, holding.request = "draining", request

    def unanswered(self, wanted: Collection[str]) -> list[str]:
        """Those hand-off requests that are neither answered nor being drained for."""
        if not wanted:
            return []
        draining = [holding.request.short_name for holding in self.held.values() if holding.request is not None]
        return [
            name
            for name in wanted
            if name not in self.answered and name not in draining and not name.startswith(LOOK_PREFIX)
        ]

    def keep(self, key: LeaseKey, now_ms: int) -> None:
        """The drain timed out: the lease stays here for a while, and that answers the request (rule L12)."""
        holding = self.held[key]
        if holding.state != "draining":
            return
        if holding.request is not None:
            self.answered[holding.request.short_name] = None
        holding.state, holding.request = "held", None
        holding.kept_until_ms = now_ms + MOVE_COOL_DOWN_MS

    def transfer(self, key: LeaseKey, final: LeaseRow) -> LeaseRow:
        """Gives a drained lease to its requester, or releases it, with the checkpoint of `final`. From now on, none of
        its records is started.
        """
        holding = self.held[key]
        owner = None if holding.request is None else holding.request.requester
        # A gift replaces a take, so the epoch grows: the new owner needs a higher fence token.
        holding.pending_transfer = replace(final, owner=owner, epoch=final.epoch + (owner is not None))
        holding.state = "transferring"
        return holding.pending_transfer

    def tries_again(self, row: LeaseRow) -> bool:
        """Whether to retry a shard that stopped at a record: yes if it had stopped before this worker started (rule
        D4). No clocks are compared, because the clock of the other host may differ.
        """
        return row.stopped is None or self._stopped_before.get(row.key) == row.stopped

    @property
    def load(self) -> int:
        return sum(weight(holding.row) for holding in self.held.values())


def weight(row: LeaseRow) -> int:
    """How much a lease counts in the balance: 0 while its shard is paused or stopped."""
    return 0 if row.paused or row.stopped is not None else 1
