"""Every operation of the API, driven by boto3 in clear text and over TLS, and once without a server.

Each scenario is a small story that ends in the operation of its name and checks what came of it. Over the wire
botocore's parser reads the answers; without a server every answer is compared with botocore's output shapes, so
that no member is misspelt, misplaced, of a wrong type or null.
"""

import random
import time
from datetime import UTC, datetime

import botocore.exceptions
import botocore.session
import pytest

from anabranch.local.errors import LocalError
from anabranch.local.service import LocalState
from anabranch.local.state.identifiers import Timestamp

MODEL = botocore.session.Session().get_service_model("kinesis")
OPERATIONS = [name for name in MODEL.operation_names if "Channel" not in name]
METHODS = {botocore.xform_name(name): name for name in OPERATIONS}

NAME = "orders"
ARN = f"arn:aws:kinesis:us-east-1:000000000000:stream/{NAME}"
LOW, HIGH = "shardId-000000000000", "shardId-000000000001"
QUARTER = str(1 << 126)
KEY_ID = "alias/aws/kinesis"
POLICY = '{"Version": "2012-10-17", "Statement": []}'

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def code_of(call, **request):
    with pytest.raises((botocore.exceptions.ClientError, LocalError)) as caught:
        call(**request)
    error = caught.value
    return error.code if isinstance(error, LocalError) else error.response["Error"]["Code"]


def summary(client, name=NAME):
    return client.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]


def put(client, *payloads, hash_key="0"):
    for payload in payloads:
        client.put_record(StreamName=NAME, Data=payload, PartitionKey="k", ExplicitHashKey=hash_key)


def iterator(client, kind="TRIM_HORIZON", shard_id=LOW, **more):
    return client.get_shard_iterator(StreamName=NAME, ShardId=shard_id, ShardIteratorType=kind, **more)["ShardIterator"]


def register(client, name="reader", **more):
    return client.register_stream_consumer(StreamARN=ARN, ConsumerName=name, **more)["Consumer"]


def go_on_demand(client):
    client.update_stream_mode(StreamARN=ARN, StreamModeDetails={"StreamMode": "ON_DEMAND"})


def tags_of(client, arn=ARN):
    return {tag["Key"]: tag["Value"] for tag in client.list_tags_for_resource(ResourceARN=arn)["Tags"]}


@scenario
def add_tags_to_stream(client):
    client.add_tags_to_stream(StreamName=NAME, Tags={"team": "rivers"})
    assert tags_of(client) == {"team": "rivers"}


@scenario
def create_stream(client):
    client.create_stream(StreamName="other", ShardCount=3, Tags={"a": "b"}, MaxRecordSizeInKiB=2048)
    assert summary(client, "other")["OpenShardCount"] == 3
    assert summary(client, "other")["MaxRecordSizeInKiB"] == 2048
    client.create_stream(StreamName="auto", RecordDistributionStrategy="AUTO")
    assert summary(client, "auto")["RecordDistributionStrategy"] == "AUTO"
    assert code_of(client.create_stream, StreamName="huge", ShardCount=100_000_000_000) == "LimitExceededException"


@scenario
def decrease_stream_retention_period(client):
    client.increase_stream_retention_period(StreamName=NAME, RetentionPeriodHours=72)
    client.decrease_stream_retention_period(StreamARN=ARN, RetentionPeriodHours=48)
    assert summary(client)["RetentionPeriodHours"] == 48


@scenario
def delete_resource_policy(client):
    client.put_resource_policy(ResourceARN=ARN, Policy=POLICY)
    client.delete_resource_policy(ResourceARN=ARN)
    assert client.get_resource_policy(ResourceARN=ARN)["Policy"] == "{}"


@scenario
def delete_stream(client):
    register(client)
    assert code_of(client.delete_stream, StreamName=NAME) == "ResourceInUseException"
    client.delete_stream(StreamName=NAME, EnforceConsumerDeletion=True)
    assert code_of(client.describe_stream, StreamName=NAME) == "ResourceNotFoundException"


