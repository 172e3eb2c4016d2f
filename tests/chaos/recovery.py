"""How long shards stall when workers join, leave, crash and pause; measured by what handlers did, key by key.

    PYTHONPATH=tests python tests/chaos/recovery.py --workers 10 --store redis

Every key gets a record all along. A worker's keys are those that it handled last; a key has recovered when another
process starts a record of it.
"""

import argparse
import asyncio
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from effects import Effect
from store_chaos import STORES
from traffic import Traffic, spread_keys
from worker_fleet import Fleet, WorkerProcess
from worker_process import WorkerOptions

from anabranch.testing import AuditReport

from stream_world import StreamWorld, stream_world

RECORD_EVERY_SECONDS = 0.1

BOUNDS_SECONDS = {
    "join": 10.0,
    "clean stop": 3.0,
    "kill -9": 15.0,
    "SIGSTOP": 15.0,
    "child of a finished parent": 1.0,
    "kill -9 and restart": 1.0,
}


def keys_of(effects: list[Effect], process_id: int, at_ns: int) -> set[str]:
    """The keys whose last effect before a moment was this process's."""
    last: dict[str, int] = {}
    for effect in effects:
        if effect.at_ns <= at_ns:
            last[effect.record.partition_key] = effect.process_id
    return {key for key, owner in last.items() if owner == process_id}


def shards_per_process(effects: list[Effect]) -> list[int]:
    """How many shards each process handled last. If all are equal, nothing is left to rebalance."""
    last = {effect.record.shard_id: effect.process_id for effect in effects}
    return sorted(Counter(last.values()).values())


def recovered_at(effects: list[Effect], keys: set[str], after_ns: int, not_by: int) -> dict[str, int]:
    """When each key was first started by another process."""
    found: dict[str, int] = {}
    for effect in effects:
        key = effect.record.partition_key
        if effect.kind == "start" and effect.at_ns > after_ns and effect.process_id != not_by and key in keys:
            found.setdefault(key, effect.at_ns)
    return found


class Measurements:
    def __init__(self, fleet: Fleet, world: StreamWorld, traffic: Traffic) -> None:
        self.fleet = fleet
        self.world = world
        self.traffic = traffic
        self.seconds: dict[str, float] = {}
        self.repeats: dict[str, int] = {}

    async def taken_over(self, what: str, worker: WorkerProcess, do: Callable[[], object]) -> None:
        """Does something to a worker and waits until all of its keys are handled by others."""
        fleet = self.fleet
        with self.counting(what):
            fleet.look()
            at_ns = time.monotonic_ns()
            result = do()
            if asyncio.iscoroutine(result):
                await result
            keys = keys_of(fleet.effects, worker.id, at_ns)
            assert keys, f"{worker.name} had nothing to lose"
            await fleet.until(
                lambda: recovered_at(fleet.effects, keys, at_ns, worker.id).keys() == keys,
                f"{what}: recovery",
            )
            self.seconds[what] = (max(recovered_at(fleet.effects, keys, at_ns, worker.id).values()) - at_ns) / 1e9

    async def joined(self, what: str, shares: int) -> WorkerProcess:
        """A worker that joins holds its share; none of the records was handled twice for it."""
        fleet = self.fleet
        with self.counting(what):
            (worker,) = await fleet.join()
            started = (await fleet.event("ConsumerStarted", worker))["at_ns"]
            await fleet.until(lambda: len(fleet.events("LeaseTaken", worker)) >= shares, f"{what}: {shares} shards")
            taken = fleet.events("LeaseTaken", worker)[shares - 1]["at_ns"]
            self.seconds[what] = (taken - started) / 1e9
        return worker

    async def split(self) -> None:
        what, fleet = "child of a finished parent", self.fleet
        (parent,) = self.world.open_shards()[:1]
        self.world.split(parent["ShardId"])
        children = {
            shard["ShardId"] for shard in self.world.open_shards() if shard.get("ParentShardId") == parent["ShardId"]
        }

        def first_starts() -> dict[str, int]:
            found: dict[str, int] = {}
            for effect in fleet.effects:
                if effect.record.shard_id in children:
                    found.setdefault(effect.record.shard_id, effect.at_ns)
            return found

        def ends() -> list[int]:
            finished = fleet.events("ShardFinished")
            return [event["at_ns"] for event in finished if event["shard_id"] == parent["ShardId"]]

        await fleet.until(lambda: ends() and first_starts().keys() == children, "both children being read")
        self.seconds[what] = (max(first_starts().values()) - ends()[0]) / 1e9

    async def restarted(self) -> None:
        """The only worker is killed; a new one goes on at once. Counted from where the new process begins to join."""
        what, fleet = "kill -9 and restart", self.fleet
        for worker in fleet.alive():
            dead_ns = await worker.kill()
        (worker,) = await fleet.start()
        keys = set(self.traffic.keys)
        await fleet.until(
            lambda: recovered_at(fleet.effects, keys, dead_ns, not_by=0).keys() == keys, f"{what}: recovery"
        )
        booted = fleet.events("Booted", worker)[0]["at_ns"]
        self.seconds[what] = (max(recovered_at(fleet.effects, keys, dead_ns, not_by=0).values()) - booted) / 1e9

    @contextmanager
    def counting(self, what: str) -> Iterator[None]:
        """Counts the records that are handled twice meanwhile."""
        self.fleet.look()
        before = self.fleet.auditor.report().repeated_count
        yield
        self.fleet.look()
        self.repeats[what] = self.fleet.auditor.report().repeated_count - before


