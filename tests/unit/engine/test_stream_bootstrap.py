"""How a stream begins: by any worker, whatever its store forgets meanwhile, and in one application only."""

import asyncio
import random

import pytest
from msgspec.structs import replace

from anabranch._engine.ports import Ports
from anabranch._engine.shard_discovery import StreamBootstrap
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import AppRow
from anabranch._model.shards import Shard
from anabranch._model.streams import StreamName
from anabranch._wire.messages import ListShardsResponse, StreamSummary
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.events import StoreReset
from anabranch.limits import HASH_KEY_MAX
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.testing.clock import ManualClock

from stream_world import run

APP = AppRow(app="billing", app_id="1", created_wall_ms=1)
ANOTHER = replace(APP, app_id="2")
NAMES = ["shardId-000000000000", "shardId-000000000001"]
HALF = HASH_KEY_MAX // 2


class TwoShards:
    """All of Kinesis that a beginning asks for."""

    async def list_shards(self, stream, *, shard_filter, next_token):
        ranges = HashKeyRange(0, HALF), HashKeyRange(HALF + 1, HASH_KEY_MAX)
        return ListShardsResponse(
            tuple(
                Shard(shard_id=name, hash_key_range=part, starting_sequence_number=number)
                for number, (name, part) in enumerate(zip(NAMES, ranges, strict=True))
            )
        )


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

    def empty(self, app=None):
        self._app, self._streams, self._leases = app, {}, {}

    @property
    def shards(self):
        return [key.shard_id for key in sorted(self._leases)]


async def begin(store, app=APP, *, seconds=1_700_000_000.0, happened=None):
    """One worker's beginning, at that time by the service's clock."""
    emit = [].append if happened is None else happened.append
    ports = Ports(kinesis=TwoShards(), store=store, clock=SkippingClock(), entropy=random.Random(1), emit=emit)
    summary = StreamSummary(
        name="orders",
        arn="arn:aws:kinesis:eu-west-1:123456789012:stream/orders",
        status="ACTIVE",
        created_seconds=1_600_000_000.0,
        retention_hours=24,
        open_shard_count=2,
        server_seconds=seconds,
    )
    opened = await store.open(app)
    beginning = StreamBootstrap(ports, opened, "latest", call_deadline_ms=1000, start_timeout_ms=5000)
    return await beginning.begin(StreamName("orders"), summary)


class SkippingClock(ManualClock):
    async def sleep_until_ms(self, at_ms):
        self.advance(max(0, at_ms - self.now_ms()))
        await asyncio.sleep(0)


def test_leases_that_the_store_forgot_are_made_again_before_the_mark():
    async def main():
        store = StoreWithAMishap()
        store.happens("create_lease", 2, store._leases.clear)
        row = await begin(store)
        assert row.bootstrapped
        assert store.shards == NAMES
        assert await store.read_streams() == [row]

    run(main)


def test_a_stream_that_the_store_forgot_in_its_beginning_is_put_there_again_with_the_same_origin():
    async def main():
        store = StoreWithAMishap()
        put = []

        def go_back():
            put.extend(store._streams.values())
            store.empty(APP)

        store.happens("write_stream", 1, go_back)
        row = await begin(store)
        assert [row] == [replace(put[0], bootstrapped=True, version=1)]
        assert await store.read_streams() == [row]
        assert store.shards == NAMES

    run(main)


def test_a_mark_that_the_store_forgot_together_with_the_leases_is_no_error():
    async def main():
        store = StoreWithAMishap()
        begun = await begin(store)

        def go_back():
            store._streams[begun.stream_key] = replace(begun, bootstrapped=False, version=0)
            store._leases.clear()

        store.happens("read_leases", 1, go_back)
        assert await begin(store, seconds=1_700_000_900.0) == begun
        assert store.shards == NAMES

    run(main)


def test_what_another_has_completed_in_the_same_moment_is_taken_as_it_is():
    async def main():
        store = StoreWithAMishap()

        def complete():
            ((key, row),) = store._streams.items()
            store._streams[key] = replace(row, bootstrapped=True, version=row.version + 1)

        store.happens("write_stream", 1, complete)
        assert await begin(store) == (await store.read_streams())[0]

    run(main)


