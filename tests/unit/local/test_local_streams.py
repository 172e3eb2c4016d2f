import pytest

from anabranch.errors import ConfigurationError
from anabranch.local.settings import LocalSettings


def summary(kinesis, name="orders"):
    return kinesis.DescribeStreamSummary(StreamName=name)["StreamDescriptionSummary"]


def test_a_new_stream_has_exactly_the_members_of_aws(kinesis):
    assert summary(kinesis) == {
        "StreamName": "orders",
        "StreamARN": "arn:aws:kinesis:us-east-1:000000000000:stream/orders",
        "StreamStatus": "ACTIVE",
        "StreamModeDetails": {"StreamMode": "PROVISIONED"},
        "RetentionPeriodHours": 24,
        "StreamCreationTimestamp": 1_800_000_000,
        "EnhancedMonitoring": [{"ShardLevelMetrics": []}],
        "EncryptionType": "NONE",
        "OpenShardCount": 2,
        "ConsumerCount": 0,
        "MaxRecordSizeInKiB": 1024,
    }
    described = kinesis.DescribeStream(StreamName="orders")["StreamDescription"]
    assert described["HasMoreShards"] is False
    assert described["Shards"] == kinesis.ListShards(StreamName="orders")["Shards"]
    assert described["Shards"][0]["HashKeyRange"] == {
        "StartingHashKey": "0",
        "EndingHashKey": "170141183460469231731687303715884105727",
    }
    assert "KeyId" not in described
    assert "EndingSequenceNumber" not in described["Shards"][0]["SequenceNumberRange"]


def test_arns_follow_the_partition_of_the_region(make_kinesis):
    for region, partition in (("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov"), ("eu-west-1", "aws")):
        kinesis = make_kinesis(region=region, account_id="123456789012")
        kinesis.CreateStream(StreamName="a", ShardCount=1)
        assert summary(kinesis, "a")["StreamARN"] == f"arn:{partition}:kinesis:{region}:123456789012:stream/a"


def test_a_stream_without_a_shard_count_is_on_demand_with_four_shards(kinesis):
    kinesis.CreateStream(StreamName="events")
    described = summary(kinesis, "events")
    assert described["StreamModeDetails"] == {"StreamMode": "ON_DEMAND"}
    assert described["OpenShardCount"] == 4
    assert described["RecordDistributionStrategy"] == "USER_PARTITION_KEY"


def test_writers_and_readers_do_not_see_a_stream_that_is_creating(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=500)
    kinesis.CreateStream(StreamName="orders", ShardCount=2)
    assert summary(kinesis)["StreamStatus"] == "CREATING"
    assert summary(kinesis)["OpenShardCount"] == 0
    assert kinesis.ListShards(StreamName="orders")["Shards"] == []
    missing = "ResourceNotFoundException: Stream orders under account 000000000000 not found."
    assert kinesis.fails("PutRecord", StreamName="orders", Data=b"", PartitionKey="k") == missing
    assert (
        kinesis.fails("AddTagsToStream", StreamName="orders", Tags={"a": "b"})
        == "ResourceInUseException: Stream orders under account 000000000000 not ACTIVE, instead in state CREATING"
    )
    assert kinesis.state.next_deadline_ms() == kinesis.now_ms + 500
    kinesis.wait(ms=500)
    assert summary(kinesis)["StreamStatus"] == "ACTIVE"
    assert kinesis.state.next_deadline_ms() is None


def test_state_delays_are_scaled_and_rates_of_the_clock_are_not(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=1000, time_scale=0.1)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    assert kinesis.state.next_deadline_ms() == kinesis.now_ms + 100


@pytest.mark.parametrize("shard_count", [19_999, 100_000_000_000])
def test_the_shard_limit_is_checked_before_any_shard_is_created(kinesis, shard_count):
    assert kinesis.fails("CreateStream", StreamName="big", ShardCount=shard_count).startswith(
        "LimitExceededException: This request would exceed the shard limit for the account 000000000000 in us-east-1. "
        "Current shard count for the account: 2. Limit: 20000. Number of additional shards that would have resulted "
        f"from this request: {shard_count}."
    )
    assert kinesis.ListStreams()["StreamNames"] == ["orders"]