@asynccontextmanager
async def measured_fleet(folder: str, *, shards: int, **options):
    """A stream that is written to all along, and a fleet without workers yet."""
    settings = WorkerOptions(stream="orders", app="billing", folder=folder, **options)
    async with stream_world(shards=shards) as world, Fleet(settings, world.kinesis.environment()) as fleet:
        traffic = Traffic(world, spread_keys(2 * shards, 1), fleet.auditor, aggregate=False)
        writing = asyncio.create_task(traffic.steadily(RECORD_EVERY_SECONDS))
        try:
            yield Measurements(fleet, world, traffic), writing
        finally:
            writing.cancel()
            await asyncio.wait([writing])
            await traffic.close()


async def settle(measured: Measurements, writing: asyncio.Task[None]) -> AuditReport:
    """No more is written; everything is handled, everybody stops, and the audit is closed."""
    fleet = measured.fleet
    writing.cancel()
    await asyncio.wait([writing])
    await measured.traffic.close()
    await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "everything handled")
    for worker in fleet.alive():
        await worker.terminate()
    await fleet.look_at_commits()
    return fleet.auditor.report()


async def run_recovery(folder: str, *, workers: int, shards: int, leases: str = "") -> tuple[Measurements, AuditReport]:
    async with measured_fleet(folder, shards=shards, leases=leases) as (measured, writing):
        fleet = measured.fleet
        await fleet.join(workers)
        await fleet.until(lambda: len({effect.process_id for effect in fleet.effects}) == workers, "all at work")
        joiner = await measured.joined("join", math.floor(shards / (workers + 1)))
        await measured.split()
        first, second = fleet.workers[:2]
        await measured.taken_over("clean stop", joiner, joiner.terminate)
        await measured.taken_over("kill -9", first, first.kill)
        await measured.taken_over("SIGSTOP", second, second.stop)
        second.resume()
        await fleet.event("MemberEnded", second)
        await rolling_restart(measured)
        await measured.restarted()
        return measured, await settle(measured, writing)


async def rolling_restart(measured: Measurements) -> None:
    """Every worker is replaced, one after another."""
    fleet = measured.fleet
    with measured.counting("rolling restart"):
        for worker in fleet.alive():
            (joined,) = await fleet.join()
            await fleet.until(lambda joined=joined: bool(fleet.events("LeaseTaken", joined)), "a share")
            await worker.terminate()


def describe(measured: Measurements) -> str:
    lines = [
        f"  {what:<28} {seconds:6.2f} s   (promised: {BOUNDS_SECONDS[what]:g} s)"
        for what, seconds in measured.seconds.items()
    ]
    repeats = ", ".join(f"{what}: {count}" for what, count in measured.repeats.items())
    return "\n".join(["recovery:", *lines, f"  records handled twice: {repeats}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--store", choices=STORES, help="instead of a SQLite file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        leases = ""
        if options.store:
            leases = stack.enter_context(STORES[options.store](Path(folder, options.store))).leases()
        measured, report = asyncio.run(
            run_recovery(folder, workers=options.workers, shards=options.shards, leases=leases)
        )
    print(describe(measured))
    print(f"  {report}")
    assert report.ok


if __name__ == "__main__":
    main()
