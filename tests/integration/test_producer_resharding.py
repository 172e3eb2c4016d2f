"""Order and no loss over real sockets: shards are doubled and halved while records are put, with AWS's limits on."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from anabranch._model.hash_keys import HashKeyRange
from anabranch._wire.aggregate import open_aggregate
from anabranch.config import Aws
from anabranch.events import AggregateStraddled
from anabranch.local import LocalKinesis
from anabranch.producer import Producer

CREDENTIALS = SimpleNamespace(access_key="local", secret_key="local", token=None)
KEYS = 300


class ServerAtHand:
    """The server's own state: to reshard in the middle of things, and to read all that was written."""

    def __init__(self, kinesis):
        self._kinesis = kinesis
        self._ahead_ms = 0

    def call(self, operation, **request):
        now_ms = self._kinesis._now_ms() + self._ahead_ms
        return self._kinesis.state.call(operation, {"StreamName": "orders"} | request, now_ms=now_ms)

    def scale(self, shard_count):
        self.call("UpdateShardCount", TargetShardCount=shard_count, ScalingType="UNIFORM_SCALING")

    def read(self, operation, **request):
        self._ahead_ms += 10_000  # nothing is written any more: beyond the limits of reading
        return self._kinesis.state.call(operation, request, now_ms=self._kinesis._now_ms() + self._ahead_ms)

    def numbers_by_key(self):
        """Each key's record numbers as a consumer is given them, repeats left out."""
        found = []
        for shard in self.read("ListShards", StreamName="orders")["Shards"]:
            hash_range = HashKeyRange(
                *(int(shard["HashKeyRange"][end]) for end in ("StartingHashKey", "EndingHashKey"))
            )
            iterator = self.read(
                "GetShardIterator", StreamName="orders", ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
            )["ShardIterator"]
            while iterator is not None:
                answer = self.read("GetRecords", ShardIterator=iterator)
                for record in answer["Records"]:
                    found += self._opened(record.members(), hash_range)
                iterator = answer.get("NextShardIterator") if answer["MillisBehindLatest"] else None
        numbers = defaultdict(dict)
        for _, _, key, data in sorted(found):
            numbers[key].setdefault(int(data.partition(b":")[0]))
        return {key: list(seen) for key, seen in numbers.items()}

    @staticmethod
    def _opened(record, hash_range):
        number, aggregate = int(record["SequenceNumber"]), open_aggregate(record["Data"])
        if aggregate is None:
            return [(number, -1, record["PartitionKey"], record["Data"])]
        if aggregate.misrouted(hash_range):
            return []  # our consumer and KCL skip it whole: all of it was sent again
        return [(number, i, key, data) for i, (key, _, data) in enumerate(aggregate.sub_records())]


async def write_through_reshards(record_count, *, aggregate, order="key", scales=(20, 10)):
    async with LocalKinesis(create={"orders": 10}, limits="aws") as kinesis:
        server, events = ServerAtHand(kinesis), []
        kinesis.faults.on("PutRecords").throttle(slot_probability=0.02)
        kinesis.faults.on("PutRecords").lose_response().with_probability(0.02)
        aws = Aws(region=kinesis.region, endpoint_url=kinesis.endpoint_url, credentials=CREDENTIALS)
        moments = {record_count * (i + 1) // (len(scales) + 1): count for i, count in enumerate(scales)}
        async with Producer("orders", order=order, aggregate=aggregate, aws=aws, on_event=events.append) as producer:
            await producer.put_and_wait(b"-1:warm", "up")
            deliveries, resharded_at = [], None
            for number in range(record_count):
                if number in moments:
                    if resharded_at is not None:  # else both reshards could come between two requests
                        await deliveries[resharded_at]
                    server.scale(moments[number])
                    resharded_at = number
                delivery = await producer.put(b"%d:" % number + b"x" * 80, f"key-{number % KEYS}")
                deliveries.append(delivery)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            results = [await delivery for delivery in deliveries]
        assert all(result.delivered for result in results)
        kinesis.faults.clear()
        return server.numbers_by_key(), events


def check_order(numbers, record_count):
    for key in range(KEYS):
        assert numbers[f"key-{key}"] == list(range(key, record_count, KEYS))


@pytest.mark.parametrize("aggregate", ["shard", "key"])
def test_every_key_is_in_order_and_nothing_is_lost_through_splits_and_merges(aggregate):
    numbers, _ = asyncio.run(write_through_reshards(15_000, aggregate=aggregate))
    check_order(numbers, 15_000)


def test_single_records_keep_their_order_too():
    numbers, _ = asyncio.run(write_through_reshards(3_000, aggregate=None))
    check_order(numbers, 3_000)


def test_without_order_nothing_is_lost_either():
    numbers, _ = asyncio.run(write_through_reshards(15_000, aggregate="shard", order="none"))
    assert sum(len(seen) for key, seen in numbers.items() if key != "up") == 15_000


@pytest.mark.long
def test_200_000_records_stay_in_order_while_10_shards_become_20_and_10_again():
    numbers, events = asyncio.run(write_through_reshards(200_000, aggregate="shard"))
    check_order(numbers, 200_000)
    assert any(isinstance(event, AggregateStraddled) for event in events)
