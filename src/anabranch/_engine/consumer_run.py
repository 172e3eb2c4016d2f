"""One run of a consumer: joins the fleet, takes leases, reads, delivers, commits, and leaves gracefully.

`start`, or the first step of an iteration, starts it in a background task. Everything runs in one task group; an
unexpected error ends the run (P7) and is raised wherever the caller waits. This module creates the parts and owns the
sessions. The parts decide; the sessions that they changed are processed once per turn of the event loop.
"""

import asyncio
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from anabranch._core.handling.batches import BatchLimits
from anabranch._core.handling.failures import SkipRecord, StopShard, last_step
from anabranch._core.handling.lanes import RecordsOneByOne
from anabranch._core.leases.lease_table import Holding
from anabranch._core.leases.machine import CommandsSeen, Held, Lost, MemberProfile
from anabranch._core.leases.plan import Drain
from anabranch._core.leases.store_calls import Description
from anabranch._core.leases.timing import LeaseTiming
from anabranch._core.monitor import RunMonitor
from anabranch._core.reading.pace import PaceLimits
from anabranch._core.reading.service_time import ServiceClock
from anabranch._core.reading.window import Unpacker
from anabranch._core.session import DeliveryMode, Session
from anabranch._core.shards.lifecycle import Start
from anabranch._core.tracker import discards
from anabranch._engine.checkpointer import Checkpointer
from anabranch._engine.clock import Alarm, Scheduler
from anabranch._engine.commands import Commands
from anabranch._engine.dead_lettering import DeadLettering
from anabranch._engine.dispatcher import Dispatcher, raise_later, report_skipped, situation_of
from anabranch._engine.drainer import Drainer
from anabranch._engine.fanout_reader import FanOutReader, Reader
from anabranch._engine.fanout_registration import FanOutPlan, FanOutRegistration
from anabranch._engine.fleet import Fleet
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions
from anabranch._engine.iteration import UNACKNOWLEDGED_MAX, Iteration, LoopProcessor, ManualIterator, RecordIterator
from anabranch._engine.polling_reader import PollingReader
from anabranch._engine.quarantine import Quarantine
from anabranch._engine.read_results import ReadResults
from anabranch._engine.shard_discovery import ShardDiscovery
from anabranch._engine.shard_reports import ShardReports
from anabranch._engine.stop_conditions import StopConditions, StopWatcher
from anabranch._engine.tasks import BackgroundTask, attach_failure, single_cause, start_in_group
from anabranch._engine.work_queue import Changes, Processor, WorkQueue
from anabranch._model.leases import AppRow, Checkpoint, ControlRow, HandOffRequest, LeaseKey
from anabranch._model.streams import Position, StreamName
from anabranch._ports import Ports
from anabranch._version import __version__
from anabranch.alerts import Alert, report_alert
from anabranch.budget import Budget
from anabranch.config import ConsumerSettings
from anabranch.errors import AnabranchError, ConsumerFailedError, ShardStoppedError, UsageError
from anabranch.events import (
    ConsumerFailed,
    ConsumerStarted,
    ConsumerStopped,
    LeaseGiven,
    LeaseLost,
    LeaseReleased,
    LeaseStoreWarning,
    LeaseTaken,
    Misrouted,
    OrderChanged,
    ShardStarted,
    ZombieCall,
)
from anabranch.measures import Counters
from anabranch.reasons import PausedByProgram, ReadsFailing, Reason, StoppedByCrashes, StoppedByHandler
from anabranch.records import Batch, Record
from anabranch.reports import ConsumerMeasures, ConsumerStatus, ShardState, StopReport

T = TypeVar("T")

TASK_NAME = "anabranch consumer"
CANCEL_GRACE_MS = 2_000
"""How long calls may take to end after the run was cancelled."""
LOOK_EVERY_MS = 1_000
PARKED_KEYS_MAX = 100
"""How many keys may wait for a retry, in addition to those with a running call (rule M1)."""
ITERATION_LIMITS = BatchLimits(max_records=500, max_bytes=1 << 20, max_wait_ms=0)


