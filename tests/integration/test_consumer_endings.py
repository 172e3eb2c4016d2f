"""How a consumer, a shard or a single call ends when things do not go as planned: nothing stands still in silence."""

import asyncio

from anabranch import Retry, events

from stream_world import numbers, run, stream_world


def test_a_handler_that_ends_in_a_cancellation_of_its_own_fails_its_record():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            seen, happened = [], []

            async def handle(record, context):
                if int(record.data) == 1 and context.attempt == 1:
                    lost = asyncio.get_running_loop().create_future()
                    lost.cancel()
                    await lost
                seen.append(record)

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", concurrency=1, on_event=happened.append,
                on_failure=Retry(attempts=2, backoff=0),
            )  # fmt: skip
            assert (await consumer.run(handle)).clean
            assert numbers(seen) == [0, 1, 2]
            assert any(isinstance(event, events.HandlerFailed) for event in happened)

    run(main, 10)


def test_a_batch_handler_that_ends_in_a_cancellation_of_its_own_fails_its_batch():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 3)
            seen = []

            async def handle(batch, context):
                if context.attempt == 1:
                    lost = asyncio.get_running_loop().create_future()
                    lost.cancel()
                    await lost
                seen.extend(batch)

            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", concurrency=1, on_failure=Retry(attempts=2, backoff=0)
            )
            assert (await consumer.run_batches(handle, max_wait=0.1)).clean
            assert numbers(seen) == [0, 1, 2]

    run(main, 10)
