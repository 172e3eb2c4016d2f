"""Large fleets on the DynamoDB store, in virtual time: how long until they are balanced, and what that costs.

    python benchmarks/fleet_scale.py --workers 100 --shards 5000
    python benchmarks/fleet_scale.py --workers 100 --shards 1000 --count busy

With `--count`, only the requests and units of a balanced fleet are counted, for two minutes: what it costs. Busy: every
lease is committed every 10 s.

The lease machine, its asyncio driver, the heartbeats and the store are those that ship. Below them is a DynamoDB in
memory, which counts requests and units, answers in 3 to 8 ms, and throttles a partition beyond 1,000 write or 3,000
read units a second, as DynamoDB does. Nothing is read from Kinesis: handlers are idle, and a hand-off drains at once.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from msgspec.structs import replace

from anabranch._core.leases.machine import MemberProfile
from anabranch._core.leases.plan import Drain, Write
from anabranch._core.leases.store_calls import Description
from anabranch._core.leases.timing import lease_timing
from anabranch._engine.fleet import Fleet
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import AppRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Shard
from anabranch._ports import Ports
from anabranch.errors import ThrottledError
from anabranch.limits import HASH_KEY_MAX
from anabranch.stores.dynamodb import DynamoDbLeaseStore
from anabranch.testing.loop import SimulationLoop, run
from anabranch.testing.world.processes import SimulatedClock
from measure import target
from memory_dynamodb import MemoryClients, MemoryDynamoDb

STREAM_KEY = "123456789012:orders:1700000000"
LATENCY_SECONDS = (0.003, 0.008)
WRITE_UNITS_MAX = 1_000
READ_UNITS_MAX = 3_000
SETTLED_SECONDS = 30.0
GIVE_UP_SECONDS = 1_800.0
COMMITTED_EVERY_SECONDS = 10.0
COUNTED_SECONDS = 120.0
MEASURED_EACH = 16
BARS_FOR = (20, 500)
"""Workers and shards, as `make bench` runs it."""
BALANCED_SECONDS_MAX = {"cold start": 60.0, "deaths": 30.0, "joins": 60.0, "deploy": 30.0}


class Dynamo(MemoryDynamoDb):
    """With the limits of a partition."""

    def __init__(self, loop: SimulationLoop, chance: random.Random) -> None:
        super().__init__()
        self._loop = loop
        self._chance = chance
        self._used: Counter[tuple[int, str, str]] = Counter()
        self.throttled: Counter[str] = Counter()
        self.cpu_seconds = 0.0
        """What this imitation itself took, by some of its calls: looking at the clock takes time, too."""
        self._calls = 0

    async def call(self, operation: str, body: dict[str, Any], **_: bool) -> Any:
        return await self._answer(operation, body, lambda: self.perform(operation, body))

    async def write(self, operation: str, body: dict[str, Any], **_: bool) -> Any:
        return await self._answer(operation, body, lambda: self.perform_write(operation, body))

    async def _answer(self, operation: str, body: dict[str, Any], perform: Callable[[], Any]) -> Any:
        await asyncio.sleep(self._chance.uniform(*LATENCY_SECONDS))
        self._calls += 1
        if self._calls % MEASURED_EACH:
            return self._limited(operation, body, perform)
        began = time.process_time()
        try:
            return self._limited(operation, body, perform)
        finally:
            self.cpu_seconds += MEASURED_EACH * (time.process_time() - began)

    def _limited(self, operation: str, body: dict[str, Any], perform: Callable[[], Any]) -> Any:
        key = body.get("Item") or body.get("Key") or {"PK": body.get("ExpressionAttributeValues", {}).get(":partition")}
        partition = (key["PK"] or {"S": ""})["S"][:2]
        second = int(self._loop.time())
        if (
            self._used[second, partition, "write"] >= WRITE_UNITS_MAX
            and operation.endswith("Item")
            and (operation != "GetItem")
        ):
            return self._throttle(operation, partition)
        if self._used[second, partition, "read"] >= READ_UNITS_MAX and operation in {"GetItem", "Query"}:
            return self._throttle(operation, partition)
        reads, writes = self.read_units, self.write_units
        result = perform()
        self._used[second, partition, "read"] += self.read_units - reads
        self._used[second, partition, "write"] += self.write_units - writes
        return result

    def _throttle(self, operation: str, partition: str) -> Any:
        self.throttled[partition] += 1
        raise ThrottledError("too fast", operation=operation, code="ProvisionedThroughputExceededException")


class Counts(NamedTuple):
    at: float
    requests: int
    read_units: int
    write_units: int
    cpu_seconds: float


class ScaleWorker:
    def __init__(self, name: str, world: "World", *, commits: bool = False) -> None:
        self._world = world
        self._commits = commits
        store = DynamoDbLeaseStore("billing")
        store.table._clients = MemoryClients(world.database)
        self._ports = Ports(
            kinesis=None, store=store, clock=SimulatedClock(world.loop, 0), entropy=world.chance, emit=world.note,
        )  # fmt: skip
        self._profile = MemberProfile(worker_id=name)
        self.fleet: Fleet | None = None
        self.task = world.loop.create_task(self._live())

    @property
    def held(self) -> int:
        return 0 if self.fleet is None else len(self.fleet._machine.table.held)

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            fleet = self.fleet = Fleet(
                self._ports, lease_timing(), self._profile, group, stall_limit_ms=10**9,
                on_change=lambda change: self._on_change(change, group), on_status=self._on_status,
                describe=Description,
            )  # fmt: skip
            await fleet.open(AppRow(app="billing", app_id="", created_wall_ms=0), "store", may_create=True)
            await fleet.check_fleet()
            await fleet.begin_stream(self._world.stream, self._world.list_shards)
            await fleet.join([STREAM_KEY])
            if self._commits:
                group.create_task(self._commit(fleet))
            await fleet.run()

    async def _commit(self, fleet: Fleet) -> None:
        """One after another, as the checkpointer with few writers does."""
        while True:
            began = self._world.loop.time()
            for holding in tuple(fleet._machine.table.held.values()):
                row = holding.row
                await fleet.write(Write(replace(row, records_handled=row.records_handled + 1), row.version))
            await asyncio.sleep(max(0.0, began + COMMITTED_EVERY_SECONDS - self._world.loop.time()))

    def _on_change(self, change: Any, group: asyncio.TaskGroup) -> None:
        if isinstance(change, Drain):
            group.create_task(self._give(change))

    async def _give(self, change: Drain) -> None:
        assert self.fleet is not None
        holding = self.fleet._machine.table.held.get(change.request.key)
        if holding is not None:
            await self.fleet.transfer(change.request.key, holding.row)

    def _on_status(self) -> None:
        if self.fleet is not None and self.fleet.needs_round:
            self.fleet.wake()

    async def stop(self) -> None:
        assert self.fleet is not None
        self.fleet.drain()
        await self.fleet.leave()
        self.kill()

    def kill(self) -> None:
        self.task.cancel()


class World:
    def __init__(self, loop: SimulationLoop, shards: int) -> None:
        self.loop = loop
        self.chance = random.Random(1)
        self.database = Dynamo(loop, self.chance)
        self.events: Counter[str] = Counter()
        self.workers: list[ScaleWorker] = []
        self._started = 0
        self.shards = shards
        self.stream = StreamRow(
            stream_key=STREAM_KEY, name="orders", arn="arn", created_seconds=1_700_000_000.0, origin=TRIM_HORIZON
        )

    def note(self, event: Any) -> None:
        self.events[type(event).__name__] += 1

    async def list_shards(self, _: object) -> list[Shard]:
        await asyncio.sleep(0.05 * (1 + self.shards // 1_000))
        width = (HASH_KEY_MAX + 1) // self.shards
        return [
            Shard(
                shard_id=f"shardId-{number:012d}",
                hash_key_range=HashKeyRange(
                    number * width, HASH_KEY_MAX if number == self.shards - 1 else (number + 1) * width - 1
                ),
                starting_sequence_number=1,
            )
            for number in range(self.shards)
        ]

    def start(self, count: int, *, commits: bool = False) -> None:
        for _ in range(count):
            self._started += 1
            self.workers.append(ScaleWorker(f"host-{self._started:03d}:4242", self, commits=commits))

    @property
    def is_balanced(self) -> bool:
        held = [worker.held for worker in self.workers]
        return sum(held) == self.shards and max(held) - min(held) <= 1

    def counts(self) -> Counts:
        database = self.database
        return Counts(
            self.loop.time(), database.requests.total(), database.read_units, database.write_units,
            time.process_time() - database.cpu_seconds,
        )  # fmt: skip

    async def until_balanced(self) -> float:
        """Seconds until the shares differ by at most one; those that follow confirm it."""
        began = self.loop.time()
        while True:
            while not self.is_balanced:
                failed = [worker.task for worker in self.workers if worker.task.done()]
                if failed or self.loop.time() - began > GIVE_UP_SECONDS:
                    raise RuntimeError(f"not balanced: {[worker.held for worker in self.workers]}, {failed}")
                await asyncio.sleep(0.25)
            balanced = self.loop.time()
            await asyncio.sleep(SETTLED_SECONDS)
            if self.is_balanced:
                return balanced - began


async def measured(world: World, name: str, work: Callable[[], Awaitable[float]]) -> float:
    before, throttled = world.counts(), world.database.throttled.total()
    seconds = await work()
    after = world.counts()
    during = after.at - before.at
    requests, reads, writes = (
        (after[field] - before[field]) / during for field in map(Counts._fields.index, Counts._fields[1:4])
    )
    cpu = (after.cpu_seconds - before.cpu_seconds) / during / len(world.workers) * 100
    print(
        f"{name:38}{seconds:8.1f} s {requests:10.0f} {reads:10.0f} {writes:9.0f} {cpu:8.2f} % "
        f"{world.database.throttled.total() - throttled:9}",
        flush=True,
    )
    return seconds


async def simulate(world: World, workers: int) -> None:
    print(f"{'':38}{'balanced':>10} {'calls/s':>10} {'reads/s':>10} {'writes/s':>9} {'CPU each':>10} {'throttled':>9}")

    async def cold_start() -> float:
        world.start(workers)
        return await world.until_balanced()

    async def idle() -> float:
        await asyncio.sleep(120)
        return 0.0

    async def deaths() -> float:
        for worker in world.workers[: workers // 10]:
            worker.kill()
        del world.workers[: workers // 10]
        return await world.until_balanced()

    async def deploy() -> float:
        """One after another, as an orchestrator does: a new worker starts, an old one stops, every 2 seconds."""
        for worker in list(world.workers):
            world.start(1)
            await asyncio.sleep(2.0)
            await worker.stop()
            world.workers.remove(worker)
        return await world.until_balanced()

    balanced = {"cold start": await measured(world, "cold start", cold_start)}
    await measured(world, "idle, two minutes", idle)
    balanced["deaths"] = await measured(world, f"{workers // 10} workers die at once", deaths)
    world.start(workers // 10)
    balanced["joins"] = await measured(world, "as many join", world.until_balanced)
    balanced["deploy"] = await measured(world, "rolling deploy, after the last", deploy)
    for worker in world.workers:
        worker.kill()
    print(f"events: {dict(sorted(world.events.items()))}")
    if (workers, world.shards) == BARS_FOR:
        for name, seconds in balanced.items():
            title = f"{workers} workers, {world.shards} shards: seconds until balanced, {name}"
            print(f"  {name:14}{seconds:6.1f} s, {target(title, seconds, BALANCED_SECONDS_MAX[name], at_least=False)}")


async def count(world: World, workers: int, *, busy: bool) -> tuple[float, float, float]:
    """Requests, read units and write units a minute."""
    world.start(workers, commits=busy)
    await world.until_balanced()
    await asyncio.sleep(60.0)
    before = world.counts()
    await asyncio.sleep(COUNTED_SECONDS)
    after = world.counts()
    for worker in world.workers:
        worker.kill()
    requests, reads, writes = ((after[field] - before[field]) / (COUNTED_SECONDS / 60) for field in (1, 2, 3))
    return requests, reads, writes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--shards", type=int, default=500)
    parser.add_argument("--count", choices=["idle", "busy"])
    options = parser.parse_args()
    loop = SimulationLoop(1, steps_max=1 << 40)
    world = World(loop, options.shards)
    if options.count is None:
        print(f"{options.workers} workers, {options.shards} shards")
        run(lambda: simulate(world, options.workers), loop=loop)
    else:
        counted = run(lambda: count(world, options.workers, busy=options.count == "busy"), loop=loop)
        requests, reads, writes = counted
        dollars = 730 * 60 * (reads * 0.125e-6 + writes * 0.625e-6)
        print(
            f"{options.workers:4} workers {options.shards:5} shards {options.count}: {requests:7.0f} requests, "
            f"{reads:7.0f} read units, {writes:7.0f} write units a minute, {dollars:7.2f} dollars a month"
        )


if __name__ == "__main__":
    main()
