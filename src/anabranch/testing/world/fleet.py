"""One simulated fleet: it runs with faults for a while, then without, and then every record must be handled."""

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, ClassVar, Literal

import msgspec

from anabranch._core.leases.timing import LEASE_EXPIRY_MS_DEFAULT, LeaseTiming, lease_timing
from anabranch.budget import Budget
from anabranch.dead_letters.redrive import RegisteredHandler
from anabranch.testing.checkers import NoStandstill, all_checkers
from anabranch.testing.journal import Journal, ProcessDied, RunEnded, UnseenError, Violation
from anabranch.testing.loop import SimulationLoop, run
from anabranch.testing.world.kinesis import SimulatedKinesis, SimulatedStream
from anabranch.testing.world.lease_store import SimulatedLeaseStore, SimulatedRows
from anabranch.testing.world.options import FleetOptions, ScriptAction
from anabranch.testing.world.processes import MESSAGE_SECONDS_MAX, Network, ProcessScheduler, SimulatedProcess
from anabranch.testing.world.worker import SimulatedWorker

_STEPS_MAX = 2_000_000
"""Twenty times what a large fleet takes, so a busy loop is found in seconds."""
_CHECK_SECONDS = 1.0
_RECORD_SECONDS = 0.5
"""How much longer the fleet may take for each record once the faults are over."""
_WRITES_AHEAD = 8
"""Store writes that a due commit may have to wait for: those of other shards, sixteen at a time, and retries of writes
whose answer was lost.
"""


Outcome = Literal["dead-lettered", "skipped", "stops"]
"""What became of a record that was not handled. `stops`: its shard is stopped at it."""


class FleetVerdict(msgspec.Struct, frozen=True, kw_only=True):
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
    letters: int
    """Records that are in the dead letters."""
    skips: int
    outcomes: dict[int, Outcome]
    """Of each record that was not handled, by its number."""
    left: tuple[int, ...]
    """The numbers of the records that were never finished, in shards that neither are stopped nor descend from one."""


class FaultSchedule:
    """Draws from the seed what goes wrong and when, until `end`."""

    def __init__(self, fleet: "SimulatedFleet") -> None:
        self._fleet = fleet
        self._loop = fleet.loop
        self._ended = False
        worker_faults = self._worker_faults()
        for index in range(fleet.options.worker_count):
            for mean, action in worker_faults:
                self._each(mean, action, index)
        self._schedule_stream_faults()
        for at_seconds, script_action in fleet.options.script:
            self._loop.call_later(at_seconds, self._perform, script_action)
        self._restart_ended()

    def _worker_faults(self) -> list[tuple[float, Callable[[int], None]]]:
        """What happens to each process, and the mean time between two such faults."""
        options = self._fleet.options
        return [
            (options.pause_every_seconds, self._pause),
            (options.cut_off_every_seconds, self._cut_off),
            (options.crash_every_seconds, self._crash),
            (options.stop_every_seconds, self._stop),
        ]

    def _schedule_stream_faults(self) -> None:
        self._each(self._fleet.options.reshard_every_seconds, lambda _: self._fleet.stream.reshard(), 0)

    def end(self) -> None:
        self._ended = True
        for worker in self._fleet.workers:
            worker.process.cut_until.clear()

    def _restart_ended(self) -> None:
        """Restarts processes that ended by themselves, as a supervisor would."""
        if self._ended:
            return
        for index, worker in enumerate(self._fleet.workers):
            if worker.task.done() and not worker.is_stopping:
                self._fleet.workers[index] = self._fleet.start_worker(index)
        self._loop.call_later(1.0, self._restart_ended)

    def _perform(self, action: ScriptAction) -> None:
        """Performs one action of the script. The seed picks the worker."""
        index, stream = self._fleet.random.randrange(self._fleet.options.worker_count), self._fleet.stream
        changes = {"split": stream.split, "merge": stream.merge, "rescale": stream.rescale}
        faults = {"crash": self._crash, "cut_off": self._cut_off, "pause": self._pause, "stop": self._stop}
        if action in changes:
            changes[action]()
        else:
            faults[action](index)

    def _each(self, mean: float, action: Callable[[int], object], index: int) -> None:
        if mean:
            wait = self._fleet.random.expovariate(1 / mean)
            self._loop.call_later(wait, self._strike, mean, action, index)

    def _strike(self, mean: float, action: Callable[[int], object], index: int) -> None:
        if not self._ended:
            action(index)
            self._each(mean, action, index)

    def _duration(self) -> float:
        random = self._fleet.random
        return random.uniform(1, 25) if random.random() < 0.7 else random.uniform(0.05, 1)

    def _pause(self, index: int) -> None:
        self._fleet.workers[index].process.pause(self._duration())

    def _cut_off(self, index: int) -> None:
        process, seconds = self._fleet.workers[index].process, self._duration()
        for service in self._fleet.random.choice([("store",), ("stream",), ("store", "stream")]):
            process.cut_until[service] = self._loop.time() + seconds
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

        self._loop.call_later(self._fleet.random.uniform(0.2, 12), start)


