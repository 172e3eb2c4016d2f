"""The lease protocol of one worker: joins the fleet, watches the others, takes, keeps and gives leases, and leaves.

Each operation is a generator. It yields the next store call as a value and is resumed with the answer and the time.
After each answer it checks its own membership and its leases again before it continues: meanwhile the fence may have
passed, the member may have been sealed, the storage may have been replaced, and another operation may have changed the
table. The engine (`Fleet`) and the protocol simulator drive this class. Neither decides anything about leases.

What changed for the worker is collected and handed out by `take_changes()`, after each step.

It does not send heartbeats. It reads the status that `HeartbeatState` publishes, and never changes that state once its
sender runs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, NoReturn, TypeVar

import msgspec
from msgspec.structs import replace

from anabranch._core.leases import store_calls as calls
from anabranch._core.leases.dialogue import StoreDialogue
from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._core.leases.lease_table import Holding, Inquiry, LeaseTable
from anabranch._core.leases.members import (
    Admission,
    FailureDetector,
    incompatible_members,
    joined_before,
    mismatch,
    settings_of,
)
from anabranch._core.leases.plan import (
    NOT_WANTED_MS,
    TAKES_MAX,
    Drain,
    Step,
    Write,
    Written,
    apply_members,
    apply_seal,
    apply_take,
    apply_write,
    give_unreadable,
    plan_round,
)
from anabranch._core.leases.status import StatusReporter
from anabranch._core.leases.store_calls import Description, Moment, NoAnswer, Steps
from anabranch._core.leases.timing import Ending, LeaseTiming
from anabranch._core.shards import lifecycle
from anabranch._model.entropy import Entropy
from anabranch._model.leases import (
    CHANGED_MAX,
    LOOK_PREFIX,
    AppRow,
    Conflict,
    ControlRow,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    LookRequest,
    MemberRow,
    OrderMode,
    ShardStatus,
    short_id,
)
from anabranch.errors import FleetMismatchError, LeaseStoreInvalidError
from anabranch.events import (
    Event,
    LeaseRowDeleted,
    LossReason,
    MemberDiffers,
    MemberEnded,
    MemberEvicted,
    MemberJoined,
    ShardRecovered,
    ShardStalled,
    StoreRolledBack,
)
from anabranch.reasons import WorkersFull

T = TypeVar("T")

TAKES_HELD_MS_MIN: Final = 10_000
"""After a roll-back nothing is taken for at least this long: members with a longer expiry may never have been seen."""
UNPLACED_REPORTED_AFTER_MS: Final = 30_000
"""The workers of a fleet do not all start at the same moment."""
SEAL_ROUNDS: Final = 3
"""A heartbeat that is still on its way can prevent a seal once."""


class MemberProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What every member of this process reports about itself."""

    worker_id: str
    order: OrderMode = "shard"
    shards_max: int | None = None
    any_order: bool = False
    """It may join workers with another order (rule U2)."""
    is_exclusive: bool = False
    """No other process has this worker id, so an earlier member with it is dead (rule L17)."""


class Held(msgspec.Struct, frozen=True):
    """This member holds a lease from now on."""

    holding: Holding


class Lost(msgspec.Struct, frozen=True):
    """This member does not hold a lease any more."""

    key: LeaseKey
    reason: Literal["finished", "given", "released"] | LossReason
    owner: str | None = None
    """`given`, `taken_over`: the next owner."""

    @property
    def by_own_write(self) -> bool:
        """This member ended the holding by a write, with its last checkpoint."""
        return self.reason in {"finished", "given", "released"}


class Joined(msgspec.Struct, frozen=True):
    """Send the heartbeats of this member."""

    heartbeat: HeartbeatState


class Ended(msgspec.Struct, frozen=True):
    """Send no more heartbeats."""


class ReportChanged(msgspec.Struct, frozen=True):
    """Others wait for what the next heartbeat reports: send it now."""


class CommandsSeen(msgspec.Struct, frozen=True):
    """Commands of operators are pending. The owner of each lease applies its own (rule C3)."""

    commands: tuple[ControlRow, ...]


Change = Held | Lost | Drain | Joined | Ended | ReportChanged | CommandsSeen | Event


def lease_row_deleted(row: LeaseRow, *, repeats: bool) -> LeaseRowDeleted:
    """`row` was created in place of a deleted one."""
    watermark = row.checkpoint.watermark
    return LeaseRowDeleted(
        stream=row.key.stream_name,
        shard_id=row.key.shard_id,
        position=None if watermark is None else str(watermark),
        repeats=repeats,
    )


