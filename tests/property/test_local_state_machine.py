"""Any history of writes, reshards, pauses and restarts of the local Kinesis keeps what a consumer relies on.

The machine speaks only the public calls; its model is the list of acknowledged records. After every step: the open
ranges cover the hash space exactly once, now and at any time of the past; sequence numbers only grow, along a shard and
along a key; children start after their parents end; and every acknowledged record is read exactly once until its
retention is over, and never after.
"""

import random
from typing import NamedTuple

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anabranch.local.service import LocalState
from anabranch.local.settings import LocalSettings
from anabranch.local.state.identifiers import Timestamp

HASH_KEYS = 1 << 128
HOUR_MS = 3_600_000
STREAM = "rivers"


class Acknowledged(NamedTuple):
    shard_id: str
    sequence_number: int
    partition_key: str
    data: bytes
    at_ms: int


class LocalKinesisMachine(RuleBasedStateMachine):
    @initialize(
        shard_count=st.integers(1, 5), state_delay_ms=st.sampled_from([0, 0, 700]), start_ms=st.integers(0, 999)
    )
    def create(self, shard_count, state_delay_ms, start_ms):
        self.now_ms = self.created_ms = 1_800_000_000_000 + start_ms
        self.settings = LocalSettings(state_delay_ms=state_delay_ms)
        self.journal = []
        self.acknowledged = []
        self.lost_before_ms = 0
        self.state = self._new_state()
        self.call("CreateStream", StreamName=STREAM, ShardCount=shard_count)
        self.now_ms += state_delay_ms

    def _new_state(self):
        return LocalState(self.settings, entropy=random.Random(7), journal=self.journal.append)

    def call(self, operation, **request):
        return self.state.call(operation, request, now_ms=self.now_ms)

    def shards(self, **shard_filter):
        request = {"StreamName": STREAM, "MaxResults": 3}
        if shard_filter:
            request["ShardFilter"] = shard_filter
        shards = []
        while True:
            page = self.call("ListShards", **request)
            shards += page["Shards"]
            if "NextToken" not in page:
                return shards
            request = {"NextToken": page["NextToken"], "MaxResults": 3}

    def is_active(self):
        return (
            self.call("DescribeStreamSummary", StreamName=STREAM)["StreamDescriptionSummary"]["StreamStatus"]
            == "ACTIVE"
        )

    @rule(keys=st.lists(st.integers(0, 30), min_size=1, max_size=12), refused=st.sets(st.integers(0, 11), max_size=3))
    def put(self, keys, refused):
        entries = [
            {"Data": f"{len(self.acknowledged)}.{i}".encode(), "PartitionKey": f"key-{key}"}
            for i, key in enumerate(keys)
        ]
        answer = self.state.call(
            "PutRecords",
            {"StreamName": STREAM, "Records": entries},
            now_ms=self.now_ms,
            refused_slots=dict.fromkeys(refused, "InternalFailure"),
        )
        assert answer["FailedRecordCount"] == len([slot for slot in refused if slot < len(keys)])
        for slot, (entry, result) in enumerate(zip(entries, answer["Records"], strict=True)):
            assert (slot in refused) == ("SequenceNumber" not in result)
            if "SequenceNumber" in result:
                self.acknowledged.append(
                    Acknowledged(
                        result["ShardId"],
                        int(result["SequenceNumber"]),
                        entry["PartitionKey"],
                        entry["Data"],
                        self.now_ms,
                    )
                )

    @precondition(lambda self: self.is_active())
    @rule(choice=st.randoms(use_true_random=False), share=st.floats(0.1, 0.9))
    def split(self, choice, share):
        open_shards = self.shards(Type="AT_LATEST")
        if len(open_shards) >= 20:
            return
        shard = choice.choice(open_shards)
        start, end = (int(shard["HashKeyRange"][side]) for side in ("StartingHashKey", "EndingHashKey"))
        key = start + int((end - start) * share)
        if start + 1 < key < end:
            self.call("SplitShard", StreamName=STREAM, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(key))

    @precondition(lambda self: self.is_active())
    @rule(choice=st.randoms(use_true_random=False))
    def merge(self, choice):
        open_shards = sorted(self.shards(Type="AT_LATEST"), key=lambda s: int(s["HashKeyRange"]["StartingHashKey"]))
        if len(open_shards) > 1:
            at = choice.randrange(len(open_shards) - 1)
            low, high = open_shards[at : at + 2]
            self.call(
                "MergeShards", StreamName=STREAM, ShardToMerge=low["ShardId"], AdjacentShardToMerge=high["ShardId"]
            )

    @precondition(lambda self: self.is_active())
    @rule(share=st.floats(0, 1))
    def scale(self, share):
        present = len(self.shards(Type="AT_LATEST"))
        low, high = (present + 1) // 2, min(2 * present, 20)
        target = low + round((high - low) * share)
        self.call("UpdateShardCount", StreamName=STREAM, TargetShardCount=target, ScalingType="UNIFORM_SCALING")
        self.now_ms += self.settings.state_delay_ms
        assert len(self.shards(Type="AT_LATEST")) == target

    @rule(pause_ms=st.sampled_from([0, 1, 300, 999, 5_000, 13 * HOUR_MS, 25 * HOUR_MS]))
    def wait(self, pause_ms):
        self.now_ms += pause_ms

    @rule(back_ms=st.integers(1, 2_000))
    def step_clock_back(self, back_ms):
        self.now_ms = max(self.created_ms, self.now_ms - back_ms)

    @rule(use_snapshot=st.booleans())
    def restart(self, use_snapshot):
        entries = list(self.state.snapshot()) if use_snapshot else list(self.journal)
        self.journal = entries.copy()
        self.state = self._new_state()
        self.state.restore(entries)

    @precondition(lambda self: self.acknowledged)
    @rule(choice=st.randoms(use_true_random=False))
    def read_from_a_time(self, choice):
        """What a consumer that starts at a time does: the shards open then from that time, their descendants whole."""
        at_ms = min(choice.choice(self.acknowledged[-8:]).at_ms, self.now_ms)
        at = Timestamp.from_milliseconds(at_ms)
        found = set()
        lines = {shard["ShardId"]: shard for shard in self.shards(Type="AT_TIMESTAMP", Timestamp=at)}
        for shard in lines.values():
            found |= {record.sequence_number for record in self.read_to_the_tip(shard, "AT_TIMESTAMP", Timestamp=at)}
        for shard in self.shards():
            if shard["ShardId"] not in lines and shard.get("ParentShardId") in lines:
                lines[shard["ShardId"]] = shard
                found |= {record.sequence_number for record in self.read_to_the_tip(shard)}
        for sequence_number, record in self.everything_readable().items():
            if record.arrival_ms >= at_ms:
                assert sequence_number in found

    @precondition(lambda self: self.is_active())
    @rule(hours=st.integers(24, 48))
    def change_retention(self, hours):
        present = self.call("DescribeStreamSummary", StreamName=STREAM)["StreamDescriptionSummary"][
            "RetentionPeriodHours"
        ]
        verb = "Increase" if hours >= present else "Decrease"
        self.call(f"{verb}StreamRetentionPeriod", StreamName=STREAM, RetentionPeriodHours=hours)
        self.lost_before_ms = max(self.lost_before_ms, self.now_ms - min(hours, present) * HOUR_MS)

    @invariant()
    def open_ranges_cover_the_hash_space_once(self):
        assert_covers(self.shards(Type="AT_LATEST"))

    @invariant()
    def shards_open_at_any_time_cover_the_hash_space_once(self):
        assert_covers(self.shards(Type="AT_TRIM_HORIZON"))
        for back_ms in (0, 1, 400, 6_000, 30 * HOUR_MS):
            at = Timestamp.from_milliseconds(self.now_ms - back_ms)
            assert_covers(self.shards(Type="AT_TIMESTAMP", Timestamp=at))

    @invariant()
    def sequence_numbers_only_grow(self):
        highest = {}
        for record in self.acknowledged:
            for line in (record.shard_id, record.partition_key):
                assert record.sequence_number > highest.get(line, 0)
                highest[line] = record.sequence_number

    @invariant()
    def children_start_after_their_parents_end(self):
        listed = {shard["ShardId"]: shard for shard in self.shards()}
        for shard in listed.values():
            for role in ("ParentShardId", "AdjacentParentShardId"):
                parent = listed.get(shard.get(role))
                if parent is not None:
                    end = int(parent["SequenceNumberRange"]["EndingSequenceNumber"])
                    assert int(shard["SequenceNumberRange"]["StartingSequenceNumber"]) > end

    @invariant()
    def every_acknowledged_record_is_read_once_until_its_retention_is_over(self):
        summary = self.call("DescribeStreamSummary", StreamName=STREAM)["StreamDescriptionSummary"]
        horizon_ms = max(self.lost_before_ms, self.now_ms - summary["RetentionPeriodHours"] * HOUR_MS)
        read = self.everything_readable()
        assert all(record.arrival_ms >= horizon_ms for record in read.values())
        for record in self.acknowledged:
            # Arrival times never go back, so they may run ahead of the clock and a record may live a little longer.
            if record.at_ms >= horizon_ms:
                found = read.pop(str(record.sequence_number))
                assert (found.data, found.partition_key) == (record.data, record.partition_key)

    def everything_readable(self):
        read = {}
        for shard in self.shards():
            arrived_ms = 0
            for record in self.read_to_the_tip(shard):
                assert record.sequence_number not in read
                assert record.arrival_ms >= arrived_ms
                arrived_ms = record.arrival_ms
                read[record.sequence_number] = record
        return read

    def read_to_the_tip(self, shard, kind="TRIM_HORIZON", **position):
        iterator = self.call(
            "GetShardIterator", StreamName=STREAM, ShardId=shard["ShardId"], ShardIteratorType=kind, **position
        )["ShardIterator"]
        while True:
            answer = self.call("GetRecords", ShardIterator=iterator, Limit=5)
            yield from answer["Records"]
            is_end = "NextShardIterator" not in answer
            assert is_end == ("ChildShards" in answer)
            if is_end:
                assert "EndingSequenceNumber" in shard["SequenceNumberRange"]
                assert answer["MillisBehindLatest"] == 0
                return
            if answer["MillisBehindLatest"] == 0:
                assert "EndingSequenceNumber" not in shard["SequenceNumberRange"]
                return
            iterator = answer["NextShardIterator"]


def assert_covers(shards):
    ranges = sorted(
        (int(s["HashKeyRange"]["StartingHashKey"]), int(s["HashKeyRange"]["EndingHashKey"])) for s in shards
    )
    following = 0
    for start, end in ranges:
        assert start == following
        following = end + 1
    assert following == HASH_KEYS


class TestLocalKinesis(LocalKinesisMachine.TestCase):
    settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


@pytest.mark.long
class TestLocalKinesisAtLength(LocalKinesisMachine.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
