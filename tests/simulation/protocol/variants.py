"""Lease protocols that are broken on purpose, one rule each, and the worlds in which it shows.

Each is the lease machine that ships, with one method replaced, or with a broken part in place of its own. A simulation
that finds nothing proves nothing unless it finds these: each must be caught within 50 seeds.
"""

from typing import NamedTuple

from msgspec.structs import replace

from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._core.leases.lease_table import LeaseTable
from anabranch._core.leases.machine import LeaseMachine
from anabranch._core.leases.members import FailureDetector
from anabranch._core.leases.store_calls import (
    CreateLease,
    NoAnswer,
    OpenApp,
    PollStore,
    ReadApp,
    ReadIncarnation,
    SendHeartbeat,
    TakeLease,
    Wait,
    WriteStream,
)
from anabranch._core.shards.lifecycle import plan_bootstrap
from protocol.faults import WorldOptions
from protocol.worker import Reader

ROUGH = WorldOptions(
    worker_count=3,
    lease_count=1,
    lost=0.04,
    late=0.03,
    clock_error=0.01,
    pause_every_ms=30_000,
    partition_every_ms=30_000,
    commit_every_ms=10_000,
    settling_ms=0,
)
"""The worlds of the evidence table: three workers, one lease, four minutes."""

SLOW = replace(ROUGH, worker_count=5, lease_count=5, lost=0.0, late=0.1)
"""Every tenth message is late, and none is lost."""

FORGETFUL = replace(
    ROUGH,
    worker_count=5,
    lease_count=5,
    partition_every_ms=15_000,
    stop_every_ms=20_000,
    roll_back_every_ms=20_000,
    roll_back_ms=15_000,
)
"""A store that goes back in time, under a fleet that comes and goes."""


RESTLESS = replace(
    ROUGH, lease_count=4, stop_every_ms=30_000, partition_every_ms=0, lost=0.1, overruns=0.05, commit_every_ms=2_000
)
"""Workers that come and go all the time, so that leases are handed over."""


CALM_HOSTS = replace(ROUGH, pause_every_ms=0, partition_every_ms=0)
"""Only messages go wrong."""


GROWING = WorldOptions(
    worker_count=4,
    lease_count=60,
    joins_every_ms=5_000,
    faulty_ms=30_000,
    settling_ms=40_000,
    stall_every_ms=6_000,
    overruns=0.1,
)
"""Many leases, in a fleet that workers join one after another, whose loops stall."""


class Variant(NamedTuple):
    machine_class: type[LeaseMachine] = LeaseMachine
    reader_class: type[Reader] = Reader
    options: WorldOptions = ROUGH
    complaint: str = "stale dispatch"


