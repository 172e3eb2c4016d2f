"""What the workers of a world did, judged as it happens: starts, finishes and commits, and nothing of how they decide.

A *tenure* is one process's holding of a lease under one member id at one epoch. Checks, each a promise:
- one owner: once another tenure has started a record of a lease, an earlier one starts nothing more of it;
- fence tokens: a later tenure's epoch is higher (except after the store went back in time);
- order: no record is started for the first time before the one before it was finished;
- no loss: no commit passes a record that was not finished, and none goes back;
- hand-off: a lease that was given away, or left by a clean stop, has no running call, and nothing of it is repeated;
- one application: a running process never begins a second one;
- bootstrap: a stream is marked as complete only when all its leases are there;
- streams: a process holds leases of streams that it reads, and of no others.

A call that was paused between the look at the clock and its start may come late: no lease can prevent that, which is
why it carries a fence token. Those are counted apart, as zombies.
"""

from typing import NamedTuple

import msgspec

from anabranch._model.leases import LeaseKey


class Violation(msgspec.Struct, frozen=True):
    at_ms: int
    what: str

    def __str__(self) -> str:
        return f"at {self.at_ms / 1000:.3f} s: {self.what}"


class Tenure(NamedTuple):
    process: str
    member_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.process} as {self.member_id} at epoch {self.epoch}"


class _Line(msgspec.Struct):
    """One lease of one application, over all its holders."""

    tenure: Tenure | None = None
    ended: set[Tenure] = msgspec.field(default_factory=set)
    first_started: int = 0
    finished: int = 0
    """Every record up to this one was finished by somebody."""
    committed: int = 0
    started_at_ms: int = 0
    is_running: bool = False
    """Whether a call of the tenure runs."""
    done: int = 0
    """The last record that the tenure finished."""
    handed_over: int | None = None
    """Up to which record, if the tenure ended in good order."""


class Journal:
    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.zombies = 0
        self.starts = 0
        self.tenures = 0
        self.repeats = 0
        self.longest_gap_ms = 0
        self.store_went_back = False
        """Then checkpoints do too, and a taker that never saw the lost epochs cannot go above them."""
        self._lines: dict[tuple[str, LeaseKey], _Line] = {}

    def started(self, at_ms: int, app_id: str, key: LeaseKey, tenure: Tenure, record: int, *, was_paused: bool) -> None:
        line = self._line(app_id, key)
        self.starts += 1
        if was_paused and line.tenure != tenure:
            self.zombies += 1
            return
        if tenure in line.ended:
            self._violated(at_ms, f"stale dispatch: {tenure} starts record {record} of {key.shard_id}, after "
                f"{line.tenure} did")  # fmt: skip
            return
        if line.tenure != tenure:
            self._begin_tenure(at_ms, key, line, tenure, record)
        if record > line.finished + 1:
            self._violated(at_ms, f"order: {tenure} starts record {record} of {key.shard_id}, but {line.finished + 1} "
                "was not finished")  # fmt: skip
        self.repeats += record <= line.first_started
        line.first_started = max(line.first_started, record)
        self.longest_gap_ms = max(self.longest_gap_ms, at_ms - line.started_at_ms)
        line.started_at_ms = at_ms
        line.is_running = True

    def finished(self, app_id: str, key: LeaseKey, tenure: Tenure, record: int) -> None:
        line = self._line(app_id, key)
        line.finished = max(line.finished, record)
        if line.tenure == tenure:
            line.is_running = False
            line.done = record

    def abandoned(self, app_id: str, key: LeaseKey, tenure: Tenure) -> None:
        """The running call has ended, and its record is not finished."""
        line = self._line(app_id, key)
        if line.tenure == tenure:
            line.is_running = False

    def committed(self, at_ms: int, app_id: str, key: LeaseKey, record: int) -> None:
        line = self._line(app_id, key)
        if record < line.committed and not self.store_went_back:
            self._violated(at_ms, f"{key.shard_id} is committed back from {line.committed} to {record}")
        line.committed = record
        if record > line.finished:
            self._violated(at_ms, f"loss: {key.shard_id} is committed up to {record}, but {line.finished + 1} was not "
                "finished")  # fmt: skip

    def handed_over(self, at_ms: int, app_id: str, key: LeaseKey, tenure: Tenure) -> None:
        """The tenure ends in good order: by a gift, or by a clean stop without leftovers."""
        line = self._line(app_id, key)
        if line.tenure == tenure:
            line.handed_over = line.done
            if line.is_running:
                self._violated(at_ms, f"hand-off: {tenure} gives {key.shard_id} away while record {line.done + 1} runs")

    def silent_since(self, app_id: str, key: LeaseKey) -> int:
        return self._line(app_id, key).started_at_ms

    def opened(self, at_ms: int, opened_before: str, app_id: str) -> None:
        """A process has an application; an earlier one of the same process is named, if there was one."""
        if opened_before and opened_before != app_id:
            self._violated(at_ms, f"second application: a running process left {opened_before} for {app_id}")

    def marked(self, at_ms: int, stream_key: str, missing: list[str]) -> None:
        if missing:
            self._violated(at_ms, f"bootstrap: {stream_key} is marked as complete without {', '.join(missing)}")

    def held_unread(self, at_ms: int, process: str, key: LeaseKey) -> None:
        self._violated(at_ms, f"streams: {process} holds {key.shard_id} of {key.stream_key}, which it does not read")

    def stood_still(self, at_ms: int, what: str) -> None:
        self._violated(at_ms, f"standstill: {what}")

    def _begin_tenure(self, at_ms: int, key: LeaseKey, line: _Line, tenure: Tenure, record: int) -> None:
        self.tenures += 1
        if line.handed_over is not None and record <= line.handed_over and not self.store_went_back:
            self._violated(at_ms, f"hand-off: {tenure} repeats record {record} of {key.shard_id}, which {line.tenure} "
                "finished before it gave it away")  # fmt: skip
        if line.tenure is not None:
            line.ended.add(line.tenure)
            if tenure.epoch <= line.tenure.epoch and not self.store_went_back:
                self._violated(at_ms, f"fence token: {tenure} of {key.shard_id} follows {line.tenure}")
        line.tenure, line.done, line.handed_over = tenure, 0, None

    def _violated(self, at_ms: int, what: str) -> None:
        self.violations.append(Violation(at_ms, what))

    def _line(self, app_id: str, key: LeaseKey) -> _Line:
        line = self._lines.get((app_id, key))
        if line is None:
            line = self._lines[(app_id, key)] = _Line()
        return line
