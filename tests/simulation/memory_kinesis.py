"""Kinesis in memory for the producer's engine on the seeded loop: the local server's pure state behind the port, with
latency in virtual time and faults by hand.
"""

import asyncio
import random
from collections import Counter

from anabranch._aws.errors import service_error
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Position, Shard
from anabranch._wire.aggregate import open_aggregate
from anabranch._wire.bodies import AwsError
from anabranch._wire.messages import ListShardsResponse, PutRecordsResponse, PutRecordsResultEntry, StreamSummary
from anabranch.local.errors import LocalError
from anabranch.local.service import LocalState
from anabranch.local.settings import LocalSettings
from anabranch.producer import Producer, ProducerPorts
from anabranch.testing.loop import run

THROTTLED = "ProvisionedThroughputExceededException"


class LoopClock:
    """The seeded loop's time."""

    def now_ms(self):
        return round(asyncio.get_running_loop().time() * 1_000) + 1_000

    def wall_ms(self):
        return self.now_ms() + 1_700_000_000_000

    def is_before(self, at_ms, wall_ahead_ms_max):
        now_ms = self.now_ms()
        return now_ms < at_ms and self.wall_ms() - now_ms <= wall_ahead_ms_max

    async def sleep_until_ms(self, at_ms):
        await asyncio.sleep((at_ms - self.now_ms()) / 1_000)

    def call_at_ms(self, at_ms, callback):
        return asyncio.get_running_loop().call_later(max(0, at_ms - self.now_ms()) / 1_000, callback)


