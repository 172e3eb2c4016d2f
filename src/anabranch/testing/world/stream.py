"""The stream of a simulated fleet, as its writers and its operator see it: records come and fall off, shards split and
merge, and the whole of it is deleted and created anew.

Everything that happens to it is told to the journal. What falls off is excused where a consumer says that it was lost;
for that the service's clock leaps ahead by almost the retention, since a day of waiting would be a day of polling.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from random import Random
from typing import Any

from anabranch._model.hash_keys import md5_hash_key
from anabranch._model.leases import LeaseKey
from anabranch._model.streams import BEFORE_FIRST_SUB, Position
from anabranch._wire.aggregate import AggregateBuilder
from anabranch.local.errors import LocalError
from anabranch.local.service import LocalState
from anabranch.testing.journal import (
    Checker,
    Fact,
    Journal,
    LeaseCreated,
    RecordDeleted,
    RecordExcused,
    RecordWritten,
    ShardOpened,
    StreamRecord,
    incarnation_name,
)

__all__ = ["STREAM", "SimulatedStream"]

STREAM = "orders"
_WALL_MS = 1_700_000_000_000
_RETENTION_MS = 24 * 3_600_000
_AGGREGATE_BYTES_MAX = 1 << 20


class _Leases(Checker):
    """Checks nothing, but sees which shards somebody could have read: they had a lease while they were there."""

    def __init__(self, stream: "SimulatedStream") -> None:
        super().__init__()
        self._stream = stream
        self.readable: dict[str, None] = {}

    def tell(self, fact: Fact) -> None:
        match fact:
            case LeaseCreated(write) if write.shard_id in self._stream.present():
                self.readable[write.shard_id] = None


class SimulatedStream:
    def __init__(self, loop: asyncio.AbstractEventLoop, journal: Journal, random: Random) -> None:
        self.state = LocalState(entropy=random)
        self._loop = loop
        self._journal = journal
        self._random = random
        self.incarnation = -1
        self.is_there = False
        self._was_known = False
        self.changes_told = 0
        """How often a consumer has said that the stream is gone, or another one."""
        self._created: dict[int, int] = {}
        """The incarnations by the second of their creation, which lease rows name them by."""
        self._beginnings: list[int] = []
        """The lowest sequence number of each incarnation."""
        self._parents: dict[str, tuple[str, ...]] = {}
        """Of every shard that there ever was, by its name in the journal."""
        self._kept: dict[str, list[tuple[int, StreamRecord]]] = {}
        """What was written to each shard and not excused since, with the time of its arrival."""
        self._first_count = 0
        self._ahead_ms = 0
        self._leases = _Leases(self)
        journal.checkers.append(self._leases)

    @property
    def has_untold_change(self) -> bool:
        """It is gone, or another one, and no consumer has said so."""
        return not self.is_there or (self._was_known and not self.changes_told)

    def now_ms(self) -> int:
        """The service's time."""
        return _WALL_MS + int(self._loop.time() * 1000) + self._ahead_ms

    def place(self, shard_id: str, sequence_number: int) -> str:
        """The shard's name in the journal."""
        return incarnation_name(shard_id, max(0, bisect_right(self._beginnings, sequence_number) - 1))

    def incarnation_of(self, key: LeaseKey) -> int:
        return self._created[int(key.stream_key.rpartition(":")[2])]

    def _call(self, operation: str, **request: Any) -> dict[str, Any]:
        return self.state.call(operation, request, now_ms=self.now_ms())

    def create(self, shard_count: int) -> None:
        self._first_count = shard_count
        self.incarnation += 1
        self._created[self.now_ms() // 1000] = self.incarnation
        self._call("CreateStream", StreamName=STREAM, ShardCount=shard_count)
        self.is_there = True
        numbers = [int(shard["SequenceNumberRange"]["StartingSequenceNumber"]) for shard in self._list()]
        self._beginnings.append(min(numbers))
        self._note_shards()

    def delete(self, *, is_known: bool) -> None:
        """With all that is in it: nobody can be asked to handle that any more, and nobody may say that he has.
        `is_known`: to the lease store, so that whoever looks can tell.
        """
        self._was_known = self._was_known or is_known
        self._call("DeleteStream", StreamName=STREAM)
        self.is_there = False
        for kept in self._kept.values():
            for _, record in kept:
                self._journal.tell(RecordDeleted(record))
        self._kept.clear()

    def _list(self) -> list[dict[str, Any]]:
        shards: list[dict[str, Any]] = self._call("ListShards", StreamName=STREAM)["Shards"]
        return shards

    def _note_shards(self) -> list[dict[str, Any]]:
        shards = self._list()
        for shard in shards:
            name = incarnation_name(shard["ShardId"], self.incarnation)
            if name not in self._parents:
                parents = [shard.get("ParentShardId"), shard.get("AdjacentParentShardId")]
                self._parents[name] = tuple(incarnation_name(parent, self.incarnation) for parent in parents if parent)
                self._journal.tell(ShardOpened(name, self._parents[name]))
        return shards

    # writing

    def write(self, records: Sequence[tuple[str, bytes]], *, is_aggregate: bool = False) -> None:
        """One by one, or all as one record, as the KPL writes it; those of an aggregate are of one shard."""
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
        """A key of a stream that was created anew is another one: nothing is promised of their order."""
        return incarnation_name(partition_key, self.incarnation)

    def _put(self, partition_key: str, data: bytes) -> dict[str, Any]:
        return self._call("PutRecord", StreamName=STREAM, PartitionKey=partition_key, Data=data)

    def _note_written(self, answer: dict[str, Any], sub_sequence_number: int, partition_key: str) -> None:
        position = Position(int(answer["SequenceNumber"]), sub_sequence_number)
        record = StreamRecord(incarnation_name(answer["ShardId"], self.incarnation), position, partition_key)
        # A shard that has just opened may give it a time to come: what arrives in it comes after all in its parents.
        arrival_ms = self.state.account.streams[STREAM].shards[answer["ShardId"]].log.records[-1].arrival_ms
        self._kept.setdefault(record.shard_id, []).append((arrival_ms, record))
        self._journal.tell(RecordWritten(record))

    def shard_for(self, partition_key: str) -> str:
        routing = self.state.account.streams[STREAM].routing
        return routing.shard_for(md5_hash_key(self._named(partition_key))).shard_id

    # falling off

    def leap(self, kept_seconds: float) -> None:
        """The service's clock goes on by so much that only what came in the last seconds is kept."""
        self._ahead_ms += _RETENTION_MS - int(kept_seconds * 1000)

    def present(self) -> set[str]:
        """The shards that have not been trimmed."""
        return (
            {incarnation_name(shard["ShardId"], self.incarnation) for shard in self._list()} if self.is_there else set()
        )

    def excuse(self, shard_id: str, since_seconds: float | None) -> None:
        """A consumer has said that records of this shard were lost: those that have fallen off need not be handled.
        With it go the shards after it that are gone altogether, and in those before it what came since the time that
        was named; but only where nobody could read them: one that had a lease while it was there tells by itself.
        """
        if not self.is_there:
            return
        there = self.present()
        unseen = {name for name in self._parents if name not in there and name not in self._leases.readable}
        gone = {incarnation_name(shard_id, self.incarnation)}
        for name, parents in self._parents.items():  # in the order of their creation
            if name in unseen and any(parent in gone for parent in parents):
                gone.add(name)
        before = {incarnation_name(shard_id, self.incarnation)}
        for name in reversed(self._parents):
            if name in before:
                before.update(parent for parent in self._parents[name] if parent in unseen)
        horizon_ms, since_ms = self.now_ms() - _RETENTION_MS, int((since_seconds or 0) * 1000)
        for name in [name for name in self._kept if name in gone or name in before]:
            first_ms = 0 if name in gone else since_ms
            kept = self._kept[name]
            for _, record in (lost := [entry for entry in kept if first_ms <= entry[0] <= horizon_ms]):
                self._journal.tell(RecordExcused(record))
            self._kept[name] = [entry for entry in kept if entry not in lost]

    # resharding

    def reshard(self) -> None:
        """Splits a shard, merges two, or both in a row, so that a shard may come and go between two listings."""
        if not self.is_there:
            return
        for _ in range(self._random.choice([1, 1, 2])):
            can_merge = len(self._open_shards()) > 1
            if not (self.merge() if can_merge and self._random.random() < 0.5 else self.split()):
                return

    def split(self) -> bool:
        """Some shard, in the middle. False if that cannot be now: still changing, or too small."""
        if not self.is_there:
            return False
        shard = self._random.choice(self._open_shards())
        low, high = (int(shard["HashKeyRange"][name]) for name in ("StartingHashKey", "EndingHashKey"))
        return self._change("SplitShard", ShardToSplit=shard["ShardId"], NewStartingHashKey=str((low + high) // 2 + 1))

    def merge(self) -> bool:
        """Some two neighbours. False if that cannot be now."""
        shards = self._open_shards() if self.is_there else []
        if len(shards) < 2:
            return False
        index = self._random.randrange(len(shards) - 1)
        one, other = shards[index : index + 2]
        return self._change("MergeShards", ShardToMerge=one["ShardId"], AdjacentShardToMerge=other["ShardId"])

    def rescale(self) -> bool:
        """To some other count, as UpdateShardCount does it: many splits and merges at once."""
        if not self.is_there:
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
