import pytest

from anabranch.local.errors import LocalError

ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
LOW = "shardId-000000000000"
MIB = 1 << 20


def start(kinesis, kind="TRIM_HORIZON", *, name="reader", shard_id=LOW, **position):
    try:
        arn = kinesis.DescribeStreamConsumer(StreamARN=ARN, ConsumerName=name)["ConsumerDescription"]["ConsumerARN"]
    except LocalError:
        arn = kinesis.RegisterStreamConsumer(StreamARN=ARN, ConsumerName=name)["Consumer"]["ConsumerARN"]
    return kinesis.subscribe(ConsumerARN=arn, ShardId=shard_id, StartingPosition={"Type": kind, **position})


def refused(kinesis, *args, **more):
    with pytest.raises(LocalError) as caught:
        start(kinesis, *args, **more)
    return str(caught.value)


def texts(event):
    return [record.data.decode() for record in event.members["Records"]]


def test_records_are_pushed_as_they_come_one_event_at_a_time(kinesis):
    kinesis.put("a", "b", hash_key=0)
    subscription = start(kinesis)
    first = subscription.poll(kinesis.now_ms)
    assert (first.type, first.is_exception, texts(first)) == ("SubscribeToShardEvent", False, ["a", "b"])
    assert set(first.members) == {"Records", "ContinuationSequenceNumber", "MillisBehindLatest"}
    assert first.members["MillisBehindLatest"] == 0
    assert subscription.poll(kinesis.now_ms) is None
    kinesis.put("c", hash_key=0)
    assert kinesis.changes[-1] == ("orders", LOW)
    assert texts(subscription.poll(kinesis.now_ms)) == ["c"]
    assert not subscription.is_over


def test_the_first_event_comes_at_once_and_then_one_every_five_seconds_even_if_empty(kinesis):
    subscription = start(kinesis, "LATEST")
    assert texts(subscription.poll(kinesis.now_ms)) == []
    assert subscription.next_deadline_ms == kinesis.now_ms + 5000
    kinesis.wait(ms=4999)
    assert subscription.poll(kinesis.now_ms) is None
    kinesis.wait(ms=1)
    assert texts(subscription.poll(kinesis.now_ms)) == []


@pytest.mark.parametrize("kind", ["AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER"])
@pytest.mark.parametrize("before", [0, 2])
def test_going_on_at_a_continuation_neither_repeats_nor_loses(kinesis, kind, before):
    kinesis.put(*"ab"[:before], hash_key=0)
    number = start(kinesis).poll(kinesis.now_ms).members["ContinuationSequenceNumber"]
    kinesis.put("c", "d", hash_key=0)
    kinesis.wait(ms=5000)
    assert texts(start(kinesis, kind, SequenceNumber=number).poll(kinesis.now_ms)) == ["c", "d"]


def test_a_continuation_in_the_middle_of_a_backlog_goes_on_there(kinesis):
    for _ in range(3):
        kinesis.PutRecord(StreamName="orders", Data=bytes(MIB - 1), PartitionKey="k", ExplicitHashKey="0")
    subscription = start(kinesis)
    kinesis.wait(ms=250)
    first = subscription.poll(kinesis.now_ms)
    assert (len(first.members["Records"]), first.members["MillisBehindLatest"]) == (1, 250)
    number = first.members["ContinuationSequenceNumber"]
    kinesis.wait(ms=5000)
    renewed = start(kinesis, "AT_SEQUENCE_NUMBER", SequenceNumber=number)
    assert [len(renewed.poll(kinesis.now_ms).members["Records"]) for _ in range(2)] == [1, 1]
    assert renewed.poll(kinesis.now_ms) is None


def test_a_subscription_ends_after_five_minutes_without_a_word(kinesis):
    subscription = start(kinesis, "LATEST")
    began_ms = kinesis.now_ms
    while not subscription.is_over:
        if subscription.poll(kinesis.now_ms) is None:
            kinesis.now_ms = max(kinesis.now_ms, subscription.next_deadline_ms)
    assert kinesis.now_ms - began_ms == 300_000
    assert subscription.poll(kinesis.now_ms) is None


