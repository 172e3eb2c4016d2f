"""Which shard takes a record, and whether the stream takes it at all: what PutRecord and PutRecords share.

A key's hash, or the explicit hash key, chooses among the open shards. A stream with AUTO distribution ignores both
and deals records out in turn.
"""

from anabranch._model.hash_keys import md5_hash_key
from anabranch.limits import HASH_KEY_MAX, KIB
from anabranch.local.errors import invalid_argument
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Stream
from anabranch.local.validation import null_member

__all__ = ["Placement"]


class Placement:
    """One request's records: nothing of the stream changes before `commit`."""

    __slots__ = ("_is_auto", "_record_bytes_max", "_routing", "_stream", "_turn")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._routing = stream.routing
        self._is_auto = stream.distribution == "AUTO"
        self._turn = stream.next_turn
        self._record_bytes_max = stream.max_record_kib * KIB

    def shard_for(self, partition_key: str | None, explicit_hash_key: str | None, slot: int | None = None) -> Shard:
        """`slot` is the record's place in a PutRecords, for the message."""
        if self._is_auto:
            open_shards = self._routing.open_shards
            self._turn = (self._turn + 1) % len(open_shards)
            return open_shards[self._turn]
        if partition_key is None:
            raise null_member("partitionKey" if slot is None else f"records.{slot + 1}.member.partitionKey")
        if explicit_hash_key is None:
            return self._routing.shard_for(md5_hash_key(partition_key))
        hash_key = int(explicit_hash_key)
        if hash_key > HASH_KEY_MAX:
            raise invalid_argument(
                "Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, 2^128-1]. "
                f"Specified value was {explicit_hash_key}"
            )
        return self._routing.shard_for(hash_key)

    def checked_size(self, data: bytes, partition_key: str | None) -> int:
        size_bytes = len(data) + (0 if partition_key is None else len(partition_key.encode()))
        if size_bytes > self._record_bytes_max:
            raise invalid_argument(
                f"A record of {size_bytes} bytes (data and partition key) is larger than the maximum record size of "
                f"{self._record_bytes_max} bytes of stream {self._stream.name}: see UpdateMaxRecordSize."
            )
        return size_bytes

    def commit(self) -> None:
        self._stream.next_turn = self._turn
