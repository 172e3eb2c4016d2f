"""anabranch beside the KCL with kclpy, one after the other, on one local Kinesis, both with leases in DynamoDB Local.

    make bench-kclpy
    python benchmarks/kclpy.py --steps load idle --clients kclpy

A worker is measured with all its processes: kclpy's are a JVM and a Python process for each shard. Each run prints the
time from its start to the first record, of a new application. The steps:

- idle: CPU, memory and DynamoDB requests of a worker that has handled nearly nothing yet;
- load: CPU per record and peak memory, for eight backlogs of 40,000 records of 1 KB;
- latency: from put to handler, at 20 records a second, with each client's default settings;
- fanout: load and latency with enhanced fan-out;
- failover: `kill -9` of one of two workers, until its shards are read again. Of kclpy, the one that does not lead;
- leader: the same, of the one that does; only if asked for.

Reads are polled except in fanout. Streams have four shards. kclpy needs two minutes to start: all this takes 20.
CPU times and memory hold on a busy machine; seconds and latencies need an idle one. Needs `make services`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import measure
from anabranch.local import LocalKinesis
from recording_proxy import RecordingProxy

from services import dynamodb_local

HERE = Path(__file__).parent
KCLPY = HERE.parent / ".venv" / "kclpy" / "bin" / "python"
STEPS = ["idle", "load", "latency", "fanout", "failover", "leader"]
CLIENTS = {"anabranch": "anabranch", "batches": "anabranch, batches", "kclpy": "kclpy"}
SHARDS = 4
LOAD_RECORDS, LOAD_ROUNDS = 40_000, 8
SETTLE_SECONDS = 15.0
IDLE_SECONDS = 60.0
LATENCY_SECONDS = 30.0
RATE = 20
START_SECONDS_MAX = 300.0
FAILOVER_SECONDS_MAX = 300.0
TICKS = os.sysconf("SC_CLK_TCK")
LOGGING = """<configuration>
  <appender name="A" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d %p %c %m%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="A" /></root>
</configuration>"""


class World:
    """The servers, and where files go."""

    def __init__(self, kinesis, store, proxy, folder):
        self.kinesis, self.store, self.proxy, self.folder = kinesis, store, proxy, folder

    def put(self, stream, data, number):
        request = {"StreamName": stream, "PartitionKey": f"k{number % 97}", "Data": data}
        request["ExplicitHashKey"] = str(number % SHARDS * ((1 << 128) // SHARDS))
        self.kinesis.state.call("PutRecord", request, now_ms=time.time_ns() // 1_000_000)

    async def write(self, stream, seconds):
        """Records that say when they were put."""
        begun, number = time.monotonic(), 0
        while (elapsed := time.monotonic() - begun) < seconds:
            while number < elapsed * RATE:
                self.put(stream, str(time.time_ns()).encode().ljust(20).ljust(200, b"."), number)
                number += 1
            await asyncio.sleep(0.01)
        return number

    def start(self, client, stream, read="polling", number=0):
        name = f"{stream}-{number}"
        reports = self.folder / f"{name}.jsonl"
        reports.touch()
        if client != "kclpy":
            leases = self.store.leases(port=self.proxy.port)
            command = [sys.executable, HERE / "kclpy_worker.py", "ours", reports, stream, read, leases]
            command += ["--batches"] if client == "batches" else []
        else:
            properties = self.folder / f"{name}.properties"
            properties.write_text(
                f"executableName = {KCLPY} {HERE / 'kclpy_worker.py'} theirs {reports}\n"
                f"streamName = {stream}\napplicationName = {stream}\nworkerId = {name}\n"
                f"kinesisEndpoint = {self.kinesis.endpoint_url}\n"
                f"dynamoDBEndpoint = http://127.0.0.1:{self.proxy.port}\nregionName = {self.kinesis.region}\n"
                f"AwsCredentialsProvider = DefaultCredentialsProvider\ninitialPositionInStream = TRIM_HORIZON\n"
                f"retrievalMode = {read.upper()}\nmetricsLevel = NONE\n"
            )
            logging = self.folder / "logback.xml"
            logging.write_text(LOGGING)
            (jars,) = KCLPY.parents[1].glob("lib/python*/site-packages/amazon_kclpy/jars")
            daemon = "software.amazon.kinesis.multilang.MultiLangDaemon"
            command = [shutil.which("java"), "-cp", f"{jars}/*:{self.folder}", daemon]
            command += ["--properties-file", properties, "--log-configuration", logging]
        return Worker(name, command, self.kinesis.environment(), reports)


class Worker:
    """A client's process and all that it starts."""

    def __init__(self, name, command, environment, reports):
        self.name, self.count, self.latencies, self.shards = name, 0, [], defaultdict(list)
        self.reports = reports.open()
        self.log = reports.with_suffix(".log")
        self.began_ns = time.time_ns()
        environment = {**os.environ, **environment, "AWS_EC2_METADATA_DISABLED": "true"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def read_reports(self):
        """Adds what was handled since. A shard has the times at which records of it were handled."""
        for line in self.reports:
            found = json.loads(line)
            self.count += found["count"]
            self.latencies += found["latencies"]
            self.shards[found["shard"]].append(found["first"])

    async def until(self, wanted, seconds_max):
        deadline = time.monotonic() + seconds_max
        while not wanted():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"{self.name}: {self.count} records handled\n{self.log.read_text()[-4000:]}")
            await asyncio.sleep(0.02)
            self.read_reports()

    def processes(self):
        """Process ids of the whole tree."""
        children = defaultdict(list)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                children[parent].append(int(stat.parent.name))
        found = [self.process.pid]
        for one in found:
            found += children[one]
        return found

    def cpu_seconds(self):
        """Of processes that ended, too, if their parent waited for them."""
        total = 0
        for one in self.processes():
            with contextlib.suppress(OSError):
                total += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:15]))
        return total / TICKS

    def memory_bytes(self, file, field):
        total = 0
        for one in self.processes():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{one}/{file}").read_text().splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
        return total

    def kill(self):
        for one in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, 9)
        self.process.wait()


