"""The work on one held lease in the tick simulation: records are numbers, handled one after another and committed.

The fence is looked at immediately before each start, as the engine does; a fault may pause the process right there.
"""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from anabranch._core.leases.book import Holding
from anabranch._core.leases.steps import Write
from anabranch._model.leases import Checkpoint, Conflict, LeaseKey, LeaseRow
from anabranch._model.sequence_numbers import Position
from anabranch.testing.tick.journal import Tenure
from anabranch.testing.tick.network import NO_ANSWER

if TYPE_CHECKING:
    from anabranch.testing.tick.worker import TickWorker

__all__ = ["Reader", "committed_record"]

_PACE_MS = 400
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
        self._tenure = Tenure(worker.host.name, worker.book.member_id, row.epoch)
        self._running = False
        self._committed_at_ms = worker.now_ms()
        self._drain_since_ms: int | None = None
        self._later(worker.random.randrange(_PACE_MS))

    @property
    def is_current(self) -> bool:
        """Whether this reader's holding is still the one in the book."""
        return self._worker.readers.get(self.key) is self

    def works_on(self, holding: Holding | None) -> bool:
        return holding is not None and holding.row.epoch == self._tenure.epoch

    def is_at_rest(self) -> bool:
        """Nothing runs, and all that was finished is committed."""
        committed = committed_record(self._worker.book.held[self.key].row)
        return not (self._running or self.writing) and self.finished == committed

    def drain(self) -> None:
        self._drain_since_ms = self._worker.now_ms()

    def _later(self, delay_ms: int) -> None:
        self._worker.process.at(self._worker.now_ms() + delay_ms, "main", self._turn)

    def _turn(self) -> None:
        if not self.is_current:
            return
        if self._drain_since_ms is not None:
            self._drain()
        elif not self._running and self._worker.may_start(self.key):
            self._start()
        if self._worker.now_ms() - self._committed_at_ms >= self._worker.options.commit_each_ms:
            self.commit()
        self._later(_PACE_MS // 2 + self._worker.random.randrange(_PACE_MS))

    def _start(self) -> None:
        """The clock was looked at; now the call."""
        self._running = True
        worker = self._worker
        if worker.random.random() < worker.options.gaps and not worker.link.calm:
            worker.process.pause(worker.random.randrange(1_000, 25_000))
            worker.process.deliver("main", self._call, True)
        else:
            self._call(False)

    def _call(self, was_paused: bool) -> None:  # noqa: FBT001 -- an event's argument
        worker = self._worker
        record = self.finished + 1
        worker.journal_start(self.key, self._tenure, record, was_paused=was_paused)
        duration_ms = worker.random.randrange(20, 600)
        if worker.random.random() < worker.options.overruns and not worker.link.calm:
            duration_ms = worker.random.randrange(4_000, 20_000)
        worker.process.at(worker.now_ms() + duration_ms, "main", self._finish, record)

    def _finish(self, record: int) -> None:
        self._running = False
        self._worker.host.journal.finished(self._worker.app_id, self.key, record)
        self.finished = record

    # committing and giving

    def commit(self) -> None:
        holding = self._worker.book.held[self.key]
        if not self.writing and holding.state != "parting" and self.finished > committed_record(holding.row):
            self._write(self.row_so_far())
        self._committed_at_ms = self._worker.now_ms()

    def row_so_far(self) -> LeaseRow:
        row = self._worker.book.held[self.key].row
        if self.finished <= committed_record(row):
            return row
        return replace(row, checkpoint=Checkpoint(watermark=Position(self.finished)), takes_without_progress=0)

    def _drain(self) -> None:
        holding = self._worker.book.held[self.key]
        if holding.state == "parting":
            return
        if not self._running and not self.writing:
            self._write(self._worker.book.part(self.key, self.row_so_far()))
        elif self._worker.now_ms() - (self._drain_since_ms or 0) > _DRAIN_DEADLINE_MS and self._running:
            self._worker.book.keep(self.key, self._worker.now_ms())
            self._drain_since_ms = None

    def _write(self, row: LeaseRow) -> None:
        self._worker.write(Write(row, self._worker.book.held[self.key].row.version))

    def wrote(self, answer: object) -> None:
        self.writing = False
        if answer is NO_ANSWER or isinstance(answer, Conflict):
            # The next turn writes what stands then, with the version that stands then.
            self._committed_at_ms = 0
