import base64

import pytest

LOW, HIGH = "shardId-000000000000", "shardId-000000000001"
MIDDLE = 1 << 127
QUARTER = 1 << 126


def ranges(kinesis):
    listed = kinesis.ListShards(StreamName="orders", ShardFilter={"Type": "AT_LATEST"})["Shards"]
    return sorted(tuple(int(value) for value in shard["HashKeyRange"].values()) for shard in listed)


def split(kinesis, shard_id=LOW, at=QUARTER):
    return kinesis.SplitShard(StreamName="orders", ShardToSplit=shard_id, NewStartingHashKey=str(at))


def scale(kinesis, target):
    return kinesis.UpdateShardCount(StreamName="orders", TargetShardCount=target, ScalingType="UNIFORM_SCALING")


def test_a_split_closes_the_parent_and_opens_two_children_that_name_it(kinesis):
    split(kinesis)
    shards = kinesis.shards()
    children = [shards["shardId-000000000002"], shards["shardId-000000000003"]]
    assert [child["ParentShardId"] for child in children] == [LOW, LOW]
    assert all("AdjacentParentShardId" not in child for child in children)
    assert ranges(kinesis) == [(0, QUARTER - 1), (QUARTER, MIDDLE - 1), (MIDDLE, 2 * MIDDLE - 1)]
    end = int(shards[LOW]["SequenceNumberRange"]["EndingSequenceNumber"])
    assert f"{end:x}"[11:27] == "7fffffffffffffff"
    start = int(children[0]["SequenceNumberRange"]["StartingSequenceNumber"])
    assert int(f"{start:x}"[1:10], 16) == 1_800_000_001  # one second after the parent's close


def test_writes_after_a_split_go_to_the_children_at_once(kinesis):
    kinesis.put("before", hash_key=0)
    split(kinesis)
    assert kinesis.put("after", hash_key=0)[0]["ShardId"] == "shardId-000000000002"
    assert kinesis.put("after", hash_key=QUARTER)[0]["ShardId"] == "shardId-000000000003"


def test_a_closed_shard_is_read_to_its_end_and_names_its_children(kinesis):
    kinesis.put("a", "b", hash_key=0)
    split(kinesis)
    first = kinesis.GetRecords(ShardIterator=kinesis.iterator(), Limit=1)
    assert "ChildShards" not in first
    last = kinesis.GetRecords(ShardIterator=first["NextShardIterator"])
    assert [record.data for record in last["Records"]] == [b"b"]
    assert "NextShardIterator" not in last
    assert last["ChildShards"] == [
        {
            "ShardId": "shardId-000000000002",
            "ParentShards": [LOW],
            "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(QUARTER - 1)},
        },
        {
            "ShardId": "shardId-000000000003",
            "ParentShards": [LOW],
            "HashKeyRange": {"StartingHashKey": str(QUARTER), "EndingHashKey": str(MIDDLE - 1)},
        },
    ]
    end = kinesis.shards()[LOW]["SequenceNumberRange"]["EndingSequenceNumber"]
    for kind, more in (("LATEST", {}), ("AFTER_SEQUENCE_NUMBER", {"StartingSequenceNumber": end})):
        answer = kinesis.GetRecords(ShardIterator=kinesis.iterator(kind, **more))
        assert answer["Records"] == []
        assert len(answer["ChildShards"]) == 2


def test_a_merge_names_both_parents_and_ends_both(kinesis):
    kinesis.MergeShards(StreamName="orders", ShardToMerge=LOW, AdjacentShardToMerge=HIGH)
    shards = kinesis.shards()
    child = shards["shardId-000000000002"]
    assert (child["ParentShardId"], child["AdjacentParentShardId"]) == (LOW, HIGH)
    assert ranges(kinesis) == [(0, 2 * MIDDLE - 1)]
    for parent in (LOW, HIGH):
        assert "EndingSequenceNumber" in shards[parent]["SequenceNumberRange"]
        answer = kinesis.GetRecords(ShardIterator=kinesis.iterator(shard_id=parent))
        assert answer["ChildShards"][0]["ParentShards"] == [LOW, HIGH]


def test_quick_splits_still_start_every_child_after_its_parents_end(kinesis):
    for index in (0, 2, 4, 6, 8):
        split(kinesis, f"shardId-{index:012d}", at=QUARTER >> index)
    shards = kinesis.shards()
    for shard in shards.values():
        if "ParentShardId" in shard:
            end = int(shards[shard["ParentShardId"]]["SequenceNumberRange"]["EndingSequenceNumber"])
            assert int(shard["SequenceNumberRange"]["StartingSequenceNumber"]) > end
    number = kinesis.put("x", hash_key=0)[0]["SequenceNumber"]
    kinesis.PutRecord(StreamName="orders", Data=b"y", PartitionKey="k", SequenceNumberForOrdering=number)


