import pytest

from anabranch.local.state.throughput import TokenBucket

MIB = 1 << 20
ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
SHARD = "shardId-000000000000"
RATE = (
    f"ProvisionedThroughputExceededException: Rate exceeded for shard {SHARD} in stream orders "
    "under account 000000000000."
)


@pytest.fixture
def limited(make_kinesis):
    kinesis = make_kinesis(limits="aws")
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    return kinesis


def put(kinesis, size, count=1):
    entries = [{"Data": bytes(size - 1), "PartitionKey": "k"}] * count
    return kinesis.PutRecords(StreamName="orders", Records=entries)["FailedRecordCount"]


def test_a_shard_accepts_a_thousand_records_per_second_and_rejects_the_other_entries(limited):
    assert [put(limited, 10, 500) for _ in range(3)] == [0, 0, 500]
    answer = limited.PutRecords(StreamName="orders", Records=[{"Data": b"", "PartitionKey": "k"}])
    assert f"ProvisionedThroughputExceededException: {answer['Records'][0]['ErrorMessage']}" == RATE
    assert limited.fails("PutRecord", StreamName="orders", Data=b"", PartitionKey="k") == RATE
    limited.wait(ms=100)
    assert put(limited, 10, 500) == 400


def test_a_shard_accepts_one_mebibyte_per_second_after_a_burst_of_ten(limited):
    assert [put(limited, MIB) for _ in range(11)] == [0] * 10 + [1]
    limited.wait(ms=999)
    assert put(limited, MIB) == 1
    limited.wait(ms=1)
    assert put(limited, MIB) == 0


def test_a_shard_is_read_five_times_a_second(limited):
    iterators = [limited.iterator() for _ in range(5)]
    for iterator in iterators:
        limited.GetRecords(ShardIterator=iterator)
    assert limited.fails("GetRecords", ShardIterator=iterators[0]) == RATE
    limited.wait(ms=200)
    limited.GetRecords(ShardIterator=iterators[0])


def test_ten_mebibytes_in_one_read_cost_five_seconds(limited):
    for _ in range(10):
        put(limited, MIB)
    iterator = limited.iterator()
    assert len(limited.GetRecords(ShardIterator=iterator)["Records"]) == 10
    for wait_ms in (1, 4998):
        limited.wait(ms=wait_ms)
        assert limited.fails("GetRecords", ShardIterator=iterator) == RATE
    limited.wait(ms=2)
    limited.GetRecords(ShardIterator=iterator)


def test_two_mebibytes_a_second_can_be_read_in_pieces(limited):
    for _ in range(4):
        put(limited, MIB)
    iterator = limited.iterator()
    for _ in range(2):
        iterator = limited.GetRecords(ShardIterator=iterator, Limit=1)["NextShardIterator"]
    assert limited.fails("GetRecords", ShardIterator=iterator) == RATE
    limited.wait(ms=500)
    limited.GetRecords(ShardIterator=iterator, Limit=1)


def test_five_iterators_per_second_are_issued(limited):
    for _ in range(5):
        limited.iterator()
    failure = limited.fails("GetShardIterator", StreamName="orders", ShardId="0", ShardIteratorType="LATEST")
    assert failure == RATE


def test_a_consumer_subscribes_once_a_second_to_a_shard(limited):
    arn = limited.RegisterStreamConsumer(StreamARN=ARN, ConsumerName="a")["Consumer"]["ConsumerARN"]
    request = {"ConsumerARN": arn, "ShardId": "0", "StartingPosition": {"Type": "LATEST"}}
    limited.subscribe(**request)
    with pytest.raises(Exception, match="LimitExceededException: SubscribeToShard can be called 1 time a second"):
        limited.subscribe(**request)
    limited.wait(ms=1000)
    with pytest.raises(Exception, match="ResourceInUseException"):
        limited.subscribe(**request)


def test_control_plane_calls_are_rate_limited(limited):
    limited.DescribeLimits()
    assert limited.fails("DescribeLimits") == (
        "LimitExceededException: Rate exceeded for DescribeLimits under account 000000000000."
    )
    limited.wait(ms=1000)
    limited.DescribeLimits()


def test_five_streams_can_be_creating_and_ten_scalings_a_day_are_allowed(make_kinesis):
    kinesis = make_kinesis(limits="aws", state_delay_ms=60_000)
    for name in "abcde":
        kinesis.CreateStream(StreamName=name, ShardCount=1)
    kinesis.wait(ms=1000)
    assert kinesis.fails("CreateStream", StreamName="f", ShardCount=1).startswith(
        "LimitExceededException: This request"
    )
    kinesis.wait(ms=60_000)
    request = {"StreamName": "a", "ScalingType": "UNIFORM_SCALING"}
    for turn in range(10):
        kinesis.UpdateShardCount(**request, TargetShardCount=2 - turn % 2)
        kinesis.wait(ms=60_000)
    assert "10 times in 24 hours" in kinesis.fails("UpdateShardCount", **request, TargetShardCount=2)
    kinesis.wait(hours=24)
    kinesis.UpdateShardCount(**request, TargetShardCount=2)


def test_without_limits_nothing_is_counted(kinesis):
    for _ in range(20):
        kinesis.DescribeLimits()
        kinesis.iterator()
    assert (
        kinesis.PutRecords(StreamName="orders", Records=[{"Data": b"", "PartitionKey": "k"}] * 500)["FailedRecordCount"]
        == 0
    )


def test_a_bucket_knows_when_its_level_is_above_zero_again():
    bucket = TokenBucket(10)
    assert bucket.ready_ms(0) == 0
    bucket.charge(25, 0)
    assert bucket.level(0) == -25
    assert bucket.ready_ms(1000) == 2501
    assert bucket.level(500) == -15.0  # a clock that steps back refills nothing
