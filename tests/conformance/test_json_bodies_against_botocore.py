"""Requests are what botocore would send and answers what it would read, member by member, for random values."""

import base64
import json
from datetime import UTC, datetime
from typing import Any

import botocore.session
import pytest
from botocore.parsers import JSONParser
from botocore.serialize import create_serializer
from hypothesis import given, strategies as st

from anabranch._model.streams import ShardFilter, StartingPosition, StreamName
from anabranch._wire.bodies import (
    JSON,
    decode_aws_error,
    decode_describe_stream_consumer,
    decode_describe_stream_summary,
    decode_get_records,
    decode_get_shard_iterator,
    decode_list_shards,
    decode_list_stream_consumers,
    decode_put_records,
    decode_register_stream_consumer,
    encode_deregister_stream_consumer,
    encode_describe_stream_summary,
    encode_get_records,
    encode_get_shard_iterator,
    encode_list_shards,
    encode_list_stream_consumers,
    encode_put_records,
    encode_stream_consumer,
    encode_subscribe_to_shard,
)
from anabranch._wire.messages import PutRecordsEntry

MODEL = botocore.session.Session().get_service_model("kinesis")
SERIALIZER = create_serializer("json", include_validation=False)

text = st.text(st.characters(codec="utf-8"), max_size=40)
some_text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
whole_seconds = st.integers(min_value=0, max_value=4_000_000_000)
milliseconds = st.integers(min_value=0, max_value=4_000_000_000_000)
payloads = st.binary(max_size=60) | st.binary(min_size=1200, max_size=1300)
decimal = st.integers(min_value=0, max_value=(1 << 128) - 1).map(str)
entries = st.builds(PutRecordsEntry, payloads, some_text, st.none() | decimal)
streams = st.builds(StreamName, some_text, st.none() | some_text)


def sent(operation: str, **members: Any) -> Any:
    """What botocore would send; a member that is None is not given to it."""
    given_members = {name: value for name, value in members.items() if value is not None}
    request = SERIALIZER.serialize_to_request(given_members, MODEL.operation_model(operation))
    assert request["headers"]["Content-Type"] == JSON
    return json.loads(request["body"])


def ours(pieces: list[bytes]) -> Any:
    return json.loads(b"".join(pieces))


def named(stream: StreamName) -> dict[str, str]:
    return {"StreamName": stream.name} if stream.arn is None else {"StreamARN": stream.arn}