def test_no_lease_is_made_of_what_was_missing_before_another_completed_the_beginning():
    """Its shard may have been read, trimmed and cleaned up while this worker stood still."""

    async def main():
        store = StoreWithAMishap()

        def complete():
            ((key, row),) = store._streams.items()
            store._streams[key] = replace(row, bootstrapped=True, version=row.version + 1)

        store.happens("read_streams", 2, complete)
        assert (await begin(store)).bootstrapped
        assert store.shards == NAMES[:1]

    run(main)


class StoreWhoseAnswerIsLost(MemoryLeaseStore):
    answers_lost = 1

    async def write_stream(self, row, expected_version, *, app_id):
        answer = await super().write_stream(row, expected_version, app_id=app_id)
        if self.answers_lost:
            self.answers_lost -= 1
            raise LeaseStoreError("the connection was lost")
        return answer


def test_a_mark_whose_answer_was_lost_is_found():
    async def main():
        store = StoreWhoseAnswerIsLost()
        row = await begin(store)
        assert (row.bootstrapped, row.version) == (True, 1)

    run(main)


class StoreThatFailsOver(MemoryLeaseStore):
    """To a copy that lags, in the moment of the first mark."""

    is_due = True

    async def write_stream(self, row, expected_version, *, app_id):
        if self.is_due:
            self.is_due = False
            self._leases.popitem()
            raise LeaseStoreError("the connection was lost: the store has failed over")
        return await super().write_stream(row, expected_version, app_id=app_id)


def test_a_mark_is_not_tried_again_without_a_look_at_the_leases():
    async def main():
        store = StoreThatFailsOver()
        assert (await begin(store)).bootstrapped
        assert [key.shard_id for key in sorted(store._leases)] == NAMES

    run(main)


def test_a_stream_that_was_begun_and_has_no_lease_is_an_error_and_stays_as_it_is():
    async def main():
        store = StoreWithAMishap()
        begun = await begin(store)
        store._leases.clear()
        with pytest.raises(
            LeaseStoreInvalidError, match=r"orders was begun by application 'billing'.*anabranch apps delete billing"
        ):
            await begin(store)
        assert store.shards == []
        assert await store.read_streams() == [begun]

    run(main)


@pytest.mark.parametrize("app", [None, ANOTHER], ids=["emptied", "begun anew"])
@pytest.mark.parametrize(
    "name, number", [("put_stream", 1), ("create_lease", 1), ("create_lease", 2), ("write_stream", 1)]
)
def test_nothing_is_made_in_a_store_that_was_emptied_just_before(name, number, app):
    async def main():
        store, happened = StoreWithAMishap(), []
        store.happens(name, number, lambda: store.empty(app))
        with pytest.raises(LeaseStoreInvalidError, match="Nothing was created in its place"):
            await begin(store, happened=happened)
        assert not store._streams
        assert not store._leases
        assert [type(event) for event in happened] == [StoreReset]

    run(main)


@pytest.mark.parametrize("number", range(1, 7))
def test_two_that_begin_at_once_in_an_emptied_store_leave_it_to_a_third(number):
    """Whichever of their writes comes first after it."""

    async def main():
        store = StoreWithAMishap()
        writes = []

        def note(call):
            async def noted(*args, **options):
                await asyncio.sleep(0)  # so that the two take turns
                writes.append(call.__name__)
                if len(writes) == number:
                    store.empty(ANOTHER)
                return await call(*args, **options)

            return noted

        for name in ("put_stream", "create_lease", "write_stream"):
            setattr(store, name, note(getattr(store, name)))
        await store.open(APP)
        ends = await asyncio.gather(begin(store), begin(store), return_exceptions=True)
        assert all(isinstance(end, LeaseStoreInvalidError) for end in ends), ends
        assert not store._leases
        row = await begin(store, ANOTHER, seconds=1_700_000_900.0)
        assert row.origin.timestamp_seconds == 1_700_000_895.0
        assert store.shards == NAMES

    run(main)
