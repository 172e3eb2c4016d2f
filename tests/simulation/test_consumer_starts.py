"""A start that meets a stream, a lease store or an earlier worker that is not ready for it."""

import asyncio
from dataclasses import replace

import pytest

from anabranch import events
from anabranch._model.leases import AppRow, HeartbeatWrite, MemberRow
from anabranch.errors import (
    AccessDeniedError,
    LeaseStoreError,
    LeaseStoreInvalidError,
    ThrottledError,
    TransportError,
)
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import QUICK, run, stream_world, until

START_CALLS = ("DescribeStreamSummary", "ListShards")


async def started_after(world, *, put=True, **options):
    """How many seconds pass before a new consumer handles a record."""
    if put:
        world.put("a")
    begun = asyncio.get_running_loop().time()
    consumer = world.consumer(**{"app": "billing", "leases": "memory://", **options})
    seconds = []

    async def handle(_):
        seconds.append(asyncio.get_running_loop().time() - begun)
        await consumer.stop()

    await consumer.run(handle)
    return seconds[0]


async def failed_after(error, world, **options):
    """How many seconds pass before a new consumer raises this error; and the error."""
    begun = asyncio.get_running_loop().time()
    consumer = world.consumer(**{"app": "billing", "leases": "memory://", **options})
    with pytest.raises(error) as raised:
        await consumer.run(lambda _: None)
    return asyncio.get_running_loop().time() - begun, raised.value


# the stream


@pytest.mark.parametrize("operation", START_CALLS)
def test_a_start_outlasts_a_minute_of_throttling(operation):
    async def main():
        async with stream_world(1) as world:
            world.kinesis.faults.on(operation).throttle()
            asyncio.get_running_loop().call_later(60, world.kinesis.faults.clear)
            assert 60 < await started_after(world) < 70

    run(main)


@pytest.mark.parametrize("operation", START_CALLS)
def test_a_stream_that_throttles_is_asked_for_as_long_as_the_start_may_take(operation):
    async def main():
        async with stream_world(1) as world:
            world.kinesis.faults.on(operation).throttle()
            seconds, _ = await failed_after(ThrottledError, world)
            assert 110 < seconds <= 120

    run(main)


@pytest.mark.parametrize("operation", START_CALLS)
def test_an_unreachable_endpoint_is_named_within_seconds(operation):
    async def main():
        async with stream_world(1) as world:
            world.kinesis.faults.on(operation).drop()
            seconds, _ = await failed_after(TransportError, world)
            assert 0.1 < seconds <= 5

    run(main)


@pytest.mark.parametrize("operation", START_CALLS)
def test_a_call_that_is_denied_is_not_tried_again(operation):
    async def main():
        async with stream_world(1) as world:
            rule = world.kinesis.faults.on(operation).error("AccessDeniedException", "no permission")
            await failed_after(AccessDeniedError, world)
            assert rule.matched == 1

    run(main)


def test_a_stream_that_is_being_created_is_waited_for():
    async def main():
        async with stream_world(1, state_delay=20) as world:
            asyncio.get_running_loop().call_later(21, world.put, "a")
            assert 20 < await started_after(world, put=False) < 25

    run(main)


def test_a_stream_that_is_created_for_too_long_is_named():
    async def main():
        async with stream_world(1, state_delay=1_000) as world:
            seconds, error = await failed_after(TransportError, world)
            assert 110 < seconds < 130
            assert "orders is still CREATING" in str(error)

    run(main)


# the lease store


class SlowToOpen(MemoryLeaseStore):
    """Its first calls of `open` have no answer, or an error."""

    def __init__(self, failures, error=None):
        super().__init__()
        self.opened = 0
        self._failures = failures
        self._error = error

    async def open(self, app):
        self.opened += 1
        if self.opened <= self._failures:
            if self._error is not None:
                raise self._error
            await asyncio.Event().wait()
        return await super().open(app)


def test_a_store_call_that_never_answers_is_given_up_and_made_again():
    async def main():
        async with stream_world(1) as world:
            store = SlowToOpen(1)
            await started_after(world, leases=store)
            assert store.opened == 2

    run(main)