def moment(seconds: int | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def read(operation: str, body: bytes) -> Any:
    """What botocore reads, with timestamps as the seconds that they are."""
    parser = JSONParser(timestamp_parser=float)
    response = {"headers": {}, "status_code": 200, "body": body}
    return parser.parse(response, MODEL.operation_model(operation).output_shape)


def filled(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object of which any `optional_` member may be absent."""
    required = {name: value for name, value in members.items() if not name.startswith("optional_")}
    optional = {name.removeprefix("optional_"): value for name, value in members.items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


@given(streams, some_text, st.sampled_from(["AT_TIMESTAMP", "LATEST"]), st.none() | decimal, st.none() | whole_seconds)
def test_requests_for_a_position(stream, shard_id, kind, sequence_number, seconds) -> None:
    position = StartingPosition(kind, sequence_number, seconds)
    assert ours(encode_get_shard_iterator(stream, shard_id, position)) == sent(
        "GetShardIterator",
        **named(stream),
        ShardId=shard_id,
        ShardIteratorType=kind,
        StartingSequenceNumber=sequence_number,
        Timestamp=moment(seconds),
    )
    wanted = {"Type": kind, "SequenceNumber": sequence_number, "Timestamp": moment(seconds)}
    assert ours(encode_subscribe_to_shard("arn", shard_id, position)) == sent(
        "SubscribeToShard",
        ConsumerARN="arn",
        ShardId=shard_id,
        StartingPosition={name: value for name, value in wanted.items() if value is not None},
    )


@given(streams, some_text, st.none() | st.integers(1, 10_000), st.none() | whole_seconds)
def test_requests_for_records_shards_and_summaries(stream, token, limit, seconds) -> None:
    assert ours(encode_get_records(stream, token, limit=limit)) == sent(
        "GetRecords", StreamARN=stream.arn, ShardIterator=token, Limit=limit
    )
    shard_filter = ShardFilter("FROM_TIMESTAMP", seconds)
    wanted = {"Type": "FROM_TIMESTAMP", "Timestamp": moment(seconds)}
    assert ours(encode_list_shards(stream, shard_filter=shard_filter, max_results=limit)) == sent(
        "ListShards",
        **named(stream),
        MaxResults=limit,
        ShardFilter={name: value for name, value in wanted.items() if value is not None},
    )
    assert ours(encode_list_shards(stream, next_token=token)) == sent(
        "ListShards", StreamARN=stream.arn, NextToken=token
    )
    assert ours(encode_describe_stream_summary(stream)) == sent("DescribeStreamSummary", **named(stream))


def botocore_entry(entry: PutRecordsEntry) -> dict[str, Any]:
    members = {"Data": entry.data, "PartitionKey": entry.partition_key, "ExplicitHashKey": entry.explicit_hash_key}
    return {name: value for name, value in members.items() if value is not None}


@given(streams, st.lists(entries, min_size=1, max_size=8))
def test_requests_that_write(stream, records) -> None:
    assert ours(encode_put_records(stream, records)) == sent(
        "PutRecords", **named(stream), Records=[botocore_entry(entry) for entry in records]
    )


@given(some_text, some_text, some_text)
def test_requests_about_consumers(stream_arn, name, consumer_arn) -> None:
    assert ours(encode_stream_consumer(stream_arn, name)) == sent(
        "RegisterStreamConsumer", StreamARN=stream_arn, ConsumerName=name
    )
    assert ours(encode_stream_consumer(stream_arn, name)) == sent(
        "DescribeStreamConsumer", StreamARN=stream_arn, ConsumerName=name
    )
    assert ours(encode_list_stream_consumers(stream_arn, next_token=name)) == sent(
        "ListStreamConsumers", StreamARN=stream_arn, NextToken=name
    )
    assert ours(encode_deregister_stream_consumer(consumer_arn)) == sent(
        "DeregisterStreamConsumer", ConsumerARN=consumer_arn
    )


base64_text = payloads.map(lambda data: base64.b64encode(data).decode())
seconds_on_the_wire = milliseconds.map(lambda value: value / 1000) | whole_seconds
hash_key_ranges = st.tuples(*[st.integers(0, (1 << 128) - 1)] * 2).map(
    lambda pair: {"StartingHashKey": str(min(pair)), "EndingHashKey": str(max(pair))}
)
child_shards = filled(ShardId=some_text, ParentShards=st.lists(some_text, max_size=2), HashKeyRange=hash_key_ranges)
wire_records = filled(
    SequenceNumber=decimal,
    Data=base64_text,
    optional_PartitionKey=text,
    optional_ApproximateArrivalTimestamp=seconds_on_the_wire,
    optional_EncryptionType=st.sampled_from(["NONE", "KMS"]),
    optional_SomethingNew=text,
)
get_records_answers = filled(
    Records=st.lists(wire_records, max_size=4),
    optional_NextShardIterator=some_text,
    optional_MillisBehindLatest=milliseconds,
    optional_ChildShards=st.lists(child_shards, max_size=2),
)


@given(get_records_answers)
def test_answers_to_get_records(answer) -> None:
    body = json.dumps(answer).encode()
    theirs = read("GetRecords", body)
    response = decode_get_records(body)
    assert [(r.data, r.sequence_number, r.partition_key, r.arrival_seconds) for r in response.records] == [
        (
            r["Data"],
            r["SequenceNumber"],
            r.get("PartitionKey", ""),
            r.get("ApproximateArrivalTimestamp", 0.0),
        )
        for r in theirs["Records"]
    ]
    assert response.next_shard_iterator == theirs.get("NextShardIterator")
    assert response.millis_behind_latest == theirs.get("MillisBehindLatest")
    assert [
        (
            child.shard_id,
            list(child.parent_shard_ids),
            {"StartingHashKey": str(child.hash_key_range.start), "EndingHashKey": str(child.hash_key_range.end)},
        )
        for child in response.child_shards
    ] == [tuple(child.values()) for child in theirs.get("ChildShards", [])]


shards = filled(
    ShardId=some_text,
    HashKeyRange=hash_key_ranges,
    SequenceNumberRange=filled(StartingSequenceNumber=decimal, optional_EndingSequenceNumber=decimal),
    optional_ParentShardId=some_text,
    optional_AdjacentParentShardId=some_text,
)


@given(filled(optional_Shards=st.lists(shards, max_size=4), optional_NextToken=some_text))
def test_answers_to_list_shards(answer) -> None:
    body = json.dumps(answer).encode()
    theirs = read("ListShards", body)
    response = decode_list_shards(body)
    assert response.next_token == theirs.get("NextToken")
    assert len(response.shards) == len(theirs.get("Shards", []))
    for shard, their in zip(response.shards, theirs.get("Shards", []), strict=True):
        numbers = their["SequenceNumberRange"]
        ending = numbers.get("EndingSequenceNumber")
        assert shard.shard_id == their["ShardId"]
        assert shard.parent_shard_id == their.get("ParentShardId")
        assert shard.adjacent_parent_shard_id == their.get("AdjacentParentShardId")
        assert shard.hash_key_range == tuple(int(key) for key in their["HashKeyRange"].values())
        assert shard.starting_sequence_number == int(numbers["StartingSequenceNumber"])
        assert shard.ending_sequence_number == (None if ending is None else int(ending))


slots = filled(SequenceNumber=decimal, ShardId=some_text) | filled(ErrorCode=some_text, ErrorMessage=text)


@given(filled(Records=st.lists(slots, max_size=5), FailedRecordCount=st.integers(0, 500)))
def test_answers_to_writes(answer) -> None:
    body = json.dumps(answer).encode()
    theirs = read("PutRecords", body)
    response = decode_put_records(body)
    assert [(e.sequence_number, e.shard_id, e.error_code, e.error_message) for e in response.entries] == [
        tuple(e.get(name) for name in ("SequenceNumber", "ShardId", "ErrorCode", "ErrorMessage"))
        for e in theirs["Records"]
    ]


@given(some_text)
def test_answers_with_an_iterator(shard_iterator) -> None:
    body = json.dumps({"ShardIterator": shard_iterator}).encode()
    assert decode_get_shard_iterator(body) == read("GetShardIterator", body)["ShardIterator"]


summaries = filled(
    StreamName=some_text,
    StreamARN=some_text,
    StreamStatus=st.sampled_from(["ACTIVE", "UPDATING"]),
    RetentionPeriodHours=st.integers(24, 8760),
    StreamCreationTimestamp=seconds_on_the_wire,
    EnhancedMonitoring=st.just([{"ShardLevelMetrics": ["ALL"]}]),
    OpenShardCount=st.integers(0, 10_000),
    optional_StreamModeDetails=filled(StreamMode=some_text),
    optional_ConsumerCount=st.integers(0, 50),
    optional_MaxRecordSizeInKiB=st.integers(1024, 10_240),
    optional_RecordDistributionStrategy=st.sampled_from(["AUTO", "USER_PARTITION_KEY"]),
)


@given(summaries)
def test_answers_to_describe_stream_summary(answer) -> None:
    body = json.dumps({"StreamDescriptionSummary": answer}).encode()
    their = read("DescribeStreamSummary", body)["StreamDescriptionSummary"]
    summary = decode_describe_stream_summary(body)
    assert summary.name == their["StreamName"]
    assert summary.arn == their["StreamARN"]
    assert summary.status == their["StreamStatus"]
    assert summary.created_seconds == their["StreamCreationTimestamp"]
    assert summary.retention_hours == their["RetentionPeriodHours"]
    assert summary.open_shard_count == their["OpenShardCount"]
    assert summary.stream_mode == their.get("StreamModeDetails", {}).get("StreamMode", "PROVISIONED")
    assert summary.record_bytes_max == their.get("MaxRecordSizeInKiB", 1024) * 1024
    assert summary.record_distribution == their.get("RecordDistributionStrategy")


consumers = filled(
    ConsumerName=some_text,
    ConsumerARN=some_text,
    ConsumerStatus=st.sampled_from(["CREATING", "ACTIVE"]),
    ConsumerCreationTimestamp=seconds_on_the_wire,
)


@given(st.lists(consumers, min_size=1, max_size=3), some_text)
def test_answers_about_consumers(answers, stream_arn) -> None:
    def same(value, their) -> bool:
        names = ("ConsumerName", "ConsumerARN", "ConsumerStatus", "ConsumerCreationTimestamp")
        return (value.name, value.arn, value.status, value.created_seconds) == tuple(their[name] for name in names)

    body = json.dumps({"Consumers": answers, "NextToken": stream_arn}).encode()
    theirs = read("ListStreamConsumers", body)
    listed = decode_list_stream_consumers(body)
    assert all(map(same, listed.consumers, theirs["Consumers"]))
    assert listed.next_token == theirs["NextToken"]
    body = json.dumps({"Consumer": answers[0]}).encode()
    assert same(decode_register_stream_consumer(body), read("RegisterStreamConsumer", body)["Consumer"])
    body = json.dumps({"ConsumerDescription": answers[0] | {"StreamARN": stream_arn}}).encode()
    described = decode_describe_stream_consumer(body)
    their = read("DescribeStreamConsumer", body)["ConsumerDescription"]
    assert same(described, their)


@pytest.mark.parametrize("code", ["ResourceInUseException", "com.amazonaws.kinesis.v20131202#KMSThrottlingException"])
@pytest.mark.parametrize("member", ["message", "Message"])
def test_errors(code: str, member: str) -> None:
    body = json.dumps({"__type": code, member: "what happened"}).encode()
    parsed = JSONParser().parse(
        {"headers": {}, "status_code": 400, "body": body}, MODEL.operation_model("GetRecords").output_shape
    )
    error = decode_aws_error(body)
    assert parsed["Error"] == {"Code": error.code, "Message": error.message}
