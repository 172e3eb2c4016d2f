"""From records in flight to a position that is safe to commit.

Every record that leaves the window is entered here in stream order, and finished here in any order. The rules:

- the watermark passes a record only when it and everything before it is finished (P2);
- per key, the finished records above the watermark are a prefix of that key's records, because a key's next record
  starts only after the one before it finished. So one entry a key describes what is open (rule M1), however many
  records lie between watermark and frontier;
- what the owner before had finished above its watermark is entered as finished and not handled again; until this
  owner has come as far as that frontier, its own commits carry on what they inherited;
- a record that has failed is named with its number of attempts, wherever it lies: a fail-over does not begin to count
  anew (rule M5);
- only unfinished records are kept: a finished one is no longer counted in the byte budget, so nothing here may hold
  it, however long an earlier one keeps the watermark below it (P5).

The tracker knows nothing of handlers, stores or time, and never looks into a record's payload.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec

from anabranch._core.reading.pages import Page
from anabranch._model.leases import Checkpoint, OpenKey, OrderMode
from anabranch._model.sequence_numbers import BEFORE_FIRST_SUB, Position
from anabranch.records import Record

__all__ = ["Entry", "Tracker", "adopt", "discards", "key_digest"]

DIGEST_BYTES = 8
OPEN_KEYS_MAX = 1_000
"""What a lease row holds at most: lanes stay far below, records that are acknowledged by hand may not."""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A record's place, without the record. Its number stays text until a commit needs it."""

    ordinal: int
    """Place in the order of this shard's records since it was taken."""
    read_bytes: int
    """All bytes entered up to and with this record: what a fail-over would read again (rule M3)."""
    sequence_number: str
    sub_sequence_number: int

    @property
    def position(self) -> Position:
        return Position(int(self.sequence_number), self.sub_sequence_number)


class Entry(msgspec.Struct, gc=False, eq=False):
    """One record on its way through a handler."""

    record: Record[bytes]
    page: Page
    """Where its end is reported, so that its bytes are free again."""
    ordinal: int
    mark: Mark
    before: Mark | None
    """The record entered before this one: the watermark, while this one is the first unfinished."""
    attempts: int = 0
    """That have failed, those of earlier owners included."""
    finished: bool = False


