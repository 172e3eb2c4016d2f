"""Our client and botocore ask the same server the same things, and must have read the same, member by member."""

import asyncio
import datetime as dt
import os

import botocore.session
import pytest
from blockbuster import blockbuster_ctx
from botocore.config import Config

from anabranch._aws.account import AwsAccount
from anabranch._aws.control import KinesisControl
from anabranch._aws.kinesis_client import open_kinesis
from anabranch._model.streams import (
    TRIM_HORIZON,
    ShardFilter,
    StartingPosition,
    after_sequence_number,
    at_sequence_number,
    at_timestamp,
    parse_stream,
)
from anabranch._wire.messages import PutRecordsEntry
from anabranch.config import Aws
from anabranch.errors import InvalidRequestError, StreamNotFoundError
from anabranch.local import LocalKinesis
from patience import PATIENCE
from subscribed import subscribed

ORDERS = parse_stream("orders")
PAYLOADS = [b"", b"\x00", b"one", bytes(range(256)), os.urandom(1_000), os.urandom(100_000)]


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def against(server_options, test, *, monkeypatch):
    """Runs `test(client, botocore, kinesis)`: `botocore(method, **parameters)` blocks in a thread."""

    async def main():
        async with asyncio.timeout(50), LocalKinesis(create={"orders": 2}, **server_options) as kinesis:
            if kinesis.certificate_path is not None:
                monkeypatch.setenv("AWS_CA_BUNDLE", str(kinesis.certificate_path))
            account = AwsAccount(Aws(endpoint_url=kinesis.endpoint_url))
            peer = await asyncio.to_thread(
                botocore.session.Session().create_client,
                "kinesis",
                endpoint_url=kinesis.endpoint_url,
                config=Config(retries={"total_max_attempts": 1}),
            )

            async def ask(method, **parameters):
                return await asyncio.to_thread(getattr(peer, method), **parameters)

            try:
                async with await open_kinesis(account) as client:
                    with blockbuster_ctx("anabranch._aws"):
                        await test(client, ask, kinesis)
            finally:
                account.close()
                await asyncio.to_thread(peer.close)

    asyncio.run(main())


def seconds(value: dt.datetime) -> float:
    return value.timestamp()


def same_record(ours, theirs):
    assert ours.data == theirs["Data"]
    assert ours.partition_key == theirs["PartitionKey"]
    assert ours.sequence_number == theirs["SequenceNumber"]
    assert ours.arrival_seconds == pytest.approx(seconds(theirs["ApproximateArrivalTimestamp"]), abs=0.001)


def same_shard(ours, theirs):
    assert ours.shard_id == theirs["ShardId"]
    assert str(ours.hash_key_range.start) == theirs["HashKeyRange"]["StartingHashKey"]
    assert str(ours.hash_key_range.end) == theirs["HashKeyRange"]["EndingHashKey"]
    numbers = theirs["SequenceNumberRange"]
    assert str(ours.starting_sequence_number) == numbers["StartingSequenceNumber"]
    ending = ours.ending_sequence_number
    assert (None if ending is None else str(ending)) == numbers.get("EndingSequenceNumber")
    assert ours.parent_shard_id == theirs.get("ParentShardId")
    assert ours.adjacent_parent_shard_id == theirs.get("AdjacentParentShardId")


async def shard_ids(client):
    return [shard.shard_id for shard in (await client.list_shards(ORDERS)).shards]


async def active_consumer(client, arn, name):
    async with asyncio.timeout(PATIENCE):
        while True:
            description = await client.describe_stream_consumer(arn, name)
            if description.status == "ACTIVE":
                return description
            await asyncio.sleep(0.02)


async def read_both(client, ask, shard_id, position):
    parameters = {"StreamName": "orders", "ShardId": shard_id, "ShardIteratorType": position.type}
    if position.sequence_number is not None:
        parameters["StartingSequenceNumber"] = position.sequence_number
    if position.timestamp_seconds is not None:
        parameters["Timestamp"] = position.timestamp_seconds
    iterator = await client.get_shard_iterator(ORDERS, shard_id, position)
    ours = await client.get_records(ORDERS, iterator)
    theirs = await ask("get_records", ShardIterator=(await ask("get_shard_iterator", **parameters))["ShardIterator"])
    assert len(ours.records) == len(theirs["Records"])
    for mine, other in zip(ours.records, theirs["Records"], strict=True):
        same_record(mine, other)
    assert ours.millis_behind_latest == theirs["MillisBehindLatest"]
    assert (ours.next_shard_iterator is None) == (theirs.get("NextShardIterator") is None)
    children = theirs.get("ChildShards", [])
    assert [child.shard_id for child in ours.child_shards] == [child["ShardId"] for child in children]
    assert [list(child.parent_shard_ids) for child in ours.child_shards] == [c["ParentShards"] for c in children]
    return ours


