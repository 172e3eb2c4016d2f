import os
from typing import Any

import msgspec
import pytest

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import TRIM_HORIZON, StreamName, after_sequence_number, at_timestamp, parse_stream
from anabranch._wire.bodies import (
    decode_get_records,
    decode_get_shard_iterator,
    decode_subscribe_to_shard_event,
    encode_get_records,
    encode_get_shard_iterator,
    encode_subscribe_to_shard,
)
from anabranch._wire.messages import ChildShard, GetRecordsResponse, KinesisRecord, SubscribeToShardEvent
from anabranch.errors import CodecError

ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
CHILD = {
    "ShardId": "shardId-000000000002",
    "ParentShards": ["shardId-000000000000", "shardId-000000000001"],
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": "340282366920938463463374607431768211455"},
}


def wire_record(payload: bytes, number: int = 1) -> dict[str, Any]:
    return {
        "SequenceNumber": str(number),
        "ApproximateArrivalTimestamp": 1701760153.593,
        "Data": payload,
        "PartitionKey": "user-1",
    }


def json_body(value: Any) -> bytes:
    return msgspec.json.encode(value)


def test_an_iterator_is_asked_for_in_every_way() -> None:
    assert encode_get_shard_iterator(StreamName("orders"), "shardId-0", TRIM_HORIZON) == [
        b'{"StreamName":"orders","ShardId":"shardId-0","ShardIteratorType":"TRIM_HORIZON"}'
    ]
    assert encode_get_shard_iterator(parse_stream(ARN), "shardId-0", after_sequence_number(7)) == [
        b'{"StreamARN":"%b","ShardId":"shardId-0","ShardIteratorType":"AFTER_SEQUENCE_NUMBER",'
        b'"StartingSequenceNumber":"7"}' % ARN.encode()
    ]
    assert encode_get_shard_iterator(StreamName("orders"), "shardId-0", at_timestamp(1.5)) == [
        b'{"StreamName":"orders","ShardId":"shardId-0","ShardIteratorType":"AT_TIMESTAMP","Timestamp":1.5}'
    ]
    assert decode_get_shard_iterator(b'{"ShardIterator":"AAA"}') == "AAA"


def test_a_read_names_its_iterator_and_the_arn_if_there_is_one() -> None:
    assert encode_get_records(StreamName("orders"), "AAA") == [b'{"ShardIterator":"AAA"}']
    assert encode_get_records(parse_stream(ARN), "AAA", limit=10) == [
        b'{"StreamARN":"%b","ShardIterator":"AAA","Limit":10}' % ARN.encode()
    ]


@pytest.mark.parametrize("size", [0, 5, 600, 100_000])
def test_records_small_and_large_are_read(size: int) -> None:
    payload = os.urandom(size)
    members = {
        "Records": [wire_record(payload, number) for number in (1, 2, 3)],
        "NextShardIterator": "AAA",
        "MillisBehindLatest": 12,
    }
    body = bytearray(json_body(members))
    response = decode_get_records(memoryview(body), server_seconds=5.0)
    body[:] = bytes(len(body))
    assert response == GetRecordsResponse(
        records=[
            KinesisRecord(data=payload, partition_key="user-1", sequence_number=number, arrival_seconds=1701760153.593)
            for number in ("1", "2", "3")
        ],
        next_shard_iterator="AAA",
        millis_behind_latest=12,
        server_seconds=5.0,
    )


def test_what_aws_leaves_out_may_be_absent() -> None:
    body = b'{"Records":[{"Data":"","SequenceNumber":"1"}]}'
    assert decode_get_records(body) == GetRecordsResponse([KinesisRecord(data=b"", sequence_number="1")], None, None)
    large = b'{"Records":[{"Data":"%b","SequenceNumber":"1"}]}' % (b"QUFB" * 1000)
    assert decode_get_records(large).records == [KinesisRecord(data=b"AAA" * 1000, sequence_number="1")]


@pytest.mark.parametrize("next_iterator", ["", ',"NextShardIterator":null'])
def test_a_closed_shard_ends_without_an_iterator_and_names_its_children(next_iterator: str) -> None:
    body = b'{"Records":[]%b,"MillisBehindLatest":0,"ChildShards":[%b]}' % (
        next_iterator.encode(),
        msgspec.json.encode(CHILD),
    )
    response = decode_get_records(body)
    assert response.next_shard_iterator is None
    assert response.child_shards == (
        ChildShard(
            "shardId-000000000002",
            ("shardId-000000000000", "shardId-000000000001"),
            HashKeyRange(0, (1 << 128) - 1),
        ),
    )


def test_no_children_may_be_said_by_null() -> None:
    assert decode_get_records(b'{"Records":[],"ChildShards":null}').child_shards == ()


@pytest.mark.parametrize("start, end", [("2", "1"), ("00", "1"), ("0", str(1 << 128)), ("-1", "1"), ("0", "1e3")])
def test_a_child_with_an_impossible_range_is_refused(start: str, end: str) -> None:
    child = CHILD | {"HashKeyRange": {"StartingHashKey": start, "EndingHashKey": end}}
    with pytest.raises(CodecError, match="GetRecords returned an invalid child shard shardId-000000000002"):
        decode_get_records(json_body({"Records": [], "ChildShards": [child]}))


@pytest.mark.parametrize("size", [0, 2000])
@pytest.mark.parametrize("bad", ["QUI", "QU I=", "Q-_=", "====", "QUFB\\n", "\\u00e9QUF", "QQ==QQ=="])
def test_payloads_that_are_not_base64_are_refused_large_and_small(bad: str, size: int) -> None:
    body = b'{"Records":[{"Data":"%b%b","SequenceNumber":"1","PartitionKey":"k"}]}' % (b"QUFB" * size, bad.encode())
    with pytest.raises(CodecError, match="GetRecords"):
        decode_get_records(body)


@pytest.mark.parametrize("payload", ["null", "1", "[]", "{}"])
def test_payloads_that_are_no_text_are_refused(payload: str) -> None:
    for padding in (0, 5000):
        body = b'{"Padding":"%b","Records":[{"Data":%b,"SequenceNumber":"1"}]}' % (b"x" * padding, payload.encode())
        with pytest.raises(CodecError):
            decode_get_records(body)


def test_a_subscription_is_asked_for_with_its_position() -> None:
    assert encode_subscribe_to_shard("arn:consumer", "shardId-0", TRIM_HORIZON) == [
        b'{"ConsumerARN":"arn:consumer","ShardId":"shardId-0","StartingPosition":{"Type":"TRIM_HORIZON"}}'
    ]
    assert encode_subscribe_to_shard("arn:c", "shardId-0", at_timestamp(2.0)) == [
        b'{"ConsumerARN":"arn:c","ShardId":"shardId-0","StartingPosition":{"Type":"AT_TIMESTAMP","Timestamp":2.0}}'
    ]


@pytest.mark.parametrize("size", [3, 5000])
def test_a_pushed_event_is_read_as_an_answer_is(size: int) -> None:
    body = json_body(
        {
            "Records": [wire_record(bytes(size))],
            "ContinuationSequenceNumber": "9",
            "MillisBehindLatest": 0,
            "ChildShards": [CHILD],
        }
    )
    event = decode_subscribe_to_shard_event(body)
    assert isinstance(event, SubscribeToShardEvent)
    assert event.records == decode_get_records(body).records
    assert event.child_shards == decode_get_records(body).child_shards
    assert event.continuation_sequence_number == "9"
    assert event.millis_behind_latest == 0
