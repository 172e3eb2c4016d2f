"""boto3's decoder and ours read the same subscription, byte for byte the same stream, alike event by event."""

import asyncio
import random

import botocore.session
from botocore.eventstream import EventStream
from botocore.parsers import EventStreamJSONParser

from anabranch._aws.kinesis_client import EventSubscription
from anabranch.local.bodies import JSON
from anabranch.local.faults import NO_FAULT
from anabranch.local.http import EventStreams
from anabranch.local.service import LocalState
from anabranch.local.settings import LocalSettings

NOW_MS = 1_700_000_000_000


async def recorded_body() -> bytes:
    """A whole subscription: an empty event, small and large ones, and the end of the shard with its children."""
    state = LocalState(LocalSettings(), entropy=random.Random(1))
    call = lambda operation, **request: state.call(operation, request, now_ms=NOW_MS)  # noqa: E731 -- used six times
    call("CreateStream", StreamName="orders", ShardCount=1)
    arn = call("DescribeStreamSummary", StreamName="orders")["StreamDescriptionSummary"]["StreamARN"]
    consumer = call("RegisterStreamConsumer", StreamARN=arn, ConsumerName="c")["Consumer"]["ConsumerARN"]
    position = {"Type": "TRIM_HORIZON"}
    request = {"ConsumerARN": consumer, "ShardId": "shardId-000000000000", "StartingPosition": position}
    subscription = state.subscribe(request, now_ms=NOW_MS)
    chunks = EventStreams(lambda: NOW_MS).chunks(subscription, JSON, NO_FAULT)
    body = [await anext(chunks), await anext(chunks)]
    for size in (0, 1, 1_000, 300_000, 900_000):
        call("PutRecord", StreamName="orders", PartitionKey=f"schlüssel-{size}", Data=bytes(range(256)) * (size // 256))
        body.append(await anext(chunks))
    call("SplitShard", StreamName="orders", ShardToSplit="shardId-000000000000", NewStartingHashKey=str(1 << 127))
    body += [chunk async for chunk in chunks]
    return b"".join(body)


class Recorded:
    """The recorded bytes as a stream, for botocore and for ours, in pieces of an odd size."""

    def __init__(self, body: bytes, piece: int) -> None:
        self.headers: dict[bytes, bytes] = {}
        self._pieces = [body[at : at + piece] for at in range(0, len(body), piece)]

    def stream(self):
        yield from self._pieces

    async def receive(self):
        return [memoryview(self._pieces.pop(0))] if self._pieces else []

    def expect(self, wanted_bytes):
        """Everything is there."""

    def progress(self):
        """Nobody waits."""


def their_events(body, piece):
    model = botocore.session.get_session().get_service_model("kinesis")
    shape = model.operation_model("SubscribeToShard").output_shape.members["EventStream"]
    events = EventStream(Recorded(body, piece), shape, EventStreamJSONParser(), "SubscribeToShard")
    return [event["SubscribeToShardEvent"] for event in events if "SubscribeToShardEvent" in event]


def test_both_decode_every_event_alike():
    async def main():
        body = await recorded_body()
        for piece in (1 << 20, 4_093, 251):
            subscription, ours = EventSubscription(Recorded(body, piece)), []
            while await subscription.next_bytes() is not None:
                if (event := await subscription.receive()) is not None:
                    ours.append(event)
            theirs = their_events(body, piece)
            assert len(ours) == len(theirs) == 7
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.continuation_sequence_number == other.get("ContinuationSequenceNumber")
                assert mine.millis_behind_latest == other["MillisBehindLatest"]
                assert [child.shard_id for child in mine.child_shards] == [
                    child["ShardId"] for child in other.get("ChildShards", ())
                ]
                for record, peer in zip(mine.records, other["Records"], strict=True):
                    assert (record.data, record.partition_key, record.sequence_number) == (
                        peer["Data"], peer["PartitionKey"], peer["SequenceNumber"],
                    )  # fmt: skip
                    assert record.arrival_seconds == peer["ApproximateArrivalTimestamp"].timestamp()
            assert ours[-1].continuation_sequence_number is None
            assert len(ours[-1].child_shards) == 2

    asyncio.run(main())
