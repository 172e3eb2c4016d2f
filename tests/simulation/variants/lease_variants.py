"""Lease protocols that are broken on purpose, one rule each, and the worlds in which it shows.

A simulation that finds nothing proves nothing unless it finds these: each must be caught within 50 seeds.
"""

from typing import NamedTuple

from msgspec.structs import replace

from anabranch._core.leases.failure_detector import FailureDetector
from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._core.leases.lease_table import LeaseTable
from anabranch._core.leases.plan import Take, apply_members
from anabranch.testing.tick import TickStore, TickWorker, WorldOptions
from anabranch.testing.tick.network import NO_ANSWER, Reconnected
from anabranch.testing.tick.reader import Reader

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
    roll_back_every_ms=30_000,
    roll_back_ms=15_000,
)
"""A store that goes back in time, under a fleet that comes and goes."""


RESTLESS = replace(
    ROUGH, lease_count=4, stop_every_ms=30_000, partition_every_ms=0, lost=0.1, overruns=0.05, commit_every_ms=2_000
)
"""Workers that come and go all the time, so that leases are handed over."""


class Variant(NamedTuple):
    worker_class: type[TickWorker] = TickWorker
    store_class: type[TickStore] = TickStore
    options: WorldOptions = ROUGH
    complaint: str = "stale dispatch"


class ExpiryIsDeath(FailureDetector):
    """A member that looks dead is not sealed: its leases are taken as they are. The store takes them: it compares owner
    and version only, and relies on the plan.
    """

    def sealable(self, now_ms, known_dead=()):
        return []

    def is_over(self, member_id, now_ms):
        watch = self._watches.get(member_id)
        return watch is not None and self._is_due(watch, now_ms)

    def live(self):
        now_ms = self._read_at_ms or 0
        return [row for row in super().live() if row.member_id == self.me or not self.is_over(row.member_id, now_ms)]


class TakeWithoutSeal(TickWorker):
    stopwatches_class = ExpiryIsDeath

    def plan(self, *, may_take):
        self.detector.me = self.table.member_id
        self.table.changed = True
        return super().plan(may_take=may_take)


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
    heart_class = HeartbeatThatNeverLifts

    def may_start(self, key):
        if not super().may_start(key):
            return False
        # a fence that passed stays passed, even where a late answer has moved it
        return self.heart.status.fence.ending is None


class DetectorWithOwnExpiry(FailureDetector):
    def _is_due(self, watch, now_ms):
        return now_ms - watch.since_ms >= self._timing.expiry_ms


class OwnExpiry(TickWorker):
    stopwatches_class = DetectorWithOwnExpiry


class StopwatchFromTheRequest(TickWorker):
    def call_deadline_ms(self):
        return 15_000

    def members_received(self, rows, sent_at_ms):
        apply_members(self.table, self.detector, rows, sent_at_ms)


class ValidityFromTheAcknowledgement(TickWorker):
    def call_deadline_ms(self):
        return 15_000

    def beat_answered(self, row):
        self.heart._began = (self.now_ms(), self.process.wall_ms())
        super().beat_answered(row)


class DetectorThatRunOn(FailureDetector):
    """No gap rule: what was not watched is held against everybody."""

    def _restart_after_gap(self, gap_ms, now_ms):
        pass


class NoGapRule(TickWorker):
    stopwatches_class = DetectorThatRunOn


class HandOffByForce(TickWorker):
    """A request has a deadline; then the lease is taken from its live owner."""

    def plan(self, *, may_take):
        steps = super().plan(may_take=may_take)
        for key, asked_ms in self.table.asked.items():
            row = self.table.leases[key]
            if self.now_ms() - asked_ms > 3_000 and row.owner not in {None, self.table.member_id}:
                steps.append(Take(key, row.owner, row.version))
        return steps


class FenceOfOneClock(TickWorker):
    """Believes a clock that stands still while the machine is suspended."""

    def may_start(self, key):
        until_ms = self.heart.status.fence.valid_until_ms
        return self.table.is_startable(key) and until_ms is not None and self.now_ms() < until_ms


class FenceBySignal(TickWorker):
    """The heartbeats' side tells the other when the fence has passed, instead of letting it look at the clock."""

    lane = "heart"

    def __init__(self, host, leases):
        self.fenced = True
        super().__init__(host, leases)

    def beat_answered(self, row):
        super().beat_answered(row)
        if (until_ms := self.heart.status.fence.valid_until_ms) is not None:
            self.fenced = False
            self.process.at(until_ms + 1, self.lane, self.look)

    def look(self):
        until_ms = self.heart.status.fence.valid_until_ms
        if until_ms is None or self.now_ms() >= until_ms:
            self.fenced = True

    def may_start(self, key):
        return not self.fenced and not self.is_draining and self.table.is_startable(key)


class FenceBySignalToTheLoop(FenceBySignal):
    """The same, but the news has to wait for the loop to turn."""

    lane = "main"


class ReaderOfPages(Reader):
    """Looks at the clock, then starts ten records."""

    checked = 0

    def may_start(self):
        if self.checked == 0:
            self.checked = 10 if super().may_start() else 0
        else:
            self.checked -= 1
        return self.checked > 0 and self._worker.table.is_startable(self.key) and not self._worker.is_draining


class FenceForAPage(TickWorker):
    reader_class = ReaderOfPages


class OwnerIsWorkerId(TickWorker):
    def new_member_id(self):
        return self.host.worker_id


class MissingIsDead(FailureDetector):
    def is_over(self, member_id, now_ms):
        watch = self._watches.get(member_id)
        return watch is not None and (watch.row is None or watch.row.state != "live")


class MissingRowIsDeath(TickWorker):
    stopwatches_class = MissingIsDead


