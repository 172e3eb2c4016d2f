"""One simulated fleet: it runs with faults for a while, then without, and then every record must be handled."""

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Literal

import msgspec

from anabranch._core.leases.timing import LEASE_EXPIRY_MS_DEFAULT, lease_timing
from anabranch._engine.leases.heartbeats import HeartbeatSender
from anabranch.application import Application
from anabranch.errors import LeaseError, UsageError
from anabranch.reasons import StoppedByHandler, StoppedByPayload
from anabranch.reports import FleetShard, FleetStatus
from anabranch.testing.checkers import NoStandstill, all_checkers
from anabranch.testing.journal import Journal, ProcessDied, RunEnded, UnseenError, Violation
from anabranch.testing.loop import SimulationLoop, run
from anabranch.testing.world.kinesis import SimulatedKinesis, SimulatedStream
from anabranch.testing.world.lease_store import SimulatedLeaseStore, SimulatedRows
from anabranch.testing.world.options import FleetOptions, ScriptAction
from anabranch.testing.world.processes import MESSAGE_SECONDS_MAX, Network, ProcessScheduler, SimulatedProcess
from anabranch.testing.world.worker import APP, SimContext, SimulatedWorker, UserHandler, simulated_budget

_AGGREGATE_MAX = 5
_STEPS_MAX = 2_000_000
"""Twenty times what a large fleet takes, so a busy loop is found in seconds."""
_CHECK_SECONDS = 1.0
_OUTAGE_SECONDS_MAX = 20.0
_LOOK_SECONDS = 2.0
_SEEN_WITHIN_SECONDS = 60.0
"""After the faults. A worker that has just lost its membership joins again first."""
_EXPIRIES_MS = (4_000, 10_000, 25_000)
_WRITES_AHEAD = 8
"""Store writes that a due commit may have to wait for: those of other shards, sixteen at a time, and retries of writes
whose answer was lost.
"""


Outcome = Literal["dead-lettered", "skipped", "stops"]
"""Where a record ended that was not handled. `stops`: its shard is stopped at it."""


