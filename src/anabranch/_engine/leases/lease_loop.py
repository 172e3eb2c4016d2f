"""The lease protocol, performed: observe, plan, perform, apply; about once a second.

The core decides everything (`_core.leases`). This loop reads the rows, performs the steps with a deadline on
each store call, applies what came of them, and keeps the set of running sessions equal to the set of held
leases. A call without an answer is an outcome like any other.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, TypeVar

from anabranch._core.leases.admission import incompatible_members, joined_before
from anabranch._core.leases.failure_detector import FailureDetector
from anabranch._core.leases.lease_table import Holding, LeaseTable
from anabranch._core.leases.plan import (
    NOT_WANTED_MS,
    DeleteMember,
    Drain,
    RequestHandOff,
    Seal,
    Step,
    Take,
    Write,
    Written,
    apply_leases,
    apply_members,
    apply_seal,
    apply_take,
    apply_write,
    give_unreadable,
    plan_round,
)
from anabranch._core.shards import gate
from anabranch._engine.clock import Alarm
from anabranch._engine.leases.admission import mismatch
from anabranch._engine.leases.member import Member
from anabranch._engine.leases.store_reset import store_reset
from anabranch._engine.ports import Ports
from anabranch._model.leases import AppRow, HandOffRequest, LeaseKey, LeaseRow, ShardStatus
from anabranch.errors import LeaseStoreError
from anabranch.events import MemberDiffers, MemberEnded, MemberSealed, StandstillBegan, StoreRolledBack

__all__ = ["LeaseLoop"]

T = TypeVar("T")

TAKES_HELD_MS_MIN: Final = 10_000
"""At least so long nothing is taken from a store that forgets: members of a longer expiry may never have been seen."""
UNPLACED_TOLD_AFTER_MS: Final = 30_000
"""The workers of a fleet that starts do not all come at once."""


class LeaseLoop:
    def __init__(
        self,
        ports: Ports,
        member: Member,
        app: AppRow,
        *,
        on_held: Callable[[Holding], None],
        on_dropped: Callable[[LeaseKey, str], None],
        on_drain: Callable[[HandOffRequest], None],
        is_healthy: Callable[[], bool],
        status: Callable[[], tuple[ShardStatus, ...]],
    ) -> None:
        self._ports = ports
        self._member = member
        self._app = app
        self._timing = member.timing
        self.table = LeaseTable(member.member_id, member.timing.expiry_ms)
        self.detector = FailureDetector(member.timing)
        self._on_held = on_held
        self._on_dropped = on_dropped
        self._on_drain = on_drain
        self._is_healthy = is_healthy
        self._status = status
        self._sessions: dict[LeaseKey, Holding] = {}
        self._alarm = Alarm(ports.clock)
        self._no_takes_before_ms = 0
        self._incarnation: str | None = None
        self._confirmed_at: int | None = None
        """The count of failed store calls when the storage was last seen to be the same."""
        self._told_unplaced: dict[LeaseKey, None] = {}
        self._incompatible: dict[str, None] = {}
        """Members of another mind that were told of."""
        self.trouble: str | None = None
        """Why the store gave no answer the last time that it was asked; None if it did."""
        self.is_performing = False
        """A round's steps are under way: leases may be this member's without its knowledge."""
        self.draining = False
        """Set when this worker stops: it takes nothing more and asks for nothing."""

    @property
    def blocked_reason(self) -> str | None:
        """Why nothing may be started on any lease now; None if it may."""
        if self._member.may_start():
            return None
        return f"no heartbeat was acknowledged in time: {self.trouble or 'the next one will tell'}"

    def wake(self) -> None:
        """Something changed that the next round should see now: a status, a finished shard."""
        self._alarm.ring()

    async def run(self) -> None:
        clock = self._ports.clock
        while True:
            await self.round()
            members = len(self.detector.live())
            await self._alarm.wait(clock.now_ms() + self._timing.poll_interval_for(members))

    async def round(self) -> None:
        """One look at the store and one plan; everything that is lost or won shows in the sessions afterwards."""
        if self._member.heartbeat_status.fence.ending == "rolled_back":
            await self._roll_back()
        elif self._member.heartbeat_status.fence.ending is not None:
            await self._start_anew(self._member.heartbeat_status.fence.ending)
        if not await self._observe():
            self._report()  # what stands still because of that is said all the same
            await self._roll_back_if_needed()
            return
        self._check_compatibility()
        dead = await self.call(self._ports.store.dead_members()) or ()
        now_ms = self._ports.clock.now_ms()
        self.is_performing = True
        try:
            for step in plan_round(self.table, self.detector, now_ms, may_take=self.may_take(), known_dead=dead):
                await self._perform(step)
        finally:
            self.is_performing = False
        self._tell_unplaced(now_ms)
        self.synchronise()
        self._report()
        await self._roll_back_if_needed()

    def _tell_unplaced(self, now_ms: int) -> None:
        unplaced = self.table.unplaced
        self._told_unplaced = {key: None for key in self._told_unplaced if key in unplaced}
        for key, since_ms in unplaced.items():
            if key not in self._told_unplaced and now_ms - since_ms >= UNPLACED_TOLD_AFTER_MS:
                self._told_unplaced[key] = None
                self._ports.emit(
                    StandstillBegan(
                        stream=key.stream_key.split(":")[1],
                        shard_id=key.shard_id,
                        reason="nobody may own it: every worker holds as many shards as it may (max_shards)",
                    )
                )

    # observe

    async def _observe(self) -> bool:
        ports, table = self._ports, self.table
        if not await self._check_storage():
            return False
        members = await self.call(ports.store.read_members())
        if members is None:
            return False
        apply_members(table, self.detector, members, ports.clock.now_ms())
        if table.wants_leases(ports.clock.now_ms()):
            is_known = await self.check_birth()
            leases = await self.call(ports.store.read_leases())
            if not is_known or leases is None or not await self._is_same_storage():
                return False
            apply_leases(table, self.detector, leases, ports.clock.now_ms())
        self.synchronise()
        return True

    async def _check_storage(self) -> bool:
        """The storage must be the one that this application trusts (rule L13). False: it is not, or gave no answer."""
        trusted, is_first = self._app.incarnation, self._incarnation is None
        if not await self._confirm_storage():
            return False
        incarnation = self._incarnation
        assert incarnation is not None, "it was just confirmed"
        if is_first and incarnation != trusted:
            # Just started: other workers may still act on what this storage has forgotten.
            self._hold_takes()
        if incarnation != trusted and self._ports.clock.now_ms() >= self._no_takes_before_ms:
            recorded = await self.call(self._ports.store.record_incarnation(trusted, incarnation))
            if recorded is not None:
                self._recognise(recorded)
                self._app = recorded
        return True

    async def _confirm_storage(self) -> bool:
        """Asks the store which storage it is. False: another one than before, or no answer."""
        failures = self._ports.store_failures.count  # a call that fails during this one may hide a fail-over
        incarnation = await self.call(self._ports.store.incarnation())
        if incarnation is None:
            return False
        if self._incarnation is not None and incarnation != self._incarnation:
            self.table.rolled_back = True
            return False
        self._incarnation, self._confirmed_at = incarnation, failures
        return True

    @property
    def _is_sure_of_storage(self) -> bool:
        """No store call has failed since the storage was confirmed, so all answers since then came from it."""
        return self._confirmed_at == self._ports.store_failures.count

    async def _is_same_storage(self) -> bool:
        """Asks again where a call has failed. A store never returns to an earlier storage: if it is still the same one,
        everything that was read before came from it, too.
        """
        return self._is_sure_of_storage or (await self._confirm_storage() and self._is_sure_of_storage)

    def _hold_takes(self) -> None:
        """Nobody takes anything until every fence has passed that may still stand."""
        self._no_takes_before_ms = self._ports.clock.now_ms() + max(TAKES_HELD_MS_MIN, self.detector.expiry_ms_max)

    def _check_compatibility(self) -> None:
        """Two of different minds do not join (rule U2). Should it come to that all the same, the later one ends."""
        me = self._member.row
        now_ms = self._ports.clock.now_ms()
        differing = incompatible_members(me, self.detector, now_ms, any_order=self._member.any_order)
        for row in differing:
            if joined_before(row, me):
                raise mismatch(me, row)
            if row.member_id not in self._incompatible:
                self._ports.emit(MemberDiffers(member_id=row.member_id, fingerprint=row.fingerprint))
        self._incompatible = {row.member_id: None for row in differing}

    async def check_birth(self) -> bool:
        """A running process makes neither its application nor one of its streams a second time (rule L14). False: the
        store did not say all that there is to know. The application comes last: of another one nothing is believed.
        """
        streams = await self.call(self._ports.store.read_streams())
        if streams is not None:
            begun = [row.stream_key for row in streams if row.bootstrapped]
            if any(key not in begun for key in self.table.streams or ()):
                self.miss_birth()
        app = await self.call(_told(self._ports.store.read_app()))
        if app is not None:
            self._recognise(app[0])
        return streams is not None and app is not None

    async def create_lease(self, row: LeaseRow, *, life: str) -> LeaseRow | None:
        """In no store but this application's, nor in one that went back behind the beginning of a stream: there the row
        would be a beginning in the middle. Nor while fenced: what was planned before a long pause may have been made,
        finished and cleaned up since, and would come back. Nor in another life than that of the plan, or in another
        storage: the rows that it rests on may be forgotten. None: it was not made, or there was no answer.
        """
        if not await self.check_birth() or not await self._confirm_storage() or not self._is_sure_of_storage:
            return None
        if life != self.table.member_id or not self._member.may_start():
            return None
        answer = await self.call(_told(self._ports.store.create_lease(row, app_id=self._app.app_id)))
        if answer == (None,):
            self.miss_birth()
        return None if answer is None else answer[0]

    def _recognise(self, app: AppRow | None) -> None:
        if app is None or app.app_id != self._app.app_id:
            self.miss_birth()

    def miss_birth(self) -> NoReturn:
        raise store_reset(self._ports, self._app)

    # perform and apply

    async def call(self, answer: Awaitable[T]) -> T | None:
        """A store call with the protocol's deadline; None if there was no answer: it may still take effect."""
        try:
            async with asyncio.timeout(self._timing.call_deadline_ms / 1000):
                found = await answer
        except BaseException as error:
            self._ports.store_failures.count += 1
            if not isinstance(error, (LeaseStoreError, TimeoutError)):
                raise
            self.trouble = str(error) or f"no answer within {self._timing.call_deadline_ms} ms"
            return None
        self.trouble = None
        return found

    async def _perform(self, step: Step) -> None:
        store, table, clock = self._ports.store, self.table, self._ports.clock
        match step:
            case Seal():
                row = await self.call(store.seal_member(step.member_id, step.observed_counter))
                apply_seal(table, self.detector, row, clock.now_ms())
                if row is not None and row.state == "sealed":
                    self._ports.emit(MemberSealed(member_id=step.member_id))
                    self.wake()  # its leases can be taken from now on
            case Take():
                await self.take(step)
            case RequestHandOff():
                await self.call(store.request_hand_off(step.donor, step.request))
            case Drain():
                self._on_drain(step.request)
            case Write():
                await self.write(step)
            case DeleteMember():
                await self.call(store.delete_member(step.member_id))

    def may_take(self) -> bool:
        """Not while fenced or leaving, nor while a roll-back of the store is waited out, or may just have happened."""
        if self.draining or not self._is_sure_of_storage or self._ports.clock.now_ms() < self._no_takes_before_ms:
            return False
        return self._member.may_start()

    def has_room(self) -> bool:
        """Whether this member may hold one more shard that moves (max_shards)."""
        limit = self._member.shards_max
        return limit is None or self.table.load < limit

    async def take(self, step: Take) -> None:
        floor = await self._floor(step)
        if floor is None or not await self._is_same_storage():
            self.table.changed = True  # the next round looks again
            return
        answer = await self.call(
            self._ports.store.take_lease(
                step.key,
                self.table.member_id,
                expected_owner=step.expected_owner,
                expected_version=step.expected_version,
                epoch_floor=max(floor, self.table.epoch_floors.get(step.key, 0)),
            )
        )
        apply_take(self.table, step, answer, self._ports.clock.now_ms())
        self.synchronise()

    async def _floor(self, step: Take) -> int | None:
        """At the first start of a child its fence token goes above those of its parents (rule U3), which must all be
        finished or gone (rule S1). None: one is not, or something is unknown, which must not count as gone.
        """
        row = self.table.leases.get(step.key)
        if row is None:
            return None
        if row.epoch:
            return step.epoch_floor
        keys = tuple(LeaseKey(step.key.stream_key, step.key.generation, name) for name in row.waits_for)
        parents = await self.call(self._read_all(keys))
        if parents is None or gate.open_parents(row, {parent.key: parent for parent in parents}):
            return None
        return max([step.epoch_floor, *(parent.epoch for parent in parents)])

    async def _read_all(self, keys: tuple[LeaseKey, ...]) -> list[LeaseRow]:
        """Those of the rows that are there."""
        found = [await self._ports.store.read_lease(key) for key in keys]
        return [row for row in found if row is not None]

    async def write(self, step: Write) -> Written:
        if self._member.heartbeat_status.fence.ending is not None:
            return "lost"  # of a forked child the store would take it: it goes by the name of its parent
        holding = self.table.held.get(step.row.key)
        answer = await self.call(
            self._ports.store.write_lease(
                step.row, member_id=self.table.member_id, expected_version=step.expected_version
            )
        )
        if self.table.held.get(step.row.key) is not holding:
            return "lost"  # an answer to an earlier holding says nothing of the one that there is now
        outcome = apply_write(self.table, step, answer, self._ports.clock.now_ms())
        self.synchronise()
        return outcome

    def give_unreadable(self, key: LeaseKey) -> None:
        """This member has not been able to read the shard for long: another may (rule U7)."""
        now_ms = self._ports.clock.now_ms()
        request = give_unreadable(self.table, self.detector, key, now_ms)
        if request is not None:
            self.table.not_wanted_until[key] = now_ms + NOT_WANTED_MS
            self.table.drain(request)
            self._on_drain(request)

    def observe_lease(self, row: LeaseRow) -> None:
        """A row that was created or read on the side."""
        self.table.observe_lease(row, self._ports.clock.now_ms())
        self.synchronise()

    def synchronise(self) -> None:
        """Starts a session for every lease that came, and ends those of leases that went."""
        held = self.table.held
        for key in [key for key, holding in self._sessions.items() if held.get(key) is not holding]:
            holding = self._sessions.pop(key)
            known = self.table.leases.get(key)
            owner = None if known is None else known.owner
            if known is not None and known.is_finished:
                reason = "finished"
            elif holding.pending_transfer is not None:
                reason = "given" if holding.request is not None else "released"
            else:
                reason = f"now held by {owner}" if owner not in {None, self.table.member_id} else "no longer ours"
            self._on_dropped(key, reason)
        for key, holding in held.items():
            if key not in self._sessions:
                self._sessions[key] = holding
                self._on_held(holding)

    def _report(self) -> None:
        self._member.report(
            load=self.table.load,
            lease_version=self.table.lease_version,
            answered=tuple(self.table.answered),
            reads_healthy=self._is_healthy(),
            draining=self.draining,
            status=self._status(),
        )

    # a new life

    async def _start_anew(self, reason: str) -> None:
        self._ports.emit(MemberEnded(member_id=self.table.member_id, reason=reason))
        self.table.lose_all()
        self.synchronise()
        await self._member.join()
        self.table.become(self._member.member_id)

    async def _roll_back_if_needed(self) -> None:
        if self.table.rolled_back:
            await self._roll_back()

    async def _roll_back(self) -> None:
        """The store forgot what it had acknowledged: nobody takes anything for the longest expiry seen (rule L13)."""
        self._ports.emit(StoreRolledBack())
        self._hold_takes()
        self._incarnation = self._confirmed_at = None
        self.table.forget()
        self.detector.forget()
        self._member.end("rolled_back")
        await self._start_anew("rolled_back")


async def _told(answer: Awaitable[T]) -> tuple[T]:
    """In a tuple, so that None is told from no answer."""
    return (await answer,)
