"""Shards as the wire describes them, and the bodies of ListShards.

Hash keys and sequence numbers are decimal text there and integers everywhere else; a shard whose numbers make no sense
is refused, since routing and lineage would be built on it.
"""

from typing import Final

import msgspec

from anabranch._model.hash_keys import HashKeyRange, parse_hash_key
from anabranch._model.sequence_numbers import parse_sequence_number
from anabranch._model.shard_filters import ShardFilter
from anabranch._model.shards import Shard
from anabranch._model.streams import StreamName
from anabranch._wire.bodies import AnswerDecoder, Buffer, encode_request, stream_members
from anabranch._wire.messages import ChildShard, ListShardsResponse
from anabranch.errors import CodecError

__all__ = ["WireChildShard", "decode_list_shards", "encode_list_shards"]


class _HashKeyRange(msgspec.Struct, rename="pascal"):
    starting_hash_key: str
    ending_hash_key: str

    def value(self) -> HashKeyRange:
        start, end = parse_hash_key(self.starting_hash_key), parse_hash_key(self.ending_hash_key)
        if start > end:
            raise ValueError(f"the hash key range ends at {end}, before its start at {start}")
        return HashKeyRange(start, end)


class _SequenceNumberRange(msgspec.Struct, rename="pascal"):
    starting_sequence_number: str
    ending_sequence_number: str | None = None


class WireChildShard(msgspec.Struct, rename="pascal"):
    """What the last read of a closed shard says of its children."""

    shard_id: str
    parent_shards: list[str]
    hash_key_range: _HashKeyRange

    def value(self, operation: str) -> ChildShard:
        try:
            return ChildShard(self.shard_id, tuple(self.parent_shards), self.hash_key_range.value())
        except ValueError as error:
            raise CodecError(f"{operation} named a child shard {self.shard_id} that cannot be: {error}") from None


class _Shard(msgspec.Struct, rename="pascal"):
    shard_id: str
    hash_key_range: _HashKeyRange
    sequence_number_range: _SequenceNumberRange
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None

    def value(self) -> Shard:
        numbers = self.sequence_number_range
        ending = numbers.ending_sequence_number
        try:
            return Shard(
                shard_id=self.shard_id,
                hash_key_range=self.hash_key_range.value(),
                starting_sequence_number=parse_sequence_number(numbers.starting_sequence_number),
                ending_sequence_number=None if ending is None else parse_sequence_number(ending),
                parent_shard_id=self.parent_shard_id,
                adjacent_parent_shard_id=self.adjacent_parent_shard_id,
            )
        except ValueError as error:
            raise CodecError(f"ListShards named a shard {self.shard_id} that cannot be: {error}") from None


class _ListShards(msgspec.Struct, rename="pascal"):
    shards: list[_Shard] = []
    next_token: str | None = None


_LIST_SHARDS: Final = AnswerDecoder("ListShards", _ListShards)


def encode_list_shards(
    stream: StreamName,
    *,
    shard_filter: ShardFilter | None = None,
    next_token: str | None = None,
    max_results: int | None = None,
) -> list[bytes]:
    """A token stands for the stream's name and for the filter, and is refused by the service beside them."""
    if next_token is not None:
        return encode_request({"StreamARN": stream.arn, "NextToken": next_token, "MaxResults": max_results})
    members: dict[str, object] = {**stream_members(stream), "MaxResults": max_results}
    if shard_filter is not None:
        filter_members = {
            "Type": shard_filter.type,
            "ShardId": shard_filter.shard_id,
            "Timestamp": shard_filter.timestamp_seconds,
        }
        members["ShardFilter"] = {name: value for name, value in filter_members.items() if value is not None}
    return encode_request(members)


def decode_list_shards(body: Buffer) -> ListShardsResponse:
    answer = _LIST_SHARDS.decode(body)
    return ListShardsResponse(tuple(shard.value() for shard in answer.shards), answer.next_token)
