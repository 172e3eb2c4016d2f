"""What one record costs a consumer in CPU, from the socket to the handler, with checkpoints on, beside its peers.

A stream of prepared bytes, served over TLS from another core, is read from its beginning to its tip. Ours is the whole
consumer: leases and checkpoints in a SQLite file, every record acknowledged; only the pace is raised, because five
reads a second of a shard would make it wait. Bare aiobotocore reads page after page and keeps no account of anything;
async-kinesis keeps its checkpoints in memory, its rate limit raised out of the way. CPU time is counted from the first
read to the last record; opening clients and joining is not. Every round runs each of them once, in an order that
changes; ratios are those of one round, and what is printed is their median and, in brackets, their quartiles. Before
them, each way to consume runs once with an audit: every record must come, once, and in the order of its shard.

With ANABRANCH_COMPILED, which `run.py` sets, aggregated records are also consumed with compiled codecs, by a process
of its own that waits while the others run. So are the peers that need other versions of what is installed here.

The second part is the cost of a poll of a shard that has nothing new.
"""

import asyncio
import gc
import logging
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import boto3
import kinesis
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from aws_kinesis_agg.deaggregator import iter_deaggregate_records
from botocore.config import Config
from kinesis.aggregators import KPLAggregator, SimpleAggregator
from kinesis.processors import Processor

import measure
from anabranch._aws.account import AwsAccount
from anabranch._aws.kinesis_client import open_kinesis
from anabranch._core.handling.batches import BatchLimits
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.clock import SystemClock
from anabranch._engine.consumer_run import ConsumerRun, EngineMode
from anabranch._engine.handler_calls import HandlerCall
from anabranch._ports import Ports
from anabranch.config import Aws
from anabranch.stores.urls import open_store
from client import canned_server
from scale import NO_PACE, run_with

ROUNDS = 5
SHARDS = 8
IDLE_SHARDS = 500
IDLE_SECONDS = 3.0
IDLE_ROUNDS = 3
IDLE_PACE = PaceLimits(idle_interval_ms=200)

PEERS = ("aiobotocore", "async-kinesis", "boto3, threads", "native-aws-kcl-py")

Work = Callable[[], Awaitable[float]]
"""Consumes one stream; returns microseconds of CPU per record."""


class Shape(NamedTuple):
    title: str
    page: str
    records_a_page: int
    pages: int
    peer_pages: int
    targets: dict[str, dict[str, float]]
    """Times less CPU than a peer, by the way to consume; "" stands for all others."""

    def stream(self, pages: int) -> str:
        return f"{'aggregated' if self.page.count('x') == 2 else 'plain'}-{SHARDS}s-{pages}p-{self.page}"

    def count(self, pages: int) -> int:
        return SHARDS * pages * self.records_a_page


SHAPES = (
    Shape("records of 1 KB", "1000x1024", 1000, 4, 2, {"aiobotocore": {"": 5}, "async-kinesis": {"": 12}}),
    Shape("records of 100 B", "10000x100", 10_000, 2, 1, {"aiobotocore": {"async for": 8}}),
    Shape("aggregated records of 1 KB", "25x40x1024", 1000, 4, 2, {}),
    Shape(
        "aggregated records of 100 B",
        "100x100x100",
        10_000,
        2,
        1,
        {
            "aiobotocore": {
                "async for": 1.0,
                "batches": 1.3,
                "async for, compiled": 1.2,
                "batches, compiled": 1.7,
            }
        },
    ),
)


# ours


class Watched:
    """Our client, with its reads counted, and CPU time from the first of them on."""

    def __init__(self, client) -> None:
        self._client = client
        self._start = 0.0
        self.reads = 0

    def __getattr__(self, name):
        return getattr(self._client, name)

    async def get_records(self, stream, iterator, **options):
        if not self.reads:
            self._start = time.process_time()
        self.reads += 1
        return await self._client.get_records(stream, iterator, **options)

    def microseconds(self, count: int) -> float:
        return (time.process_time() - self._start) / count * 1e6


def consumer_run(
    client, folder: str, stream: str, mode, order="shard", *, pace=NO_PACE, tracing=None
) -> tuple[ConsumerRun, Ports]:
    gc.collect()
    ports = Ports(
        kinesis=client,
        store=open_store(f"sqlite://{folder}/{secrets.token_hex(8)}.db", "bench"),
        clock=SystemClock(),
        entropy=random.SystemRandom(),
        emit=lambda _: None,
        heartbeats_on_thread=True,
        tracing=tracing,
    )
    return run_with(ports, stream, mode, order, pace=pace), ports


