import pytest

from anabranch.local.errors import LocalError

ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
LOW = "shardId-000000000000"
MIB = 1 << 20


def register(kinesis, name="reader", **more):
    return kinesis.RegisterStreamConsumer(StreamARN=ARN, ConsumerName=name, **more)["Consumer"]


def test_a_consumer_is_registered_described_and_listed(kinesis):
    consumer = register(kinesis, Tags={"team": "a"})
    assert consumer == {
        "ConsumerName": "reader",
        "ConsumerARN": f"{ARN}/consumer/reader:1800000000",
        "ConsumerStatus": "CREATING",
        "ConsumerCreationTimestamp": 1_800_000_000,
    }
    active = {**consumer, "ConsumerStatus": "ACTIVE"}
    for names in (
        {"ConsumerARN": consumer["ConsumerARN"]},
        {"StreamARN": ARN, "ConsumerName": "reader"},
        {"StreamARN": ARN, "ConsumerName": "reader", "ConsumerARN": consumer["ConsumerARN"]},
    ):
        described = kinesis.DescribeStreamConsumer(**names)["ConsumerDescription"]
        assert described == {**active, "StreamARN": ARN}
    assert kinesis.ListStreamConsumers(StreamARN=ARN) == {"Consumers": [active]}


def test_a_consumer_is_creating_and_deleting_for_the_state_delay(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=100)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    assert "instead in state CREATING" in kinesis.fails("RegisterStreamConsumer", StreamARN=ARN, ConsumerName="a")
    kinesis.wait(ms=100)
    arn = register(kinesis)["ConsumerARN"]

    def status():
        return kinesis.DescribeStreamConsumer(ConsumerARN=arn)["ConsumerDescription"]["ConsumerStatus"]

    assert status() == "CREATING"
    kinesis.wait(ms=100)
    assert status() == "ACTIVE"
    kinesis.DeregisterStreamConsumer(ConsumerARN=arn)
    kinesis.DeregisterStreamConsumer(ConsumerARN=arn)
    assert status() == "DELETING"
    kinesis.wait(ms=100)
    assert kinesis.fails("DescribeStreamConsumer", ConsumerARN=arn) == (
        f"ResourceNotFoundException: Consumer {arn}, account 000000000000 not found."
    )


def test_a_consumer_may_be_registered_while_the_stream_is_updating(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=100)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    kinesis.wait(ms=100)
    kinesis.EnableEnhancedMonitoring(StreamName="orders", ShardLevelMetrics=["ALL"])
    assert register(kinesis)["ConsumerStatus"] == "CREATING"


def test_unknown_and_badly_named_consumers_are_rejected(kinesis):
    arn = register(kinesis)["ConsumerARN"]
    fails = kinesis.fails
    assert fails("RegisterStreamConsumer", StreamARN=ARN, ConsumerName="reader") == (
        "ResourceInUseException: Consumer reader under stream orders already exists for account 000000000000."
    )
    assert fails("DescribeStreamConsumer", StreamARN=ARN).startswith("InvalidArgumentException: Either ConsumerARN")
    assert fails("DescribeStreamConsumer", StreamARN=ARN, ConsumerName="x").startswith("ResourceNotFoundException")
    assert fails("DescribeStreamConsumer", ConsumerARN=arn + "9").startswith("ResourceNotFoundException")
    assert fails("DescribeStreamConsumer", ConsumerARN=arn, ConsumerName="x").startswith("InvalidArgumentException")
    assert fails("DescribeStreamConsumer", ConsumerARN=arn.replace("stream/", "x/stream/")).startswith(
        "InvalidArgument"
    )


def test_a_stream_has_twenty_consumers_and_fifty_with_a_commitment_on_demand(kinesis):
    for number in range(20):
        register(kinesis, f"c{number:02d}")
    assert kinesis.fails("RegisterStreamConsumer", StreamARN=ARN, ConsumerName="more").startswith("LimitExceeded")
    kinesis.UpdateAccountSettings(MinimumThroughputBillingCommitment={"Status": "ENABLED"})
    kinesis.UpdateStreamMode(StreamARN=ARN, StreamModeDetails={"StreamMode": "ON_DEMAND"})
    for number in range(20, 50):
        register(kinesis, f"c{number:02d}")
    assert kinesis.fails("RegisterStreamConsumer", StreamARN=ARN, ConsumerName="more").startswith("LimitExceeded")


def test_only_five_consumers_are_created_at_a_time(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=100)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    kinesis.wait(ms=100)
    for number in range(5):
        register(kinesis, f"c{number}")
    assert "5 consumers in CREATING" in kinesis.fails("RegisterStreamConsumer", StreamARN=ARN, ConsumerName="more")