@scenario
def deregister_stream_consumer(client):
    client.deregister_stream_consumer(ConsumerARN=register(client)["ConsumerARN"])
    assert client.list_stream_consumers(StreamARN=ARN)["Consumers"] == []


@scenario
def describe_account_settings(client):
    assert client.describe_account_settings()["MinimumThroughputBillingCommitment"]["Status"] == "DISABLED"


@scenario
def describe_limits(client):
    limits = client.describe_limits()
    assert (limits["OpenShardCount"], limits["ShardLimit"]) == (2, 20_000)


@scenario
def describe_stream(client):
    described = client.describe_stream(StreamARN=ARN, Limit=1)["StreamDescription"]
    assert described["HasMoreShards"] is True
    assert described["Shards"][0]["ShardId"] == LOW
    assert described["StreamARN"] == ARN


@scenario
def describe_stream_consumer(client):
    arn = register(client)["ConsumerARN"]
    described = client.describe_stream_consumer(StreamARN=ARN, ConsumerName="reader")["ConsumerDescription"]
    assert (described["ConsumerARN"], described["ConsumerStatus"]) == (arn, "ACTIVE")


@scenario
def describe_stream_summary(client):
    assert (summary(client)["StreamStatus"], summary(client)["OpenShardCount"]) == ("ACTIVE", 2)


@scenario
def disable_enhanced_monitoring(client):
    client.enable_enhanced_monitoring(StreamName=NAME, ShardLevelMetrics=["ALL"])
    answer = client.disable_enhanced_monitoring(StreamName=NAME, ShardLevelMetrics=["IncomingBytes"])
    assert (len(answer["CurrentShardLevelMetrics"]), len(answer["DesiredShardLevelMetrics"])) == (7, 6)


@scenario
def enable_enhanced_monitoring(client):
    client.enable_enhanced_monitoring(StreamName=NAME, ShardLevelMetrics=["OutgoingRecords"])
    assert summary(client)["EnhancedMonitoring"] == [{"ShardLevelMetrics": ["OutgoingRecords"]}]


@scenario
def get_records(client):
    put(client, b"one", b"two")
    answer = client.get_records(ShardIterator=iterator(client), Limit=1)
    assert [record["Data"] for record in answer["Records"]] == [b"one"]
    assert answer["Records"][0]["PartitionKey"] == "k"
    client.split_shard(StreamName=NAME, ShardToSplit=LOW, NewStartingHashKey=QUARTER)
    answer = client.get_records(ShardIterator=answer["NextShardIterator"], StreamARN=ARN)
    assert [record["Data"] for record in answer["Records"]] == [b"two"]
    assert "NextShardIterator" not in answer
    assert [child["ParentShards"] for child in answer["ChildShards"]] == [[LOW], [LOW]]
    assert code_of(client.get_records, ShardIterator="garbage") == "InvalidArgumentException"


@scenario
def get_resource_policy(client):
    client.put_resource_policy(ResourceARN=ARN, Policy=POLICY)
    assert client.get_resource_policy(ResourceARN=ARN)["Policy"] == POLICY


@scenario
def get_shard_iterator(client):
    put(client, b"one")
    record = client.get_records(ShardIterator=iterator(client))["Records"][0]
    number, arrived = record["SequenceNumber"], record["ApproximateArrivalTimestamp"]
    put(client, b"two")
    for kind, more, expected in (
        ("AT_SEQUENCE_NUMBER", {"StartingSequenceNumber": number}, [b"one", b"two"]),
        ("AFTER_SEQUENCE_NUMBER", {"StartingSequenceNumber": number}, [b"two"]),
        ("AT_TIMESTAMP", {"Timestamp": arrived}, [b"one", b"two"]),
        ("LATEST", {}, []),
    ):
        answer = client.get_records(ShardIterator=iterator(client, kind, **more))
        assert [record["Data"] for record in answer["Records"]] == expected