def test_the_end_of_a_shard_ends_the_subscription_with_its_children(kinesis):
    kinesis.put("a", hash_key=0)
    subscription = start(kinesis)
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
    old = start(kinesis, "LATEST")
    old.poll(kinesis.now_ms)
    kinesis.wait(ms=4999)
    assert refused(kinesis, "LATEST").startswith("ResourceInUseException: Another active subscription exists")
    kinesis.wait(ms=1)
    kinesis.changes.clear()
    new = start(kinesis, "LATEST")
    assert kinesis.changes == [("orders", LOW)]
    event = old.poll(kinesis.now_ms)
    assert (event.type, event.is_exception, old.is_over) == ("ResourceInUseException", True, True)
    assert not new.poll(kinesis.now_ms).is_exception


def test_a_client_that_went_away_still_has_to_wait_five_seconds(kinesis):
    start(kinesis, "LATEST").close()
    start(kinesis, "LATEST", shard_id="shardId-000000000001")
    assert refused(kinesis, "LATEST").startswith("ResourceInUseException")
    kinesis.wait(ms=5000)
    start(kinesis, "LATEST")


def test_other_consumers_and_other_shards_do_not_disturb_each_other(kinesis):
    kinesis.put("a", hash_key=0)
    subscriptions = [start(kinesis, name="a"), start(kinesis, name="b"), start(kinesis, name="a", shard_id="1")]
    assert [texts(subscription.poll(kinesis.now_ms)) for subscription in subscriptions] == [["a"], ["a"], []]


@pytest.mark.parametrize("remove", ["stream", "consumer", "all"])
def test_what_is_deleted_ends_its_subscriptions_with_a_reason(kinesis, remove):
    subscription = start(kinesis, "LATEST")
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


def test_what_cannot_be_subscribed_to_is_refused(kinesis, make_kinesis):
    arn = kinesis.RegisterStreamConsumer(StreamARN=ARN, ConsumerName="reader")["Consumer"]["ConsumerARN"]
    with pytest.raises(LocalError, match="DryRunOperationException"):
        kinesis.subscribe(ConsumerARN=arn, ShardId=LOW, StartingPosition={"Type": "LATEST"}, DryRun=True)
    assert refused(kinesis, "LATEST", shard_id="9").startswith("ResourceNotFoundException: Shard 9")
    assert refused(kinesis, "AT_SEQUENCE_NUMBER").startswith("InvalidArgumentException: Must either specify")
    with pytest.raises(LocalError, match=r"Value null at 'startingPosition\.type'"):
        kinesis.subscribe(ConsumerARN=arn, ShardId=LOW, StartingPosition={})
    slow = make_kinesis(state_delay_ms=100)
    slow.CreateStream(StreamName="orders", ShardCount=1)
    slow.wait(ms=100)
    assert "instead in state CREATING" in refused(slow, "LATEST")


def test_with_limits_a_consumer_gets_two_mebibytes_a_second_and_its_heartbeats(make_kinesis):
    kinesis = make_kinesis(limits="aws")
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    for _ in range(6):
        kinesis.PutRecord(StreamName="orders", Data=bytes(MIB - 1), PartitionKey="k")
    subscription = start(kinesis)
    kinesis.wait(ms=1000)
    pushed = 0
    while (event := subscription.poll(kinesis.now_ms)) is not None:
        pushed += len(event.members["Records"])
    assert pushed == 2
    assert kinesis.now_ms < subscription.next_deadline_ms <= kinesis.now_ms + 1001
    kinesis.now_ms = subscription.next_deadline_ms
    assert len(subscription.poll(kinesis.now_ms).members["Records"]) == 1


def test_a_paced_consumer_is_told_where_it_stands_while_it_waits(make_kinesis):
    kinesis = make_kinesis(limits="aws")
    kinesis.CreateStream(StreamName="orders", ShardCount=1, MaxRecordSizeInKiB=10_240)
    subscription = start(kinesis)
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
    subscription = start(kinesis, "LATEST")
    subscription.poll(kinesis.now_ms)
    assert subscription.next_deadline_ms == kinesis.now_ms + 50
    kinesis.wait(ms=50)
    start(kinesis, "LATEST")
    kinesis.wait(ms=3000)
    subscription = start(kinesis, "LATEST")
    kinesis.wait(ms=3000)
    assert subscription.poll(kinesis.now_ms) is None
    assert subscription.is_over
