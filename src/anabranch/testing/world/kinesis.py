"""Kinesis in a simulation: the local server's pure state, as its writers and operators see it (`SimulatedStream`) and
behind the engine's port (`SimulatedKinesis`).

Everything that happens to the stream is told to the journal.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from anabranch._aws.errors import service_error
from anabranch._model.streams import BEFORE_FIRST_SUB, Position, ShardFilter, StartingPosition, StreamName
from anabranch._wire import bodies
from anabranch._wire.bodies import AwsError
from anabranch._wire.messages import GetRecordsResponse, ListShardsResponse, StreamSummary
from anabranch.budget import Budget
from anabranch.errors import TransportError
from anabranch.local.bodies import JSON
from anabranch.local.errors import LocalError
from anabranch.local.service import LocalState
from anabranch.testing import journal as facts
from anabranch.testing.world.options import STREAM
from anabranch.testing.world.processes import WALL_START_MS, SimulatedProcess

if TYPE_CHECKING:
    from anabranch.testing.world.fleet import SimulatedFleet

T = TypeVar("T")


class SimulatedStream:
    def __init__(self, fleet: "SimulatedFleet") -> None:
        self._loop = fleet.loop
        self._journal = fleet.journal
        self._random = fleet.random
        self.state = LocalState(entropy=fleet.random)
        self.parents: dict[str, tuple[str, ...]] = {}
        """The parents of every shard that ever existed, by its name in the journal, in the order of their creation."""
        self.written: list[facts.StreamRecord] = []
        """In the order of the writes."""
        self._first_count = 0

    def now_ms(self) -> int:
        """The service's clock."""
        return WALL_START_MS + int(self._loop.time() * 1000)

    def journal_name(self, name: str) -> str:
        """The journal's name of a shard or partition key of the stream that there is now."""
        return name

    def journal_shard_id(self, shard_id: str, sequence_number: int) -> str:  # noqa: ARG002 -- for streams that are created again
        """The journal's name of the shard that has this record."""
        return shard_id

    def _call(self, operation: str, **request: Any) -> dict[str, Any]:
        return self.state.call(operation, request, now_ms=self.now_ms())

    def create(self, shard_count: int) -> None:
        self._first_count = shard_count
        self._call("CreateStream", StreamName=STREAM, ShardCount=shard_count)
        self._note_shards()

    def _list(self) -> list[dict[str, Any]]:
        shards: list[dict[str, Any]] = self._call("ListShards", StreamName=STREAM)["Shards"]
        return shards

    def _note_shards(self) -> list[dict[str, Any]]:
        shards = self._list()
        for shard in shards:
            name = self.journal_name(shard["ShardId"])
            if name not in self.parents:
                parents = [shard.get("ParentShardId"), shard.get("AdjacentParentShardId")]
                self.parents[name] = tuple(self.journal_name(parent) for parent in parents if parent)
                self._journal.tell(facts.ShardOpened(name, self.parents[name]))
        return shards

    # writing

    def write(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Writes (partition key, data) pairs one by one."""
        for given_key, data in records:
            partition_key = self.journal_name(given_key)
            self._note_written(self._put(partition_key, data), BEFORE_FIRST_SUB, partition_key)

    def _put(self, partition_key: str, data: bytes) -> dict[str, Any]:
        return self._call("PutRecord", StreamName=STREAM, PartitionKey=partition_key, Data=data)

    def _note_written(self, answer: dict[str, Any], sub_sequence_number: int, partition_key: str) -> None:
        position = Position(int(answer["SequenceNumber"]), sub_sequence_number)
        record = facts.StreamRecord(self.journal_name(answer["ShardId"]), position, partition_key)
        self.written.append(record)
        self._journal.tell(facts.RecordWritten(record))

    # resharding

    def reshard(self) -> None:
        """Splits a shard, merges two, or does both: then a shard may open and close between two listings."""
        for _ in range(self._random.choice([1, 1, 2])):
            can_merge = len(self._open_shards()) > 1
            if not (self.merge() if can_merge and self._random.random() < 0.5 else self.split()):
                return

    def split(self) -> bool:
        """Splits a random shard in the middle. Returns False if it is too small, or the stream is updating."""
        shard = self._random.choice(self._open_shards())
        low, high = (int(shard["HashKeyRange"][name]) for name in ("StartingHashKey", "EndingHashKey"))
        return self._change("SplitShard", ShardToSplit=shard["ShardId"], NewStartingHashKey=str((low + high) // 2 + 1))

    def merge(self) -> bool:
        """Merges two random neighbours. Returns False if it cannot."""
        shards = self._open_shards()
        if len(shards) < 2:
            return False
        index = self._random.randrange(len(shards) - 1)
        one, other = shards[index : index + 2]
        return self._change("MergeShards", ShardToMerge=one["ShardId"], AdjacentShardToMerge=other["ShardId"])

    def rescale(self) -> bool:
        """Changes the shard count as UpdateShardCount does: many splits and merges at once."""
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


class SimulatedKinesis:
    """One process's Kinesis client. Requests and answers pass through the codecs of the client and of the server."""

    body_seconds = 0.0
    """How long the body of a response to GetRecords takes to arrive."""
    listing_page: int | None = None
    """How many shards a page of ListShards has; None for all."""

    def __init__(self, fleet: "SimulatedFleet", process: SimulatedProcess, budget: Budget) -> None:
        self._stream = fleet.stream
        self._network = fleet.network
        self._process = process
        self._journal = fleet.journal
        self._options = fleet.options
        self._random = fleet.random
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

        no_answer = TransportError(f"{operation}: no answer")
        return await self._network.call(self._process, "stream", refuse_or_perform, no_answer)  # type: ignore[no-any-return]

    def _refuse_sometimes(self, operation: str) -> None:
        if not self._network.is_calm and self._random.random() < self._options.throttled:
            self._refuse(operation, "ProvisionedThroughputExceededException", 400)

    def _refuse(self, operation: str, code: str, status: int) -> NoReturn:
        raise service_error(operation, AwsError(code, "a simulated fault"), status=status)

    async def get_shard_iterator(self, stream: StreamName, shard_id: str, position: StartingPosition) -> str:
        request = bodies.encode_get_shard_iterator(stream, shard_id, position)
        body, _ = await self._call("GetShardIterator", request)
        return bodies.decode_get_shard_iterator(body)

    async def get_records(
        self, stream: StreamName, shard_iterator: str, *, has_room: Callable[[int], bool] | None = None
    ) -> GetRecordsResponse | None:
        """Asks `has_room` for every response, whatever its size."""
        request = bodies.encode_get_records(stream, shard_iterator)
        body, server_seconds = await self._call("GetRecords", request)
        if has_room is not None and not has_room(len(body)):
            return None
        self._receiving_bytes += len(body)
        try:
            now_ms, name = self._process.world_ms(), self._process.name
            self._journal.tell(facts.BytesReceived(now_ms, name, self._receiving_bytes, self._budget.used_bytes))
            if self.body_seconds:
                await asyncio.sleep(self.body_seconds)
            return bodies.decode_get_records(body, server_seconds=server_seconds)
        finally:
            self._receiving_bytes -= len(body)

    async def list_shards(
        self, stream: StreamName, *, shard_filter: ShardFilter | None = None, next_token: str | None = None
    ) -> ListShardsResponse:
        request = bodies.encode_list_shards(
            stream, shard_filter=shard_filter, next_token=next_token, max_results=self.listing_page
        )
        body, _ = await self._call("ListShards", request)
        return bodies.decode_list_shards(body)

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary:
        body, server_seconds = await self._call("DescribeStreamSummary", bodies.encode_describe_stream_summary(stream))
        return bodies.decode_describe_stream_summary(body, server_seconds=server_seconds)