@pytest.mark.parametrize("tls", [False, True])
def test_records_written_by_each_are_read_alike_by_both_from_every_position(monkeypatch, tls):
    async def test(client, ask, kinesis):
        first, second = await shard_ids(client)
        entries = [PutRecordsEntry(data, f"key-{n}", "0") for n, data in enumerate(PAYLOADS)]
        written = await client.put_records(ORDERS, entries)
        assert [entry.shard_id for entry in written.entries] == [first] * len(PAYLOADS)
        alone = PutRecordsEntry(b"alone", "k\u00e9y \U0001f511", str(2**128 - 1))
        one = await client.put_records(ORDERS, [alone])
        assert one.entries[0].shard_id == second
        assert one.request_id
        await ask("put_record", StreamName="orders", Data=b"theirs", PartitionKey="x", ExplicitHashKey="0")
        numbers = [entry.sequence_number for entry in written.entries]
        whole = await read_both(client, ask, first, TRIM_HORIZON)
        assert [record.data for record in whole.records] == [*PAYLOADS, b"theirs"]
        assert [record.sequence_number for record in whole.records[:-1]] == numbers
        assert whole.server_seconds is not None
        assert len((await read_both(client, ask, first, at_sequence_number(numbers[2]))).records) == len(PAYLOADS) - 1
        assert (
            len((await read_both(client, ask, first, after_sequence_number(numbers[2]))).records) == len(PAYLOADS) - 2
        )
        assert (await read_both(client, ask, first, StartingPosition("LATEST"))).records == []
        assert len((await read_both(client, ask, first, at_timestamp(0.0))).records) == len(PAYLOADS) + 1
        (other,) = (await read_both(client, ask, second, TRIM_HORIZON)).records
        assert other.partition_key == "k\u00e9y \U0001f511"

    against({"tls": tls}, test, monkeypatch=monkeypatch)


def test_limits_of_a_read_are_kept_alike(monkeypatch):
    async def test(client, ask, kinesis):
        first, _ = await shard_ids(client)
        await client.put_records(ORDERS, [PutRecordsEntry(b"%d" % n, "k", "0") for n in range(20)])
        iterator = await client.get_shard_iterator(ORDERS, first, TRIM_HORIZON)
        ours = await client.get_records(ORDERS, iterator, limit=7)
        theirs = await ask("get_records", ShardIterator=iterator, Limit=7)
        assert [record.sequence_number for record in ours.records] == [r["SequenceNumber"] for r in theirs["Records"]]
        again = await client.get_records(ORDERS, ours.next_shard_iterator)
        assert [record.data for record in again.records] == [b"%d" % n for n in range(7, 20)]

    against({}, test, monkeypatch=monkeypatch)


def test_listings_and_ends_of_shards_are_read_alike_through_splits_and_merges(monkeypatch):
    async def test(client, ask, kinesis):
        control = KinesisControl(AwsAccount(Aws(endpoint_url=kinesis.endpoint_url)))
        first, second = (await client.list_shards(ORDERS)).shards
        await client.put_records(ORDERS, [PutRecordsEntry(b"x", "k", "0")])
        await control.split_shard(ORDERS, first.shard_id, 2**125)
        await control.merge_shards(ORDERS, (await shard_ids(client))[-1], second.shard_id)
        ours = await client.list_shards(ORDERS)
        theirs = await ask("list_shards", StreamName="orders")
        assert len(ours.shards) == len(theirs["Shards"]) == 5
        for mine, other in zip(ours.shards, theirs["Shards"], strict=True):
            same_shard(mine, other)
        ended = await read_both(client, ask, first.shard_id, TRIM_HORIZON)
        while ended.next_shard_iterator is not None:
            ended = await client.get_records(ORDERS, ended.next_shard_iterator)
        assert len(ended.child_shards) == 2
        page = await client.list_shards(ORDERS, max_results=3)
        rest = await client.list_shards(ORDERS, next_token=page.next_token)
        assert [*page.shards, *rest.shards] == list(ours.shards)
        latest = await client.list_shards(ORDERS, shard_filter=ShardFilter("AT_LATEST"))
        their_latest = await ask("list_shards", StreamName="orders", ShardFilter={"Type": "AT_LATEST"})
        assert [shard.shard_id for shard in latest.shards] == [shard["ShardId"] for shard in their_latest["Shards"]]
        assert [listed.name for listed in await control.list_streams()] == ["orders"]
        control.close()

    against({}, test, monkeypatch=monkeypatch)