def test_invalid_splits_and_merges_are_rejected_with_awss_messages(kinesis):
    place = "in stream orders under account 000000000000"
    fails = kinesis.fails
    for key in (0, 1, MIDDLE - 1, MIDDLE):
        assert fails("SplitShard", StreamName="orders", ShardToSplit=LOW, NewStartingHashKey=str(key)) == (
            f"InvalidArgumentException: NewStartingHashKey {key} used in SplitShard() on shard {LOW} {place} is not "
            f"both greater than one plus the shard's StartingHashKey 0 and less than the shard's "
            f"EndingHashKey {MIDDLE - 1}."
        )
    assert fails("SplitShard", StreamName="orders", ShardToSplit="shardId-5", NewStartingHashKey="9") == (
        f"ResourceNotFoundException: Could not find shard shardId-000000000005 {place}."
    )
    assert fails("MergeShards", StreamName="orders", ShardToMerge=HIGH, AdjacentShardToMerge=LOW) == (
        f"InvalidArgumentException: Shards {HIGH} and {LOW} {place} are not an adjacent pair of shards "
        "eligible for merging"
    )
    split(kinesis)
    assert fails("SplitShard", StreamName="orders", ShardToSplit=LOW, NewStartingHashKey=str(QUARTER)) == (
        f"InvalidArgumentException: Shard {LOW} {place} has already been merged or split, "
        "and thus is not eligible for merging or splitting."
    )


def test_a_delayed_split_takes_effect_at_its_deadline_and_not_before(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=1000)
    kinesis.CreateStream(StreamName="orders", ShardCount=2)
    kinesis.wait(ms=1000)
    split(kinesis)
    assert "instead in state UPDATING" in kinesis.fails(
        "SplitShard", StreamName="orders", ShardToSplit=HIGH, NewStartingHashKey=str(3 * QUARTER)
    )
    kinesis.wait(ms=999)
    assert kinesis.put("still", hash_key=0)[0]["ShardId"] == LOW
    kinesis.changes.clear()
    kinesis.wait(ms=5000)
    kinesis.state.settle(kinesis.now_ms)
    assert ("orders", LOW) in kinesis.changes
    at = {"Type": "AT_TIMESTAMP", "Timestamp": 1_800_000_002.0}  # as of the deadline, however late somebody looked
    assert LOW not in {s["ShardId"] for s in kinesis.ListShards(StreamName="orders", ShardFilter=at)["Shards"]}
    assert kinesis.put("now", hash_key=0)[0]["ShardId"] == "shardId-000000000002"


@pytest.mark.parametrize(
    "start, target", [(1, 2), (2, 4), (3, 6), (3, 4), (3, 5), (4, 2), (6, 3), (5, 3), (7, 11), (10, 10)]
)
def test_scaling_cuts_the_hash_space_evenly_whatever_the_count(make_kinesis, start, target):
    kinesis = make_kinesis()
    kinesis.CreateStream(StreamName="orders", ShardCount=start)
    answer = scale(kinesis, target)
    assert answer == {
        "StreamName": "orders",
        "CurrentShardCount": start,
        "TargetShardCount": target,
        "StreamARN": "arn:aws:kinesis:us-east-1:000000000000:stream/orders",
    }
    widths = [end - begin + 1 for begin, end in ranges(kinesis)]
    assert len(widths) == target
    assert max(widths) - min(widths) < 1 << 40
    assert sum(widths) == 1 << 128


def test_doubling_only_splits_and_halving_only_merges(make_kinesis):
    kinesis = make_kinesis()
    kinesis.CreateStream(StreamName="orders", ShardCount=3)
    scale(kinesis, 6)
    assert len(kinesis.shards()) == 9
    assert all("AdjacentParentShardId" not in shard for shard in kinesis.shards().values())
    scale(kinesis, 3)
    assert len(kinesis.shards()) == 12
    newest = [kinesis.shards()[f"shardId-{index:012d}"] for index in (9, 10, 11)]
    assert all("AdjacentParentShardId" in shard for shard in newest)


def test_scaling_leaves_every_short_lived_shard_with_its_parents(make_kinesis):
    kinesis = make_kinesis()
    kinesis.CreateStream(StreamName="orders", ShardCount=3)
    scale(kinesis, 5)
    shards = kinesis.shards()
    for shard in shards.values():
        parents = [shard[role] for role in ("ParentShardId", "AdjacentParentShardId") if role in shard]
        for parent_id in parents:
            parent = shards[parent_id]
            assert "EndingSequenceNumber" in parent["SequenceNumberRange"]
            assert shard["ShardId"] in {
                child["ShardId"]
                for child in kinesis.GetRecords(ShardIterator=kinesis.iterator(shard_id=parent_id))["ChildShards"]
            }


def test_scaling_beyond_the_limits_is_rejected(kinesis):
    def fails(target):
        return kinesis.fails(
            "UpdateShardCount", StreamName="orders", TargetShardCount=target, ScalingType="UNIFORM_SCALING"
        )

    assert fails(5) == (
        "LimitExceededException: UpdateShardCount cannot scale up over double your current open shard count. "
        "Current open shard count: 2 Target shard count: 5"
    )
    scale(kinesis, 4)
    assert "below half your current" in fails(1)


