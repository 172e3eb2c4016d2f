"""What people get wrong first: each a clear error that names what is wrong, none a hang."""

import asyncio
import functools
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

import anabranch
from anabranch import Aws, Consumer, Retry, errors, events

from simulated_stream import QUICK, now, run, stream_world, until


def _consume(consumer):
    async def main():
        async with asyncio.timeout(20), consumer:
            async for _ in consumer:
                pass

    asyncio.run(main())


def test_an_unknown_stream_is_named():
    async def main():
        async with stream_world(1) as world, world.consumer("ordres") as consumer:
            with pytest.raises(errors.StreamNotFoundError, match="ordres"):
                async for _ in consumer:
                    pass

    run(main)


def test_denied_access_is_said_at_the_start():
    async def main():
        async with stream_world(1) as world:
            world.kinesis.faults.on("DescribeStreamSummary").error("AccessDeniedException", "no permission")
            async with world.consumer() as consumer:
                with pytest.raises(errors.AccessDeniedError, match="no permission"):
                    async for _ in consumer:
                        pass

    run(main)


def test_a_change_of_order_is_rolled_out_by_workers_that_may_join_any():
    async def main():
        async with stream_world(2) as world:
            store, handled = anabranch.stores.memory.MemoryLeaseStore(), []
            before = world.consumer(app="billing", leases=store)
            running = asyncio.create_task(before.run(lambda record: None, handle_signals=False))
            await until(lambda: before._consumer_run is not None and before._consumer_run.has_joined, "the old worker")
            refused = world.consumer(app="billing", leases=store, order="key")
            with pytest.raises(errors.FleetMismatchError, match="any_order"):
                await refused.run(lambda record: None, handle_signals=False)
            settings = replace(QUICK, leases=replace(QUICK.leases, any_order=True))
            after = world.consumer(app="billing", leases=store, order="key", settings=settings)
            joined = asyncio.create_task(after.run(handled.append, handle_signals=False))
            await until(lambda: after._consumer_run is not None and after._consumer_run.sessions, "its share")
            await before.stop()
            await running
            world.put(["key"] * 20)
            await until(lambda: len(handled) == 20, "all records by the new worker")
            await after.stop()
            await joined

    run(main)


@pytest.mark.parametrize(
    "variable", ["KUBERNETES_SERVICE_HOST", "ECS_CONTAINER_METADATA_URI_V4", "AWS_LAMBDA_RUNTIME_API"]
)
def test_the_embedded_store_is_refused_inside_a_container_platform(monkeypatch, variable):
    monkeypatch.setenv(variable, "10.0.0.1")
    with pytest.raises(errors.ConfigurationError, match="leases="):
        _consume(Consumer("orders", app="billing", aws=Aws(region="us-east-1")))


def test_an_asynchronous_handler_is_refused_for_processes():
    async def handle(record):
        pass

    async def main():
        async with stream_world(1) as world:
            with pytest.raises(errors.ConfigurationError, match="this handler is async"):
                await world.consumer().run(handle, processes=2)

    run(main)


async def _asynchronous(given):
    return given


class _AsynchronousObject:
    async def __call__(self, event):
        pass


async def _yield_asynchronously(record):
    yield record


def _yield(record):
    yield record


class _Yields:
    async def __call__(self, record):
        yield record


@pytest.mark.parametrize(
    "handler",
    [_yield, _yield_asynchronously, functools.partial(_yield), _Yields()],
    ids=["plain", "asynchronous", "partial", "object"],
)
def test_a_handler_with_a_yield_in_it_is_refused_since_nothing_of_it_would_run(handler):
    async def main():
        async with stream_world(1) as world:
            with pytest.raises(errors.ConfigurationError, match="yield"):
                await world.consumer().run(handler)

    run(main)


class _Promise:
    def __await__(self):
        yield


async def _forgets_to_await(record, context):
    return _Promise()


def _returns_a_generator(record):
    return (each for each in [record])


@pytest.mark.parametrize("handler", [lambda record: _Promise(), _returns_a_generator, _forgets_to_await])
def test_a_handler_that_returns_work_instead_of_doing_it_is_no_success(handler):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            happened = []
            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append, on_failure=Retry(attempts=1)
            )
            with pytest.raises(errors.ShardStoppedError):
                await consumer.run(handler)
            (stop,) = [event for event in happened if isinstance(event, events.ShardStopped)]
            assert "nothing was handled" in str(stop)

    run(main)


def test_a_plain_handler_that_raises_stop_iteration_fails_its_record():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            happened = []
            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append, on_failure=Retry(attempts=1)
            )
            with pytest.raises(errors.ShardStoppedError):
                await consumer.run(lambda record: next(iter(())))
            (stop,) = [event for event in happened if isinstance(event, events.ShardStopped)]
            assert "StopIteration" in str(stop)

    run(main)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"stream": []}, "at least one stream"),
        ({"stream": "no spaces allowed"}, "no spaces allowed"),
        ({"stream": ["a", "a"]}, "twice"),
        ({"start": "yesterday"}, "yesterday"),
        ({"start": datetime(2026, 1, 1)}, "time zone"),  # noqa: DTZ001 -- the mistake itself
        ({"until": "forever"}, "forever"),
        ({"idle_timeout": -1}, "positive"),
        ({"order": "sideways"}, "sideways"),
        ({"concurrency": 0}, "concurrency"),
        ({"app": ""}, "app"),
        ({"read": "telepathy"}, "telepathy"),
        ({"stream": None}, "as text, not None"),
        ({"stream": ["orders", 5]}, "as text, not 5"),
        ({"concurrency": "32"}, "concurrency is '32'; it must be a whole number"),
        ({"idle_timeout": float("nan")}, "idle_timeout is nan"),
        ({"app": 5, "order": None}, "app is 5.*order is None"),
        ({"settings": {"budget": 5}}, "ConsumerSettings"),
        ({"on_failure": 3}, "Retry"),
        ({"on_event": _asynchronous}, "plain function"),
        ({"on_event": _AsynchronousObject()}, "plain function"),
        ({"on_event": "print"}, "plain function"),
        ({"decode": _asynchronous}, "plain function"),
    ],
)
def test_a_wrong_option_is_named_when_the_consumer_is_made(options, message):
    with pytest.raises(errors.ConfigurationError, match=f"(?s){message}"):
        Consumer(**{"stream": "orders", **options})


@pytest.mark.parametrize("limits", [{"max_records": "5"}, {"max_wait": float("nan")}, {"max_bytes": 2.5}])
def test_a_wrong_limit_of_batches_is_named(limits):
    (name,) = limits
    with pytest.raises(errors.ConfigurationError, match=f"{name} is .*number"):
        Consumer("orders").batch_handler(**limits)


def test_a_start_in_the_future_is_refused_by_the_services_clock():
    async def main():
        async with stream_world(1) as world, world.consumer(start=now() + timedelta(hours=1)) as consumer:
            with pytest.raises(errors.ConfigurationError, match="future"):
                async for _ in consumer:
                    pass

    run(main)


def test_two_iterators_at_once_are_refused():
    async def main():
        async with stream_world(1) as world, world.consumer(start="trim_horizon") as consumer:
            world.put(["a", "b"])
            async for _ in consumer:
                with pytest.raises(errors.UsageError, match="only one run or iterator"):
                    async for _ in consumer:
                        pass
                break

    run(main)


def test_iterating_without_opening_says_how():
    async def main():
        with pytest.raises(errors.UsageError, match="async with"):
            async for _ in Consumer("orders"):
                pass

    asyncio.run(main())
