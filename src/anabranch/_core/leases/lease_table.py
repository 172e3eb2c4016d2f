"""What one member knows about the leases: the rows it saw, the leases it holds, the writes without an answer.

- The highest version of a lease counts. An older row in a later answer is a late answer, and ignored.
- A row that names this member but is not held is adopted: the answer to a take was lost, or the lease was given to this
  member (rules L7, L12).
- A lease is *transferring* from when its release or gift is sent until the answer is known. A write without an answer
  may still take effect, and then another member may hold the lease at once. So no record of a transferring lease is
  started again, and the same write is repeated until the store answers.
- An answer older than what the store acknowledged before proves that the store was rolled back (rule L13).

It knows nothing of heartbeats: the fence decides whether held leases may be worked on.
"""

from collections.abc import Collection, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from anabranch._model.leases import HandOffRequest, LeaseKey, LeaseRow, Stopped

LEASES_READ_INTERVAL_MS: Final = 60_000
MOVE_COOL_DOWN_MS: Final = 60_000


class Holding(msgspec.Struct):
    """A lease that this member owns, to its knowledge."""

    row: LeaseRow
    state: Literal["held", "draining", "transferring"] = "held"
    request: HandOffRequest | None = None
    """Which member it is drained for; None for a release."""
    pending_transfer: LeaseRow | None = None
    """The row that releases it or gives it away, sent but not answered yet."""
    kept_until_ms: int = 0
    """No hand-off before this time. Set when a drain timed out, because each attempt stalls the shard for that long."""


