"""Calls that ignore their timeout hold up their key; calls that ignore the end of their lease are reported."""

import asyncio

import pytest

from anabranch import events
from anabranch.reasons import RecordInHandler
from stubborn_calls import check_overrun, check_zombie

from simulated_stream import run, stream_world, until


@pytest.mark.parametrize("run_name", ["run", "run_batches"])
def test_a_call_that_ignores_its_time_out_is_named_with_its_place_and_not_tried_again_beside_itself(run_name):
    async def main():
        async with stream_world(1) as world:
            await check_overrun(world, "in_the_loop", run_name)

    run(main)


async def _handle_forever(item):
    await asyncio.Event().wait()


async def _loop_forever(consumer):
    async for _ in consumer:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "consume, function",
    [
        (lambda consumer: consumer.run(_handle_forever, handle_signals=False), "_handle_forever"),
        (lambda consumer: consumer.run_batches(_handle_forever, handle_signals=False), "_handle_forever"),
        (_loop_forever, "_loop_forever"),
    ],
    ids=["records", "batches", "loop"],
)
def test_a_record_that_is_handled_for_long_is_named_with_the_place_where_its_handling_stands(consume, function):
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            happened = []
            async with world.consumer(app="billing", leases="memory://", on_event=happened.append) as consumer:
                running = asyncio.create_task(consume(consumer))
                await until(lambda: any(isinstance(event, events.ShardStalled) for event in happened), "the event")
                reason = next(event.reason for event in happened if isinstance(event, events.ShardStalled))
                assert isinstance(reason, RecordInHandler)
                assert (reason.partition_key, reason.children_wait) == ("a", False)
                assert reason.seconds >= 10
                assert f"{function} (test_consumer_timeouts.py:" in reason.at
                (shard,) = consumer.status().shards
                assert (shard.reason.code, shard.reason.at) == ("record-in-handler", reason.at)
                running.cancel()
                await asyncio.wait([running])

    run(main)


def _run(consumer, handle):
    return consumer.run(handle, handle_signals=False)


async def _loop(consumer, handle):
    async with consumer:
        async for record in consumer:
            await handle(record)


@pytest.mark.parametrize("consume", [_run, _loop], ids=["in a handler", "in the caller's loop"])
def test_a_call_that_outlives_its_lease_is_reported_with_its_stack(consume):
    async def main():
        async with stream_world(1) as world:
            await check_zombie(world, "in_the_loop", consume)

    run(main)
