"""Eight workers under random SIGKILL, SIGSTOP and SIGCONT while 32 shards split and merge: every promise holds.

    PYTHONPATH=tests python tests/chaos/fleet_chaos.py --seconds 120 --seed 7

A killed worker is replaced at once; a stopped one continues later, often long after others have taken over its shards.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from effects import Effect
from traffic import Resharding, Traffic, spread_keys
from worker_fleet import Fleet, WorkerProcess
from worker_process import WorkerOptions

from anabranch.testing import AuditReport

from stream_world import stream_world

WORKERS = 8
SHARDS = 32
RECORD_EVERY_SECONDS = 0.25
STOPPED_AT_ONCE = 3
STOPPED_SECONDS = (0.5, 14.0)
FAULT_EVERY_SECONDS = (0.5, 2.5)
RESHARD_EVERY_SECONDS = (1.0, 3.0)


class Chaos(NamedTuple):
    report: AuditReport
    faults: Counter[str]
    events: Counter[str]
    gaps: list[float]
    """The longest time without a handled record of each key, in seconds, shortest first."""
    settled_seconds: float
    """From the last fault until everything written was handled."""
    splits: int
    merges: int


class Faults:
    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self._fleet = fleet
        self._chance = chance
        self.counts: Counter[str] = Counter()

    async def steadily(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._chance.uniform(*FAULT_EVERY_SECONDS))
                running = [worker for worker in self._fleet.alive() if not worker.stopped]
                stopped = len(self._fleet.alive()) - len(running)
                victim = self._chance.choice(running)
                if stopped < STOPPED_AT_ONCE and self._chance.random() < 0.6:
                    group.create_task(self._stop_for_a_while(victim))
                else:
                    await self._replace(victim)

    async def _replace(self, worker: WorkerProcess) -> None:
        self.counts["SIGKILL"] += 1
        await worker.kill()
        await self._fleet.start()

    async def _stop_for_a_while(self, worker: WorkerProcess) -> None:
        self.counts["SIGSTOP"] += 1
        worker.stop()
        try:
            await asyncio.sleep(self._chance.uniform(*STOPPED_SECONDS))
        finally:
            if worker.is_alive:
                self.counts["SIGCONT"] += 1
                worker.resume()


def longest_gaps(effects: list[Effect]) -> list[float]:
    last: dict[str, int] = {}
    gaps: dict[str, int] = {}
    for effect in effects:
        if effect.kind == "start":
            key = effect.record.partition_key
            gaps[key] = max(gaps.get(key, 0), effect.at_ns - last.get(key, effect.at_ns))
            last[key] = effect.at_ns
    return sorted(gap / 1e9 for gap in gaps.values())


async def run_chaos(folder: str, *, seconds: float, seed: int, patience: float) -> Chaos:
    chance = random.Random(seed)
    options = WorkerOptions(
        stream="orders", app="billing", folder=folder, order="key", concurrency=16, handling_seconds=0.05
    )
    async with stream_world(shards=SHARDS) as world, Fleet(options, world.kinesis.environment()) as fleet:
        traffic = Traffic(world, spread_keys(SHARDS, 4), fleet.auditor, aggregate=True)
        resharding = Resharding(world, chance, shards_min=SHARDS * 3 // 4, shards_max=SHARDS * 5 // 4)
        faults = Faults(fleet, chance)
        await fleet.join(WORKERS)
        work = (traffic.steadily(RECORD_EVERY_SECONDS), resharding.steadily(RESHARD_EVERY_SECONDS), faults.steadily())
        tasks = [asyncio.create_task(coroutine) for coroutine in work]
        try:
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
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
        return Chaos(
            fleet.auditor.report(),
            faults.counts,
            Counter(event["kind"] for event in fleet.events()),
            longest_gaps(fleet.effects),
            settled,
            resharding.split_count,
            resharding.merge_count,
        )


def describe(found: Chaos) -> str:
    gaps = found.gaps
    return (
        f"fleet: {found.report}\n  faults: {dict(found.faults)}, {found.splits} splits, {found.merges} merges\n"
        f"  no record of a key was handled for at most {gaps[-1]:.1f} s, half of the keys never for more than "
        f"{gaps[len(gaps) // 2]:.1f} s; all handled {found.settled_seconds:.1f} s after the last fault\n"
        f"  events: {dict(sorted(found.events.items()))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run_chaos(folder, seconds=options.seconds, seed=options.seed, patience=120))
    print(describe(found))
    assert found.report.ok


if __name__ == "__main__":
    main()
