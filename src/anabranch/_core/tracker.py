"""Tracks records in flight and computes the checkpoint that is safe to commit.

Every record that leaves the window is entered here in stream order, and finished here in any order.

- The watermark passes a record only when it and all records before it are finished (P2).
- A key's next record starts only after the previous one finished. So the finished records of a key above the watermark
  are a prefix of its records, and one entry per key describes what is open (rule M1).
- Records that the previous owner finished above its watermark are entered as finished, and not handled again. Until
  this owner reaches that frontier, its own commits include the prior state.
- A failed record is stored with its number of attempts, so retry counts survive failover (rule M5). So is one that is
  on its way to the dead letters, so that the next owner writes the letter and does not call the handler (rule D1).
- Only unfinished records are kept: finished ones are no longer charged to the byte budget (P5).

The tracker knows nothing of handlers, stores, time or payloads.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from anabranch._core.reading.window import Page
from anabranch._model.leases import Checkpoint, OpenKey, OrderMode
from anabranch._model.streams import BEFORE_FIRST_SUB, Position
from anabranch.letters import Failure
from anabranch.records import Record

DIGEST_BYTES = 8
ERROR_TYPE_CHARACTERS_MAX = 40
"""With position, digest and fingerprint, an entry of a lease row has at most 200 bytes (rule D1)."""
OPEN_KEYS_MAX = 1_000
"""The limit of a lease row. Lanes stay far below it; manual acknowledgement may not."""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A record's place, without the record. The sequence number stays text until a commit needs it."""

    ordinal: int
    """The record's number since this shard was taken, in stream order."""
    read_bytes: int
    """Bytes entered up to and including this record: what a failover would read again (rule M3)."""
    sequence_number: str
    sub_sequence_number: int

    @property
    def position(self) -> Position:
        return Position(int(self.sequence_number), self.sub_sequence_number)


class Entry(msgspec.Struct, gc=False, eq=False):
    """One record on its way through a handler."""

    record: Record[bytes]
    page: Page
    """The page to report its end to, which frees its bytes."""
    ordinal: int
    mark: Mark
    before: Mark | None
    """The previous record: the watermark while this one is the first unfinished."""
    attempts: int = 0
    """Failed attempts, including those of earlier owners."""
    finished: bool = False
    failure: Failure | None = None
    """Set while it is on its way to the dead letters (rule D1)."""
    prior: OpenKey | None = None
    """What an earlier owner, or an operator, has decided about it: it is not handled."""


