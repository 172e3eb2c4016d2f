"""A trace goes from the put to the handler, also of another process, and costs nothing when it is off (rule O1)."""

import asyncio
import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor

from aggregate_oracle import AggregatedRecord, read_aggregate
from anabranch import ConsumerSettings, Producer, ProducerSettings, Record, SyncProducer, events
from anabranch.errors import ConfigurationError, DeliveryFailed
from tracing_world import named, recorded_spans

from stream_world import QUICK, run, stream_world, until

TRACED = ConsumerSettings(leases=QUICK.leases, polling=QUICK.polling, trace=True)
tracer = trace.get_tracer("test")


def producer_of(world, *, mode=True, **options):
    return Producer("orders", aws=world.aws, settings=ProducerSettings(trace=mode), **options)


async def put_in_span(producer, values, *, key="a"):
    """All in one aggregate: the shards are known, and the records are put before the first call is sent."""
    await producer.put_and_wait(b"warm", "up")
    await until(lambda: producer._writer._streams["orders"]._shard_map.updated_at_ms is not None, "the listing")
    with tracer.start_as_current_span("request") as span:
        deliveries = [producer.put_nowait(value, key) for value in values]
    for delivery in deliveries:
        assert (await delivery).delivered
    return span.get_span_context()


def raw_records(world):
    iterator = world.call("GetShardIterator", ShardId="shardId-000000000000", ShardIteratorType="TRIM_HORIZON")
    answer = world.kinesis.state.call("GetRecords", {"ShardIterator": iterator["ShardIterator"]}, now_ms=0)
    return [record.data for record in answer["Records"]]


async def handle_all(world, count, **options):
    seen = []

    async def handle(record):
        seen.append((record, trace.get_current_span().get_span_context()))
        if len(seen) == count:
            await consumer.stop()

    consumer = world.consumer(**{"start": "trim_horizon", "settings": TRACED, **options})
    await consumer.run(handle)
    return seen


def assert_joined(spans, request, seen):
    traced = [(record, context) for record, context in seen if record.partition_key == "a"]
    assert [record.data for record, _ in traced] == [b"1", b"2"]
    assert {context.trace_id for _, context in traced} == {request.trace_id}
    puts = {span.context.span_id: span for span in named(spans, "put orders")}
    processed = [span for span in named(spans, "process orders") if span.context.trace_id == request.trace_id]
    assert sorted(span.parent.span_id for span in processed) == sorted(
        span_id for span_id, span in puts.items() if span.parent is not None
    )
    assert {span.attributes["messaging.message.id"] for span in processed} == {
        span.attributes["messaging.message.id"] for span in puts.values() if span.parent is not None
    }
    received = named(spans, "receive orders")
    assert sum(span.attributes["messaging.batch.message_count"] for span in received) == 2
    # The warm-up was put alone: nothing carries its trace, and its handling begins one.
    [(_, alone)] = [item for item in seen if item[0].partition_key == "up"]
    assert alone.trace_id not in {span.context.trace_id for span in puts.values()}


def test_a_record_is_handled_in_the_trace_of_its_put():
    async def main():
        with recorded_spans() as spans:
            async with stream_world(1) as world, producer_of(world) as producer:
                request = await put_in_span(producer, [b"1", b"2"])
                seen = await handle_all(world, 3)
            assert_joined(spans, request, seen)

    run(main)


def test_events_of_a_subscription_are_traced():
    async def main():
        with recorded_spans() as spans:
            async with stream_world(1) as world:
                world.put(["a", "b"])
                await handle_all(world, 2, read="fanout")
            [received] = named(spans, "receive orders")
            assert received.attributes["messaging.operation.name"] == "SubscribeToShard"
            assert received.attributes["messaging.batch.message_count"] == 2

    run(main)


def test_a_lone_record_carries_its_trace_only_if_it_is_wrapped():
    async def put_alone(world, mode):
        async with producer_of(world, mode=mode) as producer:
            with tracer.start_as_current_span("request"):
                await producer.put_and_wait(b"alone", "a")
        return raw_records(world)[-1]

    async def main():
        with recorded_spans():
            async with stream_world(1) as world:
                assert await put_alone(world, True) == b"alone"
                wrapped = await put_alone(world, "wrap")
                assert read_aggregate(wrapped) == [("a", None, b"alone")]
                [first, second] = await handle_all(world, 2)
                assert first[0].trace_parent is None
                assert second[0].trace_parent is not None
                assert second[0].data == b"alone"

    run(main)


