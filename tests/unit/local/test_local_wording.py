"""Details in which foreign test suites, made for AWS, once failed against this server."""

import pytest

ACCOUNT = "000000000000"


def number(text, second=0):
    """A sequence number from its hexadecimal digits, with the second of the record filled in."""
    return str(int(text.replace("SSSSSSSSS", f"{second:09x}"), 16))


@pytest.mark.parametrize(
    "wrong",
    [
        "20000000000000000000000000000000000000000000000",  # version 0
        "20000000000000000000000000000000000000000000004",  # version 4
        "30000000000000000000000000000000000000000000001",
        "1ffffffffff7fffffffffffffff000000000007fffffff2",
        "20000000000800000000000000000000000000000000002",  # the counter's highest bit
        "20000000000000000000000000000SSSSSSSSS000000002",  # the future
        "13bb2cc3d80000000000000000000000",
    ],
)
def test_a_sequence_number_for_ordering_that_was_never_issued_is_refused(kinesis, wrong):
    text = number(wrong, kinesis.now_ms // 1000 + 2)
    assert kinesis.fails(
        "PutRecord", StreamName="orders", PartitionKey="a", Data=b"", SequenceNumberForOrdering=text
    ) == (
        f"InvalidArgumentException: ExclusiveMinimumSequenceNumber {text} used in PutRecord on stream orders "
        f"under account {ACCOUNT} is invalid."
    )


@pytest.mark.parametrize(
    "right",
    [
        "2ffffffffff7fffffffffffffff000000000007fffffff2",
        "20000000000000000000000000000000000000000000002",
        "20000000000000000000000000000000000000000000001",
        "20000000000000000000000000000000000000800000002",
        "2ffffffffff7fffffff7fffffff00SSSSSSSSS7fffffff2",
    ],
)
def test_a_sequence_number_for_ordering_that_may_have_been_issued_is_accepted(kinesis, right):
    text = number(right, kinesis.now_ms // 1000 - 2)
    kinesis.PutRecord(StreamName="orders", PartitionKey="a", Data=b"", SequenceNumberForOrdering=text)


def test_the_last_sequence_number_orders_the_next_record_also_after_fast_resharding(kinesis):
    """Each reshard makes the seconds in sequence numbers run ahead of the clock by one more."""
    for count in (4, 2, 4, 2, 4, 2):
        kinesis.UpdateShardCount(StreamName="orders", TargetShardCount=count, ScalingType="UNIFORM_SCALING")
    last = kinesis.put("a")[0]["SequenceNumber"]
    kinesis.PutRecord(StreamName="orders", PartitionKey="k", Data=b"", SequenceNumberForOrdering=last)


@pytest.mark.parametrize("part", ["\t", "\n", "\r", ";", ",", "\x00", "\x85"])
def test_characters_that_tags_cannot_have_are_refused(kinesis, part):
    for tags in ({f"abc{part}def": "1"}, {"a": f"abc{part}def"}):
        assert "Some tags contain invalid characters" in kinesis.fails(
            "AddTagsToStream", StreamName="orders", Tags=tags
        )
        arn = kinesis.DescribeStreamSummary(StreamName="orders")["StreamDescriptionSummary"]["StreamARN"]
        assert "invalid characters" in kinesis.fails("TagResource", ResourceARN=arn, Tags=tags)


def test_letters_digits_spaces_and_some_signs_are_tags(kinesis):
    kinesis.AddTagsToStream(StreamName="orders", Tags={"a": "a", "ü0 _.": "x", "/=+-@": "\u3000", "b:c": "ü0 _./=+-@"})


IN_STREAM = f"in stream nowhere under account {ACCOUNT}"


@pytest.mark.parametrize(
    "shard_id, message",
    [
        ("2147483647", f"Shard shardId-002147483647 {IN_STREAM} does not exist"),
        ("x-00002147483647", f"Shard shardId-002147483647 {IN_STREAM} does not exist"),
        ("shardId-5", f"Shard shardId-000000000005 {IN_STREAM} does not exist"),
        ("2147483648", f"Could not find shard 2147483648 {IN_STREAM}."),
        ("shardId-002147483648", f"Could not find shard shardId-002147483648 {IN_STREAM}."),
        ("ABKLFD8", f"Could not find shard ABKLFD8 {IN_STREAM}."),
        ("2.14E4", f"Could not find shard 2.14E4 {IN_STREAM}."),
    ],
)
def test_of_an_unknown_stream_and_shard_the_shard_is_named(kinesis, shard_id, message):
    failed = kinesis.fails("GetShardIterator", StreamName="nowhere", ShardId=shard_id, ShardIteratorType="LATEST")
    assert failed == f"ResourceNotFoundException: {message}"
    arn = f"arn:aws:kinesis:us-east-1:{ACCOUNT}:stream/nowhere"
    failed = kinesis.fails("GetShardIterator", StreamARN=arn, ShardId=shard_id, ShardIteratorType="LATEST")
    assert failed == f"ResourceNotFoundException: {message}"
    split = kinesis.fails("SplitShard", StreamName="nowhere", ShardToSplit=shard_id, NewStartingHashKey="0")
    known = message if message.startswith("Could not") else f"Stream nowhere under account {ACCOUNT} not found."
    assert split == f"ResourceNotFoundException: {known}"
    for members in (
        {"ShardToMerge": shard_id, "AdjacentShardToMerge": "0"},
        {"ShardToMerge": "0", "AdjacentShardToMerge": shard_id},
    ):
        assert kinesis.fails("MergeShards", StreamName="nowhere", **members) == f"ResourceNotFoundException: {known}"


def test_short_shard_ids_are_padded_in_messages(kinesis):
    where = f"in stream orders under account {ACCOUNT}"
    assert (
        kinesis.fails("GetShardIterator", StreamName="orders", ShardId="shardId-5", ShardIteratorType="LATEST")
        == f"ResourceNotFoundException: Shard shardId-000000000005 {where} does not exist"
    )
    for operation, members in (
        ("SplitShard", {"ShardToSplit": "shardId-5", "NewStartingHashKey": "0"}),
        ("MergeShards", {"ShardToMerge": "shardId-5", "AdjacentShardToMerge": "0"}),
        ("MergeShards", {"ShardToMerge": "0", "AdjacentShardToMerge": "5"}),
    ):
        assert kinesis.fails(operation, StreamName="orders", **members) == (
            f"ResourceNotFoundException: Could not find shard shardId-000000000005 {where}."
        )


def test_an_iterator_of_a_deleted_stream_names_its_shard(kinesis):
    iterator = kinesis.iterator(shard_id="shardId-000000000001")
    kinesis.DeleteStream(StreamName="orders")
    assert kinesis.fails("GetRecords", ShardIterator=iterator) == (
        f"ResourceNotFoundException: Shard shardId-000000000001 in stream orders under account {ACCOUNT} does not exist"
    )


def test_a_resource_without_a_policy_has_an_empty_one(kinesis):
    arn = kinesis.DescribeStreamSummary(StreamName="orders")["StreamDescriptionSummary"]["StreamARN"]
    assert kinesis.GetResourcePolicy(ResourceARN=arn) == {"Policy": "{}"}
    kinesis.PutResourcePolicy(ResourceARN=arn, Policy='{"Version": "2012-10-17"}')
    kinesis.DeleteResourcePolicy(ResourceARN=arn)
    assert kinesis.GetResourcePolicy(ResourceARN=arn) == {"Policy": "{}"}
    assert kinesis.fails("DeleteResourcePolicy", ResourceARN=arn) == (
        f"ResourceNotFoundException: No resource policy found for resource ARN {arn}."
    )
