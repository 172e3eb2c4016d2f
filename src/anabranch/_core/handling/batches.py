"""Batches of one shard's records, one at a time, in stream order.

A batch is handed out when it is full (by count or bytes), when its first record has waited long enough, when the shard
has no more records, or when the budget has no room to read more. The next batch follows after this one is finished.
`async for` uses batches too, and finishes them record by record.
"""

from collections import deque
from typing import Final

import msgspec

from anabranch._core.reading.window import RecordSlice, Window
from anabranch._core.tracker import Tracker
from anabranch._model.leases import Checkpoint, OrderMode
from anabranch.records import Record


class BatchLimits(msgspec.Struct, frozen=True):
    max_records: int = 500
    max_bytes: int = 1 << 20
    """Payload bytes. A larger record is a batch of its own."""
    max_wait_ms: int = 1000


class BatchLane:
    order: Final[OrderMode] = "shard"
    held_back_bytes: Final = 0

    def __init__(self, checkpoint: Checkpoint, window: Window, limits: BatchLimits) -> None:
        self._tracker = Tracker(checkpoint, self.order)
        self._window = window
        self._limits = limits
        self._filling: list[Record[bytes]] = []
        self._slices: deque[tuple[int, RecordSlice]] = deque()
        """The slices of the batch, each with the number of records up to its end. The bytes of a slice are freed
        together.
        """
        self._done_after_batch: Record[bytes] | None = None
        """The last record after this batch that the previous owner had finished."""
        self._filling_bytes = 0
        self._filling_since_ms = 0
        self._out: list[Record[bytes]] | None = None
        self._finished_here = 0
        """How many records of the current batch are finished."""
        self._stopped = False
        self.one_at_a_time = False
        """Every batch has one record, whatever the limits."""
        self.attempts = 0
        """Failed attempts at the current batch, including those of earlier owners."""

    def next(self, now_ms: int, *, ended: bool, no_room: bool = False) -> list[Record[bytes]] | None:
        """The next batch, if one is due. `ended`: the shard was read to its end. `no_room`: no more reads until records
        finish, so deliver partial batches now.
        """
        if self._stopped or self._out is not None:
            return None
        full = self._fill(now_ms)
        waited = self._filling and now_ms - self._filling_since_ms >= self._limits.max_wait_ms
        if not (full or waited or ((ended or no_room) and self._filling)):
            return None
        self._out, self._filling = self._filling, []
        self._filling_bytes = self._finished_here = 0
        self.attempts = self._tracker.prior_attempts(self._out[0])
        if self.attempts:
            self._tracker.fail_slice(self._out[0], self.attempts)  # keeps the count until the batch is finished
        return self._out

    def _fill(self, now_ms: int) -> bool:
        """Adds records; True if the batch is full."""
        limits, window, tracker = self._limits, self._window, self._tracker
        max_records = 1 if self.one_at_a_time else limits.max_records
        while (room := max_records - len(self._filling)) > 0 and self._filling_bytes < limits.max_bytes:
            upcoming = window.peek()
            if upcoming is None:
                return False
            if self._filling and self._filling_bytes + len(upcoming.data) > limits.max_bytes:
                return True
            # Check records one by one while the previous owner may have finished some of them.
            pulled = window.pull_some(1 if tracker.has_prior_frontier else room, limits.max_bytes - self._filling_bytes)
            assert pulled is not None
            if tracker.already_done(upcoming):
                window.finish_some(pulled)
                if self._filling:
                    self._done_after_batch = upcoming
                else:
                    tracker.finish_through(upcoming, 0)
                continue
            if not self._filling:
                self._filling_since_ms = now_ms
            self._done_after_batch = None
            self._filling += pulled.records
            self._slices.append((len(self._filling), pulled))
            self._filling_bytes += pulled.data_bytes
        return True

    def finish_through(self, count: int) -> None:
        """The first `count` records of the current batch are finished."""
        out, slices = self._out, self._slices
        assert out is not None
        if count > self._finished_here:
            self._tracker.finish_through(out[count - 1], count - self._finished_here)
            self._finished_here = count
        while slices and slices[0][0] <= count:
            self._window.finish_some(slices.popleft()[1])
        if count == len(out):
            if self._done_after_batch is not None:
                self._tracker.finish_through(self._done_after_batch, 0)
            self._out, self._done_after_batch = None, None

    def fail(self) -> None:
        """An attempt at the current batch failed, with all its records."""
        assert self._out is not None
        assert not self._finished_here, "a batch that is finished record by record has no attempts"
        self.attempts += 1
        self._tracker.fail_slice(self._out[0], self.attempts)

    def stop(self) -> None:
        """Hand out no more batches; the current one may still finish."""
        self._stopped = True

    def forget(self) -> None:
        """Drops all records, because the shard is stopped or lost. The checkpoint stays as it is."""
        self._filling, self._out, self._done_after_batch = [], None, None
        self._slices.clear()
        self._stopped = True

    @property
    def next_deadline_ms(self) -> int | None:
        if self._stopped or self._out is not None or not self._filling:
            return None
        return self._filling_since_ms + self._limits.max_wait_ms

    @property
    def running_count(self) -> int:
        return 0 if self._out is None else 1

    @property
    def is_last(self) -> bool:
        """Whether no record that was read follows the current batch."""
        return self._out is not None and not self._filling and self._window.is_empty

    @property
    def unfinished_count(self) -> int:
        return len(self._filling) + (0 if self._out is None else len(self._out) - self._finished_here)

    @property
    def finished_count(self) -> int:
        return self._tracker.finished_count

    @property
    def first_unfinished(self) -> Record[bytes] | None:
        if self._out is not None:
            return self._out[self._finished_here]
        return self._filling[0] if self._filling else None

    def checkpoint(self, seen_through_seconds: float | None = None) -> Checkpoint:
        return self._tracker.checkpoint((), seen_through_seconds)
