"""One worker of an application: joins the fleet, takes leases, reads, delivers, commits, and leaves gracefully.

Everything runs in one task group; an unexpected error in it ends the worker with that cause (P7). This module creates
and connects the parts and owns the sessions. The parts decide.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from anabranch._core.leases.lease_table import Holding
from anabranch._core.leases.machine import HandOffRequested, Held, Lost, MemberProfile
from anabranch._core.leases.store_calls import Description
from anabranch._core.leases.timing import LeaseTiming
from anabranch._core.reading.pace import Pace, PaceLimits
from anabranch._core.reading.window import Unpacker
from anabranch._core.tracker import discards
from anabranch._engine.checkpointer import Checkpointer, Drainer
from anabranch._engine.clock import Alarm, Scheduler
from anabranch._engine.handler_calls import UndecodableError, failed_attempt
from anabranch._engine.handover import ShardHandover
from anabranch._engine.leases.fleet import Fleet
from anabranch._engine.poller import Poller
from anabranch._engine.ports import Ports
from anabranch._engine.quarantine import Quarantine
from anabranch._engine.runners import RunnerTasks, raise_later
from anabranch._engine.session import Session
from anabranch._engine.shard_discovery import ShardDiscovery, Start
from anabranch._engine.shard_reports import ShardReports
from anabranch._engine.sinks import Sink
from anabranch._engine.stop_conditions import StopConditions, StopWatcher
from anabranch._engine.tasks import start_in_group
from anabranch._model.leases import AppRow, Checkpoint, HandOffRequest, LeaseKey
from anabranch._model.streams import Position, StreamName
from anabranch.budget import Budget
from anabranch.config import ConsumerSettings
from anabranch.events import (
    ConsumerStarted,
    ConsumerStopped,
    LeaseGiven,
    LeaseLost,
    LeaseReleased,
    LeaseTaken,
    Misrouted,
    OrderChanged,
    ShardStarted,
    ZombieCall,
)
from anabranch.records import Record
from anabranch.reports import ConsumerStatus, StoppedShard, StopReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    app: AppRow
    streams: tuple[StreamName, ...]
    start: Start
    profile: MemberProfile
    timing: LeaseTiming
    pace: PaceLimits
    settings: ConsumerSettings = field(default_factory=ConsumerSettings)
    store_name: str = "memory"
    stop_conditions: StopConditions = field(default_factory=StopConditions)
    until_seconds: float | None = None
    """Records that arrived at this time or later are not delivered."""


class FenceWatch:
    """Cancels running calls when the fence passes, and reports those that outlive the grace period.

    It does not keep calls from starting: whoever starts one checks the fence (rule L8). A later heartbeat may move the
    fence, so the timer only triggers a re-check.
    """

    def __init__(self, ports: Ports, scheduler: Scheduler, fleet: Fleet, sink: Sink) -> None:
        self._ports = ports
        self._scheduler = scheduler
        self._fleet = fleet
        self._sink = sink
        self._reported: dict[tuple[Session, Position], None] = {}
        """Calls that were reported and still run."""

    def schedule(self) -> None:
        """Sets the timer, after each acknowledged heartbeat."""
        valid_until_ms = self._fleet.valid_until_ms
        if valid_until_ms is not None:
            self._scheduler.call_at(valid_until_ms, self._on_fence)

    def _on_fence(self) -> None:
        if self._fleet.may_start() or not self._sink.running():
            return
        self._sink.interrupt()
        self._scheduler.call_at(self._ports.clock.now_ms() + self._fleet.timing.grace_ms, self._on_grace_over)

    def _on_grace_over(self) -> None:
        """Calls that still run may overlap those of the next owner (rule L11)."""
        if not self._fleet.may_start():
            self.report_running()

    def on_lost(self, session: Session) -> None:
        """Another member has the lease. Handler calls are cancelled, and reported if they outlive the grace period. The
        caller's own loop cannot be cancelled and is reported at once.
        """
        if self._sink.runner_count == 0:
            self.report_running(session)
        elif any(owner is session for owner, _ in self._sink.running()):
            over_ms = self._ports.clock.now_ms() + self._fleet.timing.grace_ms
            self._scheduler.call_at(over_ms, lambda: self.report_running(session))

    def report_running(self, lost: Session | None = None) -> None:
        """Reports running calls, all or those of one session, each call once."""
        running = self._sink.running()
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
        return [self._zombie(session, record) for session, record in self._sink.running()]

    def _zombie(self, session: Session, record: Record[bytes]) -> ZombieCall:
        return ZombieCall(
            stream=session.stream.name,
            shard_id=session.shard_id,
            position=str(record.position),
            fence_token=session.row.fence_token,
            stack="".join(self._sink.stack_of(record).format()),
        )


Work = Coroutine[Any, Any, None]
SinkMaker = Callable[["Worker"], Sink]


class _LeftError(Exception):
    """The worker has left the fleet: cancels what still runs in its task group."""


class Worker:
    def __init__(self, ports: Ports, plan: WorkerPlan, budget: Budget) -> None:
        self._ports = ports
        self._plan = plan
        self.budget = budget
        self.scheduler = Scheduler(ports.clock, self._on_callback_error)
        self.sessions: dict[LeaseKey, Session] = {}
        self._reports = ShardReports(ports.emit)
        self._sink: Sink
        self.fleet: Fleet
        self._discovery: ShardDiscovery
        self._poller: Poller
        self._checkpointer: Checkpointer
        self._drainer: Drainer
        self._handover: ShardHandover
        self._quarantine: Quarantine
        self._stop_watcher: StopWatcher
        self.fence_watch: FenceWatch
        self._group: asyncio.TaskGroup
        self._task: asyncio.Task[Any] | None = None
        self._runners = RunnerTasks(ports.clock, self._on_callback_error)
        self._stop = Alarm(ports.clock)
        self._stop_deadline_ms: int | None = None
        self.is_stopping = False
        self._paused = False
        self.on_leaving: Callable[[], None] = lambda: None
        """Called when the worker stops waiting for running calls."""
        self.has_joined = False
        self.start_finished = asyncio.Event()
        """Set when the worker has joined, or has failed to."""
        self.report: StopReport | None = None
        self.end_reason: str | None = None
        """Why it stopped by itself; None if it did not."""

    # start and stop

    async def run(self, make_sink: SinkMaker) -> None:
        self._task = asyncio.current_task()
        try:
            await self._run(make_sink)
        except* _LeftError:
            pass
        finally:
            self.start_finished.set()
            self.scheduler.close()
            if self.has_joined:
                self.fleet.close()
                if self.report is None and self._sink.runner_count == 0:
                    # The caller's loop may still work on a record when others take its shard (rule L11).
                    self.fence_watch.report_running()
                self.is_stopping = True
                self._sink.ready.wake_all()
            for session in self.sessions.values():
                self._end(session)  # returns the bytes to a shared budget

    async def _run(self, make_sink: SinkMaker) -> None:
        async with self._runners, asyncio.TaskGroup() as group:
            self._group = group
            try:
                await self._join_and_run(group, make_sink)
            finally:
                self.scheduler.close()  # a group that shuts down accepts no new task
                self._runners.cancel_all()
                if self.has_joined:
                    self._poller.paused = True

    async def _join_and_run(self, group: asyncio.TaskGroup, make_sink: SinkMaker) -> None:
        ports, plan = self._ports, self._plan
        stall_limit_ms = round(plan.settings.leases.stall_limit * 1000)
        self.fleet = Fleet(
            ports,
            plan.timing,
            plan.profile,
            group,
            stall_limit_ms=stall_limit_ms,
            on_change=self._on_change,
            on_status=self._on_status,
            describe=self._describe,
            running_calls=self._running_calls if plan.settings.leases.on_zombie == "exit" else None,
        )
        self._sink = make_sink(self)
        self.fence_watch = FenceWatch(ports, self.scheduler, self.fleet, self._sink)
        self._drainer = Drainer(ports.clock, self._sink.running)
        self._discovery = ShardDiscovery(ports, plan.streams, plan.start, plan.settings, plan.timing)
        app = await self.fleet.open(plan.app, plan.store_name, may_create=plan.settings.leases.create != "never")
        await self.fleet.look_around()
        await self._discovery.prepare(app)
        await self.fleet.join(self._discovery.stream_keys)
        self._make_parts(group)
        self._runners.start(
            self._sink.run_one, self._sink.runner_count, on_ignored_cancel=self.fence_watch.report_running
        )
        tasks = [
            group.create_task(self.fleet.run(), name="leases"),
            group.create_task(self._checkpointer.run(), name="checkpoints"),
            group.create_task(self._discovery.run(), name="shard discovery"),
            group.create_task(self._quarantine.run(), name="quarantine"),
        ]
        ports.emit(ConsumerStarted(app=plan.app.app, member_id=self.fleet.member_id, store=plan.store_name))
        self._stop_watcher.start()
        self.has_joined = True
        self.start_finished.set()
        while self._stop_deadline_ms is None:
            await self._stop.wait()
        self.report = await self._leave(tasks, self._stop_deadline_ms)
        raise _LeftError

    def _make_parts(self, group: asyncio.TaskGroup) -> None:
        ports, plan = self._ports, self._plan
        self._discovery.attach(self.fleet)
        self._checkpointer = Checkpointer(
            ports, self.fleet, plan.settings.checkpoints, before_commit=self._sink.before_commit
        )
        self._poller = Poller(
            ports,
            self.scheduler,
            self.budget,
            group,
            self._discovery,
            on_records=self._on_records,
            on_unreadable=lambda session: self.fleet.give_unreadable(session.key),
        )
        self._poller.paused = self._paused
        self._handover = ShardHandover(
            ports, self.fleet, self._checkpointer, self._drainer, self._sink, plan.settings.leases
        )
        self._quarantine = Quarantine(ports, self.fleet, self._checkpointer, self._sink, on_failed=self.on_failed)
        drain_ms = round(plan.settings.leases.drain_deadline * 1000)
        self._stop_watcher = StopWatcher(
            ports.clock,
            self.scheduler,
            plan.stop_conditions,
            self.sessions,
            self.fleet,
            is_busy=self._is_busy,
            on_end=lambda reason: self._stop_by_itself(reason, drain_ms),
        )

    def _spawn(self, work: Work, name: str) -> None:
        start_in_group(self._group, work, name)

    def _on_callback_error(self, error: BaseException) -> None:
        """An error in a callback ends the worker, as one in a task does (P7)."""
        self._spawn(raise_later(error), "callback-error")

    def stop(self, deadline_ms: int) -> None:
        """Stops the worker gracefully. The result is in `report`."""
        if not self.has_joined and self._task is not None:
            self._task.cancel()
        if self._stop_deadline_ms is None or deadline_ms < self._stop_deadline_ms:
            self._stop_deadline_ms, self.is_stopping = deadline_ms, True
            self._stop.ring()
            if self.has_joined:
                self._drainer.shorten_deadline(deadline_ms)
            for session in self.sessions.values():
                session.is_draining = True  # at once: a handler that stops its consumer is not called again

    def _stop_by_itself(self, reason: str, drain_ms: int) -> None:
        if not self.is_stopping:
            self.end_reason = reason
            self.stop(self._ports.clock.now_ms() + drain_ms)

    async def _leave(self, tasks: list[asyncio.Task[None]], deadline_ms: int) -> StopReport:
        """Stops reading, waits for running calls, commits, and leaves the fleet."""
        sessions = list(self.sessions.values())
        self._poller.paused = True
        self.fleet.drain()
        self._sink.ready.wake_all()
        left = await self._drainer.wait(sessions, deadline_ms)
        self.on_leaving()
        self._runners.cancel_all()
        for task in tasks:
            task.cancel()
        for session in sessions:
            self._checkpointer.mark_dirty(session)
        committed = await self._drainer.write_until_accepted(self._checkpointer.commit_all, deadline_ms)
        await self._runners.end()  # before others may take the shards: cancelled calls get time to end
        released = await self._drainer.write_until_accepted(self.fleet.leave, deadline_ms)
        stopped = [session.stopped for session in sessions if session.stopped is not None and session.phase != "lost"]
        for session in sessions:
            self._end(session)
        self._ports.emit(ConsumerStopped(leftover_count=len(left)))
        return StopReport(
            tuple(left),
            committed=committed and not self._checkpointer.has_lost,
            released=released,
            stopped=tuple(stopped),
        )

    # sessions

    @staticmethod
    def _end(session: Session) -> None:
        if session.phase not in {"finished", "lost"}:
            session.move("lose")
        session.empty()

    def _on_change(self, change: Held | Lost | HandOffRequested) -> None:
        match change:
            case Held():
                self._on_held(change.holding)
            case Lost():
                self._on_lost(change.key, change.reason)
            case HandOffRequested():
                self._on_hand_off_requested(change.request)

    def _on_held(self, holding: Holding) -> None:
        plan, row = self._plan, holding.row
        stream = self._discovery.stream_of(row.key)
        assert stream is not None, f"holds a lease of a stream that it does not read: {row.key}"
        unpacker = Unpacker(
            stream.name,
            row.key.shard_id,
            row.hash_key_range if self._discovery.is_placed_by_key(row.key) else None,
            plan.settings.polling.misrouted,
            until_seconds=plan.until_seconds,
        )
        pace = Pace(plan.pace, self._ports.clock.now_ms())
        session = Session(holding, stream, unpacker, pace, self.budget, self._discovery.horizon_of(row.key))
        session.lane = self._sink.make_lane(session)
        self.sessions[row.key] = session
        self._emit_for(LeaseTaken, session, fence_token=row.fence_token)
        before, now = row.checkpoint, session.lane.order
        if before.order != now and before != Checkpoint(seen_through_seconds=before.seen_through_seconds):
            self._emit_for(OrderChanged, session, before=before.order, now=now, repeats=discards(before, now))
        self._quarantine.add(session)
        if self._quarantine.has_given_up_on(session):
            reason = f"{row.takes_without_progress - 1} owners in a row died here without any progress"
            session.stopped = _stopped_shard(session, reason)
            self._spawn(self._stop_shard(session, None, reason, None), f"stop {session.shard_id}")
            return
        if row.stopped is not None and not self.fleet.retries_stopped(row):
            session.reason = row.stopped.reason
            session.stopped = _stopped_shard(session, session.reason, row.stopped.position, row.stopped.partition_key)
            session.move("stop")  # only a process that starts after the stop tries again (rule D4)
            self._stop_watcher.watch_stopped()
            return
        self._emit_for(ShardStarted, session, position=str(row.checkpoint.watermark or row.start.type))
        self._poller.add(session)
        self._sink.ready.offer(session)

    def _on_lost(self, key: LeaseKey, reason: str) -> None:
        session = self.sessions.pop(key)
        if reason not in {"finished", "given", "released"}:
            self.fence_watch.on_lost(session)
        self._quarantine.remove(session)
        if session.phase not in {"finished", "lost"}:
            session.move("finish" if reason == "finished" and session.phase == "ended" else "lose")
        self._poller.remove(session)
        self._sink.revoke(session)
        self._checkpointer.forget(session)
        session.empty()
        if reason == "given" and session.holding.request is not None:
            self._emit_for(LeaseGiven, session, to_member=session.holding.request.requester)
        elif reason == "released":
            self._emit_for(LeaseReleased, session)
        elif reason != "finished":
            self._emit_for(LeaseLost, session, reason=reason)

    def _on_hand_off_requested(self, request: HandOffRequest) -> None:
        session = self.sessions.get(request.key)
        if session is not None:
            self._spawn(self._hand_off(session, request), f"hand off {session.shard_id}")

    async def _hand_off(self, session: Session, request: HandOffRequest) -> None:
        if not await self._handover.give(session, request):
            self._sink.ready.offer(session)
            self._poller.wake(session)

    def _on_status(self) -> None:
        """A heartbeat was acknowledged: the fence may have moved, and others may have asked for leases."""
        self._sink.ready.wake_all()
        if self.fleet.needs_round:
            self.fleet.wake()
        self.fence_watch.schedule()

    # records

    def _on_records(self, session: Session) -> None:
        strays, skipped = session.unpacker.take_counts()
        if strays or skipped:
            self._emit_for(Misrouted, session, delivered_count=strays, skipped_aggregate_count=skipped)
        self._sink.ready.offer(session)
        self.on_finished(session)

    def on_finished(self, session: Session) -> None:
        """Records of this session may have finished."""
        if self._drainer.has_waiters:
            self._drainer.notify()
        self._quarantine.notify(session)
        if not session.is_live:
            return
        self._checkpointer.mark_dirty(session)
        if session.phase == "ended" and session.is_exhausted and not session.finish_in_progress:
            session.finish_in_progress = True
            self._spawn(self._discovery.finish(session, self._checkpointer), f"finish {session.shard_id}")

    def on_failed(self, session: Session, record: Record[bytes], reason: str, error: BaseException | None) -> None:
        """The retry policy gave up on a record: stops the shard there."""
        if session.stopped is None:  # reports the first of several failures
            stopped = _stopped_shard(session, reason, record.position, record.partition_key)
            session.stopped = replace(stopped, record=record, error=error)
        self._spawn(self._stop_shard(session, record, reason, error), f"stop {session.shard_id}")

    async def _stop_shard(
        self, session: Session, record: Record[bytes] | None, reason: str, error: BaseException | None
    ) -> None:
        await self._handover.stop_shard(session, record, reason, error)
        self._stop_watcher.watch_stopped()

    def on_undecodable(self, session: Session, error: UndecodableError) -> None:
        """Stops the shard at a record that does not decode, without a retry."""
        failed = failed_attempt(session, error.record, error.cause, attempt=1, retry_in_ms=None)
        self._ports.emit(failed)
        self.on_failed(session, error.record, f"its payload does not decode: {failed.error}", error.cause)

    def _is_busy(self) -> bool:
        """Whether there is work, or would be without the pause. Unacknowledged records of a manual-ack loop do not
        count.
        """
        return self._paused or any(
            not session.window.is_empty or (session.lane.unfinished_count and not self._sink.manual_ack)
            for session in self.sessions.values()
            if session.is_live
        )

    # this process

    def status(self) -> ConsumerStatus:
        return ConsumerStatus(
            app=self._plan.app.app,
            member_id=self.fleet.member_id if self.has_joined else None,
            fenced=not (self.has_joined and self.fleet.may_start()),
            paused=self._paused,
            shards=self._reports.states(tuple(self.sessions.values()), *self._stall_inputs()),
            budget_used_bytes=self.budget.used_bytes,
            budget_limit_bytes=self.budget.limit_bytes,
        )

    def _describe(self) -> Description:
        return Description(self._poller.healthy, self._reports.report(self.sessions.values(), *self._stall_inputs()))

    def _running_calls(self) -> list[ZombieCall]:
        return self.fence_watch.zombies()

    def _stall_inputs(self) -> tuple[int, str | None, Mapping[Session, str]]:
        """The time, what blocks all shards, and the shards blocked by calls that ignore their timeout."""
        now_ms = self._ports.clock.now_ms()
        if not self.has_joined:
            return now_ms, None, {}
        paused = "the worker is paused by Consumer.pause()" if self._paused else None
        return now_ms, self.fleet.blocked_reason or paused, self._sink.overdue(now_ms)

    async def wait_for_records(self) -> None:
        """Waits until an iterator should check again."""
        await self._sink.ready.wait()

    @property
    def is_called_by_handler(self) -> bool:
        return asyncio.current_task() in self._runners

    def pause(self) -> None:
        self._paused = True
        if self.has_joined:
            self._poller.paused = True

    def resume(self) -> None:
        self._paused = False
        if self.has_joined and not self.is_stopping:
            self._poller.paused = False
            for session in self.sessions.values():
                self._poller.wake(session)

    def _emit_for(self, kind: type, session: Session, **details: object) -> None:
        self._ports.emit(kind(stream=session.stream.name, shard_id=session.shard_id, **details))


def _stopped_shard(
    session: Session, reason: str, position: Position | None = None, partition_key: str | None = None
) -> StoppedShard:
    return StoppedShard(
        stream=session.stream.name,
        shard_id=session.shard_id,
        reason=reason,
        position=None if position is None else str(position),
        partition_key=partition_key,
    )
