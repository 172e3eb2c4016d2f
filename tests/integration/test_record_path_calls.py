"""Watching adds no function call for a record, neither switched off nor with exporters: counted by the interpreter."""

import collections
import functools
import io
import sys

import pytest
from prometheus_client import CollectorRegistry

from anabranch import ConsumerSettings
from anabranch.metrics import EmbeddedMetrics, Prometheus
from tracing_world import recorded_spans

from stream_world import QUICK, run, stream_world

FEW, MANY = 1_000, 3_000


async def handle(record):
    pass


async def by_handler(consumer):
    await consumer.run(handle)


async def by_loop(consumer):
    async with consumer:
        async for _ in consumer:
            pass


async def by_batches(consumer):
    async with consumer:
        async for _ in consumer.batches(max_wait=0.01):
            pass


def calls_per_record(consume, **options):
    """How often each function is called for a record. What is called for a page, a slice or a second drops out."""
    counts = [count_calls(consume, records, **options) for records in (FEW, MANY)]
    extra = {name: (counts[1][name] - counts[0][name]) / (MANY - FEW) for name in counts[1]}
    return {name: round(calls) for name, calls in extra.items() if calls > 0.5}


@functools.cache
def calls_unwatched(consume):
    return calls_per_record(consume)


def count_calls(consume, records, **options):
    counted = collections.Counter()

    def profile(frame, event, argument):
        if event == "call":
            counted[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            counted[argument.__qualname__] += 1

    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * records)
            consumer = world.consumer(**{"start": "trim_horizon", "until": "tip", **options})
            sys.setprofile(profile)
            try:
                await consume(consumer)
            finally:
                sys.setprofile(None)

    run(main)
    return counted


@pytest.mark.parametrize("consume", [by_handler, by_loop, by_batches])
def test_exporters_add_no_call_for_a_record(consume):
    off = calls_unwatched(consume)
    watched = calls_per_record(
        consume,
        metrics=[Prometheus(level="detailed", registry=CollectorRegistry()), EmbeddedMetrics(output=io.StringIO())],
        health_port=0,
    )
    assert watched == off
    ours = {name.partition(":")[0] for name in off}
    assert not ours & {"catalogue.py", "health.py", "measures.py", "prometheus.py", "sources.py", "_tracing.py"}


@pytest.mark.parametrize("consume, most", [(by_handler, 13), (by_loop, 13), (by_batches, 5)])
def test_a_record_costs_as_many_calls_as_before_anything_was_counted(consume, most):
    """Half of them are `len`, the rest the handler or loop and the fence. One more is a decision."""
    assert sum(calls_unwatched(consume).values()) <= most


def test_the_check_sees_what_traces_add():
    settings = ConsumerSettings(leases=QUICK.leases, polling=QUICK.polling, trace=True)
    with recorded_spans():
        traced = calls_per_record(by_handler, settings=settings)
    assert "_tracing.py:handling" in traced