def test_a_store_that_never_answers_is_named_in_the_end():
    async def main():
        async with stream_world(1) as world:
            _, error = await failed_after(LeaseStoreError, world, leases=SlowToOpen(1_000))
            assert "memory:// gave no answer within" in str(error)

    run(main, 10_000)


def test_a_store_that_fails_for_a_while_delays_the_start_and_is_reported_less_and_less_often():
    async def main():
        async with stream_world(1) as world:
            happened = []
            store = SlowToOpen(9, LeaseStoreError("the disk is full"))
            await started_after(world, leases=store, on_event=happened.append)
            told = [event for event in happened if isinstance(event, events.StoreUnanswered)]
            assert [event.failure_count for event in told] == [2, 4, 8]
            assert "the disk is full" in str(told[0])

    run(main)


def test_a_store_that_is_wrong_for_good_is_named_at_once():
    async def main():
        async with stream_world(1) as world:
            store = SlowToOpen(1_000, LeaseStoreInvalidError("another schema"))
            await failed_after(LeaseStoreInvalidError, world, leases=store)
            assert store.opened == 1

    run(main)


# a worker whose name nobody else may have (rule L17)


def named(*, exclusive):
    return replace(QUICK, leases=replace(QUICK.leases, worker_id="pod-0", worker_id_exclusive=exclusive))


async def with_an_earlier_run(store):
    """Of the same name, and of another order, so that it would refuse us while it is there."""
    await store.open(AppRow(app="billing", app_id="1", created_wall_ms=1))
    await store.register_member(MemberRow(member_id="pod-0#1", expiry_ms=3_000, order="key", counter=7))
    return store


@pytest.mark.parametrize("exclusive", [True, False])
def test_the_earlier_run_of_an_exclusive_name_is_sealed_at_once_and_any_other_is_waited_for(exclusive):
    async def main():
        async with stream_world(1) as world:
            store, happened = await with_an_earlier_run(MemoryLeaseStore()), []
            options = {"leases": store, "settings": named(exclusive=exclusive), "on_event": happened.append}
            seconds = await started_after(world, **options)
            assert (seconds < 1) == exclusive
            sealed = [event.member_id for event in happened if isinstance(event, events.MemberEvicted)]
            assert sealed == (["pod-0#1"] if exclusive else [])

    run(main)


def test_an_exclusive_name_ends_no_worker_of_another_name():
    async def main():
        async with stream_world(2) as world:
            store = MemoryLeaseStore()
            neighbour = world.consumer(app="billing", leases=store)
            running = asyncio.create_task(neighbour.run(lambda _: None))
            await until(lambda: neighbour.status().member_id is not None, "the neighbour")
            newcomer = world.consumer(app="billing", leases=store, settings=named(exclusive=True))
            other = asyncio.create_task(newcomer.run(lambda _: None))
            await until(lambda: len(newcomer.status().shards) == 1, "a shard of its own")
            assert {row.state for row in (await store.poll()).members} == {"live"}
            await asyncio.gather(neighbour.stop(), newcomer.stop())
            await asyncio.gather(running, other)

    run(main)


class LateHeartbeats(MemoryLeaseStore):
    """Heartbeats that were on their way arrive between the look and the seal."""

    left = 0

    async def seal_member(self, member_id, observed_counter):
        if self.left:
            self.left -= 1
            await self.heartbeat(HeartbeatWrite(member_id=member_id, attempt=observed_counter + 1))
        return await super().seal_member(member_id, observed_counter)


@pytest.mark.parametrize("late, at_once", [(1, True), (3, False)])
def test_a_late_heartbeat_delays_the_seal_and_a_worker_that_still_sends_heartbeats_is_left_to_its_expiry(late, at_once):
    async def main():
        async with stream_world(1) as world:
            store = await with_an_earlier_run(LateHeartbeats())
            store.left = late
            seconds = await started_after(world, leases=store, settings=named(exclusive=True))
            assert (seconds < 1) == at_once

    run(main)