class Audit:
    """Every record of a stream, once, and in the order of its shard."""

    def __init__(self) -> None:
        self.records = []

    def check(self, count: int) -> None:
        assert len(self.records) == count, f"{len(self.records)} records came, and {count} are in the stream"
        last = {}
        for record in self.records:
            position = record.position
            assert last.get(record.shard_id, position) <= position, f"{record.position} of {record.shard_id} came late"
            last[record.shard_id] = position
        assert len({(record.shard_id, record.position) for record in self.records}) == count, "a record came twice"


def ours(client, folder: str, shape: Shape, audit: Audit | None = None) -> dict[str, Work]:
    stream, count = shape.stream(shape.pages), shape.count(shape.pages)

    async def async_for():
        watched, left = Watched(client), count
        run, ports = consumer_run(watched, folder, stream, EngineMode())
        async for record in run.records():
            record.data, record.partition_key  # noqa: B018 -- what a reader does at least
            left -= 1
            if audit is not None:
                audit.records.append(record)
            if not left:
                taken = watched.microseconds(count)
                await run.stop(5)
        await ports.store.close()
        return taken

    async def batches():
        watched, left = Watched(client), count
        run, ports = consumer_run(watched, folder, stream, EngineMode(batches=BatchLimits(500, 1 << 20, 10)))
        async for batch in run.batches():
            for record in batch:
                record.data, record.partition_key  # noqa: B018
            left -= len(batch)
            if audit is not None:
                audit.records += batch
            if not left:
                taken = watched.microseconds(count)
                await run.stop(5)
        await ports.store.close()
        return taken

    def run_in(order: str) -> Work:
        async def work():
            watched, left, over = Watched(client), count, asyncio.get_running_loop().create_future()

            async def handle(record):
                nonlocal left
                record.data, record.partition_key  # noqa: B018
                left -= 1
                if audit is not None:
                    audit.records.append(record)
                if not left:
                    over.set_result(watched.microseconds(count))

            mode = EngineMode(HandlerCall(handle, threads=1))
            run, ports = consumer_run(watched, folder, stream, mode, order)
            await run.start()
            taken = await over
            await run.stop(5)
            await ports.store.close()
            return taken

        return work

    return {
        "async for": async_for,
        "batches": batches,
        'run, order="shard"': run_in("shard"),
        'run, order="key"': run_in("key"),
    }


# peers


class Bytes(Processor, SimpleAggregator):
    def deserialize(self, data):
        return data


class KplBytes(Processor, KPLAggregator):
    def deserialize(self, data):
        return data


def bare(client, shape: Shape) -> Work:
    stream, count = shape.stream(shape.peer_pages), shape.count(shape.peer_pages)
    aggregated = stream.startswith("aggregated")

    async def work():
        gc.collect()
        start, seen = time.process_time(), 0
        for number in range(SHARDS):
            answer = await client.get_shard_iterator(
                StreamName=stream, ShardId=f"shardId-{number:012}", ShardIteratorType="TRIM_HORIZON"
            )
            iterator = answer["ShardIterator"]
            for _ in range(shape.peer_pages):
                answer = await client.get_records(ShardIterator=iterator, Limit=10_000)
                iterator, records = answer["NextShardIterator"], answer["Records"]
                if aggregated:
                    for record in iter_deaggregate_records(records, data_format="Boto3"):
                        record["kinesis"]["data"], record["kinesis"]["partitionKey"]
                        seen += 1
                else:
                    for record in records:
                        record["Data"], record["PartitionKey"]
                        seen += 1
        assert seen == count
        return (time.process_time() - start) / count * 1e6

    return work