@scenario
def increase_stream_retention_period(client):
    client.increase_stream_retention_period(StreamName=NAME, RetentionPeriodHours=8760)
    assert summary(client)["RetentionPeriodHours"] == 8760


@scenario
def list_shards(client):
    client.split_shard(StreamName=NAME, ShardToSplit=LOW, NewStartingHashKey=QUARTER)
    created = summary(client)["StreamCreationTimestamp"]
    page = client.list_shards(StreamName=NAME, MaxResults=3, StreamCreationTimestamp=created)
    rest = client.list_shards(NextToken=page["NextToken"])
    assert [shard["ShardId"][-1] for shard in page["Shards"] + rest["Shards"]] == ["0", "1", "2", "3"]
    for kind, more, expected in (
        ("AT_LATEST", {}, "123"),
        ("FROM_TRIM_HORIZON", {}, "0123"),
        ("AFTER_SHARD_ID", {"ShardId": HIGH}, "23"),
        ("FROM_TIMESTAMP", {"Timestamp": created}, "0123"),
        ("AT_TIMESTAMP", {"Timestamp": datetime(2200, 1, 1, tzinfo=UTC)}, "123"),
    ):
        listed = client.list_shards(StreamName=NAME, ShardFilter={"Type": kind, **more})["Shards"]
        assert "".join(shard["ShardId"][-1] for shard in listed) == expected


@scenario
def list_stream_consumers(client):
    for name in "abc":
        register(client, name)
    page = client.list_stream_consumers(StreamARN=ARN, MaxResults=2)
    rest = client.list_stream_consumers(StreamARN=ARN, NextToken=page["NextToken"])
    assert [consumer["ConsumerName"] for consumer in page["Consumers"] + rest["Consumers"]] == ["a", "b", "c"]


@scenario
def list_streams(client):
    client.create_stream(StreamName="a", ShardCount=1)
    page = client.list_streams(Limit=1)
    assert (page["StreamNames"], page["HasMoreStreams"]) == (["a"], True)
    assert client.list_streams(NextToken=page["NextToken"])["StreamSummaries"][0]["StreamARN"] == ARN


@scenario
def list_tags_for_resource(client):
    arn = register(client, Tags={"a": "b"})["ConsumerARN"]
    assert tags_of(client, arn) == {"a": "b"}


@scenario
def list_tags_for_stream(client):
    client.add_tags_to_stream(StreamName=NAME, Tags={"a": "1", "b": "2"})
    answer = client.list_tags_for_stream(StreamName=NAME, Limit=1)
    assert answer["Tags"] == [{"Key": "a", "Value": "1"}]
    assert answer["HasMoreTags"] is True


@scenario
def merge_shards(client):
    client.merge_shards(StreamName=NAME, ShardToMerge=LOW, AdjacentShardToMerge=HIGH)
    child = client.list_shards(StreamName=NAME)["Shards"][-1]
    assert (child["ParentShardId"], child["AdjacentParentShardId"]) == (LOW, HIGH)


@scenario
def put_record(client):
    answer = client.put_record(StreamName=NAME, Data=b"x", PartitionKey="k")
    later = client.put_record(
        StreamARN=ARN, Data=b"", PartitionKey="k", SequenceNumberForOrdering=answer["SequenceNumber"]
    )
    assert int(later["SequenceNumber"]) > int(answer["SequenceNumber"])
    assert "EncryptionType" not in answer
    assert code_of(client.put_record, StreamName=NAME, Data=b"", PartitionKey="k", DryRun=True) == (
        "DryRunOperationException"
    )


@scenario
def put_records(client):
    answer = client.put_records(
        StreamName=NAME,
        Records=[
            {"Data": b"a", "PartitionKey": "k"},
            {"Data": bytes(1000), "PartitionKey": "é", "ExplicitHashKey": "0"},
        ],
    )
    assert answer["FailedRecordCount"] == 0
    assert answer["Records"][1]["ShardId"] == LOW
    too_long = [{"Data": b"", "PartitionKey": "k" * 257}]
    assert code_of(client.put_records, StreamName=NAME, Records=too_long) == "ValidationException"