def test_aggregates_with_traces_have_the_same_records_for_other_readers():
    async def main():
        values = [b"%d" % number for number in range(50)]
        with recorded_spans():
            async with stream_world(1) as world, producer_of(world) as producer:
                await put_in_span(producer, values)
                await producer.flush()
                *_, data = raw_records(world)
                assert read_aggregate(data) == [("a", None, value) for value in values]
                message = AggregatedRecord.FromString(data[4:-16])
                tags = [[tag.key for tag in record.tags] for record in message.records]
                assert tags == [["ab", "traceparent"]] + [["traceparent"]] * 49

    run(main)


def test_records_that_are_not_sampled_carry_nothing():
    async def main():
        with recorded_spans():
            async with stream_world(1) as world, producer_of(world, mode="wrap") as producer:
                not_sampled = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=True))
                with trace.use_span(not_sampled):
                    await producer.put_and_wait(b"plain", "a")
                assert raw_records(world) == [b"plain"]

    run(main)


def test_a_batch_span_links_to_the_traces_of_its_records():
    async def main():
        with recorded_spans() as spans:
            async with stream_world(1) as world, producer_of(world) as producer:
                request = await put_in_span(producer, [b"1", b"2"])
                consumer = world.consumer(start="trim_horizon", settings=TRACED)
                seen = []

                async def handle(batch):
                    seen.extend(batch)
                    if len(seen) == 3:
                        await consumer.stop()

                await consumer.run_batches(handle, max_wait=0.1)
            links = [link.context for span in named(spans, "process orders") for link in span.links]
            assert {link.trace_id for link in links} == {request.trace_id}
            assert len(links) == 2
            puts = {span.context.span_id for span in named(spans, "put orders")}
            assert {link.span_id for link in links} <= puts

    run(main)


def test_a_handler_in_a_thread_and_one_with_a_context_see_the_trace():
    async def main():
        with recorded_spans():
            async with stream_world(1) as world, producer_of(world, mode="wrap") as producer:
                with tracer.start_as_current_span("request") as span:
                    await producer.put_and_wait(b"1", "a")
                expected = span.get_span_context().trace_id
                seen, loop = [], asyncio.get_running_loop()

                def in_thread(record):
                    seen.append(trace.get_current_span().get_span_context().trace_id)
                    loop.call_soon_threadsafe(consumer._early_stop.set)

                async def with_context(record, context):
                    seen.append(trace.get_current_span().get_span_context().trace_id)

                for handler in (in_thread, with_context):
                    consumer = world.consumer(start="trim_horizon", settings=TRACED, until="tip")
                    await consumer.run(handler)
                assert seen == [expected, expected]

    run(main)


def test_a_failed_attempt_shows_in_its_span_and_the_retry_is_a_span_of_its_own():
    async def main():
        with recorded_spans() as spans:
            async with stream_world(1) as world:
                world.put("a")
                attempts = []

                async def handle(record):
                    attempts.append(record)
                    if len(attempts) == 1:
                        raise ValueError("not yet")

                await world.consumer(start="trim_horizon", settings=TRACED, until="tip").run(handle)
            first, second = named(spans, "process orders")
            assert not first.status.is_ok
            assert "not yet" in first.status.description
            assert second.status.is_ok or second.status.status_code is trace.StatusCode.UNSET
            assert [span.attributes["anabranch.attempt"] for span in (first, second)] == [1, 2]

    run(main)


def test_a_put_that_fails_ends_its_span_with_the_error():
    async def main():
        with recorded_spans() as spans:
            async with stream_world(1) as world:
                producer = Producer("nowhere", aws=world.aws, settings=ProducerSettings(trace=True))
                with pytest.raises(DeliveryFailed):
                    await producer.put_and_wait(b"1", "a")
                await producer.close()
                with pytest.raises(ValueError, match="partition key"):
                    async with producer_of(world) as other:
                        await other.put(b"1", "")
            failed, refused = named(spans, "put nowhere") + named(spans, "put orders")
            assert "ResourceNotFound" in failed.status.description
            assert "ValueError" in refused.status.description

    run(main)


def test_a_sync_producer_continues_the_trace_of_the_calling_thread():
    async def main():
        with recorded_spans():
            async with stream_world(1) as world:

                def put():
                    settings = ProducerSettings(trace="wrap")
                    with SyncProducer("orders", aws=world.aws, settings=settings) as producer:
                        with tracer.start_as_current_span("request") as span:
                            producer.put_and_wait(b"1", "a")
                        return span.get_span_context().trace_id

                trace_id = await asyncio.to_thread(put)
                [(record, context)] = await handle_all(world, 1)
                assert context.trace_id == trace_id
                assert record.data == b"1"

    run(main)


