"""What the DynamoDB store costs: requests and units a minute, counted by a proxy, and dollars a month beside KCL's.

    python benchmarks/dynamodb_cost.py --workers 4 25 --shards 1 10 100 1000

Real consumers read a local Kinesis and keep their leases in DynamoDB Local. A proxy between them asks DynamoDB for the
consumed capacity of each call, and adds it up for two minutes, once the fleet is balanced. Busy: every shard gets
records all the time, so that each is committed every 10 s. KCL's figures are computed, from what it does (version 3).
Needs `make services`; takes about four minutes for each line.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from anabranch import Consumer, ConsumerSettings, PollingSettings
from anabranch.local import LocalKinesis
from recording_proxy import RecordingProxy

from services import dynamodb_local
from stream_world import StreamWorld

T = TypeVar("T")

WRITE_DOLLARS = 0.625e-6
READ_DOLLARS = 0.125e-6
"""On demand in us-east-1, as published in November 2024."""
MINUTES_A_MONTH = 730 * 60
COUNTED_SECONDS = 120.0
BUSY_EVERY_SECONDS = 4.0
UNITS_OPERATIONS = {"GetItem", "PutItem", "UpdateItem", "DeleteItem", "Query", "Scan"}


class CountingProxy(RecordingProxy):
    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.units: Counter[str] = Counter()
        self.large_writes = 0

    def outgoing(self, operation: str, body: bytes) -> bytes:
        if operation not in UNITS_OPERATIONS:
            return body
        return json.dumps(json.loads(body) | {"ReturnConsumedCapacity": "TOTAL"}).encode()

    def incoming(self, operation: str, body: bytes) -> None:
        super().incoming(operation, body)
        if operation in UNITS_OPERATIONS:
            kind = "read" if operation in {"GetItem", "Query", "Scan"} else "write"
            # A failed condition is charged as well, by the size of the item, and not reported.
            units = float(json.loads(body).get("ConsumedCapacity", {}).get("CapacityUnits", 1.0))
            self.units[kind] += units
            self.large_writes += kind == "write" and units > 1


class Cost(NamedTuple):
    requests: float
    reads: float
    writes: float
    large_writes: float
    by_operation: dict[str, float]

    @property
    def dollars(self) -> float:
        return MINUTES_A_MONTH * (self.reads * READ_DOLLARS + self.writes * WRITE_DOLLARS)


def kcl_cost(workers: int, shards: int, *, busy: bool) -> Cost:
    """KCL 3: each lease is renewed about 18.1 times a minute, each worker writes metrics twice, the leader its lock
    twice. The leader scans the table three times a minute, and each worker queries an index for its leases six times.
    Busy: six checkpoints a minute and shard, as ours. An item has about 400 bytes; scans are strongly consistent.
    """
    writes = shards * (18.1 + (6 if busy else 0)) + 2 * workers + 2
    scan_units = -(-shards * 400 // 4096)
    index_units = max(1.0, shards / workers * 100 / 4096) / 2
    reads = 3 * scan_units + workers * (6 * index_units + 2)
    return Cost(writes + 3 + 8 * workers, reads, writes, 0, {})


async def count(workers: int, shards: int, *, busy: bool) -> Cost:
    with tempfile.TemporaryDirectory() as folder, dynamodb_local(Path(folder)) as store:
        proxy = await CountingProxy(store.port).start()
        try:
            leases = store.leases(port=proxy.port)
            return await with_fleet(leases, workers, shards, lambda: _counted(proxy), busy=busy)
        finally:
            await proxy.close()


async def with_fleet(leases: str, workers: int, shards: int, measure: Callable[[], Awaitable[T]], *, busy: bool) -> T:
    """What `measure` returns once the fleet is balanced."""
    async with LocalKinesis(create={"orders": shards}) as kinesis:
        world = StreamWorld(kinesis, "orders")
        settings = ConsumerSettings(polling=PollingSettings(idle_interval=2.0 if busy else 10.0))
        consumers = [
            Consumer("orders", app="billing", leases=leases, aws=world.aws, settings=settings, on_event=lambda _: None)
            for _ in range(workers)
        ]
        tasks = [asyncio.create_task(consumer.run(_handle, handle_signals=False)) for consumer in consumers]
        writing = asyncio.create_task(_write(world, shards)) if busy else None
        try:
            await _until_balanced(consumers, tasks, shards)
            found = await measure()
            assert not any(task.done() for task in tasks)
            return found
        finally:
            if writing is not None:
                writing.cancel()
            for consumer in consumers:
                await consumer.stop()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _handle(record: Any) -> None:
    """Nothing to do."""


async def _write(world: StreamWorld, shards: int) -> None:
    width = (1 << 128) // shards
    hash_keys = [str(number * width + width // 2) for number in range(shards)]
    while True:
        began = time.monotonic()
        for number, hash_key in enumerate(hash_keys):
            world.call("PutRecord", PartitionKey="k", ExplicitHashKey=hash_key, Data=b"x")
            if number % 20 == 19:
                await asyncio.sleep(0)
        await asyncio.sleep(max(0.1, began + BUSY_EVERY_SECONDS - time.monotonic()))


async def _until_balanced(consumers: list[Any], tasks: list[asyncio.Task[Any]], shards: int) -> None:
    """And one interval of a full read of the leases later."""
    calm = 0
    while calm < 65:
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
        held = [len(consumer.status().shards) for consumer in consumers]
        calm = calm + 1 if sum(held) == shards and max(held) - min(held) <= 1 else 0


async def _counted(proxy: CountingProxy) -> Cost:
    proxy.operations.clear()
    proxy.units.clear()
    proxy.large_writes = 0
    began = time.monotonic()
    await asyncio.sleep(COUNTED_SECONDS)
    minutes = (time.monotonic() - began) / 60
    return Cost(
        proxy.operations.total() / minutes,
        proxy.units["read"] / minutes,
        proxy.units["write"] / minutes,
        proxy.large_writes / minutes,
        {name: round(number / minutes, 1) for name, number in sorted(proxy.operations.items())},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[4])
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 10])
    parser.add_argument("--only", choices=["idle", "busy"])
    options = parser.parse_args()
    print("a minute:                    requests   reads  writes  of them large   $ a month |  KCL: writes   $ a month")
    for workers in options.workers:
        for shards in options.shards:
            for load in [options.only] if options.only else ["idle", "busy"]:
                cost = asyncio.run(count(workers, shards, busy=load == "busy"))
                kcl = kcl_cost(workers, shards, busy=load == "busy")
                print(
                    f"{workers:4} workers {shards:5} shards {load} {cost.requests:9.0f} {cost.reads:7.0f} "
                    f"{cost.writes:7.0f} {cost.large_writes:15.0f} {cost.dollars:11.2f} | {kcl.writes:12.0f} "
                    f"{kcl.dollars:11.2f}   {cost.by_operation}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
