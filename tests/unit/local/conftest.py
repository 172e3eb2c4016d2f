"""A local Kinesis without a server: calls by keyword, time by hand."""

import random

import pytest

from anabranch.local.errors import LocalError
from anabranch.local.service import LocalState
from anabranch.local.settings import LocalSettings

START_MS = 1_800_000_000_000


class ManualKinesis:
    """The pure state, with a clock that moves when told to."""

    def __init__(self, **settings):
        self.now_ms = START_MS
        self.changes = []
        self.journal = []
        self.state = LocalState(
            LocalSettings(**settings),
            entropy=random.Random(1),
            on_change=lambda *change: self.changes.append(change),
            journal=self.journal.append,
        )

    def __getattr__(self, operation):
        if not operation[0].isupper():
            raise AttributeError(operation)

        def call(**request):
            return self.state.call(operation, request, now_ms=self.now_ms)

        return call

    def fails(self, operation, **request):
        """The error that a call gets, as `Code: message`."""
        with pytest.raises(LocalError) as caught:
            self.state.call(operation, request, now_ms=self.now_ms)
        return str(caught.value)

    def subscribe(self, **request):
        return self.state.subscribe(request, now_ms=self.now_ms)

    def wait(self, *, ms=0, hours=0):
        self.now_ms += ms + hours * 3_600_000

    def open_shard_ids(self, stream="orders"):
        listed = self.ListShards(StreamName=stream, ShardFilter={"Type": "AT_LATEST"})["Shards"]
        return [shard["ShardId"] for shard in listed]

    def shards(self, stream="orders"):
        return {shard["ShardId"]: shard for shard in self.ListShards(StreamName=stream)["Shards"]}

    def put(self, *texts, key="k", stream="orders", hash_key=None):
        answers = []
        for text in texts:
            request = {"StreamName": stream, "PartitionKey": key, "Data": text.encode()}
            if hash_key is not None:
                request["ExplicitHashKey"] = str(hash_key)
            answers.append(self.PutRecord(**request))
        return answers

    def iterator(self, kind="TRIM_HORIZON", shard_id="shardId-000000000000", stream="orders", **more):
        return self.GetShardIterator(StreamName=stream, ShardId=shard_id, ShardIteratorType=kind, **more)[
            "ShardIterator"
        ]

    def read(self, kind="TRIM_HORIZON", shard_id="shardId-000000000000", stream="orders", **more):
        answer = self.GetRecords(ShardIterator=self.iterator(kind, shard_id, stream, **more))
        return [record.data.decode() for record in answer["Records"]]


@pytest.fixture
def kinesis():
    """With a stream `orders` of two shards."""
    made = ManualKinesis()
    made.CreateStream(StreamName="orders", ShardCount=2)
    return made


@pytest.fixture
def make_kinesis():
    return ManualKinesis