class LeaseTable:
    def __init__(self, member_id: str, expiry_ms: int) -> None:
        self.member_id = member_id
        self.streams: Collection[str] | None = None
        """Keys of the streams that this member reads; None: all. An application keeps the leases of streams that it no
        longer reads, and of those that were deleted: they are none of its members' business.
        """
        self.leases: dict[LeaseKey, LeaseRow] = {}
        self.held: dict[LeaseKey, Holding] = {}
        """In the order of taking."""
        self.changed = True
        """Whether a new plan could differ from the last one."""
        self.plan_again_ms: int | None = None
        """When to plan again even if nothing changed: cool-downs end, unanswered requests are repeated."""
        self.lease_version = 0
        """Grows when the set of held leases changes; heartbeats publish it."""
        self.rolled_back = False
        """The store lost acknowledged writes (rule L13): drop everything and join as a new member."""
        self.answered: dict[HandOffRequest, None] = {}
        """Answered hand-off requests. Heartbeats report them until the member's row no longer has them."""
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
        self._in_doubt_until_ms: int | None = None

    def become(self, member_id: str) -> None:
        """Continue as a new member after the old one ended. It holds nothing, and its rows may be outdated."""
        self.member_id = member_id
        self.held.clear()
        self.answered.clear()
        self.asked.clear()
        self.lease_version += 1
        self.rolled_back = False
        self.changed = self._read_again = True

    def forget(self) -> None:
        """The storage was replaced: versions seen before mean nothing. Epochs still count, because handlers have seen
        them as fence tokens.
        """
        for key, row in self.leases.items():
            self.epoch_floors[key] = max(row.epoch, self.epoch_floors.get(key, 0))
        self.leases.clear()
        self.moved.clear()

    # reading

    def wants_leases(self, now_ms: int) -> bool:
        """Whether to read the lease rows. The cost grows with the shards, so not in every round."""
        if self._read_again or self.asked or self._read_at_ms is None:
            return True
        if self._in_doubt_until_ms is not None and now_ms < self._in_doubt_until_ms:
            return True
        return now_ms - self._read_at_ms >= LEASES_READ_INTERVAL_MS

    def read_again(self) -> None:
        self._read_again = True

    def doubt(self, now_ms: int) -> None:
        """A take got no answer and may still take effect: keep reading until it cannot any more."""
        self._in_doubt_until_ms = now_ms + 2 * self._expiry_ms
        self._read_again = True

    def observe_leases(self, rows: Sequence[LeaseRow], now_ms: int) -> None:
        """All unfinished leases, received now."""
        if self._read_at_ms is None:
            self._stopped_before = {row.key: row.stopped for row in rows if row.stopped is not None}
        self._read_again = False
        self._read_at_ms = now_ms
        for row in rows:
            self.observe_lease(row, now_ms)
        present = {row.key for row in rows}
        gone = [key for key, row in self.leases.items() if key not in present and not row.is_finished]
        for key in gone:
            # Finished by another member, or deleted. Known finished rows stay: a late answer must not revive them.
            if key not in self.held:
                for known in (self.leases, self.moved, self.asked, self.not_wanted_until):
                    known.pop(key, None)
                self.changed = True

    def observe_lease(self, row: LeaseRow, now_ms: int) -> None:
        if self.streams is not None and row.key.stream_key not in self.streams:
            return
        known = self.leases.get(row.key)
        if known is not None and row.version <= known.version:
            return
        self.leases[row.key] = row
        if known is None or known.owner != row.owner or _plans_differ(known, row):
            self.changed = True
        if known is not None and known.owner != row.owner:
            self.asked.pop(row.key, None)
            if known.owner is not None:
                self.moved[row.key] = (now_ms, known.owner)
        holding = self.held.get(row.key)
        if row.owner != self.member_id or row.is_finished:
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
        self.lease_version += 1
        self.changed = True

    def drop(self, key: LeaseKey) -> None:
        """The lease is no longer this member's: nothing may be started or committed."""
        holding = self.held.pop(key)
        if holding.request is not None:
            self.answered[holding.request] = None
        self.lease_version += 1
        self.changed = True

    def lose_all(self) -> None:
        """This member has ended. An unanswered gift may have come too late, so it does not count."""
        for holding in self.held.values():
            holding.pending_transfer = None
        self.held.clear()

    def acknowledge(self, row: LeaseRow) -> None:
        """The store accepted this member's write of a held lease."""
        self.leases[row.key] = row
        if row.owner == self.member_id and not row.is_finished:
            self.held[row.key].row = row
        else:
            self.drop(row.key)

    # giving

    def drain(self, request: HandOffRequest) -> None:
        holding = self.held[request.key]
        holding.state, holding.request = "draining", request

    def is_unanswered(self, request: HandOffRequest) -> bool:
        holding = self.held.get(request.key)
        return request not in self.answered and (holding is None or holding.request != request)

    def keep(self, key: LeaseKey, now_ms: int) -> None:
        """The drain timed out: the lease stays here for a while, and that answers the request (rule L12)."""
        holding = self.held[key]
        if holding.state != "draining":
            return
        if holding.request is not None:
            self.answered[holding.request] = None
        holding.state, holding.request = "held", None
        holding.kept_until_ms = now_ms + MOVE_COOL_DOWN_MS

    def transfer(self, key: LeaseKey, final: LeaseRow | None = None) -> LeaseRow:
        """Give a drained lease to the member that requested it, or release it. `final` has the last checkpoint. This
        holding starts no record from now on.
        """
        holding = self.held[key]
        owner = None if holding.request is None else holding.request.requester
        row = holding.row if final is None else final
        # A gift replaces a take, so the epoch grows: the new owner needs a higher fence token.
        holding.pending_transfer = replace(row, owner=owner, epoch=row.epoch + (owner is not None))
        holding.state = "transferring"
        return holding.pending_transfer

    def is_startable(self, key: LeaseKey) -> bool:
        """Whether records of this lease may be started, if the fence allows it."""
        holding = self.held.get(key)
        return holding is not None and holding.state == "held"

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


def _plans_differ(known: LeaseRow, row: LeaseRow) -> bool:
    return known.is_finished != row.is_finished or weight(known) != weight(row)
