"""Mistakes planted in the real engine as patches, each with the promise whose checker must notice it."""

import asyncio
from typing import NamedTuple

from msgspec.structs import replace

from anabranch._core.leases import machine, rows
from anabranch._core.leases.failure_detector import FailureDetector
from anabranch._core.leases.machine import LeaseMachine
from anabranch._core.leases.plan import Write, plan_round
from anabranch._core.leases.store_calls import NoAnswer, OpenApp, ReadApp
from anabranch._core.shards import gate
from anabranch._core.shards.bootstrap import listing_filter, plan_bootstrap
from anabranch._core.shards.gate import ShardEnd
from anabranch._core.tracker import Tracker
from anabranch._engine.checkpointer import Checkpointer, Drainer
from anabranch._engine.consumer_run import ConsumerRun
from anabranch._engine.handler_calls import HandlerCall
from anabranch._engine.session import Session
from anabranch._engine.shard_discovery import ShardDiscovery, StreamBootstrap, TrimReporter, list_all_shards
from anabranch._engine.worker import FenceWatch, Worker
from anabranch._model.leases import Finish
from anabranch._model.streams import StartingPosition
from anabranch.errors import TransportError
from anabranch.stores.row_store import RowLeaseStore
from anabranch.testing.world import FleetOptions

BUSY = FleetOptions(worker_count=3, shard_count=2, record_count=250, faulty_seconds=60.0, handler_seconds_max=0.2)
ROUGH = replace(BUSY, pause_every_seconds=10.0, crash_every_seconds=30.0)
LOADED = replace(BUSY, backlog=0.8, crash_every_seconds=15.0)
MERGING = replace(BUSY, worker_count=4, shard_count=4, reshard_every_seconds=4.0)

ROLLED_BACK = replace(
    BUSY, worker_count=5, shard_count=8, record_count=600, key_count=40, faulty_seconds=80.0, handler_seconds_max=0.3,
    cut_off_every_seconds=9.0, stop_every_seconds=6.0, roll_back_seconds=8.0, roll_back_every_seconds=10.0,
)  # fmt: skip
JOBS = replace(BUSY, ends_at_tip=True, undecodable=0.02)
TRIMMING = replace(MERGING, trims=True, trims_unread=True, faulty_seconds=100.0, handler_seconds_max=1.0)


class Mistake(NamedTuple):
    patches: list[tuple[object, str, object]]
    promise: str
    options: FleetOptions

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
    session.trimmed = True
    session.move("end")


def _end_trimmed_at_once(original):
    async def plan_end(self, session):
        return ShardEnd((), Finish("trimmed")) if session.trimmed else await original(self, session)

    return plan_end


async def _mark_and_die(self, stream, row):
    """Marks the bootstrap as complete first, and fails half-way through the leases."""
    store = self._ports.store
    listing = await list_all_shards(self._ports, stream, listing_filter(row.origin))
    await store.write_stream(replace(row, bootstrapped=True), row.version)
    plan = plan_bootstrap(row, listing, [])
    for lease in plan[: len(plan) // 2 + 1]:
        await store.create_lease(lease)
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
        pull = self._before_commit
        if not self._fleet.is_draining:
            self._before_commit = lambda: None
        try:
            return await original(self)
        finally:
            self._before_commit = pull

    return commit_all


def _commit_late(original):
    async def commit_all(self):
        await self._ports.clock.sleep_until_ms(self._ports.clock.now_ms() + 2 * self._interval_ms)
        return await original(self)

    return commit_all


def _give_uncommitted(original):
    def next_row(self, session, **options):
        row, count = original(self, session, **options)
        return (session.row if options.get("transferring") else row), count

    return next_row


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
        self._held_bytes -= freed
        self.budget.release(freed // 2)
        self.on_settled()


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

    def is_over(self, member_id, now_ms):
        watch = self._watches.get(member_id)
        return watch is not None and (self._is_due(watch, now_ms) or (watch.row and watch.row.state != "live"))

    def live(self):
        now_ms = self._read_at_ms or 0
        return [row for row in all_live(self) if not is_over(self, row.member_id, now_ms)]

    def plan(table, *arguments, **options):
        table.changed = True
        return plan_round(table, *arguments, **options)

    all_live = FailureDetector.live
    return [
        (FailureDetector, "sealable", lambda self, now_ms, known_dead=(): []),
        (FailureDetector, "is_over", is_over),
        (FailureDetector, "live", live),
        (machine, "plan_round", plan),
    ]


def _create_app_again(self):
    """A running worker creates its application if the store does not have it."""
    app = yield from self._ask(ReadApp())
    if app is None or (not isinstance(app, NoAnswer) and app.app_id != self.app.app_id):
        opened = yield from self._ask(OpenApp(self.app))
        self.app = self.app if isinstance(opened, NoAnswer) else opened
    return True


async def _do_not_drain(self, sessions, deadline_ms):
    for session in sessions:
        session.is_draining = True
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
    listed, find_missing, open_parents = {}, ShardDiscovery._create_missing, gate.open_parents

    async def note_listing(self, row, listing, **options):
        listed[row.stream_key] = {shard.shard_id for shard in listing}
        await find_missing(self, row, listing, **options)

    def open_if_listed(row, leases):
        there = listed.get(row.key.stream_key, set(row.waits_for))
        return open_parents(row, leases) if any(parent in there for parent in row.waits_for) else ()

    return [
        (ShardDiscovery, "_create_missing", note_listing),
        (gate, "open_parents", open_if_listed),
    ]


MISTAKES = {
    "a lease is taken from an owner that was not sealed": Mistake(
        _take_without_seal(), "one owner", replace(BUSY, cut_off_every_seconds=10.0)
    ),
    "the fence is not checked": Mistake([(LeaseMachine, "may_start", lambda self, *_: True)], "one owner", ROUGH),
    "child shards do not wait for their parents": Mistake(
        [(gate, "open_parents", lambda *_: ())],
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
        [(Worker, "_leave", _leave_uncommitted(Worker._leave))],
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
        [(Checkpointer, "next_row", _give_uncommitted(Checkpointer.next_row))],
        "few duplicates",
        replace(BUSY, shard_count=6, stop_every_seconds=15.0, handler_seconds_max=0.05),
    ),
    "bytes are not returned to the budget": Mistake(
        [(Session, "settle", _settle_half)], "no standstill", replace(BUSY, budget_bytes=3_000)
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
    "a running worker creates its application again in an emptied store": Mistake(
        [
            (LeaseMachine, "check_birth", _create_app_again),
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
        [(StreamBootstrap, "_complete", _mark_and_die), (gate, "_unread_ancestors", lambda *_: [])],
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
    "trimmed records are not reported": Mistake([(TrimReporter, "report_loss", lambda *_: None)], "no loss", TRIMMING),
    "a parent that is not listed counts as finished": Mistake(_gate_by_listing(), "parents first", TRIMMING),
}
