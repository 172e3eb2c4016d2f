"""The local Kinesis as boto3 sees it: writing, polling through a split, fan-out, errors and faults, plain and TLS."""

import threading
import time

import botocore.exceptions
import pytest

SHARD_0 = "shardId-000000000000"
HALF = str(1 << 127)


def make_stream(kinesis, shard_count=1, name="orders"):
    kinesis.boto3.create_stream(StreamName=name, ShardCount=shard_count)
    return kinesis.boto3.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["StreamARN"]


def make_consumer(kinesis, stream_arn, name="reader"):
    return kinesis.boto3.register_stream_consumer(StreamARN=stream_arn, ConsumerName=name)["Consumer"]["ConsumerARN"]


def subscribe(kinesis, consumer_arn, shard_id=SHARD_0, *, client=None, **position):
    return (client or kinesis.boto3).subscribe_to_shard(
        ConsumerARN=consumer_arn, ShardId=shard_id, StartingPosition=position or {"Type": "TRIM_HORIZON"}
    )["EventStream"]


def put(kinesis, *payloads, hash_key="0"):
    answer = kinesis.boto3.put_records(
        StreamName="orders",
        Records=[{"Data": payload, "PartitionKey": "key", "ExplicitHashKey": hash_key} for payload in payloads],
    )
    assert answer["FailedRecordCount"] == 0
    return [record["SequenceNumber"] for record in answer["Records"]]


def error_of(call, /, **arguments):
    with pytest.raises(botocore.exceptions.ClientError) as raised:
        call(**arguments)
    return raised.value.response


def read_to_the_end(kinesis, shard_id):
    iterator = kinesis.boto3.get_shard_iterator(
        StreamName="orders", ShardId=shard_id, ShardIteratorType="TRIM_HORIZON"
    )["ShardIterator"]
    payloads = []
    while True:
        answer = kinesis.boto3.get_records(ShardIterator=iterator)
        payloads += [record["Data"] for record in answer["Records"]]
        iterator = answer.get("NextShardIterator")
        if iterator is None:
            return payloads, [child["ShardId"] for child in answer["ChildShards"]]


