"""What happens has its counterpart when it is over, and what flows is told once a second."""

import asyncio
import io
import logging
from datetime import UTC, datetime

import pytest

from anabranch import Alert, Retry, events
from anabranch.errors import ConfigurationError, LeaseStoreError
from anabranch.metrics import EmbeddedMetrics
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import kinds, run, stream_world, until


class Store(MemoryLeaseStore):
    """Can be away."""

    is_away = False

    def __getattribute__(self, name):
        if name in {"heartbeat", "poll", "write_lease", "read_leases", "read_lease", "identity", "write_status"}:
            return self._unless_away(super().__getattribute__(name))
        return super().__getattribute__(name)

    def _unless_away(self, call):
        async def answer(*arguments, **options):
            if self.is_away:
                raise LeaseStoreError("connection refused")
            return await call(*arguments, **options)

        return answer


async def ignore(record):
    pass


def consume(world, happened, handler=ignore, **options):
    consumer = world.consumer(app="billing", on_event=happened.append, **{"leases": "memory://", **options})
    return consumer, asyncio.create_task(consumer.run(handler))


def test_progress_is_reported_at_most_once_a_second_and_adds_up():
    async def main():
        async with stream_world(2) as world:
            happened = []
            consumer, running = consume(world, happened)
            for _ in range(20):
                world.put("abcdef")
                await asyncio.sleep(0.4)
            await asyncio.sleep(5)
            await consumer.stop()
            await running
            flow = kinds(happened, events.ShardProgress)
            for what in ("read_count", "handled_count", "committed_count"):
                assert sum(getattr(event, what) for event in flow) == 120, what
            assert sum(event.calls.count for event in flow) == 120
            by_shard = {event.shard_id: [one for one in flow if one.shard_id == event.shard_id] for event in flow}
            assert all(len(told) <= 15 for told in by_shard.values())
            (stopped,) = kinds(happened, events.ConsumerStopped)
            assert (stopped.handled_count, stopped.committed_count) == (120, 120)

    run(main)


def test_the_warnings_of_the_lease_store_are_reported_at_the_start():
    class Faulty(MemoryLeaseStore):
        warnings = ("it keeps nothing",)

    async def main():
        async with stream_world(1) as world:
            happened = []
            consumer, running = consume(world, happened, leases=Faulty())
            await until(lambda: kinds(happened, events.ShardStarted), "a shard")
            await consumer.stop()
            await running
            (warning,) = kinds(happened, events.LeaseStoreWarning)
            assert (warning.warning, str(warning)) == ("it keeps nothing", "leases in memory://: it keeps nothing")

    run(main)


def test_the_start_names_what_runs_where_and_with_which_settings():
    async def main():
        async with stream_world(1) as world:
            happened = []
            consumer, running = consume(world, happened, concurrency=8, on_failure=Retry(attempts=5))
            await until(lambda: kinds(happened, events.ConsumerStarted), "the start")
            await consumer.stop()
            await running
            (started,) = kinds(happened, events.ConsumerStarted)
            assert started.streams == ("orders",)
            assert started.settings == (
                "concurrency=8", "on_failure.attempts=5", "leases.expiry=3.0", "leases.stall_limit=60.0",
                "leases.drain_deadline=5.0", "polling.idle_interval=0.2", "polling.listing_interval=1.0",
            )  # fmt: skip

    run(main)


