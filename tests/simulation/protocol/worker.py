"""A worker of the protocol simulation: it drives the lease machine that ships, and handles records of what that holds.

It decides nothing about leases. It delivers the machine's store calls over the simulated network, feeds the answers
back, and runs a reader for each held lease. Records are numbers, handled one after another and committed. A fault may
pause the process between the look at the fence and the start of a call.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from anabranch._core.leases.lease_table import Holding
from anabranch._core.leases.machine import (
    Ended,
    Held,
    Joined,
    LeaseMachine,
    Lost,
    MemberProfile,
    ReportChanged,
)
from anabranch._core.leases.plan import Drain, Write
from anabranch._core.leases.store_calls import (
    Action,
    Answer,
    Describe,
    Description,
    ListShards,
    Moment,
    Steps,
    StoreCall,
    Wait,
    WriteLease,
    WriteStream,
)
from anabranch._core.leases.timing import LeaseTiming
from anabranch._engine.fleet import send
from anabranch._model.leases import AppRow, Checkpoint, Conflict, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import Position
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from protocol.faults import Dice, WorldOptions
from protocol.journal import Journal, Tenure
from protocol.network import STREAMS, Lane, Link, Process, ProtocolStore, Storage, at_once

_HANDLING_MS = (20, 600)
_OVERRUN_MS = (4_000, 20_000)
_PACE = (0.03, 0.1)
_GAP = (0.1, 2.5)
"""In expiries."""
_DRAIN_DEADLINE_MS = 5_000
_STOP_DEADLINE_MS = 8_000
_APP = AppRow(app="billing", app_id="", created_wall_ms=0)


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Where a simulated worker runs: its process, its way to the store, and who watches what it starts."""

    name: str
    """Of the process; unique in the world, whatever the worker is configured as."""
    worker_id: str
    streams: tuple[str, ...]
    """Keys of the streams that it reads."""
    process: Process
    link: Link
    storage: Storage
    timing: LeaseTiming
    options: WorldOptions
    journal: Journal
    dice: Dice


class _Task:
    """An operation of the machine that is under way."""

    __slots__ = ("done", "is_cancelled", "is_last", "lane", "steps", "wait")

    def __init__(self, lane: Lane, steps: Steps[Any], done: Callable[[Any], None], *, is_last: bool = False) -> None:
        self.lane = lane
        self.steps = steps
        self.done = done
        self.is_cancelled = False
        self.is_last = is_last
        """It runs after its worker has stopped."""
        self.wait: Wait | None = None
        """What it waits for, if news can end that early."""


