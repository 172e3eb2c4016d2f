"""Half an hour of fan-out with real five-minute subscriptions: `make test-long ONLY=fanout`.

The worker is a process of its own, so that its memory is its own; the local server and the writer are the test. The
worker speaks HTTP/2 over TLS, as with AWS, and keeps one byte for each record that it has seen.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from anabranch import Consumer

from stream_world import stream_world, until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2_400)]

SHARDS = 16
KEYS = [f"user-{n}" for n in range(64)]
PUT_EVERY_SECONDS = 0.5
RESHARD_EVERY_SECONDS = 120.0
REPORT_EVERY_SECONDS = 5.0
GROWTH_MIB_MAX = 8
"""After the first sixth, in which the allocator and the caches fill. One event of each shard would be more."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def work(leases: str, records_max: int) -> None:
    """The worker: prints a JSON line every few seconds, and a last one when it has stopped."""
    seen, last = bytearray(records_max), dict.fromkeys(KEYS, -1)
    counts = {"handled": 0, "repeated": 0, "disordered": 0}
    consumer = Consumer("orders", app="soak", leases=leases, read="fanout", start="trim_horizon")

    async def handle(record) -> None:
        number = int(record.data)
        counts["handled"] += 1
        counts["repeated"] += seen[number]
        counts["disordered"] += last[record.partition_key] > number
        seen[number], last[record.partition_key] = 1, number

    running = asyncio.create_task(consumer.run(handle))  # SIGTERM stops it
    while not running.done():
        await asyncio.wait([running], timeout=REPORT_EVERY_SECONDS)
        subscriptions = [shard.subscription for shard in consumer.status().shards if shard.subscription]
        renewals = sum(subscription.renewal_count for subscription in subscriptions)
        active = sum(subscription.state == "active" for subscription in subscriptions)
        line = {**counts, "resident": resident_bytes(), "renewals": renewals, "active": active}
        print(json.dumps(line), flush=True)
    report = await running
    print(json.dumps({**counts, "clean": report.clean}), flush=True)


async def follow(worker: asyncio.subprocess.Process, lines: list[dict[str, int]]) -> None:
    assert worker.stdout is not None
    while line := await worker.stdout.readline():
        lines.append(json.loads(line))


async def run_fanout(folder: str, seconds: float) -> str:
    async with stream_world(SHARDS, tls=True) as world:
        records_max = round(seconds / PUT_EVERY_SECONDS + 100) * len(KEYS)
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, f"sqlite:///{folder}/leases.db", str(records_max)),
            env={**os.environ, **world.kinesis.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE,
        )
        lines: list[dict[str, int]] = []
        following = asyncio.create_task(follow(worker, lines))
        try:
            splits = await write(world, lines, seconds)
            await until(lambda: lines[-1]["handled"] >= world.put_count, "all records")
            state = lines[-1]
        finally:
            worker.send_signal(signal.SIGTERM)
            await following
            await worker.wait()
        end = lines[-1]
        assert (end["handled"], end["repeated"], end["disordered"], end["clean"]) == (world.put_count, 0, 0, True)
        assert state["active"] >= SHARDS - 1
        assert state["renewals"] >= (SHARDS - 4) * (seconds // 330)
        memory = [line["resident"] / (1 << 20) for line in lines[:-1]]
        settled = memory[len(memory) // 6 :]
        assert max(settled) - settled[0] < GROWTH_MIB_MAX, memory
        sampled = ", ".join(f"{mib:.1f}" for mib in memory[:: max(1, len(memory) // 6)])
        return (
            f"{world.put_count} records, lost 0, repeated 0; {state['renewals']} renewals of the {SHARDS} shards that "
            f"are open now; {splits} reshards; MiB resident: {sampled}; at most {max(settled):.1f}"
        )


async def write(world, lines, seconds: float) -> int:
    """Until the time is up; every two minutes a split, then a merge."""
    await until(lambda: bool(lines), "the worker")
    begun, splits = time.monotonic(), 0
    while (elapsed := time.monotonic() - begun) < seconds:
        world.put(KEYS)
        if elapsed >= (splits + 1) * RESHARD_EVERY_SECONDS:
            splits += 1
            if splits % 2:
                world.split()
            else:
                world.merge()
        await asyncio.sleep(PUT_EVERY_SECONDS)
    return splits


def test_fanout_for_half_an_hour_with_resharding(tmp_path):
    print(asyncio.run(run_fanout(str(tmp_path), 1_800.0)))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2])))
