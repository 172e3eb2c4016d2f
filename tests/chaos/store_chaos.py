"""A fleet on a real store: workers are killed, stopped and cut off from it, the store is killed, shards split.

    PYTHONPATH=tests python tests/chaos/store_chaos.py dynamodb --seconds 120 --seed 7

The stores are AWS's DynamoDB Local and Redis. Every worker reaches the store through a proxy of its own. What a cut
held back arrives later, long after its sender gave up, or is lost. The store is killed and started again on its file.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from effects import Effect
from fleet_chaos import longest_gaps
from traffic import Resharding, Traffic, spread_keys
from worker_fleet import Fleet, WorkerProcess
from worker_process import WorkerOptions

from anabranch.errors import LeaseStoreError
from anabranch.testing import AuditReport
from network_proxy import NetworkProxy

from services import DynamoDbServer, RedisServerProcess, dynamodb_local
from stream_world import stream_world

StoreServer = DynamoDbServer | RedisServerProcess
STORES: dict[str, Callable[[Path], StoreServer]] = {"dynamodb": dynamodb_local, "redis": RedisServerProcess}
"""Each keeps its rows in files of the folder."""
WORKERS = 6
SHARDS = 16
RECORD_EVERY_SECONDS = 0.25
DISTURBED_AT_ONCE = 3
DISTURBED_SECONDS = (0.5, 14.0)
FAULT_EVERY_SECONDS = (0.5, 2.5)
RESHARD_EVERY_SECONDS = (1.0, 3.0)
STORE_KILLED_EVERY_SECONDS = (12.0, 25.0)
STORE_AWAY_SECONDS = (0.0, 8.0)


class Outage(NamedTuple):
    away_seconds: float
    recovered_seconds: float
    """From the store's return until a handler call started again; 0 if calls never stopped."""


class Chaos(NamedTuple):
    report: AuditReport
    faults: Counter[str]
    events: Counter[str]
    gaps: list[float]
    """The longest time that each key stood still, in seconds, shortest first."""
    settled_seconds: float
    outages: list[Outage]
    splits: int
    merges: int
    zombies: int
    """Calls that were running when their process was stopped or cut off, and outlived the lease."""


class Faults:
    def __init__(self, fleet: Fleet, store: StoreServer, chance: random.Random) -> None:
        self._fleet = fleet
        self._store = store
        self._chance = chance
        self._proxies: dict[int, NetworkProxy] = {}
        self._cut: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.outages: list[tuple[float, float]] = []
        """When the store was killed and when it was back, on the clock of the effects."""

    async def start_worker(self) -> WorkerProcess:
        proxy = await NetworkProxy(self._store.port).start()
        (worker,) = await self._fleet.start(leases=self._store.leases(port=proxy.port))
        self._proxies[worker.id] = proxy
        return worker

    async def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.heal(drop=True)
            await proxy.close()

    async def steadily(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._chance.uniform(*FAULT_EVERY_SECONDS))
                alive = self._fleet.alive()
                running = [worker for worker in alive if not worker.stopped and worker.id not in self._cut]
                kind = self._chance.choice(["kill", "stop", "stop", "cut", "cut"])
                if kind == "kill":
                    await self._replace(self._chance.choice(alive))
                elif len(alive) - len(running) < DISTURBED_AT_ONCE:
                    disturb = self._stop_for_a_while if kind == "stop" else self._cut_off_for_a_while
                    group.create_task(disturb(self._chance.choice(running)))

    async def kill_store_steadily(self) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(*STORE_KILLED_EVERY_SECONDS))
            killed = time.monotonic()
            self.counts["store killed"] += 1
            await asyncio.to_thread(self._store.kill)
            try:
                await asyncio.sleep(self._chance.uniform(*STORE_AWAY_SECONDS))
            finally:
                await asyncio.shield(asyncio.to_thread(self._store.start))
            self.outages.append((killed, time.monotonic()))

    async def _replace(self, worker: WorkerProcess) -> None:
        self.counts["SIGKILL"] += 1
        await worker.kill()
        await self.start_worker()

    async def _stop_for_a_while(self, worker: WorkerProcess) -> None:
        self.counts["SIGSTOP"] += 1
        worker.stop()
        try:
            await asyncio.sleep(self._chance.uniform(*DISTURBED_SECONDS))
        finally:
            if worker.is_alive:
                worker.resume()

    async def _cut_off_for_a_while(self, worker: WorkerProcess) -> None:
        drop = self._chance.random() < 0.5
        self.counts["cut off, then lost" if drop else "cut off, then late"] += 1
        self._cut.add(worker.id)
        self._proxies[worker.id].cut()
        try:
            await asyncio.sleep(self._chance.uniform(*DISTURBED_SECONDS))
        finally:
            self._proxies[worker.id].heal(drop=drop)
            self._cut.discard(worker.id)


