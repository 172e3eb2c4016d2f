import json

import pytest

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import AT_LATEST, Shard, ShardFilter, StreamName
from anabranch._wire.bodies import decode_list_shards, encode_list_shards
from anabranch._wire.messages import ListShardsResponse
from anabranch.errors import CodecError

ORDERS = StreamName("orders")
SHARD = {
    "ShardId": "shardId-000000000003",
    "ParentShardId": "shardId-000000000001",
    "AdjacentParentShardId": "shardId-000000000002",
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": "99"},
    "SequenceNumberRange": {"StartingSequenceNumber": "10", "EndingSequenceNumber": "20"},
}


def test_a_listing_is_asked_for_with_its_filter() -> None:
    assert encode_list_shards(ORDERS) == [b'{"StreamName":"orders"}']
    assert encode_list_shards(ORDERS, shard_filter=AT_LATEST, max_results=5) == [
        b'{"StreamName":"orders","MaxResults":5,"ShardFilter":{"Type":"AT_LATEST"}}'
    ]
    assert encode_list_shards(ORDERS, shard_filter=ShardFilter("FROM_TIMESTAMP", 1.5)) == [
        b'{"StreamName":"orders","ShardFilter":{"Type":"FROM_TIMESTAMP","Timestamp":1.5}}'
    ]


def test_a_token_replaces_the_name_and_the_filter() -> None:
    assert encode_list_shards(ORDERS, shard_filter=AT_LATEST, next_token="T", max_results=5) == [
        b'{"NextToken":"T","MaxResults":5}'
    ]
    assert encode_list_shards(StreamName("orders", "arn:x"), next_token="T") == [
        b'{"StreamARN":"arn:x","NextToken":"T"}'
    ]


def test_shards_are_listed_as_values() -> None:
    root = {
        "ShardId": "shardId-000000000000",
        "HashKeyRange": {"StartingHashKey": "100", "EndingHashKey": "340282366920938463463374607431768211455"},
        "SequenceNumberRange": {"StartingSequenceNumber": "5"},
    }
    body = json.dumps({"Shards": [SHARD, root], "NextToken": "T"}).encode()
    assert decode_list_shards(body) == ListShardsResponse(
        (
            Shard(
                shard_id="shardId-000000000003",
                hash_key_range=HashKeyRange(0, 99),
                starting_sequence_number=10,
                ending_sequence_number=20,
                parent_shard_id="shardId-000000000001",
                adjacent_parent_shard_id="shardId-000000000002",
            ),
            Shard(
                shard_id="shardId-000000000000",
                hash_key_range=HashKeyRange(100, (1 << 128) - 1),
                starting_sequence_number=5,
            ),
        ),
        "T",
    )
    assert decode_list_shards(b"{}") == ListShardsResponse(())


@pytest.mark.parametrize(
    "change",
    [
        {"HashKeyRange": {"StartingHashKey": "1", "EndingHashKey": "0"}},
        {"HashKeyRange": {"StartingHashKey": "one", "EndingHashKey": "2"}},
        {"SequenceNumberRange": {"StartingSequenceNumber": ""}},
        {"SequenceNumberRange": {"StartingSequenceNumber": "1", "EndingSequenceNumber": "9" * 10_000}},
    ],
)
def test_a_shard_that_cannot_be_is_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(CodecError, match="invalid shard shardId-000000000003"):
        decode_list_shards(json.dumps({"Shards": [SHARD | change]}).encode())
