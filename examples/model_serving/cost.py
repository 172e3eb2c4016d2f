"""What the system costs a month at the seed document's volumes, from calls counted in a run.

    python cost.py                       # needs `make services` (DynamoDB Local); two minutes

A proxy counts the read and write units of DynamoDB while clients send at the volume's own rate; the records of the two
streams are read back to count payload units. Shard hours and fan-out hours follow from the numbers of shards and
consumers. Prices are those of us-east-1, as published in 2024 and 2025.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from clients import Clients
from messages import LANDMARKS_STREAM, LETTERS_STREAM
from stage import Stage, running_stage

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from dynamodb_cost import READ_DOLLARS, WRITE_DOLLARS, CountingProxy  # noqa: E402 -- found by the line above

from services import dynamodb_local  # noqa: E402 -- the same

HOURS = 730
SHARDS = 4
HANDS = 10_000_000
GIGABYTES = 100
SHARD_HOUR, FANOUT_HOUR, FANOUT_GIGABYTE = 0.015, 0.015, 0.013
PAYLOAD_UNIT = 0.014e-6
PAYLOAD_UNIT_BYTES = 25_000
S3_PUT = 5.0e-6


def payload_units(stage: Stage, stream: str) -> int:
    """Kinesis charges each record by its size, in steps of 25 KB. An aggregate is one record."""
    kinesis, units = stage.client("kinesis"), 0
    for shard in kinesis.list_shards(StreamName=stream)["Shards"]:
        iterator = kinesis.get_shard_iterator(
            StreamName=stream, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        while records := (page := kinesis.get_records(ShardIterator=iterator))["Records"]:
            units += sum(-(-len(record["Data"]) // PAYLOAD_UNIT_BYTES) for record in records)
            iterator = page["NextShardIterator"]
    return units


async def measure(folder: Path, seconds: float, rate: float) -> tuple[float, float, dict[str, float]]:
    """Read and write units of DynamoDB a month, and payload units for each hand, by stream."""
    with dynamodb_local(folder / "dynamodb") as store:
        proxy = CountingProxy(store.port)
        os.environ["AWS_ENDPOINT_URL_DYNAMODB"] = f"http://127.0.0.1:{await proxy.start()}"
        async with running_stage(folder, shards=SHARDS) as stage:
            os.environ.update(stage.environment)
            await stage.wait_until_owned()
            clients = Clients(stage.gateway_url, count=4, rate=rate, poison=False)
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(clients.run())
                await asyncio.sleep(10)
                proxy.units.clear()
                began = time.monotonic()
                await asyncio.sleep(seconds)
                scale = HOURS * 3600 / (time.monotonic() - began)
                units = dict(proxy.units)
                sending.cancel()
            streams = (LANDMARKS_STREAM, LETTERS_STREAM)
            per_hand = {name: payload_units(stage, name) / clients.sent_count for name in streams}
        await proxy.close()
    return units["read"] * scale, units["write"] * scale, per_hand


def print_table(reads: float, writes: float, per_hand: dict[str, float]) -> None:
    puts = sum(per_hand.values()) * HANDS
    shards = 2 * SHARDS * HOURS * SHARD_HOUR
    fanout = SHARDS * HOURS * FANOUT_HOUR + GIGABYTES * FANOUT_GIGABYTE
    dynamodb = reads * READ_DOLLARS + writes * WRITE_DOLLARS
    rows = [
        ("shard hours, 2 streams of 4", f"{2 * SHARDS * HOURS:,} hours", shards),
        ("puts, both streams", f"{puts / 1e6:,.1f} M payload units", puts * PAYLOAD_UNIT),
        ("fan-out of one consumer", f"{SHARDS * HOURS:,} hours, {GIGABYTES} GB", fanout),
        ("leases and checkpoints, DynamoDB", f"{writes / 1e6:,.2f} M writes, {reads / 1e6:,.2f} M reads", dynamodb),
        ("checkpoints in S3 instead", f"{HOURS * 60:,} puts", HOURS * 60 * S3_PUT),
    ]
    for name, usage, dollars in rows:
        print(f"{name:<34} {usage:<34} ${dollars:8.2f}")
    base = shards + puts * PAYLOAD_UNIT
    print(f"{'total: fan-out and DynamoDB':<69} ${base + fanout + dynamodb:8.2f}")
    print(f"{'total: fan-out, no checkpoints':<69} ${base + fanout:8.2f}")
    print(f"{'total: polling and DynamoDB':<69} ${base + dynamodb:8.2f}")
    print(f"payload units for each hand: {per_hand}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--rate", type=float, default=HANDS / (HOURS * 3600), help="default: 10 million a month")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="model-serving-") as folder:
        print_table(*asyncio.run(measure(Path(folder), options.seconds, options.rate)))


if __name__ == "__main__":
    main()