CONSUMER_PROCESS = """
import asyncio, json, sys
from anabranch import Aws, Consumer, ConsumerSettings
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from stream_world import QUICK, Credentials

trace.set_tracer_provider(TracerProvider())
aws = Aws(region="us-east-1", endpoint_url=sys.argv[1], credentials=Credentials())
settings = ConsumerSettings(leases=QUICK.leases, polling=QUICK.polling, trace=True)
consumer = Consumer("orders", start="trim_horizon", until="tip", aws=aws, settings=settings)

async def handle(record):
    span = trace.get_current_span()
    print(json.dumps({
        "data": record.data.decode(), "trace": span.get_span_context().trace_id, "parent": span.parent.span_id,
    }))

asyncio.run(consumer.run(handle))
"""


def test_a_trace_goes_from_a_put_to_the_handler_of_another_process():
    async def main():
        with recorded_spans() as spans:
            async with stream_world(1) as world, producer_of(world, mode="wrap") as producer:
                with tracer.start_as_current_span("request") as span:
                    await producer.put_and_wait(b"1", "a")
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", CONSUMER_PROCESS, world.kinesis.endpoint_url,
                    env={"PYTHONPATH": ":".join(sys.path)}, stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
                output, _ = await process.communicate()
            [put] = named(spans, "put orders")
            assert json.loads(output) == {
                "data": "1", "trace": span.get_span_context().trace_id, "parent": put.context.span_id,
            }  # fmt: skip

    run(main)


class BrokenProcessor(SpanProcessor):
    """Raises at the start or at the end of each span, while it is told to."""

    breaks = None

    def on_start(self, span, parent_context=None):
        if self.breaks == "start":
            raise LookupError("no collector")

    def on_end(self, span):
        if self.breaks == "end":
            raise LookupError("no collector")


BROKEN = BrokenProcessor()


@contextmanager
def broken_sdk(where):
    provider = trace.get_tracer_provider()
    if BROKEN not in provider._active_span_processor._span_processors:
        provider.add_span_processor(BROKEN)
    BROKEN.breaks = where
    try:
        yield
    finally:
        BROKEN.breaks = None


def failures(told):
    return [event for event in told if isinstance(event, events.ExporterFailed)]


@pytest.mark.parametrize("order", ["shard", "key", "batch"])
@pytest.mark.parametrize("where", ["start", "end"])
def test_an_sdk_that_raises_is_an_event_and_no_record_notices(where, order):
    async def main():
        async with stream_world(1) as world:
            told, seen = [], set()

            async def handle(given):
                records = [given] if isinstance(given, Record) else given.records
                if failures_left and any(record.data == b"1" for record in records):
                    raise failures_left.pop()  # a handler that fails is retried as always
                seen.update(record.data for record in records)
                if len(seen) == 20:
                    await consumer.stop()

            failures_left = [ValueError("busy")]
            options = {} if order == "batch" else {"order": order}
            consumer = world.consumer(start="trim_horizon", settings=TRACED, on_event=told.append, **options)
            with broken_sdk(where):
                async with producer_of(world, on_event=told.append) as producer:
                    for number in range(20):
                        assert (await producer.put_and_wait(str(number).encode(), "a")).delivered
                assert {event.exporter for event in failures(told)} == {"OpenTelemetry traces"}
                told.clear()
                await (consumer.run_batches if order == "batch" else consumer.run)(handle)
            assert {event.exporter for event in failures(told)} == {"OpenTelemetry traces"}
            assert failures(told)[0].error == "LookupError: no collector"
            assert len(failures(told)) < 8, "not one for each record"
            assert (len(seen), failures_left) == (20, [])

    with recorded_spans():
        run(main)


def test_spans_that_are_made_again_are_reported():
    async def main():
        async with stream_world(1) as world:
            told = []
            async with producer_of(world, on_event=told.append) as producer:
                with broken_sdk("start"):
                    await producer.put_and_wait(b"1", "a")
                await producer.put_and_wait(b"2", "a")
            (recovered,) = [event for event in told if isinstance(event, events.ExporterRecovered)]
            assert (recovered.exporter, recovered.failure_count) == ("OpenTelemetry traces", 1)

    with recorded_spans():
        run(main)


def test_wrong_settings_are_named():
    with pytest.raises(ConfigurationError, match="trace is 'all'; it must be True, False or 'wrap'"):
        ProducerSettings(trace="all")
    with pytest.raises(ConfigurationError, match="trace='wrap' sends single records as aggregates"):
        Producer("orders", aggregate=None, settings=ProducerSettings(trace="wrap"))


@pytest.mark.parametrize("facade", ["Producer", "Consumer"])
def test_without_the_extra_the_error_shows_the_line_to_install(facade):
    program = f"""
import sys
sys.modules["opentelemetry"] = None
from anabranch import {facade}, {facade}Settings
{facade}("orders", settings={facade}Settings(trace=True))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'anabranch[otel]'" in found.stderr
