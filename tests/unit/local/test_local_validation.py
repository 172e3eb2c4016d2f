import pytest

from anabranch.local.bodies import CBOR, JSON
from anabranch.local.errors import LocalError
from anabranch.local.state.identifiers import Timestamp

NUMBER = "com.amazon.coral.value.json.numbers.TruncatingBigNumber"


def failure(read, operation, body):
    with pytest.raises(LocalError) as caught:
        read(operation, body)
    return caught.value.members()


def test_all_violations_are_reported_at_once_with_awss_messages(kinesis):
    assert kinesis.fails("CreateStream", StreamName="a b", ShardCount=0) == (
        "ValidationException: 2 validation errors detected: "
        "Value 'a b' at 'streamName' failed to satisfy constraint: "
        "Member must satisfy regular expression pattern: [a-zA-Z0-9_.-]+; "
        "Value '0' at 'shardCount' failed to satisfy constraint: Member must have value greater than or equal to 1"
    )


@pytest.mark.parametrize(
    "operation, request_, message",
    [
        ("CreateStream", {}, "Value null at 'streamName' failed to satisfy constraint: Member must not be null"),
        ("CreateStream", {"StreamName": "a" * 129}, "Member must have length less than or equal to 128"),
        ("GetRecords", {"ShardIterator": ""}, "Member must have length greater than or equal to 1"),
        ("GetRecords", {"ShardIterator": "x", "Limit": 10_001}, "Member must have value less than or equal to 10000"),
        ("UpdateShardCount", {"TargetShardCount": 1, "ScalingType": "X"}, "satisfy enum value set: [UNIFORM_SCALING]"),
        ("AddTagsToStream", {"Tags": {}}, "Value '{}' at 'tags' failed to satisfy constraint: Member must have length"),
        ("AddTagsToStream", {"Tags": {"": "a", "b": "c" * 257}}, "at 'tags.b.member' failed"),
        ("RemoveTagsFromStream", {"TagKeys": []}, "Value '[]' at 'tagKeys'"),
        ("RemoveTagsFromStream", {"TagKeys": ["a", ""]}, "at 'tagKeys.2.member' failed"),
        ("PutRecord", {"Data": bytes(10_485_761)}, "HeapByteBuffer[pos=0 lim=10485761 cap=10485761]' at 'data'"),
        ("ListShards", {"ShardFilter": {}}, "Value null at 'shardFilter.type'"),
        ("SplitShard", {"ShardToSplit": "0", "NewStartingHashKey": "01"}, r"pattern: 0|([1-9]\d{0,38})"),
    ],
)  # fmt: skip
def test_each_constraint_has_its_message(kinesis, operation, request_, message):
    assert message in kinesis.fails(operation, **request_)


def test_at_most_ten_violations_are_reported(kinesis):
    records = [{"Data": b"", "PartitionKey": ""}] * 100
    assert kinesis.fails("PutRecords", StreamName="orders", Records=records).startswith(
        "ValidationException: 10 validation errors detected"
    )
    tags = {f"t{number}": "x" * 300 for number in range(201)}
    assert "Value '{t0=xxx" in kinesis.fails("AddTagsToStream", StreamName="orders", Tags=tags)


def test_json_becomes_a_request_with_bytes_and_timestamps():
    body = {
        "StreamName": "a",
        "Records": [{"Data": "aGk=", "PartitionKey": "k", "ExplicitHashKey": None, "Unknown": 1}],
        "Unknown": {},
        "DryRun": True,
    }
    assert JSON.convert("PutRecords", body) == {
        "StreamName": "a",
        "Records": [{"Data": b"hi", "PartitionKey": "k"}],
        "DryRun": True,
    }
    request = JSON.convert("ListShards", {"ShardFilter": {"Type": "AT_TIMESTAMP", "Timestamp": 1.5}, "MaxResults": 5.0})
    assert request == {"ShardFilter": {"Type": "AT_TIMESTAMP", "Timestamp": 1.5}, "MaxResults": 5}
    assert isinstance(request["ShardFilter"]["Timestamp"], Timestamp)
    assert JSON.convert("GetRecords", {"Limit": 7}) == {"Limit": 7}
    assert JSON.convert("AddTagsToStream", {"Tags": {"a": "b", "c": None}}) == {"Tags": {"a": "b"}}


def test_cbor_has_byte_strings_and_milliseconds():
    assert CBOR.convert("PutRecord", {"Data": b"hi"}) == {"Data": b"hi"}
    for value in (1500, 1500.0, Timestamp(1.5)):
        request = CBOR.convert("GetShardIterator", {"Timestamp": value})
        assert request == {"Timestamp": 1.5}
        assert isinstance(request["Timestamp"], Timestamp)


@pytest.mark.parametrize(
    "operation, body, message",
    [
        ("CreateStream", [], "Start of list found where not expected"),
        ("CreateStream", {"StreamName": {}}, "Start of structure or map found where not expected."),
        ("CreateStream", {"StreamName": 1}, f"class {NUMBER} can not be converted to an String"),
        ("CreateStream", {"StreamName": True}, "class java.lang.Boolean can not be converted to an String"),
        ("CreateStream", {"ShardCount": "1"}, "class java.lang.String can not be converted to an Integer"),
        ("CreateStream", {"ShardCount": True}, "class java.lang.Boolean can not be converted to an Integer"),
        ("CreateStream", {"ShardCount": 1.5}, f"class {NUMBER} can not be converted to an Integer"),
        ("CreateStream", "x", "class java.lang.String can not be converted to an Structure"),
        ("PutRecord", {"DryRun": 1}, f"class {NUMBER} can not be converted to an Boolean"),
        ("PutRecord", {"Data": 1}, f"class {NUMBER} can not be converted to an Blob"),
        ("PutRecord", {"Data": "a!"}, "'a!' can not be converted to a Blob: it is not base64"),
        ("PutRecord", {"Data": "é"}, "'é' can not be converted to a Blob: it is not base64"),
        ("PutRecords", {"Records": {}}, "Start of structure or map found where not expected."),
        ("AddTagsToStream", {"Tags": []}, "Start of list found where not expected"),
        ("GetShardIterator", {"Timestamp": "now"}, "class java.lang.String can not be converted to an Timestamp"),
        ("GetShardIterator", {"Timestamp": True}, "class java.lang.Boolean can not be converted to an Timestamp"),
        ("GetShardIterator", {"Timestamp": 1e300}, "A number this large can not be converted to a Timestamp"),
        ("GetShardIterator", {"Timestamp": float("nan")}, "A number this large can not be converted to a Timestamp"),
        ("GetShardIterator", {"Timestamp": 10**400}, "A number this large can not be converted to a Timestamp"),
    ],
)  # fmt: skip
def test_wrong_types_in_json_are_rejected_with_the_messages_of_the_java_parser(operation, body, message):
    members = failure(JSON.convert, operation, body)
    assert members == {"__type": "SerializationException", "Message": message}


@pytest.mark.parametrize("body", [{"Data": "text"}, {"Data": None, "StreamName": b"x"}, {"StreamName": object()}])
def test_wrong_types_in_cbor_are_rejected(body):
    assert failure(CBOR.convert, "PutRecord", body)["__type"] == "SerializationException"


def test_wrong_timestamps_in_cbor_are_rejected():
    for value in ("x", True):
        assert failure(CBOR.convert, "GetShardIterator", {"Timestamp": value})["__type"] == "SerializationException"


def test_only_a_serialization_exception_spells_its_message_with_a_capital():
    assert LocalError("X", "y").members() == {"__type": "X", "message": "y"}
