"""The stream of a harsh fleet: it is deleted and created again, trimmed, and read with fan-out.

To trim records, the service's clock skips ahead by almost the retention period: simulating a day of polling would take
too long.
"""

from bisect import bisect_right

from anabranch._aws.kinesis_client import EventSubscription
from anabranch._model.hash_keys import md5_hash_key
from anabranch._wire import bodies
from anabranch._wire.aggregate import AggregateBuilder
from anabranch.local.bodies import JSON
from anabranch.local.errors import LocalError
from anabranch.testing import journal as facts
from anabranch.testing.world.kinesis import SimulatedKinesis, SimulatedStream
from anabranch.testing.world.options import STREAM
from harsh.subscriptions import SimulatedStreams

_RETENTION_MS = 24 * 3_600_000
_BODY_SECONDS = 0.02
_AGGREGATE_BYTES_MAX = 1 << 20


class _ReadableShards(facts.Checker):
    """Checks nothing. It notes which shards a worker could have read: those that had a lease while they were listed.
    Of the others, it tells the journal that their records cannot be read any more.
    """

    def __init__(self, stream):
        super().__init__()
        self._stream = stream
        self.shards = {}

    def tell(self, fact):
        match fact:
            case facts.LeaseCreated(write) if write.shard_id in self._stream.listed_shards():
                self.shards[write.shard_id] = None
            case facts.LeaseCreated(write) if write.shard_id not in self.shards:
                self._stream.tell_unreadable(write.shard_id)


