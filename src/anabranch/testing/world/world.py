"""One simulated fleet from its start to its verdict: faults for a while, then calm, then everything must be handled."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec

from anabranch._core.leases.timing import LEASE_EXPIRY_MS_DEFAULT, lease_timing
from anabranch.testing.checkers import NoStandstill, all_checkers
from anabranch.testing.journal import Journal, RunEnded, UnseenError, Violation
from anabranch.testing.loop import SimulationLoop, run
from anabranch.testing.world.faults import Faults
from anabranch.testing.world.kinesis import SimulatedKinesis
from anabranch.testing.world.lease_store import ForgetfulRows, SimulatedLeaseStore
from anabranch.testing.world.network import MESSAGE_SECONDS_MAX, Network
from anabranch.testing.world.options import FleetOptions, fleet_options_for
from anabranch.testing.world.processes import Processes, SimulatedProcess
from anabranch.testing.world.stream import SimulatedStream
from anabranch.testing.world.surroundings import SimulatedHandling, Surroundings
from anabranch.testing.world.worker import SimulatedWorker

__all__ = ["Fleet", "FleetVerdict", "run_fleet"]

_AGGREGATE_MAX = 5
_STEPS_MAX = 2_000_000
"""Twenty times what a large fleet takes: one that spins is found in seconds."""
_LOOK_EACH_SECONDS = 1.0
_EXPIRIES_MS = (4_000, 10_000, 25_000)
_WRITES_AHEAD = 8
"""Store writes that may have to end before a commit that is due: those of other shards, sixteen at a time, and those
that found the answer of an earlier one lost.
"""


class FleetVerdict(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    options: FleetOptions
    violations: tuple[Violation, ...]
    steps: int
    seconds: float
    """Virtual ones."""
    writes: int
    excuses: int
    """Records that went with the stream, or fell off and were said to be lost."""
    starts: int
    finishes: int
    commits: int
    zombies: int


class Fleet:
    def __init__(
        self,
        seed: int,
        options: FleetOptions,
        loop: SimulationLoop,
        *,
        handling: SimulatedHandling | None = None,
        records: Sequence[tuple[str, bytes]] | None = None,
    ) -> None:
        self.options = options
        self.loop = loop
        self.random = Random(f"world {seed}")  # noqa: S311 -- a simulation's dice, not a secret
        keeps_order = options.form != "by_hand" and (options.order != "none" or options.form != "run")
        commit_ms = round(options.checkpoint_seconds * 1010)  # by a clock that may be slow by 1 %
        commit_ms += round(_WRITES_AHEAD * 2 * MESSAGE_SECONDS_MAX * 1000)
        self.journal = Journal(all_checkers(keeps_order=keeps_order, commit_ms=commit_ms))
        self.network = Network(loop, options, self.random)
        self.stream = SimulatedStream(loop, self.journal, self.random)
        self.rows = ForgetfulRows(
            self.journal, self.now_ms, self.stream.incarnation_of, keeps_history=bool(options.roll_back_seconds)
        )
        self.processes = Processes(loop, lambda coroutine: coroutine.__qualname__ == "Heartbeat.run")
        self.workers: list[SimulatedWorker] = []
        self.records = self._drawn_records() if records is None else records
        """What is written, as (partition key, data), over the time of the faults."""
        self.steps = 0
        self._started = 0
        self._history_count = 0
        self._around = Surroundings(
            options,
            self.random,
            self.network,
            self.journal,
            self.stream,
            self.rows,
            handling or SimulatedHandling(),
            {},
        )
        loop.set_exception_handler(self._on_loop_error)

    def now_ms(self) -> int:
        return int(self.loop.time() * 1000)

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.journal.tell(UnseenError(self.now_ms(), f"{context['message']}: {context.get('exception')!r}"))

    # what is written

    def _drawn_records(self) -> list[tuple[str, bytes]]:
        keys = self.options.key_count
        return [
            (f"key-{self.random.randrange(keys)}", str(number).encode()) for number in range(self.options.record_count)
        ]

    async def _write_all(self) -> None:
        """Over the time of the faults; some as aggregates of a few records that follow each other in one shard."""
        options, left = self.options, list(reversed(self.records[self._history_count :]))
        rate = (len(left) if options.backlog else len(self.records)) / options.faulty_seconds
        while left:
            some = [left.pop()]
            is_aggregate = self.random.random() < options.aggregated
            while is_aggregate and left and len(some) < _AGGREGATE_MAX and self._go_together(some[0], left[-1]):
                some.append(left.pop())
            if self.stream.is_there:  # otherwise the writer gets an error, and that is the end of it
                self.stream.write(some, is_aggregate=is_aggregate)
            await asyncio.sleep(self.random.expovariate(rate))

    def _write_history(self) -> None:
        """What there is before anybody looks: shards that have ended, with records in them, and a backlog."""
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

    def _go_together(self, one: tuple[str, bytes], other: tuple[str, bytes]) -> bool:
        return self.stream.is_there and self.stream.shard_for(one[0]) == self.stream.shard_for(other[0])

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
        return SimulatedWorker(
            process,
            self._around,
            kinesis=SimulatedKinesis(self.stream, self.network, process, options, random),
            store=SimulatedLeaseStore(self.rows, self.network, process, call_deadline_ms=timing.call_deadline_ms),
            timing=timing,
        )

    # the run

    async def live(self) -> None:
        options = self.options
        self.stream.create(options.shard_count)
        self._write_history()
        self.workers = [self.start_worker(index) for index in range(options.worker_count)]
        faults = Faults(self)
        await self._write_all()
        faults.end()
        self.network.is_calm = True
        await self._settle()
        if self._has_untold_change:
            self.journal.tell(
                UnseenError(self.now_ms(), "no worker reported that the stream was deleted and created again")
            )
        self.steps = self.loop.steps
        gc.collect()  # an error that nobody saw shows when its task is collected
        self.journal.tell(RunEnded(self.now_ms()))
        self.journal.is_closed = self.network.is_closed = True
        self.processes.open()

    @property
    def _has_untold_change(self) -> bool:
        """After the store was emptied nobody knows that the stream is another one."""
        return self.stream.has_untold_change and not (self.stream.is_there and self.rows.emptied_count > 0)

    async def _settle(self) -> None:
        """Until all is handled, or it has taken too long."""
        left = next(checker for checker in self.journal.checkers if isinstance(checker, NoStandstill))
        until = self.loop.time() + self.options.settling_seconds + self.options.labour_seconds
        while (left.unfinished_count or self._has_untold_change) and self.loop.time() < until:
            self.restart_ended()
            await asyncio.sleep(_LOOK_EACH_SECONDS)

    def restart_ended(self) -> None:
        """A process that has ended is started again, as whoever runs the fleet would do."""
        for index, worker in enumerate(self.workers):
            if worker.task.done() or not worker.process.is_alive:
                self.workers[index] = self.start_worker(index)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python collects when enough was allocated, also before the run: two runs of one seed would differ."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_fleet(
    seed: int,
    options: FleetOptions | None = None,
    *,
    handling: SimulatedHandling | None = None,
    records: Sequence[tuple[str, bytes]] | None = None,
) -> FleetVerdict:
    options = options or fleet_options_for(seed)
    loop = SimulationLoop(seed, order=options.loop_order, steps_max=_STEPS_MAX)
    fleet = Fleet(seed, options, loop, handling=handling, records=records)
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
    )