class Tracker:
    def __init__(self, checkpoint: Checkpoint, order: OrderMode) -> None:
        self._base = adopt(checkpoint, order)
        self._order: OrderMode = order
        self._inherited_frontier = self._base.frontier
        """None once this owner has come past it: from then on its commits speak for themselves."""
        self._inherited_keys = {entry.digest: entry for entry in self._base.open_keys}
        failed = [entry for entry in self._base.open_keys if entry.attempts]
        self._failed = deque(sorted(failed, key=lambda entry: entry.first_open))
        """Records that earlier owners have failed at and that have not come yet, in stream order."""
        self._failed_stretch: OpenKey | None = None
        # Not a dict: finding the first key of one whose first keys were deleted takes ever longer.
        self._unfinished: OrderedDict[int, Entry] = OrderedDict()
        self._entered: Mark | None = None
        self._frontier: Mark | None = None
        self.finished_count = 0
        """Records finished since this holding of the lease began, those finished by the owner before not counted."""

    def enter(self, record: Record[bytes], page: Page) -> Entry:
        """The next record of the stream. The entry comes back finished if the owner before had finished it."""
        before = self._entered
        ordinal, read_bytes = (1, 0) if before is None else (before.ordinal + 1, before.read_bytes)
        read_bytes += len(record.data) + len(record.partition_key)
        mark = self._entered = Mark(ordinal, read_bytes, record.sequence_number, record.sub_sequence_number)
        entry = Entry(record, page, ordinal, mark, before)
        if self._failed:
            entry.attempts = self.attempts_before(record)
        if self._inherited_frontier is not None:
            self._recognise(entry, self._inherited_frontier)
        if entry.finished:
            self._frontier = mark
        else:
            self._unfinished[ordinal] = entry
        return entry

    def _recognise(self, entry: Entry, inherited_frontier: Position) -> None:
        position = entry.record.position
        if position >= inherited_frontier:
            self._inherited_frontier = None
        if position > inherited_frontier:
            return
        opened = self._inherited_keys.get(key_digest(entry.record, self._base.order))
        if opened is None or position < opened.first_open:
            entry.finished = True

    def attempts_before(self, record: Record[bytes]) -> int:
        """How often earlier owners have failed at this record. To be asked in stream order: what lies before it is
        not asked for any more.
        """
        failed, attempts = self._failed, 0
        while failed and failed[0].first_open <= record.position:
            entry = failed.popleft()
            attempts = entry.attempts if entry.first_open == record.position else 0
        return attempts

    def finish(self, entry: Entry) -> None:
        assert not entry.finished, f"finished twice: {entry.record.position}"
        entry.finished = True
        del self._unfinished[entry.ordinal]
        if self._frontier is None or entry.ordinal > self._frontier.ordinal:
            self._frontier = entry.mark
        self.finished_count += 1

    def pass_over(self, record: Record[bytes], count: int, read_bytes: int) -> None:
        """The next `count` records of the stream, up to and with this one, were handled before anything else came."""
        assert not self.recalls, "what was inherited is looked at record by record"
        before = self._entered
        if before is not None:
            count_before, bytes_before = before.ordinal, before.read_bytes
        else:
            count_before = bytes_before = 0
        self._entered = self._frontier = Mark(
            count_before + count, bytes_before + read_bytes, record.sequence_number, record.sub_sequence_number
        )
        self.finished_count += count

    @property
    def recalls(self) -> bool:
        """Whether the owners before have left word about records that come next."""
        return self._inherited_frontier is not None or bool(self._failed)

    @property
    def inherits(self) -> bool:
        """Whether the owner before may have finished some of what comes next."""
        return self._inherited_frontier is not None

    def skips(self, record: Record[bytes]) -> bool:
        """For who handles one stretch after another: whether the owner before had finished this record."""
        frontier = self._inherited_frontier
        if frontier is None or (position := record.position) > frontier:
            return False
        opened = self._inherited_keys.get(key_digest(record, self._base.order))
        return opened is None or position < opened.first_open

    def finish_through(self, record: Record[bytes], count: int) -> None:
        """For who handles one stretch after another: all up to this record is finished, `count` of it just now."""
        assert not self._unfinished, "stretches and single records are not mixed"
        self._entered = Mark(0, 0, record.sequence_number, record.sub_sequence_number)
        if self._inherited_frontier is not None and record.position >= self._inherited_frontier:
            self._inherited_frontier = None
        if self._failed_stretch is not None and record.position >= self._failed_stretch.first_open:
            self._failed_stretch = None
        if self._failed:
            self.attempts_before(record)  # what earlier owners failed at in the midst of this stretch is done, too
        self.finished_count += count

    def fail_stretch(self, record: Record[bytes], attempts: int) -> None:
        """For who handles one stretch after another: the one that begins with this record has failed so often."""
        self._failed_stretch = OpenKey(key_digest(record, self._order), record.position, attempts)

    @property
    def unfinished_count(self) -> int:
        return len(self._unfinished)

    @property
    def replay_bytes(self) -> int:
        """What the next owner would have to read again to get from the watermark to the frontier (rule M3)."""
        frontier, first = self._frontier, self._first
        if frontier is None or first is None:
            return 0
        watermark_bytes = 0 if first.before is None else first.before.read_bytes
        return max(0, frontier.read_bytes - watermark_bytes)

    @property
    def first_unfinished(self) -> Record[bytes] | None:
        first = self._first
        return None if first is None else first.record

    @property
    def _first(self) -> Entry | None:
        return next(iter(self._unfinished.values()), None)

    def checkpoint(self, heads: Iterable[Entry], seen_through_seconds: float | None = None) -> Checkpoint:
        """What is safe to commit now. `heads` has the first open entry of every key that has one, and may have more."""
        base, first = self._base, self._first
        order, frontier = self._order, None
        opened: dict[bytes, OpenKey] = {}
        if self._inherited_frontier is not None:
            order, frontier = base.order, self._inherited_frontier
            self._open(opened, heads, order)
            self._carry_on(opened)
        else:
            passed_ordinal = 0
            if first is not None and self._frontier is not None and first.ordinal < self._frontier.ordinal:
                frontier, passed_ordinal = self._frontier.position, self._frontier.ordinal
            self._open(opened, (head for head in heads if head.attempts or head.ordinal < passed_ordinal), order)
            for entry in self._failed:  # all of them above the frontier, where they say nothing but their attempts
                opened.setdefault(entry.digest, entry)
        if self._failed_stretch is not None:
            opened[self._failed_stretch.digest] = self._failed_stretch
        if len(opened) > OPEN_KEYS_MAX:
            opened, frontier = _lowest(opened, frontier)
        passed = self._entered if first is None else first.before
        return Checkpoint(
            watermark=base.watermark if passed is None else passed.position,
            frontier=frontier,
            open_keys=tuple(opened[digest] for digest in sorted(opened)),
            seek_epoch=base.seek_epoch,
            order=order,
            seen_through_seconds=base.seen_through_seconds if seen_through_seconds is None else seen_through_seconds,
        )

    @staticmethod
    def _open(opened: dict[bytes, OpenKey], heads: Iterable[Entry], order: OrderMode) -> None:
        for entry in heads:
            digest, position = key_digest(entry.record, order), entry.record.position
            if digest not in opened or position < opened[digest].first_open:
                opened[digest] = OpenKey(digest, position, entry.attempts)

    def _carry_on(self, opened: dict[bytes, OpenKey]) -> None:
        """Adds the inherited open keys: as they were, or from where this owner stands if it has come past them."""
        here = None if self._entered is None else self._entered.position
        for entry in self._base.open_keys:
            if entry.digest in opened:
                continue
            if here is None or here < entry.first_open:
                opened[entry.digest] = entry
            else:
                just_above = Position(here.sequence_number, here.sub_sequence_number + 1)
                opened[entry.digest] = OpenKey(entry.digest, just_above)