class Worker:
    def __init__(self, host: Host, machine_class: type[LeaseMachine], reader_class: "type[Reader]") -> None:
        self.host = host
        self.process = host.process
        self.link = host.link
        self.dice = host.dice
        self.now_ms = host.process.now_ms
        self.options = host.options
        self.machine = machine_class(MemberProfile(worker_id=host.worker_id), host.timing, host.dice)
        self.app_id = ""
        self._store = ProtocolStore(host.storage)
        self.has_stopped = False
        """Stopped on purpose: a clean stop, or an application that is not its own any more."""
        self._begun: list[str] = []
        """Keys of the streams that it has begun; the last one may be under way."""
        self.readers: dict[LeaseKey, Reader] = {}
        self._reader_class = reader_class
        self._rounds: _Task | None = None
        self._heartbeats: _Task | None = None
        self._drive("main", self.machine.open(_APP, "simulated"), self._check_fleet)

    def _check_fleet(self, _: AppRow) -> None:
        self._drive("main", self.machine.check_fleet(), self._begin_streams)

    def _begin_streams(self, _: object) -> None:
        """One after another; then it joins."""
        left = [row for row in STREAMS if row.stream_key in self.host.streams and row.stream_key not in self._begun]
        if left:
            self._begun.append(left[0].stream_key)
            self._drive("main", self.machine.begin_stream(left[0]), self._begin_streams)
        else:
            self._join()

    def _join(self) -> None:
        self._drive("main", self.machine.join(self.host.streams), self._run)

    def _run(self, _: None) -> None:
        self._rounds = self._drive("main", self.machine.run())

    def may_start(self) -> bool:
        """Rule L8: asked immediately before the start."""
        return self.machine.may_start(self.now_ms(), self.process.wall_ms())

    def write(self, row: LeaseRow, done: Callable[[Any], None]) -> None:
        step = Write(row, self.machine.table.held[row.key].row.version)
        self._drive("main", self.machine.write(step), done)

    def transfer(self, key: LeaseKey, final: LeaseRow, done: Callable[[Any], None]) -> None:
        self._drive("main", self.machine.transfer(key, final), done)

    # a clean stop

    def stop(self) -> None:
        """Drain, commit, and leave by one write."""
        self.machine.drain()
        self._leave(self.now_ms() + _STOP_DEADLINE_MS)

    def _leave(self, deadline_ms: int) -> None:
        if self.has_stopped:
            return
        busy = [reader for reader in self.readers.values() if not reader.is_at_rest()]
        if busy and self.now_ms() < deadline_ms:
            for reader in busy:
                reader.commit()
            self.process.after(200, "main", self._leave, deadline_ms)
            return
        for key, reader in self.readers.items():
            if reader not in busy:
                self.host.journal.handed_over(self.process.true_ms(), self.app_id, key, reader.tenure)
        self._end()
        if self.machine.member_id:
            self.machine.moment = self._moment()
            self._advance(_Task("main", self.machine.leave(), _ignore, is_last=True), None)

    def _end(self) -> None:
        self.has_stopped = True
        self.readers.clear()

    # driving

    def _moment(self) -> Moment:
        return Moment(self.now_ms(), self.process.wall_ms())

    def _drive(self, lane: Lane, steps: Steps[Any], done: "Callable[[Any], None] | None" = None) -> _Task:
        task = _Task(lane, steps, done or _ignore)
        self.machine.moment = self._moment()
        self._advance(task, None)
        return task

    def _advance(self, task: _Task, answer: Answer | None) -> None:
        """Goes on with an operation until it has to wait."""
        while not task.is_cancelled and (task.is_last or not self.has_stopped):
            try:
                action: Action = next(task.steps) if answer is None else task.steps.send(answer)
            except StopIteration as ended:
                self._pass_on()
                if not self.has_stopped:
                    task.done(ended.value)
                return
            except (LeaseStoreError, LeaseStoreInvalidError):  # a start gave up, or the application is not its own
                self._end()
                return
            self._pass_on()
            if isinstance(action, Describe):
                answer = Answer(Description(), self._moment())
            elif isinstance(action, ListShards):
                answer = Answer(self.host.storage.shards[self._begun[-1]], self._moment())
            elif isinstance(action, Wait):
                task.wait = action if action.wakeable else None
                self.process.at(action.until_ms, task.lane, self._on_time, task, action)
                return
            else:
                # Opening has no deadline of its own: in these worlds it creates no tables.
                side = self.machine.heartbeat if task.lane == "heart" else self.machine
                deadline_ms = side.timing.call_deadline_ms
                self.link.call(task.lane, deadline_ms, self._request(action), partial(self._on_answer, task))
                return

    def _on_answer(self, task: _Task, value: object) -> None:
        self._advance(task, Answer(value, self._moment()))

    def _on_time(self, task: _Task, wait: Wait) -> None:
        if not wait.wakeable or task.wait is wait:
            task.wait = None
            self._advance(task, Answer(None, self._moment()))

    def _wake(self, task: _Task | None) -> None:
        if task is not None and task.wait is not None:
            self._on_time(task, task.wait)

    def _request(self, call: StoreCall[Any]) -> Callable[[], Any]:
        """What happens in the store; of a lease's write and of a stream's mark the journal hears too."""
        store = self._store
        if isinstance(call, WriteStream):
            return lambda: self._mark(at_once(send(store, call)))
        if not isinstance(call, WriteLease):
            return lambda: at_once(send(store, call))
        key, tenure = call.row.key, self.readers[call.row.key].tenure

        def write() -> Any:
            answer = at_once(send(store, call))
            if not isinstance(answer, Conflict):
                journal = self.host.journal
                journal.committed(self.host.storage.now_ms, self.app_id, key, committed_record(call.row))
                if call.row.owner != call.member_id:
                    journal.handed_over(self.host.storage.now_ms, self.app_id, key, tenure)
            return answer

        return write

    def _mark(self, row: StreamRow | None) -> StreamRow | None:
        storage, app_id = self.host.storage, self.machine.app.app_id
        if row is not None:
            keys = storage.lease_keys(row.stream_key)
            missing = [key.shard_id for key in keys if storage.lease(app_id, key) is None]
            self.host.journal.marked(storage.now_ms, row.stream_key, missing)
        return row

    def _pass_on(self) -> None:
        if self.app_id != self.machine.app.app_id:
            self.host.journal.opened(self.process.true_ms(), self.app_id, self.machine.app.app_id)
            self.app_id = self.machine.app.app_id
            self._store = ProtocolStore(self.host.storage, self.app_id)
        for change in self.machine.take_changes():
            match change:
                case Held():
                    if change.holding.row.key.stream_key not in self.host.streams:
                        self.host.journal.held_unread(self.process.true_ms(), self.host.name, change.holding.row.key)
                    self.readers[change.holding.row.key] = self._reader_class(self, change.holding)
                case Lost():
                    self.readers.pop(change.key, None)
                case Drain():
                    self.readers[change.request.key].drain()
                case Joined():
                    steps = change.heartbeat.run(self._moment())
                    self._heartbeats = _Task("heart", self._watched(steps), _ignore)
                    self.process.deliver("heart", self._advance, self._heartbeats, None)
                case Ended() if self._heartbeats is not None:
                    self._heartbeats.is_cancelled = True
                case ReportChanged() if self._heartbeats is not None:
                    self.process.deliver("heart", self._report, self._heartbeats)
                case _:
                    """An event, for people."""

    def _report(self, heartbeats: _Task) -> None:
        self.machine.heartbeat.wake(self.now_ms())
        self._wake(heartbeats)

    def _watched(self, steps: Steps[None]) -> Steps[None]:
        """The heartbeats, and a word to the main lane when one has ended its member or brought a request."""
        answer: Answer | None = None
        while True:
            try:
                action = next(steps) if answer is None else steps.send(answer)
            except StopIteration:
                break
            row = self.machine.heartbeat.status.row
            if row is not None and row.wanted:
                self.process.deliver("main", self._wake_rounds)
            answer = yield action
        self.process.deliver("main", self._wake_rounds)

    def _wake_rounds(self) -> None:
        self._wake(self._rounds)