def say(client, what, amount, unit):
    measure.value(f"{client}: {what}", amount, unit)
    print(f"  {CLIENTS[client]:22}{what:48}{amount:12,.1f} {unit}", flush=True)


async def started(worker, client, what):
    await worker.until(lambda: worker.shards, START_SECONDS_MAX)
    first = min(times[0] for times in worker.shards.values())
    say(client, f"{what}: start to first record", (first - worker.began_ns) / 1e9, "s")
    await worker.until(lambda: len(worker.shards) == SHARDS, START_SECONDS_MAX)


async def load(world, worker, client, stream, what):
    """Each round is a backlog that arrives at once. A JVM still compiles in the first ones."""
    spent, rates = [], []
    for _ in range(LOAD_ROUNDS):
        await asyncio.sleep(3)
        cpu, wanted, begun = worker.cpu_seconds(), worker.count + LOAD_RECORDS, time.monotonic()
        for number in range(LOAD_RECORDS):
            world.put(stream, b"." * 1024, number)
            if number % 200 == 0:
                await asyncio.sleep(0)
        await worker.until(lambda wanted=wanted: worker.count >= wanted, 120)
        rates.append(LOAD_RECORDS / (time.monotonic() - begun))
        spent.append((worker.cpu_seconds() - cpu) / LOAD_RECORDS * 1e6)
    warm = spent[LOAD_ROUNDS // 2 :]
    say(client, f"{what}: CPU for a record of 1 KB, first round", spent[0], "us")
    say(client, f"{what}: CPU for a record of 1 KB, last {len(warm)} rounds", statistics.median(warm), "us")
    say(client, f"{what}: records a second, last {len(warm)} rounds", statistics.median(rates[-len(warm) :]), "")
    say(client, f"{what}: peak memory", worker.memory_bytes("status", "VmHWM") / 1e6, "MB")


async def idle(world, worker, client):
    await asyncio.sleep(SETTLE_SECONDS)
    cpu, requests, begun = worker.cpu_seconds(), world.proxy.operations.total(), time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    seconds = time.monotonic() - begun
    say(client, "idle: CPU a second", (worker.cpu_seconds() - cpu) / seconds * 1e3, "ms")
    say(client, "idle: DynamoDB requests", (world.proxy.operations.total() - requests) / seconds * 60, "a minute")
    say(client, "idle: memory", worker.memory_bytes("smaps_rollup", "Pss:") / 1e6, "MB")
    say(client, "idle: processes", len(worker.processes()), "")


async def latency(world, worker, client, stream, what):
    await asyncio.sleep(SETTLE_SECONDS)  # after a backlog, ours paces itself to a shard's read quota for seconds
    worker.latencies.clear()
    wanted = worker.count + await world.write(stream, LATENCY_SECONDS)
    await worker.until(lambda: worker.count >= wanted, 60)
    ordered = sorted(worker.latencies)
    say(client, f"{what}: put to handler, p50", statistics.median(ordered) / 1e6, "ms")
    say(client, f"{what}: put to handler, p99", ordered[int(len(ordered) * 0.99)] / 1e6, "ms")


async def one_worker(world, client, steps, read):
    stream = f"{client}-{read}"
    for number in range(SHARDS):
        world.put(stream, b".", number)
    worker = world.start(client, stream, read)
    try:
        await started(worker, client, read)
        if "idle" in steps:
            await idle(world, worker, client)
        if "load" in steps:
            await load(world, worker, client, stream, read)
        if "latency" in steps:
            await latency(world, worker, client, stream, read)
    finally:
        worker.kill()


def leader(world, stream):
    """The worker id of the KCL's leader."""
    key = {"key": {"S": "Leader"}}
    found = world.store.boto3_client().get_item(TableName=f"{stream}-CoordinatorState", Key=key)
    return found["Item"]["ownerName"]["S"]


async def two_workers(world, client, step):
    stream = f"{client}-{step}"
    workers = [world.start(client, stream, number=number) for number in range(2)]
    writing = asyncio.create_task(world.write(stream, 2 * START_SECONDS_MAX))

    def shared():
        """Each shard has been read by one worker alone for some seconds, and each worker reads some."""
        recent = time.time_ns() - 5_000_000_000
        owned = []
        for worker in workers:
            worker.read_reports()
            owned.append({shard for shard, times in worker.shards.items() if times[-1] > recent})
        return all(owned) and not owned[0] & owned[1] and len(owned[0] | owned[1]) == SHARDS

    try:
        await workers[0].until(shared, START_SECONDS_MAX)
        leading = leader(world, stream) if client == "kclpy" else workers[0].name
        workers.sort(key=lambda worker: (worker.name == leading) != (step == "leader"))
        victim, survivor = workers
        wanted = {shard for shard, times in victim.shards.items() if times[-1] > time.time_ns() - 5_000_000_000}
        victim.kill()
        killed_ns, before = time.time_ns(), {shard: len(survivor.shards[shard]) for shard in wanted}
        await survivor.until(
            lambda: all(len(survivor.shards[shard]) > count for shard, count in before.items()), FAILOVER_SECONDS_MAX
        )
        last = max(survivor.shards[shard][count] for shard, count in before.items())
        say(client, f"{step}: killed until {len(wanted)} shards are read", (last - killed_ns) / 1e9, "s")
    finally:
        writing.cancel()
        for worker in workers:
            if worker.process.poll() is None:
                worker.kill()


async def compare(steps, clients, folder):
    streams = [f"{client}-{name}" for client in clients for name in ("polling", "fanout", "failover", "leader")]
    with dynamodb_local(folder / "store") as store:
        proxy = await RecordingProxy(store.port).start()
        async with LocalKinesis(create=dict.fromkeys(streams, SHARDS)) as kinesis:
            world = World(kinesis, store, proxy, folder)
            for client in clients:
                alone = {"load"} if client == "batches" else {"load", "idle", "latency"}
                if polled := alone & set(steps):
                    await attempt(one_worker(world, client, polled, "polling"))
                if "fanout" in steps and client != "batches":
                    await attempt(one_worker(world, client, {"load", "latency"}, "fanout"))
                if "failover" in steps and client != "batches":
                    await attempt(two_workers(world, client, "failover"))
                if "leader" in steps and client == "kclpy":
                    await attempt(two_workers(world, client, "leader"))
            await proxy.close()


async def attempt(step):
    """A step that fails does not end the others."""
    try:
        await step
    except TimeoutError as error:
        print(f"  failed: {error}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=STEPS[:-1])
    parser.add_argument("--clients", nargs="*", choices=CLIENTS, default=list(CLIENTS))
    options = parser.parse_args()
    if "kclpy" in options.clients and not KCLPY.exists():
        sys.exit("kclpy is not installed: run `make bench-kclpy`")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(options.steps, options.clients, Path(folder)))
    print(f"\nall of this took {(time.monotonic() - begun) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
