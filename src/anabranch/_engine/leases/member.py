"""This process in the fleet: one life after another, each with a heart of its own.

A member that the store has sealed never comes back; the process registers as a new one. The identity is the worker's
name and 128 random bits, so that two processes, a fork or a restart can never pass for each other (rule L1).
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from anabranch._core.leases.heartbeat import HeartbeatState, HeartbeatStatus
from anabranch._core.leases.timing import Ending, LeaseTiming
from anabranch._engine.leases.admission import be_admitted, seal_namesakes
from anabranch._engine.leases.forks import end_in_forks
from anabranch._engine.leases.heart_thread import HeartThread
from anabranch._engine.leases.heartbeat import Heartbeat
from anabranch._engine.leases.store_calls import tell_unanswered
from anabranch._engine.leases.zombie_guard import ZombieGuard
from anabranch._engine.ports import Ports
from anabranch._model.leases import HandOffRequest, HeartbeatWrite, MemberRow, ShardStatus
from anabranch.errors import FleetMismatchError, LeaseStoreError
from anabranch.events import Event

__all__ = ["Member", "MemberProfile"]


TICK_MS = 500
NO_LIMIT_MS = 1 << 62


class MemberProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What every life of this process says of itself."""

    worker_id: str
    fingerprint: str
    shards_max: int | None = None
    any_order: bool = False
    """Joins workers of another order, too (rule U2)."""
    is_exclusive: bool = False
    """Nobody else has this worker id, so that an earlier member of it is over (rule L17)."""


