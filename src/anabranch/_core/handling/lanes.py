"""Order lanes: which record of a shard may start now.

| order   | concurrency                            | a record waits for                             |
|---------|----------------------------------------|------------------------------------------------|
| "shard" | one record                             | the previous record of the shard               |
| "key"   | one record per key and runner          | the previous record of its partition key       |
| "none"  | one record per runner                  | nothing                                        |

A lane pulls records from its window in stream order, enters each in the tracker, and hands them out by `next`. With
order "key", a record whose key is busy is held back while records of other keys pass. Held-back records are limited in
keys, in bytes, and in bytes that would be read again after a failover (rules M1, M3, D6). A record that waits for a
retry blocks its key (or its shard) and frees its runner.

Lanes know nothing of handlers, fences or time beyond `now_ms`.
"""

import heapq
from collections import deque
from collections.abc import Iterator

import msgspec

from anabranch._core.reading.window import RECORD_OVERHEAD_BYTES, Window
from anabranch._core.tracker import Entry, Tracker
from anabranch._model.leases import Checkpoint, OrderMode
from anabranch._model.streams import BEFORE_FIRST_SUB, Position
from anabranch.budget import Budget
from anabranch.reasons import HeldBackBytesLimit, NoRoomForHeldBack, OpenKeysLimit, Reason, ReplayBytesLimit
from anabranch.records import Record

ENTRY_BYTES = 256
"""What a held-back record costs in addition to its payload (rule B2)."""
SCAN_MAX = 1_000
"""How many records one call may hold back, so that a window full of one busy key is scanned in steps."""

SLICE_BYTES_MAX = 16 << 20
"""The largest payload of one `upcoming` slice."""


class RecordsOneByOne(msgspec.Struct, frozen=True):
    """How single records are delivered: their order, and how much may be held back for it."""

    order: OrderMode
    open_keys_max: int = 132
    """Keys with an unfinished record between watermark and frontier: the concurrency plus 100 that wait."""
    held_back_bytes_max: int = 16 << 20
    replay_bytes_max: int = 256 << 20


