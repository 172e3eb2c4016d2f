"""Batches of one shard's records, one after another, in stream order.

A batch is handed out when it is full (by count or bytes), when its first record has waited long enough, when the shard
has no more, or when there is no room to read more; the next one only after this one is finished. This is also how
records are iterated over: a batch is then a stretch that is walked record by record.
"""

from collections import deque
from typing import Final

import msgspec

from anabranch._core.checkpoints.tracker import Tracker
from anabranch._core.reading.pages import Portion
from anabranch._core.reading.window import Window
from anabranch._model.leases import Checkpoint, OrderMode
from anabranch.records import Record

__all__ = ["BatchLane", "BatchLimits"]


class BatchLimits(msgspec.Struct, frozen=True):
    max_records: int = 500
    max_bytes: int = 1 << 20
    """Of payload; a single larger record is a batch of its own."""
    max_wait_ms: int = 1000


class BatchLane:
    order: Final[OrderMode] = "shard"
    held_back_bytes: Final = 0

    def __init__(self, checkpoint: Checkpoint, window: Window, limits: BatchLimits) -> None:
        self._tracker = Tracker(checkpoint, self.order)
        self._window = window
        self._limits = limits
        self._filling: list[Record[bytes]] = []
        self._portions: deque[tuple[int, Portion]] = deque()
        """What the batch is made of, each with the count of records up to its end: its bytes become free together."""
        self._passed_over: Record[bytes] | None = None
        """The last record after this batch's last one that the owner before had finished."""
        self._filling_bytes = 0
        self._filling_since_ms = 0
        self._out: list[Record[bytes]] | None = None
        self._finished_here = 0
        """How many records of the batch that is out are finished already."""
        self._stopped = False
        self.one_at_a_time = False
        """Whatever the limits: a batch is one record."""
        self.attempts = 0
        """Failed attempts at the batch that is out, those of earlier owners included."""

    def next(self, now_ms: int, *, ended: bool, no_room: bool = False) -> list[Record[bytes]] | None:
        """The next batch, if one is due; `ended` says that the shard has no more than what was read, `no_room` that no
        more is read until some of it is finished.
        """
        if self._stopped or self._out is not None:
            return None
        full = self._fill(now_ms)
        waited = self._filling and now_ms - self._filling_since_ms >= self._limits.max_wait_ms
        if not (full or waited or ((ended or no_room) and self._filling)):
            return None
        self._out, self._filling = self._filling, []
        self._filling_bytes = self._finished_here = 0
        self.attempts = self._tracker.attempts_before(self._out[0])
        if self.attempts:
            self._tracker.fail_stretch(self._out[0], self.attempts)  # as before, until it is finished
        return self._out

    def _fill(self, now_ms: int) -> bool:
        """Pulls what fits; True if the batch can grow no more."""
        limits, window, tracker = self._limits, self._window, self._tracker
        max_records = 1 if self.one_at_a_time else limits.max_records
        while (room := max_records - len(self._filling)) > 0 and self._filling_bytes < limits.max_bytes:
            upcoming = window.peek()
            if upcoming is None:
                return False
            if self._filling and self._filling_bytes + len(upcoming.data) > limits.max_bytes:
                return True
            # As long as the owner before may have finished some, each is looked at by itself.
            portion = window.pull_some(1 if tracker.inherits else room, limits.max_bytes - self._filling_bytes)
            assert portion is not None
            if tracker.skips(upcoming):
                window.finish_some(portion)
                if self._filling:
                    self._passed_over = upcoming
                else:
                    tracker.finish_through(upcoming, 0)
                continue
            if not self._filling:
                self._filling_since_ms = now_ms
            self._passed_over = None
            self._filling += portion.records
            self._portions.append((len(self._filling), portion))
            self._filling_bytes += portion.data_bytes
        return True

    def finish_through(self, count: int) -> None:
        """The first `count` records of the batch that is out are finished; with all of them, the batch is."""
        out, portions = self._out, self._portions
        assert out is not None
        if count > self._finished_here:
            self._tracker.finish_through(out[count - 1], count - self._finished_here)
            self._finished_here = count
        while portions and portions[0][0] <= count:
            self._window.finish_some(portions.popleft()[1])
        if count == len(out):
            if self._passed_over is not None:
                self._tracker.finish_through(self._passed_over, 0)
            self._out, self._passed_over = None, None

    def fail(self) -> None:
        """An attempt at the batch that is out has failed, and so have all its records."""
        assert self._out is not None
        assert not self._finished_here, "who walks through a batch record by record makes no attempts at it"
        self.attempts += 1
        self._tracker.fail_stretch(self._out[0], self.attempts)

    def stop(self) -> None:
        """No batch is handed out any more; the one that is out may still finish."""
        self._stopped = True

    def forget(self) -> None:
        """Lets go of every record, since the shard stands still for good; what is safe to commit stays as it is."""
        self._filling, self._out, self._passed_over = [], None, None
        self._portions.clear()
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
        """Whether nothing that was read comes after the batch that is out."""
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
