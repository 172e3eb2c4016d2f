"""One simulated fleet from its start to its verdict: faults for a while, then calm, then everything must be handled."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from anabranch._model.sequence_numbers import Position
from anabranch.local.calls import LocalState
from anabranch.local.errors import LocalError
from anabranch.testing.checkers import Journal, NoStandstill, ShardOpened, Violation, Written, all_checkers
from anabranch.testing.loop import SimulationLoop, run
from anabranch.testing.world.faults import Faults
from anabranch.testing.world.kinesis import SimulatedKinesis
from anabranch.testing.world.lease_store import ForgetfulRows, SimulatedLeaseStore
from anabranch.testing.world.network import Network
from anabranch.testing.world.options import FleetOptions, fleet_options_for
from anabranch.testing.world.processes import Processes, SimulatedProcess
from anabranch.testing.world.worker import STREAM, SimulatedHandling, SimulatedWorker

__all__ = ["Fleet", "FleetVerdict", "run_fleet"]

_WALL_MS = 1_700_000_000_000
_LOOK_EACH_SECONDS = 1.0


class FleetVerdict(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    options: FleetOptions
    violations: tuple[Violation, ...]
    steps: int
    seconds: float
    """Virtual ones."""
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
        self.journal = Journal(all_checkers())
        self.network = Network(loop, options, self.random)
        self.state = LocalState(entropy=self.random)
        self.rows = ForgetfulRows(self.journal, self.now_ms, keeps_history=bool(options.roll_back_seconds))
        self.processes = Processes(loop, lambda coroutine: coroutine.__qualname__ == "Heartbeat.run")
        self.workers: list[SimulatedWorker] = []
        self.records = self._drawn_records() if records is None else records
        """What is written, as (partition key, data), over the time of the faults."""
        self._handling = handling or SimulatedHandling()
        self.steps = 0
        self._started = 0
        self._known_shards: dict[str, None] = {}

        loop.set_exception_handler(self._on_loop_error)

    def now_ms(self) -> int:
        return int(self.loop.time() * 1000)

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.journal.failed(self.now_ms(), f"{context['message']}: {context.get('exception')!r}")

    # the stream

    def _kinesis(self, operation: str, **request: Any) -> dict[str, Any]:
        return self.state.call(operation, request, now_ms=_WALL_MS + self.now_ms())

    def _note_shards(self) -> list[dict[str, Any]]:
        shards: list[dict[str, Any]] = self._kinesis("ListShards", StreamName=STREAM)["Shards"]
        for shard in shards:
            if shard["ShardId"] not in self._known_shards:
                self._known_shards[shard["ShardId"]] = None
                parents = [shard.get("ParentShardId"), shard.get("AdjacentParentShardId")]
                self.journal.opened(ShardOpened(shard["ShardId"], tuple(name for name in parents if name)))
        return shards

    def _drawn_records(self) -> list[tuple[str, bytes]]:
        keys = self.options.key_count
        return [
            (f"key-{self.random.randrange(keys)}", str(number).encode()) for number in range(self.options.record_count)
        ]

    def write(self, partition_key: str, data: bytes) -> None:
        answer = self._kinesis("PutRecord", StreamName=STREAM, PartitionKey=partition_key, Data=data)
        self.journal.written(Written(answer["ShardId"], Position(int(answer["SequenceNumber"])), partition_key))

    def reshard(self) -> None:
        """Splits a shard, merges two, or both in a row, so that a shard may come and go between two listings."""
        for _ in range(self.random.choice([1, 1, 2])):
            can_merge = len(self._open_shards()) > 1
            if not (self.merge() if can_merge and self.random.random() < 0.5 else self.split()):
                return

    def split(self) -> bool:
        """Some shard, in the middle. False if that cannot be now: still changing, or too small."""
        shard = self.random.choice(self._open_shards())
        low, high = (int(shard["HashKeyRange"][name]) for name in ("StartingHashKey", "EndingHashKey"))
        return self._change("SplitShard", ShardToSplit=shard["ShardId"], NewStartingHashKey=str((low + high) // 2 + 1))

    def merge(self) -> bool:
        """Some two neighbours. False if that cannot be now."""
        shards = self._open_shards()
        if len(shards) < 2:
            return False
        index = self.random.randrange(len(shards) - 1)
        one, other = shards[index : index + 2]
        return self._change("MergeShards", ShardToMerge=one["ShardId"], AdjacentShardToMerge=other["ShardId"])

    def _open_shards(self) -> list[dict[str, Any]]:
        shards = [shard for shard in self._note_shards() if "EndingSequenceNumber" not in shard["SequenceNumberRange"]]
        return sorted(shards, key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]))

    def _change(self, operation: str, **request: str) -> bool:
        try:
            self._kinesis(operation, StreamName=STREAM, **request)
        except LocalError:
            return False
        self._note_shards()
        return True

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
        )
        return SimulatedWorker(
            process,
            self.network,
            self.journal,
            options,
            random,
            kinesis=SimulatedKinesis(self.state, self.network, process, options, random),
            store=SimulatedLeaseStore(self.rows, self.network, process),
            handling=self._handling,
        )

    # the run

    async def live(self) -> None:
        options = self.options
        self._kinesis("CreateStream", StreamName=STREAM, ShardCount=options.shard_count)
        self._note_shards()
        self.workers = [self.start_worker(index) for index in range(options.worker_count)]
        faults = Faults(self)
        for partition_key, data in self.records:
            self.write(partition_key, data)
            await asyncio.sleep(self.random.expovariate(len(self.records) / options.faulty_seconds))
        faults.end()
        self.network.is_calm = True
        await self._settle()
        self.steps = self.loop.steps
        self.journal.ended(self.now_ms())
        self.journal.is_closed = self.network.is_closed = True
        self.processes.open()

    async def _settle(self) -> None:
        """Until all is handled, or it has taken too long. A worker that has ended by itself is started again, as
        whoever runs the fleet would do.
        """
        left = next(checker for checker in self.journal.checkers if isinstance(checker, NoStandstill))
        until = self.loop.time() + self.options.settling_seconds
        while left.left_count and self.loop.time() < until:
            for index, worker in enumerate(self.workers):
                if worker.task.done() or not worker.process.is_alive:
                    self.workers[index] = self.start_worker(index)
            await asyncio.sleep(_LOOK_EACH_SECONDS)


def run_fleet(
    seed: int,
    options: FleetOptions | None = None,
    *,
    handling: SimulatedHandling | None = None,
    records: Sequence[tuple[str, bytes]] | None = None,
) -> FleetVerdict:
    options = options or fleet_options_for(seed)
    loop = SimulationLoop(seed, order=options.loop_order)
    fleet = Fleet(seed, options, loop, handling=handling, records=records)
    run(fleet.live, loop=loop)
    journal = fleet.journal
    return FleetVerdict(
        seed=seed,
        options=options,
        violations=tuple(journal.violations),
        steps=fleet.steps,
        seconds=loop.time(),
        starts=journal.starts,
        finishes=journal.finishes,
        commits=journal.commits,
        zombies=journal.zombies,
    )
