"""The events of one subscription as an asynchronous iterator, for tests that have room for all of them."""

from contextlib import asynccontextmanager


@asynccontextmanager
async def subscribed(client, consumer_arn, shard_id, position):
    subscription = await client.subscribe_to_shard(consumer_arn, shard_id, position)

    async def events():
        while await subscription.next_bytes() is not None:
            if (event := await subscription.receive()) is not None:
                yield event

    try:
        yield events()
    finally:
        subscription.close()