def test_an_invalid_create_stream_is_rejected_with_the_reason(kinesis):
    fails = kinesis.fails
    assert (
        fails("CreateStream", StreamName="orders", ShardCount=1)
        == "ResourceInUseException: Stream orders under account 000000000000 already exists."
    )
    on_demand, provisioned = {"StreamMode": "ON_DEMAND"}, {"StreamMode": "PROVISIONED"}
    assert fails("CreateStream", StreamName="a", ShardCount=1, StreamModeDetails=on_demand).startswith("ValidationEx")
    assert fails("CreateStream", StreamName="a", StreamModeDetails=provisioned).startswith("ValidationException")
    assert fails("CreateStream", StreamName="a", ShardCount=1, RecordDistributionStrategy="AUTO").startswith("InvalidA")
    assert fails("CreateStream", StreamName="a", WarmThroughputMiBps=10).startswith("ValidationException")
    assert fails("CreateStream", StreamName="a", ShardCount=1, Tags={"aws:x": "y"}).startswith("InvalidArgument")


def test_the_fifty_first_on_demand_stream_is_over_the_limit(kinesis):
    for number in range(50):
        kinesis.CreateStream(StreamName=f"s{number}")
    assert kinesis.fails("CreateStream", StreamName="more").startswith("LimitExceededException")
    limits = kinesis.DescribeLimits()
    assert limits == {
        "ShardLimit": 20_000,
        "OpenShardCount": 202,
        "OnDemandStreamCount": 50,
        "OnDemandStreamCountLimit": 50,
    }


def test_a_deleted_stream_is_deleting_and_then_gone(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=100)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    kinesis.wait(ms=100)
    kinesis.DeleteStream(StreamName="orders")
    kinesis.DeleteStream(StreamName="orders")
    assert summary(kinesis)["StreamStatus"] == "DELETING"
    kinesis.wait(ms=100)
    assert kinesis.fails("DescribeStream", StreamName="orders").startswith("ResourceNotFoundException")
    assert kinesis.ListStreams()["StreamNames"] == []


def test_a_stream_with_consumers_is_deleted_only_with_enforce_consumer_deletion(kinesis):
    arn = summary(kinesis)["StreamARN"]
    kinesis.RegisterStreamConsumer(StreamARN=arn, ConsumerName="reader")
    assert kinesis.fails("DeleteStream", StreamName="orders").startswith("ResourceInUseException: Stream orders")
    kinesis.DeleteStream(StreamARN=arn, EnforceConsumerDeletion=True)
    assert kinesis.ListStreams()["StreamNames"] == []


def test_streams_are_listed_by_name_a_page_at_a_time(kinesis):
    for name in ("c", "a", "b"):
        kinesis.CreateStream(StreamName=name, ShardCount=1)
    first = kinesis.ListStreams(Limit=2)
    assert (first["StreamNames"], first["HasMoreStreams"]) == (["a", "b"], True)
    assert first["StreamSummaries"][0] == {
        "StreamName": "a",
        "StreamARN": "arn:aws:kinesis:us-east-1:000000000000:stream/a",
        "StreamStatus": "ACTIVE",
        "StreamModeDetails": {"StreamMode": "PROVISIONED"},
        "StreamCreationTimestamp": 1_800_000_000,
    }
    second = kinesis.ListStreams(NextToken=first["NextToken"])
    assert (second["StreamNames"], second["HasMoreStreams"]) == (["c", "orders"], False)
    assert "NextToken" not in second
    assert kinesis.ListStreams(ExclusiveStartStreamName="b")["StreamNames"] == ["c", "orders"]


def test_a_stream_is_found_by_name_by_arn_and_by_both_if_they_agree(kinesis):
    arn = summary(kinesis)["StreamARN"]
    for names in ({"StreamARN": arn}, {"StreamName": "orders", "StreamARN": arn}):
        assert kinesis.DescribeStreamSummary(**names)["StreamDescriptionSummary"]["StreamName"] == "orders"
    fails = kinesis.fails
    assert fails("DescribeStream") == "InvalidArgumentException: Either StreamName or StreamARN must be provided."
    assert fails("DescribeStream", StreamName="x", StreamARN=arn).startswith("InvalidArgumentException: StreamName x")
    other = "arn:aws:kinesis:us-east-1:999999999999:stream/orders"
    assert fails("DescribeStream", StreamARN=other).endswith("under account 999999999999 not found.")
    assert fails("DescribeStream", StreamARN=arn + "/consumer/a:1").startswith("InvalidArgumentException")