def test_the_start_names_every_option_that_is_not_the_default():
    async def main():
        async with stream_world(1) as world:
            happened = []
            options = {
                "start": datetime(2026, 1, 2, tzinfo=UTC), "until": "tip", "idle_timeout": 5.0, "settings": None,
                "alerts": [Alert(lag=5.0), Alert(lag=60)], "metrics": [EmbeddedMetrics(output=io.StringIO())],
            }  # fmt: skip
            _, running = consume(world, happened, **options)
            await running
            (started,) = kinds(happened, events.ConsumerStarted)
            assert started.settings == (
                "start=2026-01-02T00:00:00+00:00", "until=tip", "idle_timeout=5.0", "metrics=EmbeddedMetrics",
                "alerts=5s,60s",
            )  # fmt: skip
            happened.clear()
            follower = world.consumer(acknowledge="manual", on_event=happened.append, settings=None)
            async with follower, asyncio.timeout(60):
                waiting = asyncio.ensure_future(anext(aiter(follower)))
                await until(lambda: kinds(happened, events.ConsumerStarted), "the start")
                (started,) = kinds(happened, events.ConsumerStarted)
                assert started.settings == ("acknowledge=manual",)
                await follower.stop()
                await asyncio.wait([waiting])

    run(main)


def test_a_run_that_fails_has_a_line_with_its_totals():
    async def main():
        async with stream_world(1) as world:
            happened = []
            consumer, running = consume(world, happened)
            world.put("abc")
            await until(
                lambda: consumer.status().shards and consumer.status().shards[0].counters.handled_count == 3, "them"
            )
            consumer._consumer_run._on_callback_error(RuntimeError("a defect"))
            await asyncio.wait([running])
            assert running.exception() is not None
            (stopped,) = kinds(happened, events.ConsumerStopped)
            assert (stopped.handled_count, stopped.error) == (3, "RuntimeError: a defect")
            assert (stopped.level, str(stopped).startswith("failed after")) == (logging.ERROR, True)

    run(main)


def test_a_shard_that_was_throttled_is_read_again_and_says_so():
    async def main():
        async with stream_world(1) as world:
            happened = []
            consumer, running = consume(world, happened)
            await until(lambda: kinds(happened, events.ShardStarted), "the start")
            world.kinesis.faults.on("GetRecords").throttle()
            await asyncio.sleep(60)
            world.put("abc")
            world.kinesis.faults.clear()
            await until(lambda: kinds(happened, events.ShardRecovered), "the end")
            assert kinds(happened, events.ReadFailed)
            (recovered,) = kinds(happened, events.ReadRecovered)
            assert recovered.throttled
            assert recovered.failure_count > 3
            assert 55 < recovered.seconds < 100
            (began,) = kinds(happened, events.ShardStalled)
            (ended,) = kinds(happened, events.ShardRecovered)
            assert began.reason.code == ended.reason.code == "reads-throttled"
            assert "reading again after" in str(ended)
            await consumer.stop()
            await running

    run(main)


def test_a_store_that_was_away_for_a_minute_is_back_and_everything_says_so():
    async def main():
        async with stream_world(1) as world:
            happened, store = [], Store()
            consumer, running = consume(world, happened, leases=store)
            await until(lambda: consumer.status().shards and consumer.status().shards[0].lag == 0, "a read")
            store.is_away = True
            await until(lambda: consumer.status().fenced, "the fence")
            world.put("abc")
            await asyncio.sleep(57)
            (shard,) = consumer.status().shards
            assert shard.reason.code == "store-unreachable"
            assert shard.lag == pytest.approx(57, abs=2)
            store.is_away = False
            await until(lambda: kinds(happened, events.ShardRecovered), "the end")
            await asyncio.sleep(5)
            (away,) = kinds(happened, events.StoreUnanswered)
            (back,) = kinds(happened, events.StoreAnswered)
            assert "connection refused" in str(away)
            assert back.seconds == pytest.approx(60, abs=5)
            assert [event.reason.code for event in kinds(happened, events.ShardStalled)] == ["store-unreachable"]
            assert len(kinds(happened, events.CheckpointFailed)) == len(kinds(happened, events.CheckpointRecovered))
            await until(lambda: consumer.status().shards and consumer.status().shards[0].lag == 0, "the tip")
            await consumer.stop()
            await running

    run(main)