def boto3_threads(url: str, shape: Shape) -> Work:
    """A thread for each shard, as many programs do it."""
    stream, count = shape.stream(shape.peer_pages), shape.count(shape.peer_pages)
    aggregated = stream.startswith("aggregated")
    config = Config(max_pool_connections=SHARDS, retries={"total_max_attempts": 1})
    client = boto3.client("kinesis", endpoint_url=url, config=config)

    def follow(number: int) -> int:
        seen = 0
        answer = client.get_shard_iterator(
            StreamName=stream, ShardId=f"shardId-{number:012}", ShardIteratorType="TRIM_HORIZON"
        )
        iterator = answer["ShardIterator"]
        for _ in range(shape.peer_pages):
            answer = client.get_records(ShardIterator=iterator, Limit=10_000)
            iterator, records = answer["NextShardIterator"], answer["Records"]
            if aggregated:
                for record in iter_deaggregate_records(records, data_format="Boto3"):
                    record["kinesis"]["data"], record["kinesis"]["partitionKey"]
                    seen += 1
            else:
                for record in records:
                    record["Data"], record["PartitionKey"]
                    seen += 1
        return seen

    async def work():
        gc.collect()
        start = time.process_time()
        seen = await asyncio.gather(*[asyncio.to_thread(follow, number) for number in range(SHARDS)])
        assert sum(seen) == count
        return (time.process_time() - start) / count * 1e6

    return work


def async_kinesis(url: str, shape: Shape) -> Work:
    stream, count = shape.stream(shape.peer_pages), shape.count(shape.peer_pages)

    async def work():
        consumer = kinesis.Consumer(
            stream,
            endpoint_url=url,
            region_name="us-east-1",
            use_list_shards=True,
            shard_fetch_rate=1000,
            sleep_time_no_records=0.01,
            idle_timeout=30,
            processor=KplBytes() if stream.startswith("aggregated") else Bytes(),
        )
        async with consumer:
            gc.collect()
            start, left = time.process_time(), count
            async for _ in consumer:
                left -= 1
                if not left:
                    return (time.process_time() - start) / count * 1e6
        raise AssertionError(f"{left} records did not come")

    return work


# polls of shards that have nothing new


def idle(client, folder: str) -> Work:
    async def work():
        watched = Watched(client)
        mode = EngineMode(batches=BatchLimits())
        run, ports = consumer_run(watched, folder, f"plain-{IDLE_SHARDS}s-0p-0x0", mode, pace=IDLE_PACE)
        await run.start()
        while watched.reads < 8 * IDLE_SHARDS:  # noqa: ASYNC110 -- an event would be set by what is measured
            await asyncio.sleep(0.1)
        gc.collect()
        start, reads = time.process_time(), watched.reads
        await asyncio.sleep(IDLE_SECONDS)
        taken, reads = time.process_time() - start, watched.reads - reads
        await run.stop(5)
        await ports.store.close()
        return taken / reads * 1e6

    return work


def bare_idle(client) -> Work:
    async def work():
        reads = 0
        stream = f"plain-{IDLE_SHARDS}s-0p-0x0"

        async def poll(number: int):
            nonlocal reads
            iterator = f"{stream}/{number}/0/" + "A" * 180
            while True:
                answer = await client.get_records(ShardIterator=iterator, Limit=10_000)
                iterator = answer["NextShardIterator"]
                reads += 1
                await asyncio.sleep(IDLE_PACE.idle_interval_ms / 1000)

        tasks = [asyncio.create_task(poll(number)) for number in range(IDLE_SHARDS)]
        while reads < IDLE_SHARDS:  # noqa: ASYNC110 -- as above
            await asyncio.sleep(0.1)
        gc.collect()
        start, before = time.process_time(), reads
        await asyncio.sleep(IDLE_SECONDS)
        taken, count = time.process_time() - start, reads - before
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return taken / count * 1e6

    return work


# all together


def rounds_of(runner: asyncio.Runner, works: dict[str, Work], count: int) -> dict[str, list[float]]:
    """The order changes from round to round: what one leaves behind in memory and caches is not always the same one's
    to bear.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(count):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken[name].append(runner.run(once(works[name])))
    return taken


async def once(work: Work) -> float:
    return await work()


def print_table(title: str, taken: dict[str, list[float]], *, unit: str) -> None:
    figures = measure.figures_of(taken, reference="aiobotocore")
    measure.print_table(title, figures, unit=unit, reference="aiobotocore")


def verdicts(shape: Shape, taken: dict[str, list[float]]) -> list[str]:
    lines = []
    for name in taken:
        figures = measure.figures_of(taken, reference=name)
        for peer in () if name in PEERS else [peer for peer in PEERS if peer in taken]:
            times, (low, high), targets = figures[peer].ratio, figures[peer].ratio_spread, shape.targets.get(peer, {})
            title, wanted = f"{shape.title}, {name}", targets.get(name, targets.get(""))
            verdict = "" if wanted is None else ", " + measure.target(f"{title}: {peer} / ours", times, wanted)
            lines.append(f"  {title:50}{times:6.1f} ({low:.1f} to {high:.1f}) times less than {peer}{verdict}")
    return lines


class Worker:
    """A process that measures on request: with other builds or versions than this one has."""

    def __init__(self, python: str, script: str, url: str, certificate: str, **environment: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), "--worker", url, certificate],
            env={**os.environ, "AWS_CA_BUNDLE": certificate, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def work(self, shape: Shape, mode: str) -> Work:
        async def work():
            self._process.stdin.write(f"{SHAPES.index(shape)} {mode}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, f"the process that measures {mode} has ended"
            return float(answer)

        return work

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def serve_requests(url: str, certificate: str) -> None:
    """The other end of `Worker`."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        stack = AsyncExitStack()
        client, _ = runner.run(open_both(stack, url, certificate))
        for line in sys.stdin:
            number, mode = line.rstrip("\n").split(" ", 1)
            print(audited(runner, client, folder, SHAPES[int(number)], mode), flush=True)
        runner.run(stack.aclose())


