"""What one member believes about the leases: rows seen, leases held, writes in doubt.

Rules that hold here:
- of each lease the highest version ever seen counts; an older row in a later answer is a late answer and is ignored;
- a row that names this member and is not held is adopted: a take whose answer was lost, or a gift (rules L7, L12);
- a lease is *parting* from the moment its release or gift is sent until its answer is known. A write without an
  answer may still take effect, and then another member may hold the lease at once: so a parting lease is never
  started again, the same write is repeated until the store has told what came of it;
- a write's answer older than what the store acknowledged before proves that the store went back in time (rule L13).

It knows no clock but the times it is told, and nothing of heartbeats: whether held leases may be worked on is the
fence's business.
"""

from collections.abc import Collection, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from anabranch._model.leases import HandOffRequest, LeaseKey, LeaseRow, Stopped

LEASES_READ_INTERVAL_MS: Final = 60_000
MOVE_COOL_DOWN_MS: Final = 60_000


class Holding(msgspec.Struct):
    """A lease that this member owns, as far as it knows."""

    row: LeaseRow
    state: Literal["held", "draining", "parting"] = "held"
    request: HandOffRequest | None = None
    """Whom it is drained for; None for a release."""
    parting_row: LeaseRow | None = None
    """What is being written to give it away."""
    kept_until_ms: int = 0
    """A hand-off that did not drain is not tried again before: each try stands still for as long as its deadline."""