def test_consumers_are_listed_by_name_a_page_at_a_time(kinesis):
    for name in ("c", "a", "b"):
        register(kinesis, name)
    first = kinesis.ListStreamConsumers(StreamARN=ARN, MaxResults=2, StreamCreationTimestamp=1_800_000_000.0)
    assert [consumer["ConsumerName"] for consumer in first["Consumers"]] == ["a", "b"]
    second = kinesis.ListStreamConsumers(StreamARN=ARN, NextToken=first["NextToken"])
    assert [consumer["ConsumerName"] for consumer in second["Consumers"]] == ["c"]
    assert "NextToken" not in second
    assert kinesis.fails("ListStreamConsumers", StreamARN=ARN, StreamCreationTimestamp=1.0).startswith("ResourceNotF")


def test_streams_and_consumers_have_tags(kinesis):
    consumer = register(kinesis, Tags={"team": "a"})["ConsumerARN"]
    kinesis.AddTagsToStream(StreamName="orders", Tags={"b": "2", "a": "1"})
    kinesis.TagResource(ResourceARN=ARN, Tags={"c": "3", "a": "one"})
    assert kinesis.ListTagsForStream(StreamName="orders", Limit=2) == {
        "Tags": [{"Key": "a", "Value": "one"}, {"Key": "b", "Value": "2"}],
        "HasMoreTags": True,
    }
    assert kinesis.ListTagsForStream(StreamName="orders", ExclusiveStartTagKey="b") == {
        "Tags": [{"Key": "c", "Value": "3"}],
        "HasMoreTags": False,
    }
    kinesis.RemoveTagsFromStream(StreamName="orders", TagKeys=["a", "nothing"])
    kinesis.UntagResource(ResourceARN=ARN, TagKeys=["b"])
    assert kinesis.ListTagsForResource(ResourceARN=ARN) == {"Tags": [{"Key": "c", "Value": "3"}]}
    kinesis.TagResource(ResourceARN=consumer, Tags={"more": "x"})
    assert [tag["Key"] for tag in kinesis.ListTagsForResource(ResourceARN=consumer)["Tags"]] == ["more", "team"]


def test_tags_with_invalid_characters_and_too_many_tags_are_rejected(kinesis):
    fails = kinesis.fails
    assert fails("AddTagsToStream", StreamName="orders", Tags={"a!": "b"}).startswith(
        "InvalidArgumentException: Some tags contain invalid characters."
    )
    kinesis.AddTagsToStream(StreamName="orders", Tags={"Größe @/:+-=._%": ""})
    assert fails("TagResource", ResourceARN=ARN, Tags={str(number): "" for number in range(50)}).startswith(
        "InvalidArgumentException: Failed to add tags: a resource can have 50 tags, not 51"
    )


def test_policies_of_streams_and_consumers_are_stored(kinesis):
    consumer = register(kinesis)["ConsumerARN"]
    for arn in (ARN, consumer):
        missing = f"ResourceNotFoundException: No resource policy found for resource ARN {arn}."
        assert kinesis.GetResourcePolicy(ResourceARN=arn) == {"Policy": "{}"}
        assert kinesis.fails("PutResourcePolicy", ResourceARN=arn, Policy="[").startswith("InvalidArgumentException")
        kinesis.PutResourcePolicy(ResourceARN=arn, Policy='{"Version": "2012-10-17"}')
        assert kinesis.GetResourcePolicy(ResourceARN=arn) == {"Policy": '{"Version": "2012-10-17"}'}
        kinesis.DeleteResourcePolicy(ResourceARN=arn)
        assert kinesis.fails("DeleteResourcePolicy", ResourceARN=arn) == missing
    channel = ARN.replace("stream/", "channel/")
    assert kinesis.fails("GetResourcePolicy", ResourceARN=channel).startswith("ResourceNotFoundException")


def subscribe(kinesis, kind="TRIM_HORIZON", *, name="reader", shard_id=LOW, **position):
    try:
        arn = kinesis.DescribeStreamConsumer(StreamARN=ARN, ConsumerName=name)["ConsumerDescription"]["ConsumerARN"]
    except LocalError:
        arn = kinesis.RegisterStreamConsumer(StreamARN=ARN, ConsumerName=name)["Consumer"]["ConsumerARN"]
    return kinesis.subscribe(ConsumerARN=arn, ShardId=shard_id, StartingPosition={"Type": kind, **position})


def subscribe_error(kinesis, *args, **more):
    with pytest.raises(LocalError) as caught:
        subscribe(kinesis, *args, **more)
    return str(caught.value)


def texts(event):
    return [record.data.decode() for record in event.members["Records"]]


