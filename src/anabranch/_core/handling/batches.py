"""Batches of one shard's records, one at a time, in stream order.

A batch is handed out when it is full (by count or bytes), when its first record has waited long enough, when the shard
has no more records, or when the budget has no room to read more. The next batch follows after this one is finished.
`async for` uses batches too, and finishes them record by record.

A batch that failed is handed out whole once more, and then in halves, until the record that fails is alone (rule D11).
Attempts count only for a record that is alone. What is handed out is a *piece* of the batch; the other pieces wait.
"""

from collections import deque
from typing import Final

import msgspec

from anabranch._core.reading.window import RECORD_OVERHEAD_BYTES, RecordSlice, Window
from anabranch._core.tracker import Tracker
from anabranch._model.leases import Checkpoint, OpenKey, OrderMode
from anabranch._model.streams import Position
from anabranch.letters import Failure
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
        self.tracker = Tracker(checkpoint, self.order)
        self._window = window
        self._limits = limits
        self._filling: list[Record[bytes]] = []
        self._slices: deque[tuple[int, RecordSlice]] = deque()
        """The slices of the batch, which are freed one by one; each with the number of records up to its end."""
        self._done_after_batch: Record[bytes] | None = None
        """The last record after this batch that the previous owner had finished."""
        self._filling_bytes = 0
        self._filling_since_ms = 0
        self._out: list[Record[bytes]] = []
        """The current batch."""
        self._finished_here = 0
        """How many records of the current batch are finished."""
        self._start = 0
        """Where the current piece begins in the batch."""
        self._size = 0
        """How many records the current piece has; 0 if the next one is not handed out yet."""
        self._halves: list[int] = []
        """The sizes of the pieces after the current one, in reverse order. All further records are the last piece."""
        self._was_retried = False
        """Whether the batch was retried whole since one of its records was last finished."""
        self._retry_at_ms: int | None = None
        """When the current piece is due again; None while it is handled."""
        self._stopped = False
        self.one_at_a_time = False
        """Every batch has one record, whatever the limits."""
        self.attempts = 0
        """Failed attempts at the current piece. Those of earlier owners count if it is a single record."""
        self.prior: OpenKey | None = None
        """What an earlier owner, or an operator, has decided about the current piece: it is not handled."""

    def next(self, now_ms: int, *, flush: bool) -> list[Record[bytes]] | None:
        """The next batch or piece of one, if one is due. `flush`: do not wait, because no more records come for now."""
        if self._stopped:
            return None
        if not self._out and not self._begin_batch(now_ms, flush=flush):
            return None
        if self._size:
            if self._retry_at_ms is None or now_ms < self._retry_at_ms:
                return None
            self._retry_at_ms = None
        else:
            self._begin_piece()
        return self._out[self._start : self._start + self._size]

    def _begin_batch(self, now_ms: int, *, flush: bool) -> bool:
        full = self._fill(now_ms)
        waited = self._filling and now_ms - self._filling_since_ms >= self._limits.max_wait_ms
        if not (full or waited or (flush and self._filling)):
            return False
        self._out, self._filling = self._filling, []
        self._filling_bytes = 0
        self._was_retried = False
        return True

    def _begin_piece(self) -> None:
        """The next half, or all that is left. A record that failed under an earlier owner is a piece of its own."""
        out, start = self._out, self._finished_here
        self._start = start
        size = self._halves.pop() if self._halves else len(out) - start
        failed = self.tracker.next_failed
        if failed is not None and size > 1 and failed <= out[start + size - 1].position:
            before = sum(record.position < failed for record in out[start : start + size])
            first = before or 1
            self._halves.append(size - first)
            size = first
        self._size = size
        self._count_attempts()

    def _count_attempts(self) -> None:
        record = self._out[self._start]
        mark = self.tracker.prior_mark(record) if self._size == 1 else None
        self.attempts, self.prior = 0, None
        if mark is not None:
            self.attempts, self.prior = mark.attempts, None if mark.state == "open" else mark
            self.tracker.fail_slice(record, mark.attempts)  # keeps the count until the record is finished

    def _fill(self, now_ms: int) -> bool:
        """Adds records; True if the batch is full."""
        limits, window, tracker = self._limits, self._window, self.tracker
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
        """The first `count` records of the current piece are finished."""
        out, slices = self._out, self._slices
        through = self._start + count
        if through > self._finished_here:
            self.tracker.finish_through(out[through - 1], through - self._finished_here)
            self._finished_here = through
        while slices and slices[0][0] <= through:
            finished = slices.popleft()[1]
            self._window.finish_some(finished)
            self.tracker.finished_bytes += finished.cost - RECORD_OVERHEAD_BYTES * len(finished.records)
        if count == self._size:
            self._size = 0
        if through == len(out):
            if self._done_after_batch is not None:
                self.tracker.finish_through(self._done_after_batch, 0)
            self._out, self._finished_here, self._done_after_batch = [], 0, None

    def retry_at(self, at_ms: int, attempts: int, *, halve: bool = False) -> None:
        """The current piece has failed `attempts` times, and is due again at `at_ms`. A batch is tried whole once more;
        after that, or with `halve`, a piece that failed is halved. Finished records are not handed out again.
        """
        left = self._start + self._size - self._finished_here
        self._retry_at_ms = at_ms
        if self._finished_here > self._start:
            self._start, self._size, self._was_retried = self._finished_here, left, False
            self._count_attempts()
        elif left == 1:
            self.attempts = attempts
            self.tracker.fail_slice(self._out[self._start], attempts)
        elif not (self._was_retried or halve):
            self._was_retried, self.attempts = True, attempts
        else:
            self._size = (left + 1) // 2
            self._halves.append(left - self._size)
            self._count_attempts()

    def single_out(self, index: int) -> None:
        """Finishes the records of the current piece before this one, which becomes a piece of its own, and runs."""
        if index:
            self.finish_through(index)
        left = self._start + self._size - self._finished_here
        if left > 1:
            self._halves.append(left - 1)
        self._start, self._size, self._retry_at_ms, self.prior = self._finished_here, 1, None, None

    def dead_letter(self, attempts: int, failure: Failure) -> None:
        """The current piece, a single record, is on its way to the dead letters (rule D1)."""
        assert self._size == 1, "only single records go to the dead letters"
        self.tracker.fail_slice(self._out[self._start], attempts, failure)

    def take_waiting(self, position: Position) -> bool:
        """Whether this record waits for a retry, alone. It counts as running from now on."""
        if self._size != 1 or self._retry_at_ms is None or self._out[self._start].position != position:
            return False
        self._retry_at_ms = None
        return True

    def give_back(self) -> None:
        """The current piece was not started: it is due again, unchanged."""
        self._retry_at_ms = 0

    def stop(self) -> None:
        """Hand out no more batches; the current one may still finish."""
        self._stopped = True

    def forget(self) -> None:
        """Drops all records, because the shard is stopped or lost. The checkpoint stays as it is."""
        self._filling, self._out, self._done_after_batch = [], [], None
        self._finished_here, self._size, self._retry_at_ms = 0, 0, None
        self._halves.clear()
        self._slices.clear()
        self._stopped = True

    @property
    def next_deadline_ms(self) -> int | None:
        if self._stopped:
            return None
        if self._out:
            return self._retry_at_ms
        return self._filling_since_ms + self._limits.max_wait_ms if self._filling else None

    @property
    def only_failing(self) -> tuple[Record[bytes], int] | None:
        """The record that waits for a retry and its failed attempts, if it is alone and nothing follows it."""
        if not self._out or self._retry_at_ms is None or not self.attempts:
            return None
        if self._finished_here + 1 < len(self._out) or self._filling or not self._window.is_empty:
            return None
        return self._out[self._start], self.attempts

    def holds(self, position: Position) -> bool:
        """Whether this record was taken out of the window and is not finished."""
        return any(record.position == position for record in (*self._out[self._finished_here :], *self._filling))

    @property
    def unfinished_count(self) -> int:
        return len(self._filling) + len(self._out) - self._finished_here

    @property
    def finished_count(self) -> int:
        return self.tracker.finished_count

    @property
    def first_unfinished(self) -> Record[bytes] | None:
        if self._out:
            return self._out[self._finished_here]
        return self._filling[0] if self._filling else None

    def checkpoint(self, seen_through_seconds: float | None = None) -> Checkpoint:
        return self.tracker.checkpoint((), seen_through_seconds)