def _lowest(opened: dict[bytes, OpenKey], frontier: Position | None) -> tuple[dict[bytes, OpenKey], Position | None]:
    """A row must stay small. Where too much is open, the frontier goes back before the first that is not named: what is
    finished beyond it is handled again by the next owner, and nothing is skipped.
    """
    by_place = sorted(opened.values(), key=lambda entry: entry.first_open)
    number, sub = by_place[OPEN_KEYS_MAX].first_open
    before = Position(number - 1) if sub == BEFORE_FIRST_SUB else Position(number, sub - 1)
    kept = {entry.digest: entry for entry in by_place[:OPEN_KEYS_MAX]}
    return kept, None if frontier is None else min(frontier, before)


def adopt(checkpoint: Checkpoint, order: OrderMode) -> Checkpoint:
    """What a new owner may rely on: a map written with order "none" keeps no order of keys and is dropped (rule M5)."""
    if checkpoint.order == "none" and order != "none":
        return Checkpoint(
            watermark=checkpoint.watermark,
            seek_epoch=checkpoint.seek_epoch,
            order=order,
            seen_through_seconds=checkpoint.seen_through_seconds,
        )
    return checkpoint


def discards(checkpoint: Checkpoint, order: OrderMode) -> bool:
    """Whether an owner of this order handles again what lies finished above the watermark."""
    return adopt(checkpoint, order).frontier != checkpoint.frontier


def key_digest(record: Record[bytes], order: OrderMode) -> bytes:
    """Eight bytes that stand for the record's key; with order "none" every record is a key of its own."""
    text = record.partition_key if order != "none" else str(record.position)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