class Reader:
    """The work on one held lease."""

    def __init__(self, worker: Worker, holding: Holding) -> None:
        row = holding.row
        self.key: LeaseKey = row.key
        self.finished = committed_record(row)
        self.writing = False
        """One write of a lease is in flight at a time (rule L7)."""
        self.worker = worker
        self.tenure = Tenure(worker.host.name, worker.machine.member_id, row.epoch)
        self._holding = holding
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
        return self.worker.readers.get(self.key) is self

    def is_at_rest(self) -> bool:
        """Nothing runs, and all that was finished is committed."""
        return self.may_part() and self.finished == committed_record(self._holding.row)

    def drain(self) -> None:
        self._drain_since_ms = self.worker.now_ms()

    def _turn(self) -> None:
        worker = self.worker
        if not self.is_current:
            return
        now_ms = worker.now_ms()
        worker.process.after(worker.dice.between(*self._pace_ms), "main", self._turn)
        if self._running and now_ms >= self._ends_ms:
            self._finish()
        if self._drain_since_ms is not None:
            self._drain(now_ms - self._drain_since_ms)
        elif not self._running and self.may_start():
            self._start()
        if self.is_current and now_ms - self._committed_at_ms >= worker.options.commit_every_ms:
            self.commit()

    def may_start(self) -> bool:
        return not self.worker.machine.draining and self.worker.may_start()

    def _start(self) -> None:
        """The clock was looked at; now the call."""
        self._running = True
        worker = self.worker
        if not worker.link.calm and worker.dice.random() < worker.options.gaps:
            self._ends_ms = sys.maxsize
            worker.process.pause(worker.dice.between(*worker.options.expiries(*_GAP)))
            worker.process.deliver("main", self._call, True)
        else:
            self._call(False)

    def _call(self, was_paused: bool) -> None:
        worker, record = self.worker, self.finished + 1
        true_ms = worker.process.true_ms()
        worker.host.journal.started(true_ms, worker.app_id, self.key, self.tenure, record, was_paused=was_paused)
        is_long = not worker.link.calm and worker.dice.random() < worker.options.overruns
        self._ends_ms = worker.now_ms() + worker.dice.between(*(_OVERRUN_MS if is_long else _HANDLING_MS))

    def _finish(self) -> None:
        self._running = False
        worker = self.worker
        if self._told_to_end:
            self._told_to_end = False
            worker.host.journal.abandoned(worker.app_id, self.key, self.tenure)
            return
        self.finished += 1
        worker.host.journal.finished(worker.app_id, self.key, self.tenure, self.finished)

    # committing and giving

    def commit(self) -> None:
        holding = self._holding
        self._committed_at_ms = self.worker.now_ms()
        if not self.writing and holding.state != "transferring" and self.finished > committed_record(holding.row):
            self.writing = True
            self.worker.write(self.row_so_far(), self.wrote)

    def row_so_far(self) -> LeaseRow:
        row = self._holding.row
        if self.finished <= committed_record(row):
            return row
        return replace(row, checkpoint=Checkpoint(watermark=Position(self.finished)), takes_without_progress=0)

    def _drain(self, drained_ms: int) -> None:
        worker = self.worker
        if self._holding.state == "transferring":
            return
        if self.may_part():
            self.writing = True
            worker.transfer(self.key, self.row_so_far(), self.wrote)
        elif drained_ms <= _DRAIN_DEADLINE_MS or not self._running or self._told_to_end:
            return
        elif worker.options.forced_hand_offs:
            self._told_to_end = True
            self._ends_ms = min(self._ends_ms, worker.now_ms() + worker.dice.between(*_HANDLING_MS))
        else:
            worker.machine.table.keep(self.key, worker.now_ms())
            self._drain_since_ms = None

    def may_part(self) -> bool:
        """Nothing of it runs here any more, and nothing is being written."""
        return not (self._running or self.writing)

    def wrote(self, outcome: str) -> None:
        self.writing = False
        if outcome in {"unknown", "again"}:
            # The next turn writes what stands then, with the version that stands then.
            self._committed_at_ms = 0


def committed_record(row: LeaseRow) -> int:
    watermark = row.checkpoint.watermark
    return 0 if watermark is None else watermark.sequence_number


def _ignore(_: object) -> None:
    """For what nobody waits for."""
