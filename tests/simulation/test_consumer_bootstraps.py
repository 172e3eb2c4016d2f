"""How an application's first worker begins a stream, whatever its store forgets meanwhile."""

import asyncio

import pytest
from msgspec.structs import replace

from anabranch._model.leases import AppRow, LeaseRow, StreamRow
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.stores.memory import MemoryLeaseStore
from memory_rows import forget, forget_last_lease, replace_rows, set_app, stored

from simulated_stream import now_ms, run, stream_world, until

SHARDS = ["shardId-000000000000", "shardId-000000000001"]


class StoreWithAMishap(MemoryLeaseStore):
    """Something happens right before the call of that name and number."""

    def happens(self, name, number, mishap):
        call, calls = getattr(self, name), []

        async def call_after_it(*args, **options):
            calls.append(name)
            if len(calls) == number:
                mishap()
            return await call(*args, **options)

        setattr(self, name, call_after_it)

    def complete(self):
        """Another worker marks the stream as begun."""
        replace_rows(self, StreamRow, lambda row: replace(row, bootstrapped=True, version=row.version + 1))


async def begin(world, store):
    """Starts a worker, and stops it once it has joined. Returns the stream's row and the shards that have a lease."""
    consumer = world.consumer(app="billing", leases=store, start="latest")
    running = asyncio.create_task(consumer.run(lambda _: None))
    await until(lambda: running.done() or consumer.status().member_id is not None, "the worker")
    if not running.done():
        await consumer.stop()
    await running
    (row,) = await store.read_streams()
    return row, [lease.key.shard_id for lease in await store.read_leases()]


def test_leases_that_the_store_forgot_are_made_again_before_the_mark():
    async def main():
        async with stream_world(2) as world:
            store = StoreWithAMishap()
            store.happens("create_lease", 2, lambda: forget(store, LeaseRow))
            row, shards = await begin(world, store)
            assert row.bootstrapped
            assert shards == SHARDS

    run(main)


def test_a_stream_that_the_store_forgot_in_its_beginning_is_put_there_again_with_the_same_origin():
    async def main():
        async with stream_world(2) as world:
            store, forgotten = StoreWithAMishap(), []

            def go_back():
                forgotten.extend(stored(store, StreamRow))
                forget(store, StreamRow, LeaseRow)

            store.happens("write_stream", 1, go_back)
            row, shards = await begin(world, store)
            assert row == replace(forgotten[0], bootstrapped=True, version=1)
            assert shards == SHARDS

    run(main)


def test_a_mark_that_the_store_forgot_together_with_the_leases_is_no_error():
    async def main():
        async with stream_world(2) as world:
            store = StoreWithAMishap()
            begun, _ = await begin(world, store)

            def go_back():
                replace_rows(store, StreamRow, lambda row: replace(row, bootstrapped=False, version=0))
                forget(store, LeaseRow)

            store.happens("read_leases", 1, go_back)
            await asyncio.sleep(900)
            assert await begin(world, store) == (begun, SHARDS)

    run(main, 10_000)


def test_what_another_has_completed_in_the_same_moment_is_taken_as_it_is():
    async def main():
        async with stream_world(2) as world:
            store = StoreWithAMishap()
            store.happens("write_stream", 1, store.complete)
            row, shards = await begin(world, store)
            assert (row.bootstrapped, row.version) == (True, 1)
            assert shards == SHARDS

    run(main)


def test_no_lease_is_made_of_what_was_missing_before_another_completed_the_beginning():
    """Its shard may have been read, trimmed and cleaned up while this worker was paused."""

    async def main():
        async with stream_world(2) as world:
            store = StoreWithAMishap()
            store.happens("read_streams", 3, store.complete)
            row, shards = await begin(world, store)
            assert row.bootstrapped
            assert shards == SHARDS[:1]

    run(main)


def test_a_mark_whose_answer_was_lost_is_found():
    class StoreWhoseAnswerIsLost(MemoryLeaseStore):
        answers_lost = 1

        async def write_stream(self, row, expected_version):
            answer = await super().write_stream(row, expected_version)
            if self.answers_lost:
                self.answers_lost -= 1
                raise LeaseStoreError("the connection was lost")
            return answer

    async def main():
        async with stream_world(2) as world:
            row, shards = await begin(world, StoreWhoseAnswerIsLost())
            assert (row.bootstrapped, row.version) == (True, 1)
            assert shards == SHARDS

    run(main)


def test_a_mark_is_not_tried_again_before_the_leases_are_read_again():
    class StoreThatFailsOver(MemoryLeaseStore):
        """To a copy that lags, in the moment of the first mark."""

        is_due = True

        async def write_stream(self, row, expected_version):
            if self.is_due:
                self.is_due = False
                forget_last_lease(self)
                raise LeaseStoreError("the connection was lost: the store has failed over")
            return await super().write_stream(row, expected_version)

    async def main():
        async with stream_world(2) as world:
            row, shards = await begin(world, StoreThatFailsOver())
            assert row.bootstrapped
            assert shards == SHARDS

    run(main)


@pytest.mark.parametrize("number", range(1, 7))
def test_two_that_begin_at_once_in_an_emptied_store_leave_it_to_a_third(number):
    """Whichever of their writes comes first after it."""

    async def main():
        async with stream_world(2) as world:
            store, writes = MemoryLeaseStore(), []

            def note(call):
                async def noted(*args, **options):
                    await asyncio.sleep(0.001)  # so that the two take turns
                    writes.append(call.__name__)
                    if len(writes) == number:
                        another = AppRow(app="billing", app_id="another", created_wall_ms=0, incarnation="memory")
                        forget(store, StreamRow, LeaseRow)
                        set_app(store, another)
                    return await call(*args, **options)

                return noted

            for name in ("put_stream", "create_lease", "write_stream"):
                setattr(store, name, note(getattr(store, name)))
            ends = await asyncio.gather(begin(world, store), begin(world, store), return_exceptions=True)
            assert all(isinstance(end, LeaseStoreInvalidError) for end in ends), ends
            await asyncio.sleep(900)
            row, shards = await begin(world, store)
            assert now_ms() / 1000 - row.origin.timestamp_seconds < 10
            assert shards == SHARDS

    run(main, 10_000)
