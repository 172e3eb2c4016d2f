"""Mistakes planted in the real engine as patches, each with the promise whose checker must notice it."""

import asyncio
from typing import NamedTuple

from harsh.options import HarshOptions
from msgspec.structs import replace

from anabranch._core.handling.batches import BatchLane
from anabranch._core.leases import machine, rows
from anabranch._core.leases.machine import LeaseMachine
from anabranch._core.leases.members import FailureDetector
from anabranch._core.leases.plan import Write, plan_round
from anabranch._core.leases.store_calls import CreateLease, NoAnswer, OpenApp, ReadApp, WriteStream
from anabranch._core.session import EndOfShard, Session
from anabranch._core.shards import lifecycle
from anabranch._core.shards.lifecycle import ShardEnd, plan_bootstrap
from anabranch._core.tracker import Tracker
from anabranch._engine.checkpointer import Checkpointer
from anabranch._engine.clock import Alarm
from anabranch._engine.consumer_run import ConsumerRun, FenceWatch
from anabranch._engine.dead_lettering import DeadLettering, _OpenLetter
from anabranch._engine.drainer import Drainer
from anabranch._engine.fanout_reader import FanOutReader
from anabranch._engine.fleet import Fleet
from anabranch._engine.handler_calls import HandlerCall
from anabranch._engine.polling_reader import PollingReader
from anabranch._engine.shard_discovery import ShardDiscovery
from anabranch._engine.work_queue import Processor
from anabranch._model.leases import Finish
from anabranch._model.streams import StartingPosition
from anabranch.errors import TransportError
from anabranch.stores.row_store import RowLeaseStore

BUSY = HarshOptions(worker_count=3, shard_count=2, record_count=250, faulty_seconds=60.0, handler_seconds_max=0.2)
ROUGH = replace(BUSY, pause_every_seconds=10.0, crash_every_seconds=30.0)
LOADED = replace(BUSY, backlog=0.8, crash_every_seconds=15.0)
MERGING = replace(BUSY, worker_count=4, shard_count=4, reshard_every_seconds=4.0)

ROLLED_BACK = replace(
    BUSY, worker_count=5, shard_count=8, record_count=600, key_count=40, faulty_seconds=80.0, handler_seconds_max=0.3,
    cut_off_every_seconds=9.0, stop_every_seconds=6.0, roll_back_seconds=8.0, roll_back_every_seconds=10.0,
)  # fmt: skip
JOBS = replace(BUSY, ends_at_tip=True, undecodable=0.02)
POISONED = replace(BUSY, poison=0.06, then="dead_letter", crash_every_seconds=15.0, letters_down_every_seconds=15.0)
PUSHED = replace(BUSY, read="fanout", broken_streams=0.1)
DELETED = replace(
    MERGING, row_deleted_every_seconds=5.0, crash_every_seconds=30.0, stall_every_seconds=30.0, settling_seconds=400.0,
)  # fmt: skip
TRIMMING = replace(MERGING, trims=True, trims_unread=True, faulty_seconds=100.0, handler_seconds_max=1.0)


class Mistake(NamedTuple):
    patches: list[tuple[object, str, object]]
    promise: str
    options: HarshOptions

    def plant(self, monkeypatch):
        for owner, name, replacement in self.patches:
            monkeypatch.setattr(owner, name, replacement)


def _commit_what_was_read(original):
    def checkpoint(self, *arguments, **options):
        made = original(self, *arguments, **options)
        return made if made.frontier is None else replace(made, watermark=made.frontier, open_keys=())

    return checkpoint


def _from_the_tip(self):
    return StartingPosition("LATEST") if self.read_after is not None else self.row.start


def _no_floor(self, step):
    yield from ()
    return 0


async def _finish_first(self, session, end, checkpointer, planner):
    outcome = await checkpointer.write(session, finish=end.finish)
    for row in end.rows:
        await self._fleet.create_lease(row, member_id=planner)
    return outcome == "written"


