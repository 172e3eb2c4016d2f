LOW, HIGH = "shardId-000000000000", "shardId-000000000001"


def ids(kinesis, **request):
    return [int(shard["ShardId"][-3:]) for shard in kinesis.ListShards(StreamName="orders", **request)["Shards"]]


def filtered(kinesis, kind, **more):
    return ids(kinesis, ShardFilter={"Type": kind, **more})


def split_after_a_second(kinesis):
    kinesis.wait(ms=1000)
    kinesis.SplitShard(StreamName="orders", ShardToSplit=LOW, NewStartingHashKey=str(1 << 126))
    kinesis.wait(ms=1000)


def test_every_filter_lists_what_it_says(kinesis):
    split_after_a_second(kinesis)
    assert ids(kinesis) == [0, 1, 2, 3]
    assert filtered(kinesis, "FROM_TRIM_HORIZON") == [0, 1, 2, 3]
    assert filtered(kinesis, "AT_LATEST") == [1, 2, 3]
    assert filtered(kinesis, "AT_TRIM_HORIZON") == [0, 1]
    assert filtered(kinesis, "AFTER_SHARD_ID", ShardId=HIGH) == [2, 3]
    assert filtered(kinesis, "AFTER_SHARD_ID", ShardId="shardId-2") == [3]
    assert filtered(kinesis, "AT_TIMESTAMP", Timestamp=1_800_000_000.999) == [0, 1]
    assert filtered(kinesis, "AT_TIMESTAMP", Timestamp=1_800_000_001.0) == [1, 2, 3]
    assert filtered(kinesis, "AT_TIMESTAMP", Timestamp=0) == [0, 1]
    assert filtered(kinesis, "FROM_TIMESTAMP", Timestamp=1_800_000_001.0) == [0, 1, 2, 3]
    assert filtered(kinesis, "FROM_TIMESTAMP", Timestamp=1_800_000_001.001) == [1, 2, 3]
    assert ids(kinesis, ExclusiveStartShardId="shardId-000000000002") == [3]


def test_filters_take_what_belongs_to_them_and_nothing_else(kinesis):
    for shard_filter in (
        {"Type": "AFTER_SHARD_ID"},
        {"Type": "AT_LATEST", "ShardId": LOW},
        {"Type": "AT_TIMESTAMP"},
        {"Type": "FROM_TRIM_HORIZON", "Timestamp": 1.0},
    ):
        failure = kinesis.fails("ListShards", StreamName="orders", ShardFilter=shard_filter)
        assert failure.startswith("InvalidArgumentException: ShardFilter of type")


def test_pages_go_on_with_the_same_filter_over_a_reshard(kinesis):
    split_after_a_second(kinesis)
    first = kinesis.ListShards(StreamName="orders", MaxResults=2, ShardFilter={"Type": "AT_LATEST"})
    assert [shard["ShardId"][-1] for shard in first["Shards"]] == ["1", "2"]
    kinesis.MergeShards(StreamName="orders", ShardToMerge="2", AdjacentShardToMerge="3")
    second = kinesis.ListShards(NextToken=first["NextToken"])
    assert [shard["ShardId"][-1] for shard in second["Shards"]] == ["4"]
    assert "NextToken" not in second


def test_a_token_lives_three_hundred_seconds_and_comes_alone(kinesis):
    token = kinesis.ListShards(StreamName="orders", MaxResults=1)["NextToken"]
    assert kinesis.fails("ListShards", NextToken=token, StreamName="orders") == (
        "InvalidArgumentException: NextToken and StreamName cannot be provided together."
    )
    assert kinesis.fails("ListStreams", NextToken=token).startswith("InvalidArgumentException: NextToken")
    for garbage in ("x", "é", "e30="):
        assert kinesis.fails("ListShards", NextToken=garbage).startswith("InvalidArgumentException: NextToken")
    kinesis.wait(ms=300_000)
    kinesis.ListShards(NextToken=token)
    kinesis.wait(ms=1)
    assert kinesis.fails("ListShards", NextToken=token).startswith("ExpiredNextTokenException")


def test_a_stream_that_was_born_again_is_another_stream(kinesis):
    token = kinesis.ListShards(StreamName="orders", MaxResults=1)["NextToken"]
    assert len(ids(kinesis, StreamCreationTimestamp=1_800_000_000.0)) == 2
    assert kinesis.fails("ListShards", StreamName="orders", StreamCreationTimestamp=1.0).startswith("ResourceNotFound")
    kinesis.DeleteStream(StreamName="orders")
    kinesis.wait(ms=10)
    kinesis.CreateStream(StreamName="orders", ShardCount=2)
    assert kinesis.fails("ListShards", NextToken=token).startswith("ResourceNotFoundException")


def test_a_shard_leaves_the_listing_when_its_last_record_could_not_be_read_any_more(kinesis):
    kinesis.put("a", hash_key=0)
    split_after_a_second(kinesis)
    kinesis.wait(hours=24, ms=-1001)
    assert ids(kinesis) == [0, 1, 2, 3]
    iterator = kinesis.iterator()
    kinesis.wait(ms=1)
    assert kinesis.fails("GetRecords", ShardIterator=iterator).endswith("does not exist")
    assert kinesis.fails("GetShardIterator", StreamName="orders", ShardId=LOW, ShardIteratorType="LATEST").startswith(
        "ResourceNotFoundException: Shard shardId-000000000000"
    )
    assert ids(kinesis) == [1, 2, 3]
    assert filtered(kinesis, "AT_TRIM_HORIZON") == [1, 2, 3]
    assert len(kinesis.DescribeStream(StreamName="orders")["StreamDescription"]["Shards"]) == 3
