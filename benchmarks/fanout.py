"""Enhanced fan-out beside a plain loop over boto3's `subscribe_to_shard` in threads, against one local server over TLS.

Each candidate is a process of its own, so that its CPU time and memory are its own; server and writer are another one.
The plain loop is what programs do today: one thread per shard, LATEST at the start, the continuation of the last event
when a subscription ends. Measured are:

- CPU per record, and put-to-handler latency, at 500 records a second and shard on 4 shards; beside them our polling;
- CPU per record of a backlog, which comes in large events;
- CPU of idle subscriptions, on 64 shards and on 1,000;
- what each loses when it is restarted while records are written;
- memory under a flood: 200 shards with events of 1 MiB, a budget of 64 MiB, and a handler that is slow.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import measure
from anabranch import Consumer, ConsumerSettings
from anabranch.local import LocalKinesis

HERE = Path(__file__)
RATE = 500
SECONDS = 12.0
IDLE_SECONDS = 20.0
FLOOD_RECORDS = 400
FLOOD_MIB_MAX = 128
"""Twice the budget: beside it there are the connections, and what the allocator keeps."""
BACKLOG = 200_000
BACKLOG_SECONDS = 20.0


# the candidates: each prints one JSON line when it is told to stop


def resident_bytes(line="VmRSS"):
    """What the kernel says; the maximum of getrusage would include the process that started this one."""
    (found,) = [text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(line)]
    return int(found.split()[1]) * 1024


class Meter:
    """Counts records and their latency. CPU counts from the first record on, or from `start`."""

    def __init__(self):
        self.latencies, self.numbers, self.count = [], [], 0
        self.start_cpu = None
        self.last_time = self.start_time = time.monotonic()

    def start(self):
        self.start_cpu, self.start_time = time.process_time(), time.monotonic()

    def note(self, data):
        if self.start_cpu is None:
            self.start()
        self.count += 1
        self.last_time = time.monotonic()
        sent, _, number = data[:48].partition(b" ")
        if number:
            self.latencies.append(time.time_ns() - int(sent))
            self.numbers.append(int(number.split()[0]))

    def report(self):
        cpu = 0.0 if self.start_cpu is None else time.process_time() - self.start_cpu
        rss = resident_bytes()
        seconds = time.monotonic() - self.start_time if self.start_cpu is not None else 0.0
        peak = resident_bytes("VmHWM")
        print(
            json.dumps(
                {
                    "cpu": cpu,
                    "seconds": seconds,
                    "reading_seconds": self.last_time - self.start_time,
                    "count": self.count,
                    "rss": rss,
                    "peak": peak,
                    "latencies": self.latencies,
                    "numbers": self.numbers,
                }
            ),
            flush=True,
        )


def ours(stream, read, *, leases, budget=256 << 20, slow=0.0, idle=False, start="latest"):
    async def main():
        meter, settings = Meter(), ConsumerSettings(budget=budget)
        consumer = Consumer(
            stream, app="bench", leases=leases, read=read, start=start, order="shard", settings=settings
        )

        async def handle(record):
            meter.note(record.data)
            if slow:
                await asyncio.sleep(slow)

        running = asyncio.create_task(consumer.run(handle, handle_signals=False))
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        before = resident_bytes()
        ready = asyncio.create_task(_ready(consumer, read))
        await asyncio.wait([ready, running], return_when=asyncio.FIRST_COMPLETED)
        print(json.dumps({"ready": True, "rss_before": before}), flush=True)
        if idle:
            await asyncio.sleep(5)
            meter.start()
        await stop.wait()
        meter.report()
        await consumer.stop()
        await running

    asyncio.run(main())


async def _ready(consumer, read):
    while True:
        await asyncio.sleep(0.2)
        with contextlib.suppress(Exception):
            shards = consumer.status().shards
            if shards and all(
                shard.millis_behind_latest is not None
                and (read == "polling" or (shard.subscription and shard.subscription.state == "active"))
                for shard in shards
            ):
                return


def threads(stream, *, idle=False, start="latest"):
    import boto3
    from botocore.config import Config

    meter, lock = Meter(), threading.Lock()
    kinesis = boto3.client("kinesis", config=Config(max_pool_connections=1_100, read_timeout=60))
    arn = kinesis.describe_stream_summary(StreamName=stream)["StreamDescriptionSummary"]["StreamARN"]
    name = f"plain-{os.getpid()}"
    consumer = kinesis.register_stream_consumer(StreamARN=arn, ConsumerName=name)["Consumer"]["ConsumerARN"]
    shards = [shard["ShardId"] for shard in kinesis.list_shards(StreamName=stream)["Shards"]]
    started = threading.Semaphore(0)

    def follow(shard_id):
        position = {"Type": start.upper()}
        first = True
        while True:
            answer = kinesis.subscribe_to_shard(ConsumerARN=consumer, ShardId=shard_id, StartingPosition=position)
            if first:
                started.release()
                first = False
            for event in answer["EventStream"]:
                found = event["SubscribeToShardEvent"]
                for record in found["Records"]:
                    with lock:
                        meter.note(record["Data"])
                position = {
                    "Type": "AFTER_SEQUENCE_NUMBER",
                    "SequenceNumber": found["ContinuationSequenceNumber"],
                }

    for shard_id in shards:
        threading.Thread(target=follow, args=(shard_id,), daemon=True).start()
    for _ in shards:
        started.acquire()
    print(json.dumps({"ready": True, "rss_before": 0}), flush=True)
    if idle:
        time.sleep(5)
        meter.start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    meter.report()
    threading.excepthook = lambda _: None  # the subscriptions end with the consumer
    kinesis.deregister_stream_consumer(ConsumerARN=consumer)
    os._exit(0)


# the parent


class Candidate:
    def __init__(self, environment, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, HERE, *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )

    async def ready(self):
        line = await asyncio.to_thread(self.process.stdout.readline)
        return json.loads(line)

    async def stop(self):
        self.process.send_signal(signal.SIGTERM)
        line = await asyncio.to_thread(self.process.stdout.readline)
        await asyncio.to_thread(self.process.wait, 30)
        return json.loads(line) if line else {}


async def write(kinesis, stream, shards, seconds, *, rate=RATE, first=0):
    """The given records a second and shard, each with the time when it was put and its number."""
    number, begun = first, time.monotonic()
    step = (1 << 128) // shards
    state = kinesis.state
    while (elapsed := time.monotonic() - begun) < seconds:
        while number - first < elapsed * rate * shards:
            data = f"{time.time_ns()} {number} ".encode().ljust(200, b".")
            request = {
                "StreamName": stream,
                "PartitionKey": f"k{number % 97}",
                "ExplicitHashKey": str(number % shards * step),
                "Data": data,
            }
            state.call("PutRecord", request, now_ms=time.time_ns() // 1_000_000)
            number += 1
        await asyncio.sleep(0.002)
    return number


def milliseconds(latencies):
    ordered = sorted(latencies)
    return statistics.median(ordered) / 1e6, ordered[int(len(ordered) * 0.99)] / 1e6


def leases(folder, name):
    return f"sqlite:///{folder}/{name}.db"


async def flow(kinesis, environment, folder):
    print(f"\n{RATE} records of 200 B a second and shard, 4 shards, {SECONDS:.0f} s")
    print(f"  {'':28}{'CPU us/record':>14}{'p50 ms':>9}{'p99 ms':>9}{'records':>10}")
    rows = {
        "anabranch, fan-out": ("ours", "flow1", "fanout", leases(folder, "fanout")),
        "boto3 in threads": ("threads", "flow2"),
        "anabranch, polling": ("ours", "flow3", "polling", leases(folder, "polling")),
    }
    medians = {}
    for name, arguments in rows.items():
        candidate = Candidate(environment, *arguments)
        await candidate.ready()
        await write(kinesis, arguments[1], 4, SECONDS)
        await asyncio.sleep(1.5)
        found = await candidate.stop()
        p50, p99 = milliseconds(found["latencies"])
        medians[name] = p50
        cpu = record_cpu("500 records of 200 B a second and shard, 4 shards", name, found)
        measure.value(f"{name}: put to handler, p50", p50, "ms")
        measure.value(f"{name}: put to handler, p99", p99, "ms")
        print(f"  {name:28}{cpu:14.1f}{p50:9.2f}{p99:9.1f}{found['count']:10}", flush=True)
    pushed, polled = medians["anabranch, fan-out"], medians["anabranch, polling"]
    print(f"  p50 of fan-out: {measure.target('put to handler, p50 in ms', pushed, 5.0, at_least=False)}")
    ratio = measure.target("put to handler, p50: fan-out / polling", pushed / polled, 0.1, at_least=False)
    print(f"  p50 of fan-out / p50 of polling: {pushed / polled:.3f}, {ratio}")


def record_cpu(table, name, found):
    """Microseconds of CPU for each record."""
    cpu = found["cpu"] / found["count"] * 1e6
    measure.record("figure", table=table, name=name, unit="record", microseconds=cpu, low=cpu, high=cpu)
    return cpu


async def backlog(kinesis, environment, folder):
    print(f"\na backlog of {BACKLOG} records of 200 B on 4 shards")
    print(f"  {'':28}{'CPU us/record':>14}{'records/s':>11}")
    for name, arguments in {
        "anabranch, fan-out": ("ours", "backlog", "fanout", leases(folder, "backlog"), "--start", "trim_horizon"),
        "boto3 in threads": ("threads", "backlog", "--start", "trim_horizon"),
    }.items():
        if name == "anabranch, fan-out":
            for number in range(BACKLOG):
                request = {"StreamName": "backlog", "PartitionKey": f"k{number % 97}", "Data": bytes(200)}
                request["ExplicitHashKey"] = str(number % 4 * (1 << 126))
                kinesis.state.call("PutRecord", request, now_ms=time.time_ns() // 1_000_000)
        candidate = Candidate(environment, *arguments)
        await candidate.ready()
        await asyncio.sleep(BACKLOG_SECONDS)
        found = await candidate.stop()
        assert found["count"] == BACKLOG, found["count"]
        rate = found["count"] / found["reading_seconds"]
        cpu = record_cpu(f"a backlog of {BACKLOG} records of 200 B on 4 shards", name, found)
        measure.value(f"{name}: backlog", rate, "records a second")
        print(f"  {name:28}{cpu:14.1f}{rate:11,.0f}", flush=True)


async def idle(environment, folder, stream, shards, *, with_threads):
    print(f"\nidle, {shards} shards, {IDLE_SECONDS:.0f} s")
    rows = {"anabranch, fan-out": ("ours", stream, "fanout", leases(folder, stream), "--idle")}
    if with_threads:
        rows["boto3 in threads"] = ("threads", stream, "--idle")
    for name, arguments in rows.items():
        candidate = Candidate(environment, *arguments)
        ready = await candidate.ready()
        await asyncio.sleep(5 + IDLE_SECONDS)
        found = await candidate.stop()
        share = found["cpu"] / found["seconds"] * 100
        grown = (found["rss"] - ready["rss_before"]) / shards / 1000
        measure.value(f"{name}: {shards} idle shards", share, "% of a core")
        print(f"  {name:28}{share:8.2f} % of a core", flush=True)
        if shards >= 1_000:  # of fewer, the modules of the client are the most
            verdict = measure.target(f"{shards} idle shards, % of a core", share, 5.0, at_least=False)
            print(f"  CPU: {verdict}")
            verdict = measure.target(f"{shards} idle shards, KB of memory each", grown, 100.0, at_least=False)
            print(f"  memory: {grown:.0f} KB each, {verdict}")


async def restart(kinesis, environment, folder):
    print("\nrestarted after 4 s, for 2 s, while records are written")
    for name, arguments in {
        "anabranch, fan-out": ("ours", "restart1", "fanout", leases(folder, "restart")),
        "boto3 in threads": ("threads", "restart2"),
    }.items():
        first = Candidate(environment, *arguments)
        await first.ready()
        writing = asyncio.create_task(write(kinesis, arguments[1], 4, 12.0, rate=100))
        await asyncio.sleep(4)
        seen = (await first.stop())["numbers"]
        await asyncio.sleep(2)
        second = Candidate(environment, *arguments)
        await second.ready()
        count = await writing
        await asyncio.sleep(2)
        seen += (await second.stop())["numbers"]
        lost, repeated = count - len(set(seen)), len(seen) - len(set(seen))
        measure.value(f"{name}: lost in a restart, of {count}", lost, "records")
        print(f"  {name:28}lost {lost} of {count}, repeated {repeated}", flush=True)
        if name == "anabranch, fan-out":
            print(f"  {measure.target('records lost in a restart', lost, 0, at_least=False)}")


async def flood(kinesis, environment, folder):
    print("\na flood: 200 shards, 1 MiB in each event, a budget of 64 MiB, a handler that takes 20 ms")
    candidate = Candidate(environment, "ours", "flood", "fanout", leases(folder, "flood"), "--slow", "--budget")
    ready = await candidate.ready()
    data = bytes(1_000_000)
    for number in range(FLOOD_RECORDS):
        request = {"StreamName": "flood", "PartitionKey": "k", "Data": data}
        request["ExplicitHashKey"] = str(number % 200 * ((1 << 128) // 200))
        kinesis.state.call("PutRecord", request, now_ms=time.time_ns() // 1_000_000)
        await asyncio.sleep(0)
    await asyncio.sleep(25)
    found = await candidate.stop()
    grown = (found["peak"] - ready["rss_before"]) / (1 << 20)
    handled = f"{found['count']} of {FLOOD_RECORDS} records handled"
    verdict = measure.target("flood: MiB more at the peak, with a budget of 64", grown, FLOOD_MIB_MAX, at_least=False)
    print(f"  {'anabranch, fan-out':28}{grown:.0f} MiB more at the peak, {handled}; {verdict}")


async def main():
    streams = {"backlog": 4, "flow1": 4, "flow2": 4, "flow3": 4, "restart1": 4, "restart2": 4}
    streams |= {"idle64": 64, "idle1000": 1_000, "flood": 200}
    with tempfile.TemporaryDirectory() as folder:
        async with LocalKinesis(create=streams, tls=True) as kinesis:
            environment = kinesis.environment()
            await flow(kinesis, environment, folder)
            await backlog(kinesis, environment, folder)
            await restart(kinesis, environment, folder)
            await idle(environment, folder, "idle64", 64, with_threads=True)
            await idle(environment, folder, "idle1000", 1_000, with_threads=False)
            await flood(kinesis, environment, folder)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        asyncio.run(main())
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("kind")
        parser.add_argument("stream")
        parser.add_argument("read", nargs="?")
        parser.add_argument("leases", nargs="?")
        parser.add_argument("--idle", action="store_true")
        parser.add_argument("--slow", action="store_true")
        parser.add_argument("--budget", action="store_true")
        parser.add_argument("--start", default="latest")
        given = parser.parse_args()
        if given.kind == "threads":
            threads(given.stream, idle=given.idle, start=given.start)
        else:
            ours(
                given.stream,
                given.read,
                leases=given.leases,
                idle=given.idle,
                start=given.start,
                slow=0.02 if given.slow else 0.0,
                budget=64 << 20 if given.budget else 256 << 20,
            )
