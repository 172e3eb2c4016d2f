"""What the system costs a month, from calls counted in a run: the table of the README.

    python cost.py                       # the table, from the counts below
    python cost.py --count               # counts again: needs `make services` (DynamoDB Local); two minutes

A proxy counts the read and write units of DynamoDB while clients send at the volume's own rate; the records of the two
streams are read back to count payload units and bytes. Shard hours and fan-out hours follow from the numbers of shards
and consumers. Prices are those of us-east-1, as published in 2024 and 2025.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

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


class Counted(NamedTuple):
    """Units of DynamoDB in a month, for the service with two workers and the outbound process; units of Kinesis, and
    bytes of the letters stream, for each hand.
    """

    writes: float
    reads: float
    payload_units: float
    letter_bytes: float


COUNTED = Counted(writes=4_546_408, reads=8_041_623, payload_units=2.0, letter_bytes=180.9)


def records(stage: Stage, stream: str) -> list[int]:
    """The sizes of all records of a stream. An aggregate is one record."""
    kinesis, sizes = stage.client("kinesis"), []
    for shard in kinesis.list_shards(StreamName=stream)["Shards"]:
        iterator = kinesis.get_shard_iterator(
            StreamName=stream, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        while found := (page := kinesis.get_records(ShardIterator=iterator))["Records"]:
            sizes += [len(record["Data"]) for record in found]
            iterator = page["NextShardIterator"]
    return sizes


async def count(folder: Path, seconds: float, rate: float) -> Counted:
    with dynamodb_local(folder / "dynamodb") as store:
        proxy = await CountingProxy(store.port).start()
        os.environ["AWS_ENDPOINT_URL_DYNAMODB"] = f"http://127.0.0.1:{proxy.port}"
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
            hands = await asyncio.to_thread(records, stage, LANDMARKS_STREAM)
            letters = await asyncio.to_thread(records, stage, LETTERS_STREAM)
        await proxy.close()
    # Kinesis charges each record by its size, in steps of 25 KB.
    payload_units = sum(-(-size // PAYLOAD_UNIT_BYTES) for size in hands + letters)
    return Counted(
        units["write"] * scale,
        units["read"] * scale,
        payload_units / clients.sent_count,
        sum(letters) / clients.sent_count,
    )


def table(counted: Counted) -> str:
    """In Markdown."""
    hours = SHARDS * HOURS
    shards = 2 * hours * SHARD_HOUR
    units = counted.payload_units * HANDS
    puts = units * PAYLOAD_UNIT
    letter_gigabytes = counted.letter_bytes * HANDS / 1e9
    service = hours * FANOUT_HOUR + GIGABYTES * FANOUT_GIGABYTE
    outbound = hours * FANOUT_HOUR + letter_gigabytes * FANOUT_GIGABYTE
    dynamodb = counted.writes * WRITE_DOLLARS + counted.reads * READ_DOLLARS
    s3_puts = 2 * HOURS * 60
    total = shards + puts + service + outbound + dynamodb
    calls = f"{counted.writes / 1e6:.1f} million writes, {counted.reads / 1e6:.1f} million reads"
    rows = [
        ("shard hours", f"2 streams x {SHARDS} shards x {HOURS} h", f"{shards:.2f}"),
        ("puts", f"{units / 1e6:.0f} million payload units", f"{puts:.2f}"),
        ("fan-out, model service", f"{SHARDS} shards x {HOURS} h, {GIGABYTES} GB", f"{service:.2f}"),
        ("fan-out, outbound", f"{SHARDS} shards x {HOURS} h, {letter_gigabytes:.1f} GB", f"{outbound:.2f}"),
        ("leases and checkpoints in DynamoDB, both fleets", calls, f"{dynamodb:.2f}"),
        ("**total**", "", f"**{total:.2f}**"),
        ("total without checkpoints", "", f"{total - dynamodb:.2f}"),
        ("total with polling instead of fan-out", "about 200 ms more latency", f"{total - service - outbound:.2f}"),
        (
            "total with checkpoints in S3, one worker for each stream",
            f"2 objects, {s3_puts:,} puts",
            f"{total - dynamodb + s3_puts * S3_PUT:.2f}",
        ),
    ]
    lines = [("", "usage in a month", "dollars"), ("---", "---", "---"), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines).replace("| --- ", "|---")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="count in a run, instead of using the recorded counts")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--rate", type=float, default=HANDS / (HOURS * 3600), help="default: 10 million a month")
    options = parser.parse_args()
    counted = COUNTED
    if options.count:
        with tempfile.TemporaryDirectory(prefix="model-serving-") as folder:
            counted = asyncio.run(count(Path(folder), options.seconds, options.rate))
        print(counted)
    print(table(counted))


if __name__ == "__main__":
    main()
