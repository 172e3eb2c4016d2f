"""What a program says to a consumer, at any time and from any thread: status, stop, handlers, and `leases=`."""

import asyncio
import functools
import pathlib
import threading
from dataclasses import replace

import pytest

from anabranch import Consumer
from anabranch.errors import ConfigurationError, UsageError
from anabranch.stores import MemoryLeaseStore

from simulated_stream import QUICK, run, stream_world, until

# status


def test_status_works_before_during_and_after_a_run():
    async def main():
        async with stream_world(2) as world:
            consumer = world.consumer(app="billing", leases="memory://")
            before = consumer.status()
            assert (before.app, before.member_id, before.shards) == ("billing", None, ())
            assert (before.fenced, before.paused, before.budget_used_bytes) == (True, False, 0)
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(lambda: len(consumer.status().shards) == 2, "both shards")
            during = consumer.status()
            assert during.member_id is not None
            assert not during.fenced
            await consumer.stop()
            await running
            assert consumer.status() == before

    run(main)


def test_status_works_at_every_step_of_a_run():
    async def main():
        async with stream_world(2) as world:
            world.put("abc")
            consumer = world.consumer(app="billing", leases="memory://", until="tip")
            running = asyncio.create_task(consumer.run(lambda record: None))
            while not running.done():
                consumer.status()
                await asyncio.sleep(0.0001)
            assert (await running).clean

    run(main)


def test_status_works_after_a_run_that_failed():
    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(app="billing", leases="memory://")
            world.kinesis.faults.on("DescribeStreamSummary").error("AccessDeniedException", "no permission")
            with pytest.raises(Exception, match="no permission"):
                await consumer.run(lambda record: None)
            assert consumer.status().shards == ()

    run(main)


def test_status_works_before_and_after_a_loop_and_shows_shards_in_it():
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            consumer = world.consumer(start="trim_horizon", until="tip")
            assert consumer.status().shards == ()
            async with consumer:
                assert consumer.status().shards == ()
                async for _ in consumer:
                    assert len(consumer.status().shards) == 1
                assert consumer.status().shards == ()
            assert consumer.status().shards == ()

    run(main)


# stop


@pytest.mark.parametrize("seconds", ["5", float("inf"), float("nan")])
def test_a_stop_with_a_wrong_deadline_stops_nothing(seconds):
    async def main():
        async with stream_world(1) as world:
            world.put("ab")
            handled = []
            async with world.consumer(start="trim_horizon", until="tip") as consumer:
                with pytest.raises(TypeError, match=r"deadline is .* number of seconds"):
                    await consumer.stop(deadline=seconds)
                async for record in consumer:
                    with pytest.raises(TypeError, match=r"deadline is .* number of seconds"):
                        await consumer.stop(deadline=seconds)
                    handled.append(record.partition_key)
            assert handled == ["a", "b"]

    run(main)


def test_a_stop_without_a_deadline_uses_the_drain_deadline():
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            started = asyncio.Event()
            settings = replace(QUICK, leases=replace(QUICK.leases, drain_deadline=0.1))
            consumer = world.consumer(app="billing", leases="memory://", settings=settings)

            async def handle(record):
                started.set()
                await asyncio.Event().wait()

            running = asyncio.create_task(consumer.run(handle))
            await started.wait()
            assert len((await consumer.stop()).leftovers) == 1
            await running

    run(main)


# options


def test_all_wrong_options_are_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        Consumer("a b", read="x", until="tipp", idle_timeout=-1, concurrency=0, app="")
    names = [violation.split()[0] for violation in caught.value.violations]
    assert sorted(names) == ["a", "app", "concurrency", "idle_timeout", "read", "until"]


# handlers


def _name(item):
    return item.shard_id


@pytest.mark.parametrize("first", ["handler", "batch_handler"])
@pytest.mark.parametrize("second", ["handler", "batch_handler"])
def test_a_second_handler_is_refused(first, second):
    consumer = Consumer("orders")
    marks = {"handler": consumer.handler, "batch_handler": consumer.batch_handler()}
    assert marks[first](_name) is _name
    with pytest.raises(UsageError, match="already has the handler _name"):
        marks[second](print)


async def _async_keyword(record, *, database):
    pass


def _plain_keyword(record, context, *, database):
    pass


@pytest.mark.parametrize("handle", [_async_keyword, _plain_keyword])
@pytest.mark.parametrize("way", ["run", "run_batches"])
def test_a_handler_with_a_required_keyword_only_parameter_is_refused_at_the_start(handle, way):
    with pytest.raises(ConfigurationError, match=r"'database' has no value.*functools\.partial"):
        asyncio.run(getattr(Consumer("orders"), way)(handle))


def test_a_keyword_only_parameter_with_a_value_is_fine():
    seen = []

    async def handle(record, *, database, table="orders"):
        seen.append((record.data, database, table))

    async def main():
        async with stream_world(1) as world:
            world.put("a")
            consumer = world.consumer(app="billing", leases="memory://", until="tip")
            await consumer.run(functools.partial(handle, database="db"))

    run(main)
    assert seen == [(b"0", "db", "orders")]


def test_run_sync_inside_a_running_loop_says_what_to_do():
    async def main():
        with pytest.raises(UsageError, match=r"await consumer\.run\("):
            Consumer("orders").run_sync(print)

    asyncio.run(main())


def test_an_error_of_run_sync_has_no_unrelated_context():
    with pytest.raises(UsageError, match="needs a handler") as raised:
        Consumer("orders").run_sync()
    assert raised.value.__context__ is None


# leases=


@pytest.mark.parametrize(
    "leases, words",
    [
        ("postgres://user:secret@db/leases", "postgres:// is not supported yet"),
        ("ftp://leases", "is not a lease store"),
        ("", "is not a lease store"),
        ("memory://shared", "is not a lease store"),
        ("/var/lib/leases.db", "is not a lease store"),
        ("sqlite://leases.db", "three slashes"),
        ("sqlite://user:secret@db/leases.db", "three slashes"),
        ("sqlite://[leases", "three slashes"),
        ("sqlite:///leases.db?mode=ro", "three slashes"),
        ("sqlite:///var/lib/", "names a folder"),
        ("sqlite:.", "names a folder"),
        ("sqlite:///var/..", "names a folder"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite::memory:", "memory://"),
        ("sqlite:///~/leases.db", "full path"),
        ("sqlite:~user/leases.db", "full path"),
        ("sqlite:///var/%00.db", "NUL"),
        (pathlib.Path("leases.db"), r"leases='sqlite:"),
        (MemoryLeaseStore, "a lease store object"),
        (5, "a lease store object"),
    ],
)
def test_leases_that_cannot_work_are_refused_by_the_constructor(leases, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        Consumer("orders", app="billing", leases=leases)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("leases", ["memory:", "MEMORY://", "sqlite:///tmp/x.db", "sqlite:x.db", MemoryLeaseStore()])
def test_leases_that_can_work_are_not_touched_by_the_constructor(leases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads_before = threading.active_count()
    Consumer("orders", app="billing", leases=leases)
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads_before