def test_on_demand_streams_cannot_be_resharded(kinesis):
    kinesis.CreateStream(StreamName="events")
    for operation, request in (
        ("SplitShard", {"ShardToSplit": LOW, "NewStartingHashKey": "9"}),
        ("MergeShards", {"ShardToMerge": LOW, "AdjacentShardToMerge": HIGH}),
        ("UpdateShardCount", {"TargetShardCount": 8, "ScalingType": "UNIFORM_SCALING"}),
    ):
        assert kinesis.fails(operation, StreamName="events", **request).startswith("ValidationException")


def test_a_split_beyond_the_shard_limit_is_rejected(make_kinesis):
    kinesis = make_kinesis()
    kinesis.CreateStream(StreamName="orders", ShardCount=20_000)
    assert kinesis.fails("SplitShard", StreamName="orders", ShardToSplit=LOW, NewStartingHashKey="1000").startswith(
        "LimitExceededException: This request would exceed the shard limit"
    )


def test_a_stream_of_more_than_ten_thousand_shards_does_not_grow(make_kinesis):
    kinesis = make_kinesis()
    kinesis.CreateStream(StreamName="orders", ShardCount=6000)
    assert kinesis.fails(
        "UpdateShardCount", StreamName="orders", TargetShardCount=10_001, ScalingType="UNIFORM_SCALING"
    ).startswith("LimitExceededException: UpdateShardCount cannot scale over 10000")


def ids(kinesis, **request):
    return [int(shard["ShardId"][-3:]) for shard in kinesis.ListShards(StreamName="orders", **request)["Shards"]]


def filtered(kinesis, kind, **more):
    return ids(kinesis, ShardFilter={"Type": kind, **more})


def split_after_a_second(kinesis):
    kinesis.wait(ms=1000)
    kinesis.SplitShard(StreamName="orders", ShardToSplit=LOW, NewStartingHashKey=str(1 << 126))
    kinesis.wait(ms=1000)


def test_each_filter_lists_its_shards(kinesis):
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


def test_filters_accept_only_their_own_members(kinesis):
    for shard_filter in (
        {"Type": "AFTER_SHARD_ID"},
        {"Type": "AT_LATEST", "ShardId": LOW},
        {"Type": "AT_TIMESTAMP"},
        {"Type": "FROM_TRIM_HORIZON", "Timestamp": 1.0},
    ):
        failure = kinesis.fails("ListShards", StreamName="orders", ShardFilter=shard_filter)
        assert failure.startswith("InvalidArgumentException: ShardFilter of type")


def test_pages_continue_with_the_same_filter_across_a_reshard(kinesis):
    split_after_a_second(kinesis)
    first = kinesis.ListShards(StreamName="orders", MaxResults=2, ShardFilter={"Type": "AT_LATEST"})
    assert [shard["ShardId"][-1] for shard in first["Shards"]] == ["1", "2"]
    kinesis.MergeShards(StreamName="orders", ShardToMerge="2", AdjacentShardToMerge="3")
    second = kinesis.ListShards(NextToken=first["NextToken"])
    assert [shard["ShardId"][-1] for shard in second["Shards"]] == ["4"]
    assert "NextToken" not in second


def test_a_page_token_expires_after_300_seconds_and_accepts_no_other_parameter(kinesis):
    token = kinesis.ListShards(StreamName="orders", MaxResults=1)["NextToken"]
    assert kinesis.fails("ListShards", NextToken=token, StreamName="orders") == (
        "InvalidArgumentException: NextToken and StreamName cannot be provided together."
    )
    assert kinesis.fails("ListStreams", NextToken=token).startswith("InvalidArgumentException: NextToken")
    for raw in (b'{"operation":"\xff"}', b'{"unknown":' + b"[" * 100_000):
        garbage = base64.b64encode(raw).decode()
        assert kinesis.fails("ListShards", NextToken=garbage).startswith("InvalidArgumentException: NextToken")
    for garbage in ("x", "é", "e30="):
        assert kinesis.fails("ListShards", NextToken=garbage).startswith("InvalidArgumentException: NextToken")
    kinesis.wait(ms=300_000)
    kinesis.ListShards(NextToken=token)
    kinesis.wait(ms=1)
    assert kinesis.fails("ListShards", NextToken=token).startswith("ExpiredNextTokenException")


def test_a_recreated_stream_is_another_stream(kinesis):
    token = kinesis.ListShards(StreamName="orders", MaxResults=1)["NextToken"]
    assert len(ids(kinesis, StreamCreationTimestamp=1_800_000_000.0)) == 2
    assert kinesis.fails("ListShards", StreamName="orders", StreamCreationTimestamp=1.0).startswith("ResourceNotFound")
    kinesis.DeleteStream(StreamName="orders")
    kinesis.wait(ms=10)
    kinesis.CreateStream(StreamName="orders", ShardCount=2)
    assert kinesis.fails("ListShards", NextToken=token).startswith("ResourceNotFoundException")


def test_a_closed_shard_leaves_the_listing_when_all_its_records_have_expired(kinesis):
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