class SimulatedFleet:
    """Draws from `random` happen in a fixed order: another order makes another fleet of each seed."""

    network_class: ClassVar[type[Network]] = Network
    stream_class: ClassVar[type[SimulatedStream]] = SimulatedStream
    kinesis_class: ClassVar[type[SimulatedKinesis]] = SimulatedKinesis
    rows_class: ClassVar[type[SimulatedRows]] = SimulatedRows
    store_class: ClassVar[type[SimulatedLeaseStore]] = SimulatedLeaseStore
    worker_class: ClassVar[type[SimulatedWorker]] = SimulatedWorker
    faults_class: ClassVar[type[FaultSchedule]] = FaultSchedule

    def __init__(
        self,
        seed: int,
        options: FleetOptions,
        registered: RegisteredHandler,
        records: Sequence[tuple[str, bytes]],
    ) -> None:
        self.options = options
        self.loop = SimulationLoop(seed, order=options.loop_order, steps_max=_STEPS_MAX)
        self.registered = registered
        """The user's handler, and how it is called."""
        self.records = records
        """What is written while the faults strike, as (partition key, data)."""
        self.random = Random(f"world {seed}")  # noqa: S311 -- a simulation's dice, not a secret
        commit_ms = round(options.checkpoint_seconds * 1010)  # by a clock that may be slow by 1 %
        commit_ms += round(_WRITES_AHEAD * 2 * MESSAGE_SECONDS_MAX * 1000)
        self.journal = Journal(all_checkers(keeps_order=self._keeps_order(), commit_ms=commit_ms))
        self.network = self.network_class(self)
        self.stream = self.stream_class(self)
        self.rows = self.rows_class(self)
        self.workers: list[SimulatedWorker] = []
        self._processes = ProcessScheduler(self.loop)
        self._started = 0
        self._steps = 0
        self.loop.set_exception_handler(self._on_loop_error)

    def _keeps_order(self) -> bool:
        return self.registered.options.order != "none" or self.registered.batches is not None

    def now_ms(self) -> int:
        return int(self.loop.time() * 1000)

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.journal.tell(UnseenError(self.now_ms(), f"{context['message']}: {context.get('exception')!r}"))

    # writing

    async def _write_all(self) -> None:
        for record in self.records:
            self.stream.write([record])
            await asyncio.sleep(self.random.expovariate(len(self.records) / self.options.faulty_seconds))

    # the workers

    def start_worker(self, index: int) -> SimulatedWorker:
        options = self.options
        self._started += 1
        error_ppm = int(options.clock_error * 1_000_000)
        process = SimulatedProcess(
            f"worker-{index}.{self._started}",
            self,
            rate_ppm=self.random.randrange(-error_ppm, error_ppm + 1),
            clock_stops=options.clocks_stop,
        )
        return self.worker_class(process, self, self._draw_timing(), self._make_budget())

    def _draw_timing(self) -> LeaseTiming:
        return lease_timing(LEASE_EXPIRY_MS_DEFAULT)

    def _make_budget(self) -> Budget:
        return Budget()

    # the run

    def run(self) -> FleetVerdict:
        with _no_garbage_collection():
            run(self._live, loop=self.loop)
        journal = self.journal
        return FleetVerdict(
            violations=tuple(journal.violations),
            steps=self._steps,
            seconds=self.loop.time(),
            writes=journal.writes,
            excuses=journal.excuses,
            starts=journal.starts,
            finishes=journal.finishes,
            commits=journal.commits,
            zombies=journal.zombies,
            letters=len(journal.letters),
            skips=len(journal.skips),
            outcomes=self._outcomes(),
            left=self._left(),
        )

    async def _live(self) -> None:
        self.stream.create(self.options.shard_count)
        self._start_workers()
        faults = self.faults_class(self)
        await self._write_all()
        faults.end()
        self.network.is_calm = True
        await self._settle()
        self._steps = self.loop.steps
        gc.collect()  # an unseen error is reported when its task is collected
        self.journal.tell(RunEnded(self.now_ms()))
        self.journal.is_closed = self.network.is_closed = True
        self._processes.release_all()

    def _start_workers(self) -> None:
        self.workers = [self.start_worker(index) for index in range(self.options.worker_count)]

    async def _settle(self) -> None:
        """Waits until everything is handled, or for too long."""
        until = self.loop.time() + self.options.settling_seconds + self._work_seconds()
        while not self._is_settled() and self.loop.time() < until:
            self._restart_ended()
            await asyncio.sleep(_CHECK_SECONDS)

    def _work_seconds(self) -> float:
        return len(self.records) * _RECORD_SECONDS

    def _is_settled(self) -> bool:
        return not self._standstill.unfinished_count

    @property
    def _standstill(self) -> NoStandstill:
        return next(one for one in self.journal.checkers if isinstance(one, NoStandstill))

    def _restart_ended(self) -> None:
        """Restarts every process that has ended, as a supervisor would."""
        for index, worker in enumerate(self.workers):
            if worker.task.done() or not worker.process.is_alive:
                self.workers[index] = self.start_worker(index)

    def _outcomes(self) -> dict[int, Outcome]:
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

    def _left(self) -> tuple[int, ...]:
        blocked = {row.key.shard_id for row in self.rows.leases if row.stopped and not row.is_finished}
        for shard_id, parents in self.stream.parents.items():
            if not blocked.isdisjoint(parents):
                blocked.add(shard_id)
        unfinished = self._standstill.unfinished
        return tuple(
            number
            for number, record in enumerate(self.stream.written)
            if record.shard_id not in blocked and record.position in unfinished.get(record.shard_id, {})
        )


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
