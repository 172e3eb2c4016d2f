"""Kinesis in a simulation: the local server's pure state, as its writers and operators see it (`SimulatedStream`) and
behind the engine's port (`SimulatedKinesis`).

Everything that happens to the stream is told to the journal. To trim records, the service's clock skips ahead by almost
the retention period: simulating a day of polling would take too long.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NoReturn, TypeVar

from anabranch._aws.errors import service_error
from anabranch._aws.kinesis_client import EventSubscription
from anabranch._model.hash_keys import md5_hash_key
from anabranch._model.leases import LeaseKey
from anabranch._model.streams import BEFORE_FIRST_SUB, Position, ShardFilter, StartingPosition, StreamName
from anabranch._ports import Kinesis
from anabranch._wire import bodies
from anabranch._wire.aggregate import AggregateBuilder
from anabranch._wire.bodies import AwsError
from anabranch._wire.messages import (
    ConsumerDescription,
    GetRecordsResponse,
    ListShardsResponse,
    ListStreamConsumersResponse,
    StreamSummary,
)
from anabranch.budget import Budget
from anabranch.errors import TransportError
from anabranch.local.bodies import JSON
from anabranch.local.errors import LocalError
from anabranch.local.service import LocalState
from anabranch.testing import journal as facts
from anabranch.testing.loop import SimulationLoop
from anabranch.testing.world.options import FleetOptions
from anabranch.testing.world.processes import Network, SimulatedProcess
from anabranch.testing.world.subscriptions import SimulatedStreams

T = TypeVar("T")

STREAM = "orders"
_WALL_MS = 1_700_000_000_000
_RETENTION_MS = 24 * 3_600_000
_AGGREGATE_BYTES_MAX = 1 << 20
_BODY_SECONDS = 0.02
"""How long the body of a response takes to arrive."""


class _ReadableShards(facts.Checker):
    """Checks nothing. It notes which shards a worker could have read: those that had a lease while they were listed."""

    def __init__(self, stream: "SimulatedStream") -> None:
        super().__init__()
        self._stream = stream
        self.shards: dict[str, None] = {}

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.LeaseCreated(write) if write.shard_id in self._stream.listed_shards():
                self.shards[write.shard_id] = None


class SimulatedStream:
    def __init__(self, loop: SimulationLoop, journal: facts.Journal, random: Random) -> None:
        self.subscriptions = SimulatedStreams(loop, self.now_ms, random)
        self.state = LocalState(entropy=random, on_change=self.subscriptions.wake)
        self._loop = loop
        self._journal = journal
        self._random = random
        self.incarnation = -1
        self.exists = False
        self._was_known = False
        self.changes_reported = 0
        """How many times a consumer reported that the stream is gone or was created again."""
        self._created: dict[int, int] = {}
        """Incarnations by the second of their creation, which is part of the lease keys."""
        self._beginnings: list[int] = []
        """The lowest sequence number of each incarnation."""
        self._parents: dict[str, tuple[str, ...]] = {}
        """The parents of every shard that ever existed, by its name in the journal."""
        self.written: list[facts.StreamRecord] = []
        """In the order of the writes."""
        self._kept: dict[str, list[tuple[int, facts.StreamRecord]]] = {}
        """The records of each shard that are not excused, with their arrival times."""
        self._first_count = 0
        self._ahead_ms = 0
        self._readable = _ReadableShards(self)
        journal.checkers.append(self._readable)

    @property
    def has_unreported_change(self) -> bool:
        """The stream is gone or was created again, and no consumer has reported it."""
        return not self.exists or (self._was_known and not self.changes_reported)

    def now_ms(self) -> int:
        """The service's clock."""
        return _WALL_MS + int(self._loop.time() * 1000) + self._ahead_ms

    def journal_shard_id(self, shard_id: str, sequence_number: int) -> str:
        """The shard's name in the journal."""
        return facts.incarnation_name(shard_id, max(0, bisect_right(self._beginnings, sequence_number) - 1))

    def incarnation_of(self, key: LeaseKey) -> int:
        return self._created[int(key.stream_key.rpartition(":")[2])]

    def _call(self, operation: str, **request: Any) -> dict[str, Any]:
        return self.state.call(operation, request, now_ms=self.now_ms())

    def create(self, shard_count: int) -> None:
        self._first_count = shard_count
        self.incarnation += 1
        self._created[self.now_ms() // 1000] = self.incarnation
        self._call("CreateStream", StreamName=STREAM, ShardCount=shard_count)
        self.exists = True
        numbers = [int(shard["SequenceNumberRange"]["StartingSequenceNumber"]) for shard in self._list()]
        self._beginnings.append(min(numbers))
        self._note_shards()

    def delete(self, *, is_known: bool) -> None:
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

    def _list(self) -> list[dict[str, Any]]:
        shards: list[dict[str, Any]] = self._call("ListShards", StreamName=STREAM)["Shards"]
        return shards

    def _note_shards(self) -> list[dict[str, Any]]:
        shards = self._list()
        for shard in shards:
            name = facts.incarnation_name(shard["ShardId"], self.incarnation)
            if name not in self._parents:
                parents = [shard.get("ParentShardId"), shard.get("AdjacentParentShardId")]
                self._parents[name] = tuple(
                    facts.incarnation_name(parent, self.incarnation) for parent in parents if parent
                )
                self._journal.tell(facts.ShardOpened(name, self._parents[name]))
        return shards

    # writing

    def write(self, records: Sequence[tuple[str, bytes]], *, is_aggregate: bool = False) -> None:
        """Writes the records one by one, or all as one KPL aggregate; then they must belong to one shard."""
        named = [(self._named(partition_key), data) for partition_key, data in records]
        if not is_aggregate:
            for partition_key, data in named:
                self._note_written(self._put(partition_key, data), BEFORE_FIRST_SUB, partition_key)
            return
        builder = AggregateBuilder()
        for partition_key, data in named:
            builder.add(partition_key, data, size_max=_AGGREGATE_BYTES_MAX)
        answer = self._put(named[0][0], builder.finish())
        for index, (partition_key, _) in enumerate(named):
            self._note_written(answer, index, partition_key)

    def _named(self, partition_key: str) -> str:
        return facts.incarnation_name(partition_key, self.incarnation)

    def _put(self, partition_key: str, data: bytes) -> dict[str, Any]:
        return self._call("PutRecord", StreamName=STREAM, PartitionKey=partition_key, Data=data)

    def _note_written(self, answer: dict[str, Any], sub_sequence_number: int, partition_key: str) -> None:
        position = Position(int(answer["SequenceNumber"]), sub_sequence_number)
        record = facts.StreamRecord(
            facts.incarnation_name(answer["ShardId"], self.incarnation), position, partition_key
        )
        # It may be in the future in a new shard, whose records arrive after all records of its parents.
        arrival_ms = self.state.account.streams[STREAM].shards[answer["ShardId"]].log.records[-1].arrival_ms
        self._kept.setdefault(record.shard_id, []).append((arrival_ms, record))
        self.written.append(record)
        self._journal.tell(facts.RecordWritten(record))

    def tell_received(self, process: SimulatedProcess, received_bytes: int, counted_bytes: int) -> None:
        self._journal.tell(facts.BytesReceived(process.world_ms(), process.name, received_bytes, counted_bytes))

    def shard_for(self, partition_key: str) -> str:
        routing = self.state.account.streams[STREAM].routing
        return routing.shard_for(md5_hash_key(self._named(partition_key))).shard_id

    # trimming

    def skip_ahead(self, kept_seconds: float) -> None:
        """Advances the service's clock so that only records of the last `kept_seconds` are left."""
        self._ahead_ms += _RETENTION_MS - int(kept_seconds * 1000)

    def listed_shards(self) -> set[str]:
        """The shards that have not been trimmed."""
        return (
            {facts.incarnation_name(shard["ShardId"], self.incarnation) for shard in self._list()}
            if self.exists
            else set()
        )

    def excuse(self, shard_id: str, since_seconds: float | None) -> None:
        """A consumer reported that records of this shard were lost, so its trimmed records need not be handled. The
        same holds for descendants that are not listed any more, and in such ancestors for records since the reported
        time; but only if no worker could read those shards. A shard that had a lease while it was listed must be
        reported by itself.
        """
        if not self.exists:
            return
        listed = self.listed_shards()
        unseen = {name for name in self._parents if name not in listed and name not in self._readable.shards}
        gone = {facts.incarnation_name(shard_id, self.incarnation)}
        for name, parents in self._parents.items():  # in the order of their creation
            if name in unseen and any(parent in gone for parent in parents):
                gone.add(name)
        before = {facts.incarnation_name(shard_id, self.incarnation)}
        for name in reversed(self._parents):
            if name in before:
                before.update(parent for parent in self._parents[name] if parent in unseen)
        horizon_ms, since_ms = self.now_ms() - _RETENTION_MS, int((since_seconds or 0) * 1000)
        for name in [name for name in self._kept if name in gone or name in before]:
            first_ms = 0 if name in gone else since_ms
            kept = self._kept[name]
            for _, record in (lost := [entry for entry in kept if first_ms <= entry[0] <= horizon_ms]):
                self._journal.tell(facts.RecordExcused(record))
            self._kept[name] = [entry for entry in kept if entry not in lost]

    # fan-out

    def take_over(self) -> None:
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

    def delete_consumer(self) -> None:
        consumers = list(self.state.account.streams[STREAM].consumers.values()) if self.exists else []
        if consumers:
            self._call("DeregisterStreamConsumer", ConsumerARN=self._random.choice(consumers).arn)

    # resharding

    def reshard(self) -> None:
        """Splits a shard, merges two, or does both: then a shard may open and close between two listings."""
        if not self.exists:
            return
        for _ in range(self._random.choice([1, 1, 2])):
            can_merge = len(self._open_shards()) > 1
            if not (self.merge() if can_merge and self._random.random() < 0.5 else self.split()):
                return

    def split(self) -> bool:
        """Splits a random shard in the middle. Returns False if it is too small, or the stream is updating."""
        if not self.exists:
            return False
        shard = self._random.choice(self._open_shards())
        low, high = (int(shard["HashKeyRange"][name]) for name in ("StartingHashKey", "EndingHashKey"))
        return self._change("SplitShard", ShardToSplit=shard["ShardId"], NewStartingHashKey=str((low + high) // 2 + 1))

    def merge(self) -> bool:
        """Merges two random neighbours. Returns False if it cannot."""
        shards = self._open_shards() if self.exists else []
        if len(shards) < 2:
            return False
        index = self._random.randrange(len(shards) - 1)
        one, other = shards[index : index + 2]
        return self._change("MergeShards", ShardToMerge=one["ShardId"], AdjacentShardToMerge=other["ShardId"])

    def rescale(self) -> bool:
        """Changes the shard count as UpdateShardCount does: many splits and merges at once."""
        if not self.exists:
            return False
        present = len(self._open_shards())
        most = max(present, min(2 * present, self._first_count + 4))
        target = self._random.randrange((present + 1) // 2, most + 1)
        return self._change("UpdateShardCount", TargetShardCount=target, ScalingType="UNIFORM_SCALING")

    def _open_shards(self) -> list[dict[str, Any]]:
        shards = [shard for shard in self._note_shards() if "EndingSequenceNumber" not in shard["SequenceNumberRange"]]
        return sorted(shards, key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]))

    def _change(self, operation: str, **request: Any) -> bool:
        try:
            self._call(operation, StreamName=STREAM, **request)
        except LocalError:
            return False
        self._note_shards()
        return True


class SimulatedKinesis(Kinesis):
    """One process's Kinesis client. Requests and answers pass through the codecs of the client and of the server."""

    def __init__(
        self,
        stream: SimulatedStream,
        network: Network,
        process: SimulatedProcess,
        options: FleetOptions,
        random: Random,
        budget: Budget,
    ) -> None:
        self._stream = stream
        self._network = network
        self._process = process
        self._options = options
        self._random = random
        self._budget = budget
        self._receiving_bytes = 0
        """The bodies of responses that are arriving."""

    async def _call(self, operation: str, request: list[bytes]) -> tuple[bytes, float]:
        """The answer's body, and the service's time in seconds: its clock may skip ahead while the answer travels."""
        members = JSON.decode(operation, b"".join(request))
        assert isinstance(members, dict)

        def perform() -> tuple[bytes, float]:
            now_ms = self._stream.now_ms()
            answer = self._stream.state.call(operation, members, now_ms=now_ms)
            return JSON.encode(answer), now_ms / 1000

        return await self._send(operation, perform)

    async def _send(self, operation: str, perform: Callable[[], T]) -> T:
        def refuse_or_perform() -> T:
            self._refuse_sometimes(operation)
            try:
                return perform()
            except LocalError as error:
                raise service_error(operation, AwsError(error.code, error.message), status=error.status) from error

        def timeout_error() -> Exception:
            return TransportError(f"{operation}: no answer")

        return await self._network.call(self._process, "stream", refuse_or_perform, timeout_error)  # type: ignore[no-any-return]

    def _refuse_sometimes(self, operation: str) -> None:
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

    def _refuse(self, operation: str, code: str, status: int) -> NoReturn:
        raise service_error(operation, AwsError(code, "a simulated fault"), status=status)

    async def get_shard_iterator(self, stream: StreamName, shard_id: str, position: StartingPosition) -> str:
        request = bodies.encode_get_shard_iterator(stream, shard_id, position)
        body, _ = await self._call("GetShardIterator", request)
        return bodies.decode_get_shard_iterator(body)

    async def get_records(
        self,
        stream: StreamName,
        shard_iterator: str,
        *,
        limit: int | None = None,
        has_room: Callable[[int], bool] | None = None,
    ) -> GetRecordsResponse | None:
        """Every response counts as a large one. With a tight budget, its body takes a while to arrive."""
        request = bodies.encode_get_records(stream, shard_iterator, limit=limit)
        body, server_seconds = await self._call("GetRecords", request)
        if has_room is not None and not has_room(len(body)):
            return None
        self._receiving_bytes += len(body)
        try:
            self._stream.tell_received(self._process, self._receiving_bytes, self._budget.used_bytes)
            if self._options.budget_bytes:
                await asyncio.sleep(_BODY_SECONDS)
            return bodies.decode_get_records(body, server_seconds=server_seconds)
        finally:
            self._receiving_bytes -= len(body)

    async def list_shards(
        self,
        stream: StreamName,
        *,
        shard_filter: ShardFilter | None = None,
        next_token: str | None = None,
        max_results: int | None = None,
    ) -> ListShardsResponse:
        page = max_results or self._options.listing_page or None
        request = bodies.encode_list_shards(stream, shard_filter=shard_filter, next_token=next_token, max_results=page)
        body, _ = await self._call("ListShards", request)
        return bodies.decode_list_shards(body)

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary:
        body, server_seconds = await self._call("DescribeStreamSummary", bodies.encode_describe_stream_summary(stream))
        return bodies.decode_describe_stream_summary(body, server_seconds=server_seconds)

    async def subscribe_to_shard(
        self, consumer_arn: str, shard_id: str, position: StartingPosition
    ) -> EventSubscription:
        body = b"".join(bodies.encode_subscribe_to_shard(consumer_arn, shard_id, position))
        members = JSON.decode("SubscribeToShard", body)
        assert isinstance(members, dict)
        stream, streams = self._stream, self._stream.subscriptions
        subscription = await self._send(
            "SubscribeToShard", lambda: stream.state.subscribe(members, now_ms=stream.now_ms())
        )
        opened = streams.open(subscription, self._process, self._network, self._options)
        return EventSubscription(opened, streams)

    async def register_stream_consumer(self, stream_arn: str, name: str) -> ConsumerDescription:
        body, _ = await self._call("RegisterStreamConsumer", bodies.encode_register_stream_consumer(stream_arn, name))
        return bodies.decode_register_stream_consumer(body)

    async def describe_stream_consumer(
        self, *, stream_arn: str | None = None, name: str | None = None, consumer_arn: str | None = None
    ) -> ConsumerDescription:
        request = bodies.encode_describe_stream_consumer(stream_arn=stream_arn, name=name, consumer_arn=consumer_arn)
        body, _ = await self._call("DescribeStreamConsumer", request)
        return bodies.decode_describe_stream_consumer(body)

    async def list_stream_consumers(
        self, stream_arn: str, *, next_token: str | None = None, max_results: int | None = None
    ) -> ListStreamConsumersResponse:
        request = bodies.encode_list_stream_consumers(stream_arn, next_token=next_token, max_results=max_results)
        body, _ = await self._call("ListStreamConsumers", request)
        return bodies.decode_list_stream_consumers(body)

    async def deregister_stream_consumer(self, consumer_arn: str) -> None:
        await self._call("DeregisterStreamConsumer", bodies.encode_deregister_stream_consumer(consumer_arn))