def measured_outages(outages: list[tuple[float, float]], effects: list[Effect]) -> list[Outage]:
    """A call that starts within the fence time of the outage does not count: the heartbeat before it allowed it."""
    starts = sorted(effect.at_ns / 1e9 for effect in effects if effect.kind == "start")
    found = []
    for killed, back in outages:
        after = next((at for at in starts if at >= back), None)
        during = any(killed < at < back for at in starts if at > back - 1.0)
        if after is not None:
            found.append(Outage(back - killed, 0.0 if during else after - back))
    return found


async def run_chaos(
    kind: str, folder: str, *, seconds: float, seed: int, patience: float, workers: int = WORKERS
) -> Chaos:
    chance = random.Random(seed)
    with STORES[kind](Path(folder, kind)) as store:
        options = WorkerOptions(
            stream="orders", app="billing", folder=folder, order="key", concurrency=16, handling_seconds=0.05,
            leases=store.leases(),
        )  # fmt: skip
        async with stream_world(shards=SHARDS) as world, Fleet(options, world.kinesis.environment()) as fleet:
            return await _run(fleet, world, store, chance, seconds, patience, workers)


async def _run(fleet, world, store, chance, seconds, patience, workers) -> Chaos:
    traffic = Traffic(world, spread_keys(SHARDS, 4), fleet.auditor, aggregate=True)
    resharding = Resharding(world, chance, shards_min=SHARDS * 3 // 4, shards_max=SHARDS * 5 // 4)
    faults = Faults(fleet, store, chance)
    for _ in range(workers):
        await fleet.event("ConsumerStarted", await faults.start_worker())
    work = (
        traffic.steadily(RECORD_EVERY_SECONDS),
        resharding.steadily(RESHARD_EVERY_SECONDS),
        faults.steadily(),
        faults.kill_store_steadily(),
    )
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
            with suppress(LeaseStoreError):  # it was just killed
                await fleet.look_at_commits()
    finally:
        for task in reversed(tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await traffic.close()
    quiet = time.monotonic()
    await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "everything handled", patience)
    settled = time.monotonic() - quiet
    for worker in fleet.alive():
        await worker.terminate()
    await fleet.look_at_commits()
    await faults.close()
    events = Counter(event["kind"] for event in fleet.events())
    return Chaos(
        fleet.auditor.report(),
        faults.counts,
        events,
        longest_gaps(fleet.effects),
        settled,
        measured_outages(faults.outages, fleet.effects),
        resharding.split_count,
        resharding.merge_count,
        events["ZombieCall"],
    )


def describe(kind: str, found: Chaos) -> str:
    gaps = found.gaps
    outages = ", ".join(f"{one.away_seconds:.1f} s (+{one.recovered_seconds:.1f} s)" for one in found.outages)
    return (
        f"fleet on {kind}: {found.report}\n  faults: {dict(found.faults)}, {found.splits} splits, "
        f"{found.merges} merges; {found.zombies} zombie calls were reported\n"
        f"  the store was away for {outages or 'no time'}\n"
        f"  no record of a key was handled for at most {gaps[-1]:.1f} s, half of the keys never for more than "
        f"{gaps[len(gaps) // 2]:.1f} s; all handled {found.settled_seconds:.1f} s after the last fault\n"
        f"  events: {dict(sorted(found.events.items()))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", choices=STORES)
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run_chaos(options.store, folder, seconds=options.seconds, seed=options.seed, patience=180))
    print(describe(options.store, found))
    assert found.report.ok


if __name__ == "__main__":
    main()