class RecordLane:
    """The records of one shard on their way to handlers."""

    def __init__(self, checkpoint: Checkpoint, window: Window, mode: RecordsOneByOne, budget: Budget) -> None:
        self._budget = budget
        """Charged for held-back sub-records, because their page is charged for the aggregate only."""
        self.order: OrderMode = mode.order
        self._window = window
        self._limits = mode
        self.tracker = Tracker(checkpoint, mode.order)
        self._ready: deque[Entry] = deque()
        self._later: list[tuple[int, int, Entry]] = []
        self._queues: dict[str, deque[Entry]] = {}
        """With order "key": the unfinished entries of each key. All but the first one are held back."""
        self._running: dict[int, Entry] = {}
        self.held_back_bytes = 0
        """Bytes of records that wait for unfinished records of their keys."""
        self._reserved_bytes = 0
        self._has_no_room = False
        self.scan_is_cut = False
        """The last `next` returned None only because it reached its scan limit: call it again."""
        self._stopped = False
        self.one_at_a_time = False
        """Only one record runs at a time, whatever the order."""

    # what may start

    def next(self, now_ms: int) -> Entry | None:
        """The next record that may start now. The caller starts it and reports its end."""
        self._has_no_room = self.scan_is_cut = False
        if self._stopped:
            return None
        while self._later and self._later[0][0] <= now_ms:
            self._ready.append(heapq.heappop(self._later)[2])
        alone = self.order == "shard" or self.one_at_a_time
        if alone and (self._running or (self._later and not self._ready)):
            return None
        entry = self._ready.popleft() if self._ready else self._scan()
        if entry is not None:
            self._running[entry.ordinal] = entry
        return entry

    def _scan(self) -> Entry | None:
        held_back_count = 0
        while self.stall_reason is None:
            if held_back_count >= SCAN_MAX:
                self.scan_is_cut = True
                return None
            if not self._may_pull():
                self._has_no_room = True
                return None
            pulled = self._window.pull()
            if pulled is None:
                return None
            record, page = pulled
            entry = self.tracker.enter(record, page)
            if entry.finished:
                self._window.finish(record, page)
                continue
            if self.order != "key":
                return entry
            queue = self._queues.get(record.partition_key)
            if queue is None:
                self._queues[record.partition_key] = deque((entry,))
                return entry
            queue.append(entry)
            held_back_count += 1
            self._hold_back(record)
        return None

    # what is handled at once

    def upcoming(self, now_ms: int, count_max: int) -> list[Record[bytes]]:
        """The next records, if no other record is due before them. The caller handles them one after another, reports
        those that are finished to `finish_prefix`, and takes the one whose call still runs with `begin`. In between,
        nothing else may happen to the lane.
        """
        if (
            self._stopped
            or self._ready
            or self.tracker.has_prior_state
            or (self._later and self._later[0][0] <= now_ms)
        ):
            return []
        if (self.order == "shard" or self.one_at_a_time) and (self._running or self._later):
            return []
        if self.one_at_a_time:
            count_max = 1
        if self.order == "shard":
            return self._window.peek_some(count_max, SLICE_BYTES_MAX)
        if self.stall_reason is not None:
            return []
        replay_bytes_left = self._limits.replay_bytes_max - self.tracker.replay_bytes
        records = self._window.peek_some(count_max, min(SLICE_BYTES_MAX, replay_bytes_left))
        if self.order == "key" and self._queues:
            for index, record in enumerate(records):
                if record.partition_key in self._queues:
                    return records[:index]
        return records

    def finish_prefix(self, count: int) -> None:
        """The first `count` upcoming records were handled."""
        pulled = self._window.pull_some(count, SLICE_BYTES_MAX)
        assert pulled is not None
        self.tracker.finish_prefix(pulled.records[-1], count, pulled.cost - RECORD_OVERHEAD_BYTES * count)
        self._window.finish_some(pulled)

    def begin(self) -> Entry:
        """Takes the first upcoming record, which was started."""
        pulled = self._window.pull()
        assert pulled is not None
        entry = self.tracker.enter(*pulled)
        self._running[entry.ordinal] = entry
        if self.order == "key":
            self._queues[entry.record.partition_key] = deque((entry,))
        return entry

    # what is held back

    def _may_pull(self) -> bool:
        """False if the next record would be held back and the budget has no room for its extra cost."""
        if self.order != "key" or not self._queues:
            return True
        upcoming = self._window.peek()
        if upcoming is None or upcoming.partition_key not in self._queues:
            return True
        return self._budget.has_room(_extra_cost(upcoming))

    def _hold_back(self, record: Record[bytes]) -> None:
        self._count_held_back(len(record.data) + ENTRY_BYTES)
        extra = _extra_cost(record)
        if extra and self._budget.try_reserve(extra):
            self._reserved_bytes += extra

    def _let_go(self, record: Record[bytes]) -> None:
        self._count_held_back(-len(record.data) - ENTRY_BYTES)
        self._give_back(min(self._reserved_bytes, _extra_cost(record)))

    def _count_held_back(self, more_bytes: int) -> None:
        self.held_back_bytes += more_bytes
        self._budget.held_back_bytes += more_bytes

    def _give_back(self, freed_bytes: int) -> None:
        if freed_bytes:
            self._reserved_bytes -= freed_bytes
            self._budget.release(freed_bytes)

    @property
    def stall_reason(self) -> Reason | None:
        """Why no new record may start; None if it may."""
        limits, budget = self._limits, self._budget
        if self.order == "shard":
            return None
        waiting = len(self._queues) if self.order == "key" else len(self._running) + len(self._later)
        if waiting >= limits.open_keys_max:
            return OpenKeysLimit(key_count=waiting)
        if self._has_no_room:
            return NoRoomForHeldBack()
        if self.held_back_bytes >= limits.held_back_bytes_max:
            return HeldBackBytesLimit(held_back_bytes=self.held_back_bytes)
        if self.held_back_bytes and budget.held_back_bytes >= budget.held_back_bytes_max:
            # Only lanes that hold records back wait; others have nothing to wait for.
            return HeldBackBytesLimit(held_back_bytes=budget.held_back_bytes, all_shards=True)
        if self.tracker.replay_bytes >= limits.replay_bytes_max:
            first = self.tracker.first_unfinished
            assert first is not None
            return ReplayBytesLimit(
                position=str(first.position),
                partition_key=first.partition_key,
                replay_bytes=self.tracker.replay_bytes,
            )
        return None

    # how it ended

    def finish(self, entry: Entry) -> None:
        del self._running[entry.ordinal]
        self.tracker.finish(entry)
        self._window.finish(entry.record, entry.page)
        if self.order == "key":
            queue = self._queues[entry.record.partition_key]
            queue.popleft()
            if queue:
                follower = queue[0]
                self._let_go(follower.record)
                self._ready.append(follower)
            else:
                del self._queues[entry.record.partition_key]

    def retry_at(self, entry: Entry, at_ms: int) -> None:
        """The attempt failed. The record is ready again at `at_ms`; its key waits until then."""
        del self._running[entry.ordinal]
        heapq.heappush(self._later, (at_ms, entry.ordinal, entry))

    def take_waiting(self, position: Position) -> Entry | None:
        """The record with this position, if it waits for a retry. It counts as running from now on."""
        for item in self._later:
            entry = item[2]
            if entry.record.position == position:
                self._later.remove(item)
                heapq.heapify(self._later)
                self._running[entry.ordinal] = entry
                return entry
        return None

    def give_back(self, entry: Entry) -> None:
        """The record was taken but not started: it is the next one again."""
        del self._running[entry.ordinal]
        self._ready.appendleft(entry)

    def stop(self) -> None:
        """Start nothing more; running records may still finish."""
        self._stopped = True

    def forget(self) -> None:
        """Drops all records, because the shard is stopped or lost. The checkpoint stays as it is."""
        finished_count, finished_bytes = self.tracker.finished_count, self.tracker.finished_bytes
        self.tracker = Tracker(self.checkpoint(), self.order)
        self.tracker.finished_count, self.tracker.finished_bytes = finished_count, finished_bytes
        self._ready.clear()
        self._later.clear()
        self._queues.clear()
        self._running.clear()
        self._count_held_back(-self.held_back_bytes)
        self._give_back(self._reserved_bytes)
        self._stopped = True

    # what is known

    @property
    def next_deadline_ms(self) -> int | None:
        return self._later[0][0] if self._later and not self._stopped else None

    @property
    def only_failing(self) -> tuple[Record[bytes], int] | None:
        """The first record that waits for a retry, and its failed attempts, if all others wait for such records."""
        if self._running or self._ready or not self._later or not self._window.is_empty:
            return None
        first = min((entry for _, _, entry in self._later), key=lambda entry: entry.ordinal)
        return first.record, first.attempts

    def holds(self, position: Position) -> bool:
        """Whether this record was taken out of the window and is not finished."""
        return self.tracker.is_unfinished(position)

    @property
    def unfinished_count(self) -> int:
        return self.tracker.unfinished_count

    @property
    def finished_count(self) -> int:
        return self.tracker.finished_count

    @property
    def first_unfinished(self) -> Record[bytes] | None:
        return self.tracker.first_unfinished

    def checkpoint(self, seen_through_seconds: float | None = None) -> Checkpoint:
        return self.tracker.checkpoint(self._heads(), seen_through_seconds)

    def _heads(self) -> Iterator[Entry]:
        if self.order == "key":
            for queue in self._queues.values():
                yield queue[0]
            return
        yield from self._running.values()
        yield from self._ready
        for _, _, entry in self._later:
            yield entry


def _extra_cost(record: Record[bytes]) -> int:
    """What a held-back record costs in addition to its page: nothing, or its full size for a sub-record."""
    return 0 if record.sub_sequence_number == BEFORE_FIRST_SUB else len(record.data) + ENTRY_BYTES
