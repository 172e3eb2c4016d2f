"""Handlers in threads, and stops from other threads and event loops. Other handler tests are in tests/simulation."""

import asyncio
import functools
import logging
import threading

import pytest

from anabranch import Retry, events
from anabranch.errors import (
    ShardStoppedError,
    UsageError,
)
from anabranch.stores.memory import MemoryLeaseStore
from memory_rows import AwayStore
from patience import PATIENCE
from stubborn_calls import check_failure, check_overrun, check_stop, check_zombie

from stream_world import kinds, run, stream_world, until


@pytest.mark.parametrize("run_name", ["run", pytest.param("run_batches", marks=pytest.mark.long)])
def test_a_call_in_a_thread_that_outlives_a_fence_counts_if_the_fence_lifts(run_name):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            store, started, go_on = AwayStore(), [], threading.Event()

            def handle(item):
                started.append(item)
                store.away = True
                go_on.wait(PATIENCE)

            consumer = world.consumer(app="billing", leases=store, until="tip")
            running = asyncio.create_task(getattr(consumer, run_name)(handle, handle_signals=False))
            await until(lambda: bool(started) and consumer.status().fenced, "the fence")
            await asyncio.sleep(0.2)  # by now, everything that the fence interrupts has been interrupted
            store.away = False
            await until(lambda: not consumer.status().fenced, "the end of the fence")
            go_on.set()
            assert (await running).clean
            assert len(started) == 1

    run(main)


def test_a_run_that_is_cancelled_twice_ends_at_once(monkeypatch):
    monkeypatch.setattr("anabranch._engine.consumer_run.CANCEL_GRACE_MS", 600_000)

    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            started, loop, may_end = [], asyncio.get_running_loop(), asyncio.Event()

            def handle(record):
                started.append(record)
                asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result()

            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(lambda: bool(started), "the call")
            running.cancel()
            await asyncio.sleep(0.1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running  # while the call still runs
            may_end.set()

    run(main)


def test_cancelling_a_run_does_not_wait_for_a_call_in_a_thread(monkeypatch):
    monkeypatch.setattr("anabranch._engine.consumer_run.CANCEL_GRACE_MS", 100)

    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            started, may_end = [], asyncio.Event()
            loop = asyncio.get_running_loop()

            def handle(record):
                started.append(record)
                asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result()

            consumer = world.consumer(app="billing", leases="memory://")
            running = asyncio.create_task(consumer.run(handle, handle_signals=False))
            await until(lambda: bool(started), "the call")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running  # while the call still runs
            may_end.set()

    run(main)


@pytest.mark.parametrize("way", ["run", "run_batches"])
def test_a_handler_thread_can_stop_its_consumer(way):
    reports, handled = [], []

    async def main():
        async with stream_world(1) as world:
            world.put("abc")
            options = {"app": "billing", "leases": MemoryLeaseStore()}
            consumer = world.consumer(**options)

            def handle(item):
                handled.append(item)
                reports.append(asyncio.run(consumer.stop()))

            limits = {} if way == "run" else {"max_records": 1}
            assert (await getattr(consumer, way)(handle, **limits)).clean
            (early,) = reports  # the stop waits for this very call
            assert not early.clean
            assert len(handled) == 1
            again = []
            await world.consumer(**options, until="tip").run(again.append)
            assert [record.data for record in again] == [b"1", b"2"]

    run(main)


def _in_thread(work):
    """Runs a coroutine function on an event loop in another thread; a task with its result or error."""
    return asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(work())))


def test_another_event_loop_can_stop_it():
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            release = asyncio.Event()
            started = asyncio.Event()
            consumer = world.consumer(app="billing", leases="memory://")

            async def handle(record):
                started.set()
                await release.wait()

            running = asyncio.create_task(consumer.run(handle))
            await started.wait()
            stopping = _in_thread(consumer.stop)
            await until(lambda: consumer._consumer_run.is_stopping, "the stop")
            assert not stopping.done()
            release.set()
            assert (await stopping).clean
            assert (await running).clean
            assert (await _in_thread(consumer.stop)).clean  # nothing runs any more

    run(main)


def test_another_event_loop_gets_the_leftovers_at_its_deadline():
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            started = asyncio.Event()
            consumer = world.consumer(app="billing", leases="memory://")

            async def handle(record):
                started.set()
                await asyncio.Event().wait()

            running = asyncio.create_task(consumer.run(handle))
            await started.wait()
            report = await _in_thread(functools.partial(consumer.stop, deadline=0.1))
            assert [record.data for record in report.leftovers] == [b"0"]
            assert await running == report

    run(main)


def test_another_event_loop_that_stops_waiting_does_not_end_the_stop():
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            release, started = asyncio.Event(), asyncio.Event()
            consumer = world.consumer(app="billing", leases="memory://")

            async def handle(record):
                started.set()
                await release.wait()

            async def impatient():
                async with asyncio.timeout(0.05):
                    await consumer.stop()

            running = asyncio.create_task(consumer.run(handle))
            await started.wait()
            with pytest.raises(TimeoutError):
                await _in_thread(impatient)
            release.set()
            assert (await running).clean

    run(main)


