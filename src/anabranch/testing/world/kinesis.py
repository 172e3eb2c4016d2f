"""Kinesis in a simulation: the local server's pure state behind the engine's port, reached over the network."""

from collections.abc import Mapping
from random import Random
from typing import Any, NoReturn

from anabranch._aws.errors import service_error
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Shard, ShardFilter, StartingPosition, StreamName
from anabranch._ports import Kinesis
from anabranch._wire.bodies import AwsError
from anabranch._wire.messages import (
    ChildShard,
    GetRecordsResponse,
    KinesisRecord,
    ListShardsResponse,
    StreamSummary,
)
from anabranch.errors import TransportError
from anabranch.local.errors import LocalError
from anabranch.testing.world.network import Network
from anabranch.testing.world.options import FleetOptions
from anabranch.testing.world.processes import SimulatedProcess
from anabranch.testing.world.stream import SimulatedStream

__all__ = ["SimulatedKinesis"]


class SimulatedKinesis(Kinesis):
    """One process's client."""

    def __init__(
        self,
        stream: SimulatedStream,
        network: Network,
        process: SimulatedProcess,
        options: FleetOptions,
        random: Random,
    ) -> None:
        self._stream = stream
        self._network = network
        self._process = process
        self._options = options
        self._random = random

    async def _call(self, operation: str, request: Mapping[str, Any]) -> dict[str, Any]:
        answer, _ = await self._timed_call(operation, request)
        return answer

    async def _timed_call(self, operation: str, request: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """With the service's time at which it was answered: its clock may leap while the answer is on its way."""

        def perform() -> tuple[dict[str, Any], int]:
            self._refuse_sometimes(operation)
            now_ms = self._stream.now_ms()
            try:
                return self._stream.state.call(operation, request, now_ms=now_ms), now_ms
            except LocalError as error:
                raise service_error(operation, AwsError(error.code, error.message), status=error.status) from error

        def no_answer() -> Exception:
            return TransportError(f"{operation}: no answer")

        return await self._network.call(self._process, "stream", perform, no_answer)  # type: ignore[no-any-return]

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

    def _refuse(self, operation: str, code: str, status: int) -> NoReturn:
        raise service_error(operation, AwsError(code, "by a fault of the simulation"), status=status)

    # reading

    async def get_shard_iterator(self, stream: StreamName, shard_id: str, position: StartingPosition) -> str:
        request: dict[str, Any] = {
            "StreamName": stream.name,
            "ShardId": shard_id,
            "ShardIteratorType": position.type,
        }
        if position.sequence_number is not None:
            request["StartingSequenceNumber"] = position.sequence_number
        if position.timestamp_seconds is not None:
            request["Timestamp"] = position.timestamp_seconds
        answer = await self._call("GetShardIterator", request)
        return str(answer["ShardIterator"])

    async def get_records(
        self, stream: StreamName, shard_iterator: str, *, limit: int | None = None
    ) -> GetRecordsResponse:
        del stream
        request: dict[str, Any] = {"ShardIterator": shard_iterator}
        if limit is not None:
            request["Limit"] = limit
        answer, now_ms = await self._timed_call("GetRecords", request)
        records = [
            KinesisRecord(
                data=record["Data"],
                partition_key=record["PartitionKey"],
                sequence_number=record["SequenceNumber"],
                arrival_seconds=record["ApproximateArrivalTimestamp"],
            )
            for record in (stored.members() for stored in answer["Records"])
        ]
        return GetRecordsResponse(
            records,
            answer.get("NextShardIterator"),
            answer.get("MillisBehindLatest"),
            tuple(_child(child) for child in answer.get("ChildShards", ())),
            now_ms / 1000,
        )

    # what there is

    async def list_shards(
        self,
        stream: StreamName,
        *,
        shard_filter: ShardFilter | None = None,
        next_token: str | None = None,
        max_results: int | None = None,
    ) -> ListShardsResponse:
        request: dict[str, Any] = {"StreamName": stream.name} if next_token is None else {"NextToken": next_token}
        if shard_filter is not None and next_token is None:
            members = {
                "Type": shard_filter.type,
                "ShardId": shard_filter.shard_id,
                "Timestamp": shard_filter.timestamp_seconds,
            }
            request["ShardFilter"] = {name: value for name, value in members.items() if value is not None}
        if (page := max_results or self._options.listing_page) != 0:
            request["MaxResults"] = page
        answer = await self._call("ListShards", request)
        return ListShardsResponse(tuple(_shard(shard) for shard in answer["Shards"]), answer.get("NextToken"))

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary:
        answer, now_ms = await self._timed_call("DescribeStreamSummary", {"StreamName": stream.name})
        summary = answer["StreamDescriptionSummary"]
        return StreamSummary(
            name=summary["StreamName"],
            arn=summary["StreamARN"],
            status=summary["StreamStatus"],
            created_seconds=float(summary["StreamCreationTimestamp"]),
            retention_hours=summary["RetentionPeriodHours"],
            open_shard_count=summary["OpenShardCount"],
            server_seconds=now_ms / 1000,
        )


def _shard(members: Mapping[str, Any]) -> Shard:
    numbers = members["SequenceNumberRange"]
    ending = numbers.get("EndingSequenceNumber")
    return Shard(
        shard_id=members["ShardId"],
        hash_key_range=_range(members["HashKeyRange"]),
        starting_sequence_number=int(numbers["StartingSequenceNumber"]),
        ending_sequence_number=None if ending is None else int(ending),
        parent_shard_id=members.get("ParentShardId"),
        adjacent_parent_shard_id=members.get("AdjacentParentShardId"),
    )


def _child(members: Mapping[str, Any]) -> ChildShard:
    return ChildShard(members["ShardId"], tuple(members["ParentShards"]), _range(members["HashKeyRange"]))


def _range(members: Mapping[str, Any]) -> HashKeyRange:
    return HashKeyRange(int(members["StartingHashKey"]), int(members["EndingHashKey"]))