def with_detector(detector_class):
    """The machine with a broken failure detector."""

    class Machine(LeaseMachine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.detector = detector_class(self.timing)
            self.detector.machine = self

    return Machine


def with_table(table_class):
    """The machine with a broken lease table."""

    class Machine(LeaseMachine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.table = table_class("", self.timing.expiry_ms)

    return Machine


def with_heartbeat(heartbeat_class):
    """The machine with broken heartbeats."""

    class Machine(LeaseMachine):
        def _new_heartbeat(self, member_id):
            return heartbeat_class(member_id, self.timing)

    return Machine


def without_deadline(machine_class):
    class Machine(machine_class):
        def __init__(self, profile, timing, *arguments):
            super().__init__(profile, replace(timing, call_deadline_ms=15_000), *arguments)

    return Machine


class ExpiryIsDeath(FailureDetector):
    """A member that looks dead is not sealed: its leases are taken as they are. The store takes them: it compares owner
    and version only, and relies on the plan.
    """

    def sealable(self, now_ms, known_dead=()):
        return []

    def has_ended(self, member_id, now_ms):
        watch = self._watches.get(member_id)
        return watch is not None and self._has_expired(watch, now_ms)

    def live(self):
        me, now_ms = self.machine.member_id, self._read_at_ms or 0
        return [row for row in super().live() if row.member_id == me or not self.has_ended(row.member_id, now_ms)]


class TakeWithoutSeal(with_detector(ExpiryIsDeath)):
    def _plan(self):
        self.table.changed = True
        return super()._plan()


class HeartbeatThatNeverLifts(HeartbeatState):
    """Once its fence has passed, a member is over, whatever the store says."""

    def answered(self, row):
        valid_until_ms = self.status.fence.valid_until_ms
        began_ms, _ = self._began
        if valid_until_ms is not None and began_ms >= valid_until_ms:
            self._began = None
            self.end("missing")
        else:
            super().answered(row)


class TakeWithoutSealNeverLift(TakeWithoutSeal):
    def _new_heartbeat(self, member_id):
        return HeartbeatThatNeverLifts(member_id, self.timing)


class DetectorWithOwnExpiry(FailureDetector):
    def _has_expired(self, watch, now_ms):
        return now_ms - watch.since_ms >= self._timing.expiry_ms


class DetectorFromTheRequest(FailureDetector):
    def observe(self, rows, now_ms):
        return super().observe(rows, self.machine.asked_ms)


class TimerFromTheRequest(without_deadline(with_detector(DetectorFromTheRequest))):
    def ask(self, call):
        if isinstance(call, PollStore):
            self.asked_ms = self.moment.now_ms
        return (yield from super().ask(call))


def intercepted(steps, on_answer):
    """The same steps; `on_answer` hears of each answer before they do."""
    answer = None
    while True:
        try:
            action = steps.send(answer)
        except StopIteration:
            return
        answer = yield action
        on_answer(action, answer)


class HeartbeatFromTheAnswer(HeartbeatState):
    def __init__(self, member_id, timing):
        super().__init__(member_id, replace(timing, call_deadline_ms=15_000))

    def run(self, moment):
        def on_answer(action, answer):
            if isinstance(action, SendHeartbeat) and not isinstance(answer.value, NoAnswer):
                self._began = tuple(answer.moment)

        return intercepted(super().run(moment), on_answer)


class DetectorWithoutGaps(FailureDetector):
    """No gap rule: what was not watched is held against everybody."""

    def _restart_after_gap(self, gap_ms, now_ms):
        pass


class DetectorBlindToStreams(FailureDetector):
    """Plans as if every member read every stream."""

    def live(self):
        return [replace(row, streams=()) for row in super().live()]


class NoGapRule(with_detector(DetectorWithoutGaps)):
    """Named, so that it can be sent to other processes."""


class HandOffByForce(LeaseMachine):
    """A request has a deadline; then the lease is taken from its live owner."""

    def _plan(self):
        steps = super()._plan()
        for key, asked_ms in self.table.asked.items():
            row = self.table.leases[key]
            if self.moment.now_ms - asked_ms > 3_000 and row.owner not in {None, self.member_id}:
                steps.append(TakeLease(key, self.member_id, row.owner, row.version))
        return steps


class FenceOfOneClock(LeaseMachine):
    """Believes a clock that stands still while the machine is suspended."""

    def may_start(self, now_ms, wall_ms):
        until_ms = self.heartbeat.status.fence.valid_until_ms
        return self.ending is None and until_ms is not None and now_ms < until_ms


class HeartbeatThatSignals(HeartbeatState):
    """Says when the fence has passed, instead of letting others look at the clock."""

    is_fenced = True

    def registered(self, row, storage, began):
        super().registered(row, storage, began)
        self.is_fenced = False

    def run(self, moment):
        steps, answer = super().run(moment), None
        while True:
            try:
                action = steps.send(answer)
            except StopIteration:
                self.is_fenced = True
                return
            if not isinstance(action, Wait):
                answer = yield action
                self.is_fenced = self._is_past(answer.moment)
                continue
            until_ms = action.until_ms
            if not self.is_fenced:
                until_ms = min(until_ms, (self.status.fence.valid_until_ms or 0) + 1)
            answer = yield Wait(until_ms, wakeable=True)
            self.is_fenced = self._is_past(answer.moment)

    def _is_past(self, moment):
        until_ms = self.status.fence.valid_until_ms
        return until_ms is None or moment.now_ms >= until_ms


class FenceBySignal(with_heartbeat(HeartbeatThatSignals)):
    def may_start(self, now_ms, wall_ms):
        return self.ending is None and not self.heartbeat.is_fenced


class FenceBySignalToTheLoop(FenceBySignal):
    """The same, but the news has to wait for the loop to turn."""

    is_fenced = True

    def ask(self, call):
        answer = yield from super().ask(call)
        self.is_fenced = getattr(self.heartbeat, "is_fenced", True)  # before it joins it has none
        return answer

    def may_start(self, now_ms, wall_ms):
        return self.ending is None and not self.is_fenced


class ReaderOfPages(Reader):
    """Looks at the clock, then starts ten records."""

    checked = 0

    def may_start(self):
        if self.checked == 0:
            self.checked = 10 if super().may_start() else 0
        else:
            self.checked -= 1
        return self.checked > 0 and not self.worker.machine.draining


class OwnerIsWorkerId(LeaseMachine):
    def _new_member_id(self):
        return self.profile.worker_id


class MissingIsDead(FailureDetector):
    def has_ended(self, member_id, now_ms):
        watch = self._watches.get(member_id)
        return watch is not None and (watch.row is None or watch.row.state != "live")


class TableThatNeverAdopts(LeaseTable):
    """A take whose answer was lost is forgotten."""

    def observe_leases(self, rows, now_ms):
        super().observe_leases([row for row in rows if self._is_known(row)], now_ms)

    def observe_read(self, key, row, now_ms):
        super().observe_read(key, row if row is not None and self._is_known(row) else None, now_ms)

    def _is_known(self, row):
        return row.owner != self.member_id or row.key in self.held


class TableThatBelievesOldRows(LeaseTable):
    def observe_lease(self, row, now_ms):
        known = self.leases.get(row.key)
        if known is not None and row.version < known.version and row.key not in self.held:
            del self.leases[row.key]
        super().observe_lease(row, now_ms)


class TableThatTrustsGaps(LeaseTable):
    """Reads what others name, and never asks how much they changed beyond that."""

    def _is_gap(self, missed_count, row):
        return False


class GiftIsTakenBack(LeaseMachine):
    """A gift without an answer is taken back."""

    def write(self, step):
        outcome = yield from super().write(step)
        holding = self.table.held.get(step.row.key)
        if outcome == "unknown" and holding is not None and holding.state == "transferring":
            if holding.request is not None:
                self.table.answered[holding.request.short_name] = None
            holding.state, holding.request, holding.pending_transfer = "held", None, None
        return outcome


class ReaderThatGoesOn(Reader):
    """Works on a lease that its machine has taken back."""

    def wrote(self, outcome):
        super().wrote(outcome)
        if outcome == "unknown" and self._holding.state == "held":
            self._drain_since_ms = None


class ReaderThatDoesNotWait(Reader):
    """Gives its lease away while a call runs."""

    def may_part(self):
        return not self.writing


class TableThatGivesOldRows(LeaseTable):
    """What was finished since the last commit does not go with the gift."""

    def transfer(self, key, final):
        return super().transfer(key, self.held[key].row)


class LostCommitIsBelieved(LeaseMachine):
    """A commit without an answer counts as done."""

    def write(self, step):
        outcome = yield from super().write(step)
        holding = self.table.held.get(step.row.key)
        if outcome == "unknown" and holding is not None and holding.state == "held":
            holding.row = replace(step.row, version=holding.row.version + 1)
        return outcome


class HeartbeatThatTrustsAnyStorage(HeartbeatState):
    def run(self, moment):
        def on_answer(action, answer):
            if isinstance(action, ReadIncarnation) and not isinstance(answer.value, NoAnswer):
                self._storage = answer.value

        return intercepted(super().run(moment), on_answer)


class RollBackIsIgnored(with_heartbeat(HeartbeatThatTrustsAnyStorage)):
    """Connects again and goes on."""

    def _confirm_storage(self):
        self._incarnation = None
        return (yield from super()._confirm_storage())

    def _hold_takes(self):
        pass

    def _follow(self):
        self.table.rolled_back = False
        super()._follow()


class RollBackIsNotWaitedOut(LeaseMachine):
    def _hold_takes(self):
        pass


class MarkBeforeLeases(LeaseMachine):
    """Marks a stream as complete, then creates its leases."""

    def _complete(self, row):
        listing = yield from self._whole_listing(row)
        marked = yield from self.ask(WriteStream(replace(row, bootstrapped=True), row.version))
        for lease in plan_bootstrap(row, listing):
            yield from self.ask(CreateLease(lease))
        return None if isinstance(marked, NoAnswer) else marked


class BootstrapAfterReset(LeaseMachine):
    """A running worker that finds no application makes a new one."""

    def check_not_reset(self):
        app = yield from self.ask(ReadApp())
        if app is None:
            app = yield from self.ask(OpenApp(replace(self.app, app_id=self._new_member_id())))
        if not isinstance(app, NoAnswer):
            self.app = app
        return not isinstance(app, NoAnswer)

    def _recognise(self, app):
        return app or self.app


VARIANTS = {
    "take without seal": Variant(TakeWithoutSeal),
    "take without seal, fence never lifts, reads lag": Variant(
        TakeWithoutSealNeverLift, options=replace(ROUGH, lag_ms_max=16_000)
    ),
    "own, shorter expiry": Variant(
        with_detector(DetectorWithOwnExpiry), options=replace(ROUGH, expiry_ms=(10_000, 5_000))
    ),
    "timer from the request, no deadline": Variant(TimerFromTheRequest, options=SLOW),
    "validity from the acknowledgement, no deadline": Variant(with_heartbeat(HeartbeatFromTheAnswer), options=SLOW),
    "hand-off by force": Variant(
        HandOffByForce, options=replace(ROUGH, lease_count=4, stop_every_ms=40_000, overruns=0.1)
    ),
    "clock that stops, believed": Variant(FenceOfOneClock, options=replace(ROUGH, clocks_stop=True)),
    "fence by signal": Variant(FenceBySignal),
    "fence by signal to a loop that stalls": Variant(
        FenceBySignalToTheLoop,
        options=replace(ROUGH, pause_every_ms=0, stall_every_ms=15_000, partition_every_ms=15_000),
    ),
    "fence looked at once for a page": Variant(reader_class=ReaderOfPages),
    "owner is the worker id": Variant(OwnerIsWorkerId, options=replace(ROUGH, same_worker_id=True)),
    "a missing row is death": Variant(
        with_detector(MissingIsDead), options=replace(ROUGH, row_deletion_every_ms=20_000)
    ),
    "lost take is forgotten": Variant(
        with_table(TableThatNeverAdopts),
        options=WorldOptions(lease_count=3, lost=0.1, crash_every_ms=60_000),
        complaint="standstill",
    ),
    "old rows are believed": Variant(
        with_table(TableThatBelievesOldRows),
        options=replace(ROUGH, lease_count=8, stop_every_ms=20_000, lag_ms_max=16_000, lost=0.01, late=0.0),
    ),
    "a gap in the named changes is trusted": Variant(
        with_table(TableThatTrustsGaps), options=GROWING, complaint="standstill"
    ),
    "streams are not planned for": Variant(
        with_detector(DetectorBlindToStreams),
        options=WorldOptions(worker_count=3, lease_count=6, stream_count=2, faulty_ms=30_000, settling_ms=40_000),
        complaint="standstill",
    ),
    "gift is taken back": Variant(
        GiftIsTakenBack,
        ReaderThatGoesOn,
        replace(CALM_HOSTS, worker_count=5, lease_count=15, polls_per_expiry=5, stop_every_ms=20_000, late=0.05),
    ),
    "gift beside a running call": Variant(reader_class=ReaderThatDoesNotWait, options=RESTLESS, complaint="hand-off"),
    "gift without the last checkpoint": Variant(
        with_table(TableThatGivesOldRows), options=RESTLESS, complaint="hand-off"
    ),
    "lost commit is believed": Variant(LostCommitIsBelieved, options=RESTLESS, complaint="hand-off"),
    "roll-back is ignored": Variant(RollBackIsIgnored, options=FORGETFUL),
    "roll-back is not waited out": Variant(RollBackIsNotWaitedOut, options=FORGETFUL),
    "mark before the leases": Variant(MarkBeforeLeases, complaint="bootstrap"),
    "bootstrap after reset": Variant(
        BootstrapAfterReset, options=replace(ROUGH, reset=True), complaint="second application"
    ),
}