_AUDITED: set[tuple[str, str]] = set()


def audited(runner: asyncio.Runner, client, folder: str, shape: Shape, mode: str) -> float:
    """Measures; before the first time, runs once with an audit."""
    if (shape.page, mode) not in _AUDITED:
        _AUDITED.add((shape.page, mode))
        audit = Audit()
        runner.run(once(ours(client, folder, shape, audit)[mode]))
        audit.check(shape.count(shape.pages))
    return runner.run(once(ours(client, folder, shape)[mode]))


def workers(url: str, certificate: str) -> dict[str, Worker]:
    found = {}
    if compiled := os.environ.get("ANABRANCH_COMPILED"):
        found["compiled"] = Worker(sys.executable, "consume.py", url, certificate, PYTHONPATH=compiled)
    native = Path(sys.prefix) / "native-kcl" / "bin" / "python"
    if native.exists():
        found["native-aws-kcl-py"] = Worker(str(native), "native_kcl.py", url, certificate)
    return found


def works_of(client, peer, folder: str, url: str, shape: Shape, others: dict[str, Worker]) -> dict[str, Work]:
    works = ours(client, folder, shape)
    if "compiled" in others and shape.page.count("x") == 2:
        works |= {f"{mode}, compiled": others["compiled"].work(shape, mode) for mode in ("async for", "batches")}
    works |= {"aiobotocore": bare(peer, shape), "async-kinesis": async_kinesis(url, shape)}
    works |= {"boto3, threads": boto3_threads(url, shape)}
    if "native-aws-kcl-py" in others and shape.page.count("x") == 1:  # it does not open aggregates
        works["native-aws-kcl-py"] = others["native-aws-kcl-py"].work(shape, "records")
    return works


def main() -> None:
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = "AKIDEXAMPLE", "secret"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    logging.getLogger("kinesis").setLevel(logging.ERROR)  # it warns of the read that its own closing cuts off
    if sys.argv[1:2] == ["--worker"]:
        serve_requests(*sys.argv[2:4])
        return
    lines = []
    with canned_server() as (url, certificate), tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        os.environ["AWS_CA_BUNDLE"] = certificate
        stack = AsyncExitStack()
        client, peer = runner.run(open_both(stack, url, certificate))
        others = workers(url, certificate)
        for shape in SHAPES:
            for mode in ours(client, folder, shape):
                audited(runner, client, folder, shape, mode)
            taken = rounds_of(runner, works_of(client, peer, folder, url, shape, others), ROUNDS)
            print_table(shape.title, taken, unit="record")
            lines += verdicts(shape, taken)
        for worker in others.values():
            worker.close()
        taken = rounds_of(runner, {"anabranch": idle(client, folder), "aiobotocore": bare_idle(peer)}, IDLE_ROUNDS)
        print_table(f"{IDLE_SHARDS} idle shards", taken, unit="poll")
        runner.run(stack.aclose())
    print("\nTimes less CPU; every record came once and in order\n" + "\n".join(lines))


async def open_both(stack: AsyncExitStack, url: str, certificate: str):
    account = AwsAccount(Aws(endpoint_url=url))
    stack.callback(account.close)
    client = await stack.enter_async_context(await open_kinesis(account))
    config = AioConfig(max_pool_connections=64, retries={"total_max_attempts": 1})
    peer = await stack.enter_async_context(
        get_session().create_client("kinesis", endpoint_url=url, verify=certificate, config=config)
    )
    return client, peer


if __name__ == "__main__":
    main()
