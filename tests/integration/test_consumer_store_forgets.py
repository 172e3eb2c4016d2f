"""A lease store that forgets: a worker that knows better stops loudly, and begins nothing a second time (rule L14)."""

import asyncio

import pytest

from anabranch import events
from anabranch._model.leases import AppRow, LeaseRow
from anabranch.config import ConsumerSettings, PollingSettings
from anabranch.errors import LeaseStoreInvalidError
from anabranch.stores.memory import MemoryLeaseStore

from stream_world import run, stream_world, until


class ForgetfulStore(MemoryLeaseStore):
    storage = "first"

    async def incarnation(self):
        return self.storage

    def fail_over(self):
        """To another storage, that has heard of no member and no lease."""
        self.storage = "second"
        for rows in (self._members, self._leases):
            rows.clear()


def replaced_by_another(store):
    store._app = AppRow(app="billing", app_id="another", created_wall_ms=0)
    store.fail_over()


def without_its_streams(store):
    store._streams.clear()
    store.fail_over()


def in_the_middle_of_its_beginning(store):
    for key, row in list(store._streams.items()):
        store._streams[key] = type(row)(
            stream_key=row.stream_key,
            name=row.name,
            arn=row.arn,
            created_seconds=row.created_seconds,
            origin=row.origin,
        )
    store.fail_over()


@pytest.mark.parametrize("forget", [replaced_by_another, without_its_streams, in_the_middle_of_its_beginning])
def test_a_worker_whose_application_the_store_has_forgotten_stops_and_begins_nothing_anew(forget):
    seen, happened = [], []

    async def main():
        store = ForgetfulStore()
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            consumer = world.consumer(app="billing", leases=store, on_event=happened.append)
            running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
            await until(lambda: len(seen) == 3, "the records")
            forget(store)
            with pytest.raises(LeaseStoreInvalidError, match="no longer holds application 'billing'"):
                await running
            assert not store._leases

    run(main)
    assert len(seen) == 3
    assert any(isinstance(event, events.StoreReset) for event in happened)


class StoreThatIsBegunAnew(MemoryLeaseStore):
    """By another, in the moment in which a worker looks for what is missing there."""

    is_due = False

    async def read_leases(self, *, with_finished=False):
        if self.is_due and with_finished:
            self.is_due = False
            self._app = AppRow(app="billing", app_id="another", created_wall_ms=0)
            first = min(self._leases, key=lambda key: key.shard_id)
            self._leases = {first: LeaseRow(key=first)}
        return await super().read_leases(with_finished=with_finished)


@pytest.mark.parametrize("occasion", ["a listing", "the end of a shard"])
def test_a_worker_makes_no_lease_in_a_store_that_another_has_begun_anew(occasion):
    interval = 1 if occasion == "a listing" else 60

    async def main():
        store, seen = StoreThatIsBegunAnew(), []
        async with stream_world(2) as world:
            world.put(["a"] * 3)
            settings = ConsumerSettings(polling=PollingSettings(listing_interval=interval))
            consumer = world.consumer(app="billing", leases=store, settings=settings)
            running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
            await until(lambda: len(seen) == 3, "the records")
            store.is_due = True
            if occasion == "the end of a shard":
                world.split("shardId-000000000000")
            with pytest.raises(LeaseStoreInvalidError, match="no longer holds application 'billing'"):
                await running
            assert [key.shard_id for key in store._leases] == ["shardId-000000000000"]

    run(main)