class HarshStream(SimulatedStream):
    def __init__(self, fleet):
        super().__init__(fleet)
        self.subscriptions = SimulatedStreams(fleet.loop, self.now_ms, fleet.random)
        self.state.on_change = self.subscriptions.wake
        self.incarnation = -1
        self.exists = False
        self._was_known = False
        self.changes_reported = 0
        """How many times a consumer reported that the stream is gone or was created again."""
        self._created = {}
        """Incarnations by the second of their creation, which is part of the lease keys."""
        self._beginnings = []
        """The lowest sequence number of each incarnation."""
        self._kept = {}
        """The records of each shard that are not excused, with their arrival times."""
        self._ahead_ms = 0
        self._readable = _ReadableShards(self)
        fleet.journal.checkers.append(self._readable)

    @property
    def has_unreported_change(self):
        """The stream is gone or was created again, and no consumer has reported it."""
        return not self.exists or (self._was_known and not self.changes_reported)

    def now_ms(self):
        return super().now_ms() + self._ahead_ms

    def journal_name(self, name):
        return facts.incarnation_name(name, self.incarnation)

    def journal_shard_id(self, shard_id, sequence_number):
        return facts.incarnation_name(shard_id, max(0, bisect_right(self._beginnings, sequence_number) - 1))

    def incarnation_of(self, key):
        return self._created[int(key.stream_key.rpartition(":")[2])]

    def create(self, shard_count):
        self.incarnation += 1
        self._created[self.now_ms() // 1000] = self.incarnation
        super().create(shard_count)
        self.exists = True
        numbers = [int(shard["SequenceNumberRange"]["StartingSequenceNumber"]) for shard in self._list()]
        self._beginnings.append(min(numbers))

    def delete(self, *, is_known):
        """Deletes the stream with its records: nobody has to handle them any more. `is_known`: the lease store has a
        row of this stream, so a worker can notice.
        """
        self._was_known = self._was_known or is_known
        self._call("DeleteStream", StreamName=STREAM, EnforceConsumerDeletion=True)
        self.exists = False
        for kept in self._kept.values():
            for _, record in kept:
                self._journal.tell(facts.RecordDeleted(record))
        self._kept.clear()

    def write(self, records, *, is_aggregate=False):
        """Writes the records one by one, or all as one KPL aggregate; then they must belong to one shard."""
        if not self.exists:
            return  # the put fails, and the records do not exist
        if not is_aggregate:
            super().write(records)
            return
        named = [(self.journal_name(partition_key), data) for partition_key, data in records]
        builder = AggregateBuilder()
        for partition_key, data in named:
            builder.add(partition_key, data, size_max=_AGGREGATE_BYTES_MAX)
        answer = self._put(named[0][0], builder.finish())
        for index, (partition_key, _) in enumerate(named):
            self._note_written(answer, index, partition_key)

    def shard_for(self, partition_key):
        routing = self.state.account.streams[STREAM].routing
        return routing.shard_for(md5_hash_key(self.journal_name(partition_key))).shard_id

    def _note_written(self, answer, sub_sequence_number, partition_key):
        super()._note_written(answer, sub_sequence_number, partition_key)
        record = self.written[-1]
        # It may be in the future in a new shard, whose records arrive after all records of its parents.
        arrival_ms = self.state.account.streams[STREAM].shards[answer["ShardId"]].log.records[-1].arrival_ms
        self._kept.setdefault(record.shard_id, []).append((arrival_ms, record))

    # resharding

    def reshard(self):
        if self.exists:
            super().reshard()

    def split(self):
        return self.exists and super().split()

    def merge(self):
        return self.exists and super().merge()

    def rescale(self):
        return self.exists and super().rescale()

    # trimming

    def skip_ahead(self, kept_seconds):
        """Advances the service's clock so that only records of the last `kept_seconds` are left."""
        self._ahead_ms += _RETENTION_MS - int(kept_seconds * 1000)

    def listed_shards(self):
        """The shards that have not been trimmed."""
        return (
            {facts.incarnation_name(shard["ShardId"], self.incarnation) for shard in self._list()}
            if self.exists
            else set()
        )

    def tell_unreadable(self, shard_id):
        for _, record in self._kept.get(shard_id, ()):
            self._journal.tell(facts.RecordUnreadable(record))

    def excuse(self, shard_id, since_seconds):
        """A consumer reported that records of this shard were lost, so its trimmed records need not be handled. The
        same holds for descendants that are not listed any more, and in such ancestors for records since the reported
        time; but only if no worker could read those shards. A shard that had a lease while it was listed must be
        reported by itself.
        """
        if not self.exists:
            return
        listed = self.listed_shards()
        unseen = {name for name in self.parents if name not in listed and name not in self._readable.shards}
        gone = {facts.incarnation_name(shard_id, self.incarnation)}
        for name, parents in self.parents.items():  # in the order of their creation
            if name in unseen and any(parent in gone for parent in parents):
                gone.add(name)
        before = {facts.incarnation_name(shard_id, self.incarnation)}
        for name in reversed(self.parents):
            if name in before:
                before.update(parent for parent in self.parents[name] if parent in unseen)
        horizon_ms, since_ms = self.now_ms() - _RETENTION_MS, int((since_seconds or 0) * 1000)
        for name in [name for name in self._kept if name in gone or name in before]:
            first_ms = 0 if name in gone else since_ms
            kept = self._kept[name]
            for _, record in (lost := [entry for entry in kept if first_ms <= entry[0] <= horizon_ms]):
                self._journal.tell(facts.RecordExcused(record))
            self._kept[name] = [entry for entry in kept if entry not in lost]

    # fan-out

    def take_over(self):
        """Somebody else subscribes to a random shard with one of the stream's consumers, and goes away."""
        consumers = list(self.state.account.streams[STREAM].consumers.values()) if self.exists else []
        if not consumers:
            return
        consumer, shard = self._random.choice(consumers), self._random.choice(self._list())
        request = {
            "ConsumerARN": consumer.arn,
            "ShardId": shard["ShardId"],
            "StartingPosition": {"Type": "TRIM_HORIZON"},
        }
        try:
            self.state.subscribe(request, now_ms=self.now_ms()).close()
        except LocalError:
            """It is too early for a take-over, or the consumer is not active."""

    def delete_consumer(self):
        consumers = list(self.state.account.streams[STREAM].consumers.values()) if self.exists else []
        if consumers:
            self._call("DeregisterStreamConsumer", ConsumerARN=self._random.choice(consumers).arn)


class HarshKinesis(SimulatedKinesis):
    def __init__(self, fleet, process, budget):
        super().__init__(fleet, process, budget)
        if fleet.options.budget_bytes:
            self.body_seconds = _BODY_SECONDS

    def _refuse_sometimes(self, operation):
        if self._network.is_calm:
            return
        options, dice = self._options, self._random.random()
        if dice < options.throttled:
            self._refuse(operation, "ProvisionedThroughputExceededException", 400)
        if dice < options.throttled + options.unavailable:
            self._refuse(operation, "InternalFailure", 500)
        if operation == "GetRecords" and dice < options.throttled + options.unavailable + options.expired:
            self._refuse(operation, "ExpiredIteratorException", 400)

        if operation == "SubscribeToShard" and self._random.random() < options.in_use:
            self._refuse(operation, "ResourceInUseException", 400)

    @property
    def listing_page(self):
        return self._options.listing_page or None

    async def subscribe_to_shard(self, consumer_arn, shard_id, position):
        body = b"".join(bodies.encode_subscribe_to_shard(consumer_arn, shard_id, position))
        members = JSON.decode("SubscribeToShard", body)
        assert isinstance(members, dict)
        stream, streams = self._stream, self._stream.subscriptions
        subscription = await self._send(
            "SubscribeToShard", lambda: stream.state.subscribe(members, now_ms=stream.now_ms())
        )
        return EventSubscription(streams.open(subscription, self._process, self._network, self._options))

    async def register_stream_consumer(self, stream_arn, name):
        body, _ = await self._call("RegisterStreamConsumer", bodies.encode_stream_consumer(stream_arn, name))
        return bodies.decode_register_stream_consumer(body)

    async def describe_stream_consumer(self, stream_arn, name):
        request = bodies.encode_stream_consumer(stream_arn, name)
        body, _ = await self._call("DescribeStreamConsumer", request)
        return bodies.decode_describe_stream_consumer(body)

    async def list_stream_consumers(self, stream_arn, *, next_token=None):
        request = bodies.encode_list_stream_consumers(stream_arn, next_token=next_token)
        body, _ = await self._call("ListStreamConsumers", request)
        return bodies.decode_list_stream_consumers(body)

    async def deregister_stream_consumer(self, consumer_arn):
        await self._call("DeregisterStreamConsumer", bodies.encode_deregister_stream_consumer(consumer_arn))
