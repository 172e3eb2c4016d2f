"""Law (P1, P5): in whatever order calls end, fail and are given back, a lane starts one record of a key (or shard) at a
time and in stream order, keeps its bounds, starts nothing after the stop, and never stands still without a reason.
"""

import random

from hypothesis import given, strategies as st

from anabranch._core.handling.lanes import ENTRY_BYTES, RecordsOneByOne
from anabranch._model.leases import Checkpoint
from shard_owners import Owner, Shard
from shard_records import places

KEYS = st.sampled_from("abc")
SHARDS = st.lists(KEYS | st.lists(KEYS, min_size=1, max_size=4), min_size=1, max_size=15).map(Shard)
ORDERS = st.sampled_from(["shard", "key", "none"])
LIMITS = st.builds(
    RecordsOneByOne,
    ORDERS,
    open_keys_max=st.integers(1, 4),
    held_back_bytes_max=st.integers(1, 4 * ENTRY_BYTES),
    replay_bytes_max=st.integers(1, 40),
)
LARGEST_BYTES = 8  # a payload and a key of these shards


def make_owner(shard, limits, seed):
    return Owner(shard, Checkpoint(), limits.order, random.Random(seed), limits)


def check_one_at_a_time(owner):
    keys = [entry.record.partition_key for entry in owner.running]
    if owner.order == "shard":
        assert len(keys) <= 1
    if owner.order == "key":
        assert len(set(keys)) == len(keys)


def check_bounds(owner, limits):
    lane = owner.lane
    if owner.order == "shard":
        assert lane.unfinished_count <= 1
        return
    open_count = len(lane._queues) if owner.order == "key" else lane.unfinished_count
    assert open_count <= limits.open_keys_max
    assert lane.held_back_bytes < limits.held_back_bytes_max + ENTRY_BYTES + LARGEST_BYTES
    # What was started before the limit was reached may still finish above it.
    assert lane.tracker.replay_bytes < limits.replay_bytes_max + (limits.open_keys_max + 4) * LARGEST_BYTES
    assert len(lane.checkpoint().open_keys) <= limits.open_keys_max


@given(shard=SHARDS, limits=LIMITS, seed=st.integers(0, 2**32))
def test_records_of_a_key_are_started_one_at_a_time_and_in_stream_order(shard, limits, seed):
    owner = make_owner(shard, limits, seed)
    owner.work_to_the_end(lambda owner: (check_one_at_a_time(owner), check_bounds(owner, limits)))
    assert sorted(places(owner.finished)) == places(shard.records)
    started = list(dict.fromkeys(places(owner.started)))
    key_of = {tuple(record.position): record.partition_key for record in shard.records}
    if owner.order == "shard":
        assert started == places(shard.records)
    for key in "abc" if owner.order == "key" else "":
        assert [p for p in started if key_of[p] == key] == [p for p in key_of if key_of[p] == key]
    assert owner.lane.held_back_bytes == 0
    assert owner.lane.stall_reason is None


@given(shard=SHARDS, limits=LIMITS, seed=st.integers(0, 2**32))
def test_a_lane_with_records_and_nothing_under_way_has_something_to_start(shard, limits, seed):
    owner = make_owner(shard, limits, seed)
    for _ in range(80):
        owner.step()
        if not owner.running and owner.lane.next_deadline_ms is None and not owner.window.is_empty:
            assert owner.start()


@given(shard=SHARDS, limits=LIMITS, seed=st.integers(0, 2**32), step_count=st.integers(0, 60))
def test_nothing_is_started_after_the_stop(shard, limits, seed, step_count):
    owner = make_owner(shard, limits, seed)
    for _ in range(step_count):
        owner.step()
    owner.lane.stop()
    for _ in range(30):
        assert not owner.start()
        owner.end()
        owner.read()
        owner.now_ms += 1
    assert owner.lane.next_deadline_ms is None
    assert owner.lane.finished_count == len(owner.finished)
