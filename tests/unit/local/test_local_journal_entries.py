import random

import pytest

from anabranch.errors import CodecError
from anabranch.local.service import LocalState

ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
LOW = "shardId-000000000000"


def everything(state, now_ms):
    def call(operation, **request):
        return state.call(operation, request, now_ms=now_ms)

    seen = [call("DescribeAccountSettings"), call("ListStreams"), call("DescribeLimits")]
    for name in seen[1]["StreamNames"]:
        summary = call("DescribeStreamSummary", StreamName=name)
        arn = summary["StreamDescriptionSummary"]["StreamARN"]
        shards = call("ListShards", StreamName=name)
        seen += [
            summary,
            shards,
            call("ListTagsForStream", StreamName=name),
            call("ListStreamConsumers", StreamARN=arn),
        ]
        for shard in shards["Shards"]:
            iterator = call(
                "GetShardIterator", StreamName=name, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
            )["ShardIterator"]
            answer = call("GetRecords", ShardIterator=iterator)
            seen.append((answer["Records"], answer.get("ChildShards")))
    return seen


def restored(kinesis, entries):
    state = LocalState(kinesis.state.account.settings, entropy=random.Random(2))
    state.restore(entries)
    return state


def live_a_little(kinesis):
    kinesis.AddTagsToStream(StreamName="orders", Tags={"a": "b"})
    kinesis.RegisterStreamConsumer(StreamARN=ARN, ConsumerName="reader", Tags={"c": "d"})
    kinesis.put("one", "two", hash_key=0)
    kinesis.StartStreamEncryption(StreamName="orders", EncryptionType="KMS", KeyId="k")
    kinesis.put("three", hash_key=0)
    kinesis.SplitShard(StreamName="orders", ShardToSplit=LOW, NewStartingHashKey=str(1 << 126))
    kinesis.put("four", hash_key=0)
    kinesis.wait(hours=1)
    kinesis.UpdateShardCount(StreamName="orders", TargetShardCount=5, ScalingType="UNIFORM_SCALING")
    kinesis.UpdateAccountSettings(MinimumThroughputBillingCommitment={"Status": "ENABLED"})
    kinesis.CreateStream(StreamName="gone")
    kinesis.DeleteStream(StreamName="gone")
    kinesis.CreateStream(StreamName="auto", RecordDistributionStrategy="AUTO", WarmThroughputMiBps=3)
    kinesis.PutRecords(StreamName="auto", Records=[{"Data": bytes([i])} for i in range(9)])


def test_the_journal_and_a_snapshot_both_bring_everything_back(kinesis):
    live_a_little(kinesis)
    before = everything(kinesis.state, kinesis.now_ms)
    assert everything(restored(kinesis, kinesis.journal), kinesis.now_ms) == before
    assert everything(restored(kinesis, kinesis.state.snapshot()), kinesis.now_ms) == before


def test_a_snapshot_is_shorter_than_a_long_journal_and_entries_may_be_repeated(kinesis):
    for number in range(600):
        kinesis.put(str(number), hash_key=0)
    snapshot = list(kinesis.state.snapshot())
    assert len(snapshot) == 4  # the commitment, the stream, and two entries of at most 500 records
    doubled = restored(kinesis, [*snapshot, *snapshot])
    assert everything(doubled, kinesis.now_ms) == everything(kinesis.state, kinesis.now_ms)


def test_sequence_numbers_and_iterators_go_on_after_a_restart(kinesis):
    iterator = kinesis.iterator("LATEST")
    number = kinesis.put("before", hash_key=0)[0]["SequenceNumber"]
    kinesis.state = restored(kinesis, kinesis.journal)
    assert int(kinesis.put("after", hash_key=0)[0]["SequenceNumber"]) > int(number)
    assert [record.data for record in kinesis.GetRecords(ShardIterator=iterator)["Records"]] == [b"before", b"after"]


def test_numbers_are_not_given_twice_even_if_their_records_were_trimmed(kinesis):
    number = kinesis.put("old", hash_key=0)[0]["SequenceNumber"]
    kinesis.wait(hours=25)
    kinesis.iterator()
    kinesis.state = restored(kinesis, list(kinesis.state.snapshot()))
    assert kinesis.read() == []
    assert int(kinesis.put("new", hash_key=0)[0]["SequenceNumber"]) > int(number)


def test_a_change_that_was_pending_takes_effect_after_the_restart(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=1000)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    kinesis.wait(ms=1000)
    kinesis.SplitShard(StreamName="orders", ShardToSplit=LOW, NewStartingHashKey=str(1 << 127))
    kinesis.state = restored(kinesis, kinesis.journal)
    assert kinesis.state.next_deadline_ms() == kinesis.now_ms + 1000
    assert kinesis.open_shard_ids() == [LOW]
    kinesis.wait(ms=1000)
    assert len(kinesis.open_shard_ids()) == 2


def test_reads_journal_nothing_and_every_write_does(kinesis):
    length = len(kinesis.journal)
    everything(kinesis.state, kinesis.now_ms)
    assert len(kinesis.journal) == length
    kinesis.put("a")
    assert len(kinesis.journal) == length + 1


def test_entries_that_cannot_be_are_named(kinesis):
    with pytest.raises(CodecError, match="journal entry 0 cannot be decoded"):
        restored(kinesis, [b"\xc1"])
    kinesis.journal.clear()
    kinesis.put("a")
    with pytest.raises(CodecError, match="journal entry 0 has records of shardId-000000000001 in stream orders"):
        restored(kinesis, kinesis.journal)
    fresh = LocalState(entropy=random.Random(1))
    fresh.call("CreateStream", {"StreamName": "orders", "ShardCount": 1}, now_ms=kinesis.now_ms)
    with pytest.raises(CodecError, match="an entry is missing"):
        fresh.restore(kinesis.journal)
