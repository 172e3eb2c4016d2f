"""Handlers that do not wait: called one after another in one step, each only while the lease is surely held."""

import asyncio

import pytest

from anabranch import Retry
from anabranch.stores.memory import MemoryLeaseStore
from memory_rows import AwayStore

from simulated_stream import block, check_order, numbers, run, stream_world, until

ORDERS = pytest.mark.parametrize("order", ["shard", "key", "none"])


@ORDERS
def test_handlers_that_do_not_wait_are_called_in_stream_order_and_all_is_committed(order):
    async def main():
        async with stream_world(1) as world:
            world.put("abcabcabca")
            options = {"app": "billing", "leases": MemoryLeaseStore(), "order": order, "until": "tip"}
            seen = []

            async def handle(record):
                seen.append(record)

            for _ in range(2):
                consumer = world.consumer(**options)
                await consumer.run(handle)
                assert numbers(seen) == list(range(10))
            assert consumer.status().budget_used_bytes == 0

    run(main)


@ORDERS
def test_a_handler_that_waits_now_and_then_is_called_once_for_each_record(order):
    async def main():
        async with stream_world(1) as world:
            world.put("abcd" * 10)
            seen, store = [], MemoryLeaseStore()

            async def handle(record):
                if int(record.data) % 3 == 0:
                    await asyncio.sleep(0)
                seen.append(record)

            for _ in range(2):
                await world.consumer(app="billing", leases=store, order=order, until="tip", concurrency=3).run(handle)
            assert sorted(numbers(seen)) == list(range(40))
            if order == "shard":
                assert numbers(seen) == list(range(40))
            if order == "key":
                check_order(seen)

    run(main)


@ORDERS
def test_no_record_is_started_after_the_fence_also_where_no_call_waits(order):
    async def main():
        async with stream_world(1) as world:
            world.put("abcabcabca")
            store, seen = AwayStore(), []
            consumer = world.consumer(app="billing", leases=store, order=order)

            async def handle(record):
                seen.append(record)
                if len(seen) == 4:
                    store.away = True
                    block(5)  # longer than its lease

            running = asyncio.create_task(consumer.run(handle))
            await until(lambda: len(seen) >= 4, "the call that blocks")
            await asyncio.sleep(1)
            assert consumer.status().fenced
            assert numbers(seen) == [0, 1, 2, 3]
            store.away = False
            await until(lambda: len(seen) == 10, "the rest, after the fence")
            await consumer.stop()
            await running

    run(main)


def test_a_handler_that_does_not_wait_still_lets_the_loop_turn():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3000)
            steps, loop = set(), asyncio.get_running_loop()

            async def handle(record):
                steps.add(loop.steps)

            await world.consumer(app="billing", leases="memory://", until="tip").run(handle)
            assert len(steps) > 3

    run(main)


@ORDERS
def test_a_call_that_fails_without_waiting_is_tried_again_before_its_key_continues(order):
    async def main():
        async with stream_world(1) as world:
            world.put("abcabcabca")
            seen, tries = [], []

            async def handle(record):
                if int(record.data) == 2:
                    tries.append(numbers(seen))
                    if len(tries) == 1:
                        raise ValueError("not yet")
                seen.append(record)

            retry = Retry(attempts=2, backoff=0.0)
            await world.consumer(app="billing", leases="memory://", order=order, until="tip", on_failure=retry).run(
                handle
            )
            assert sorted(numbers(seen)) == list(range(10))
            assert tries[0] == [0, 1]
            if order == "shard":
                assert numbers(seen) == list(range(10))
            if order == "key":
                check_order(seen)

    run(main)


@pytest.mark.parametrize("count", [3, 10])  # the last of its page, and one in the middle
def test_a_call_that_cancels_its_own_task_and_does_not_wait_disturbs_no_other(count):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * count)
            seen = []

            async def handle(record):
                seen.append(record)
                if len(seen) == 3:
                    asyncio.current_task().cancel()
                elif len(seen) == 4:
                    await asyncio.sleep(0)

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", concurrency=1, on_failure=Retry(attempts=1)
            )
            assert (await consumer.run(handle)).clean
            assert numbers(seen) == list(range(count))

    run(main)
