"""The work on one held lease in the tick simulation: records are numbers, handled one after another and committed.

The fence is looked at immediately before each start, as the engine does; a fault may pause the process right there.
"""

import sys
from typing import TYPE_CHECKING

from msgspec.structs import replace

from anabranch._core.leases.lease_table import Holding
from anabranch._core.leases.plan import Write
from anabranch._model.leases import Checkpoint, Conflict, LeaseKey, LeaseRow
from anabranch._model.streams import Position
from anabranch.testing.tick.journal import Tenure
from anabranch.testing.tick.network import NO_ANSWER

if TYPE_CHECKING:
    from anabranch.testing.tick.worker import TickWorker

__all__ = ["Reader", "committed_record"]

_HANDLING_MS = (20, 600)
_OVERRUN_MS = (4_000, 20_000)
_PACE = (0.03, 0.1)
_GAP = (0.1, 2.5)
"""In expiries."""
_DRAIN_DEADLINE_MS = 5_000


def committed_record(row: LeaseRow) -> int:
    watermark = row.checkpoint.watermark
    return 0 if watermark is None else watermark.sequence_number


class Reader:
    def __init__(self, worker: "TickWorker", row: LeaseRow) -> None:
        self.key: LeaseKey = row.key
        self.finished = committed_record(row)
        self.writing = False
        """One write of a lease is in flight at a time (rule L7)."""
        self._worker = worker
        self.tenure = Tenure(worker.host.name, worker.table.member_id, row.epoch)
        self._pace_ms = worker.options.expiries(*_PACE)
        self._running = False
        self._ends_ms = 0
        """When the running call ends; the next turn after that sees it."""
        self._committed_at_ms = worker.now_ms()
        self._drain_since_ms: int | None = None
        self._told_to_end = False
        """The running call ends soon, and unfinished."""
        worker.process.after(worker.dice.between(0, self._pace_ms[0]), "main", self._turn)

    @property
    def is_current(self) -> bool:
        """Whether this reader's holding is still the one in the table."""
        return self._worker.readers.get(self.key) is self

    def works_on(self, holding: Holding | None) -> bool:
        return holding is not None and holding.row.epoch == self.tenure.epoch

    def is_at_rest(self) -> bool:
        """Nothing runs, and all that was finished is committed."""
        committed = committed_record(self._worker.table.held[self.key].row)
        return self.may_part() and self.finished == committed

    def drain(self) -> None:
        self._drain_since_ms = self._worker.now_ms()

    def _turn(self) -> None:
        worker = self._worker
        if worker.readers.get(self.key) is not self:
            return
        now_ms = worker.now_ms()
        worker.process.after(worker.dice.between(*self._pace_ms), "main", self._turn)
        if self._running and now_ms >= self._ends_ms:
            self._finish()
        if self._drain_since_ms is not None:
            self._drain(now_ms - self._drain_since_ms)
        elif not self._running and self.may_start():
            self._start()
        if now_ms - self._committed_at_ms >= worker.options.commit_every_ms:
            self.commit()

    def may_start(self) -> bool:
        return self._worker.may_start(self.key)

    def _start(self) -> None:
        """The clock was looked at; now the call."""
        self._running = True
        worker = self._worker
        if not worker.link.calm and worker.dice.random() < worker.options.gaps:
            self._ends_ms = sys.maxsize
            worker.process.pause(worker.dice.between(*worker.options.expiries(*_GAP)))
            worker.process.deliver("main", self._call, True)
        else:
            self._call(False)

    def _call(self, was_paused: bool) -> None:  # noqa: FBT001 -- an event's argument
        worker = self._worker
        worker.journal_start(self.key, self.tenure, self.finished + 1, was_paused=was_paused)
        is_long = not worker.link.calm and worker.dice.random() < worker.options.overruns
        self._ends_ms = worker.now_ms() + worker.dice.between(*(_OVERRUN_MS if is_long else _HANDLING_MS))

    def _finish(self) -> None:
        self._running = False
        worker = self._worker
        if self._told_to_end:
            self._told_to_end = False
            worker.host.journal.abandoned(worker.app_id, self.key, self.tenure)
            return
        self.finished += 1
        worker.host.journal.finished(worker.app_id, self.key, self.tenure, self.finished)

    # committing and giving

    def commit(self) -> None:
        holding = self._worker.table.held[self.key]
        if not self.writing and holding.state != "transferring" and self.finished > committed_record(holding.row):
            self._write(self.row_so_far())
        self._committed_at_ms = self._worker.now_ms()

    def row_so_far(self) -> LeaseRow:
        row = self._worker.table.held[self.key].row
        if self.finished <= committed_record(row):
            return row
        return replace(row, checkpoint=Checkpoint(watermark=Position(self.finished)), takes_without_progress=0)

    def _drain(self, drained_ms: int) -> None:
        holding = self._worker.table.held[self.key]
        if holding.state == "transferring":
            return
        if self.may_part():
            self._write(self._worker.table.transfer(self.key, self.row_so_far()))
        elif drained_ms <= _DRAIN_DEADLINE_MS or not self._running or self._told_to_end:
            return
        elif self._worker.options.forced_hand_offs:
            self._told_to_end = True
            self._ends_ms = min(self._ends_ms, self._worker.now_ms() + self._worker.dice.between(*_HANDLING_MS))
        else:
            self._worker.table.keep(self.key, self._worker.now_ms())
            self._drain_since_ms = None

    def may_part(self) -> bool:
        """Nothing of it runs here any more, and nothing is being written."""
        return not (self._running or self.writing)

    def _write(self, row: LeaseRow) -> None:
        self._worker.write(Write(row, self._worker.table.held[self.key].row.version))

    def wrote(self, answer: object) -> None:
        self.writing = False
        if answer is NO_ANSWER or isinstance(answer, Conflict):
            # The next turn writes what stands then, with the version that stands then.
            self._committed_at_ms = 0
