"""A fleet on Redis: the primary is cut off together with one worker, and a replica becomes the primary for the other.

    PYTHONPATH=tests python tests/chaos/redis_failover.py '?replicas=1' --seconds 60

The first worker still reaches the old primary and Kinesis, but not the new primary: the worst case for "one owner".
With `?replicas=1` its heartbeats are not acknowledged any more. Without, the old primary acknowledges them.
"""

import argparse
import asyncio
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from effects import Effect
from traffic import Traffic, spread_keys
from worker_fleet import Fleet, WorkerProcess
from worker_process import WorkerOptions

from anabranch.testing import AuditReport
from network_proxy import NetworkProxy

from services import RedisServerProcess
from stream_world import stream_world

SHARDS = 4


class FailOver(NamedTuple):
    report: AuditReport
    seconds: float
    taken_seconds: float
    """From the promotion until the other worker had handled records of all shards."""
    stopped_seconds: float
    """From the promotion until the last call that the worker at the old primary started."""
    stale_starts: int
    """Calls with a fence token below one that had been seen for their shard."""
    returned_seconds: float
    """From when that worker reached the new primary until it handled records again."""


async def run_failover(folder: str, options: str, *, seconds: float) -> FailOver:
    with ExitStack() as stack:
        first = stack.enter_context(RedisServerProcess(Path(folder, "first")))
        first.call("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        follow = ("--replicaof", "127.0.0.1", str(first.port), "--repl-diskless-sync-delay", "0")
        second, third = (
            stack.enter_context(RedisServerProcess(Path(folder, name), *follow)) for name in ("second", "third")
        )
        await asyncio.to_thread(first.wait_for_replicas, 2)
        worker_options = WorkerOptions(
            stream="orders", app="billing", folder=folder, order="key", concurrency=16, handling_seconds=0.02,
            leases=first.leases(options),
        )  # fmt: skip
        async with stream_world(shards=SHARDS) as world, Fleet(worker_options, world.kinesis.environment()) as fleet:
            traffic = Traffic(world, spread_keys(SHARDS, 2), fleet.auditor, aggregate=False)
            writing = asyncio.create_task(traffic.steadily(0.25))
            proxies = [await NetworkProxy(first.port).start() for _ in range(2)]
            workers = [(await fleet.join(leases=first.leases(options, port=proxy.port)))[0] for proxy in proxies]

            def fail_over() -> None:
                second.call("REPLICAOF", "NO", "ONE")
                third.call("REPLICAOF", "127.0.0.1", str(second.port))
                proxies[1].lead_to(second.port)

            found = await _fail_over(fleet, workers, fail_over, lambda: proxies[0].lead_to(second.port), seconds)
            writing.cancel()
            await traffic.close()
            await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "everything handled", 90)
            for worker in workers:
                await worker.terminate()
            for proxy in proxies:
                await proxy.close()
            return found._replace(report=fleet.auditor.report())


async def _fail_over(fleet: Fleet, workers: list[WorkerProcess], fail_over, reconnect, seconds: float) -> FailOver:
    left_behind, other = workers
    for worker in workers:
        await fleet.until(lambda worker=worker: len(_shards(fleet, worker, 0)) >= SHARDS // 2, worker.name)
    began = time.monotonic()
    await asyncio.to_thread(fail_over)
    await fleet.until(lambda: len(_shards(fleet, other, began)) == SHARDS, "the other worker has all shards", 90)
    taken = time.monotonic() - began
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    fleet.look()
    last = max((at for at in _starts(fleet, left_behind) if at > began), default=began)
    stale = stale_starts(fleet.effects)
    connected = time.monotonic()
    reconnect()
    await fleet.until(lambda: bool(_shards(fleet, left_behind, connected + 5)), "it works again", 90)
    return FailOver(fleet.auditor.report(), seconds, taken, last - began, stale, time.monotonic() - connected)


async def run_restored(folder: str) -> FailOver:
    """Both workers lose what was written after a backup: Redis is started again on older files."""
    with RedisServerProcess(Path(folder, "redis")) as server:
        options = WorkerOptions(
            stream="orders", app="billing", folder=folder, order="key", concurrency=16, leases=server.leases()
        )
        async with stream_world(shards=SHARDS) as world, Fleet(options, world.kinesis.environment()) as fleet:
            traffic = Traffic(world, spread_keys(SHARDS, 2), fleet.auditor, aggregate=False)
            writing = asyncio.create_task(traffic.steadily(0.25))
            workers = await fleet.join(2)
            for worker in workers:
                await fleet.until(lambda worker=worker: len(_shards(fleet, worker, 0)) >= SHARDS // 2, worker.name)
            await asyncio.to_thread(shutil.copytree, server.directory, Path(folder, "backup"))
            await asyncio.sleep(10)
            began = time.monotonic()
            await asyncio.to_thread(_restore, server, Path(folder, "backup"))
            fleet.look()
            everywhere = lambda: len(_shards(fleet, workers[0], began + 8) | _shards(fleet, workers[1], began + 8))  # noqa: E731
            await fleet.until(lambda: everywhere() == SHARDS, "all shards go on", 90)
            taken = time.monotonic() - began
            assert fleet.events("StoreRolledBack")
            writing.cancel()
            await traffic.close()
            await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "everything handled", 90)
            for worker in workers:
                await worker.terminate()
            return FailOver(fleet.auditor.report(), 0.0, taken, 0.0, stale_starts(fleet.effects), 0.0)


def _restore(server: RedisServerProcess, backup: Path) -> None:
    server.kill()
    shutil.rmtree(server.directory)
    shutil.copytree(backup, server.directory)
    server.start()


def stale_starts(effects: list[Effect]) -> int:
    highest: dict[str, int] = {}
    count = 0
    for effect in effects:
        if effect.kind == "start":
            shard_id = effect.record.shard_id
            count += effect.fence_token < highest.get(shard_id, 0)
            highest[shard_id] = max(effect.fence_token, highest.get(shard_id, 0))
    return count


def _starts(fleet: Fleet, worker: WorkerProcess) -> list[float]:
    return [effect.at_ns / 1e9 for effect in fleet.effects if effect.process_id == worker.id and effect.kind == "start"]


def _shards(fleet: Fleet, worker: WorkerProcess, since: float) -> set[str]:
    return {
        effect.record.shard_id
        for effect in fleet.effects
        if effect.process_id == worker.id and effect.kind == "start" and effect.at_ns / 1e9 > since
    }


def describe(found: FailOver) -> str:
    return (
        f"Redis fails over for one of two workers: {found.report}\n  it had all shards after "
        f"{found.taken_seconds:.1f} s; the other one started its last call {found.stopped_seconds:.1f} s after the "
        f"fail-over; in {found.seconds:.0f} s, {found.stale_starts} calls started with a fence token below a newer "
        f"one; it worked again {found.returned_seconds:.1f} s after it reached the new primary"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", nargs="?", default="?replicas=1")
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(describe(asyncio.run(run_failover(folder, given.options, seconds=given.seconds))))


if __name__ == "__main__":
    main()
