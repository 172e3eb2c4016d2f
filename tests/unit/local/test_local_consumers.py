ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"


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


def test_a_consumer_is_creating_and_deleting_for_a_while(make_kinesis):
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


def test_consumers_that_are_not_there_or_not_named_well_are_refused(kinesis):
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


def test_tags_have_an_alphabet_and_a_limit(kinesis):
    fails = kinesis.fails
    assert fails("AddTagsToStream", StreamName="orders", Tags={"a!": "b"}).startswith(
        "InvalidArgumentException: Some tags contain invalid characters."
    )
    kinesis.AddTagsToStream(StreamName="orders", Tags={"Größe @/:+-=._%": ""})
    assert fails("TagResource", ResourceARN=ARN, Tags={str(number): "" for number in range(50)}).startswith(
        "InvalidArgumentException: Failed to add tags: a resource can have 50 tags, not 51"
    )


def test_policies_are_kept_for_streams_and_consumers(kinesis):
    consumer = register(kinesis)["ConsumerARN"]
    for arn in (ARN, consumer):
        missing = f"ResourceNotFoundException: No resource policy found for resource ARN {arn}"
        assert kinesis.fails("GetResourcePolicy", ResourceARN=arn) == missing
        assert kinesis.fails("PutResourcePolicy", ResourceARN=arn, Policy="[").startswith("InvalidArgumentException")
        kinesis.PutResourcePolicy(ResourceARN=arn, Policy='{"Version": "2012-10-17"}')
        assert kinesis.GetResourcePolicy(ResourceARN=arn) == {"Policy": '{"Version": "2012-10-17"}'}
        kinesis.DeleteResourcePolicy(ResourceARN=arn)
        assert kinesis.fails("DeleteResourcePolicy", ResourceARN=arn) == missing
    channel = ARN.replace("stream/", "channel/")
    assert kinesis.fails("GetResourcePolicy", ResourceARN=channel).startswith("ResourceNotFoundException")
