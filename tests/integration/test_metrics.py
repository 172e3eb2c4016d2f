"""Every exporter shows the same figures, from a real consumer and a real producer, and none can disturb them."""

import asyncio
import io
import json
import subprocess
import sys
import threading
import time

import boto3
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from anabranch import Aws, Producer, SyncProducer, events
from anabranch._model.streams import StreamName
from anabranch.errors import ConfigurationError, UsageError
from anabranch.measures import TimeBuckets
from anabranch.metrics import CloudWatch, EmbeddedMetrics, OpenTelemetry, Prometheus, Summary
from anabranch.metrics.opentelemetry import instrument_name
from anabranch.metrics.prometheus import family_name

from services import moto_dynamodb
from stream_world import Credentials, run, stream_world, until


def scraped(registry):
    """By sample name and labels; empty labels are those that do not apply."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, frozenset((name, value) for name, value in sample.labels.items() if value)): sample.value
        for family in families
        for sample in family.samples
    }


def observed(reader):
    data = reader.get_metrics_data()
    return {
        (metric.name, frozenset(point.attributes.items())): point.value
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def number(measured, name, **labels):
    [found] = [one.value for one in measured if one.metric.name == name and dict(one.labels) == labels]
    return found


def assert_the_same_figures(measured, prometheus, opentelemetry):
    """Each measurement is where it belongs in both."""
    assert len(measured) > 30
    for one in measured:
        labels = frozenset(one.labels.items())
        theirs, ours = (
            family_name(one.metric, of_shard=one.is_of_shard),
            instrument_name(one.metric, of_shard=one.is_of_shard),
        )
        scale = 0.001 if one.metric.unit == "Milliseconds" else 1
        if isinstance(one.value, TimeBuckets):
            assert prometheus[f"{theirs}_count", labels] == opentelemetry[f"{ours}.count", labels] == one.value.count
            assert prometheus[f"{theirs}_sum", labels] == pytest.approx(one.value.total_ms * scale)
            assert opentelemetry[f"{ours}.sum", labels] == one.value.total_ms
            assert prometheus[f"{theirs}_bucket", labels | {("le", "0.1")}] == sum(one.value.counts[:7])
            assert opentelemetry[f"{ours}.bucket", labels | {("le", "100")}] == sum(one.value.counts[:7])
        elif isinstance(one.value, Summary):
            own = labels | ({("metric", one.metric.name)} if one.metric.is_own else set())
            assert prometheus[f"{theirs}_count", labels] == opentelemetry[f"{ours}.count", own] == one.value.count
            assert prometheus[f"{theirs}_sum", labels] == opentelemetry[f"{ours}.sum", own] == one.value.total
        else:
            name = f"{theirs}_total" if one.metric.kind == "counter" else theirs
            assert prometheus[name, labels] == pytest.approx(one.value * scale)
            assert opentelemetry[ours, labels] == one.value


def test_prometheus_and_opentelemetry_see_what_the_program_sees():
    async def main():
        registry, reader = CollectorRegistry(), InMemoryMetricReader()
        exporters = [
            Prometheus(level="detailed", registry=registry),
            OpenTelemetry(level="detailed", meter_provider=MeterProvider([reader], shutdown_on_exit=False)),
        ]
        async with stream_world(2) as world:
            async with Producer("orders", aws=world.aws, metrics=exporters) as producer:
                await producer.put_many([(f"key-{number % 7}", b"x" * 10) for number in range(100)])
                await producer.flush()
                written = producer.metrics()
            consumer = world.consumer(start="trim_horizon", app="billing", leases="memory://", metrics=exporters)
            seen = []

            async def handle(record, context):
                seen.append(record)
                context.metric("PredictionConfidence", 0.5)
                if len(seen) == 100:
                    read.extend(consumer.metrics())
                    await consumer.stop()

            read = []
            await consumer.run(handle)
            assert number(written, "UserRecordsPut", stream="orders") == 100
            assert number(written, "UserRecordsReceived", stream="orders") == 100
            assert number(read, "ActiveShards", app="billing") == 2
            ended = consumer.metrics()
            assert number(ended, "RecordsProcessed", app="billing") == 100
            assert number(ended, "RecordsCommitted", app="billing") == 100
            assert number(ended, "ProcessingLatency", app="billing").count == 100
            assert number(ended, "PredictionConfidence", app="billing") == Summary(100, 50.0, {0.5: 100})
            assert not [one for one in ended if one.metric.kind == "gauge"]
            assert_the_same_figures([*ended, *producer.metrics()], scraped(registry), observed(reader))

    run(main)


def test_a_scrape_during_a_run_has_every_shard_and_is_parsed_by_prometheus():
    async def main():
        registry = CollectorRegistry()
        async with stream_world(2) as world:
            world.put(f"key-{number}" for number in range(20))
            consumer = world.consumer(start="trim_horizon", metrics=[Prometheus(level="detailed", registry=registry)])
            seen = []

            async def handle(record):
                seen.append(record)

            running = asyncio.create_task(consumer.run(handle))
            await until(lambda: len(seen) == 20, "all records")
            # As a scraper does: from another thread, while the loop runs.
            found = await asyncio.to_thread(scraped, registry)
            shards = {dict(labels)["shard_id"] for name, labels in found if name == "anabranch_shard_buffered_bytes"}
            assert shards == {"shardId-000000000000", "shardId-000000000001"}
            app = frozenset({("app", "(ephemeral)")})
            assert found["anabranch_records_processed_total", app] == 20
            assert found["anabranch_active_shards", app] == 2
            assert found["anabranch_consumer_lag_seconds", app] >= 0
            assert ("anabranch_behind_latest_seconds", app) in found
            await consumer.stop()
            await running

    run(main)


def test_two_producers_of_one_registry_are_added_up():
    async def main():
        registry, reader = CollectorRegistry(), InMemoryMetricReader()
        exporters = [
            Prometheus(registry=registry),
            OpenTelemetry(meter_provider=MeterProvider([reader], shutdown_on_exit=False)),
        ]
        async with stream_world(1) as world:
            for _ in range(2):
                async with Producer("orders", aws=world.aws, metrics=exporters) as producer:
                    await producer.put(b"1", "a")
                exporters.append(exporters[0])  # given twice, it counts once
                kept.append(producer)
            text = generate_latest(registry).decode()
            lines = [line for line in text.splitlines() if line.startswith("anabranch_user_records_put_total")]
            assert len(lines) == 1
            of_stream = frozenset({("stream", "orders")})
            assert scraped(registry)["anabranch_user_records_put_total", of_stream] == 2
            assert observed(reader)["anabranch.user_records_put", of_stream] == 2

    kept = []  # what is collected is not counted any more
    run(main)


def test_a_subscribed_shard_shows_the_age_of_its_subscription():
    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(read="fanout")
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(lambda: bool(consumer.status().shards), "the shard")
            await until(
                lambda: any(one.metric.name == "SubscriptionAge" for one in consumer.metrics()), "the subscription"
            )
            await consumer.stop()
            await running

    run(main)


def test_a_second_run_counts_on():
    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(app="billing", leases="memory://", until="tip", start="trim_horizon")
            async with consumer:
                for turn in (1, 2):
                    world.put(["a", "b"])
                    await consumer.run(lambda record: None)
                    assert number(consumer.metrics("summary"), "RecordsProcessed", app="billing") == 2 * turn

    run(main)


# the program's own metrics


def report_confidence(record, context):
    context.metric("Confidence", int(record.data) / 10)


def report_and_fail(record, context):
    context.metric("Confidence", 1)
    if context.attempt == 1:
        raise ValueError("not yet")


@pytest.mark.parametrize("processes", [0, 1])
def test_a_handler_in_a_thread_or_process_reports_its_own_metrics(processes):
    async def main():
        async with stream_world(1) as world:
            world.put(["a", "b", "c"])
            consumer = world.consumer(start="trim_horizon", until="tip")
            await consumer.run(report_confidence, processes=processes)
            assert number(consumer.metrics(), "Confidence", app="(ephemeral)").total == pytest.approx(0.3)

    run(main)


def test_only_successful_calls_count():
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            consumer = world.consumer(start="trim_horizon", until="tip")
            await consumer.run(report_and_fail)
            measured = consumer.metrics()
            assert number(measured, "Confidence", app="(ephemeral)").count == 1
            assert number(measured, "HandlerErrors", app="(ephemeral)") == 1
            assert number(measured, "Retries", app="(ephemeral)") == 1
            assert number(measured, "ErrorRate", app="(ephemeral)") == Summary(2, 1)

    run(main)


def test_batches_and_loops_report_their_own_metrics():
    async def main():
        async with stream_world(1) as world:
            world.put(["a", "b", "c"])
            consumer = world.consumer(start="trim_horizon", until="tip")

            async def handle(batch, context):
                context.metric("BatchSize", len(batch))

            await consumer.run_batches(handle)
            assert number(consumer.metrics(), "BatchSize", app="(ephemeral)").total == 3
            async with world.consumer(start="trim_horizon", until="tip") as loop:
                async for record in loop:
                    loop.metric("Seen", int(record.data))
                assert number(loop.metrics(), "Seen", app="(ephemeral)") == Summary(3, 3.0, {0.0: 1, 1.0: 1, 2.0: 1})

    run(main)


def test_a_wrong_metric_never_fails_a_record():
    async def main():
        seen, told = [], []
        async with stream_world(1) as world:
            world.put("a")
            consumer = world.consumer(start="trim_horizon", until="tip", on_event=told.append)

            async def handle(record, context):
                context.metric("RecordsProcessed", 1)
                context.metric("Confidence", float("nan"))
                context.metric("Confidence", float("nan"))
                for number in range(150):
                    context.metric(f"order-{number}", 1)
                seen.append(record)

            assert (await consumer.run(handle)).clean
        assert len(seen) == 1
        refused = [event for event in told if isinstance(event, events.MetricRefused)]
        assert {event.metric for event in refused} >= {"RecordsProcessed", "Confidence", "order-149"}
        assert "the library has a metric of that name" in str(refused[0])

    run(main)


def test_a_metric_of_a_wrong_type_is_a_mistake_that_the_handler_sees():
    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer()
            with pytest.raises(ValueError, match="a metric's name is ''; it must have 1 to 200 printable ASCII"):
                consumer.metric("", 1)
            with pytest.raises(TypeError, match="the value of metric 'Confidence' is 'high'; it must be a number"):
                consumer.metric("Confidence", "high")

    run(main)


# CloudWatch


@pytest.fixture(scope="module")
def cloudwatch():
    with moto_dynamodb() as server:
        yield server.url


def cloudwatch_client(url):
    return boto3.client(
        "cloudwatch", region_name="us-east-1", endpoint_url=url, aws_access_key_id="x", aws_secret_access_key="y"
    )


def statistics(client, namespace, name, **dimensions):
    """Of all metrics that have at least these dimensions: moto does not compare the others."""
    now = time.time()
    found = client.get_metric_statistics(
        Namespace=namespace, MetricName=name, StartTime=now - 600, EndTime=now + 600, Period=3600,
        Dimensions=[{"Name": key, "Value": value} for key, value in dimensions.items()],
        Statistics=["Sum", "SampleCount", "Average", "Maximum"],
    )["Datapoints"]  # fmt: skip
    return {key: sum(point[key] for point in found) for key in ("Sum", "SampleCount", "Maximum")} if found else None


def test_cloudwatch_gets_the_metrics_of_the_seed_by_shard_and_in_sum(cloudwatch, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH", cloudwatch)

    async def main():
        told = []
        async with stream_world(2) as world:
            exporters = [
                CloudWatch(namespace="ModelServing", interval=1),
                CloudWatch(namespace="ByShard", level="detailed", interval=1),
            ]
            world.put(f"key-{number}" for number in range(30))
            consumer = world.consumer(start="trim_horizon", metrics=exporters, on_event=told.append)
            seen = []

            async def handle(record, context):
                context.metric("PredictionConfidence", 0.5)
                seen.append(record)
                if len(seen) == 1:
                    raise ValueError("once")

            running = asyncio.create_task(consumer.run(handle))
            client = cloudwatch_client(cloudwatch)
            await until(lambda: len(seen) == 31, "all records")
            await until(
                lambda: len(client.list_metrics(Namespace="ModelServing", MetricName="ActiveShards")["Metrics"]) > 0,
                "an export",
            )
            await consumer.stop()
            await running
        assert not [event for event in told if isinstance(event, events.ExporterFailed)]
        assert statistics(client, "ModelServing", "RecordsProcessed")["Sum"] == 30
        assert statistics(client, "ModelServing", "PredictionConfidence")["SampleCount"] == 30
        assert statistics(client, "ModelServing", "PredictionConfidence")["Maximum"] == 0.5
        assert statistics(client, "ModelServing", "ProcessingLatency")["SampleCount"] == 31
        assert statistics(client, "ModelServing", "ErrorRate")["Sum"] == pytest.approx(1)
        assert statistics(client, "ModelServing", "ErrorRate")["SampleCount"] == 31
        assert statistics(client, "ModelServing", "ActiveShards")["Maximum"] == 2
        by_shard = [
            statistics(client, "ByShard", "RecordsProcessed", ShardId=f"shardId-{number:012}")["Sum"]
            for number in range(2)
        ]
        assert sum(by_shard) == 30
        assert all(by_shard)
        for name in ("MillisBehindLatest", "ConsumerLag"):
            assert statistics(client, "ByShard", name, ShardId="shardId-000000000000") is not None

    run(main)


def test_cloudwatch_gets_a_producers_metrics_under_the_kpls_names(cloudwatch, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH", cloudwatch)

    async def main():
        async with stream_world(1) as world:
            exporters = [
                CloudWatch(dimensions={"Stage": "test"}),
                CloudWatch(namespace="KplByShard", level="detailed"),
            ]
            async with Producer("orders", aws=world.aws, metrics=exporters) as producer:
                await producer.put_many([("a", b"x" * 100)] * 50)
        client = cloudwatch_client(cloudwatch)
        of_stream = {"Stage": "test", "StreamName": "orders"}
        assert statistics(client, "AnabranchProducer", "UserRecordsPut", **of_stream)["Sum"] == 50
        assert statistics(client, "AnabranchProducer", "UserRecordsDataPut", **of_stream)["Sum"] == 50 * 101
        assert statistics(client, "AnabranchProducer", "KinesisRecordsPut", **of_stream)["Sum"] >= 1
        for name in ("BufferingTime", "RequestTime", "RetriesPerRecord", "KinesisRecordsPerPutRecordsRequest"):
            assert statistics(client, "AnabranchProducer", name, **of_stream) is not None
        shard = {"StreamName": "orders", "ShardId": "shardId-000000000000"}
        assert statistics(client, "KplByShard", "UserRecordsPut", **shard)["Sum"] == 50

    run(main)


def test_what_could_not_be_sent_is_sent_later(cloudwatch, monkeypatch):
    async def main():
        told, output = [], Broken()
        async with stream_world(1) as world:
            world.put(["a", "b"])
            exporter = EmbeddedMetrics(interval=1, output=output)
            consumer = world.consumer(start="trim_horizon", metrics=[exporter], on_event=told.append)
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(lambda: any(isinstance(event, events.ExporterFailed) for event in told), "a failed export")
            assert consumer.status().shards
            output.broken = False
            await until(lambda: any(isinstance(event, events.ExporterRecovered) for event in told), "the recovery")
            await consumer.stop()
            assert (await running).clean
        failed = next(event for event in told if isinstance(event, events.ExporterFailed))
        assert str(failed) == "exporter EmbeddedMetrics failed (1 in a row): OSError: the disk is full"
        documents = [json.loads(line) for line in output.getvalue().splitlines()]
        assert sum(document.get("RecordsProcessed", 0) for document in documents) == 2

    run(main)


class Broken(io.StringIO):
    broken = True

    def write(self, text):
        if self.broken:
            raise OSError("the disk is full")
        return super().write(text)


def test_the_embedded_format_names_every_metric_that_it_holds():
    async def main():
        output = io.StringIO()
        async with stream_world(2) as world:
            world.put(f"key-{number}" for number in range(10))
            exporter = EmbeddedMetrics(namespace="Orders", level="detailed", output=output)
            consumer = world.consumer(start="trim_horizon", until="tip", metrics=[exporter])
            await consumer.run(lambda record: None)
        documents = [json.loads(line) for line in output.getvalue().splitlines()]
        assert len(documents) == 3
        for document in documents:
            [directive] = document["_aws"]["CloudWatchMetrics"]
            assert directive["Namespace"] == "Orders"
            assert len(directive["Metrics"]) <= 100
            assert all(metric["Name"] in document for metric in directive["Metrics"])
            assert all(name in document for name in directive["Dimensions"][0])
            assert abs(document["_aws"]["Timestamp"] / 1000 - time.time()) < 60
        total, *shards = documents
        assert total["RecordsProcessed"] == sum(document.get("RecordsProcessed", 0) for document in shards) == 10
        assert {document["ShardId"] for document in shards} == {"shardId-000000000000", "shardId-000000000001"}

    run(main)


# nothing that an exporter does disturbs the records


class Stuck:
    """A user's own exporter, whose service never answers."""

    level = "summary"

    def __init__(self, *, in_start=False):
        self.in_start = in_start
        self.released = threading.Event()

    def start(self, source):
        if self.in_start:
            raise RuntimeError("no such server")
        threading.Thread(target=self.released.wait, daemon=True).start()

    async def stop(self, source):
        raise RuntimeError("still not there")