class FleetVerdict(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    options: FleetOptions
    violations: tuple[Violation, ...]
    steps: int
    seconds: float
    """Virtual seconds."""
    writes: int
    excuses: int
    """Records that were deleted with the stream, or trimmed and reported as lost."""
    starts: int
    finishes: int
    commits: int
    zombies: int
    letters: int = 0
    """Records that are in the dead letters."""
    skips: int = 0
    outcomes: dict[int, Outcome] = {}
    """By the number of the record, if it was not handled: where it ended."""


class SimulatedFleet:
    def __init__(
        self,
        seed: int,
        options: FleetOptions,
        loop: SimulationLoop,
        *,
        user_handler: UserHandler | None = None,
        records: Sequence[tuple[str, bytes]] | None = None,
    ) -> None:
        self.options = options
        self.loop = loop
        self.random = Random(f"world {seed}")  # noqa: S311 -- a simulation's dice, not a secret
        keeps_order = options.consume_mode != "manual_ack" and (
            options.order != "none" or options.consume_mode != "run"
        )
        commit_ms = round(options.checkpoint_seconds * 1010)  # by a clock that may be slow by 1 %
        commit_ms += round(_WRITES_AHEAD * 2 * MESSAGE_SECONDS_MAX * 1000)
        self.journal = Journal(all_checkers(keeps_order=keeps_order, commit_ms=commit_ms))
        self.network = Network(loop, options, self.random)
        self.stream = SimulatedStream(loop, self.journal, self.random)
        self.rows = SimulatedRows(
            self.journal, self.now_ms, self.stream.incarnation_of, keeps_history=bool(options.roll_back_seconds)
        )
        self.processes = ProcessScheduler(
            loop, is_heartbeat=lambda coroutine: coroutine.cr_code is HeartbeatSender.run.__code__
        )
        self.workers: list[SimulatedWorker] = []
        self.records = self._drawn_records() if records is None else records
        """What is written while the faults strike, as (partition key, data)."""
        self.steps = 0
        self._started = 0
        self._history_count = 0
        self._context = SimContext(
            options,
            self.random,
            self.network,
            self.journal,
            self.stream,
            self.rows,
            user_handler or UserHandler(),
            {},
        )
        loop.set_exception_handler(self._on_loop_error)

    def now_ms(self) -> int:
        return int(self.loop.time() * 1000)

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.journal.tell(UnseenError(self.now_ms(), f"{context['message']}: {context.get('exception')!r}"))

    # writing

    def _drawn_records(self) -> list[tuple[str, bytes]]:
        keys = self.options.key_count
        return [
            (f"key-{self.random.randrange(keys)}", str(number).encode()) for number in range(self.options.record_count)
        ]

    async def _write_all(self) -> None:
        """Writes while the faults strike; some records as aggregates of a few successive ones for the same shard."""
        options, left = self.options, list(reversed(self.records[self._history_count :]))
        rate = (len(left) if options.backlog else len(self.records)) / options.faulty_seconds
        while left:
            some = [left.pop()]
            is_aggregate = self.random.random() < options.aggregated
            while is_aggregate and left and len(some) < _AGGREGATE_MAX and self._have_same_shard(some[0], left[-1]):
                some.append(left.pop())
            if self.stream.exists:  # otherwise the put fails, and the records do not exist
                self.stream.write(some, is_aggregate=is_aggregate)
            await asyncio.sleep(self.random.expovariate(rate))

    def _write_history(self) -> None:
        """Writes what exists before the first worker starts: closed shards with records in them, and a backlog."""
        times = self.options.reshards_before
        self._history_count = len(self.records) // 3 if times else 0
        for number in range(times):
            low, high = (self._history_count * part // times for part in (number, number + 1))
            self.stream.write(self.records[low:high])
            self.stream.reshard()
        begun, self._history_count = (
            self._history_count,
            max(self._history_count, round(len(self.records) * self.options.backlog)),
        )
        self.stream.write(self.records[begun : self._history_count])

    def _have_same_shard(self, one: tuple[str, bytes], other: tuple[str, bytes]) -> bool:
        return self.stream.exists and self.stream.shard_for(one[0]) == self.stream.shard_for(other[0])

    # the workers

    def start_worker(self, index: int) -> SimulatedWorker:
        options, random = self.options, self.random
        self._started += 1
        error_ppm = int(options.clock_error * 1_000_000)
        process = SimulatedProcess(
            f"worker-{index}.{self._started}",
            self.loop,
            rate_ppm=random.randrange(-error_ppm, error_ppm + 1),
            clock_stops=options.clocks_stop,
            tell=self.journal.tell,
        )
        timing = lease_timing(random.choice(_EXPIRIES_MS) if options.expiries_differ else LEASE_EXPIRY_MS_DEFAULT)
        budget = simulated_budget(options)
        return SimulatedWorker(
            process,
            self._context,
            kinesis=SimulatedKinesis(self.stream, self.network, process, options, random, budget),
            store=SimulatedLeaseStore(APP, self.rows, self.network, process, call_deadline_ms=timing.call_deadline_ms),
            timing=timing,
            budget=budget,
        )

    # the run

    async def live(self) -> None:
        options = self.options
        self.stream.create(options.shard_count)
        self._write_history()
        self.workers = [self.start_worker(index) for index in range(options.worker_count)]
        viewer = SimulatedViewer(self) if options.is_watched else None
        operator = SimulatedOperator(self) if options.poison else None
        faults = FaultSchedule(self)
        await self._write_all()
        faults.end()
        self.network.is_calm = True
        await self._settle()
        if viewer is not None:
            await viewer.close()
        if operator is not None:
            await operator.close()
        if self._has_unreported_change:
            self.journal.tell(
                UnseenError(self.now_ms(), "no worker reported that the stream was deleted and created again")
            )
        self.steps = self.loop.steps
        gc.collect()  # an unseen error is reported when its task is collected
        self.journal.tell(RunEnded(self.now_ms()))
        self.journal.is_closed = self.network.is_closed = True
        self.processes.release_all()

    @property
    def _has_unreported_change(self) -> bool:
        """After the store was emptied, no worker can know that the stream was created again."""
        return self.stream.has_unreported_change and not (self.stream.exists and self.rows.emptied_count > 0)

    async def _settle(self) -> None:
        """Waits until everything is handled, or for too long."""
        left = next(checker for checker in self.journal.checkers if isinstance(checker, NoStandstill))
        until = self.loop.time() + self.options.settling_seconds + self.options.work_seconds
        while (left.unfinished_count or self._has_unreported_change) and self.loop.time() < until:
            self.restart_ended()
            await asyncio.sleep(_CHECK_SECONDS)

    def outcomes(self) -> dict[int, Outcome]:
        stopped = {
            (row.key.shard_id, row.stopped.position) for row in self.rows.leases if row.stopped and not row.is_finished
        }
        found: dict[int, Outcome] = {}
        for number, record in enumerate(self.stream.written):
            if record in self.journal.letters:
                found[number] = "dead-lettered"
            elif record in self.journal.skips:
                found[number] = "skipped"
            elif (record.shard_id, record.position) in stopped:
                found[number] = "stops"
        return found

    def restart_ended(self) -> None:
        """Restarts every process that has ended, as a supervisor would."""
        for index, worker in enumerate(self.workers):
            if worker.task.done() or not worker.process.is_alive:
                self.workers[index] = self.start_worker(index)


class SimulatedViewer:
    """Somebody who looks at the fleet through the store, as `anabranch top` does. Each shard that does not move must
    have a reason, and once the faults are over, all live members must answer the watch mark.
    """

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._process = SimulatedProcess("viewer", fleet.loop, tell=fleet.journal.tell)
        self._last: FleetStatus | None = None
        self._task = self._process.spawn(self._look(), "viewer")

    async def _look(self) -> None:
        fleet = self._fleet
        while True:
            timing = lease_timing(LEASE_EXPIRY_MS_DEFAULT)
            store = SimulatedLeaseStore(
                APP, fleet.rows, fleet.network, self._process, call_deadline_ms=timing.call_deadline_ms
            )
            try:
                async with Application(APP, leases=store, clock=self._process.clock) as application:
                    while True:
                        self._check(await application.status())
                        await asyncio.sleep(_LOOK_SECONDS)
            except LeaseError:
                self._last = None  # no answer, or no application yet
                await asyncio.sleep(_LOOK_SECONDS)

    def _check(self, status: FleetStatus) -> None:
        self._last = status
        for shard in status.stalled_shards:
            if shard.reason is None:
                self._complain(f"{shard.shard_id} is {shard.state} without a reason")

    def _complain(self, what: str) -> None:
        self._fleet.journal.tell(UnseenError(self._fleet.now_ms(), f"a viewer sees that {what}"))

    async def close(self) -> None:
        until = self._fleet.loop.time() + _SEEN_WITHIN_SECONDS
        while not self._sees_all() and self._fleet.loop.time() < until:  # noqa: ASYNC110 -- virtual time
            await asyncio.sleep(_CHECK_SECONDS)
        if not self._sees_all():
            self._complain(f"members do not report: {self._last}")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _sees_all(self) -> bool:
        at_work = {worker.process.name for worker in self._fleet.workers if worker.is_at_work}
        live = () if self._last is None else self._last.live_members
        seen = {self._fleet.rows.processes[member.member_id] for member in live if member.status_seen}
        return at_work <= seen


class SimulatedOperator:
    """Goes past the records at which shards are stopped, by the commands that people have: skips poison, and has other
    records tried again.
    """

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._process = SimulatedProcess("operator", fleet.loop, tell=fleet.journal.tell)
        self._task = self._process.spawn(self._work(), "operator")

    async def _work(self) -> None:
        fleet = self._fleet
        deadline_ms = lease_timing(LEASE_EXPIRY_MS_DEFAULT).call_deadline_ms
        store = SimulatedLeaseStore(APP, fleet.rows, fleet.network, self._process, call_deadline_ms=deadline_ms)
        while True:
            await asyncio.sleep(fleet.random.uniform(1, 5))
            try:
                async with Application(APP, leases=store, clock=self._process.clock) as application:
                    for shard in (await application.status()).shards:
                        await self._go_past(application, shard)
            except (LeaseError, UsageError):
                """No answer, no application yet, or the shard goes on already."""

    async def _go_past(self, application: Application, shard: FleetShard) -> None:
        if shard.stopped is None or shard.state != "stopped":
            return
        position = shard.stopped.position
        if position is not None and isinstance(shard.reason, StoppedByHandler | StoppedByPayload):
            await application.skip(shard.shard_id, position)
        else:
            await application.resume(shard.shard_id)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class FaultSchedule:
    """Draws from the seed what goes wrong and when, until `end`."""

    def __init__(self, fleet: "SimulatedFleet") -> None:
        self._fleet = fleet
        self._ended = False
        options = fleet.options
        for index in range(options.worker_count):
            self._each(options.pause_every_seconds, self._pause, index)
            self._each(options.stall_every_seconds, self._stall, index)
            self._each(options.cut_off_every_seconds, self._cut_off, index)
            self._each(options.crash_every_seconds, self._crash, index)
            self._each(options.stop_every_seconds, self._stop, index)
        self._each(options.reshard_every_seconds, lambda _: fleet.stream.reshard(), 0)
        self._each(options.rescale_every_seconds, lambda _: fleet.stream.rescale(), 0)
        self._each(options.taken_over_every_seconds, lambda _: fleet.stream.take_over(), 0)
        self._each(options.consumer_deleted_every_seconds, lambda _: fleet.stream.delete_consumer(), 0)
        self._each(options.handler_outage_every_seconds, lambda _: self._take_down("handler"), 0)
        self._each(options.letters_down_every_seconds, lambda _: self._take_down("letters"), 0)
        self._each(options.row_deleted_every_seconds, lambda _: fleet.rows.delete_lease(fleet.random), 0)
        if options.trims:
            self._loop().call_later(fleet.random.uniform(20, 40), self._trim)
        for at_seconds, action in options.script:
            self._loop().call_later(at_seconds, self._perform, action)
        self._restart_ended()
        if options.store_outage_seconds:
            self._once(self._take_store_down)
        if options.store_is_emptied:
            self._once(self._empty_store)
        if options.deleted:
            self._loop().call_later(fleet.random.uniform(3, options.faulty_seconds / 2), self._delete_stream)
        if options.roll_back_seconds and options.roll_back_every_seconds:
            self._each(options.roll_back_every_seconds, lambda _: self._roll_store_back(), 0)
        elif options.roll_back_seconds:
            self._once(self._roll_store_back)

    def end(self) -> None:
        self._ended = True
        self._fleet.network.down_until.clear()
        for worker in self._fleet.workers:
            worker.process.cut_until.clear()

    def _restart_ended(self) -> None:
        """Restarts processes that ended by themselves, as a supervisor would."""
        if self._ended:
            return
        for index, worker in enumerate(self._fleet.workers):
            if worker.task.done() and not worker.is_stopping:
                self._fleet.workers[index] = self._fleet.start_worker(index)
        self._loop().call_later(1.0, self._restart_ended)

    def _perform(self, action: ScriptAction) -> None:
        """Performs one action of the script. The seed picks the worker."""
        index = self._fleet.random.randrange(self._fleet.options.worker_count)
        match action:
            case "split":
                self._fleet.stream.split()
            case "merge":
                self._fleet.stream.merge()
            case "crash":
                self._crash(index)
            case "cut_off":
                self._cut_off(index)
            case "pause":
                self._pause(index)
            case "rescale":
                self._fleet.stream.rescale()
            case "stop":
                self._stop(index)

    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._fleet.loop

    def _once(self, action: Callable[[], None]) -> None:
        self._loop().call_later(self._fleet.random.uniform(3, self._fleet.options.faulty_seconds), action)

    def _each(self, mean: float, action: Callable[[int], object], index: int) -> None:
        if mean:
            wait = self._fleet.random.expovariate(1 / mean)
            self._loop().call_later(wait, self._strike, mean, action, index)

    def _strike(self, mean: float, action: Callable[[int], object], index: int) -> None:
        if not self._ended:
            action(index)
            self._each(mean, action, index)

    def _duration(self) -> float:
        random = self._fleet.random
        return random.uniform(1, 25) if random.random() < 0.7 else random.uniform(0.05, 1)

    def _pause(self, index: int) -> None:
        self._fleet.workers[index].process.pause(self._duration())

    def _stall(self, index: int) -> None:
        self._fleet.workers[index].process.stall(self._duration())

    def _cut_off(self, index: int) -> None:
        process, seconds = self._fleet.workers[index].process, self._duration()
        for service in self._fleet.random.choice([("store",), ("stream",), ("store", "stream")]):
            process.cut_until[service] = self._loop().time() + seconds
            if service == "store":
                process.report_commits_blocked(seconds)

    def _crash(self, index: int) -> None:
        process = self._fleet.workers[index].process
        process.is_alive = False
        self._fleet.journal.tell(ProcessDied(process.world_ms(), process.name))
        self._start_again(index)

    def _stop(self, index: int) -> None:
        worker = self._fleet.workers[index]
        if worker.process.is_alive and not worker.is_stopping:
            worker.stop()
            self._start_again(index)

    def _start_again(self, index: int) -> None:
        old = self._fleet.workers[index]

        def start() -> None:
            if self._fleet.workers[index] is old:
                self._fleet.workers[index] = self._fleet.start_worker(index)

        self._loop().call_later(self._fleet.random.uniform(0.2, 12), start)

    def _take_store_down(self) -> None:
        seconds = self._fleet.options.store_outage_seconds
        self._fleet.network.down_until["store"] = self._loop().time() + seconds
        for worker in self._fleet.workers:
            worker.process.report_commits_blocked(seconds)

    def _take_down(self, service: str) -> None:
        seconds = self._fleet.random.uniform(1, _OUTAGE_SECONDS_MAX)
        self._fleet.network.down_until[service] = self._loop().time() + seconds

    def _roll_store_back(self) -> None:
        if not self._ended:
            self._fleet.rows.roll_back(int(self._fleet.options.roll_back_seconds * 1000))

    def _trim(self) -> None:
        """Trims seldom: each trim makes all records a day older, so after a second one soon nothing would be left."""
        if self._fleet.options.trims_unread and not self._fleet.rows.all_shards_have_progress:
            self._loop().call_later(1.0, self._trim)
        elif not self._ended:
            shortest = 0 if self._fleet.options.trims_unread else 25
            self._fleet.stream.skip_ahead(self._fleet.random.uniform(shortest, shortest + 5))
            self._loop().call_later(self._fleet.random.uniform(35, 45), self._trim)

    def _empty_store(self) -> None:
        at_work = [worker.process.name for worker in self._fleet.workers if worker.is_at_work]
        self._fleet.rows.empty(at_work, moves=self._fleet.random.random() < 0.5)

    def _delete_stream(self) -> None:
        self._fleet.stream.delete(is_known=self._fleet.rows.has_streams)
        self._loop().call_later(self._fleet.random.uniform(15, 30), self._create_stream_again)

    def _create_stream_again(self) -> None:
        """Waits, as with the service, until every running worker has asked for the missing stream."""
        if all(worker.process.was_healthy_since(self._loop().time() - 8) for worker in self._fleet.workers):
            self._fleet.stream.create(self._fleet.options.shard_count)
        else:
            self._loop().call_later(1.0, self._create_stream_again)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Garbage collection depends on what was allocated before the run, so two runs of one seed would differ."""
    was_enabled = gc.isenabled()
    gc.freeze()  # the collection at the end looks only at what this fleet made
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def run_fleet(
    seed: int,
    options: FleetOptions,
    *,
    user_handler: UserHandler | None = None,
    records: Sequence[tuple[str, bytes]] | None = None,
) -> FleetVerdict:
    loop = SimulationLoop(seed, order=options.loop_order, steps_max=_STEPS_MAX)
    fleet = SimulatedFleet(seed, options, loop, user_handler=user_handler, records=records)
    with _no_garbage_collection():
        run(fleet.live, loop=loop)
    journal = fleet.journal
    return FleetVerdict(
        seed=seed,
        options=options,
        violations=tuple(journal.violations),
        steps=fleet.steps,
        seconds=loop.time(),
        writes=journal.writes,
        excuses=journal.excuses,
        starts=journal.starts,
        finishes=journal.finishes,
        commits=journal.commits,
        zombies=journal.zombies,
        letters=len(journal.letters),
        skips=len(journal.skips),
        outcomes=fleet.outcomes(),
    )
