"""Owners of one shard, one after another: each resumes from what the last one committed, works a while, and crashes.

The owners use the real lanes and the real window. What a checkpoint means is decided here from the text of rule M1, not
by the code that wrote it.
"""

import hashlib

from anabranch._core.handling.batches import BatchLane, BatchLimits
from anabranch._core.handling.lanes import RecordLane, RecordsOneByOne
from anabranch._core.reading.window import Unpacker, Window
from anabranch.budget import Budget
from shard_records import SHARD, STREAM, aggregated, plain

STEPS_MAX = 20_000


class Shard:
    """A stream of plain and aggregated records; `units` has one key, or a list of keys, for each Kinesis record."""

    def __init__(self, units):
        self.kinesis_records = [
            plain(10 * number, unit) if isinstance(unit, str) else aggregated(10 * number, *((k, b"sub") for k in unit))
            for number, unit in enumerate(units, 1)
        ]
        unpacker = Unpacker(STREAM, SHARD, None)
        self.records = [r for some in unpacker.unpack(self.kinesis_records, None) for r in some.records]

    def read_from(self, watermark):
        """What an iterator at the watermark's record would return."""
        start = -1 if watermark is None else watermark.sequence_number
        return [record for record in self.kinesis_records if int(record.sequence_number) >= start]


def says_finished(checkpoint, record):
    """Rule M1, word by word."""
    position = record.position
    if checkpoint.watermark is not None and position <= checkpoint.watermark:
        return True
    if checkpoint.frontier is None or position > checkpoint.frontier:
        return False
    text = str(position) if checkpoint.order == "none" else record.partition_key
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    first_open = {entry.digest: entry.first_open for entry in checkpoint.open_keys}.get(digest)
    return first_open is None or position < first_open


class Owner:
    """One holding of the shard. Every step is one that the engine can take; which one comes next is drawn."""

    def __init__(self, shard, checkpoint, order, draw, limits=None):
        self.order = order
        self.draw = draw
        self.now_ms = 0
        self.window = Window(Unpacker(STREAM, SHARD, None))
        self.unread = shard.read_from(checkpoint.watermark)
        self.after = checkpoint.watermark
        self.started = []
        """Every start, a retry included."""
        self.finished = []
        self.failed = []
        """Every attempt that failed, of a batch its first record."""
        self.running = []
        self.lane = self.make_lane(checkpoint, limits)

    def make_lane(self, checkpoint, limits):
        return RecordLane(checkpoint, self.window, limits or RecordsOneByOne(self.order), Budget())

    def read(self):
        count = self.draw.randint(1, 4)
        page, self.unread = self.unread[:count], self.unread[count:]
        if page:
            self.window.accept(page, self.after)
            self.after = None

    def start(self):
        entry = self.lane.next(self.now_ms)
        if entry is None:
            return False
        self.running.append(entry)
        self.started.append(entry.record)
        return True

    def start_some(self):
        """Calls that do not wait, one after another; the last one may wait after all."""
        upcoming = self.lane.upcoming(self.now_ms, self.draw.randint(1, 4))
        count = self.draw.randint(0, len(upcoming))
        if count:
            self.lane.finish_prefix(count)
            self.started += upcoming[:count]
            self.finished += upcoming[:count]
        if count < len(upcoming) and self.draw.random() < 0.5:
            entry = self.lane.begin()
            assert entry.record is upcoming[count]
            assert not entry.attempts
            self.running.append(entry)
            self.started.append(entry.record)

    def end(self):
        """A running call ends: in success, in a failure that is retried, or without having begun."""
        if not self.running:
            return
        entry = self.running.pop(self.draw.randrange(len(self.running)))
        outcome = self.draw.random()
        if outcome < 0.7:
            self.lane.finish(entry)
            self.finished.append(entry.record)
        elif outcome < 0.85:
            entry.attempts += 1
            self.failed.append(entry.record)
            self.lane.retry_at(entry, self.now_ms + self.draw.randint(0, 3))
        else:
            self.lane.give_back(entry)
            self.started.pop(_last_index(self.started, entry.record))

    def step(self):
        self.now_ms += 1
        self.draw.choice((self.read, self.start, self.start, self.start_some, self.end))()

    def work_to_the_end(self, after_each_step=lambda owner: None):
        for _ in range(STEPS_MAX):
            if not (self.unread or self.running or self.lane.unfinished_count) and self.window.is_empty:
                return
            self.step()
            after_each_step(self)
        raise AssertionError(f"{STEPS_MAX} steps brought it to no end: {self.lane.first_unfinished}")

    def commit(self):
        return self.lane.checkpoint()


class BatchOwner(Owner):
    """Handles batches whole, which can fail, or walks through them record by record, which cannot."""

    def make_lane(self, checkpoint, limits):
        self.walks = self.draw.random() < 0.5
        self.done = 0
        return BatchLane(checkpoint, self.window, limits or BatchLimits(max_records=3, max_bytes=20, max_wait_ms=2))

    def start(self):
        batch = self.lane.next(self.now_ms, flush=not self.unread)
        if batch is None:
            return False
        self.running = list(batch)
        self.started += batch
        self.done = 0
        return True

    def start_some(self):
        """Batches are started one at a time."""

    def end(self):
        if self.running and not self.walks and self.draw.random() < 0.15:
            if len(self.running) == 1:
                self.failed.append(self.running[0])
            self.lane.retry_at(0, self.lane.attempts + 1)
            self.running, self.done = [], 0
        elif self.running:
            count = self.draw.randint(1, len(self.running)) if self.walks else len(self.running)
            self.done += count
            self.finished += self.running[:count]
            self.running = self.running[count:]
            self.lane.finish_through(self.done)


def _last_index(records, record):
    return max(index for index, one in enumerate(records) if one is record)


def make_owner(shard, checkpoint, order, draw):
    kind = BatchOwner if order == "batch" else Owner
    return kind(shard, checkpoint, order, draw)