async def _gone_is_ended(self, session, error):
    session._end(EndOfShard(trimmed=True))


def _end_trimmed_at_once(original):
    async def plan_end(self, session):
        return ShardEnd((), Finish("trimmed")) if session.end.trimmed else await original(self, session)

    return plan_end


def _mark_and_die(self, row):
    """Marks the bootstrap as complete first, and fails half-way through the leases."""
    listing = yield from self._whole_listing(row)
    yield from self.ask(WriteStream(replace(row, bootstrapped=True), row.version))
    plan = plan_bootstrap(row, listing, [])
    for lease in plan[: len(plan) // 2 + 1]:
        yield from self.ask(CreateLease(lease))
    raise TransportError("half-way")


def _older_after_newer(original):
    async def write(self, session, **options):
        before = session.row.checkpoint
        outcome = await original(self, session, **options)
        if outcome == "written" and not options and session.row.checkpoint != before and session.row.owner is not None:
            await self._fleet.write(Write(replace(session.row, checkpoint=before), session.row.version))
        return outcome

    return write


def _commit_whole_pages(original):
    """A loop over records reports what is finished only at the end of a page, and when its worker stops."""

    async def commit_all(self):
        processor = self._processor
        if not self._fleet.is_draining:
            self._processor = Processor(processor.queue, processor.mode)
        try:
            return await original(self)
        finally:
            self._processor = processor

    return commit_all


def _commit_late(original):
    async def commit_all(self):
        await self._ports.clock.sleep_until_ms(self._ports.clock.now_ms() + 2 * self._interval_ms)
        return await original(self)

    return commit_all


def _give_uncommitted(original):
    def plan_commit(self, wall_ms, **options):
        row, count = original(self, wall_ms, **options)
        return (self.row if options.get("transferring") else row), count

    return plan_commit


def _leave_uncommitted(original):
    async def leave(self, *arguments):
        async def nothing():
            return True

        self._checkpointer.commit_all = nothing
        return await original(self, *arguments)

    return leave


def _settle_half(self):
    freed = self.window.collect_freed()
    if freed:
        self.budget.release(freed // 2)


def _finish_other_half(original):
    """When the first half of a failed batch is handled, the second one counts as handled, too."""

    def finish_through(self, count):
        halved = bool(self._halves)
        self._halves.clear()
        original(self, len(self._out) - self._start if halved else count)

    return finish_through


def _do_not_wait(original):
    """After a timeout the attempt keeps running, and the next one starts."""

    async def call(self, *arguments):
        attempt = asyncio.ensure_future(original(self, *arguments))
        done, _ = await asyncio.wait([attempt], timeout=1.0)
        if not done:
            raise TimeoutError
        return attempt.result()

    return call


def _take_without_seal():
    """A member that missed its heartbeats is not sealed, and its leases count as free."""

    def has_ended(self, member_id, now_ms):
        watch = self._watches.get(member_id)
        return watch is not None and (self._has_expired(watch, now_ms) or (watch.row and watch.row.state != "live"))

    def live(self):
        now_ms = self._read_at_ms or 0
        return [row for row in all_live(self) if not has_ended(self, row.member_id, now_ms)]

    def plan(table, *arguments, **options):
        table.changed = True
        return plan_round(table, *arguments, **options)

    all_live = FailureDetector.live
    return [
        (FailureDetector, "sealable", lambda self, now_ms, known_dead=(): []),
        (FailureDetector, "has_ended", has_ended),
        (FailureDetector, "live", live),
        (machine, "plan_round", plan),
    ]


def _create_app_again(self):
    """A running worker creates its application if the store does not have it."""
    app = yield from self.ask(ReadApp())
    if app is None or (not isinstance(app, NoAnswer) and app.app_id != self.app.app_id):
        opened = yield from self.ask(OpenApp(self.app))
        self.app = self.app if isinstance(opened, NoAnswer) else opened
    return True


async def _do_not_drain(self, sessions, deadline_ms):
    for session in sessions:
        session.drain()
    return []


async def _leave_without_errors(self, error, deadline):
    if self.is_running:
        await self.stop(deadline)


def _take_from_any_storage(original):
    """An application whose row names no storage counts as new."""

    def hold_takes(self):
        if self.app.incarnation:
            original(self)

    return hold_takes


def _open_without_storage(original):
    async def open_nameless(self, app):
        identity, self.identity = self.identity, _nameless
        try:
            return await original(self, app)
        finally:
            self.identity = identity

    return open_nameless


async def _nameless():
    return ""


def _gate_by_listing():
    """A parent that is not in the last listing of any worker counts as finished."""
    listed, find_missing, open_parents = {}, ShardDiscovery._create_missing, lifecycle.open_parents

    async def note_listing(self, stream, listing, **options):
        listed[stream.row.stream_key] = {shard.shard_id for shard in listing}
        await find_missing(self, stream, listing, **options)

    def open_if_listed(row, leases):
        there = listed.get(row.key.stream_key, set(row.waits_for))
        return open_parents(row, leases) if any(parent in there for parent in row.waits_for) else ()

    return [
        (ShardDiscovery, "_create_missing", note_listing),
        (lifecycle, "open_parents", open_if_listed),
    ]


async def _move_on_before_accepting(self, shard, stream):
    """An event's continuation is stored when it arrives, its records are accepted when the next one arrives."""
    session, waiting = shard.session, None
    while await stream.next_bytes() is not None and self._may_read(shard):
        event = await stream.receive()
        if event is None:
            continue
        shard.subscription.receive(event.continuation_sequence_number, self._ports.clock.now_ms())
        if waiting is not None:
            self._results.accept(session, waiting, 0)
        waiting = self._page(shard, event)
    if waiting is not None:
        self._results.accept(session, waiting, 0)


async def _keep_abandoned_continuation(self, shard, stream):
    """An event that comes while the shard is being handed over is not accepted, but its continuation is kept."""
    session, subscription = shard.session, shard.subscription
    while await stream.next_bytes() is not None:
        event = await stream.receive()
        if event is None:
            continue
        subscription.receive(event.continuation_sequence_number, self._ports.clock.now_ms())
        if not self._may_read(shard):
            return
        page = self._page(shard, event)
        self._results.accept(session, page, 0)
        if page.is_end:
            subscription.finish()
            return


def _all_unheld(self, keys):
    yield from ()
    return keys


async def _finish_before_letter(self, session, pending):
    """The record is finished, and committed, before its letter is durable."""
    session.finish_letter(pending)
    self._queue.offer(session)
    await self._checkpointer.write(session)
    await self._ports.letters.write(self._letter(_OpenLetter(session, pending, Alarm(self._ports.clock))))


def _keep_what_followed(original):
    """After a partial failure, only the failed record is delivered again."""

    def retry_at(self, at_ms, attempts, *, halve=False):
        original(self, at_ms, attempts, halve=halve)
        if self._start == self._finished_here and self._start and self._size > 1:
            self._out, self._size = self._out[: self._start + 1], 1

    return retry_at


def _call_again(original):
    """A new owner does not write the letter, but handles the record."""

    def prior_mark(self, record):
        mark = original(self, record)
        return mark and replace(mark, state="open")

    return prior_mark


MISTAKES = {
    "the checkpoint passes a record before its dead letter is durable": Mistake(
        [(DeadLettering, "write", _finish_before_letter)], "no loss", POISONED
    ),
    "a new owner handles a record that is on its way to the dead letters": Mistake(
        [(Tracker, "prior_mark", _call_again(Tracker.prior_mark))],
        "one outcome",
        replace(POISONED, crash_every_seconds=8.0, lost=0.05),
    ),
    "attempts start again with each owner": Mistake(
        [(Tracker, "prior_mark", lambda self, record: None)], "attempts survive", POISONED
    ),
    "records after a failed one of their batch stay finished": Mistake(
        [(BatchLane, "retry_at", _keep_what_followed(BatchLane.retry_at))],
        "no loss",
        replace(POISONED, consume_mode="run_batches", backlog=0.5),
    ),
    "a child starts although its parent's row was deleted": Mistake(
        [(lifecycle, "deleted_parents", lambda *_: ())], "parents first", replace(DELETED, handler_seconds_max=2.0)
    ),
    "a deleted row is created again although its owner lives": Mistake(
        [(LeaseMachine, "find_unheld", _all_unheld)],
        "one owner",
        replace(DELETED, record_count=150, faulty_seconds=120.0, shard_count=8, row_deleted_every_seconds=3.0),
    ),
    "a deleted row is created again with a lower fence token": Mistake(
        [(ShardDiscovery, "_restored", lambda self, lease: lease)], "one owner", DELETED
    ),
    "an event's continuation is stored before its records are accepted": Mistake(
        [(FanOutReader, "_receive", _move_on_before_accepting)], "no loss", PUSHED
    ),
    "the read position moves back where two reads overlap": Mistake(
        [(Session, "_unread", lambda self, records: records)],
        "checkpoints advance",
        replace(PUSHED, shard_count=6, record_count=600, backlog=0.5, in_use=0.5, broken_streams=0.3, late=0.1),
    ),
    "the continuation of an abandoned subscription is used": Mistake(
        [(FanOutReader, "_receive", _keep_abandoned_continuation)],
        "order",
        replace(
            PUSHED,  # hand-offs that are declined, because calls take longer than they may
            broken_streams=0.0,
            shard_count=12,
            record_count=600,
            key_count=40,
            stop_every_seconds=12.0,
            drain_seconds=1.0,
            handler_seconds_max=3.0,
        ),
    ),
    "a silent subscription is not noticed": Mistake(
        [(FanOutReader, "_watch", lambda self, shard, stream: None)],
        "no standstill",
        replace(PUSHED, broken_streams=0.3, settling_seconds=60.0),
    ),
    "a lease is taken from an owner that was not sealed": Mistake(
        _take_without_seal(), "one owner", replace(BUSY, cut_off_every_seconds=10.0)
    ),
    "the fence is not checked": Mistake([(Fleet, "may_start", lambda self, *_: True)], "one owner", ROUGH),
    "child shards do not wait for their parents": Mistake(
        [(lifecycle, "open_parents", lambda *_: ())],
        "parents first",
        replace(BUSY, reshard_every_seconds=5.0, worker_count=4),
    ),
    "the checkpoint includes records that are not finished": Mistake(
        [(Tracker, "checkpoint", _commit_what_was_read(Tracker.checkpoint))], "no loss", replace(BUSY, order="key")
    ),
    "after an expired iterator, reading continues at the tip": Mistake(
        [(Session, "starting_position", _from_the_tip)], "no standstill", replace(BUSY, expired=0.1)
    ),
    "a child shard's fence token starts at one": Mistake(
        [(LeaseMachine, "_epoch_floor", _no_floor)], "one owner", replace(ROUGH, reshard_every_seconds=8.0)
    ),
    "a shard is finished before its children have rows": Mistake(
        [(ShardDiscovery, "_write_end", _finish_first)], "children before the end", MERGING
    ),
    "an older position is committed after a newer one": Mistake(
        [(Checkpointer, "write", _older_after_newer(Checkpointer.write))], "checkpoints advance", BUSY
    ),
    "a clean stop omits its last commit": Mistake(
        [(ConsumerRun, "_leave", _leave_uncommitted(ConsumerRun._leave))],
        "few duplicates",
        replace(BUSY, stop_every_seconds=15.0),
    ),
    "commits wait for the end of the page": Mistake(
        [(Checkpointer, "commit_all", _commit_whole_pages(Checkpointer.commit_all))],
        "few duplicates",
        replace(LOADED, consume_mode="records"),
    ),
    "commits come only every third interval": Mistake(
        [(Checkpointer, "commit_all", _commit_late(Checkpointer.commit_all))], "few duplicates", LOADED
    ),
    "a hand-off does not write the last checkpoint": Mistake(
        [(Session, "plan_commit", _give_uncommitted(Session.plan_commit))],
        "few duplicates",
        replace(BUSY, shard_count=6, stop_every_seconds=15.0, handler_seconds_max=0.05),
    ),
    "bytes are not returned to the budget": Mistake(
        [(Session, "_settle", _settle_half)], "no standstill", replace(BUSY, budget_bytes=3_000)
    ),
    "the budget learns of a large response after it was received": Mistake(
        [(PollingReader, "_has_room", lambda *_: True)],
        "within budget",
        replace(BUSY, budget_bytes=3_000, tip_reserve_bytes=600),
    ),
    "the next attempt starts while the last one runs": Mistake(
        [(HandlerCall, "__call__", _do_not_wait(HandlerCall.__call__))],
        "order",
        replace(BUSY, overrunning=0.05, timeout_seconds=1.5),
    ),
    "a batch is retried while it still runs": Mistake(
        [(HandlerCall, "__call__", _do_not_wait(HandlerCall.__call__))],
        "order",
        replace(BUSY, consume_mode="run_batches", overrunning=0.1, timeout_seconds=1.5),
    ),
    "the second half of a failed batch is skipped": Mistake(
        [(BatchLane, "finish_through", _finish_other_half(BatchLane.finish_through))],
        "no loss",
        replace(BUSY, consume_mode="run_batches", failing=0.2),
    ),
    "a running worker creates its application again in an emptied store": Mistake(
        [
            (LeaseMachine, "check_not_reset", _create_app_again),
            (LeaseMachine, "_recognise", lambda self, app: app or self.app),
        ],
        "one application",
        replace(BUSY, store_is_emptied=True),
    ),
    "shards of a deleted stream are written as finished": Mistake(
        [
            (ShardDiscovery, "on_gone", _gone_is_ended),
            (ShardDiscovery, "_plan_end", _end_trimmed_at_once(ShardDiscovery._plan_end)),
        ],
        "no loss",
        replace(BUSY, deleted=True, handler_seconds_max=0.02),
    ),
    "a half-finished bootstrap is marked as complete": Mistake(
        [(LeaseMachine, "_complete", _mark_and_die), (lifecycle, "_unread_ancestors", lambda *_: [])],
        "parents first",
        replace(BUSY, shard_count=4, reshards_before=8, reshard_every_seconds=10.0),
    ),
    "running calls are not cancelled at the fence": Mistake(
        [(FenceWatch, "_on_fence", lambda self: None)],
        "no overlap",
        replace(BUSY, cut_off_every_seconds=10.0, overrunning=0.1),
    ),
    "a lease is given away while a call runs": Mistake(
        [(Drainer, "wait", _do_not_drain)], "quiet transfers", replace(BUSY, stop_every_seconds=10.0)
    ),
    "an error in the loop's body hides the consumer's error": Mistake(
        [(ConsumerRun, "leave", _leave_without_errors)],
        "no silent failures",
        replace(BUSY, consume_mode="records", record_count=40, deleted=True, failing=1.0, handler_seconds_max=20.0),
    ),
    "a run that ends at the tip does not report a stopped shard": Mistake(
        [(ConsumerRun, "_bad_outcome", ConsumerRun._failure)], "no false success", JOBS
    ),
    "the application's row does not name its storage": Mistake(
        [
            (RowLeaseStore, "open", _open_without_storage(RowLeaseStore.open)),
            (rows, "record_incarnation", lambda row, *_: row),
            (LeaseMachine, "_hold_takes", _take_from_any_storage(LeaseMachine._hold_takes)),
        ],
        "one owner",
        ROLLED_BACK,
    ),
    "trimmed records are not reported": Mistake(
        [(ShardDiscovery, "_report_loss", lambda *_: None)], "no loss", TRIMMING
    ),
    "a parent that is not listed counts as finished": Mistake(_gate_by_listing(), "parents first", TRIMMING),
}
