"""The fixtures that come with anabranch, as a user's own tests use them."""

import asyncio

import boto3
import pytest

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


def test_the_local_kinesis_fixture_keeps_positions_in_a_file_of_the_test(local_kinesis, tmp_path):
    boto3.client("kinesis").create_stream(StreamName="orders", ShardCount=2)
    with anabranch.SyncProducer("orders") as producer:
        producer.put(b"1", "user-1")
    seen = []

    def read():
        consumer = anabranch.Consumer("orders", app="billing", until="tip")
        consumer.run_sync(lambda record: seen.append(record.data))

    read()
    read()
    assert seen == [b"1"]
    assert (tmp_path / "leases.db").exists()


def test_the_simulation_fixture_holds_a_handler_to_every_promise(anabranch_simulation):
    seen = []

    async def handle(record):
        await asyncio.sleep(0.01)
        seen.append(int(record.data))

    orders = [(f"user-{n % 5}", str(n).encode()) for n in range(100)]
    report = anabranch_simulation(handle, orders, workers=2, order="key", faults=["crash", "reshard"], seed=3)
    assert set(seen) == set(range(100))
    assert report.finished_count >= 100


def test_the_simulation_fixture_fails_with_the_seed(anabranch_simulation):
    async def never_ends(record):
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="seed=4"):
        anabranch_simulation(never_ends, [("user-1", b"1")], seed=4)