def test_records_are_pushed_as_they_arrive_one_event_at_a_time(kinesis):
    kinesis.put("a", "b", hash_key=0)
    subscription = subscribe(kinesis)
    first = subscription.poll(kinesis.now_ms)
    assert (first.type, first.is_exception, texts(first)) == ("SubscribeToShardEvent", False, ["a", "b"])
    assert set(first.members) == {"Records", "ContinuationSequenceNumber", "MillisBehindLatest"}
    assert first.members["MillisBehindLatest"] == 0
    assert subscription.poll(kinesis.now_ms) is None
    kinesis.put("c", hash_key=0)
    assert kinesis.changes[-1] == ("orders", LOW)
    assert texts(subscription.poll(kinesis.now_ms)) == ["c"]
    assert not subscription.is_over


def test_the_first_event_comes_at_once_and_then_at_least_one_every_five_seconds(kinesis):
    subscription = subscribe(kinesis, "LATEST")
    assert texts(subscription.poll(kinesis.now_ms)) == []
    assert subscription.next_deadline_ms == kinesis.now_ms + 5000
    kinesis.wait(ms=4999)
    assert subscription.poll(kinesis.now_ms) is None
    kinesis.wait(ms=1)
    assert texts(subscription.poll(kinesis.now_ms)) == []


@pytest.mark.parametrize("kind", ["AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER"])
@pytest.mark.parametrize("before", [0, 2])
def test_resuming_at_a_continuation_repeats_and_loses_nothing(kinesis, kind, before):
    kinesis.put(*"ab"[:before], hash_key=0)
    number = subscribe(kinesis).poll(kinesis.now_ms).members["ContinuationSequenceNumber"]
    kinesis.put("c", "d", hash_key=0)
    kinesis.wait(ms=5000)
    assert texts(subscribe(kinesis, kind, SequenceNumber=number).poll(kinesis.now_ms)) == ["c", "d"]


def test_a_continuation_in_the_middle_of_a_backlog_resumes_there(kinesis):
    for _ in range(3):
        kinesis.PutRecord(StreamName="orders", Data=bytes(MIB - 1), PartitionKey="k", ExplicitHashKey="0")
    subscription = subscribe(kinesis)
    kinesis.wait(ms=250)
    first = subscription.poll(kinesis.now_ms)
    assert (len(first.members["Records"]), first.members["MillisBehindLatest"]) == (1, 250)
    number = first.members["ContinuationSequenceNumber"]
    kinesis.wait(ms=5000)
    renewed = subscribe(kinesis, "AT_SEQUENCE_NUMBER", SequenceNumber=number)
    assert [len(renewed.poll(kinesis.now_ms).members["Records"]) for _ in range(2)] == [1, 1]
    assert renewed.poll(kinesis.now_ms) is None


def test_a_subscription_ends_after_five_minutes_without_an_event(kinesis):
    subscription = subscribe(kinesis, "LATEST")
    began_ms = kinesis.now_ms
    while not subscription.is_over:
        if subscription.poll(kinesis.now_ms) is None:
            kinesis.now_ms = max(kinesis.now_ms, subscription.next_deadline_ms)
    assert kinesis.now_ms - began_ms == 300_000
    assert subscription.poll(kinesis.now_ms) is None


def test_the_end_of_a_shard_ends_the_subscription_with_its_children(kinesis):
    kinesis.put("a", hash_key=0)
    subscription = subscribe(kinesis)
    subscription.poll(kinesis.now_ms)
    kinesis.put("b", hash_key=0)
    kinesis.SplitShard(StreamName="orders", ShardToSplit=LOW, NewStartingHashKey=str(1 << 126))
    assert ("orders", LOW) in kinesis.changes
    last = subscription.poll(kinesis.now_ms)
    assert texts(last) == ["b"]
    assert [child["ShardId"] for child in last.members["ChildShards"]] == [f"shardId-{i:012d}" for i in (2, 3)]
    assert "ContinuationSequenceNumber" not in last.members
    assert subscription.is_over
    assert subscription.poll(kinesis.now_ms) is None


def test_a_second_call_is_refused_for_five_seconds_and_then_takes_over(kinesis):
    old = subscribe(kinesis, "LATEST")
    old.poll(kinesis.now_ms)
    kinesis.wait(ms=4999)
    assert subscribe_error(kinesis, "LATEST").startswith("ResourceInUseException: Another active subscription exists")
    kinesis.wait(ms=1)
    kinesis.changes.clear()
    new = subscribe(kinesis, "LATEST")
    assert kinesis.changes == [("orders", LOW)]
    event = old.poll(kinesis.now_ms)
    assert (event.type, event.is_exception, old.is_over) == ("ResourceInUseException", True, True)
    assert not new.poll(kinesis.now_ms).is_exception


def test_a_client_that_disconnected_still_has_to_wait_five_seconds(kinesis):
    subscribe(kinesis, "LATEST").close()
    subscribe(kinesis, "LATEST", shard_id="shardId-000000000001")
    assert subscribe_error(kinesis, "LATEST").startswith("ResourceInUseException")
    kinesis.wait(ms=5000)
    subscribe(kinesis, "LATEST")