def test_shards_of_a_described_stream_come_in_pages_of_at_most_a_hundred(kinesis):
    kinesis.CreateStream(StreamName="wide", ShardCount=150)
    first = kinesis.DescribeStream(StreamName="wide", Limit=1000)["StreamDescription"]
    assert (len(first["Shards"]), first["HasMoreShards"]) == (100, True)
    last = first["Shards"][-1]["ShardId"]
    second = kinesis.DescribeStream(StreamName="wide", ExclusiveStartShardId=last)["StreamDescription"]
    assert (second["Shards"][0]["ShardId"], second["HasMoreShards"]) == ("shardId-000000000100", False)


def test_the_retention_period_changes_within_its_limits(kinesis):
    fails = kinesis.fails
    kinesis.IncreaseStreamRetentionPeriod(StreamName="orders", RetentionPeriodHours=48)
    assert summary(kinesis)["RetentionPeriodHours"] == 48
    assert (
        fails("IncreaseStreamRetentionPeriod", StreamName="orders", RetentionPeriodHours=24)
        == "InvalidArgumentException: Requested retention period (24 hours) for stream orders can not be shorter than "
        "existing retention period (48 hours). Use DecreaseRetentionPeriod API."
    )
    assert fails("DecreaseStreamRetentionPeriod", StreamName="orders", RetentionPeriodHours=72).endswith(
        "can not be longer than existing retention period (48 hours). Use IncreaseRetentionPeriod API."
    )
    assert fails("DecreaseStreamRetentionPeriod", StreamName="orders", RetentionPeriodHours=23).endswith(
        "is too short."
    )
    assert fails("IncreaseStreamRetentionPeriod", StreamName="orders", RetentionPeriodHours=8761).endswith(
        "is too long."
    )
    kinesis.DecreaseStreamRetentionPeriod(StreamName="orders", RetentionPeriodHours=24)
    assert summary(kinesis)["RetentionPeriodHours"] == 24


def test_enhanced_metrics_are_switched_on_and_off(kinesis):
    enabled = kinesis.EnableEnhancedMonitoring(
        StreamName="orders", ShardLevelMetrics=["OutgoingBytes", "IncomingBytes"]
    )
    assert enabled["CurrentShardLevelMetrics"] == []
    assert enabled["DesiredShardLevelMetrics"] == ["IncomingBytes", "OutgoingBytes"]
    disabled = kinesis.DisableEnhancedMonitoring(StreamName="orders", ShardLevelMetrics=["IncomingBytes"])
    assert disabled["DesiredShardLevelMetrics"] == ["OutgoingBytes"]
    assert (
        len(
            kinesis.EnableEnhancedMonitoring(StreamName="orders", ShardLevelMetrics=["ALL"])["DesiredShardLevelMetrics"]
        )
        == 7
    )
    kinesis.DisableEnhancedMonitoring(StreamName="orders", ShardLevelMetrics=["ALL"])
    assert summary(kinesis)["EnhancedMonitoring"] == [{"ShardLevelMetrics": []}]


def test_a_stream_that_is_updating_rejects_other_updates(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=100)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    kinesis.wait(ms=100)
    kinesis.StartStreamEncryption(StreamName="orders", EncryptionType="KMS", KeyId="alias/aws/kinesis")
    assert summary(kinesis)["StreamStatus"] == "UPDATING"
    assert summary(kinesis)["EncryptionType"] == "NONE"
    assert "instead in state UPDATING" in kinesis.fails(
        "UpdateMaxRecordSize", StreamARN=summary(kinesis)["StreamARN"], MaxRecordSizeInKiB=2048
    )
    assert "EncryptionType" not in kinesis.put("plain")[0]
    kinesis.wait(ms=100)
    assert (summary(kinesis)["EncryptionType"], summary(kinesis)["KeyId"]) == ("KMS", "alias/aws/kinesis")
    assert kinesis.put("secret")[0]["EncryptionType"] == "KMS"


