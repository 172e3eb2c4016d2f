"""One world of the protocol simulation: a fleet, a store, faults from a seed, then calm, and a verdict.

While there are faults only safety is judged. Then they stop, and within a bound every lease must be worked on again by
somebody, and the leases must be shared fairly.
"""

from functools import cache

import msgspec
from msgspec.structs import replace

from anabranch._core.leases.machine import LeaseMachine
from anabranch._core.leases.timing import LeaseTiming, lease_timing
from anabranch._model.leases import AppRow
from protocol.faults import Dice, Faults, WorldOptions, options_for
from protocol.journal import Journal, Violation
from protocol.network import Agenda, Link, Process, Storage, streams_of
from protocol.worker import Host, Reader, Worker

_SILENCE_MS_MAX = 8_000
_READ_AGAIN_MS = 40_000
"""How soon after the faults every lease is read again: longer than late messages and an expiry take together, and
shorter than the interval at which all leases are read.
"""
_SETTLED_MS = 100_000
"""How soon the leases are shared fairly: longer than all that, the interval of lease reads and a cool-down together."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    options: WorldOptions
    violations: tuple[Violation, ...]
    events: int
    starts: int
    takes: int
    tenures: int
    seals: int
    gifts: int
    zombies: int
    repeats: int
    longest_gap_ms: int

    @property
    def stale_dispatches(self) -> int:
        return sum(violation.what.startswith("stale dispatch") for violation in self.violations)


class World:
    def __init__(
        self,
        seed: int,
        options: WorldOptions,
        *,
        machine_class: type[LeaseMachine] = LeaseMachine,
        reader_class: type[Reader] = Reader,
    ) -> None:
        self.seed = seed
        self.options = options
        self.dice = Dice(f"world {seed}")
        self.agenda = Agenda()
        self.journal = Journal()
        self.storage = Storage(
            options.lease_count,
            options.stream_count,
            keeps_history=bool(options.lag_ms_max or options.roll_back_every_ms),
        )
        self.workers: list[Worker] = []
        self.is_calm = False
        self._machine_class, self._reader_class = machine_class, reader_class
        self._process_count = 0
        for index in range(options.worker_count):
            if options.joins_every_ms:
                self.agenda.at(index * options.joins_every_ms, self._add_worker, index)
            else:
                self._add_worker(index)
        self._faults = Faults(self)

    def _add_worker(self, index: int) -> None:
        self.workers.append(self.start_worker(index))

    def start_worker(self, index: int) -> Worker:
        """A new process on host number `index`."""
        options, dice = self.options, self.dice
        error_ppm = int(options.clock_error * 1_000_000)
        process = Process(
            self.agenda,
            rate_ppm=dice.between(-error_ppm, error_ppm + 1),
            offset_ms=dice.between(0, 1_000_000),
            clock_stops=options.clocks_stop,
        )
        link = Link(self.agenda, self.storage, process, options, dice)
        if self.is_calm:
            link.calm_down()
        self._process_count += 1
        host = Host(
            name=f"process {self._process_count}",
            worker_id="billing" if options.same_worker_id else f"worker-{index}",
            streams=streams_of(index, options.stream_count),
            process=process,
            link=link,
            storage=self.storage,
            timing=_timing(options, options.expiry_ms[index % len(options.expiry_ms)]),
            options=options,
            journal=self.journal,
            dice=dice,
        )
        return Worker(host, self._machine_class, self._reader_class)

    def run(self) -> Verdict:
        events = self.agenda.run_until(self.options.faulty_ms)
        self._faults.end()
        self.is_calm = True
        events += self.agenda.run_until(self.options.faulty_ms + self.options.settling_ms)
        if self.options.settling_ms >= _READ_AGAIN_MS:
            self._judge_read_again()
        if self.options.settling_ms >= _SETTLED_MS:
            self._judge_shares()
        return Verdict(
            seed=self.seed,
            options=self.options,
            violations=tuple(self.journal.violations),
            events=events,
            starts=self.journal.starts,
            takes=self.storage.takes,
            tenures=self.journal.tenures,
            seals=self.storage.seals,
            gifts=self.storage.gifts,
            zombies=self.journal.zombies,
            repeats=self.journal.repeats,
            longest_gap_ms=self.journal.longest_gap_ms,
        )

    def _running(self, app: AppRow) -> list[Worker]:
        workers = [worker for worker in self.workers if worker.process.alive and not worker.has_stopped]
        return [worker for worker in workers if worker.app_id == app.app_id]

    def _judge_read_again(self) -> None:
        now_ms, app = self.agenda.now_ms, self.storage.app
        if app is None:
            return
        read = {stream_key: None for worker in self._running(app) for stream_key in worker.host.streams}
        for key in (key for stream_key in read for key in self.storage.lease_keys(stream_key)):
            silent_ms = now_ms - self.journal.silent_since(app.app_id, key)
            if silent_ms > _SILENCE_MS_MAX:
                row = self.storage.lease(app.app_id, key)
                owner = "it has no row" if row is None else f"its owner is {row.owner}"
                self.journal.stood_still(now_ms, f"nothing of {key.shard_id} was started for {silent_ms} ms; {owner}")

    def _judge_shares(self) -> None:
        app = self.storage.app
        loads = [] if app is None else [len(worker.machine.table.held) for worker in self._running(app)]
        # Workers that read different streams share as far as these allow; the laws of the balance judge that.
        if loads and self.options.stream_count == 1 and max(loads) - min(loads) > 1:
            self.journal.stood_still(self.agenda.now_ms, f"the leases are shared as {loads}")


@cache
def _timing(options: WorldOptions, expiry_ms: int) -> LeaseTiming:
    timing = replace(lease_timing(expiry_ms), poll_interval_ms=expiry_ms // options.polls_per_expiry)
    if not options.read_pause_ms:
        return timing
    rows = options.worker_count * options.lease_count
    return replace(timing, rows_read_per_second=max(1, rows * 1_000 // options.read_pause_ms))


def run_world(
    seed: int,
    options: WorldOptions | None = None,
    *,
    machine_class: type[LeaseMachine] = LeaseMachine,
    reader_class: type[Reader] = Reader,
) -> Verdict:
    world = World(seed, options or options_for(seed), machine_class=machine_class, reader_class=reader_class)
    return world.run()