def test_other_consumers_and_other_shards_do_not_disturb_each_other(kinesis):
    kinesis.put("a", hash_key=0)
    subscriptions = [
        subscribe(kinesis, name="a"),
        subscribe(kinesis, name="b"),
        subscribe(kinesis, name="a", shard_id="1"),
    ]
    assert [texts(subscription.poll(kinesis.now_ms)) for subscription in subscriptions] == [["a"], ["a"], []]


@pytest.mark.parametrize("remove", ["stream", "consumer", "all"])
def test_deleting_the_stream_or_the_consumer_ends_its_subscriptions_with_an_exception(kinesis, remove):
    subscription = subscribe(kinesis, "LATEST")
    kinesis.changes.clear()
    if remove == "stream":
        kinesis.DeleteStream(StreamName="orders", EnforceConsumerDeletion=True)
    elif remove == "consumer":
        kinesis.DeregisterStreamConsumer(ConsumerARN=subscription.consumer_arn)
    else:
        kinesis.state.reset()
    assert kinesis.changes == [("orders", LOW)]
    event = subscription.poll(kinesis.now_ms)
    assert event.type == "ResourceNotFoundException"
    assert "not found" in event.members["message"]


def test_subscribing_to_something_missing_or_not_active_is_rejected(kinesis, make_kinesis):
    arn = kinesis.RegisterStreamConsumer(StreamARN=ARN, ConsumerName="reader")["Consumer"]["ConsumerARN"]
    with pytest.raises(LocalError, match="DryRunOperationException"):
        kinesis.subscribe(ConsumerARN=arn, ShardId=LOW, StartingPosition={"Type": "LATEST"}, DryRun=True)
    assert subscribe_error(kinesis, "LATEST", shard_id="9").startswith(
        "ResourceNotFoundException: Shard shardId-000000000009 in"
    )
    assert subscribe_error(kinesis, "AT_SEQUENCE_NUMBER").startswith("InvalidArgumentException: Must either specify")
    with pytest.raises(LocalError, match=r"Value null at 'startingPosition\.type'"):
        kinesis.subscribe(ConsumerARN=arn, ShardId=LOW, StartingPosition={})
    slow = make_kinesis(state_delay_ms=100)
    slow.CreateStream(StreamName="orders", ShardCount=1)
    slow.wait(ms=100)
    assert "instead in state CREATING" in subscribe_error(slow, "LATEST")


def test_with_limits_a_consumer_gets_two_mebibytes_a_second_and_its_heartbeats(make_kinesis):
    kinesis = make_kinesis(limits="aws")
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    for _ in range(6):
        kinesis.PutRecord(StreamName="orders", Data=bytes(MIB - 1), PartitionKey="k")
    subscription = subscribe(kinesis)
    kinesis.wait(ms=1000)
    pushed = 0
    while (event := subscription.poll(kinesis.now_ms)) is not None:
        pushed += len(event.members["Records"])
    assert pushed == 2
    assert kinesis.now_ms < subscription.next_deadline_ms <= kinesis.now_ms + 1001
    kinesis.now_ms = subscription.next_deadline_ms
    assert len(subscription.poll(kinesis.now_ms).members["Records"]) == 1


def test_a_throttled_consumer_gets_heartbeats_with_its_position(make_kinesis):
    kinesis = make_kinesis(limits="aws")
    kinesis.CreateStream(StreamName="orders", ShardCount=1, MaxRecordSizeInKiB=10_240)
    subscription = subscribe(kinesis)
    kinesis.PutRecord(StreamName="orders", Data=bytes(10 * MIB - 1), PartitionKey="k")
    first = subscription.poll(kinesis.now_ms)
    assert len(first.members["Records"]) == 1
    kinesis.wait(ms=400)
    kinesis.PutRecord(StreamName="orders", Data=b"x", PartitionKey="k")
    assert subscription.poll(kinesis.now_ms) is None
    kinesis.wait(ms=4600)
    second = subscription.poll(kinesis.now_ms)
    assert second.members["Records"] == []
    assert second.members["MillisBehindLatest"] == 4600
    assert second.members["ContinuationSequenceNumber"] == first.members["ContinuationSequenceNumber"]


def test_durations_of_a_subscription_follow_the_time_scale(make_kinesis):
    kinesis = make_kinesis(time_scale=0.01)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    subscription = subscribe(kinesis, "LATEST")
    subscription.poll(kinesis.now_ms)
    assert subscription.next_deadline_ms == kinesis.now_ms + 50
    kinesis.wait(ms=50)
    subscribe(kinesis, "LATEST")
    kinesis.wait(ms=3000)
    subscription = subscribe(kinesis, "LATEST")
    kinesis.wait(ms=3000)
    assert subscription.poll(kinesis.now_ms) is None
    assert subscription.is_over