class TableThatNeverAdopts(LeaseTable):
    """A take whose answer was lost is forgotten."""

    def observe_leases(self, rows, now_ms):
        super().observe_leases([row for row in rows if row.owner != self.member_id or row.key in self.held], now_ms)


class LostTakeIsForgotten(TickWorker):
    table_class = TableThatNeverAdopts


class TableThatBelievesOldRows(LeaseTable):
    def observe_lease(self, row, now_ms):
        known = self.leases.get(row.key)
        if known is not None and row.version < known.version and row.key not in self.held:
            del self.leases[row.key]
        super().observe_lease(row, now_ms)


class OldRowsAreBelieved(TickWorker):
    table_class = TableThatBelievesOldRows


class ReaderThatResumes(Reader):
    """A gift without an answer is taken back."""

    def wrote(self, answer):
        super().wrote(answer)
        holding = self._worker.table.held.get(self.key)
        if answer is NO_ANSWER and holding is not None and holding.state == "transferring":
            if holding.request is not None:
                self._worker.table.answered[holding.request] = None
            holding.state, holding.request, holding.pending_transfer = "held", None, None
            self._drain_since_ms = None


class GiftIsTakenBack(TickWorker):
    reader_class = ReaderThatResumes


class ReaderThatDoesNotWait(Reader):
    """Gives its lease away while a call runs."""

    def may_part(self):
        return not self.writing


class GiftBesideARunningCall(TickWorker):
    reader_class = ReaderThatDoesNotWait


class TableThatGivesOldRows(LeaseTable):
    """What was finished since the last commit does not go with the gift."""

    def transfer(self, key, final=None):
        return super().transfer(key)


class GiftWithoutTheLastCheckpoint(TickWorker):
    table_class = TableThatGivesOldRows


class ReaderThatBelievesInItsCommits(Reader):
    """A commit without an answer counts as done."""

    def commit(self):
        self.sent = self.row_so_far()
        super().commit()

    def wrote(self, answer):
        super().wrote(answer)
        holding = self._worker.table.held.get(self.key)
        if answer is NO_ANSWER and holding is not None and holding.state == "held":
            holding.row = replace(self.sent, version=holding.row.version + 1)


class LostCommitIsBelieved(TickWorker):
    reader_class = ReaderThatBelievesInItsCommits


class RollBackIsIgnored(TickWorker):
    """Connects anew and goes on."""

    def _beaten(self, heart, answer):
        super()._beaten(heart, NO_ANSWER if isinstance(answer, Reconnected) else answer)

    def storage_changed(self, incarnation):
        self.table.rolled_back = False
        self.follow_book()


class RollBackIsNotWaitedOut(TickWorker):
    def _hold_takes(self):
        pass


class BootstrapAfterReset(TickWorker):
    """A running worker that finds no application makes a new one."""

    def _check_app(self, heart):
        self._open(self.first_leases)

    def __init__(self, host, leases):
        self.first_leases = leases
        super().__init__(host, leases)


VARIANTS = {
    "take without seal": Variant(TakeWithoutSeal),
    "take without seal, fence never lifts, reads lag": Variant(
        TakeWithoutSealNeverLift, options=replace(ROUGH, lag_ms_max=16_000)
    ),
    "own, shorter expiry": Variant(OwnExpiry, options=replace(ROUGH, expiry_ms=(10_000, 5_000))),
    "stopwatch from the request, no deadline": Variant(StopwatchFromTheRequest, options=SLOW),
    "validity from the acknowledgement, no deadline": Variant(ValidityFromTheAcknowledgement, options=SLOW),
    "hand-off by force": Variant(
        HandOffByForce, options=replace(ROUGH, lease_count=4, stop_every_ms=40_000, overruns=0.1)
    ),
    "clock that stops, believed": Variant(FenceOfOneClock, options=replace(ROUGH, clocks_stop=True)),
    "fence by signal": Variant(FenceBySignal),
    "fence by signal to a loop that stalls": Variant(
        FenceBySignalToTheLoop, options=replace(ROUGH, pause_every_ms=0, stall_every_ms=20_000)
    ),
    "fence looked at once for a page": Variant(FenceForAPage),
    "owner is the worker id": Variant(OwnerIsWorkerId, options=replace(ROUGH, same_worker_id=True)),
    "a missing row is death": Variant(MissingRowIsDeath, options=replace(ROUGH, row_deletion_every_ms=20_000)),
    "lost take is forgotten": Variant(
        LostTakeIsForgotten,
        options=WorldOptions(lease_count=3, lost=0.1, crash_every_ms=60_000),
        complaint="standstill",
    ),
    "old rows are believed": Variant(
        OldRowsAreBelieved, options=replace(ROUGH, lease_count=4, stop_every_ms=40_000, lag_ms_max=16_000)
    ),
    "gift is taken back": Variant(
        GiftIsTakenBack, options=replace(ROUGH, lease_count=4, stop_every_ms=30_000, late=0.1)
    ),
    "gift beside a running call": Variant(GiftBesideARunningCall, options=RESTLESS, complaint="hand-off"),
    "gift without the last checkpoint": Variant(GiftWithoutTheLastCheckpoint, options=RESTLESS, complaint="hand-off"),
    "lost commit is believed": Variant(LostCommitIsBelieved, options=RESTLESS, complaint="hand-off"),
    "roll-back is ignored": Variant(RollBackIsIgnored, options=FORGETFUL),
    "roll-back is not waited out": Variant(RollBackIsNotWaitedOut, options=FORGETFUL),
    "bootstrap after reset": Variant(
        BootstrapAfterReset, options=replace(ROUGH, reset=True), complaint="second application"
    ),
}
