"""What goes into one PutRecords call: heads of lanes, from each shard's queue in turn.

A call has at most 500 entries and 10 MiB (API), and at most 256 KiB for one shard unless a single record is larger: a
shard that gets its second's worth in one piece refuses part of it. A queue whose pace does not allow its next record is
passed over and says when to come back; it never keeps others from being served.
"""

from collections import deque
from enum import Enum, auto
from typing import Final

from anabranch._core.writing.aggregation import Bundle
from anabranch._core.writing.lanes import Lane, ShardQueue
from anabranch._core.writing.routing import Routing
from anabranch._wire.messages import PutRecordsEntry
from anabranch.limits import KIB, PUT_RECORDS_BYTES_MAX, PUT_RECORDS_ENTRIES_MAX

__all__ = ["Call", "collect"]

SHARD_BYTES_PER_CALL_MAX: Final = 256 * KIB


class Call:
    """One PutRecords request. `bundles`, `lanes` and `entries` run in parallel with the slots of its answer."""

    __slots__ = ("bundles", "entries", "entries_max", "lanes", "size_bytes", "started_ms", "started_seconds")

    def __init__(self, now_ms: int, wall_ms: int) -> None:
        self.started_ms = now_ms
        self.started_seconds = wall_ms / 1_000
        self.bundles: list[Bundle] = []
        self.lanes: list[Lane] = []
        self.entries: list[PutRecordsEntry] = []
        self.entries_max = PUT_RECORDS_ENTRIES_MAX
        self.size_bytes = 0

    def has_room_for(self, bundle: Bundle, size_bytes: int) -> bool:
        if not self.entries:
            return True
        if len(self.entries) >= min(self.entries_max, bundle.companions_max):
            return False
        return self.size_bytes + size_bytes <= PUT_RECORDS_BYTES_MAX

    def append(self, lane: Lane, bundle: Bundle, size_bytes: int) -> None:
        self.lanes.append(lane)
        self.bundles.append(bundle)
        self.entries.append(bundle.freeze())
        self.entries_max = min(self.entries_max, bundle.companions_max)
        self.size_bytes += size_bytes


class _Stop(Enum):
    EMPTY = auto()
    SHARD_FULL = auto()
    CALL_FULL = auto()
    PACED = auto()


def collect(routing: Routing, now_ms: int, wall_ms: int, calls_max: int) -> tuple[list[Call], int | None]:
    """As many calls as may start now, and when a queue that was held back by its pace wants to be asked again."""
    calls: list[Call] = []
    wake_at_ms: int | None = None
    waiting, held_back = routing.ready, deque[ShardQueue]()
    while waiting and len(calls) < calls_max:
        call = Call(now_ms, wall_ms)
        next_call: deque[ShardQueue] = deque()
        while waiting:
            queue = waiting.popleft()
            stop, open_at_ms = _fill(call, queue, routing, now_ms)
            if stop is _Stop.PACED:
                held_back.append(queue)
                wake_at_ms = open_at_ms if wake_at_ms is None else min(wake_at_ms, open_at_ms)
            elif stop is not _Stop.EMPTY:
                next_call.append(queue)
            if stop is _Stop.CALL_FULL:
                break
        waiting.extend(next_call)
        if call.entries:
            calls.append(call)
    waiting.extend(held_back)
    return calls, wake_at_ms


def _fill(call: Call, queue: ShardQueue, routing: Routing, now_ms: int) -> tuple[_Stop, int]:
    pace, ready = queue.pace, queue.ready
    shard_bytes = 0
    while ready:
        lane = ready[0]
        bundle = lane.head()
        if bundle is None:  # emptied while it was listed
            ready.popleft().is_ready = False
            continue
        size_bytes = bundle.entry_bytes
        if pace is not None and shard_bytes and shard_bytes + size_bytes > SHARD_BYTES_PER_CALL_MAX:
            return _Stop.SHARD_FULL, now_ms
        if not call.has_room_for(bundle, size_bytes):
            return _Stop.CALL_FULL, now_ms
        if pace is not None:
            if (open_at_ms := pace.open_at_ms(size_bytes, now_ms)) > now_ms:
                return _Stop.PACED, open_at_ms
            pace.take(size_bytes)
        shard_bytes += size_bytes
        ready.popleft().is_ready = False
        call.append(lane, lane.launch(), size_bytes)
        routing.touch(lane, now_ms)
    queue.is_listed = False
    return _Stop.EMPTY, now_ms
