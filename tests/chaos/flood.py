"""A stream that floods and a handler that sleeps: how much a consumer holds, by its own count and by the kernel's.

    PYTHONPATH=tests python tests/chaos/flood.py --shards 16 --budget-mib 256

Every shard has records of 10 MiB, of 1 MiB and of 1 KiB, and an aggregate of very many small ones. With `--burst`, all
shards are empty, and each gets one record of 10 MiB when the consumer has reached the tip of all.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, cast

import msgspec
from traffic import spread_keys

from anabranch import Budget, Consumer, ConsumerSettings, Record
from anabranch._wire.aggregate import AggregateBuilder
from anabranch.limits import KIB, MIB

from stream_world import StreamWorld, now_ms, stream_world, until

SMALL_COUNT = 2_000
SUB_RECORDS = 20_000
LARGE_BYTES = 10 * MIB - KIB
SAMPLE_EVERY_SECONDS = 0.02
AT_TIP = "at the tip of all shards"


class Held(msgspec.Struct, frozen=True):
    """What the reader saw of itself."""

    limit_bytes: int
    peak_bytes: int
    """Counted by the budget."""
    shards_bytes: int
    """The largest sum of what the shards said they held."""
    rss_before_bytes: int
    rss_peak_bytes: int
    handled_count: int


def allow_large_records(world: StreamWorld) -> None:
    arn = world.call("DescribeStreamSummary")["StreamDescriptionSummary"]["StreamARN"]
    world.kinesis.state.call("UpdateMaxRecordSize", {"StreamARN": arn, "MaxRecordSizeInKiB": 10 * KIB}, now_ms=now_ms())


def fill(world: StreamWorld, shards: int, sub_records: int) -> int:
    """How many bytes of data the stream holds afterwards."""
    total = 0
    for key in spread_keys(shards, 1):
        builder = AggregateBuilder()
        for _ in range(sub_records):
            assert builder.add(key, b"x", None, (), size_max=MIB)
        bodies = [b"a" * LARGE_BYTES, builder.finish(), b"b" * LARGE_BYTES, *[b"c" * KIB] * SMALL_COUNT]
        bodies += [b"d" * (MIB - KIB)] * 20 + [b"e" * LARGE_BYTES]
        for body in bodies:
            world.call("PutRecord", PartitionKey=key, Data=body)
        total += sum(map(len, bodies))
    return total


async def read(
    folder: str, reads: Literal["polling", "fanout"], budget_bytes: int, seconds: float, burst_shards: int = 0
) -> Held:
    """In a process of its own: reads with a handler that sleeps, and looks at itself all along. `burst_shards`: says
    when it has reached the tip of so many shards, and sleeps longer.
    """
    budget, before, handled, shards_bytes = Budget(budget_bytes), rss_bytes(), 0, 0
    consumer: Consumer[bytes] = Consumer(
        "orders",
        app="flood",
        leases=f"sqlite:///{folder}/leases.sqlite",
        order="key",
        read=reads,
        settings=ConsumerSettings(budget=budget),
    )

    async def handle(_: Record[bytes]) -> None:
        nonlocal handled
        await asyncio.sleep(seconds / 4 if burst_shards else 0.05)
        handled += 1

    running = asyncio.create_task(consumer.run(handle, handle_signals=False))
    if burst_shards:
        await until(lambda: is_at_tip(consumer, burst_shards), "the tips of all shards")
        print(AT_TIP, flush=True)
        before = rss_bytes()
    ends = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < ends and not running.done():
        await asyncio.sleep(SAMPLE_EVERY_SECONDS)
        if handled:
            shards_bytes = max(shards_bytes, sum(shard.held_bytes for shard in consumer.status().shards))
    await consumer.stop()
    await running
    return Held(budget.limit_bytes, budget.peak_bytes, shards_bytes, before, rss_bytes("VmHWM"), handled)


def is_at_tip(consumer: Consumer[bytes], shard_count: int) -> bool:
    shards = consumer.status().shards
    return len(shards) == shard_count and all(shard.millis_behind_latest == 0 for shard in shards)


def rss_bytes(line: str = "VmRSS") -> int:
    """What the kernel says; the maximum of getrusage would include the process that started this one."""
    (found,) = [text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(line)]
    return int(found.split()[1]) * KIB


async def run_flood(
    folder: str, *, reads: str, shards: int, budget_bytes: int, seconds: float, sub_records: int = SUB_RECORDS
) -> tuple[Held, int]:
    async with stream_world(shards=shards, tls=reads == "fanout") as world:
        allow_large_records(world)
        total = fill(world, shards, sub_records)
        async with reader_process(world, folder, reads, budget_bytes, seconds) as process:
            said, _ = await asyncio.wait_for(process.communicate(), seconds + 60)
        return msgspec.json.decode(said, type=Held), total


async def run_burst(folder: str, *, shards: int, budget_bytes: int, seconds: float) -> tuple[Held, int]:
    """One record of 10 MiB for each shard, at a moment when the reader is at the tip of all."""
    async with stream_world(shards=shards) as world:
        allow_large_records(world)
        async with reader_process(world, folder, "polling", budget_bytes, seconds, shards) as process:
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), 60) == f"{AT_TIP}\n".encode()
            body = b"a" * LARGE_BYTES
            for shard in world.open_shards():
                hash_key = shard["HashKeyRange"]["StartingHashKey"]
                world.call("PutRecord", PartitionKey="large", ExplicitHashKey=hash_key, Data=body)
            said, _ = await asyncio.wait_for(process.communicate(), seconds + 60)
        return msgspec.json.decode(said, type=Held), shards * LARGE_BYTES


@asynccontextmanager
async def reader_process(
    world: StreamWorld, folder: str, reads: str, budget_bytes: int, seconds: float, burst_shards: int = 0
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--read", folder, reads, str(budget_bytes), str(seconds), str(burst_shards),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **world.kinesis.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def describe(held: Held, total_bytes: int) -> str:
    return (
        f"flood: {total_bytes / MIB:.0f} MiB in the stream, budget {held.limit_bytes / MIB:.0f} MiB: counted at most "
        f"{held.peak_bytes / MIB:.1f} MiB (held by shards: {held.shards_bytes / MIB:.1f}), the process had "
        f"{held.rss_before_bytes / MIB:.0f} and came to {held.rss_peak_bytes / MIB:.0f} MiB; "
        f"{held.handled_count} records handled"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads", choices=["polling", "fanout"], default="polling")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--budget-mib", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--sub-records", type=int, default=SUB_RECORDS, help="in the aggregate of each shard")
    parser.add_argument("--burst", action="store_true", help="one record of 10 MiB for each shard, at its tip")
    options = parser.parse_args()
    budget_bytes = options.budget_mib * MIB
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(
            run_burst(folder, shards=options.shards, budget_bytes=budget_bytes, seconds=options.seconds)
            if options.burst
            else run_flood(
                folder,
                reads=options.reads,
                shards=options.shards,
                budget_bytes=budget_bytes,
                seconds=options.seconds,
                sub_records=options.sub_records,
            )
        )
    print(describe(*found))


if __name__ == "__main__":
    if "--read" in sys.argv:
        folder, reads, budget, seconds, burst = sys.argv[2:]
        way = cast("Literal['polling', 'fanout']", reads)
        held = asyncio.run(read(folder, way, int(budget), float(seconds), int(burst)))
        print(msgspec.json.encode(held).decode())
    else:
        main()
