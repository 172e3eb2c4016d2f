"""`Application` on a fleet that runs: what it sees. What it makes of killed processes is in tests/integration."""

import asyncio

import pytest

from anabranch import Alert, Application, Retry, events
from anabranch._model.leases import AppRow
from anabranch.errors import ConfigurationError, LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.reasons import NoLiveWorker
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import _CLOCK, run, stream_world


def application_of(store):
    return Application("billing", leases=store, clock=_CLOCK)


async def ready(application, condition, what):
    while not condition(status := await application.status()):  # noqa: ASYNC110 -- rows of another task
        await asyncio.sleep(0.05)
    assert status is not None, what
    return status


def test_members_shards_lag_and_rate_of_a_running_fleet_are_seen():
    async def main():
        async with stream_world(2) as world:
            store = MemoryLeaseStore()
            consumer = world.consumer(app="billing", leases=store)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(consumer.run(lambda record: None, handle_signals=False))
                application = application_of(store)
                world.put([f"user-{n}" for n in range(200)])
                while await store.read_app() is None:  # noqa: ASYNC110 -- made by the other task
                    await asyncio.sleep(0.01)
                status = await ready(application, lambda one: one.records_per_second > 0, "a rate")
                assert [shard.state for shard in status.shards] == ["reading", "reading"]
                assert status.millis_behind_latest is not None
                status = await application.status(watch=True)
                assert [(member.state, member.heartbeat_seen, member.shard_count) for member in status.members] == [
                    ("live", True, 2)
                ]
                with pytest.raises(UsageError, match="has live workers"):
                    await application.delete()
                await consumer.stop()
                await task
                status = await application.status()
                assert [member.state for member in status.members] == ["left"]
                assert {shard.reason for shard in status.shards} == {NoLiveWorker()}
                assert sum(shard.records_handled for shard in status.shards) == 200
                await application.delete()
                with pytest.raises(LeaseStoreInvalidError, match="'billing' was deleted in the meantime"):
                    await application.status()

    run(main)


def test_a_shard_that_stopped_is_seen_with_its_record():
    async def main():
        async with stream_world(1) as world:
            store = MemoryLeaseStore()
            consumer = world.consumer(app="billing", leases=store, on_failure=Retry(attempts=1))

            async def fail(record):
                raise ValueError("no such customer")

            async with asyncio.TaskGroup() as group:
                task = group.create_task(consumer.run(fail, handle_signals=False))
                world.put(["user-1"])
                stopped = []
                while not stopped:
                    await asyncio.sleep(0.02)
                    rows = await store.read_leases() if await store.read_app() else []
                    stopped = [row for row in rows if row.stopped is not None]
                async with application_of(store) as application:
                    (shard,) = (await application.status()).stalled_shards
                assert shard.state == "stopped"
                assert shard.stopped.partition_key == "user-1"
                assert "ValueError: no such customer" in shard.reason.error
                await consumer.stop()
                await task

    run(main)


@pytest.mark.parametrize("error", [LeaseStoreError("busy"), LeaseStoreInvalidError("read-only")])
def test_a_store_that_refuses_writes_can_still_be_looked_at(error):
    class ReadOnlyStore(MemoryLeaseStore):
        async def renew_watch(self):
            raise error

    async def main():
        store = ReadOnlyStore()
        await store.open(AppRow(app="billing", app_id="id", created_wall_ms=0))
        assert (await application_of(store).status()).app == "billing"

    run(main)


def test_a_watch_alerts_on_the_whole_fleet_also_when_its_last_worker_is_gone():
    async def main():
        async with stream_world(1) as world:
            store, happened, called = MemoryLeaseStore(), [], []
            consumer = world.consumer(app="billing", leases=store)
            task = asyncio.create_task(consumer.run(lambda record: None, handle_signals=False))
            while await store.read_app() is None:  # noqa: ASYNC110 -- made by the other task
                await asyncio.sleep(0.01)
            alert = Alert(lag=1.0, for_periods=1, period=1, hook=called.append)
            watch = application_of(store).watch(interval=0.1, alerts=[alert], on_event=happened.append)
            async for status in watch:
                if status.lag == 0.0:
                    break
            await consumer.stop()
            await task
            async for _ in watch:
                if called:
                    break
            (fired,) = happened
            assert isinstance(fired, events.AlertFired)
            assert (called, fired.reason) == ([fired], NoLiveWorker())
            await watch.aclose()

    run(main)


def test_a_watch_survives_an_unreachable_store():
    class Store(MemoryLeaseStore):
        is_away = False

        async def poll(self):
            if self.is_away:
                raise LeaseStoreError("connection refused")
            return await super().poll()

    async def main():
        store, happened = Store(), []
        await store.open(AppRow(app="billing", app_id="id", created_wall_ms=0))
        watch = application_of(store).watch(interval=0.1, on_event=happened.append)
        await anext(watch)
        store.is_away = True
        following = asyncio.create_task(anext(watch))
        while not happened:  # noqa: ASYNC110 -- told by the other task
            await asyncio.sleep(0.01)
        store.is_away = False
        assert (await following).app == "billing"
        assert [type(event) for event in happened] == [events.StoreUnanswered, events.StoreAnswered]
        await watch.aclose()

    run(main)


@pytest.mark.parametrize("options", [{"interval": 60.0}, {"interval": 0.0}, {"interval": "5"}, {"alerts": [5.0]}])
def test_a_watch_with_wrong_options_is_refused(options):
    async def main():
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            await anext(application_of(MemoryLeaseStore()).watch(**options))

    run(main)


@pytest.mark.parametrize(
    "options", [{"target_lag": 0}, {"catch_up": "5"}, {"worker_rate": -1.0}, {"minimum": 3, "maximum": 2}]
)
def test_wrong_options_of_the_advice_are_refused(options):
    async def main():
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            await application_of(MemoryLeaseStore()).desired_workers(**options)

    run(main)
