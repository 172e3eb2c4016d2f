"""A lease store that forgets: a worker that knows better stops loudly, and begins nothing a second time (rule L14)."""

import asyncio

import pytest
from msgspec.structs import replace

from anabranch import events
from anabranch._model.leases import AppRow, LeaseRow, MemberRow, StreamRow
from anabranch.config import ConsumerSettings, PollingSettings
from anabranch.errors import LeaseStoreInvalidError
from anabranch.stores.memory import MemoryLeaseStore
from memory_rows import forget, forget_last_lease, replace_rows, stored

from simulated_stream import numbers, run, stream_world, until


class ForgetfulStore(MemoryLeaseStore):
    storage = "first"

    async def identity(self):
        return self.storage

    def fail_over(self):
        """To another storage, that has heard of no member and no lease."""
        self.storage = "second"
        forget(self, MemberRow, LeaseRow)


def become_another(store):
    replace_rows(store, AppRow, lambda row: replace(row, app_id="another"))


def replaced_by_another(store):
    become_another(store)
    store.fail_over()


def without_its_streams(store):
    forget(store, StreamRow)
    store.fail_over()


def in_the_middle_of_its_beginning(store):
    replace_rows(store, StreamRow, lambda row: replace(row, bootstrapped=False, version=0))
    store.fail_over()


@pytest.mark.parametrize("forget", [replaced_by_another, without_its_streams, in_the_middle_of_its_beginning])
def test_a_worker_whose_application_the_store_has_forgotten_stops_and_creates_nothing(forget):
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
            assert not stored(store, LeaseRow)

    run(main)
    assert len(seen) == 3
    assert any(isinstance(event, events.StoreReset) for event in happened)


class BodyError(Exception):
    """Of the caller's own loop."""


@pytest.mark.parametrize("leaving", [BodyError, asyncio.CancelledError])
def test_an_error_of_the_loop_body_carries_that_of_a_consumer_that_has_failed_meanwhile(leaving):
    happened = []

    async def main():
        store = ForgetfulStore()
        async with stream_world(1) as world:
            world.put(["a"])
            async with world.consumer(app="billing", leases=store, on_event=happened.append) as consumer:
                async for _ in consumer:
                    without_its_streams(store)
                    await until(lambda: any(isinstance(event, events.StoreReset) for event in happened), "the end")
                    raise leaving

    with pytest.raises(leaving) as caught:
        run(main)
    if leaving is BodyError:  # asyncio makes another CancelledError for whoever awaits the task
        assert isinstance(caught.value.__context__, LeaseStoreInvalidError)
        (note,) = caught.value.__notes__
        assert note.startswith("the consumer also failed: LeaseStoreInvalidError: ")
    (told,) = [event for event in happened if isinstance(event, events.ConsumerFailed)]
    assert told.error.startswith("LeaseStoreInvalidError: ")


class StoreThatIsBegunAnew(MemoryLeaseStore):
    """By another, in the moment in which a worker looks for what is missing there."""

    is_due = False

    async def read_leases(self, *, with_finished=False):
        if self.is_due and with_finished:
            self.is_due = False
            become_another(self)
            forget_last_lease(self)
        return await super().read_leases(with_finished=with_finished)


@pytest.mark.parametrize("occasion", ["a listing", "the end of a shard"])
def test_a_worker_creates_no_lease_in_a_store_that_another_worker_started_again(occasion):
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
            assert [row.key.shard_id for row in stored(store, LeaseRow)] == ["shardId-000000000000"]

    run(main)


WINDOWS = {
    "after the application's row": ("poll", 1),
    "after the fleet was looked at": ("read_streams", 1),
    "before the stream's row": ("put_stream", 1),
    "after the stream's row": ("read_leases", 1),
    "before the first lease": ("create_lease", 1),
    "between two leases": ("create_lease", 2),
    "after the last lease": ("read_leases", 2),
    "before the mark": ("write_stream", 1),
    "after the mark": ("register_member", 1),
    "after the member's row": ("poll", 2),
}


class StoreThatIsEmptiedInAStart(MemoryLeaseStore):
    """Before the call of that name and number, so that it takes effect in the store that is empty, or another's."""

    def __init__(self, name, number, *, begun_anew):
        super().__init__()
        self.begun_anew, self.calls_left = begun_anew, number
        call = getattr(self, name)

        async def call_in_the_window(*args, **options):
            self.calls_left -= 1
            if not self.calls_left:
                self.empty()
            return await call(*args, **options)

        setattr(self, name, call_in_the_window)

    def empty(self):
        forget(self, MemberRow, LeaseRow, StreamRow)
        if self.begun_anew:
            become_another(self)
        else:
            forget(self, AppRow)


@pytest.mark.parametrize("begun_anew", [pytest.param(False, id="emptied"), pytest.param(True, id="begun anew")])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_start_leaves_nothing_in_a_store_that_was_emptied_under_it(window, begun_anew):
    happened, seen = [], []

    async def main():
        store = StoreThatIsEmptiedInAStart(*WINDOWS[window], begun_anew=begun_anew)
        async with stream_world(2) as world:
            world.put(["a", "b", "c"])
            consumer = world.consumer(app="billing", leases=store, on_event=happened.append)
            with pytest.raises(LeaseStoreInvalidError, match="no longer holds application 'billing'"):
                await consumer.run(seen.append, handle_signals=False)
            assert store.calls_left <= 0
            assert bool(stored(store, AppRow)) == begun_anew
            assert not seen
            async with world.consumer(app="billing", leases=store, start="trim_horizon") as successor:
                async for record in successor:
                    seen.append(record)
                    if len(seen) == 3:
                        break

    run(main)
    assert sorted(numbers(seen)) == [0, 1, 2]
    assert any(isinstance(event, events.StoreReset) for event in happened)


def test_a_worker_that_finds_no_lease_of_a_stream_that_was_read_begins_nothing():
    async def main():
        store, seen = MemoryLeaseStore(), []
        async with stream_world(1) as world:
            world.put(["a"])
            consumer = world.consumer(app="billing", leases=store)
            running = asyncio.create_task(consumer.run(seen.append, handle_signals=False))
            await until(lambda: len(seen) == 1, "the record")
            await consumer.stop()
            await running
            forget(store, LeaseRow)
            again = world.consumer(app="billing", leases=store)
            with pytest.raises(
                LeaseStoreInvalidError, match=r"has already read stream orders, but the lease store has no leases"
            ):
                await again.run(seen.append, handle_signals=False)
            assert not stored(store, LeaseRow)

    run(main)
