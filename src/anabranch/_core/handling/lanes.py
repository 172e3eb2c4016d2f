"""Order lanes: which record of a shard may start now.

| order   | records running at once                  | a record waits for                             |
|---------|------------------------------------------|------------------------------------------------|
| "shard" | one                                      | the previous record of the shard               |
| "key"   | one per partition key                    | the previous record of its partition key       |
| "none"  | any number                               | nothing                                        |

The runners, which are the tasks that call the handler, limit this further: each has one record at a time.

A lane pulls records from its window in stream order, enters each in the tracker, and hands it out by `next`. With order
"key", a record whose key is busy is held back while records of other keys pass. Three limits bound this: open keys
(rule M1), bytes held back (D6), and bytes that would be read again after a failover (M3). A record that waits for a
retry blocks its key (or its shard), but not its runner.

Lanes do not know handlers, leases or clocks: the caller passes the time as `now_ms`.
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
"""How many records one call of `next` may hold back. Longer scans, as over a busy key, would block the event loop."""

SLICE_BYTES_MAX = 16 << 20
"""How many bytes of data one call of `upcoming` may return."""


class RecordsOneByOne(msgspec.Struct, frozen=True):
    """How single records are delivered: their order, and how much may be held back for it."""

    order: OrderMode
    open_keys_max: int = 132
    """Keys with an unfinished record; with order "none", unfinished records. 132: 32 that run, and 100 that wait."""
    held_back_bytes_max: int = 16 << 20
    replay_bytes_max: int = 256 << 20


class RecordLane:
    """The records of one shard on their way to handlers."""

    def __init__(self, checkpoint: Checkpoint, window: Window, mode: RecordsOneByOne, budget: Budget) -> None:
        self._budget = budget
        """Also charged for sub-records that are held back: their page was charged only for the packed aggregate."""
        self.order: OrderMode = mode.order
        self._window = window
        self._limits = mode
        self.tracker = Tracker(checkpoint, mode.order)
        self._ready: deque[Entry] = deque()
        """Entries that may start now: due retries, entries given back, and those whose key became free."""
        self._later: list[tuple[int, int, Entry]] = []
        """A heap of entries that wait for a retry: the time, the ordinal (to break ties) and the entry."""
        self._queues: dict[str, deque[Entry]] = {}
        """With order "key": the unfinished entries of each key. All but the first one are held back."""
        self._running: dict[int, Entry] = {}
        self.held_back_bytes = 0
        """Bytes of records that wait for unfinished records of their keys."""
        self._reserved_bytes = 0
        """What this lane has reserved in the budget for held-back sub-records."""
        self._has_no_room = False
        """The last `next` stopped because the budget had no room to hold another record back."""
        self.scan_is_cut = False
        """The last `next` returned None only because it reached `SCAN_MAX`: call it again."""
        self._stopped = False
        self.one_at_a_time = False
        """Only one record runs at a time, whatever the order."""

    # what may start

    def next(self, now_ms: int) -> Entry | None:
        """The next record that may start now; it counts as running until `finish`, `retry_at` or `give_back`."""
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
        """Pulls records until one may start. With order "key", holds back those whose key is busy."""
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
            if entry.finished:  # by the previous owner
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

    # the fast path: several records without an entry for each

    def upcoming(self, now_ms: int, count_max: int) -> list[Record[bytes]]:
        """The next records of the window. Empty if another record comes first, or if each of them needs an entry.

        The caller handles them one after another and calls `finish_prefix` for those that finished. If the call of the
        next one is still running, it then calls `begin`, which makes an entry. Until then it calls nothing else.
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
        """The first `count` upcoming records are finished."""
        pulled = self._window.pull_some(count, SLICE_BYTES_MAX)
        assert pulled is not None
        read_bytes = pulled.cost - RECORD_OVERHEAD_BYTES * count
        self.tracker.finish_prefix(pulled.records[-1], count, read_bytes)
        self._window.finish_some(pulled)

    def begin(self) -> Entry:
        """The first upcoming record was started and is still running: enters it."""
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
        self._add_held_back(len(record.data) + ENTRY_BYTES)
        extra = _extra_cost(record)
        if extra and self._budget.try_reserve(extra):
            self._reserved_bytes += extra

    def _end_hold(self, record: Record[bytes]) -> None:
        """The record is no longer held back: its key is free."""
        self._add_held_back(-len(record.data) - ENTRY_BYTES)
        self._release(min(self._reserved_bytes, _extra_cost(record)))  # `_hold_back` may have reserved nothing

    def _add_held_back(self, added_bytes: int) -> None:
        self.held_back_bytes += added_bytes
        self._budget.held_back_bytes += added_bytes

    def _release(self, freed_bytes: int) -> None:
        if freed_bytes:
            self._reserved_bytes -= freed_bytes
            self._budget.release(freed_bytes)

    @property
    def stall_reason(self) -> Reason | None:
        """Which limit keeps the lane from pulling more records; None if none does."""
        limits, budget = self._limits, self._budget
        if self.order == "shard":
            return None
        open_count = len(self._queues) if self.order == "key" else len(self._running) + len(self._later)
        if open_count >= limits.open_keys_max:
            return OpenKeysLimit(key_count=open_count)
        if self._has_no_room:
            return NoRoomForHeldBack()
        if self.held_back_bytes >= limits.held_back_bytes_max:
            return HeldBackBytesLimit(held_back_bytes=self.held_back_bytes)
        if self.held_back_bytes and budget.held_back_bytes >= budget.held_back_bytes_max:
            # A lane that holds nothing back may go on: it did not cause this, and cannot reduce it.
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

    # running records

    def finish(self, entry: Entry) -> None:
        """The record is finished. The next one of its key may start."""
        del self._running[entry.ordinal]
        self.tracker.finish(entry)
        self._window.finish(entry.record, entry.page)
        if self.order == "key":
            queue = self._queues[entry.record.partition_key]
            queue.popleft()
            if queue:
                follower = queue[0]
                self._end_hold(follower.record)
                self._ready.append(follower)
            else:
                del self._queues[entry.record.partition_key]

    def retry_at(self, entry: Entry, at_ms: int) -> None:
        """The attempt failed. The record may start again at `at_ms`; its key (or its shard) waits until then."""
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
        """The record was not started after all: `next` returns it again before all others."""
        del self._running[entry.ordinal]
        self._ready.appendleft(entry)

    def stop(self) -> None:
        """Start nothing more; running records may still finish."""
        self._stopped = True

    def forget(self) -> None:
        """Drops all records, because the shard is stopped or lost. The checkpoint and the counters stay."""
        finished_count, finished_bytes = self.tracker.finished_count, self.tracker.finished_bytes
        self.tracker = Tracker(self.checkpoint(), self.order)
        self.tracker.finished_count, self.tracker.finished_bytes = finished_count, finished_bytes
        self._ready.clear()
        self._later.clear()
        self._queues.clear()
        self._running.clear()
        self._add_held_back(-self.held_back_bytes)
        self._release(self._reserved_bytes)
        self._stopped = True

    # status

    @property
    def next_deadline_ms(self) -> int | None:
        """When the next retry is due; None if no record waits for one."""
        return self._later[0][0] if self._later and not self._stopped else None

    @property
    def only_failing(self) -> tuple[Record[bytes], int] | None:
        """The first record that waits for a retry, and its failed attempts. None if the shard has any other record that
        could run: one that is running, ready or unread.
        """
        if self._running or self._ready or not self._later or not self._window.is_empty:
            return None
        first = min((entry for _, _, entry in self._later), key=lambda entry: entry.ordinal)
        return first.record, first.attempts

    def holds(self, position: Position) -> bool:
        """Whether this record was pulled from the window and is not finished."""
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
        """The first unfinished entry of each key. Without key queues: all unfinished entries."""
        if self.order == "key":
            for queue in self._queues.values():
                yield queue[0]
            return
        yield from self._running.values()
        yield from self._ready
        for _, _, entry in self._later:
            yield entry


def _extra_cost(record: Record[bytes]) -> int:
    """What the budget is charged for holding this record back, beyond what its page is charged: nothing, except for a
    sub-record, whose page was charged only for the packed aggregate.
    """
    return 0 if record.sub_sequence_number == BEFORE_FIRST_SUB else len(record.data) + ENTRY_BYTES
