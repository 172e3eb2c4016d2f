"""From records in flight to a position that is safe to commit.

Every record that leaves the window is entered here in stream order, and finished here in any order. The rules:

- the watermark passes a record only when it and everything before it is finished (P2);
- per key, the finished records above the watermark are a prefix of that key's records, because a key's next record
  starts only after the one before it finished. So one entry a key describes what is open (rule M1), however many
  records lie between watermark and frontier;
- what the owner before had finished above its watermark is entered as finished and not handled again; until this
  owner has come as far as that frontier, its own commits carry on what they inherited.

The tracker knows nothing of handlers, stores or time, and never looks into a record's payload.
"""

import hashlib
from collections import deque
from collections.abc import Iterable

from anabranch._core.reading.pages import Page
from anabranch._model.leases import Checkpoint, OpenKey, OrderMode
from anabranch._model.sequence_numbers import Position
from anabranch.records import Record

__all__ = ["Entry", "Tracker", "adopt", "is_finished", "key_digest"]

DIGEST_BYTES = 8


class Entry:
    """One unfinished record, or a finished one that an earlier one holds above the watermark."""

    __slots__ = ("attempts", "finished", "ordinal", "page", "read_bytes", "record")

    def __init__(self, record: Record[bytes], page: Page, ordinal: int, read_bytes: int) -> None:
        self.record = record
        self.page = page
        """Where its end is reported, so that its bytes are free again."""
        self.ordinal = ordinal
        """Place in the order of this shard's records since it was taken."""
        self.read_bytes = read_bytes
        """All bytes read from this shard up to and with this record: what a fail-over would read again (rule M3)."""
        self.attempts = 0
        self.finished = False


class Tracker:
    def __init__(self, checkpoint: Checkpoint, order: OrderMode) -> None:
        self._base = adopt(checkpoint, order)
        self._order: OrderMode = order
        self._inherits = self._base.frontier is not None
        self._attempts = {entry.first_open: entry.attempts for entry in self._base.open_keys}
        self._entries: deque[Entry] = deque()
        self._ordinal = 0
        self._read_bytes = 0
        self._watermark_bytes = 0
        self._passed: Record[bytes] | None = None
        self._entered: Record[bytes] | None = None
        self._frontier: Entry | None = None
        self.finished_count = 0
        """Records finished since this holding of the lease began, those finished by the owner before not counted."""

    def enter(self, record: Record[bytes], page: Page) -> Entry:
        """The next record of the stream. The entry comes back finished if the owner before had finished it."""
        self._ordinal += 1
        self._read_bytes += len(record.data)
        entry = Entry(record, page, self._ordinal, self._read_bytes)
        self._entries.append(entry)
        self._entered = record
        if self._inherits:
            self._recognise(entry)
        return entry

    def _recognise(self, entry: Entry) -> None:
        position = entry.record.position
        assert self._base.frontier is not None
        if position > self._base.frontier:
            self._inherits = False
        elif is_finished(self._base, entry.record):
            self._mark(entry)
        else:
            entry.attempts = self._attempts.get(position, 0)

    def finish(self, entry: Entry) -> None:
        self.finished_count += 1
        self._mark(entry)

    def skips(self, record: Record[bytes]) -> bool:
        """For who handles one stretch after another: whether the owner before had finished this record."""
        return self._inherits and is_finished(self._base, record)

    def finish_through(self, record: Record[bytes], count: int) -> None:
        """For who handles one stretch after another: all up to this record is finished, `count` of it just now."""
        assert not self._entries, "stretches and single records are not mixed"
        self._passed = record
        if self._inherits and self._base.frontier is not None and record.position >= self._base.frontier:
            self._inherits = False
        self.finished_count += count

    def _mark(self, entry: Entry) -> None:
        assert not entry.finished, f"finished twice: {entry.record.position}"
        entry.finished = True
        frontier = self._frontier
        if frontier is None or entry.ordinal > frontier.ordinal:
            self._frontier = entry
        entries = self._entries
        while entries and entries[0].finished:
            passed = entries.popleft()
            self._passed = passed.record
            self._watermark_bytes = passed.read_bytes

    @property
    def unfinished_count(self) -> int:
        """Entries not yet below the watermark; zero means that everything entered is finished."""
        return len(self._entries)

    @property
    def replay_bytes(self) -> int:
        """What the next owner would have to read again to get from the watermark to the frontier (rule M3)."""
        frontier = self._frontier
        return 0 if frontier is None else max(0, frontier.read_bytes - self._watermark_bytes)

    @property
    def first_unfinished(self) -> Record[bytes] | None:
        return self._entries[0].record if self._entries else None

    def checkpoint(self, heads: Iterable[Entry], seen_through_seconds: float | None = None) -> Checkpoint:
        """What is safe to commit now. `heads` has the first open entry of every key that has one, and may have more."""
        base = self._base
        order = base.order if self._inherits else self._order
        opened: dict[bytes, OpenKey] = {}
        limit = None if self._inherits or self._frontier is None else self._frontier.ordinal
        for entry in heads:
            if limit is not None and entry.ordinal > limit:
                continue
            digest, position = key_digest(entry.record, order), entry.record.position
            if digest not in opened or position < opened[digest].first_open:
                opened[digest] = OpenKey(digest, position, entry.attempts)
        frontier: Position | None = None
        if self._inherits:
            frontier = base.frontier
            self._carry_on(opened)
        elif self._frontier is not None and self._entries:
            frontier = self._frontier.record.position
        return Checkpoint(
            watermark=self._passed.position if self._passed is not None else base.watermark,
            frontier=frontier,
            open_keys=tuple(opened[digest] for digest in sorted(opened)) if frontier is not None else (),
            seek_epoch=base.seek_epoch,
            order=order,
            seen_through_seconds=seen_through_seconds or base.seen_through_seconds,
        )

    def _carry_on(self, opened: dict[bytes, OpenKey]) -> None:
        """Adds the inherited open keys: as they were, or from where this owner stands if it has come past them."""
        reached = self._entered or self._passed
        here = None if reached is None else reached.position
        for entry in self._base.open_keys:
            if entry.digest in opened:
                continue
            if here is None or here < entry.first_open:
                opened[entry.digest] = entry
            else:
                just_above = Position(here.sequence_number, here.sub_sequence_number + 1)
                opened[entry.digest] = OpenKey(entry.digest, just_above)


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


def key_digest(record: Record[bytes], order: OrderMode) -> bytes:
    """Eight bytes that stand for the record's key; with order "none" every record is a key of its own."""
    text = record.partition_key if order != "none" else str(record.position)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def is_finished(checkpoint: Checkpoint, record: Record[bytes]) -> bool:
    """Whether the owner before has finished this record already, by what it committed (rule M1)."""
    position = record.position
    if checkpoint.watermark is not None and position <= checkpoint.watermark:
        return True
    if checkpoint.frontier is None or position > checkpoint.frontier:
        return False
    digest = key_digest(record, checkpoint.order)
    return all(position < entry.first_open for entry in checkpoint.open_keys if entry.digest == digest)
