"""What a newcomer meets first: no credentials, no region, another region, another event loop, TLS."""

import asyncio
import threading
from types import SimpleNamespace

import boto3
import pytest

import anabranch
from anabranch.config import Aws
from anabranch.errors import CredentialsError, DeliveryFailed
from anabranch.local import LocalKinesis

CREDENTIALS = SimpleNamespace(access_key="local", secret_key="local", token=None)


def test_missing_credentials_are_said_at_the_door():
    async def main():
        with pytest.raises(CredentialsError, match=r"(?i)credentials"):
            await anabranch.Producer("orders", aws=Aws(region="us-east-1")).__aenter__()
        assert len(asyncio.all_tasks()) == 1, "nothing is left running"

    asyncio.run(main())


def test_missing_credentials_fail_the_record_where_there_was_no_door():
    async def main():
        producer = anabranch.Producer("orders", aws=Aws(region="us-east-1"))
        try:
            await producer.put_and_wait(b"x", "k")
        finally:
            await producer.close()

    with pytest.raises(DeliveryFailed, match="CredentialsError"):
        asyncio.run(main())


def test_a_stream_is_written_to_in_the_region_of_its_arn():
    async def main():
        async with LocalKinesis(create={"orders": 1}, region="eu-west-1") as kinesis:
            aws = Aws(endpoint_url=kinesis.endpoint_url, credentials=CREDENTIALS)
            arn = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders"
            async with anabranch.Producer(arn, aws=aws) as producer:
                result = await producer.put_and_wait(b"x", "k")
                assert result.delivered
                assert result.stream == arn

    asyncio.run(main())


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


class Data(bytes):
    __slots__ = ()


@pytest.mark.parametrize("aggregate", ["shard", None])
def test_streams_keys_and_data_may_be_of_subclasses(aggregate):
    async def main():
        async with LocalKinesis(create={"orders": 1}) as kinesis:
            aws = Aws(region=kinesis.region, endpoint_url=kinesis.endpoint_url, credentials=CREDENTIALS)
            async with anabranch.Producer(Text("orders"), aws=aws, aggregate=aggregate) as producer:
                await producer.put_and_wait(Data(b"x"), Text("k"))
                await producer.put_and_wait(memoryview(b"x"), "k", explicit_hash_key=Text("5"), stream=Text("orders"))
            async with anabranch.Consumer(Text("orders"), aws=aws, start="trim_horizon", until="tip") as consumer:
                seen = [(record.data, record.partition_key) async for record in consumer]
            assert seen == [(b"x", "k")] * 2

    asyncio.run(main())


def test_over_tls_with_a_certificate_of_our_own(monkeypatch):
    async def main():
        async with LocalKinesis(create={"orders": 1}, tls=True) as kinesis:
            monkeypatch.setenv("AWS_CA_BUNDLE", str(kinesis.certificate_path))
            aws = Aws(region=kinesis.region, endpoint_url=kinesis.endpoint_url, credentials=CREDENTIALS)
            async with anabranch.Producer("orders", aws=aws) as producer:
                deliveries = await producer.put_many([(f"k{number}", b"x" * 1_000) for number in range(2_000)])
                assert all([(await delivery).delivered for delivery in deliveries])

    asyncio.run(main())


def test_a_delivery_may_be_awaited_on_another_event_loop(local_kinesis):
    boto3.client("kinesis").create_stream(StreamName="orders", ShardCount=1)
    local_kinesis.faults.on("PutRecords").delay(0.3)
    handed, is_over = [], threading.Event()

    async def produce():
        async with anabranch.Producer("orders") as producer:
            handed.append(await producer.put(b"x", "k"))
            is_put.set()
            await asyncio.to_thread(is_over.wait)

    async def elsewhere():
        return await handed[0]

    is_put = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(produce()))
    thread.start()
    try:
        assert is_put.wait(20)
        assert asyncio.run(elsewhere()).delivered
    finally:
        is_over.set()
        thread.join()