class Book:
    def __init__(self, member_id: str, expiry_ms: int) -> None:
        self.member_id = member_id
        self.streams: Collection[str] | None = None
        """Keys of the streams that this member reads; None: all. An application keeps the leases of streams that it no
        longer reads, and of those that were deleted: they are none of its members' business.
        """
        self.leases: dict[LeaseKey, LeaseRow] = {}
        self.held: dict[LeaseKey, Holding] = {}
        """In the order of taking. What is not in it any more was lost, given or finished."""
        self.changed = True
        """Whether anything was learnt since the last plan that a new one would take into account."""
        self.plan_again_ms: int | None = None
        """When to plan anew even if nothing was learnt: cool-downs end, unanswered requests are repeated."""
        self.lease_version = 0
        """Grows when the set of held leases changes; heartbeats carry it to the others."""
        self.rolled_back = False
        """The store has forgotten what it acknowledged (rule L13): drop everything, become a new member."""
        self.answered: dict[HandOffRequest, None] = {}
        """Requests answered since; heartbeats carry them back until the row is without them."""
        self.asked: dict[LeaseKey, int] = {}
        """Leases asked for, and when."""
        self.shunned: dict[LeaseKey, int] = {}
        """Leases that could not be read here, and until when they are not asked for again."""
        self.moved: dict[LeaseKey, tuple[int, str]] = {}
        """Leases that changed hands, with when and from whom."""
        self.unplaced: dict[LeaseKey, int] = {}
        """Leases that no member has room for, by the last plan, and since when."""
        self.epoch_floors: dict[LeaseKey, int] = {}
        """Epochs that a store has forgotten: takes go above them."""
        self._stopped_before: dict[LeaseKey, Stopped] = {}
        self._expiry_ms = expiry_ms
        self._read_at_ms: int | None = None
        self._read_again = True
        self._in_doubt_until_ms: int | None = None

    def become(self, member_id: str) -> None:
        """A new member in the place of one that ended: it holds nothing, and what it knows may be old."""
        self.member_id = member_id
        self.held.clear()
        self.answered.clear()
        self.asked.clear()
        self.lease_version += 1
        self.rolled_back = False
        self.changed = self._read_again = True

    def read_streams(self, stream_keys: Collection[str]) -> None:
        """From now on these streams are read and no others; what is held of others is still to be released."""
        self.streams = stream_keys
        for key in [key for key in self.leases if key.stream_key not in stream_keys and key not in self.held]:
            self._leave(key)
        self.changed = self._read_again = True

    def _leave(self, key: LeaseKey) -> None:
        for known in (self.leases, self.moved, self.asked, self.shunned):
            known.pop(key, None)

    def forget(self) -> None:
        """The store is not the one it was: versions seen in it mean nothing any more. Epochs do, since fence tokens
        were handed out with them.
        """
        for key, row in self.leases.items():
            self.epoch_floors[key] = max(row.epoch, self.epoch_floors.get(key, 0))
        self.leases.clear()
        self.moved.clear()

    # reading

    def wants_leases(self, now_ms: int) -> bool:
        """Whether the lease rows should be read: reading them costs with shards, so not in every round."""
        if self._read_again or self.asked or self._read_at_ms is None:
            return True
        if self._in_doubt_until_ms is not None and now_ms < self._in_doubt_until_ms:
            return True
        return now_ms - self._read_at_ms >= LEASES_READ_INTERVAL_MS

    def read_again(self) -> None:
        self._read_again = True

    def doubt(self, now_ms: int) -> None:
        """A take got no answer. It may still take effect: look for it until it cannot any more."""
        self._in_doubt_until_ms = now_ms + 2 * self._expiry_ms
        self._read_again = True

    def observe_leases(self, rows: Sequence[LeaseRow], now_ms: int) -> None:
        """All unfinished leases, in an answer received now."""
        if self._read_at_ms is None:
            self._stopped_before = {row.key: row.stopped for row in rows if row.stopped is not None}
        self._read_again = False
        self._read_at_ms = now_ms
        for row in rows:
            self.observe_lease(row, now_ms)
        present = {row.key for row in rows}
        gone = [key for key, row in self.leases.items() if key not in present and not row.is_finished]
        for key in gone:
            # Finished by somebody, or deleted. Rows known to be finished stay: an old answer must not revive them.
            if key not in self.held:
                self._leave(key)
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
            # Also where it went away and came back while the answer of an own write was missing: another holding.
            if holding is not None:
                self.drop(row.key)
            self.hold(row)
        else:
            # Only this member writes rows that name it: one of its own writes took effect, and its answer was lost.
            holding.row = row

    # holding

    def hold(self, row: LeaseRow) -> None:
        self.leases[row.key] = row
        self.held[row.key] = Holding(row)
        self.asked.pop(row.key, None)
        self.lease_version += 1
        self.changed = True

    def drop(self, key: LeaseKey) -> None:
        """It is this member's no more: nothing of it may be started, and nothing committed."""
        holding = self.held.pop(key)
        if holding.request is not None:
            self.answered[holding.request] = None
        if self.streams is not None and key.stream_key not in self.streams:
            self._leave(key)
        self.lease_version += 1
        self.changed = True

    def lose_all(self) -> None:
        """This member has ended. A gift without an answer may have come too late, so it is none."""
        for holding in self.held.values():
            holding.parting_row = None
        self.held.clear()

    def acknowledge(self, row: LeaseRow) -> None:
        """The store took this member's write of a held lease."""
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
        """The drain did not end in time: the lease stays here for a while, and the request is answered with that (rule
        L12).
        """
        holding = self.held[key]
        if holding.state != "draining":
            return
        if holding.request is not None:
            self.answered[holding.request] = None
        holding.state, holding.request = "held", None
        holding.kept_until_ms = now_ms + MOVE_COOL_DOWN_MS

    def part(self, key: LeaseKey, final: LeaseRow | None = None) -> LeaseRow:
        """Give a drained lease to whoever asked for it, or release it; `final` carries the last checkpoint. From here
        on it is never started again by this holding.
        """
        holding = self.held[key]
        owner = None if holding.request is None else holding.request.requester
        row = holding.row if final is None else final
        # A gift is a take without a taker's write: the epoch grows, so that the new holder's fence token is higher.
        holding.parting_row = replace(row, owner=owner, epoch=row.epoch + (owner is not None))
        holding.state = "parting"
        return holding.parting_row

    def is_startable(self, key: LeaseKey) -> bool:
        """Whether records of this lease may be started, if the fence allows any."""
        holding = self.held.get(key)
        return holding is not None and holding.state == "held"

    def tries_again(self, row: LeaseRow) -> bool:
        """Whether a shard that was stopped at a record is tried once more: by who found it so when it came (rule D4).
        No clock is compared: that of the host that stopped it may differ.
        """
        return row.stopped is None or self._stopped_before.get(row.key) == row.stopped

    def waits(self, row: LeaseRow) -> bool:
        """Whether one of the parents that this shard waits for is unfinished. A parent without a row is done (rule
        S1).
        """
        for parent in row.waits_for:
            known = self.leases.get(LeaseKey(row.key.stream_key, row.key.generation, parent))
            if known is not None and not known.is_finished:
                return True
        return False

    @property
    def load(self) -> int:
        return sum(weight(holding.row) for holding in self.held.values())


def weight(row: LeaseRow) -> int:
    """What a lease counts for in the balance: nothing while its shard stands still on purpose."""
    return 0 if row.paused or row.stopped is not None else 1


def _plans_differ(known: LeaseRow, row: LeaseRow) -> bool:
    return known.is_finished != row.is_finished or weight(known) != weight(row)
