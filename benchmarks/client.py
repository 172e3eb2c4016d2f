"""What one call or one record costs the client in CPU, beside aiobotocore, over TLS.

The server answers with prepared bytes and runs on another core, so that only the client is measured. Every row of the
table has a target: how many times less CPU ours has to take than aiobotocore in the same run.
"""

import asyncio
import datetime as dt
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

import measure
from anabranch._aws.account import AwsAccount
from anabranch._aws.kinesis_client import KinesisClient, open_kinesis
from anabranch._aws.service import make_dialer
from anabranch._http.client.limits import ClientTimeouts
from anabranch._http.client.stream_pool import StreamPool
from anabranch._model.streams import TRIM_HORIZON, parse_stream
from anabranch._wire.messages import PutRecordsEntry
from anabranch.config import Aws
from anabranch.local.server import write_self_signed_certificate

SERVER = Path(__file__).parent / "servers" / "canned_kinesis.py"
STREAM = parse_stream("orders")
CONSUMER_ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/orders/consumer/bench:1700000000"
IN_FLIGHT = 50
CALLS = 4
EVENTS = 20

Work = Callable[[], Awaitable[object]]


@contextmanager
def canned_server():
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = write_self_signed_certificate(Path(folder), "127.0.0.1", dt.datetime.now(dt.UTC))
        server = subprocess.Popen(
            [sys.executable, SERVER, certificate, key, str(cores[-1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if len(cores) > 1:
            os.sched_setaffinity(0, {cores[0]})
        else:
            print("one core only: client and server share it, and the figures are the worse for it")
        try:
            yield f"https://127.0.0.1:{server.stdout.readline().strip()}", str(certificate)
        finally:
            server.stdin.close()
            server.wait(10)
            server.stdout.close()


def in_flight(poll: Work) -> Work:
    async def work():
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(poll())

    return work


def ours(client) -> dict[str, Work]:
    def get(shape: str) -> Work:
        async def work():
            answer = await client.get_records(STREAM, f"{shape}-AAAA", limit=10_000)
            for record in answer.records:
                record.data, record.partition_key  # noqa: B018 -- what a reader does at least

        return work

    entries = [PutRecordsEntry(os.urandom(1024), f"user-{n}") for n in range(500)]

    async def put():
        await client.put_records(STREAM, entries)

    async def poll():
        for _ in range(CALLS):
            await client.get_records(STREAM, "0x0-AAAA", limit=10_000)

    async def subscribe():
        subscription = await client.subscribe_to_shard(CONSUMER_ARN, f"{EVENTS}x1000x1024", TRIM_HORIZON)
        count = 0
        while await subscription.next_bytes() is not None:
            if (event := await subscription.receive()) is not None:
                count += len(event.records)
        subscription.close()
        assert count == EVENTS * 1000

    return {
        "GetRecords 1000 x 1 KB": get("1000x1024"),
        "GetRecords 10,000 x 100 B": get("10000x100"),
        "PutRecords 500 x 1 KB": put,
        "empty GetRecords, 50 in flight": in_flight(poll),
        "SubscribeToShard 1000 x 1 KB": subscribe,
    }


def theirs(client) -> dict[str, Work]:
    def get(shape: str) -> Work:
        async def work():
            answer = await client.get_records(ShardIterator=f"{shape}-AAAA", Limit=10_000)
            for record in answer["Records"]:
                record["Data"], record["PartitionKey"]

        return work

    entries = [{"Data": os.urandom(1024), "PartitionKey": f"user-{n}"} for n in range(500)]

    async def put():
        await client.put_records(StreamName="orders", Records=entries)

    async def poll():
        for _ in range(CALLS):
            await client.get_records(ShardIterator="0x0-AAAA", Limit=10_000)

    async def subscribe():
        answer = await client.subscribe_to_shard(
            ConsumerARN=CONSUMER_ARN, ShardId=f"{EVENTS}x1000x1024", StartingPosition={"Type": "TRIM_HORIZON"}
        )
        count = 0
        async for event in answer["EventStream"]:
            count += len(event["SubscribeToShardEvent"]["Records"])
        assert count == EVENTS * 1000

    return {
        "GetRecords 1000 x 1 KB": get("1000x1024"),
        "GetRecords 10,000 x 100 B": get("10000x100"),
        "PutRecords 500 x 1 KB": put,
        "empty GetRecords, 50 in flight": in_flight(poll),
        "SubscribeToShard 1000 x 1 KB": subscribe,
    }


# work, over HTTP/2, units in one go, what a unit is, times less CPU than aiobotocore
ROWS = (
    ("GetRecords 1000 x 1 KB", False, 1000, "record", 6),
    ("GetRecords 10,000 x 100 B", False, 10_000, "record", 15),
    ("PutRecords 500 x 1 KB", False, 500, "record", 4),
    ("empty GetRecords, 50 in flight", False, IN_FLIGHT * CALLS, "call", 12),
    ("SubscribeToShard 1000 x 1 KB", False, EVENTS * 1000, "record", 6),
    ("SubscribeToShard 1000 x 1 KB", True, EVENTS * 1000, "record", 3),
)


def main() -> None:
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = "AKIDEXAMPLE", "secret"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    verdicts = []
    with canned_server() as (url, certificate), asyncio.Runner() as runner:
        os.environ["AWS_CA_BUNDLE"] = certificate
        stack = AsyncExitStack()
        over_http1, over_http2, peer = runner.run(open_all(stack, url, certificate))
        for name, http2, units, unit, target in ROWS:
            mine, reference = (over_http2 if http2 else over_http1)[name], peer[name]
            figures = measure.compare(
                {"anabranch": lambda mine=mine: runner.run(once(mine)),
                 "aiobotocore": lambda reference=reference: runner.run(once(reference))},
                units,
                reference="anabranch",
            )  # fmt: skip
            title = f"{name}, HTTP/{2 if http2 else 1.1}"
            measure.print_table(title, figures, unit=unit, reference="anabranch")
            ratio, (low, high) = figures["aiobotocore"].ratio, figures["aiobotocore"].ratio_spread
            verdict = measure.target(f"{title}: aiobotocore / ours", ratio, target)
            verdicts.append(f"  {title:44}{ratio:6.1f} times less ({low:.1f} to {high:.1f}), {verdict}")
        runner.run(stack.aclose())
    print("\nTimes less CPU than aiobotocore\n" + "\n".join(verdicts))


async def open_all(stack: AsyncExitStack, url: str, certificate: str):
    account = AwsAccount(Aws(endpoint_url=url))
    stack.callback(account.close)
    clients = [await stack.enter_async_context(await open_over(account, alpn)) for alpn in ("http/1.1", "h2")]
    config = AioConfig(max_pool_connections=64, retries={"total_max_attempts": 1})
    session = get_session()
    peer = await stack.enter_async_context(
        session.create_client("kinesis", endpoint_url=url, verify=certificate, config=config)
    )
    return ours(clients[0]), ours(clients[1]), theirs(peer)


async def open_over(account: AwsAccount, alpn: str) -> KinesisClient:
    """A client whose subscriptions use this version of HTTP."""
    client = await open_kinesis(account)
    dialer = await make_dialer(await account.address("kinesis"), (alpn,), ClientTimeouts())
    return KinesisClient(client._service, StreamPool(dialer))


async def once(work: Work) -> None:
    await work()


if __name__ == "__main__":
    main()