def test_the_only_encryption_type_is_kms(kinesis):
    for verb in ("Start", "Stop"):
        failure = kinesis.fails(f"{verb}StreamEncryption", StreamName="orders", EncryptionType="NONE", KeyId="k")
        assert failure.startswith("InvalidArgumentException")


def test_modes_warm_throughput_and_the_billing_commitment_depend_on_each_other(kinesis):
    arn = summary(kinesis)["StreamARN"]
    fails = kinesis.fails
    assert fails("UpdateStreamWarmThroughput", StreamName="orders", WarmThroughputMiBps=10).startswith(
        "InvalidArgument"
    )
    kinesis.UpdateStreamMode(StreamARN=arn, StreamModeDetails={"StreamMode": "ON_DEMAND"})
    assert fails("UpdateStreamWarmThroughput", StreamName="orders", WarmThroughputMiBps=10).startswith("Validation")
    assert fails(
        "UpdateStreamMode", StreamARN=arn, StreamModeDetails={"StreamMode": "ON_DEMAND"}, WarmThroughputMiBps=1
    ).startswith("Validation")
    assert kinesis.DescribeAccountSettings() == {"MinimumThroughputBillingCommitment": {"Status": "DISABLED"}}
    kinesis.UpdateAccountSettings(MinimumThroughputBillingCommitment={"Status": "ENABLED"})
    updated = kinesis.UpdateStreamWarmThroughput(StreamName="orders", WarmThroughputMiBps=10)
    assert updated["WarmThroughput"] == {"TargetMiBps": 10, "CurrentMiBps": 0}
    assert summary(kinesis)["WarmThroughput"] == {"TargetMiBps": 10, "CurrentMiBps": 10}
    assert fails("UpdateStreamWarmThroughput", StreamName="orders", WarmThroughputMiBps=10_241).startswith(
        "LimitExceeded"
    )
    kinesis.CreateStream(StreamName="warm", WarmThroughputMiBps=5)
    assert summary(kinesis, "warm")["WarmThroughput"]["CurrentMiBps"] == 5
    kinesis.UpdateStreamMode(StreamARN=arn, StreamModeDetails={"StreamMode": "PROVISIONED"})
    assert "WarmThroughput" not in summary(kinesis)


def test_a_commitment_lasts_a_day_before_it_can_end(kinesis):
    def commitment():
        return kinesis.DescribeAccountSettings()["MinimumThroughputBillingCommitment"]

    def update(status):
        return kinesis.UpdateAccountSettings(MinimumThroughputBillingCommitment={"Status": status})

    update("ENABLED")
    assert commitment() == {"Status": "ENABLED", "StartedAt": 1_800_000_000, "EarliestAllowedEndAt": 1_800_086_400}
    update("DISABLED")
    assert commitment()["Status"] == "ENABLED_UNTIL_EARLIEST_ALLOWED_END"
    update("ENABLED")
    assert commitment()["Status"] == "ENABLED"
    update("DISABLED")
    kinesis.wait(hours=24)
    assert commitment() == {"Status": "DISABLED", "StartedAt": 1_800_000_000, "EndedAt": 1_800_086_400}
    update("DISABLED")
    update("ENABLED")
    assert commitment()["StartedAt"] == 1_800_086_400


def test_all_invalid_settings_are_reported_at_once():
    with pytest.raises(ConfigurationError) as caught:
        LocalSettings(region="mars", account_id="1", limits="some", state_delay_ms=-1, time_scale=0)
    assert len(caught.value.violations) == 5


def test_a_reset_leaves_an_empty_account(kinesis):
    kinesis.UpdateAccountSettings(MinimumThroughputBillingCommitment={"Status": "ENABLED"})
    kinesis.state.reset()
    assert kinesis.ListStreams()["StreamNames"] == []
    assert kinesis.DescribeAccountSettings()["MinimumThroughputBillingCommitment"]["Status"] == "DISABLED"


def test_an_unknown_operation_is_rejected_by_name(kinesis):
    assert kinesis.fails("CreateChannel") == (
        "UnknownOperationException: There is no operation CreateChannel in this service."
    )