@scenario
def put_resource_policy(client):
    arn = register(client)["ConsumerARN"]
    client.put_resource_policy(ResourceARN=arn, Policy=POLICY)
    assert client.get_resource_policy(ResourceARN=arn)["Policy"] == POLICY


@scenario
def register_stream_consumer(client):
    consumer = register(client)
    assert consumer["ConsumerStatus"] == "CREATING"
    assert consumer["ConsumerARN"].startswith(f"{ARN}/consumer/reader:")
    assert code_of(client.register_stream_consumer, StreamARN=ARN, ConsumerName="reader") == "ResourceInUseException"


@scenario
def remove_tags_from_stream(client):
    client.add_tags_to_stream(StreamName=NAME, Tags={"a": "1", "b": "2"})
    client.remove_tags_from_stream(StreamName=NAME, TagKeys=["a"])
    assert tags_of(client) == {"b": "2"}


@scenario
def split_shard(client):
    client.split_shard(StreamName=NAME, ShardToSplit=LOW, NewStartingHashKey=QUARTER)
    assert summary(client)["OpenShardCount"] == 3
    assert code_of(client.split_shard, StreamName=NAME, ShardToSplit=LOW, NewStartingHashKey=QUARTER) == (
        "InvalidArgumentException"
    )


@scenario
def start_stream_encryption(client):
    client.start_stream_encryption(StreamName=NAME, EncryptionType="KMS", KeyId=KEY_ID)
    assert (summary(client)["EncryptionType"], summary(client)["KeyId"]) == ("KMS", KEY_ID)
    put(client, b"x")
    assert client.get_records(ShardIterator=iterator(client))["Records"][0]["EncryptionType"] == "KMS"


@scenario
def stop_stream_encryption(client):
    client.start_stream_encryption(StreamName=NAME, EncryptionType="KMS", KeyId=KEY_ID)
    client.stop_stream_encryption(StreamName=NAME, EncryptionType="KMS", KeyId=KEY_ID)
    assert summary(client)["EncryptionType"] == "NONE"


@scenario
def subscribe_to_shard(client):
    put(client, b"one")
    arn = register(client)["ConsumerARN"]
    request = {"ConsumerARN": arn, "ShardId": LOW, "StartingPosition": {"Type": "TRIM_HORIZON"}}
    events = iter(client.subscribe_to_shard(**request)["EventStream"])
    assert [record["Data"] for record in next(events)["SubscribeToShardEvent"]["Records"]] == [b"one"]
    assert code_of(client.subscribe_to_shard, **request) == "ResourceInUseException"
    client.split_shard(StreamName=NAME, ShardToSplit=LOW, NewStartingHashKey=QUARTER)
    (last,) = (event["SubscribeToShardEvent"] for event in events)
    assert [child["ShardId"][-1] for child in last["ChildShards"]] == ["2", "3"]


@scenario
def tag_resource(client):
    client.tag_resource(ResourceARN=ARN, Tags={"a": "1"})
    assert tags_of(client) == {"a": "1"}


@scenario
def untag_resource(client):
    client.tag_resource(ResourceARN=ARN, Tags={"a": "1"})
    client.untag_resource(ResourceARN=ARN, TagKeys=["a"])
    assert tags_of(client) == {}


@scenario
def update_account_settings(client):
    answer = client.update_account_settings(MinimumThroughputBillingCommitment={"Status": "ENABLED"})
    assert answer["MinimumThroughputBillingCommitment"]["Status"] == "ENABLED"
    answer = client.update_account_settings(MinimumThroughputBillingCommitment={"Status": "DISABLED"})
    assert answer["MinimumThroughputBillingCommitment"]["Status"] == "ENABLED_UNTIL_EARLIEST_ALLOWED_END"


