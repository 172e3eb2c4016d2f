"""What one 100-byte record costs a producer in CPU, until it is acknowledged, beside aiokpl and async-kinesis.

The server is the local Kinesis in a process of its own, on another core: 16 shards, limits off, plain HTTP for
everybody. Peers aggregate in KPL's format too; their rate limits are raised out of the way. Every row has a target,
and the last lines say which hold. Latency is wall time: a put on an idle producer, in round trips of a bare
PutRecords call by the same client. So is throttling: records that go alone while the server refuses some of them at
random, in times of the same without refusals; the order of each key is checked.
"""

import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
import warnings
from contextlib import contextmanager

import measure
from anabranch._model.streams import parse_stream
from anabranch._wire.messages import PutRecordsEntry
from anabranch.config import Aws
from anabranch.producer import Producer

RECORDS = 100_000
RECORDS_AIOKPL = 3_000
ROUNDS = 5
LATENCIES = 200
RECORDS_THROTTLED = 2_000
KEYS_THROTTLED = 100
ROUND_TRIP_SECONDS = 0.005
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}

DATA = b"x" * 100
KEYS = [f"user-{number:011}" for number in range(10_000)]
NEW_KEYS = [f"user-{number:011}" for number in range(RECORDS)]


@contextmanager
def server():
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    process = subprocess.Popen(
        [sys.executable, "-m", "anabranch", "serve", "--port", "0", "--create", "orders:16"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if len(cores) > 1:
        os.sched_setaffinity(process.pid, {cores[-1]})
        os.sched_setaffinity(0, {cores[0]})
    try:
        line = next(line for line in process.stdout if line.startswith("ready:"))
        yield next(word for word in line.split() if word.startswith("http"))
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


async def warm(producer):
    for _ in range(3):
        await producer.put_and_wait(b"warm", "up")
        await asyncio.sleep(0.05)


def ours(endpoint_url, order, *, awaits, keys=KEYS):
    async def work():
        async with Producer("orders", order=order, aws=Aws(region="us-east-1", endpoint_url=endpoint_url)) as producer:
            await warm(producer)
            gc.collect()
            started = time.process_time()
            if awaits:
                deliveries = []
                put, count = producer.put_nowait, len(keys)
                for start in range(0, RECORDS, 1_000):
                    deliveries += [put(DATA, keys[number % count]) for number in range(start, start + 1_000)]
                    await asyncio.sleep(0)
                for delivery in deliveries:
                    assert (await delivery).delivered
            else:
                for start in range(0, RECORDS, 1_000):
                    await producer.put_many((keys[n % len(keys)], DATA) for n in range(start, start + 1_000))
                    await asyncio.sleep(0)
                await producer.flush()
            return (time.process_time() - started) / RECORDS * 1e6

    return work


def aiokpl(endpoint_url):
    async def work():
        from aiokpl import Config, Producer as Peer

        config = Config(
            region="us-east-1", endpoint_url=endpoint_url, rate_limit_records_per_sec_per_shard=1e9,
            rate_limit_bytes_per_sec_per_shard=1e12, record_max_buffered_time_ms=50,
        )  # fmt: skip
        async with Peer(config) as producer:
            await (await producer.put_record(stream="orders", partition_key="up", data=b"warm")).wait()
            gc.collect()
            started = time.process_time()
            outcomes = [
                await producer.put_record(stream="orders", partition_key=KEYS[number], data=DATA)
                for number in range(RECORDS_AIOKPL)
            ]
            for outcome in outcomes:
                assert (await outcome.wait()).success
            return (time.process_time() - started) / RECORDS_AIOKPL * 1e6

    return work


def async_kinesis(endpoint_url):
    async def work():
        from kinesis import Producer as Peer
        from kinesis.processors import KPLStringProcessor

        text = DATA.decode()
        async with Peer(
            "orders", endpoint_url=endpoint_url, region_name="us-east-1", processor=KPLStringProcessor(),
            put_rate_limit_per_shard=10**9, put_bandwidth_limit_per_shard=10**9, max_queue_size=10**6,
        ) as producer:  # fmt: skip
            await producer.put("warm")
            await producer.flush()
            gc.collect()
            started = time.process_time()
            for _ in range(RECORDS):
                await producer.put(text)
            await producer.flush()
            return (time.process_time() - started) / RECORDS * 1e6

    return work


def add_fault(endpoint_url, **rule):
    """For every PutRecords."""
    body = json.dumps({"operation": "PutRecords", **rule}).encode()
    url = f"{endpoint_url}/_local/faults"
    urllib.request.urlopen(urllib.request.Request(url, body, {"x-anabranch": "1"}, method="POST")).close()


def clear_faults(endpoint_url):
    url = f"{endpoint_url}/_local/faults"
    urllib.request.urlopen(urllib.request.Request(url, headers={"x-anabranch": "1"}, method="DELETE")).close()


async def without_aggregation(endpoint_url):
    """Seconds until every record is delivered."""
    aws = Aws(region="us-east-1", endpoint_url=endpoint_url)
    async with Producer("orders", aggregate=None, aws=aws) as producer:
        await warm(producer)
        gc.collect()
        started = time.perf_counter()
        deliveries = await producer.put_many((KEYS[n % KEYS_THROTTLED], DATA) for n in range(RECORDS_THROTTLED))
        results = [await delivery for delivery in deliveries]
        seconds = time.perf_counter() - started
    for key in range(KEYS_THROTTLED):
        numbers = [int(result.sequence_number) for result in results[key::KEYS_THROTTLED]]
        assert numbers == sorted(numbers), "a key is out of order"
    return seconds


def throttling(endpoint_url):
    """Seconds by the share of records that are refused, one for each round."""
    seconds = {share: [] for share in (0.0, 0.02, 0.1)}
    for _ in range(ROUNDS):
        for share, measured in seconds.items():
            if share:
                add_fault(endpoint_url, fault="throttle", slot_probability=share)
            measured.append(asyncio.run(without_aggregation(endpoint_url)))
            clear_faults(endpoint_url)
    return seconds


async def latency(endpoint_url):
    """Medians of a bare call and of a put on an idle producer, in seconds, one after the other."""
    async with Producer("orders", aws=Aws(region="us-east-1", endpoint_url=endpoint_url)) as producer:
        await warm(producer)
        client, stream = await producer._ports.kinesis.client(), parse_stream("orders")
        bare, put = [], []
        for _ in range(LATENCIES):
            started = time.perf_counter()
            await client.put_records(stream, [PutRecordsEntry(DATA, "k")])
            bare.append(time.perf_counter() - started)
            started = time.perf_counter()
            await producer.put_and_wait(DATA, "k")
            put.append(time.perf_counter() - started)
        return statistics.median(bare), statistics.median(put)


def main():
    os.environ.update(CREDENTIALS)
    warnings.simplefilter("ignore")
    with server() as endpoint_url:
        candidates = {
            "in order, awaited": ours(endpoint_url, "key", awaits=True),
            "in order, flushed": ours(endpoint_url, "key", awaits=False),
            "in order, flushed, one key": ours(endpoint_url, "key", awaits=False, keys=KEYS[:1]),
            "in order, flushed, new keys": ours(endpoint_url, "key", awaits=False, keys=NEW_KEYS),
            "no order, awaited": ours(endpoint_url, "none", awaits=True),
            "no order, flushed": ours(endpoint_url, "none", awaits=False),
            "aiokpl, awaited": aiokpl(endpoint_url),
            "async-kinesis KPL": async_kinesis(endpoint_url),
        }
        times = {name: [] for name in candidates}
        for _ in range(ROUNDS):
            for name, work in candidates.items():
                times[name].append(asyncio.run(work()))
        throttled = throttling(endpoint_url)
        # As far away as AWS is from the same region.
        add_fault(endpoint_url, fault="delay", seconds=ROUND_TRIP_SECONDS)
        bare, put = asyncio.run(latency(endpoint_url))
    print(f"\n{'100-byte record, us of CPU':32}{'median':>8}   lowest to highest")
    for name, measured in times.items():
        figure = {"microseconds": statistics.median(measured), "low": min(measured), "high": max(measured)}
        measure.record("figure", table="put a record of 100 B", name=name, unit="record", **figure)
        print(f"  {name:30}{statistics.median(measured):8.2f}   {min(measured):.2f} to {max(measured):.2f}")

    print(f"\n{f'{RECORDS_THROTTLED} records alone, seconds':32}{'median':>8}   lowest to highest")
    for share, measured in throttled.items():
        name = f"{share:.0%} throttled"
        print(f"  {name:30}{statistics.median(measured):8.2f}   {min(measured):.2f} to {max(measured):.2f}")

    def throttled_ratio(share):
        return statistics.median(a / b for a, b in zip(throttled[share], throttled[0.0], strict=True))

    def ratio(slow, fast):
        return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))

    targets = [
        ("aiokpl / ours, every delivery awaited", ratio("aiokpl, awaited", "in order, awaited"), 25, True),
        ("async-kinesis KPL / ours, failures only", ratio("async-kinesis KPL", "in order, flushed"), 2, True),
        # Its KPL mode writes every record under one key of its own and takes none from the user.
        ("  and ours with one key too", ratio("async-kinesis KPL", "in order, flushed, one key"), 2, True),
        ("strict order / no order, awaited", ratio("in order, awaited", "no order, awaited"), 1.3, False),
        ("strict order / no order, flushed", ratio("in order, flushed", "no order, flushed"), 1.3, False),
        ("2 % throttled / none, in order, alone", throttled_ratio(0.02), 2, False),
        ("10 % throttled / none, in order, alone", throttled_ratio(0.1), 3, False),
        (f"idle put / bare call of {bare * 1e3:.2f} ms", put / bare, 1.3, False),
    ]
    print()
    for name, value, target, is_least in targets:
        print(f"  {name:44}{value:8.2f}   {measure.target(name.strip(), value, target, at_least=is_least)}")


if __name__ == "__main__":
    main()