class Tracker:
    def __init__(self, checkpoint: Checkpoint, order: OrderMode) -> None:
        self._base = adopt(checkpoint, order)
        self._order: OrderMode = order
        self._prior_frontier = self._base.frontier
        """None once this owner has passed it: then no prior state is needed."""
        self._prior_keys = {entry.digest: entry for entry in self._base.open_keys}
        failed = [entry for entry in self._base.open_keys if entry.attempts or entry.state != "open"]
        self._failed = deque(sorted(failed, key=lambda entry: entry.first_open))
        """Records that failed under earlier owners and were not entered yet, in stream order."""
        self._trimmed: dict[Position, OpenKey] = {}
        """Those on their way to the dead letters that are not in the stream any more."""
        self._failed_slice: OpenKey | None = None
        # Not a dict: finding its first key gets slower when the first keys are deleted.
        self._unfinished: OrderedDict[int, Entry] = OrderedDict()
        self._entered: Mark | None = None
        self._frontier: Mark | None = None
        self.finished_count = 0
        """Records finished in this holding, without those that the previous owner finished."""
        self.finished_bytes = 0
        """Payloads and partition keys of those records; in batches, of whole slices."""

    def enter(self, record: Record[bytes], page: Page) -> Entry:
        """Enters the next record of the stream. The entry is already finished if the previous owner finished it."""
        before = self._entered
        ordinal, read_bytes = (1, 0) if before is None else (before.ordinal + 1, before.read_bytes)
        read_bytes += len(record.data) + len(record.partition_key)
        mark = self._entered = Mark(ordinal, read_bytes, record.sequence_number, record.sub_sequence_number)
        entry = Entry(record, page, ordinal, mark, before)
        if self._failed:
            self._apply_mark(entry)
        if self._prior_frontier is not None:
            entry.finished = self.already_done(record)
            self._pass_frontier(record)
        if entry.finished:
            self._frontier = mark
        else:
            self._unfinished[ordinal] = entry
        return entry

    def _pass_frontier(self, record: Record[bytes]) -> None:
        if self._prior_frontier is not None and record.position >= self._prior_frontier:
            self._prior_frontier = None

    def _apply_mark(self, entry: Entry) -> None:
        mark = self.prior_mark(entry.record)
        if mark is not None:
            entry.attempts = mark.attempts
            entry.prior = None if mark.state == "open" else mark

    def prior_mark(self, record: Record[bytes]) -> OpenKey | None:
        """What is known about this record if it failed under earlier owners. Call it in stream order."""
        failed, mark = self._failed, None
        while failed and failed[0].first_open <= record.position:
            entry = failed.popleft()
            mark = entry if entry.first_open == record.position else None
        return mark

    # letters of trimmed records

    def take_trimmed(self, after: Position | None, before: int | None) -> list[OpenKey]:
        """Returns records between the two that have left the stream on their way to the dead letters. `before` is a
        sequence number; None if the stream has no record after `after`.
        """
        gone = [
            mark
            for mark in self._failed
            if mark.state == "dead_lettering"
            and (after is None or mark.first_open > after)
            and (before is None or mark.first_open.sequence_number < before)
        ]
        for mark in gone:
            self._failed.remove(mark)
            self._trimmed[mark.first_open] = mark
        return gone

    def finish_trimmed(self, position: Position) -> None:
        """The letter is written. Later records of its key are as open as before."""
        mark = self._trimmed.pop(position)
        self._base = replace(
            self._base,
            open_keys=tuple(
                OpenKey(mark.digest, _just_above(position)) if key == mark else key for key in self._base.open_keys
            ),
        )

    @property
    def has_trimmed(self) -> bool:
        """Whether letters of trimmed records are not written yet."""
        return bool(self._trimmed)

    def finish(self, entry: Entry) -> None:
        assert not entry.finished, f"finished twice: {entry.record.position}"
        entry.finished = True
        del self._unfinished[entry.ordinal]
        if self._frontier is None or entry.ordinal > self._frontier.ordinal:
            self._frontier = entry.mark
        self.finished_count += 1
        self.finished_bytes += entry.mark.read_bytes - (0 if entry.before is None else entry.before.read_bytes)

    def finish_prefix(self, record: Record[bytes], count: int, read_bytes: int) -> None:
        """The next `count` records, up to and including this one, were handled."""
        assert not self.has_prior_state, "records with prior state are entered one by one"
        before = self._entered
        count_before, bytes_before = (0, 0) if before is None else (before.ordinal, before.read_bytes)
        self._entered = self._frontier = Mark(
            count_before + count, bytes_before + read_bytes, record.sequence_number, record.sub_sequence_number
        )
        self.finished_count += count
        self.finished_bytes += read_bytes

    @property
    def has_prior_state(self) -> bool:
        """Whether earlier owners finished or failed some of the next records."""
        return self._prior_frontier is not None or bool(self._failed)

    @property
    def has_prior_frontier(self) -> bool:
        """Whether the previous owner may have finished some of the next records."""
        return self._prior_frontier is not None

    def already_done(self, record: Record[bytes]) -> bool:
        """Whether the previous owner finished this record, the next one."""
        frontier = self._prior_frontier
        if frontier is None or (position := record.position) > frontier:
            return False
        opened = self._prior_keys.get(key_digest(record, self._base.order))
        return opened is None or position < opened.first_open

    def finish_through(self, record: Record[bytes], count: int) -> None:
        """For batches: all records up to this one are finished, the last `count` of them just now."""
        assert not self._unfinished, "batches and single records are not mixed"
        self._entered = Mark(0, 0, record.sequence_number, record.sub_sequence_number)
        self._pass_frontier(record)
        if self._failed_slice is not None and record.position >= self._failed_slice.first_open:
            self._failed_slice = None
        if self._failed:
            self.prior_mark(record)  # drops prior failures inside this batch
        self.finished_count += count

    @property
    def next_failed(self) -> Position | None:
        """The next record that failed under earlier owners."""
        return self._failed[0].first_open if self._failed else None

    def fail_slice(self, record: Record[bytes], attempts: int, failure: Failure | None = None) -> None:
        """For batches: the piece that begins with this record has failed `attempts` times."""
        self._failed_slice = _open_key(record, self._order, attempts, failure)

    @property
    def unfinished_count(self) -> int:
        return len(self._unfinished)

    def is_unfinished(self, position: Position) -> bool:
        """Whether this record was entered and is not finished."""
        return any(entry.record.position == position for entry in self._unfinished.values())

    @property
    def replay_bytes(self) -> int:
        """What the next owner would read again between watermark and frontier (rule M3)."""
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
        """What is safe to commit now. `heads` contains at least the first open entry of every key."""
        base, first = self._base, self._first
        order, frontier = self._order, None
        opened: dict[bytes, OpenKey] = {}
        if self._prior_frontier is not None:
            order, frontier = base.order, self._prior_frontier
            self._open(opened, heads, order)
            self._add_prior_keys(opened)
        else:
            passed_ordinal = 0
            if first is not None and self._frontier is not None and first.ordinal < self._frontier.ordinal:
                frontier, passed_ordinal = self._frontier.position, self._frontier.ordinal
            self._open(opened, (head for head in heads if head.attempts or head.ordinal < passed_ordinal), order)
            for entry in (*self._failed, *self._trimmed.values()):  # above the frontier they carry their attempts
                opened.setdefault(entry.digest, entry)
        if self._failed_slice is not None:
            opened[self._failed_slice.digest] = self._failed_slice
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
                opened[digest] = _open_key(entry.record, order, entry.attempts, entry.failure)

    def _add_prior_keys(self, opened: dict[bytes, OpenKey]) -> None:
        """Adds the prior open keys, or their rest if this owner has passed their first record."""
        here = None if self._entered is None else self._entered.position
        for entry in self._base.open_keys:
            if entry.digest in opened:
                continue
            if here is None or here < entry.first_open:
                opened[entry.digest] = entry
            else:
                opened[entry.digest] = OpenKey(entry.digest, _just_above(here))