@scenario
def update_max_record_size(client):
    large = {"StreamName": NAME, "Data": bytes(1_500_000), "PartitionKey": "k"}
    assert code_of(client.put_record, **large) == "InvalidArgumentException"
    client.update_max_record_size(StreamARN=ARN, MaxRecordSizeInKiB=2048)
    client.put_record(**large)


@scenario
def update_shard_count(client):
    answer = client.update_shard_count(StreamName=NAME, TargetShardCount=3, ScalingType="UNIFORM_SCALING")
    assert (answer["CurrentShardCount"], answer["TargetShardCount"]) == (2, 3)
    assert summary(client)["OpenShardCount"] == 3


@scenario
def update_stream_mode(client):
    go_on_demand(client)
    assert summary(client)["StreamModeDetails"] == {"StreamMode": "ON_DEMAND"}


@scenario
def update_stream_record_distribution_strategy(client):
    go_on_demand(client)
    client.update_stream_record_distribution_strategy(StreamARN=ARN, RecordDistributionStrategy="AUTO")
    shard_ids = {client.put_record(StreamName=NAME, Data=b"x")["ShardId"] for _ in range(2)}
    assert shard_ids == {LOW, HIGH}
    answer = client.get_records(ShardIterator=iterator(client))
    assert "PartitionKey" not in answer["Records"][0]


@scenario
def update_stream_warm_throughput(client):
    go_on_demand(client)
    client.update_account_settings(MinimumThroughputBillingCommitment={"Status": "ENABLED"})
    answer = client.update_stream_warm_throughput(StreamName=NAME, WarmThroughputMiBps=20)
    assert answer["WarmThroughput"]["TargetMiBps"] == 20
    assert summary(client)["WarmThroughput"]["CurrentMiBps"] == 20


@pytest.mark.parametrize("method", METHODS)
def test_the_operation_works_with_boto3(kinesis, method):
    kinesis.boto3.create_stream(StreamName=NAME, ShardCount=2)
    SCENARIOS[method](kinesis.boto3)


@pytest.mark.parametrize("method", METHODS)
def test_the_operation_answers_in_the_shape_of_the_model(method):
    client = PureClient()
    client.create_stream(StreamName=NAME, ShardCount=2)
    SCENARIOS[method](client)


class PureClient:
    """boto3's face on the state alone; every answer is compared with the model and then read as botocore would."""

    def __init__(self):
        self._state = LocalState(entropy=random.Random(1))

    def __getattr__(self, method):
        operation = METHODS[method]

        def call(**request):
            now_ms = time.time_ns() // 1_000_000
            if operation == "SubscribeToShard":
                return {"EventStream": self._events(self._state.subscribe(request, now_ms=now_ms))}
            answer = self._state.call(operation, plain(request), now_ms=now_ms)
            shape = MODEL.operation_model(operation).output_shape
            return {} if shape is None else read(shape, answer)

        return call

    def _events(self, subscription):
        shape = MODEL.shape_for("SubscribeToShardEvent")
        while not subscription.is_over:
            event = subscription.poll(time.time_ns() // 1_000_000)
            if event is not None:
                yield {event.type: read(shape, event.members, absent={"ContinuationSequenceNumber"})}


def plain(value):
    """A request as a body has it: datetimes become seconds."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    return value.timestamp() if isinstance(value, datetime) else value


def read(shape, value, absent=frozenset()):
    """`absent` names required members that the service leaves out all the same: the continuation at a shard's end."""
    match shape.type_name:
        case "structure":
            members = value if isinstance(value, dict) else value.members()
            assert set(members) <= set(shape.members)
            assert set(shape.required_members) - set(members) <= absent
            return {name: read(shape.members[name], member) for name, member in members.items()}
        case "list":
            assert isinstance(value, list)
            return [read(shape.member, item) for item in value]
        case "timestamp":
            assert isinstance(value, Timestamp)
            return datetime.fromtimestamp(value, UTC)
        case kind:
            assert type(value) is {"string": str, "integer": int, "long": int, "boolean": bool, "blob": bytes}[kind]
            return value