class EngineMode(NamedTuple):
    call: HandlerCall | None = None
    """None: the caller's own loop takes the records."""
    batches: BatchLimits | None = None
    """None: records are delivered one by one."""
    manual_ack: bool = False
    """Whether a loop over records acknowledges them. Otherwise, asking for the next one acknowledges the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    app: AppRow
    streams: tuple[StreamName, ...]
    start: Start
    profile: MemberProfile
    timing: LeaseTiming
    pace: PaceLimits
    fanout: FanOutPlan | None = None
    """None: the shards are polled."""
    settings: ConsumerSettings = field(default_factory=ConsumerSettings)
    stop_conditions: StopConditions = field(default_factory=StopConditions)
    until_seconds: float | None = None
    """Records that arrived at this time or later are not delivered."""
    alerts: tuple[Alert, ...] = ()
    region: str | None = None
    differing_settings: tuple[str, ...] = ()
    """Settings that are not the default, for the log."""


@dataclass(eq=False, repr=False)
class FenceWatch:
    """Cancels running calls when the fence passes, and reports those that outlive the grace period.

    It does not prevent new calls: the code that starts one checks the fence (rule L8). A later heartbeat may move the
    fence, so the timer only triggers a re-check.
    """

    _ports: Ports
    _scheduler: Scheduler
    _fleet: Fleet
    _processor: Processor
    _reported: dict[tuple[Session, Position], None] = field(default_factory=dict)
    """Calls that were reported and still run."""

    def schedule(self) -> None:
        """Sets the timer, after each acknowledged heartbeat."""
        valid_until_ms = self._fleet.valid_until_ms
        if valid_until_ms is not None:
            self._scheduler.call_at(valid_until_ms, self._on_fence)

    def _on_fence(self) -> None:
        if self._fleet.may_start() or not self._processor.running():
            return
        self._processor.interrupt()
        self._scheduler.call_at(self._ports.clock.now_ms() + self._fleet.timing.grace_ms, self._on_grace_over)

    def _on_grace_over(self) -> None:
        """Reports calls that still run: the next owner may now start the same records (rule L11)."""
        if not self._fleet.may_start():
            self.report_running()

    def on_lost(self, session: Session) -> None:
        """Another member has the lease: reports its calls here, at once in a loop, else after the grace period."""
        if self._processor.is_loop:
            self.report_running(session)
        elif any(owner is session for owner, _ in self._processor.running()):
            over_ms = self._ports.clock.now_ms() + self._fleet.timing.grace_ms
            self._scheduler.call_at(over_ms, lambda: self.report_running(session))

    def report_running(self, lost: Session | None = None) -> None:
        """Reports running calls, all or those of one session, each call once."""
        running = self._processor.running()
        self._reported = {
            call: None for session, record in running if (call := (session, record.position)) in self._reported
        }
        for session, record in running:
            call = (session, record.position)
            if call not in self._reported and (lost is None or session is lost):
                self._reported[call] = None
                self._ports.emit(self._zombie(session, record))

    def zombies(self) -> list[ZombieCall]:
        """An event for each running call, as if its lease had expired."""
        return [self._zombie(session, record) for session, record in self._processor.running()]

    def _zombie(self, session: Session, record: Record[bytes]) -> ZombieCall:
        return ZombieCall(
            **session.names,
            position=str(record.position),
            fence_token=session.row.fence_token,
            stack="".join(self._processor.stack_of(record).format()),
        )


class _LeftError(Exception):
    """The worker has left the fleet. Raised in the task group, to cancel what still runs there."""


@dataclass(eq=False, repr=False)
class ConsumerRun:
    _ports: Ports
    _plan: RunPlan
    _mode: EngineMode
    _options: HandlerOptions
    _budget: Budget
    _: KW_ONLY
    claim: Callable[["ConsumerRun"], bool] = lambda _: True
    """Called when an iteration starts the run, maybe long after its creation. False: it was stopped before."""
    sessions: dict[LeaseKey, Session] = field(default_factory=dict)
    _service_clock: ServiceClock = field(default_factory=ServiceClock)
    _counted_before: Counters = field(default_factory=Counters)
    """The counters of leases that this run no longer holds."""
    _taken_count: int = 0
    _given_count: int = 0
    _lost_count: int = 0
    _iteration: Callable[[], Iteration[Any] | None] = lambda: None
    _abandoned: tuple[Record[bytes], ...] = ()
    _is_paused: bool = False
    _stop_deadline_ms: int | None = None
    has_joined: bool = False
    _joined_ms: int = 0
    is_stopping: bool = False
    _stop_report: StopReport | None = None
    _end_reason: str | None = None
    """Why it stopped by itself; None if it did not."""
    _failure_is_seen: bool = False

    def __post_init__(self) -> None:
        self._settings = self._plan.settings
        self.scheduler = Scheduler(self._ports.clock, self._on_callback_error)
        self._group = asyncio.TaskGroup()
        self._host = BackgroundTask()
        self._stop = Alarm(self._ports.clock)
        self._start_finished = asyncio.Event()
        """Set when the worker has joined, or has failed to."""
        self._make_parts()

    def _make_parts(self) -> None:
        ports, plan, settings, scheduler = self._ports, self._plan, self._settings, self.scheduler
        fleet = self.fleet = Fleet(
            ports,
            plan.timing,
            plan.profile,
            self._group,
            stall_limit_ms=round(settings.leases.stall_limit * 1000),
            on_change=self._on_change,
            on_status=self._on_status,
            describe=self._describe,
            running_calls=self._running_calls if settings.leases.on_zombie == "exit" else None,
        )
        changes = self._changes = Changes(scheduler, self._on_session_changed)
        processor = self.processor = self._make_processor(self._mode, self._options)
        self._fence_watch = FenceWatch(ports, scheduler, fleet, processor)
        discovery = self._discovery = ShardDiscovery(ports, fleet, plan.streams, plan.start, settings)
        checkpointer = self._checkpointer = Checkpointer(ports, fleet, settings.checkpoints, processor)
        letters = self._letters = DeadLettering(ports, fleet, checkpointer, processor.queue, changes, discovery)
        self._drainer = Drainer(ports, fleet, checkpointer, processor, letters, settings.leases)
        self._commands = Commands(ports, fleet, checkpointer, letters, changes, self.sessions)
        self._registration: FanOutRegistration | None = None
        reader = self._reader = self._make_reader()
        self._quarantine = Quarantine(ports, fleet, checkpointer, processor, changes, self.sessions)
        conditions, shards_max = plan.stop_conditions, plan.profile.shards_max
        self._stop_watcher = StopWatcher(
            ports.clock, conditions, shards_max, self.sessions, fleet, discovery, reader, processor
        )
        self._reports = ShardReports(ports.emit, processor, reader, self._service_clock, letters)
        self._monitor = RunMonitor(plan.alerts, ports.clock.now_ms())

    def _make_reader(self) -> Reader:
        ports, plan, scheduler, budget, group = self._ports, self._plan, self.scheduler, self._budget, self._group
        fleet, discovery, changes = self.fleet, self._discovery, self._changes
        results = self._read_results = ReadResults(
            ports, scheduler, budget, fleet, discovery, changes, self.sessions, self._service_clock
        )
        polling = PollingReader(ports, scheduler, budget, group, discovery, results, plan.pace)
        if plan.fanout is None:
            return polling
        timeout_ms = round(self._settings.start_timeout * 1000)
        registration = self._registration = FanOutRegistration(ports, fleet, plan.fanout, timeout_ms)
        return FanOutReader(ports, scheduler, budget, group, fleet, results, registration, polling)

    def _make_processor(self, mode: EngineMode, options: HandlerOptions) -> Processor:
        ports, scheduler, changes, delivery = self._ports, self.scheduler, self._changes, self._delivery(mode, options)
        one_at_a_time = isinstance(delivery, BatchLimits) or delivery.order == "shard"
        queue = WorkQueue(ports.clock, scheduler, self.fleet, changes, one_at_a_time)
        if mode.call is None:
            iterator = RecordIterator if isinstance(delivery, BatchLimits) else ManualIterator
            return iterator(queue, delivery, ports, changes, options)
        on_error = self._on_callback_error
        return Dispatcher(queue, delivery, ports, changes, options, self.fleet, scheduler, mode.call, on_error)

    def _delivery(self, mode: EngineMode, options: HandlerOptions) -> DeliveryMode:
        checkpoints = self._settings.checkpoints
        if mode.batches is not None:
            return mode.batches
        if mode.call is not None:
            open_keys_max = options.concurrency + PARKED_KEYS_MAX
            return RecordsOneByOne(
                options.order, open_keys_max=open_keys_max, replay_bytes_max=checkpoints.replay_bytes_max
            )
        if mode.manual_ack:
            return RecordsOneByOne("none", open_keys_max=UNACKNOWLEDGED_MAX)
        # Finished records are reported per slice, so a slice is not longer than what triggers a commit.
        return replace(ITERATION_LIMITS, max_records=min(ITERATION_LIMITS.max_records, checkpoints.records))

    # starting

    async def start(self) -> None:
        """Returns when the worker has joined, or raises why it could not."""
        self._host.start(self._run(), TASK_NAME)
        try:
            await self._joined()
        except asyncio.CancelledError:
            await self.cancel()
            raise

    async def _joined(self) -> None:
        await self._start_finished.wait()
        if not self.has_joined:
            await self._host.wait()
            self._raise(self._failure())

    async def _run(self) -> None:
        """The background task."""
        try:
            await self._run_group()
        except* _LeftError:
            pass
        finally:
            self._start_finished.set()
            if self.has_joined:
                self.fleet.close()
                if self._stop_report is None and self.processor.is_loop:
                    # The caller's loop may still work on a record when others take its shard (rule L11).
                    self._fence_watch.report_running()
                self._report_failure(sys.exc_info()[1])
                self.is_stopping = True
                self.processor.queue.wake_all()
            for session in self.sessions.values():
                session.lose()  # returns the bytes to a shared budget
            if self._registration is not None and self._stop_report is None:
                await self._registration.abandon()

    def _report_failure(self, error: BaseException | None) -> None:
        """Reports the totals of a run that failed."""
        if self._stop_report is None and isinstance(error, Exception):
            cause = single_cause(error)
            unfinished_count = sum(session.lane.unfinished_count for session in self.sessions.values())
            self._emit_stopped(unfinished_count, f"{type(cause).__name__}: {cause}")

    async def _run_group(self) -> None:
        try:
            async with self._group:
                try:
                    await self._join_and_run()
                finally:
                    self.scheduler.close()  # a group that shuts down accepts no new task
                    self.processor.cancel_all()
                    self._reader.pause()
        finally:
            await self._end_runners()

    async def _end_runners(self) -> None:
        """Waits for cancelled calls. Those that ignore it continue beside the calls of the next owner (rule L11)."""
        try:
            await self.processor.end()
        finally:
            if not self.processor.is_loop:
                self._fence_watch.report_running()
                self.processor.release()

    async def _join_and_run(self) -> None:
        ports, plan, store_name = self._ports, self._plan, str(self._ports.store)
        await self.fleet.open(plan.app, store_name, may_create=self._settings.leases.create != "never")
        for warning in ports.store.warnings:
            ports.emit(LeaseStoreWarning(store=store_name, warning=warning))
        await self.fleet.check_fleet()
        await self._discovery.prepare()
        await self._letters.check(self._discovery.retention_hours)
        await self.fleet.join(tuple(self._discovery.streams))
        if self._registration is not None:
            await self._registration.start(self._discovery.streams)
        if plan.stop_conditions.is_set:
            self._discovery.list_soon()
        self.processor.start()
        create = self._group.create_task
        tasks = [
            create(self.fleet.run(), name="leases"),
            create(self._checkpointer.run(), name="checkpoints"),
            create(self._discovery.run(), name="shard discovery"),
            create(self._quarantine.run(), name="quarantine"),
            create(self._stop_by_itself(), name="stop conditions"),
            create(self._watch_run(), name="watch"),
        ]
        ports.emit(
            ConsumerStarted(
                app=plan.app.app,
                member_id=self.fleet.member_id,
                store=store_name,
                version=__version__,
                streams=tuple(stream.name for stream in plan.streams),
                region=plan.region,
                settings=plan.differing_settings,
            )
        )
        self.has_joined = True
        self._joined_ms = ports.clock.now_ms()
        self._start_finished.set()
        while self._stop_deadline_ms is None:
            await self._stop.wait()
        self._stop_report = await self._leave(tasks, self._stop_deadline_ms)
        raise _LeftError

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        start_in_group(self._group, work, name)

    def _on_callback_error(self, error: BaseException) -> None:
        """An error in a callback ends the run, as one in a task does (P7)."""
        self._spawn(raise_later(error), "callback-error")

    # iterating

    def records(self) -> Iteration[Record[Any]]:
        iterator = self.processor
        assert isinstance(iterator, RecordIterator | ManualIterator)
        return self._iterate(iterator.next_record)

    def batches(self) -> Iteration[Batch[Any]]:
        iterator = self.processor
        assert isinstance(iterator, RecordIterator)
        return self._iterate(iterator.next_batch)

    def _iterate(self, take_next: Callable[[], T | None]) -> Iteration[T]:
        iteration = Iteration(take_next, self._begin_iteration, self._is_over, self.processor.manual_ack)
        self._iteration = weakref.ref(iteration)
        return iteration

    async def _begin_iteration(self) -> bool:
        """The first step of the caller's loop. Returns False if the run was stopped before."""
        if not self._host.is_started:
            if not self.claim(self):
                return False
            self._host.start(self._run(), TASK_NAME)
        await self._joined()
        assert isinstance(self.processor, LoopProcessor)
        self.processor.begin()
        return True

    async def _is_over(self) -> bool:
        """Waits until there may be more records. Returns True if there will be none."""
        iterator = self.processor
        assert isinstance(iterator, LoopProcessor)
        if iterator.take_turn():
            await asyncio.sleep(0)
            return False
        if self.is_stopping or not self._host.is_running:
            iterator.acknowledge()
            iterator.report_finished()  # the stop waits for this record
            await self._host.wait()
            self._raise(self._bad_outcome())
            return True
        await iterator.queue.wait()
        return False

    def ack(self, records: Iterable[Record[Any]]) -> None:
        if not isinstance(self.processor, ManualIterator):
            raise UsageError('ack() needs Consumer(acknowledge="manual") and `async for`')
        for record in records:
            self.processor.ack(record)

    # ending

    async def wait(self) -> StopReport:
        await self._host.wait()
        self._raise(self._bad_outcome())
        return self._report()

    async def stop(self, deadline: float) -> StopReport:
        """Can be called from any event loop."""
        if not await self._stop_and_wait(deadline):
            return StopReport(committed=False, released=False)
        self._raise(self._failure())
        return self._report()

    async def _stop_and_wait(self, deadline: float) -> bool:
        """Returns False if a handler called it: the stop waits for that call, so it cannot wait for the stop."""
        if self._host.is_running:
            self._host.call_on_its_loop(lambda: self._begin_stop(deadline))
            if self.processor.is_calling:
                return False
            await self._host.wait()
        elif self._host.is_on_this_loop:
            self._settle_current()
        if self._host.is_on_this_loop:
            self.processor.close()
        return True

    def _begin_stop(self, deadline: float) -> None:
        self._settle_current()
        if self._host.is_running:
            self.stop_by(self._ports.clock.now_ms() + round(deadline * 1000))

    def stop_by(self, deadline_ms: int) -> None:
        """Starts a graceful stop, or makes its deadline earlier."""
        if not self.has_joined:
            self._host.cancel_soon()
        if self._stop_deadline_ms is None or deadline_ms < self._stop_deadline_ms:
            self._stop_deadline_ms, self.is_stopping = deadline_ms, True
            self._stop.ring()
            self._drainer.shorten_deadline(deadline_ms)
            for session in self.sessions.values():
                session.drain()  # at once: a handler that stops its consumer is not called again

    def stop_gracefully(self) -> None:
        """Stops within the deadline of the settings."""
        self.stop_by(self._ports.clock.now_ms() + round(self._settings.leases.drain_deadline * 1000))

    async def _stop_by_itself(self) -> None:
        reason = await self._stop_watcher.run()
        if not self.is_stopping:
            self._end_reason = reason
            self.stop_gracefully()

    async def _leave(self, tasks: list[asyncio.Task[Any]], deadline_ms: int) -> StopReport:
        """Stops reading, waits for running calls, commits, and leaves the fleet."""
        sessions = list(self.sessions.values())
        self._reader.pause()
        self.fleet.drain()
        self.processor.queue.wake_all()
        left = await self._drainer.wait(sessions, deadline_ms)
        if not self.processor.is_cancellable:
            self._fence_watch.report_running()  # they continue beside the calls of the next owner (rule L11)
        self.processor.give_up()
        self.processor.cancel_all()
        for task in tasks:
            task.cancel()
        for session in sessions:
            self._checkpointer.mark_dirty(session)
        committed = await self._drainer.write_until_accepted(self._checkpointer.commit_all, deadline_ms)
        await self._end_runners()  # before others may take the shards: cancelled calls get time to end
        released = await self._drainer.write_until_accepted(self.fleet.leave, deadline_ms)
        if self._registration is not None:
            await self._registration.remove(deadline_ms)
        stopped = [session.stopped for session in sessions if session.stopped is not None and session.state != "lost"]
        self._look()
        counters = self._counters()
        for session in sessions:
            session.lose()
        self._emit_stopped(len(left))
        return StopReport(
            tuple(left),
            committed=committed and not self._checkpointer.has_lost,
            released=released,
            stopped=tuple(stopped),
            skipped_count=counters.skipped_count,
            dead_letter_count=counters.dead_letter_count,
        )

    def _emit_stopped(self, leftover_count: int, error: str | None = None) -> None:
        counters = self._counters()
        self._ports.emit(
            ConsumerStopped(
                leftover_count=leftover_count,
                handled_count=counters.handled_count,
                committed_count=counters.committed_count,
                failed_count=counters.failed_count,
                seconds=(self._ports.clock.now_ms() - self._joined_ms) / 1000,
                error=error,
                dead_letter_count=counters.dead_letter_count,
                skipped_count=counters.skipped_count,
            )
        )

    def _settle_current(self) -> None:
        """Decides whether the record in the caller's loop is finished: yes if the loop body calls stop(), no if the
        loop was left or handles an error. In any other case the stop waits for it.
        """
        iterator, iteration = self.processor, self._iteration()
        if not isinstance(iterator, RecordIterator):
            return
        was_left = iteration is None or iteration.closed
        in_body = not was_left and iterator.is_in_body
        if in_body and sys.exception() is None:
            iterator.acknowledge()
        elif in_body or was_left:
            self._abandoned += iterator.abandon()

    async def leave(self, error: BaseException | None, deadline: float) -> None:
        """Leaves `async with Consumer`, without waiting for the record in the loop. `error` carries our own error."""
        has_unseen_failure = not self._failure_is_seen and self._bad_outcome() is not None
        if not (self._host.is_running or has_unseen_failure):
            return
        self._abandoned += self.processor.abandon()
        await self._stop_and_wait(deadline)
        if error is None:
            self._raise(self._bad_outcome())
        else:
            self._attach_failure(error)

    async def stop_after_cancel(self, cancelled: asyncio.CancelledError) -> None:
        """The waiting task was cancelled: cancels calls, commits, frees the leases. Cancelled again, ends at once."""
        try:
            if self._host.is_running and self.has_joined:
                self.stop_by(self._ports.clock.now_ms() + CANCEL_GRACE_MS)
                self.processor.interrupt()
                await self._host.wait()
        finally:
            await self.cancel()
        self._attach_failure(cancelled)

    async def cancel(self) -> None:
        """Ends at once, without a commit. Does not wait for calls that cannot be cancelled."""
        self.processor.give_up()
        await self._host.cancel()
        self.processor.close()

    def close(self) -> None:
        self.processor.close()

    # its outcome

    @property
    def is_running(self) -> bool:
        return self._host.is_running

    def _report(self) -> StopReport:
        report = self._stop_report or StopReport()
        return replace(report, leftovers=(*report.leftovers, *self._abandoned))

    def _raise(self, error: AnabranchError | None) -> None:
        if error is not None:
            self._failure_is_seen = True
            raise error

    def _failure(self) -> AnabranchError | None:
        error = self._host.error
        if error is None or isinstance(error, AnabranchError):
            return error
        failure = ConsumerFailedError(f"the consumer failed with an unexpected {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _bad_outcome(self) -> AnabranchError | None:
        """The failure, or the error of a run that ended by itself with a stopped shard (rule D12)."""
        failure, report = self._failure(), self._report()
        if failure is not None or self._end_reason is None or not report.stopped:
            return failure
        first, *others = report.stopped
        more = f" ({len(others)} more in error.report.stopped)" if others else ""
        stopped = ShardStoppedError(
            f"the run ended because {self._end_reason}, but not all records were handled: {first}{more}. Fix the "
            "cause and start again: a new run retries the record",
            report=report,
        )
        stopped.__cause__ = first.error
        return stopped

    def _attach_failure(self, error: BaseException) -> None:
        """Another error is raised: it must not hide ours (P7). An event says it, too: notes are easily missed."""
        failure = self._bad_outcome()
        if failure is None or self._failure_is_seen:
            return
        self._failure_is_seen = True
        self._ports.emit(ConsumerFailed(error=f"{type(failure).__name__}: {failure}", leaving=type(error).__name__))
        attach_failure(failure, error)

    # leases: a change takes effect in the step in which `Fleet` learns of it

    def _on_change(self, change: Held | Lost | Drain | CommandsSeen) -> None:
        match change:
            case Held():
                self._on_held(change.holding)
            case Lost():
                self._on_lost(change)
            case Drain():
                self._on_hand_off_requested(change.request)
            case CommandsSeen():
                for command in self._commands.due(change.commands):
                    self._spawn(self._apply(command), f"command {command.command_id}")

    def _on_held(self, holding: Holding) -> None:
        session = self._add_session(holding)
        self._taken_count += 1
        self._ports.emit(LeaseTaken(**session.names, fence_token=holding.row.fence_token))
        self._begin_session(session)

    def _add_session(self, holding: Holding) -> Session:
        settings, row = self._settings, holding.row
        stream = self._discovery.streams.get(row.key.stream_key)
        assert stream is not None, f"holds a lease of a stream that it does not read: {row.key}"
        unpacker = Unpacker(
            stream.name.name,
            row.key.shard_id,
            row.hash_key_range if stream.is_placed_by_key else None,
            settings.polling.misrouted,
            until_seconds=self._plan.until_seconds,
        )
        mode, budget, service_clock = self.processor.mode, self._budget, self._service_clock
        session = Session(holding, stream.name, unpacker, mode, budget, stream.horizon, service_clock)
        self.sessions[row.key] = session
        return session

    def _begin_session(self, session: Session) -> None:
        row = session.row
        before, now = row.checkpoint, session.lane.order
        if before.order != now and before != Checkpoint(seen_through_seconds=before.seen_through_seconds):
            repeats = discards(before, now)
            self._ports.emit(OrderChanged(**session.names, before=before.order, now=now, repeats=repeats))
        self._quarantine.add(session)
        if self._quarantine.has_given_up_on(session):
            session.stop(StoppedByCrashes(owner_count=row.takes_without_progress - 1))
            self._changes.finished(session)
            return
        if row.stopped is not None and not self.fleet.retries_stopped(row):
            session.stay_stopped(row.stopped)  # only a process that starts after the stop tries again (rule D4)
            self._stop_watcher.notify()
            return
        if self.is_stopping:
            session.drain()
        retried = None if row.stopped is None else str(row.stopped.position or "unknown")
        position = str(row.checkpoint.watermark or row.start.type)
        self._ports.emit(ShardStarted(**session.names, position=position, retried=retried))
        self._reader.add(session)
        self.processor.queue.offer(session)

    async def _apply(self, command: ControlRow) -> None:
        outcome = await self._commands.apply(command)
        if outcome is not None and outcome.row is not None:
            session = self.sessions[outcome.row.key]
            self._end_session(session)
            self._begin_session(self._add_session(session.holding))
        await self._commands.answer(command, outcome)

    def _end_session(self, session: Session, *, finished: bool = False) -> None:
        del self.sessions[session.key]
        self._quarantine.remove(session)
        session.lose(finished=finished)
        for event in self._monitor.on_gone(session, self._ports.clock.now_ms()):
            self._ports.emit(event)
        self._read_results.forget(session)
        self._counted_before = self._counted_before.plus(session.counted)
        self._reader.remove(session)
        self.processor.revoke(session)
        self._checkpointer.forget(session)
        self._drainer.notify()

    def _on_lost(self, lost: Lost) -> None:
        session = self.sessions[lost.key]
        if lost.by_own_write:
            session.committed(session.lane.finished_count)
        else:
            self._fence_watch.on_lost(session)
        self._end_session(session, finished=lost.reason == "finished")
        match lost.reason:
            case "finished":
                pass  # the part that wrote the finish reports it
            case "given":
                assert lost.owner is not None, "the member that asked for it"
                self._given_count += 1
                self._ports.emit(LeaseGiven(**session.names, to_member=lost.owner))
            case "released":
                self._ports.emit(LeaseReleased(**session.names))
            case _:
                self._lost_count += 1
                self._ports.emit(LeaseLost(**session.names, reason=lost.reason, owner=lost.owner))

    def _on_hand_off_requested(self, request: HandOffRequest) -> None:
        session = self.sessions.get(request.key)
        if session is not None:
            session.drain()
            self._spawn(self._hand_off(session, request), f"hand off {session.shard_id}")

    async def _hand_off(self, session: Session, request: HandOffRequest) -> None:
        if not await self._drainer.give(session, request):
            self.processor.queue.offer(session)
            self._reader.wake(session)

    def _on_status(self) -> None:
        """A heartbeat was acknowledged: the fence may have moved, and others may have asked for leases."""
        self.processor.queue.wake_all()
        if self.fleet.needs_round:
            self.fleet.wake()
        self._fence_watch.schedule()

    # sessions

    def _on_session_changed(self, session: Session, has_work: bool) -> None:  # noqa: FBT001 -- two kinds of changes
        """Records arrived or finished, or a call ended: checks once for everything that may follow."""
        self._drainer.notify()
        self._quarantine.notify()
        if not session.is_live:
            return
        delivered_count, skipped_count = session.unpacker.take_counts()
        if delivered_count or skipped_count:
            self._ports.emit(
                Misrouted(**session.names, delivered_count=delivered_count, skipped_aggregate_count=skipped_count)
            )
        if has_work:
            self.processor.queue.offer(session)
        if session.take_room():
            self._reader.wake(session)
        if session.skipped:
            report_skipped(self._ports, session)
        for letter in session.take_letters():
            self._spawn(self._letters.write(session, letter), f"letter {session.shard_id}")
        self._checkpointer.mark_dirty(session)
        if self._settings.at_shard_end == "finish" and session.state == "ended":
            self._give_up_failing(session)
        if session.begin_stop():
            self._spawn(self._stop_shard(session), f"stop {session.shard_id}")
        elif session.close():
            self._spawn(self._discovery.finish(session, self._checkpointer), f"finish {session.shard_id}")

    def _give_up_failing(self, session: Session) -> None:
        """The shard has ended, and its children wait only for records that wait for a retry (rule M4)."""
        if (failing := session.only_failing) is None:
            return
        record, attempts = failing
        stop = StoppedByHandler(
            position=str(record.position),
            partition_key=record.partition_key,
            attempts=attempts,
            error=None,
            at_shard_end=True,
        )
        decision = last_step(self._options.policy, stop, situation_of(self._ports, session))
        if isinstance(decision, StopShard):
            session.stop(decision.reason, record)
        elif (waiting := session.take_waiting(record.position)) is not None:
            work, failure = waiting
            if isinstance(decision, SkipRecord):
                session.skip(work)
                report_skipped(self._ports, session)
            else:
                assert failure is not None, "it failed here"
                session.dead_letter(work, failure, attempts)
            self._changes.finished(session)

    async def _stop_shard(self, session: Session) -> None:
        await self._drainer.stop_shard(session)
        self._stop_watcher.notify()

    # this process

    def status(self) -> ConsumerStatus:
        return ConsumerStatus(
            app=self._plan.app.app,
            member_id=self.fleet.member_id if self.has_joined else None,
            fenced=not (self.has_joined and self.fleet.may_start()),
            paused=self._is_paused,
            shards=self._shard_states(),
            budget_used_bytes=self._budget.used_bytes,
            budget_limit_bytes=self._budget.limit_bytes,
        )

    def _shard_states(self) -> tuple[ShardState, ...]:
        clock, sessions = self._ports.clock, tuple(self.sessions.values())
        return self._reports.states(sessions, clock.now_ms(), self._blocked_reason, wall_ms=clock.wall_ms())

    def _counters(self) -> Counters:
        """The counters of all shards since the run began."""
        counters = self._counted_before
        for session in self.sessions.values():
            counters = counters.plus(session.counted)
        return counters

    @property
    def restart_reason(self) -> str | None:
        """Why this process should be restarted (rule O2); None if it should not. Asked from any thread."""
        if self.is_running:
            return self.fleet.restart_reason
        return None if self._failure() is None or not self.has_joined else f"the consumer failed: {self._failure()}"

    def unready_reasons(self) -> tuple[str, ...]:
        """Why this worker is not ready, or does not handle one of its shards; empty if all is well."""
        if not self.has_joined:
            return ("it has not joined its application yet",)
        if self.is_stopping:
            return ("it is stopping",)
        blocked = self.fleet.blocked_reason
        reasons = [] if blocked is None else [str(blocked)]
        if not self._read_results.is_healthy:
            reasons.append("no read has succeeded for a minute")
        for session in self.sessions.values():
            reason = session.reason if session.stopped is None else session.stopped.reason
            if session.stopped is not None or isinstance(reason, ReadsFailing):
                reasons.append(f"{session.stream.name}/{session.shard_id}: {reason}")
        return tuple(reasons)

    def measures(self) -> ConsumerMeasures:
        """The counters so far, and the current state."""
        fleet = self.fleet
        return ConsumerMeasures(
            app=self._plan.app.app,
            counters=self._counters(),
            shards=self._shard_states(),
            budget_used_bytes=self._budget.used_bytes,
            budget_limit_bytes=self._budget.limit_bytes,
            lease_taken_count=self._taken_count,
            hand_off_count=self._given_count,
            lease_lost_count=self._lost_count,
            store_calls=fleet.store.calls.plus(fleet.heartbeat_store.calls),
            store_failure_count=fleet.store.failure_count + fleet.heartbeat_store.failure_count,
            store_throttle_count=fleet.store.throttle_count + fleet.heartbeat_store.throttle_count,
            dead_letter_age=self._letters.seconds_since_last_letter,
            loop_lags=fleet.loop_lags.copy(),
        )

    async def _watch_run(self) -> None:
        clock = self._ports.clock
        while True:
            await clock.sleep_until_ms(clock.now_ms() + LOOK_EVERY_MS)
            self._look()

    def _look(self) -> None:
        """Emits what the monitor reports. It rarely needs the measures of all shards, which cost more."""
        now_ms, monitor, fleet, emit = self._ports.clock.now_ms(), self._monitor, self.fleet, self._ports.emit
        service_seconds = self._service_clock.seconds(now_ms)
        for shard_progress in monitor.look_at_sessions(self.sessions.values(), service_seconds, now_ms):
            emit(shard_progress)
        failure_count = fleet.store.failure_count + fleet.heartbeat_store.failure_count
        for event in monitor.look_at_store(failure_count, fleet.store_trouble, now_ms):
            emit(event)
        if monitor.wants_measures(now_ms):
            measures = self.measures()
            for progress in monitor.look(measures, now_ms):
                emit(progress)
            for alert, event in monitor.look_at_alerts(measures, now_ms):
                report_alert(emit, alert, event)

    def _describe(self) -> Description:
        shards = self._reports.report(self.sessions.values(), self._ports.clock.now_ms(), self._blocked_reason)
        return Description(self._read_results.is_healthy, shards)

    def _running_calls(self) -> list[ZombieCall]:
        return self._fence_watch.zombies()

    @property
    def _blocked_reason(self) -> Reason | None:
        """What blocks all shards."""
        if not self.has_joined:
            return None
        return self.fleet.blocked_reason or (PausedByProgram() if self._is_paused else None)

    def pause(self) -> None:
        self._is_paused = True
        self._reader.pause()

    def resume(self) -> None:
        self._is_paused = False
        if not self.is_stopping:
            self._reader.resume()
