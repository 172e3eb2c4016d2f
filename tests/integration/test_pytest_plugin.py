"""The fixtures that come with anabranch, as a user's own tests use them."""

import asyncio

import boto3

import anabranch


def test_the_local_kinesis_fixture_points_every_client_at_itself(local_kinesis):
    client = boto3.client("kinesis")
    client.create_stream(StreamName="orders", ShardCount=2)
    client.get_waiter("stream_exists").wait(StreamName="orders")

    async def main():
        async with anabranch.Producer("orders") as producer:
            for number in range(10):
                await producer.put(str(number).encode(), "user-1")
        async with anabranch.Consumer("orders", start="trim_horizon", until="tip") as consumer:
            return [int(record.data) async for record in consumer]

    assert asyncio.run(main()) == list(range(10))