@pytest.mark.parametrize("in_start", [True, False])
def test_a_failing_exporter_is_an_event_and_no_outage(in_start):
    async def main():
        told, seen = [], []
        async with stream_world(1) as world:
            world.put(["a", "b", "c"])
            exporter = Stuck(in_start=in_start)
            consumer = world.consumer(start="trim_horizon", until="tip", metrics=[exporter], on_event=told.append)
            report = await consumer.run(seen.append)
            exporter.released.set()
        assert report.clean
        assert len(seen) == 3
        assert [event.exporter for event in told if isinstance(event, events.ExporterFailed)][:1] == ["Stuck"]

    run(main)


def test_a_cancelled_stop_of_an_exporter_leaves_nothing_open():
    class Slow:
        level = "summary"

        def start(self, source):
            pass

        async def stop(self, source):
            stopping.set()
            await asyncio.Event().wait()

    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(until="tip", metrics=[Slow()])
            running = asyncio.create_task(consumer.run(lambda record: None))
            await stopping.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            kinesis = consumer._consumer_run._ports.kinesis
            with pytest.raises(UsageError, match="this client is closed"):
                await kinesis.describe_stream_summary(StreamName("orders"))

    stopping = asyncio.Event()
    run(main)


def test_a_service_that_does_not_answer_delays_a_stop_by_a_few_seconds_only(monkeypatch):
    from anabranch.metrics import cloudwatch as module

    monkeypatch.setattr(module, "STOP_SECONDS", 0.2)

    async def main():
        told, asked = [], []

        async def never(reader, writer):
            asked.append(writer)
            await reader.read(100)

        server = await asyncio.start_server(never, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH", f"http://127.0.0.1:{port}")
        async with stream_world(1) as world:
            world.put("a")
            consumer = world.consumer(start="trim_horizon", until="tip", metrics=[CloudWatch()], on_event=told.append)
            assert (await consumer.run(lambda record: None)).clean
            await until(lambda: bool(asked), "the request")
        assert "did not end within 0.2 s" in str(
            next(event for event in told if isinstance(event, events.ExporterFailed))
        )
        server.close()
        for writer in asked:
            writer.close()
            await writer.wait_closed()

    run(main)


# producers


def test_a_producers_status_tells_what_is_pending_throttled_and_delivered():
    async def main():
        async with stream_world(1) as world:
            producer = Producer("orders", aws=world.aws, aggregate=None)
            assert producer.status().streams == ()
            world.kinesis.faults.on("PutRecords").throttle(slots=[0]).once()
            deliveries = [await producer.put(b"%d" % number, "a") for number in range(3)]
            [stream] = producer.status().streams
            assert stream.pending_count == producer.status().pending_count == 3
            assert producer.status().buffered_bytes > 0
            for delivery in deliveries:
                await delivery
            await producer.close()
            [stream] = producer.status().streams
            assert (stream.pending_count, stream.requests_in_flight) == (0, 0)
            assert stream.counters.delivered_count == 3
            assert not stream.aggregates
            measured = producer.metrics()
            assert number(measured, "UserRecordsPut", stream="orders") == 3
            assert number(measured, "ErrorsByCode", stream="orders", code="ProvisionedThroughputExceededException") == 1
            assert (
                number(measured, "AllErrors", stream="orders")
                == number(measured, "WriteThrottles", stream="orders")
                == 1
            )
            assert number(measured, "Attempts", stream="orders") == 4
            assert number(measured, "RetriesPerRecord", stream="orders") == Summary(3, 1)
            assert number(measured, "AggregationRatio", stream="orders") == Summary(3, 0)

    run(main)


def test_records_that_expire_or_fail_are_counted():
    async def main():
        async with stream_world(1) as world:
            world.kinesis.faults.on("PutRecords").error("InternalFailure", status=500)
            producer = Producer("orders", aws=world.aws, delivery_timeout=0.3)
            result = await (await producer.put(b"1", "a"))
            assert not result.delivered
            await producer.close()
            counters = producer.status().streams[0].counters
            assert (counters.failed_count, counters.expired_count, counters.delivered_count) == (1, 1, 0)
            assert counters.errors["InternalFailure"] >= 1

    run(main)


def test_a_sync_producer_has_status_and_metrics_in_every_thread():
    async def main():
        async with stream_world(1) as world:

            def work():
                registry = CollectorRegistry()
                with SyncProducer("orders", aws=world.aws, metrics=[Prometheus(registry=registry)]) as producer:
                    assert producer.status().streams == ()
                    producer.put_and_wait(b"1", "a")
                    assert producer.status().streams[0].counters.delivered_count == 1
                    found = scraped(registry)
                    assert found["anabranch_user_records_put_total", frozenset({("stream", "orders")})] == 1
                assert number(producer.metrics(), "UserRecordsPut", stream="orders") == 1

            await asyncio.to_thread(work)

    run(main)


# mistakes


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Prometheus(level="all"), "level is 'all'; it must be 'none', 'summary' or 'detailed'"),
        (lambda: Prometheus(registry=3), "it must be a prometheus_client.CollectorRegistry"),
        (lambda: OpenTelemetry(meter_provider=3), "it must be an OpenTelemetry MeterProvider"),
        (lambda: CloudWatch(namespace="AWS/Kinesis"), "those that begin with AWS/ belong to AWS"),
        (lambda: CloudWatch(interval=0.1), "interval is 0.1 s; it must be from 1 to 3600 s"),
        (lambda: CloudWatch(interval="60"), "interval is '60'; it must be a number"),
        (lambda: CloudWatch(dimensions={"Stage": ""}), "an empty name or value"),
        (lambda: CloudWatch(aws="eu-west-1"), "aws is 'eu-west-1'; it must be an Aws"),
        (lambda: EmbeddedMetrics(output="log.txt"), "output is 'log.txt'; it must be a text file"),
        (lambda: Producer("orders", metrics=Prometheus()), "it must be a list of exporters"),
        (lambda: Producer("orders", metrics=[Prometheus]), "it must be an exporter from anabranch.metrics"),
    ],
)
def test_wrong_options_are_named(build, message):
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_level_none_exports_nothing():
    async def main():
        registry = CollectorRegistry()
        async with stream_world(1) as world:
            consumer = world.consumer(until="tip", metrics=[Prometheus(level="none", registry=registry)])
            await consumer.run(lambda record: None)
        assert scraped(registry) == {}

    run(main)


@pytest.mark.parametrize(
    "exporter, package, extra",
    [("Prometheus", "prometheus_client", "prometheus"), ("OpenTelemetry", "opentelemetry", "otel")],
)
def test_without_the_extra_the_error_shows_the_line_to_install(exporter, package, extra):
    program = f"""
import sys
sys.modules[{package!r}] = None
from anabranch.metrics import {exporter}
{exporter}()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"pip install 'anabranch[{extra}]'" in found.stderr


def test_cloudwatch_uses_the_account_that_it_is_given(cloudwatch, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH", cloudwatch)

    async def main():
        async with stream_world(1) as world:
            aws = Aws(region="eu-west-1", credentials=Credentials())
            exporter = CloudWatch(namespace="Elsewhere", aws=aws)
            await world.consumer(until="tip", metrics=[exporter]).run(lambda record: None)
        client = boto3.client(
            "cloudwatch", region_name="eu-west-1", endpoint_url=cloudwatch, aws_access_key_id="x",
            aws_secret_access_key="y",
        )  # fmt: skip
        assert client.list_metrics(Namespace="Elsewhere")["Metrics"]

    run(main)