class Member:
    def __init__(
        self,
        ports: Ports,
        timing: LeaseTiming,
        profile: MemberProfile,
        group: asyncio.TaskGroup,
        *,
        stall_limit_ms: int,
    ) -> None:
        self.timing = timing
        self._ports = ports
        self._clock = ports.clock
        self._profile = profile
        self._group = group
        self._heart: HeartbeatState = HeartbeatState("", timing)
        self._heartbeat: Heartbeat | None = None
        self._thread: HeartThread | None = None
        self._stall_limit_ms = stall_limit_ms
        self._task: asyncio.Task[None] | None = None
        self._beat = HeartbeatWrite(member_id="", attempt=0)
        self._loop: asyncio.AbstractEventLoop
        self.row = self._new_row("")
        """As it was registered; what changes with heartbeats is in the status."""
        self.on_status: Callable[[], None] = lambda: None
        """Called after each answer: the fence may have moved, and requests may have come."""
        self.zombies: Callable[[], Sequence[Event]] | None = None
        """The calls that run now, asked on the heart's thread; None: they do not end the process (on_zombie)."""

    @property
    def member_id(self) -> str:
        return self._heart.member_id

    @property
    def shards_max(self) -> int | None:
        return self._profile.shards_max

    @property
    def any_order(self) -> bool:
        return self._profile.any_order

    @property
    def heartbeat_status(self) -> HeartbeatStatus:
        return self._heart.status

    def may_start(self, before_ms: int = NO_LIMIT_MS) -> bool:
        """Whether this member may start handler calls at this moment (rule L8): asked in the step that starts one. With
        `before_ms`, only before that time: one look at the clock for both.
        """
        clock = self._clock
        now_ms = clock.now_ms()
        return now_ms < before_ms and self._heart.status.fence.may_start(now_ms, clock.wall_ms())

    def _new_row(self, member_id: str) -> MemberRow:
        profile = self._profile
        return MemberRow(
            member_id=member_id,
            worker_id=profile.worker_id,
            expiry_ms=self.timing.expiry_ms,
            fingerprint=profile.fingerprint,
            shards_max=profile.shards_max,
            joined_wall_ms=self._clock.wall_ms(),
        )

    async def look_around(self) -> None:
        """Before anything else is written: raises if this worker is not of one mind with a fleet that is there."""
        if self._profile.is_exclusive:
            await seal_namesakes(self._ports, self._profile.worker_id, self.timing)
        await be_admitted(self._ports, self.row, self.timing, any_order=self.any_order)

    async def join(self) -> None:
        """Registers a new life, looks whether it may stay, and starts its heart. Retried until the store answers."""
        ports = self._ports
        end_in_forks(self)
        self._loop = asyncio.get_running_loop()
        self._stop_heart()
        member_id = f"{self._profile.worker_id}#{ports.entropy.getrandbits(128):032x}"
        self._heart = HeartbeatState(member_id, self.timing)
        self._beat = HeartbeatWrite(member_id=member_id, attempt=0)
        self._heartbeat = Heartbeat(
            self._heart,
            ports.store,
            ports.clock,
            report=self._next_beat,
            on_status=self._publish,
        )
        self.row = self._new_row(member_id)
        failures = 0
        while True:
            try:
                await self._heartbeat.register(self.row)
                break
            except (LeaseStoreError, TimeoutError) as error:
                failures += 1
                tell_unanswered(ports, error, failures)
                await ports.clock.sleep_until_ms(ports.clock.now_ms() + self.timing.call_deadline_ms)
        try:
            # Before the first heartbeat, which confirms it.
            await be_admitted(ports, self.row, self.timing, any_order=self.any_order)
        except FleetMismatchError:
            await self.leave()
            raise
        if ports.heart_on_thread:
            self._thread = HeartThread(ports.clock, self._stall_limit_ms, ports.emit)
            self._thread.start(self._heartbeat, self._guard())
            self._task = self._group.create_task(self._tick(self._thread), name="loop watch")
        else:
            self._task = self._group.create_task(self._heartbeat.run(), name="heartbeat")

    def _guard(self) -> ZombieGuard | None:
        if self.zombies is None:
            return None
        return ZombieGuard(self._heart, self._ports.clock, self.zombies, self._ports.emit)

    async def _tick(self, thread: HeartThread) -> None:
        while True:
            thread.tick()
            if thread.failure is not None:
                raise thread.failure
            await self._ports.clock.sleep_until_ms(self._ports.clock.now_ms() + TICK_MS)

    def _next_beat(self) -> HeartbeatWrite | None:
        """Called by the heart, perhaps on its own thread: the report is one reference."""
        return None if self._thread is not None and self._thread.is_stalled else self._beat

    def _publish(self, status: HeartbeatStatus) -> None:  # noqa: ARG002 -- it is read where it is needed
        if not self._ports.heart_on_thread:
            self.on_status()
            return
        with contextlib.suppress(RuntimeError):  # the main loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self.on_status)

    def _stop_heart(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def report(
        self,
        *,
        load: int,
        lease_version: int,
        answered: tuple[HandOffRequest, ...],
        reads_healthy: bool = True,
        draining: bool = False,
        status: tuple[ShardStatus, ...] = (),
    ) -> None:
        """What the next heartbeat says; it goes at once where others wait for it."""
        before = self._beat
        self._beat = HeartbeatWrite(
            member_id=self.member_id,
            attempt=0,
            load=load,
            lease_version=lease_version,
            answered=answered,
            reads_healthy=reads_healthy,
            draining=draining,
            status=status,
        )
        waited_for = before.lease_version != lease_version or before.answered != answered or before.draining != draining
        if waited_for and self._thread is not None:
            self._thread.wake()
        elif waited_for and self._heartbeat is not None:
            self._heartbeat.wake()

    def end(self, ending: Ending) -> None:
        self._heart.end(ending)

    def on_fork(self) -> None:
        """In a forked child: the parent goes on as this member, and the child is none."""
        self._heart.end("forked")
        self._thread = None  # a thread of the parent

    def close(self) -> None:
        """Beats no more, without a word to the store: others will notice."""
        self._stop_heart()

    async def leave(self) -> bool:
        """One write frees all leases of this member; False if the store gave no answer."""
        self._stop_heart()
        self._heart.end("left")
        try:
            async with asyncio.timeout(self.timing.call_deadline_ms / 1000):
                await self._ports.store.leave(self.member_id)
        except (LeaseStoreError, TimeoutError):
            return False
        return True