def test_descriptions_are_read_alike(monkeypatch):
    async def test(client, ask, kinesis):
        ours = await client.describe_stream_summary(ORDERS)
        theirs = (await ask("describe_stream_summary", StreamName="orders"))["StreamDescriptionSummary"]
        assert (ours.name, ours.arn, ours.status) == (
            theirs["StreamName"], theirs["StreamARN"], theirs["StreamStatus"],
        )  # fmt: skip
        assert ours.created_seconds == seconds(theirs["StreamCreationTimestamp"])
        assert (ours.retention_hours, ours.open_shard_count) == (
            theirs["RetentionPeriodHours"], theirs["OpenShardCount"],
        )  # fmt: skip
        assert ours.stream_mode == theirs["StreamModeDetails"]["StreamMode"]
        assert await client.describe_stream_summary(parse_stream(ours.arn)) == ours

    against({}, test, monkeypatch=monkeypatch)


@pytest.mark.parametrize("tls", [False, True], ids=["http1", "http2"])
def test_consumers_and_subscriptions_are_read_alike(monkeypatch, tls):
    async def test(client, ask, kinesis):
        arn = (await client.describe_stream_summary(ORDERS)).arn
        mine = await client.register_stream_consumer(arn, "mine")
        other = (await ask("register_stream_consumer", StreamARN=arn, ConsumerName="other"))["Consumer"]
        for name in ("mine", other["ConsumerName"]):
            ours = await active_consumer(client, arn, name)
            theirs = (await ask("describe_stream_consumer", StreamARN=arn, ConsumerName=name))["ConsumerDescription"]
            assert (ours.name, ours.arn, ours.status) == (
                theirs["ConsumerName"], theirs["ConsumerARN"], theirs["ConsumerStatus"],
            )  # fmt: skip
            assert ours.created_seconds == seconds(theirs["ConsumerCreationTimestamp"])
        listed = await client.list_stream_consumers(arn)
        assert [consumer.name for consumer in listed.consumers] == ["mine", "other"]

        first, _ = await shard_ids(client)
        await client.put_records(ORDERS, [PutRecordsEntry(data, "k", "0") for data in PAYLOADS])
        async with subscribed(client, mine.arn, first, TRIM_HORIZON) as events:
            event = await anext(events)
            await client.put_records(ORDERS, [PutRecordsEntry(b"later", "k", "0")])
            async for later in events:
                if later.records:
                    break
        assert [record.data for record in later.records] == [b"later"]
        answer = await ask(
            "subscribe_to_shard",
            ConsumerARN=other["ConsumerARN"],
            ShardId=first,
            StartingPosition={"Type": "TRIM_HORIZON"},
        )
        their_event = (await asyncio.to_thread(next, iter(answer["EventStream"])))["SubscribeToShardEvent"]
        await asyncio.to_thread(answer["EventStream"].close)
        records = [*event.records, *later.records]
        for ours_, theirs_ in zip(records, their_event["Records"], strict=True):
            same_record(ours_, theirs_)
        last = int(records[-1].sequence_number)  # where to go on moves with time, so it differs between two readers
        assert int(later.continuation_sequence_number) >= last
        assert int(their_event["ContinuationSequenceNumber"]) >= last
        assert event.millis_behind_latest is not None
        await client.deregister_stream_consumer(mine.arn)

    against({"tls": tls}, test, monkeypatch=monkeypatch)


def test_refusals_carry_code_region_and_request_id(monkeypatch):
    async def test(client, ask, kinesis):
        with pytest.raises(StreamNotFoundError, match=r"searched in us-east-1") as failure:
            await client.describe_stream_summary(parse_stream("nowhere"))
        assert failure.value.code == "ResourceNotFoundException"
        assert failure.value.request_id
        with pytest.raises(InvalidRequestError, match=r"GetRecords: .*ShardIterator"):
            await client.get_records(ORDERS, "no iterator")
        with pytest.raises(StreamNotFoundError):
            async with subscribed(
                client,
                "arn:aws:kinesis:us-east-1:000000000000:stream/orders/consumer/none:1",
                "shardId-000000000000",
                TRIM_HORIZON,
            ):
                pytest.fail("accepted")
        control = KinesisControl(AwsAccount(Aws(endpoint_url=kinesis.endpoint_url)))
        with pytest.raises(StreamNotFoundError, match=r"SplitShard.*searched in us-east-1"):
            await control.split_shard(parse_stream("nowhere"), "shardId-000000000000", 7)

    against({}, test, monkeypatch=monkeypatch)
