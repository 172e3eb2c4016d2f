"""The stream of a simulated fleet, as its writers and its operator see it: records come, shards split and merge.

Everything that happens to it is told to the journal.
"""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

from anabranch._model.hash_keys import md5_hash_key
from anabranch._model.sequence_numbers import BEFORE_FIRST_SUB, Position
from anabranch._wire.aggregate import AggregateBuilder
from anabranch.local.calls import LocalState
from anabranch.local.errors import LocalError
from anabranch.testing.checkers import Journal, ShardOpened, Written

__all__ = ["STREAM", "SimulatedStream"]

STREAM = "orders"
_WALL_MS = 1_700_000_000_000
_AGGREGATE_BYTES_MAX = 1 << 20


class SimulatedStream:
    def __init__(self, loop: asyncio.AbstractEventLoop, journal: Journal, random: Random) -> None:
        self.state = LocalState(entropy=random)
        self._loop = loop
        self._journal = journal
        self._random = random
        self._known_shards: dict[str, None] = {}
        self._first_count = 0

    def now_ms(self) -> int:
        """The service's time."""
        return _WALL_MS + int(self._loop.time() * 1000)

    def _call(self, operation: str, **request: Any) -> dict[str, Any]:
        return self.state.call(operation, request, now_ms=self.now_ms())

    def create(self, shard_count: int) -> None:
        self._first_count = shard_count
        self._call("CreateStream", StreamName=STREAM, ShardCount=shard_count)
        self._note_shards()

    def _note_shards(self) -> list[dict[str, Any]]:
        shards: list[dict[str, Any]] = self._call("ListShards", StreamName=STREAM)["Shards"]
        for shard in shards:
            if shard["ShardId"] not in self._known_shards:
                self._known_shards[shard["ShardId"]] = None
                parents = [shard.get("ParentShardId"), shard.get("AdjacentParentShardId")]
                self._journal.opened(ShardOpened(shard["ShardId"], tuple(name for name in parents if name)))
        return shards

    # writing

    def write(self, partition_key: str, data: bytes) -> None:
        answer = self._call("PutRecord", StreamName=STREAM, PartitionKey=partition_key, Data=data)
        self._note_written(answer, BEFORE_FIRST_SUB, partition_key)

    def write_aggregate(self, records: Sequence[tuple[str, bytes]]) -> None:
        """As one record, as the KPL writes it; all of one shard."""
        builder = AggregateBuilder()
        for partition_key, data in records:
            builder.add(partition_key, data, size_max=_AGGREGATE_BYTES_MAX)
        answer = self._call("PutRecord", StreamName=STREAM, PartitionKey=records[0][0], Data=builder.finish())
        for index, (partition_key, _) in enumerate(records):
            self._note_written(answer, index, partition_key)

    def _note_written(self, answer: dict[str, Any], sub_sequence_number: int, partition_key: str) -> None:
        position = Position(int(answer["SequenceNumber"]), sub_sequence_number)
        self._journal.written(Written(answer["ShardId"], position, partition_key))

    def shard_for(self, partition_key: str) -> str:
        routing = self.state.account.streams[STREAM].routing
        return routing.shard_for(md5_hash_key(partition_key)).shard_id

    # resharding

    def reshard(self) -> None:
        """Splits a shard, merges two, or both in a row, so that a shard may come and go between two listings."""
        for _ in range(self._random.choice([1, 1, 2])):
            can_merge = len(self._open_shards()) > 1
            if not (self.merge() if can_merge and self._random.random() < 0.5 else self.split()):
                return

    def split(self) -> bool:
        """Some shard, in the middle. False if that cannot be now: still changing, or too small."""
        shard = self._random.choice(self._open_shards())
        low, high = (int(shard["HashKeyRange"][name]) for name in ("StartingHashKey", "EndingHashKey"))
        return self._change("SplitShard", ShardToSplit=shard["ShardId"], NewStartingHashKey=str((low + high) // 2 + 1))

    def merge(self) -> bool:
        """Some two neighbours. False if that cannot be now."""
        shards = self._open_shards()
        if len(shards) < 2:
            return False
        index = self._random.randrange(len(shards) - 1)
        one, other = shards[index : index + 2]
        return self._change("MergeShards", ShardToMerge=one["ShardId"], AdjacentShardToMerge=other["ShardId"])

    def rescale(self) -> bool:
        """To some other count, as UpdateShardCount does it: many splits and merges at once."""
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
