"""How often workers call their lease store, and what that costs a month: DynamoDB, Redis and S3 in one table.

    python benchmarks/store_calls.py --stores dynamodb redis s3 --shards 10 100 1000

The fleet is that of `dynamodb_cost.py`: every shard gets records all the time. DynamoDB and Redis have four workers,
S3 has one. Calls of DynamoDB are counted by a proxy, those of Redis by itself (INFO commandstats), those of S3 by a
proxy in front of moto.
Needs `make services`; takes about four minutes for each line.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from dynamodb_cost import COUNTED_SECONDS, MINUTES_A_MONTH, count, with_fleet
from network_proxy import NetworkProxy

from services import MotoServer, RedisServerProcess

S3_DOLLARS = {"PUT": 5.0e-6, "GET": 0.4e-6, "HEAD": 0.4e-6}
"""In us-east-1, as published in 2024 and 2025."""
REDIS_COMMANDS = ("eval", "wait")
WORKERS = {"dynamodb": 4, "redis": 4, "s3": 1}


class Calls(NamedTuple):
    by_operation: dict[str, float]
    """A minute."""
    dollars: float | None
    """A month; None if calls are not charged."""

    @property
    def total(self) -> float:
        return sum(self.by_operation.values())


async def dynamodb_calls(shards: int) -> Calls:
    cost = await count(WORKERS["dynamodb"], shards, busy=True)
    return Calls(cost.by_operation, cost.dollars)


async def redis_calls(shards: int) -> Calls:
    with tempfile.TemporaryDirectory() as folder, RedisServerProcess(Path(folder, "redis")) as server:

        def counts() -> Counter[str]:
            found = server.call("INFO", "commandstats")
            return Counter({name: found.get(f"cmdstat_{name}", {}).get("calls", 0) for name in REDIS_COMMANDS})

        async def measure() -> dict[str, float]:
            before, began = counts(), time.monotonic()
            await asyncio.sleep(COUNTED_SECONDS)
            return per_minute(counts() - before, began)

        return Calls(await with_fleet(server.leases(), WORKERS["redis"], shards, measure, busy=True), None)


class RequestCounter(NetworkProxy):
    """Counts requests by their method: each begins in a piece of its own."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self.methods: Counter[str] = Counter()

    def on_request(self, data: bytes) -> None:
        method = data.partition(b" /")[0]
        if method.isalpha() and method.isupper():
            self.methods[method.decode()] += 1


async def s3_calls(shards: int) -> Calls:
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    with MotoServer() as server:
        server.make_bucket("leases")
        proxy = await RequestCounter(server.port).start()

        async def measure() -> dict[str, float]:
            proxy.methods.clear()
            began = time.monotonic()
            await asyncio.sleep(COUNTED_SECONDS)
            return per_minute(proxy.methods, began)

        try:
            leases = server.leases("leases/counted", port=proxy.port)
            found = await with_fleet(leases, WORKERS["s3"], shards, measure, busy=True)
        finally:
            await proxy.close()
    return Calls(found, MINUTES_A_MONTH * sum(S3_DOLLARS[name] * number for name, number in found.items()))


def per_minute(counts: Counter[str], began: float) -> dict[str, float]:
    minutes = (time.monotonic() - began) / 60
    return {name: round(number / minutes, 1) for name, number in sorted(counts.items()) if number}


COUNTS = {"dynamodb": dynamodb_calls, "redis": redis_calls, "s3": s3_calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", nargs="*", choices=COUNTS, default=list(COUNTS))
    parser.add_argument("--shards", type=int, nargs="*", default=[10, 100])
    options = parser.parse_args()
    print("store     workers  shards  calls a minute  $ a month   by operation, a minute")
    for shards in options.shards:
        for store in options.stores:
            found = asyncio.run(COUNTS[store](shards))
            dollars = "        -" if found.dollars is None else f"{found.dollars:9.2f}"
            print(
                f"{store:9} {WORKERS[store]:7} {shards:7} {found.total:15.0f}  {dollars}   {found.by_operation}",
                flush=True,
            )


if __name__ == "__main__":
    main()