def test_a_listing_that_failed_and_works_again_is_reported():
    async def main():
        async with stream_world(1) as world:
            happened = []
            consumer, running = consume(world, happened)
            await until(lambda: kinds(happened, events.ShardStarted), "the start")
            world.kinesis.faults.on("ListShards").error("InternalFailure", "a bad day")
            await until(lambda: kinds(happened, events.ListingFailed), "the failure")
            world.kinesis.faults.clear()
            await until(lambda: kinds(happened, events.ListingRecovered), "the end")
            await consumer.stop()
            await running

    run(main)


def test_a_stopped_shard_is_named_again_and_its_retry_is_reported():
    async def main():
        async with stream_world(2) as world:
            happened, store, poisoned = [], MemoryLeaseStore(), True

            async def handle(record):
                if poisoned:
                    raise ValueError("poison")

            world.put("a")  # the other shard goes on
            options = {"leases": store, "on_failure": Retry(attempts=1)}
            consumer, running = consume(world, happened, handle, **options)
            await until(lambda: kinds(happened, events.ShardStillStopped), "the reminder", 400)
            (reminder,) = kinds(happened, events.ShardStillStopped)
            assert reminder.lag == pytest.approx(301, abs=5)
            assert "poison" in str(reminder)
            await consumer.stop()
            await running
            poisoned = False
            consumer, running = consume(world, happened, handle, **options)
            await until(lambda: kinds(happened, events.ShardStarted)[3:], "the retry")
            assert any("is tried again" in str(event) for event in kinds(happened, events.ShardStarted)[2:])
            await until(lambda: consumer.status().lag == 0, "the tip")
            await consumer.stop()
            await running

    run(main, seconds=3_000)


# alerts


def test_an_alert_fires_and_clears_with_an_event_and_a_hook():
    async def main():
        async with stream_world(1) as world:
            happened, called, is_slow = [], [], True

            async def handle(record):
                await asyncio.sleep(20 if is_slow else 0)

            alert = Alert(lag=5.0, for_periods=2, period=60, hook=called.append)
            consumer, running = consume(world, happened, handle, alerts=[alert])
            await until(lambda: kinds(happened, events.ShardStarted), "the start")
            world.put("a" * 20)
            await until(lambda: called, "the alert", 300)
            (fired,) = kinds(happened, events.AlertFired)
            assert called == [fired]
            assert (fired.limit, fired.seconds, fired.shard_id) == (5.0, 120.0, "shardId-000000000000")
            assert fired.lag > 60
            is_slow = False
            await until(lambda: len(called) == 2, "the end of the alert", 300)
            (cleared,) = kinds(happened, events.AlertCleared)
            assert called[1] is cleared
            await consumer.stop()
            await running

    run(main, seconds=3_000)


def test_an_alert_whose_hook_fails_ends_nothing():
    async def main():
        async with stream_world(1) as world:
            happened, seen = [], []

            def fail(event):
                raise RuntimeError("the pager is down")

            async def slow(record):
                await asyncio.sleep(15)
                seen.append(record)

            alerts = [Alert(lag=2.0, for_periods=1, period=5, hook=fail)]
            consumer, running = consume(world, happened, slow, alerts=alerts)
            world.put("abc")
            await until(lambda: len(seen) == 3, "all records")
            assert "the pager is down" in str(kinds(happened, events.HookFailed)[0])
            await consumer.stop()
            await running

    run(main)


@pytest.mark.parametrize("alerts", [Alert(lag=5.0), "lag", [5.0], 3])
def test_alerts_are_a_list_of_alerts(alerts):
    async def main():
        async with stream_world(1) as world:
            with pytest.raises(ConfigurationError, match="alerts is"):
                world.consumer(app="billing", alerts=alerts)

    run(main)


def test_an_async_hook_is_refused():
    async def hook(event):
        pass

    async def main():
        async with stream_world(1) as world:
            with pytest.raises(ConfigurationError, match="not an async function"):
                world.consumer(app="billing", alerts=[Alert(lag=5.0, hook=hook)])

    run(main)