def test_another_event_loop_can_stop_a_loop_over_records():
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            seen, stops = [], []
            async with world.consumer(start="trim_horizon") as consumer:
                async for record in consumer:
                    seen.append(record.data)
                    stops.append(_in_thread(consumer.stop))
                    await until(lambda: consumer._consumer_run.is_stopping, "the stop")
                assert (await stops[0]).clean
            assert seen == [b"0"]

    run(main)


def test_another_thread_can_stop_a_program_that_only_runs_a_consumer():
    """The event loop of the run ends right after it."""
    reports = []

    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(app="billing", leases="memory://")
            thread = threading.Thread(
                target=lambda: reports.append(consumer.run_sync(lambda record: None)), name="program"
            )
            thread.start()
            await until(lambda: consumer.status().member_id is not None, "the consumer")
            reports.append(await consumer.stop())
            await asyncio.to_thread(thread.join)

    run(main)
    assert [report.clean for report in reports] == [True, True]


def test_a_stop_reports_that_the_event_loop_of_the_run_has_stopped():
    async def open_world():
        context = stream_world(1)
        world = await context.__aenter__()
        consumer = world.consumer(app="billing", leases="memory://")
        running = asyncio.create_task(consumer.run(lambda record: None, handle_signals=False))
        await until(lambda: consumer.status().member_id is not None, "the consumer")
        return context, consumer, running

    async def end(context, consumer, running):
        await consumer.stop()
        await running
        await context.__aexit__(None, None, None)

    with asyncio.Runner() as runner:
        context, consumer, running = runner.run(open_world())
        with pytest.raises(UsageError, match="event loop is not running"):
            asyncio.run(consumer.stop())
        runner.run(end(context, consumer, running))


KEYS = [f"user-{i}" for i in range(8)]


def test_plain_functions_run_in_threads_and_do_not_block_the_loop():
    async def main():
        async with stream_world(4) as world:
            world.put(KEYS)
            together, main_thread = threading.Barrier(2, timeout=PATIENCE), threading.get_ident()

            def handle(record):
                assert threading.get_ident() != main_thread
                if record.partition_key in KEYS[:2]:
                    together.wait()  # two calls must run at once to get past

            consumer = world.consumer(app="billing", leases="memory://", order="key", until="tip", concurrency=4)
            assert (await consumer.run(handle)).clean

    run(main)


def failing(record):
    raise LookupError(f"no customer {record.partition_key}")


def test_run_sync_raises_where_run_does(tmp_path):
    async def make():
        async with stream_world(1) as world:
            world.put_payloads(b"1")

            def work():
                consumer = world.consumer(app="billing", leases="memory://", until="tip", on_failure=Retry(attempts=1))
                with pytest.raises(ShardStoppedError) as raised:
                    consumer.run_sync(failing)
                return raised.value

            error = await asyncio.to_thread(work)
            assert isinstance(error.report.stopped[0].error, LookupError)

    run(make)


def run_in_threads(consumer, handle):
    return consumer.run(handle, handle_signals=False)


def test_a_stop_waits_no_longer_for_a_thread_that_does_not_end_and_names_it():
    async def main():
        async with stream_world(1) as world:
            await check_stop(world, "in_a_thread", run_in_threads)

    run(main)


def test_a_consumer_that_fails_says_so_whatever_its_threads_do():
    async def main():
        async with stream_world(1) as world:
            await check_failure(world, "in_a_thread", run_in_threads)

    run(main)


def test_a_thread_that_overruns_its_timeout_is_reported_with_its_line_and_not_retried_meanwhile():
    async def main():
        async with stream_world(1) as world:
            await check_overrun(world, "in_a_thread")

    run(main)


def test_a_thread_that_outlives_its_lease_is_reported_with_its_stack():
    async def main():
        async with stream_world(1) as world:
            await check_zombie(world, "in_a_thread", run_in_threads)

    run(main)


def test_a_thread_logs_the_traceback_of_its_handler(caplog):
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1")
            happened = []

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append,
                on_failure=Retry(attempts=4, backoff=0),
            )  # fmt: skip
            with pytest.raises(ShardStoppedError):
                await consumer.run(failing)
            failures = kinds(happened, events.HandlerFailed)
            assert [event.attempt for event in failures] == [1, 2, 3, 4]
            assert all(isinstance(event.exception, LookupError) for event in failures)

    caplog.set_level(logging.INFO, "anabranch")
    run(main)
    logged = [record for record in caplog.records if ": attempt " in record.getMessage()]
    assert [record.exc_info is not None for record in logged] == [True, False, False, True]
    assert "in failing" in caplog.text
