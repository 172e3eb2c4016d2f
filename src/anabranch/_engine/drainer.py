"""Ends handling gracefully: of one shard that stops or is given away, or of all shards when the worker stops.

No more records start, running calls end, and finished records are committed. A hand-off that does not drain in time is
declined; with `hand_off="force"` its calls are cancelled instead. A lease is never given away while a call for its
shard runs (rule L12).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from anabranch._core.session import Session
from anabranch._engine.checkpointer import Checkpointer
from anabranch._engine.clock import Alarm
from anabranch._engine.dead_lettering import DeadLettering
from anabranch._engine.fleet import Fleet
from anabranch._engine.work_queue import Processor
from anabranch._model.leases import HandOffRequest
from anabranch._ports import Ports
from anabranch.config import LeaseSettings
from anabranch.events import HandOffForced, HandOffKept, ShardStopped
from anabranch.reasons import CallsOutliveHandOff
from anabranch.records import Record

RETRY_MS = 1_000
FINAL_WRITE_MS = 10_000
FINAL_WRITE_PAUSE_MS = 200


@dataclass(eq=False, repr=False)
class Drainer:
    _ports: Ports
    _fleet: Fleet
    _checkpointer: Checkpointer
    _processor: Processor
    _letters: DeadLettering
    _settings: LeaseSettings
    _alarms: dict[Alarm, None] = field(default_factory=dict)
    _latest_ms: int | None = None

    def __post_init__(self) -> None:
        self._deadline_ms = round(self._settings.drain_deadline * 1000)

    def notify(self) -> None:
        """A call has ended."""
        for alarm in self._alarms:
            alarm.ring()

    def shorten_deadline(self, deadline_ms: int) -> None:
        """Ends all waits at this time at the latest."""
        self._latest_ms = deadline_ms
        self.notify()

    def still_running(self, sessions: Sequence[Session]) -> list[Record[bytes]]:
        running = (*self._processor.running(), *self._letters.records_in_progress())
        return [record for session, record in running if session in sessions]

    async def wait(self, sessions: Sequence[Session], deadline_ms: int) -> list[Record[bytes]]:
        """Starts no more records of these sessions, waits for running calls, returns those left at the deadline."""
        for session in sessions:
            session.drain()
        alarm = Alarm(self._ports.clock)
        self._alarms[alarm] = None
        try:
            while left := self.still_running(sessions):
                until_ms = deadline_ms if self._latest_ms is None else min(deadline_ms, self._latest_ms)
                if self._ports.clock.now_ms() >= until_ms:
                    break
                await alarm.wait(until_ms)
        finally:
            del self._alarms[alarm]
        return left

    async def write_until_accepted(self, write: Callable[[], Awaitable[bool]], deadline_ms: int) -> bool:
        """Repeats a write until it is accepted or the time is up: a lost response must not cost the last commit."""
        give_up_ms = min(deadline_ms, self._ports.clock.now_ms() + FINAL_WRITE_MS)
        while not await write():
            pause_until_ms = self._ports.clock.now_ms() + FINAL_WRITE_PAUSE_MS
            if pause_until_ms >= min(give_up_ms, self._latest_ms or give_up_ms):
                return False
            await self._ports.clock.sleep_until_ms(pause_until_ms)
        return True

    # one shard

    async def stop_shard(self, session: Session) -> None:
        """Waits for running calls, commits and frees the buffers, but keeps the lease (rule D4)."""
        clock = self._ports.clock
        await self.wait([session], clock.now_ms() + self._deadline_ms)
        stopped = session.plan_stop(self._fleet.member_id, clock.wall_ms())
        committed_count: int | None = None
        while session.state == "stopping":
            self._processor.report_finished()
            finished_count = session.lane.finished_count
            if finished_count == committed_count and not self.still_running([session]):
                session.confirm_stop()
                return
            if finished_count != committed_count and await self._checkpointer.write(session) == "written":
                if committed_count is None and session.state == "stopping":
                    session.report(stopped.reason)
                    event = ShardStopped(
                        **session.names,
                        reason=stopped.reason,
                        position=None if stopped.position is None else str(stopped.position),
                        partition_key=stopped.partition_key,
                        exception=None if session.stopped is None else session.stopped.error,
                    )
                    self._ports.emit(event)
                committed_count = finished_count
                continue
            # The store is unreachable, or a call outlasts the deadline: what that finishes must be committed too.
            await clock.sleep_until_ms(clock.now_ms() + RETRY_MS)

    async def give(self, session: Session, request: HandOffRequest) -> bool:
        """Gives the lease to the member that asked for it. Returns False if the shard stays here."""
        clock = self._ports.clock
        left = await self.wait([session], clock.now_ms() + self._deadline_ms)
        if left and self._settings.hand_off == "force":
            left = await self._end_calls(session, request, len(left))
        if self._fleet.is_draining:
            return True  # the worker is stopping, and frees its leases when it leaves
        if self._is_still_requested(session, request) and (left or not self._fleet.is_live(request.requester)):
            self._fleet.keep(request.key)
            session.keep()
            if left:
                self._ports.emit(HandOffKept(**session.names, running_count=len(left)))
            return False
        self._processor.report_finished()
        async with self._checkpointer.lock(session):
            if self._is_still_requested(session, request):
                final, _ = self._checkpointer.plan(session, transferring=True)
                if await self._fleet.transfer(request.key, final) == "unknown":
                    self._checkpointer.mark_dirty(session)  # the next commit repeats the write
                self._fleet.wake()
        if session.state in {"failed", "stopping", "stopped"}:
            self._fleet.keep(request.key)  # its owner must know that it stopped, so it stays here (rule D4)
        return True

    async def _end_calls(self, session: Session, request: HandOffRequest, count: int) -> list[Record[bytes]]:
        """Cancels the calls of this shard and waits for them while the requester waits; returns those left."""
        clock = self._ports.clock
        self._ports.emit(HandOffForced(**session.names, running_count=count, to_member=request.requester))
        session.report(CallsOutliveHandOff(to_member=request.requester, call_count=count))
        self._processor.interrupt(session)
        while left := await self.wait([session], clock.now_ms() + RETRY_MS):
            wanted = self._is_still_requested(session, request) and self._fleet.is_live(request.requester)
            if self._fleet.is_draining or not wanted:
                break
        return left

    def _is_still_requested(self, session: Session, request: HandOffRequest) -> bool:
        holding = session.holding
        is_live = session.is_live and session.stopped is None
        return is_live and holding.state == "draining" and holding.request == request
