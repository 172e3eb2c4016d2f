"""A worker of the tick simulation: observe, plan, perform, apply, as the engine does, but for real time and real
records.

It decides nothing about leases by itself; deliberately broken variants override one method each, and must be caught.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from anabranch._core.leases.failure_detector import FailureDetector
from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._core.leases.lease_table import LeaseTable
from anabranch._core.leases.plan import (
    Drain,
    Step,
    Take,
    Write,
    apply_leases,
    apply_members,
    apply_seal,
    apply_take,
    apply_write,
    plan_round,
)
from anabranch._core.leases.store_calls import DeleteMember, RequestHandOff, Seal
from anabranch._model.leases import AppRow, Conflict, HeartbeatWrite, LeaseKey, LeaseRow, MemberRow
from anabranch.testing.tick.host import Host
from anabranch.testing.tick.journal import Tenure
from anabranch.testing.tick.network import NO_ANSWER, Reconnected
from anabranch.testing.tick.process import Lane
from anabranch.testing.tick.reader import Reader, committed_record

__all__ = ["TickWorker"]

_ROLL_BACK_WAIT_MS_MIN = 10_000
_STOP_DEADLINE_MS = 8_000


class TickWorker:
    heart_class: ClassVar[type[HeartbeatState]] = HeartbeatState
    stopwatches_class: ClassVar[type[FailureDetector]] = FailureDetector
    table_class: ClassVar[type[LeaseTable]] = LeaseTable
    reader_class: ClassVar[type[Reader]] = Reader

    def __init__(self, host: Host, leases: Sequence[LeaseRow]) -> None:
        self.host = host
        self.process = host.process
        self.link = host.link
        self.dice = host.dice
        self.now_ms = host.process.now_ms
        self.options = host.options
        self.app_id = ""
        self.is_draining = False
        self.has_stopped = False
        """Stopped on purpose: a clean stop, or an application that is not its own any more."""
        self.readers: dict[LeaseKey, Reader] = {}
        self.detector = self.stopwatches_class(host.timing)
        self.heart = self.heart_class(self.new_member_id(), host.timing)
        self.table = self.table_class(self.heart.member_id, host.timing.expiry_ms)
        self.takes_held_until_ms: int | None = None
        """While the storage may have forgotten something, nothing is taken (rule L13)."""
        self._recorded = ""
        self._deadline_ms = self.call_deadline_ms()
        self._polling = False
        self._followed = 0
        """The table's `lease_version` that the readers follow."""
        self._open(leases)

    # what variants replace

    def new_member_id(self) -> str:
        return f"{self.host.worker_id}#{self.dice.bits(128):032x}"

    def call_deadline_ms(self) -> int:
        return self.host.timing.call_deadline_ms

    def may_start(self, key: LeaseKey) -> bool:
        """Rule L8: compared immediately before the start, never signalled."""
        fence = self.heart.status.fence
        return (
            not self.is_draining
            and fence.member_id == self.table.member_id
            and self.table.is_startable(key)
            and fence.may_start(self.now_ms(), self.process.wall_ms())
        )

    def beat_answered(self, row: MemberRow | None) -> None:
        self.heart.answered(row)

    def members_received(self, rows: Sequence[MemberRow], sent_at_ms: int) -> None:  # noqa: ARG002 -- for variants
        apply_members(self.table, self.detector, rows, self.now_ms())

    def plan(self, *, may_take: bool) -> list[Step]:
        return plan_round(self.table, self.detector, self.now_ms(), may_take=may_take)

    def storage_changed(self, incarnation: str) -> None:
        """Rule L13: fence all, become a new member, and take nothing for the longest expiry."""
        self._hold_takes()
        self.link.incarnations.update(heart=incarnation, main=incarnation)
        self.heart.end("rolled_back")
        self.table.forget()
        self.detector.forget()
        self._begin_anew()

    # starting

    def _open(self, leases: Sequence[LeaseRow]) -> None:
        """Each attempt proposes an identity of its own: one that an earlier attempt proposed may be an application that
        was reset since, and must not come back (rule L14).
        """
        store = self.host.store
        app = AppRow(
            app="billing",
            app_id=f"{self.dice.bits(64):016x}",
            created_wall_ms=self.process.wall_ms(),
            incarnation=self.link.incarnations["main"],
        )

        heart = self.heart

        def opened(answer: Any) -> None:
            if heart is not self.heart:
                return
            if isinstance(answer, Reconnected) or answer is NO_ANSWER:
                self._open(leases)
                return
            row, incarnation = answer
            self.host.journal.opened(self.process.true_ms(), self.app_id, row.app_id)
            self.app_id = row.app_id
            if row.incarnation != incarnation:
                self._hold_takes()
            self._recorded = row.incarnation
            self._register(self.heart)
            self._poll()

        self._call("main", lambda: (store.open(app, leases), store.incarnation), opened)

    def _register(self, heart: HeartbeatState) -> None:
        if heart is not self.heart or self.has_stopped:
            return
        row = MemberRow(
            member_id=self.heart.member_id, worker_id=self.host.worker_id, expiry_ms=self.host.timing.expiry_ms
        )
        self.heart.begin_registration(self.now_ms(), self.process.wall_ms())
        self._call("heart", partial(self.host.store.register_member, row), partial(self._beaten, self.heart))

    def _begin_anew(self) -> None:
        """The member is over. First make sure that the application is still the one that was opened (rule L14)."""
        heart = self.heart_class(self.new_member_id(), self.host.timing)
        self.table.become(heart.member_id)
        self.readers.clear()
        self.heart = heart
        self._check_app(heart)

    def _check_app(self, heart: HeartbeatState) -> None:
        if heart is not self.heart or self.has_stopped:
            return

        def checked(answer: Any) -> None:
            if heart is not self.heart:
                return
            if isinstance(answer, Reconnected) or answer is NO_ANSWER:
                self.process.after(100, "main", self._check_app, heart)
                return
            row, _ = answer
            if row is None or row.app_id != self.app_id:
                self.has_stopped = True
            else:
                self._recorded = row.incarnation
                self._register(self.heart)

        self._call("main", self.host.store.read_app, checked)

    def _hold_takes(self) -> None:
        wait_ms = max(self.detector.expiry_ms_max, _ROLL_BACK_WAIT_MS_MIN)
        self.takes_held_until_ms = self.now_ms() + wait_ms

    # heartbeats

    def _beat(self, heart: HeartbeatState) -> None:
        if heart is not self.heart or self.has_stopped or heart.next_heartbeat_ms is None:
            return
        if self.now_ms() < heart.next_heartbeat_ms:
            self.process.at(heart.next_heartbeat_ms, "heart", self._beat, heart)
            return
        report = HeartbeatWrite(
            member_id="",
            attempt=0,
            load=self.table.load,
            lease_version=self.table.lease_version,
            draining=self.is_draining,
            answered=tuple(self.table.answered),
        )
        write = heart.begin(self.now_ms(), self.process.wall_ms(), report)
        self._call("heart", partial(self.host.store.heartbeat, write), partial(self._beaten, heart))

    def _beaten(self, heart: HeartbeatState, answer: Any) -> None:
        if heart is not self.heart or self.has_stopped:
            return
        if isinstance(answer, Reconnected):
            # The heart ends its member by itself; the rest follows as soon as the main lane runs.
            heart.end("rolled_back")
        elif answer is NO_ANSWER:
            heart.failed(self.now_ms())
        else:
            self.beat_answered(answer)
        if heart.status.fence.ending is not None:
            self.process.deliver("main", self._ended, heart)
        elif heart.next_heartbeat_ms is not None:
            if heart.status.row is None:
                self.process.at(heart.next_heartbeat_ms, "heart", self._register, heart)
            else:
                self.process.at(heart.next_heartbeat_ms, "heart", self._beat, heart)

    def _ended(self, heart: HeartbeatState) -> None:
        if heart is not self.heart or self.has_stopped:
            return
        if heart.status.fence.ending == "rolled_back":
            self.storage_changed(self.link.incarnations["heart"])
        else:
            self._begin_anew()

    # rounds

    def _poll(self) -> None:
        if self.has_stopped:
            return
        self.process.after(self.host.timing.poll_interval_ms, "main", self._poll)
        if self._polling or self.heart.status.row is None:
            return
        self._polling = True
        sent_at_ms, lag_ms = self.now_ms(), self.link.lag_ms()

        def received(answer: Any) -> None:
            if self._is_usable(answer):
                self.members_received(answer, sent_at_ms)
                self._read_leases()
            else:
                self._polling = False

        store = self.host.store
        self._call("main", partial(store.read_members, lag_ms) if lag_ms else store.read_members, received)

    def _read_leases(self) -> None:
        if not self.table.wants_leases(self.now_ms()):
            self._round()
            return
        lag_ms = self.link.lag_ms()

        def received(answer: Any) -> None:
            if self._is_usable(answer):
                apply_leases(self.table, self.detector, answer, self.now_ms())
                self._round()
            else:
                self._polling = False

        self._call("main", partial(self.host.store.read_leases, lag_ms), received)

    def _round(self) -> None:
        self._polling = False
        if self.has_stopped or self.heart.member_id != self.table.member_id:
            return
        self.follow_book()
        for step in self.plan(may_take=self._may_take()):
            self.perform(step)

    def _may_take(self) -> bool:
        if self.is_draining or not self.heart.status.fence.may_start(self.now_ms(), self.process.wall_ms()):
            return False
        if self.takes_held_until_ms is None:
            return True
        if self.now_ms() < self.takes_held_until_ms:
            return False
        self.takes_held_until_ms = None
        storage = self.link.incarnations["main"]
        self._do(partial(self.host.store.record_incarnation, self._recorded, storage), lambda _: None)
        return True

    def perform(self, step: Step) -> None:
        store, member_id = self.host.store, self.table.member_id
        match step:
            case Seal():
                self._do(partial(store.seal_member, step.member_id, step.observed_counter), self._sealed)
            case Take():
                self._do(
                    partial(store.take_lease, step.key, member_id, step.expected_owner, step.expected_version,
                            step.epoch_floor),
                    partial(self._taken, step),
                )  # fmt: skip
            case RequestHandOff():
                self._do(partial(store.request_hand_off, step.donor, step.request), self._sealed)
            case Drain():
                self.readers[step.request.key].drain()
            case Write():
                if not self.readers[step.row.key].writing:
                    self.write(step)
            case DeleteMember():
                self._do(partial(store.delete_member, step.member_id), lambda _: None)

    def _sealed(self, answer: Any) -> None:
        apply_seal(self.table, self.detector, answer, self.now_ms())

    def _taken(self, step: Take, answer: LeaseRow | Conflict | None) -> None:
        apply_take(self.table, step, answer, self.now_ms())
        self.follow_book()

    def write(self, step: Write) -> None:
        reader = self.readers[step.row.key]
        reader.writing = True
        store, member_id = self.host.store, self.table.member_id

        def request() -> LeaseRow | Conflict:
            answer = store.write_lease(step.row, member_id, step.expected_version)
            if not isinstance(answer, Conflict):
                key, journal = step.row.key, self.host.journal
                journal.committed(store.now_ms, self.app_id, key, committed_record(step.row))
                if step.row.owner != member_id:
                    journal.handed_over(store.now_ms, self.app_id, key, reader.tenure)
            return answer

        def wrote(answer: Any) -> None:
            if reader.is_current and self._is_usable(answer, or_none=True):
                reader.wrote(answer)
                apply_write(self.table, step, None if answer is NO_ANSWER else answer, self.now_ms())
                self.follow_book()

        self._call("main", request, wrote)

    def follow_book(self) -> None:
        """Readers run for what the table holds, and for nothing else."""
        if self.table.rolled_back:
            self.storage_changed(self.link.incarnations["main"])
            return
        if self._followed != self.table.lease_version:
            self._followed = self.table.lease_version
            held = self.table.held
            for key in [key for key, reader in self.readers.items() if not reader.works_on(held.get(key))]:
                del self.readers[key]
                self.heart.wake(self.now_ms())
            for key, holding in held.items():
                if key not in self.readers:
                    self.readers[key] = self.reader_class(self, holding.row)
        if self.heart.next_heartbeat_ms is not None and self.heart.next_heartbeat_ms <= self.now_ms():
            self.process.deliver("heart", self._beat, self.heart)

    # stopping

    def stop(self) -> None:
        """A clean stop: drain, commit, and leave by one write."""
        self.is_draining = True
        self._leave(self.now_ms() + _STOP_DEADLINE_MS)

    def _leave(self, deadline_ms: int) -> None:
        busy = [reader for reader in self.readers.values() if not reader.is_at_rest()]
        if busy and self.now_ms() < deadline_ms:
            for reader in busy:
                reader.commit()
            self.process.after(200, "main", self._leave, deadline_ms)
            return
        self.has_stopped = True
        for key, reader in self.readers.items():
            if reader not in busy:
                self.host.journal.handed_over(self.process.true_ms(), self.app_id, key, reader.tenure)
        self.readers.clear()
        self._call("main", partial(self.host.store.leave, self.table.member_id), lambda _: None)

    # calls

    def journal_start(self, key: LeaseKey, tenure: Tenure, record: int, *, was_paused: bool) -> None:
        true_ms = self.process.true_ms()
        self.host.journal.started(true_ms, self.app_id, key, tenure, record, was_paused=was_paused)

    def _do(self, request: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """A step's call: no answer is an outcome, news of another storage is not its business alone."""
        table_member_id = self.table.member_id

        def answered(answer: Any) -> None:
            if self.table.member_id == table_member_id and self._is_usable(answer, or_none=True):
                done(None if answer is NO_ANSWER else answer)

        self._call("main", request, answered)

    def _is_usable(self, answer: Any, *, or_none: bool = False) -> bool:
        if self.has_stopped:
            return False
        if isinstance(answer, Reconnected):
            self.storage_changed(answer.incarnation)
            return False
        return or_none or answer is not NO_ANSWER

    def _call(self, lane: Lane, request: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.link.call(lane, self._deadline_ms, request, done)