def test_polling_follows_a_split_to_the_children(kinesis):
    make_stream(kinesis)
    numbers = put(kinesis, b"one", b"two" * 100_000)
    assert numbers == sorted(numbers, key=int)
    kinesis.boto3.split_shard(StreamName="orders", ShardToSplit=SHARD_0, NewStartingHashKey=HALF)
    put(kinesis, b"low", hash_key="0")
    put(kinesis, b"high", hash_key=HALF)
    payloads, children = read_to_the_end(kinesis, SHARD_0)
    assert payloads == [b"one", b"two" * 100_000]
    assert children == ["shardId-000000000001", "shardId-000000000002"]
    for child, payload in zip(children, (b"low", b"high"), strict=True):
        iterator = kinesis.boto3.get_shard_iterator(
            StreamName="orders", ShardId=child, ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        answer = kinesis.boto3.get_records(ShardIterator=iterator)
        assert [record["Data"] for record in answer["Records"]] == [payload]
        assert answer["MillisBehindLatest"] == 0


def test_fan_out_pushes_old_and_new_records_and_ends_with_the_children(kinesis):
    consumer = make_consumer(kinesis, make_stream(kinesis))
    put(kinesis, b"one")
    events = iter(subscribe(kinesis, consumer))
    first = next(events)["SubscribeToShardEvent"]
    assert [record["Data"] for record in first["Records"]] == [b"one"]
    assert "EncryptionType" not in first["Records"][0]
    put(kinesis, b"two", b"three")
    pushed = next(events)["SubscribeToShardEvent"]
    assert [record["Data"] for record in pushed["Records"]] == [b"two", b"three"]
    assert int(pushed["ContinuationSequenceNumber"]) >= int(pushed["Records"][-1]["SequenceNumber"])
    kinesis.boto3.split_shard(StreamName="orders", ShardToSplit=SHARD_0, NewStartingHashKey=HALF)
    last = next(events)["SubscribeToShardEvent"]
    assert {child["ShardId"] for child in last["ChildShards"]} == {"shardId-000000000001", "shardId-000000000002"}
    assert "ContinuationSequenceNumber" not in last
    assert list(events) == []


def test_events_reach_a_waiting_subscriber_at_once(kinesis):
    consumer = make_consumer(kinesis, make_stream(kinesis))
    stream = subscribe(kinesis, consumer)
    events = iter(stream)
    next(events)
    arrived = []
    reader = threading.Thread(target=lambda: arrived.append((next(events), time.monotonic())))
    reader.start()
    sent = time.monotonic()
    put(kinesis, b"now")
    reader.join(4)
    assert arrived
    assert arrived[0][0]["SubscribeToShardEvent"]["Records"][0]["Data"] == b"now"
    assert arrived[0][1] - sent < 4  # a heartbeat would take five seconds
    stream.close()


def test_a_second_subscription_within_five_seconds_is_rejected_and_a_disconnected_client_makes_room(kinesis):
    consumer = make_consumer(kinesis, make_stream(kinesis))
    stream = subscribe(kinesis, consumer)
    next(iter(stream))
    refused = error_of(
        kinesis.boto3.subscribe_to_shard,
        ConsumerARN=consumer,
        ShardId=SHARD_0,
        StartingPosition={"Type": "LATEST"},
    )
    assert refused["Error"]["Code"] == "ResourceInUseException"
    stream.close()


def test_errors_have_awss_codes_statuses_and_headers(kinesis):
    missing = error_of(kinesis.boto3.describe_stream, StreamName="nowhere")
    assert missing["Error"] == {
        "Code": "ResourceNotFoundException",
        "Message": "Stream nowhere under account 000000000000 not found.",
    }
    metadata = missing["ResponseMetadata"]
    assert metadata["HTTPStatusCode"] == 400
    assert len(metadata["RequestId"]) == 36
    assert len(metadata["HTTPHeaders"]["x-amz-id-2"]) == 96
    with pytest.raises(kinesis.boto3.exceptions.ResourceNotFoundException):
        kinesis.boto3.get_shard_iterator(StreamName="nowhere", ShardId=SHARD_0, ShardIteratorType="LATEST")


def test_records_of_ten_mebibytes_pass_both_ways(kinesis):
    arn = make_stream(kinesis)
    kinesis.boto3.update_max_record_size(StreamARN=arn, MaxRecordSizeInKiB=10_240)
    payload = bytes(range(256)) * 40_000
    put(kinesis, payload)
    iterator = kinesis.boto3.get_shard_iterator(StreamName="orders", ShardId=SHARD_0, ShardIteratorType="TRIM_HORIZON")[
        "ShardIterator"
    ]
    assert kinesis.boto3.get_records(ShardIterator=iterator)["Records"][0]["Data"] == payload


def test_chosen_entries_of_a_put_are_throttled_once(plain_kinesis):
    make_stream(plain_kinesis)
    plain_kinesis.faults.on("PutRecords", stream="orders").throttle(slots=[1, 3]).once()
    records = [{"Data": b"%d" % number, "PartitionKey": "key"} for number in range(5)]
    answer = plain_kinesis.boto3.put_records(StreamName="orders", Records=records)
    assert answer["FailedRecordCount"] == 2
    assert [record.get("ErrorCode") for record in answer["Records"]] == [
        None,
        "ProvisionedThroughputExceededException",
        None,
        "ProvisionedThroughputExceededException",
        None,
    ]
    assert f"Rate exceeded for shard {SHARD_0} in stream orders" in answer["Records"][1]["ErrorMessage"]
    assert plain_kinesis.boto3.put_records(StreamName="orders", Records=records)["FailedRecordCount"] == 0


def stored(kinesis):
    iterator = kinesis.boto3.get_shard_iterator(StreamName="orders", ShardId=SHARD_0, ShardIteratorType="TRIM_HORIZON")[
        "ShardIterator"
    ]
    return [record["Data"] for record in kinesis.boto3.get_records(ShardIterator=iterator)["Records"]]


@pytest.mark.parametrize(
    "script, takes_effect",
    [
        (lambda on: on.lose_response(), True),
        (lambda on: on.time_out(), True),
        (lambda on: on.drop(), False),
        (lambda on: on.half_open(), False),
    ],
    ids=["lose_response", "time_out", "drop", "half_open"],
)
def test_a_response_can_be_lost_with_or_without_the_effect_of_the_call(plain_kinesis, script, takes_effect):
    make_stream(plain_kinesis)
    script(plain_kinesis.faults.on("PutRecord")).once()
    impatient = plain_kinesis.client(read_timeout=0.3)
    with pytest.raises(botocore.exceptions.HTTPClientError):
        impatient.put_record(StreamName="orders", Data=b"x", PartitionKey="key")
    assert stored(plain_kinesis) == ([b"x"] if takes_effect else [])
    impatient.close()


def test_errors_delays_and_expired_iterators_can_be_scripted(plain_kinesis):
    make_stream(plain_kinesis)
    client = plain_kinesis.boto3
    iterator = client.get_shard_iterator(StreamName="orders", ShardId=SHARD_0, ShardIteratorType="LATEST")
    plain_kinesis.faults.on("GetRecords").expire_iterator().once()
    expired = error_of(client.get_records, ShardIterator=iterator["ShardIterator"])
    assert expired["Error"]["Code"] == "ExpiredIteratorException"
    assert expired["Error"]["Message"].startswith("Iterator expired. The iterator was created at time ")
    plain_kinesis.faults.on("GetRecords").throttle().once()
    throttled = error_of(client.get_records, ShardIterator=iterator["ShardIterator"])
    assert throttled["Error"]["Code"] == "ProvisionedThroughputExceededException"
    plain_kinesis.faults.on().fail(503, "ServiceUnavailable", "later").once()
    unavailable = error_of(client.list_streams)
    assert unavailable["ResponseMetadata"]["HTTPStatusCode"] == 503
    plain_kinesis.faults.on("ListStreams").delay(0.2).once()
    started = time.monotonic()
    client.list_streams()
    assert time.monotonic() - started >= 0.2


def test_a_subscription_can_fall_silent_break_or_be_in_use(plain_kinesis):
    consumer = make_consumer(plain_kinesis, make_stream(plain_kinesis))
    put(plain_kinesis, b"one")
    subscriptions = plain_kinesis.faults.on("SubscribeToShard")
    subscriptions.resource_in_use().once()
    subscriptions.drop(events=1).once()
    refused = error_of(
        plain_kinesis.boto3.subscribe_to_shard,
        ConsumerARN=consumer,
        ShardId=SHARD_0,
        StartingPosition={"Type": "LATEST"},
    )
    assert refused["Error"]["Code"] == "ResourceInUseException"
    events = iter(subscribe(plain_kinesis, consumer))
    assert next(events)["SubscribeToShardEvent"]["Records"][0]["Data"] == b"one"
    with pytest.raises(Exception, match=r"IncompleteRead|reset|Connection broken|ended prematurely"):
        next(events)
    plain_kinesis.faults.clear()
    subscriptions.fall_silent(events=1).once()
    impatient = plain_kinesis.client(read_timeout=0.3)
    consumer = make_consumer(plain_kinesis, arn_of(plain_kinesis), "other")
    events = iter(subscribe(plain_kinesis, consumer, client=impatient))
    next(events)
    put(plain_kinesis, b"never pushed")
    with pytest.raises(Exception, match="Read timed out"):
        next(events)
    impatient.close()


def test_with_awss_limits_some_entries_are_throttled_and_the_others_are_written(limited_kinesis):
    make_stream(limited_kinesis)
    records = [{"Data": b"x", "PartitionKey": "key"}] * 500
    answers = [limited_kinesis.boto3.put_records(StreamName="orders", Records=records) for _ in range(10)]
    results = [result for answer in answers for result in answer["Records"]]
    refused = [result for result in results if "ErrorCode" in result]
    assert sum(answer["FailedRecordCount"] for answer in answers) == len(refused)
    assert 0 < len(refused) <= 4_000
    assert {result["ErrorCode"] for result in refused} == {"ProvisionedThroughputExceededException"}
    assert len(stored(limited_kinesis)) == 5_000 - len(refused)
    throttled = error_of(put_until_throttled, kinesis=limited_kinesis)
    assert throttled["Error"]["Code"] == "ProvisionedThroughputExceededException"


def put_until_throttled(kinesis):
    while True:
        kinesis.boto3.put_record(StreamName="orders", Data=b"x" * 1_000_000, PartitionKey="key")


def arn_of(kinesis):
    return kinesis.boto3.describe_stream_summary(StreamName="orders")["StreamDescriptionSummary"]["StreamARN"]