def _open_key(record: Record[bytes], order: OrderMode, attempts: int, failure: Failure | None) -> OpenKey:
    digest, position = key_digest(record, order), record.position
    if failure is None:
        return OpenKey(digest, position, attempts)
    error_type = failure.error_type[-ERROR_TYPE_CHARACTERS_MAX:]  # the class is at its end
    return OpenKey(digest, position, attempts, "dead_lettering", error_type, failure.fingerprint)


def _just_above(position: Position) -> Position:
    return Position(position.sequence_number, position.sub_sequence_number + 1)


def _lowest(opened: dict[bytes, OpenKey], frontier: Position | None) -> tuple[dict[bytes, OpenKey], Position | None]:
    """Keeps the row small. If too many keys are open, the frontier moves back before the first one that does not fit:
    the next owner repeats what was finished beyond it, and skips nothing.
    """
    by_place = sorted(opened.values(), key=lambda entry: entry.first_open)
    number, sub = by_place[OPEN_KEYS_MAX].first_open
    before = Position(number - 1) if sub == BEFORE_FIRST_SUB else Position(number, sub - 1)
    kept = {entry.digest: entry for entry in by_place[:OPEN_KEYS_MAX]}
    return kept, None if frontier is None else min(frontier, before)


def adopt(checkpoint: Checkpoint, order: OrderMode) -> Checkpoint:
    """What a new owner can rely on. Open keys that were written with order "none" keep no key order, and are dropped
    (rule M5). What was decided about single records stays.
    """
    if checkpoint.order == "none" and order != "none":
        decided = tuple(key for key in checkpoint.open_keys if key.state != "open")
        return replace(checkpoint, frontier=None, open_keys=decided, order=order)
    return checkpoint


def discards(checkpoint: Checkpoint, order: OrderMode) -> bool:
    """Whether an owner with this order repeats records that are finished above the watermark."""
    return adopt(checkpoint, order).frontier != checkpoint.frontier


def key_digest(record: Record[bytes], order: OrderMode) -> bytes:
    """Eight bytes for the record's key. With order "none" every record is its own key."""
    return digest_of(record.partition_key, record.position, order)


def digest_of(partition_key: str | None, position: Position, order: OrderMode) -> bytes:
    """The digest of a record that is not loaded. If its key is unknown, the digest identifies only the record."""
    text = partition_key if order != "none" and partition_key is not None else str(position)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
