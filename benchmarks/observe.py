"""What watching a consumer costs: the same stream read with exporters and traces, and without, in one run.

The stream is the one of `consume`: prepared bytes over TLS from another core, all records acknowledged, checkpoints in
a SQLite file. `off` has no exporter. `on` has Prometheus at the level of shards, scraped from another thread, and
embedded metrics on top of it, both every second: fifteen and sixty times as often as usual. The target is at most
5 % more CPU time for a record. Traces are shown beside it: they make a span for each record, so their cost is that of
the SDK.
"""

import asyncio
import io
import os
import statistics
import tempfile
import threading
from contextlib import AsyncExitStack

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry, generate_latest

import measure
from anabranch._aws.account import AwsAccount
from anabranch._aws.kinesis_client import open_kinesis
from anabranch._core.handling.batches import BatchLimits
from anabranch._engine.consumer_run import EngineMode
from anabranch._engine.handler_calls import HandlerCall
from anabranch._tracing import Tracing
from anabranch.config import Aws
from anabranch.metrics import EmbeddedMetrics, Prometheus
from anabranch.metrics.catalogue import consumer_measurements
from anabranch.metrics.sources import Exporters, Source
from client import canned_server
from consume import SHARDS, Watched, consumer_run, rounds_of

ROUNDS = 5
PAGES = 30
RECORDS = SHARDS * PAGES * 10_000
STREAM = f"plain-{SHARDS}s-{PAGES}p-10000x100"
TRACED_PAGES = 1
RATIO_MAX = 1.05


class Watching:
    """Exporters, and a scraper in a thread."""

    def __init__(self, run) -> None:
        self._registry = CollectorRegistry()
        source = Source(
            "bench", lambda level: consumer_measurements(run.measures(), {}, level), lambda _: None, namespace="Bench"
        )
        exporters = [
            Prometheus(level="detailed", registry=self._registry),
            EmbeddedMetrics(level="detailed", interval=1, output=io.StringIO()),
        ]
        self._exporters = Exporters(exporters, source)
        self._over = threading.Event()

    async def __aenter__(self):
        self._exporters.start()
        self._thread = threading.Thread(target=self._scrape)
        self._thread.start()

    async def __aexit__(self, *_):
        self._over.set()
        await asyncio.to_thread(self._thread.join)
        await self._exporters.stop()

    def _scrape(self) -> None:
        while not self._over.wait(1.0):
            generate_latest(self._registry)


async def read_all(client, folder, mode_of, *, watch, stream=STREAM, count=RECORDS, tracing=None):
    """Microseconds of CPU for a record. `mode_of` gets a function to call with the number of records that were done."""
    watched, left, over = Watched(client), count, asyncio.get_running_loop().create_future()

    def done(number: int) -> None:
        nonlocal left
        left -= number
        if not left:
            over.set_result(watched.microseconds(count))

    mode, work = mode_of(done)
    run, ports = consumer_run(watched, folder, stream, mode, tracing=tracing)
    async with AsyncExitStack() as stack:
        await run.start()
        if watch:
            await stack.enter_async_context(Watching(run))
        working = asyncio.ensure_future(work(run))
        taken = await over
        await run.stop(5)
        await working
    await ports.store.close()
    return taken


def handler(done):
    async def handle(record):
        record.data, record.partition_key  # noqa: B018 -- what a reader does at least
        done(1)

    async def nothing(run):
        pass

    return EngineMode(HandlerCall(handle, threads=1)), nothing


def loop(done):
    async def iterate(run):
        async for record in run.records():
            record.data, record.partition_key  # noqa: B018
            done(1)

    return EngineMode(), iterate


def batches(done):
    async def iterate(run):
        async for batch in run.batches():
            for record in batch:
                record.data, record.partition_key  # noqa: B018
            done(len(batch))

    return EngineMode(batches=BatchLimits(500, 1 << 20, 10)), iterate


def main() -> None:
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = "AKIDEXAMPLE", "secret"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    verdicts = []
    with canned_server() as (url, certificate), tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        os.environ["AWS_CA_BUNDLE"] = certificate
        account = AwsAccount(Aws(endpoint_url=url))
        client = runner.run(open_kinesis(account))
        for title, mode in (("run", handler), ("async for", loop), ("batches", batches)):
            works = {
                "off": lambda mode=mode: read_all(client, folder, mode, watch=False),
                "on": lambda mode=mode: read_all(client, folder, mode, watch=True),
            }
            figures = measure.figures_of(rounds_of(runner, works, ROUNDS), reference="off")
            measure.print_table(f"{title}, {RECORDS} records of 100 B", figures, unit="record", reference="off")
            ratio = figures["on"].ratio
            verdict = measure.target(f"{title}, CPU with exporters, times without", ratio, RATIO_MAX, at_least=False)
            verdicts.append(f"  {title:12} on costs {ratio - 1:+.1%}; {verdict}")
        show_traces(runner, client, folder)
        runner.run(client.close())
        account.close()
    print("\nWatching\n" + "\n".join(verdicts))


def show_traces(runner, client, folder) -> None:
    stream, count = f"plain-{SHARDS}s-{TRACED_PAGES}p-10000x100", SHARDS * TRACED_PAGES * 10_000
    works = {"off": lambda: read_all(client, folder, handler, watch=False, stream=stream, count=count)}
    trace.set_tracer_provider(TracerProvider(sampler=ALWAYS_OFF))
    tracing = Tracing(lambda _: None)
    works["traced, none sampled"] = lambda: read_all(
        client, folder, handler, watch=False, stream=stream, count=count, tracing=tracing
    )
    taken = rounds_of(runner, works, 3)
    measure.print_table("run, with traces", measure.figures_of(taken, reference="off"), unit="record", reference="off")
    per_record = statistics.median(taken["traced, none sampled"]) - statistics.median(taken["off"])
    print(f"  a span that is not sampled costs {per_record:.1f} us for a record")


if __name__ == "__main__":
    main()