class MemoryKinesis:
    """Fulfils the producer's port."""

    def __init__(self, streams=None, *, latency=0.02, limits="off", seed=0):
        self.state = LocalState(LocalSettings(limits=limits), entropy=random.Random(seed))
        self.clock = LoopClock()
        self.latency = latency
        self.calls = Counter()
        self.in_flight = self.in_flight_max = 0
        self.put_sizes = []
        self._reading_ms = 0
        self.before_put = self.after_put = self.before_list = None
        """Called with the request. An error that they raise or return becomes the response."""
        self.is_throttled = None
        """Called with each entry of a PutRecords: whether its shard refuses it."""
        self.slots_refused = 0
        for name, count in (streams or {"orders": 1}).items():
            self.call("CreateStream", StreamName=name, ShardCount=count)

    def call(self, operation, *, refused_slots=None, **request):
        try:
            return self.state.call(operation, request, now_ms=self._now_ms(), refused_slots=refused_slots)
        except LocalError as error:
            raise service_error(operation, AwsError(error.code, error.message), status=error.status) from error

    def _now_ms(self):
        try:
            return self.clock.wall_ms()
        except RuntimeError:
            return 1_700_000_000_000

    async def _travel(self):
        if self.latency:
            await asyncio.sleep(self.latency / 2)

    # the port

    async def put_records(self, stream, entries):
        self.calls["PutRecords"] += 1
        self.put_sizes.append(len(entries))
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            await self._travel()
            if self.before_put is not None and (error := self.before_put(entries)) is not None:
                await self._travel()
                raise error
            records = [self._members(entry) for entry in entries]
            refused = self._refused_slots(entries)
            answer = self.call("PutRecords", StreamName=stream.name, Records=records, refused_slots=refused)
            self.slots_refused += answer["FailedRecordCount"]
            await self._travel()
            if self.after_put is not None and (error := self.after_put(entries)) is not None:
                raise error
        finally:
            self.in_flight -= 1
        slots = [
            PutRecordsResultEntry(
                slot.get("SequenceNumber"), slot.get("ShardId"), slot.get("ErrorCode"), slot.get("ErrorMessage")
            )
            for slot in answer["Records"]
        ]
        return PutRecordsResponse(slots, "request-1")

    def _refused_slots(self, entries):
        if self.is_throttled is None:
            return {}
        return {slot: THROTTLED for slot, entry in enumerate(entries) if self.is_throttled(entry)}

    @staticmethod
    def _members(entry):
        members = {"Data": entry.data, "PartitionKey": entry.partition_key}
        if entry.explicit_hash_key is not None:
            members["ExplicitHashKey"] = entry.explicit_hash_key
        return members

    async def list_shards(self, stream, *, shard_filter=None, next_token=None):
        self.calls["ListShards"] += 1
        await self._travel()
        if self.before_list is not None and (error := self.before_list()) is not None:
            raise error
        request = {"NextToken": next_token} if next_token else {"StreamName": stream.name, "MaxResults": 3}
        if shard_filter is not None:
            request["ShardFilter"] = {"Type": shard_filter.type}
        answer = self.call("ListShards", **request)
        await self._travel()
        return ListShardsResponse(tuple(map(_shard, answer["Shards"])), answer.get("NextToken"))

    async def describe_stream_summary(self, stream):
        self.calls["DescribeStreamSummary"] += 1
        await self._travel()
        answer = self.call("DescribeStreamSummary", StreamName=stream.name)["StreamDescriptionSummary"]
        await self._travel()
        return StreamSummary(
            name=stream.name, arn=answer["StreamARN"], status=answer["StreamStatus"], created_seconds=0.0,
            retention_hours=24, open_shard_count=answer["OpenShardCount"],
            record_kib_max=answer.get("MaxRecordSizeInKiB"),
            record_distribution=answer.get("RecordDistributionStrategy", {}).get("Type")
            if isinstance(answer.get("RecordDistributionStrategy"), dict)
            else answer.get("RecordDistributionStrategy"),
        )  # fmt: skip

    # what there is

    def shards(self, name="orders"):
        return list(map(_shard, self.call("ListShards", StreamName=name)["Shards"]))

    def stored(self, name="orders"):
        """Every Kinesis record: (shard, KinesisRecord's members), shard by shard."""
        for shard in self.shards(name):
            request = {"StreamName": name, "ShardId": shard.shard_id, "ShardIteratorType": "TRIM_HORIZON"}
            self._reading_ms += 10_000
            now_ms = self._now_ms() + self._reading_ms
            iterator = self.state.call("GetShardIterator", request, now_ms=now_ms)["ShardIterator"]
            while iterator is not None:
                self._reading_ms += 10_000  # beyond the limits of reading
                now_ms = self._now_ms() + self._reading_ms
                answer = self.state.call("GetRecords", {"ShardIterator": iterator}, now_ms=now_ms)
                for record in answer["Records"]:
                    yield shard, record.members()
                if not answer["Records"] and not answer["MillisBehindLatest"]:
                    break
                iterator = answer.get("NextShardIterator")

    def records(self, name="orders"):
        """What a consumer is given, in the order of sequence numbers: (partition key, data)."""
        return [(key, data) for _, _, key, data in self.placed_records(name)]

    def placed_records(self, name="orders"):
        """The same with its place: (position, shard, partition key, data)."""
        found = []
        for shard, record in self.stored(name):
            aggregate = open_aggregate(record["Data"])
            number = int(record["SequenceNumber"])
            if aggregate is None:
                found.append((Position(number), shard.shard_id, record["PartitionKey"], record["Data"]))
            elif not aggregate.misrouted(shard.hash_key_range):
                for index, (key, _, data) in enumerate(aggregate.sub_records()):
                    found.append((Position(number, index), shard.shard_id, key, data))
        return sorted(found)

    def split(self, name="orders"):
        shard = max((s for s in self.shards(name) if s.is_open), key=lambda s: s.hash_key_range.size)
        middle = sum(shard.hash_key_range) // 2
        self.call("SplitShard", StreamName=name, ShardToSplit=shard.shard_id, NewStartingHashKey=str(middle))

    def merge(self, name="orders"):
        open_shards = sorted((s for s in self.shards(name) if s.is_open), key=lambda s: s.hash_key_range)
        first, second = open_shards[:2]
        self.call("MergeShards", StreamName=name, ShardToMerge=first.shard_id, AdjacentShardToMerge=second.shard_id)

    def producer(self, stream="orders", **options):
        return ProducerOver(ProducerPorts(self, self.clock, random.Random(5)), stream, **options)


class ProducerOver(Producer):
    """Uses these ports instead of AWS."""

    def __init__(self, ports, stream, **options):
        super().__init__(stream, **options)
        self._given_ports = ports

    def _open_ports(self):
        return self._given_ports


async def warm_up(producer):
    """Writes a record, and waits until the shard map is known."""
    await producer.put_and_wait(b"warm", "up")
    await asyncio.sleep(10)


def _shard(members):
    hash_range = members["HashKeyRange"]
    numbers = members["SequenceNumberRange"]
    end = numbers.get("EndingSequenceNumber")
    return Shard(
        shard_id=members["ShardId"],
        hash_key_range=HashKeyRange(int(hash_range["StartingHashKey"]), int(hash_range["EndingHashKey"])),
        starting_sequence_number=int(numbers["StartingSequenceNumber"]),
        ending_sequence_number=None if end is None else int(end),
    )


def simulated(test):
    """Runs an async test on the seeded loop."""

    def wrapper():
        run(test)

    wrapper.__name__ = test.__name__
    return wrapper


__all__ = ["MemoryKinesis", "simulated", "warm_up"]