class LeaseMachine(StoreDialogue):
    def __init__(self, profile: MemberProfile, timing: LeaseTiming, entropy: Entropy) -> None:
        super().__init__(entropy)
        self.profile = profile
        self.timing = timing
        self.table = LeaseTable("", timing.expiry_ms)
        self.detector = FailureDetector(timing)
        self.heartbeat = HeartbeatState("", timing)
        self.is_performing = False
        """A round's steps are being performed: this member may own leases that it does not know of yet."""
        self.draining = False
        """This worker stops: it takes nothing more and requests nothing."""
        self._me = self._new_row("")
        self._status = StatusReporter("")
        self._reads_healthy = True
        self._ending: Ending | None = None
        """How the machine ended its member. The heartbeats publish an ending that they saw."""
        self._followed: dict[LeaseKey, Holding] = {}
        """The holdings that were handed out as `Held`."""
        self._writing: dict[LeaseKey, None] = {}
        """Leases with a write in flight. A round does not repeat a transfer meanwhile (rule L7)."""
        self._is_round_due = False
        self._no_takes_before_ms = 0
        self._incarnation: str | None = None
        self._failures_when_confirmed: int | None = None
        """The count of failed store calls when the storage was last confirmed."""
        self._known_dead: Collection[str] = ()
        """Members whose process is known to be dead, by the last poll."""
        self._reported_unplaced: dict[LeaseKey, int] = {}
        """Leases that were reported as without room anywhere, and since when they were."""
        self._reported_incompatible: dict[str, None] = {}
        self._earlier_ids: dict[str, None] = {}
        """The members that this process was before it was evicted."""

    @property
    def member_id(self) -> str:
        return self.table.member_id

    @property
    def ending(self) -> Ending | None:
        """How this member ended; None while it lives."""
        if self.table.rolled_back:
            return "rolled_back"
        return self._ending or self.heartbeat.status.fence.ending

    def may_start(self, now_ms: int, wall_ms: int) -> bool:
        """Whether this member may start handler calls at this moment (rule L8): asked in the step that starts one."""
        return self.heartbeat.gate.allows(now_ms, wall_ms) and not self.table.rolled_back

    def is_read_by_others(self, row: LeaseRow, now_ms: int) -> bool:
        """Whether another process holds this lease and sends heartbeats. Earlier members of this one do not count."""
        owner = row.owner
        return owner is not None and owner not in self._earlier_ids and self.detector.is_heartbeating(owner, now_ms)

    def drain(self) -> None:
        self.draining = True

    def take_changes(self) -> list[Change]:
        """What has changed since the last call, in order. Call it after each step."""
        if self.table.rolled_back:
            self.heartbeat.gate.is_closed = True
        changes, self._changes = self._changes, []
        return changes

    # start

    def open(self, app: AppRow, store_name: str, *, may_create: bool = True) -> Steps[AppRow]:
        """Finds the application's row, or creates it where that is allowed (rule L14). Only a start does this."""
        if not may_create and (yield from self._ask_until_answered(calls.ReadApp())) is None:
            raise LeaseStoreInvalidError(
                f"there is no application {app.app!r} in {store_name}, and LeaseSettings(create='never') "
                "creates none: check app= and leases=; if the store was emptied, restore it; to start from scratch, "
                "start one worker with create='if_missing'"
            )

        self.app = self._check_place((yield from self._repeat(lambda: self._propose(app))))
        return self.app

    def _propose(self, app: AppRow) -> Steps[AppRow | NoAnswer]:
        """Each try proposes another identity: an application with the one before may have been deleted since."""
        return self.ask(calls.OpenApp(replace(app, app_id=f"{self._entropy.getrandbits(128):032x}")))

    def check_fleet(self) -> Steps[None]:
        """Raises if this worker does not share the settings of a live fleet. Call it before anything else is written,
        and once in a process: a process that resumes after a pause must not seal its successor (rule L17).
        """
        if self.profile.is_exclusive:
            yield from self._seal_earlier()
        yield from self._be_admitted()

    def _seal_earlier(self) -> Steps[None]:
        """Seals the earlier runs of this worker: no other process has its id, so they are dead (rule L17)."""
        for _ in range(SEAL_ROUNDS):
            poll = yield from self._ask_until_answered(calls.PollStore())
            worker_id = self.profile.worker_id
            earlier = [row for row in poll.members if row.state == "live" and row.worker_id == worker_id]
            if not earlier:
                return
            for row in earlier:
                sealed = yield from self._ask_until_answered(calls.Seal(row.member_id, row.counter))
                if sealed is not None and sealed.state == "sealed":
                    self._changes.append(MemberEvicted(member_id=row.member_id))

    def _be_admitted(self) -> Steps[None]:
        """Returns when no incompatible member is live; raises if one stays alive (rule U2)."""
        admission = Admission(self._me, self.timing, any_order=self.profile.any_order)
        while True:
            poll = yield from self._ask_until_answered(calls.PollStore())
            review = admission.review(poll.members, poll.known_dead, self.moment.now_ms)
            if review.refused_by is not None:
                raise mismatch(self._me, review.refused_by)
            if review.is_admitted:
                return
            for seal in review.seals:
                yield from self._ask_until_answered(seal)
            if not review.seals:
                yield from self._wait(self.timing.poll_interval_ms)

    def join(self, streams: Collection[str]) -> Steps[None]:
        """Registers a member and checks whether it may stay. `streams` are the keys of the streams that it reads."""
        self.table.streams = streams
        yield from self._join()

    def _join(self) -> Steps[None]:
        self._become_new_member()
        heartbeat, began, tries = self.heartbeat, self.moment, 0
        while True:
            storage = yield from self.ask(calls.ReadIncarnation())
            row = storage if isinstance(storage, NoAnswer) else (yield from self.ask(calls.RegisterMember(self._me)))
            if not isinstance(storage, NoAnswer) and not isinstance(row, NoAnswer):
                break
            tries += 1
            self._report_unanswered(tries)
            yield from self._wait(self.timing.call_deadline_ms)
        assert isinstance(row, MemberRow)
        heartbeat.registered(row, storage, began)
        try:
            # Before the first heartbeat, which confirms the membership.
            yield from self._be_admitted()
        except FleetMismatchError:
            yield from self.leave()
            raise
        self._changes.append(Joined(heartbeat))

    def _become_new_member(self) -> None:
        """A member that ended never returns. The process continues as a new member (rule L1)."""
        self._earlier_ids[self.member_id] = None
        self._me = self._new_row(self._new_member_id())
        self.heartbeat = self._new_heartbeat(self._me.member_id)
        self.table.become(self._me.member_id)
        self._status = StatusReporter(self._me.member_id)
        self._ending = None

    def _new_member_id(self) -> str:
        return f"{self.profile.worker_id}#{self._entropy.getrandbits(128):032x}"

    def _new_heartbeat(self, member_id: str) -> HeartbeatState:
        return HeartbeatState(member_id, self.timing)

    def _new_row(self, member_id: str) -> MemberRow:
        profile = self.profile
        return MemberRow(
            member_id=member_id,
            expiry_ms=self.timing.expiry_ms,
            order=profile.order,
            shards_max=profile.shards_max,
            streams=tuple(sorted(short_id(key) for key in self.table.streams or ())),
            joined_wall_ms=self.moment.wall_ms,
        )

    # rounds

    def run(self) -> Steps[NoReturn]:
        """Rounds, about one a second."""
        while True:
            self._is_round_due = False
            yield from self.round()
            if self.ending is None and not self._is_round_due:
                poll_interval_ms = self.timing.poll_interval_for(len(self.detector.live()))
                yield from self._wait(poll_interval_ms, wakeable=True)

    def round(self) -> Steps[None]:
        """Reads the store, then makes and performs one plan. A member that has ended is replaced first."""
        if self.ending is not None:
            yield from self._start_again(self.ending)
        has_observed = yield from self._observe()
        if has_observed:
            self._check_compatibility()
            yield from self._plan_and_perform()
        shards = yield from self._report()  # also if the store did not answer: a stall because of that is reported
        if has_observed and self.ending is None:
            yield from self._write_status(shards)

    def _start_again(self, ending: Ending) -> Steps[None]:
        if ending == "rolled_back":
            # The store forgot what it had acknowledged: nobody takes anything for the longest expiry seen (rule L13).
            self._changes.append(StoreRolledBack())
            self._hold_takes()
            self._incarnation = self._failures_when_confirmed = None
            self.table.forget()
            self.detector.forget()
        self._changes.append(MemberEnded(member_id=self.member_id, reason="evicted" if ending == "sealed" else ending))
        self.end(ending)
        self.table.lose_all()
        self._follow()
        yield from self._join()
        self._changes.append(MemberJoined(member_id=self.member_id))

    def end(self, ending: Ending) -> None:
        """From now on this member starts, takes and writes nothing."""
        self._ending = self._ending or ending
        self.heartbeat.gate.is_closed = True
        self._changes.append(Ended())

    def _observe(self) -> Steps[bool]:
        table = self.table
        failures, acknowledged = self._failure_count, self.heartbeat.status.row
        poll = yield from self.ask(calls.PollStore())
        if isinstance(poll, NoAnswer) or not (yield from self._check_storage(poll.evidence, failures)):
            return False
        self._status.observe_mark(self._recognise(poll.app).watch)
        if poll.evidence is None and acknowledged is not None:
            self._compare_counter(poll.members, acknowledged)
        apply_members(table, self.detector, poll.members, self.moment.now_ms)
        self._known_dead = poll.known_dead
        if poll.commands:
            self._changes.append(CommandsSeen(poll.commands))
        looks = self._unanswered_looks(poll.members)
        if looks or table.wants_all_leases(self.moment.now_ms):
            is_read = yield from self._read_all(looks)
        else:
            is_read = table.has_read_all and (yield from self._read_changed())
        if not is_read:
            return False
        self._follow()
        return self.ending is None

    def _read_all(self, looks: Collection[str]) -> Steps[bool]:
        """Reads all leases, which answers the requests `looks`. False: no answer, or one from another storage."""
        table = self.table
        failures, held = self._failure_count, {key: holding.row.version for key, holding in table.held.items()}
        leases = yield from self.ask(calls.ReadLeases())
        self._delay_next_read(None if isinstance(leases, NoAnswer) else len(leases))
        # The application comes last: while it is deleted, its other rows vanish one by one.
        if isinstance(leases, NoAnswer) or not (yield from self.check_not_reset()):
            return False
        if leases.evidence is not None and not self._accept_storage(leases.evidence, failures):
            return False
        if leases.evidence is None and any(row.version < held.get(row.key, 0) for row in leases):
            table.rolled_back = True
        if not (yield from self._is_same_storage()):
            return False
        table.observe_leases(leases, self.moment.now_ms)
        owners = dict.fromkeys(row.owner for row in leases if row.owner is not None)
        self.detector.observe_owners(owners, self.moment.now_ms)
        if (yield from self._write_missing(held, leases)):
            table.answered |= dict.fromkeys(looks)
        return True

    def _delay_next_read(self, read_count: int | None) -> None:
        """The members of a large fleet take turns at reading all leases. A read that failed (None) has used up capacity
        too, and is repeated at a random time within the turn.
        """
        lease_count = (len(self.table.leases) or self.root_count) if read_count is None else read_count
        pause_ms = self.timing.read_pause_for(len(self.detector.live()), lease_count)
        if pause_ms:
            turns = self._entropy.random() + (0.0 if read_count is None else 0.5)
            self.table.delay_read(self.moment.now_ms + round(pause_ms * turns))

    def _unanswered_looks(self, members: Sequence[MemberRow]) -> list[str]:
        """Unanswered requests to look at all leases that this member holds (rule L18)."""
        mine = next((row for row in members if row.member_id == self.member_id), None)
        wanted = () if mine is None else mine.wanted
        return [name for name in wanted if name.startswith(LOOK_PREFIX) and name not in self.table.answered]

    def _write_missing(self, held: Mapping[LeaseKey, int], rows: Sequence[LeaseRow]) -> Steps[bool]:
        """Writes held leases that have no row: that restores it, or shows it. False: some are not clear yet."""
        present, is_clear = {row.key for row in rows}, True
        for key, version in held.items():
            holding = self.table.held.get(key)
            if key in present or holding is None or holding.row.version != version:
                continue
            if holding.state == "transferring" or key in self._writing:
                is_clear = False  # that write restores the row
            else:
                outcome = yield from self.write(Write(holding.row, version))
                is_clear = is_clear and outcome in {"written", "lost"}
        return is_clear

    def _read_changed(self) -> Steps[bool]:
        """Reads the leases that others have named. False if an answer is missing, or another storage gave it."""
        rows: dict[LeaseKey, LeaseRow | None] = {}
        # There are more than CHANGED_MAX only while the read of all leases waits for its turn.
        for key in self.table.leases_to_read(self.moment.now_ms)[:CHANGED_MAX]:
            row = yield from self.ask(calls.ReadLease(key))
            if isinstance(row, NoAnswer):
                return False
            rows[key] = row
        if rows and not (yield from self._is_same_storage()):
            return False
        for key, row in rows.items():
            self.table.observe_read(key, row, self.moment.now_ms)
            if row is not None and row.owner is not None:
                self.detector.watch(row.owner, self.moment.now_ms)
        return True

    def _compare_counter(self, members: Collection[MemberRow], acknowledged: MemberRow) -> None:
        """Without an identity in each answer, a row older than an acknowledged write shows a roll-back (rule L13)."""
        mine = next((row for row in members if row.member_id == acknowledged.member_id), None)
        if mine is not None and mine.counter < acknowledged.counter:
            self.table.rolled_back = True

    def _plan_and_perform(self) -> Steps[None]:
        self.is_performing = True
        try:
            steps = self._plan()
            for step in steps:
                if self.ending is not None:
                    return
                yield from self._perform(step)
            if sum(isinstance(step, calls.TakeLease) for step in steps) == TAKES_MAX:
                self._is_round_due = True  # there may be more to take
        finally:
            self.is_performing = False
        self._report_unplaced()
        self._follow()

    def _plan(self) -> list[Step]:
        table, now_ms = self.table, self.moment.now_ms
        steps = plan_round(table, self.detector, now_ms, may_take=self.may_take(), known_dead=self._known_dead)
        if table.plan_again_ms is not None and now_ms < self._no_takes_before_ms:
            table.plan_again_ms = min(table.plan_again_ms, self._no_takes_before_ms)
        return steps

    def _perform(self, step: Step) -> Steps[None]:
        match step:
            case calls.Seal():
                row = yield from self.ask(step)
                if isinstance(row, NoAnswer):
                    return
                apply_seal(self.table, self.detector, row, self.moment.now_ms)
                if row is not None and row.state == "sealed":
                    self._changes.append(MemberEvicted(member_id=step.member_id))
                    self._is_round_due = True  # its leases can be taken from now on
            case calls.TakeLease():
                yield from self._take(step)
            case calls.RequestHandOff():
                yield from self.ask(step)
            case calls.DeleteMember():
                yield from self.ask(step)
            case Drain():
                holding = self.table.held.get(step.request.key)
                if holding is not None and holding.request == step.request:  # it may have been lost since the plan
                    self._changes.append(step)
            case Write():
                if step.row.key not in self._writing:
                    yield from self.write(step)

    def _report(self) -> Steps[Sequence[ShardStatus]]:
        """What the next heartbeat reports. Returns what the worker says about its shards."""
        answer = yield calls.Describe()
        self.moment = answer.moment
        described: Description = answer.value
        self._reads_healthy = described.reads_healthy
        self._publish()
        return described.shards

    def _publish(self) -> None:
        before, table = self.heartbeat.report, self.table
        self.heartbeat.report = report = HeartbeatWrite(
            member_id=self.member_id,
            attempt=0,
            load=table.load,
            change_count=table.change_count,
            changed=tuple(table.changed_last),
            answered=tuple(table.answered),
            reads_healthy=self._reads_healthy,
            draining=self.draining,
        )
        if (before.change_count, before.answered, before.draining) != (
            report.change_count,
            report.answered,
            report.draining,
        ):
            self._changes.append(ReportChanged())

    def _write_status(self, shards: Sequence[ShardStatus]) -> Steps[None]:
        row = self._status.next_row(shards, self.moment.now_ms)
        if row is not None and not isinstance((yield from self.ask(calls.WriteStatus(row))), NoAnswer):
            self._status.written(shards, self.moment.now_ms)

    def _report_unplaced(self) -> None:
        unplaced, now_ms = self.table.unplaced, self.moment.now_ms
        for key in [key for key in self._reported_unplaced if key not in unplaced]:
            seconds = (now_ms - self._reported_unplaced.pop(key)) / 1000
            self._changes.append(
                ShardRecovered(
                    stream=key.stream_name, shard_id=key.shard_id, reason=WorkersFull(), seconds=seconds, lag=None
                )
            )
        for key, since_ms in unplaced.items():
            if key not in self._reported_unplaced and now_ms - since_ms >= UNPLACED_REPORTED_AFTER_MS:
                self._reported_unplaced[key] = since_ms
                stalled = ShardStalled(stream=key.stream_name, shard_id=key.shard_id, reason=WorkersFull())
                self._changes.append(stalled)

    def _check_compatibility(self) -> None:
        """Incompatible workers do not join (rule U2). If one joined anyway, the later one of the two ends."""
        differing = incompatible_members(self._me, self.detector, self.moment.now_ms, any_order=self.profile.any_order)
        for row in differing:
            if joined_before(row, self._me):
                raise mismatch(self._me, row)
            if row.member_id not in self._reported_incompatible:
                self._changes.append(MemberDiffers(member_id=row.member_id, settings=settings_of(row)))
        self._reported_incompatible = {row.member_id: None for row in differing}

    # the storage and the application in it

    def _check_storage(self, evidence: str | None, failures: int) -> Steps[bool]:
        """The storage must be the one that this application trusts (rule L13). `evidence` came with an answer; it is
        None if the store has none, and then the store is asked where that is needed. False: it is another storage, or
        gave no answer.
        """
        trusted, is_first = self.app.incarnation, self._incarnation is None
        if evidence is not None:
            is_same = self._accept_storage(evidence, failures)
        else:
            is_same = yield from self._is_same_storage()
        if not is_same:
            return False
        incarnation = self._incarnation
        assert incarnation is not None, "it was just confirmed"
        if is_first and incarnation != trusted:
            # Just started: other workers may still act on what this storage has forgotten.
            self._hold_takes()
        if incarnation != trusted and self.moment.now_ms >= self._no_takes_before_ms:
            recorded = yield from self.ask(calls.RecordIncarnation(trusted, incarnation))
            if not isinstance(recorded, NoAnswer):
                self.app = self._recognise(recorded)
        return self.ending is None

    def _confirm_storage(self) -> Steps[bool]:
        """Asks the store for the identity of its storage. False if it has changed, or if there is no answer."""
        failures = self._failure_count  # a call that fails during this one may hide a failover
        incarnation = yield from self.ask(calls.ReadIncarnation())
        return not isinstance(incarnation, NoAnswer) and self._accept_storage(incarnation, failures)

    def _accept_storage(self, incarnation: str, failures: int) -> bool:
        """Compares the identity in an answer with the known one. `failures`: how many calls failed before that call."""
        if self._incarnation is not None and incarnation != self._incarnation:
            self.table.rolled_back = True
            return False
        self._incarnation, self._failures_when_confirmed = incarnation, failures
        return True

    @property
    def _is_sure_of_storage(self) -> bool:
        """No store call has failed since the storage was confirmed, so all answers since then came from it."""
        return self._failures_when_confirmed == self._failure_count

    def _is_same_storage(self) -> Steps[bool]:
        """Asks again if a call has failed. A store never returns to an earlier storage: if it is still the same one,
        everything that was read before came from it, too.
        """
        return self._is_sure_of_storage or ((yield from self._confirm_storage()) and self._is_sure_of_storage)

    def _hold_takes(self) -> None:
        """Nobody takes anything until every fence has passed that may still be valid."""
        self._no_takes_before_ms = self.moment.now_ms + max(TAKES_HELD_MS_MIN, self.detector.expiry_ms_max)

    def check_not_reset(self) -> Steps[bool]:
        """Raises if the store has lost the application or one of its streams: a running process creates neither of them
        again (rule L14). False: a call had no answer. The application is read last, because what was read before may
        be from another one.
        """
        streams = yield from self.ask(calls.ReadStreams())
        if not isinstance(streams, NoAnswer):
            begun = [row.stream_key for row in streams if row.bootstrapped]
            if any(key not in begun for key in self.table.streams or ()):
                self.raise_store_reset()
        app = yield from self._find_app()
        return not isinstance(streams, NoAnswer) and not isinstance(app, NoAnswer)

    # leases

    def may_take(self) -> bool:
        """Whether this member may take leases: not while it is fenced or leaves, nor soon after a rollback."""
        if self.draining or not self._is_sure_of_storage or self.moment.now_ms < self._no_takes_before_ms:
            return False
        return self.may_start(*self.moment)

    def _take(self, step: calls.TakeLease) -> Steps[None]:
        floor = yield from self._epoch_floor(step.key)
        is_same_storage = yield from self._is_same_storage()
        if floor is None or not is_same_storage or step.member_id != self.member_id or not self.may_take():
            self.table.changed = True  # the next round looks again
            return
        answer = yield from self.ask(replace(step, epoch_floor=floor))
        if step.member_id == self.member_id:  # else the lease, if it was taken, is that of a member that has ended
            apply_take(self.table, step, answer, self.moment.now_ms)
            self._follow()

    def _epoch_floor(self, key: LeaseKey) -> Steps[int | None]:
        """At the first start of a child its fence token goes above those of its parents (rule U3), which must all be
        finished (rule S1). None: one is open, somebody has deleted its row (rule L18), or something is unknown.
        """
        row, lost_epoch = self.table.leases.get(key), self.table.epoch_floors.get(key, 0)
        if row is None:
            return None
        if row.epoch:
            return lost_epoch
        parents: dict[LeaseKey, LeaseRow] = {}
        for name in row.waits_for:
            parent = yield from self.ask(calls.ReadLease(replace(row.key, shard_id=name)))
            if isinstance(parent, NoAnswer):
                return None
            if parent is not None:
                parents[parent.key] = parent
        if deleted := lifecycle.deleted_parents(row, parents):
            self.table.vanished = {**dict.fromkeys(deleted), **self.table.vanished}
            return None
        if lifecycle.open_parents(row, parents):
            return None
        # A row that was restored without knowing its fence token has a version above it (rule L18).
        return max([lost_epoch, row.version, *(parent.epoch for parent in parents.values())])

    def adopt(self, parent: LeaseKey, children: Collection[str]) -> Steps[None]:
        """The member that finishes a child's last parent takes the child at once (rule S4)."""
        for shard_id in children:
            row = yield from self.ask(calls.ReadLease(replace(parent, shard_id=shard_id)))
            if isinstance(row, NoAnswer) or row is None or row.owner is not None or row.is_finished:
                continue
            limit = self.profile.shards_max
            if self.may_take() and (limit is None or self.table.load < limit):
                self.observe_lease(row)
                yield from self._take(calls.TakeLease(row.key, self.member_id, row.owner, row.version))

    def write(self, step: Write) -> Steps[Written]:
        """Commits, finishes, stops, releases or gives a held lease."""
        holding = self.table.held.get(step.row.key)
        if holding is None or self.ending is not None:
            return "lost"  # also in a forked child, which has the name of its parent: the store would accept the write
        self._writing[step.row.key] = None
        try:
            answer = yield from self.ask(calls.WriteLease(step.row, self.member_id, step.expected_version))
            if isinstance(answer, Conflict) and answer.row is None:
                answer = yield from self._restore(step, holding)
        finally:
            self._writing.pop(step.row.key, None)
        if self.table.held.get(step.row.key) is not holding:
            return "lost"  # an answer to an earlier holding says nothing about the one that there is now
        if isinstance(answer, NoAnswer) and holding.state == "transferring":
            holding.is_transfer_unknown = True
        outcome = apply_write(self.table, step, answer, self.moment.now_ms)
        self._follow_one(step.row.key)  # following all leases after each commit would be quadratic
        return outcome

    def _restore(self, step: Write, holding: Holding) -> Steps[LeaseRow | Conflict | NoAnswer]:
        """A held lease has no row. If the store has forgotten nothing else, somebody has deleted it: this member
        creates it again, as its write would have left it (rule L18). Returns what the write would have returned.
        """
        is_remembered = yield from self._remembers_this_member()
        if self.table.held.get(step.row.key) is not holding:
            return Conflict(None)  # it was sealed meanwhile, and has perhaps joined again: the row was another's
        if not is_remembered:
            return Conflict(None) if self.ending is not None else NoAnswer("it is not clear what became of the row")
        if holding.is_transfer_unknown:
            self.table.drop_transferred(step.row.key)
            self._follow_one(step.row.key)
            return Conflict(None)
        row = replace(step.row, version=step.expected_version + 1)
        answer = yield from self.ask(calls.CreateLease(row))
        if isinstance(answer, NoAnswer):
            return answer
        if answer != row:
            return Conflict(answer)
        self._changes.append(lease_row_deleted(row, repeats=False))
        self.table.report_change(row.key)
        return row

    def find_unheld(self, keys: Collection[LeaseKey]) -> Steps[Collection[LeaseKey]]:
        """Returns those of `keys`, leases without a row, that no live member holds. Asks each member to look at its own
        leases: call it again until all have answered. Then it waits for takes that may still be under way.
        """
        poll = yield from self.ask(calls.PollStore())
        if isinstance(poll, NoAnswer):
            return ()
        for row in poll.members:
            self.table.observe_changes(row)
        inquiry = self.table.inquiry
        if inquiry is None or not any(key in inquiry.keys for key in keys):
            request = LookRequest(f"{self.member_id} {self._entropy.getrandbits(64)}")
            live = frozenset(row.member_id for row in poll.members if row.state == "live")
            # With the keys of the inquiry that it replaces: two callers would replace each other's forever.
            asked = dict.fromkeys([*keys, *(() if inquiry is None else inquiry.keys)])
            inquiry = self.table.inquiry = Inquiry(request, asked, live - {self.member_id})
        if not (yield from self._is_answered(inquiry, poll.members)):
            inquiry.answered_ms = None
        elif inquiry.answered_ms is None:
            inquiry.answered_ms = self.moment.now_ms
        expiry_ms = max(self.timing.expiry_ms, self.detector.expiry_ms_max)
        if inquiry.answered_ms is None or self.moment.now_ms - inquiry.answered_ms < expiry_ms:
            return ()
        return [key for key in keys if key in inquiry.keys and key not in self.table.held]

    def _is_answered(self, inquiry: Inquiry, members: Sequence[MemberRow]) -> Steps[bool]:
        name, is_answered = inquiry.request.short_name, True
        for row in members:
            if row.member_id not in inquiry.members or row.state != "live":
                continue
            if row.member_id not in inquiry.asked:
                is_answered = False
                answer = yield from self.ask(calls.RequestHandOff(row.member_id, inquiry.request))
                if isinstance(answer, MemberRow) and name in answer.wanted:
                    inquiry.asked[row.member_id] = None
            elif name in row.wanted:
                is_answered = False
        return is_answered

    def _remembers_this_member(self) -> Steps[bool]:
        """Whether the store has the application, its streams, and the last heartbeat that it has acknowledged to this
        member: then it was neither reset nor rolled back.
        """
        acknowledged = self.heartbeat.status.row
        if acknowledged is None or not (yield from self.check_not_reset()) or not (yield from self._confirm_storage()):
            return False
        poll = yield from self.ask(calls.PollStore())
        if isinstance(poll, NoAnswer) or not self._is_sure_of_storage:
            return False
        self._compare_counter(poll.members, acknowledged)
        is_there = any(row.member_id == self.member_id and row.state == "live" for row in poll.members)
        return is_there and self.ending is None and self.may_start(*self.moment)

    def transfer(self, key: LeaseKey, final: LeaseRow) -> Steps[Written]:
        """Gives a drained lease to its requester, or releases it. Each round and commit repeats it until answered."""
        version = self.table.held[key].row.version
        outcome = yield from self.write(Write(self.table.transfer(key, final), version))
        if outcome == "written":
            self._publish()  # the new owner waits for it
        return outcome

    def create_lease(self, row: LeaseRow, member_id: str) -> Steps[LeaseRow | None]:
        """Creates a lease that was planned by `member_id`. None: it was not created, or there was no answer.

        It is not created
        - in another application's store, or in one that was rolled back to before the stream began: with this row, the
          stream would begin in the middle;
        - while fenced: what was planned before a long pause may have been created, finished and deleted since;
        - by another member than `member_id`, or in another storage: the rows that the plan rests on may be gone.
        """
        if not (yield from self.check_not_reset()) or not (yield from self._confirm_storage()):
            return None
        if not self._is_sure_of_storage or member_id != self.member_id or not self.may_start(*self.moment):
            return None
        answer = yield from self.ask(calls.CreateLease(row))
        self.table.report_change(row.key)  # also without an answer: it may have been created
        if isinstance(answer, NoAnswer):
            return None
        self.observe_lease(answer)
        return answer

    def give_unreadable(self, key: LeaseKey, moment: Moment) -> None:
        """This member has failed to read the shard for a long time. Another may be able to read it (rule U7)."""
        self.moment = moment
        request = give_unreadable(self.table, self.detector, key, moment.now_ms)
        if request is not None:
            self.table.not_wanted_until[key] = moment.now_ms + NOT_WANTED_MS
            self.table.drain(request)
            self._changes.append(Drain(request))

    def observe_lease(self, row: LeaseRow) -> None:
        """A row that was created or read outside of a round."""
        self.table.observe_lease(row, self.moment.now_ms)
        self._follow()

    def leave(self) -> Steps[bool]:
        """One write frees all leases of this member; False if the store gave no answer."""
        self.end("left")
        return not isinstance((yield from self.ask(calls.Leave(self.member_id))), NoAnswer)

    def _follow(self) -> None:
        """Reports the holdings that were gained and lost."""
        for key in tuple({**self._followed, **self.table.held}):
            self._follow_one(key)

    def _follow_one(self, key: LeaseKey) -> None:
        followed, held = self._followed.get(key), self.table.held.get(key)
        if followed is held:
            return
        if followed is not None:
            del self._followed[key]
            self._changes.append(self._lost(key, followed))
        if held is not None:
            self._followed[key] = held
            self._changes.append(Held(held))

    def _lost(self, key: LeaseKey, holding: Holding) -> Lost:
        known = self.table.leases.get(key)
        if known is not None and known.is_finished:
            return Lost(key, "finished")
        if holding.pending_transfer is not None:
            return Lost(key, "released") if holding.request is None else Lost(key, "given", holding.request.requester)
        if known is not None and known.owner not in {None, self.member_id}:
            return Lost(key, "taken_over", known.owner)
        return Lost(key, "row_changed" if self.ending is None else "member_ended")
