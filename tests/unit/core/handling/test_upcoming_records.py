"""Which records may be handled one after another in one step, and what becomes of the one that takes longer."""

import pytest

from anabranch._core.handling.lanes import RecordLane, RecordsOneByOne
from anabranch._model.leases import Checkpoint, OpenKey
from anabranch._model.streams import Position
from anabranch.budget import Budget
from shard_records import make_record, make_window, plain

ORDERS = pytest.mark.parametrize("order", ["shard", "key", "none"])


def make_lane(order, keys, checkpoint=None, **limits):
    """Records 1, 2, 3... with one letter of `keys` each as their partition keys."""
    window = make_window(*(plain(number, key) for number, key in enumerate(keys, 1)))
    return RecordLane(checkpoint or Checkpoint(), window, RecordsOneByOne(order, **limits), Budget())


def upcoming(lane, now_ms=0, count_max=100):
    return [int(record.sequence_number) for record in lane.upcoming(now_ms, count_max)]


@ORDERS
def test_what_is_upcoming_is_only_shown(order):
    lane = make_lane(order, "aabc")
    assert upcoming(lane) == [1, 2, 3, 4]
    assert upcoming(lane, count_max=2) == [1, 2]
    assert lane.unfinished_count == 0
    assert lane.checkpoint().watermark is None


@ORDERS
def test_what_was_passed_over_is_finished_and_its_bytes_are_free(order):
    lane = make_lane(order, "aabc")
    lane.finish_prefix(3)
    assert upcoming(lane) == [4]
    assert (lane.finished_count, lane.unfinished_count) == (3, 0)
    assert lane.checkpoint().watermark == Position(3)
    lane.finish_prefix(1)
    assert upcoming(lane) == []
    assert lane._window.collect_freed() > 0
    assert lane._window.held_bytes == 0


@ORDERS
def test_a_record_that_has_begun_runs_as_any_other(order):
    lane = make_lane(order, "abab")
    lane.finish_prefix(1)
    entry = lane.begin()
    assert entry.record.sequence_number == "2"
    assert lane.first_unfinished is entry.record
    assert lane.checkpoint().watermark == Position(1)
    lane.finish(entry)
    assert lane.checkpoint().watermark == Position(2)
    assert upcoming(lane) == [3, 4]


def test_with_order_shard_nothing_is_upcoming_beside_a_record_that_runs_or_is_to_be_tried_again():
    lane = make_lane("shard", "ab")
    entry = lane.begin()
    assert upcoming(lane) == []
    lane.retry_at(entry, 10)
    assert upcoming(lane) == []


def test_with_order_key_what_is_upcoming_ends_before_a_key_that_is_busy():
    lane = make_lane("key", "abcbad")
    lane.begin()
    assert upcoming(lane) == [2, 3, 4]
    lane.finish_prefix(3)
    assert upcoming(lane) == []


def test_a_record_passed_over_beside_one_that_runs_lies_above_the_watermark():
    lane = make_lane("key", "abc")
    lane.begin()
    lane.finish_prefix(2)
    checkpoint = lane.checkpoint()
    assert (checkpoint.watermark, checkpoint.frontier) == (None, Position(3))
    assert [opened.first_open for opened in checkpoint.open_keys] == [Position(1)]


@pytest.mark.parametrize("order", ["key", "none"])
def test_what_waits_to_be_started_comes_before_what_is_upcoming(order):
    lane = make_lane(order, "abc")
    first = lane.begin()
    lane.retry_at(first, 10)
    assert upcoming(lane, 9) == [2, 3]
    assert upcoming(lane, 10) == []
    assert lane.next(10) is first
    lane.give_back(first)
    assert upcoming(lane) == []


@ORDERS
def test_a_wary_lane_shows_one_record_and_none_beside_one_that_runs(order):
    lane = make_lane(order, "abc")
    lane.one_at_a_time = True
    assert upcoming(lane) == [1]
    lane.begin()
    assert upcoming(lane) == []


@ORDERS
def test_nothing_is_upcoming_after_the_stop(order):
    lane = make_lane(order, "abc")
    lane.stop()
    assert upcoming(lane) == []


def test_nothing_is_upcoming_before_everything_that_was_inherited_has_been_seen():
    inherited = Checkpoint(watermark=Position(0), frontier=Position(2), order="key")
    lane = make_lane("key", "abc", checkpoint=inherited)
    assert upcoming(lane) == []
    lane.finish(lane.next(0))
    failed = Checkpoint(open_keys=(OpenKey(b"8 bytes.", Position(2), 3),))
    lane = make_lane("shard", "abc", checkpoint=failed)
    assert upcoming(lane) == []
    lane.finish(lane.next(0))
    entry = lane.next(0)
    assert (entry.record.sequence_number, entry.attempts) == ("2", 3)
    lane.finish(entry)
    assert upcoming(lane) == [3]


def test_no_more_is_upcoming_than_a_fail_over_may_read_again():
    size = len(make_record(1).data)
    lane = make_lane("key", "abcdef", replay_bytes_max=3 * size)
    lane.begin()
    assert upcoming(lane) == [2, 3, 4]
    lane.finish_prefix(3)
    assert lane.stall_reason is not None
    assert upcoming(lane) == []
