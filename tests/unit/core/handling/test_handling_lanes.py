"""Which record of a shard may be started now, by order mode."""

import pytest

from anabranch._core.handling.lanes import ENTRY_BYTES, SCAN_MAX, RecordLane, RecordsOneByOne
from anabranch._model.leases import Checkpoint, OpenKey
from anabranch._model.streams import Position
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.reasons import HeldBackBytesLimit, NoRoomForHeldBack, OpenKeysLimit, ReplayBytesLimit
from shard_records import aggregated, make_window, plain


def make_lane(order, keys, checkpoint=None, data=b"payload", **limits):
    """Records 1, 2, 3... with one letter of `keys` each as their partition keys."""
    window = make_window(*(plain(number, key, data) for number, key in enumerate(keys, 1)))
    return RecordLane(checkpoint or Checkpoint(), window, RecordsOneByOne(order, **limits), Budget())


def numbers(entries):
    return [int(entry.record.sequence_number) for entry in entries]


def start_all(lane, now_ms=0):
    entries = []
    while (entry := lane.next(now_ms)) is not None:
        entries.append(entry)
    return entries


def test_order_shard_starts_one_record_after_another():
    lane = make_lane("shard", "abc")
    (first,) = start_all(lane)
    lane.finish(first)
    (second,) = start_all(lane)
    assert numbers([first, second]) == [1, 2]
    assert lane.stall_reason is None


def test_order_key_starts_one_record_of_each_key_and_then_the_next_of_that_key():
    lane = make_lane("key", "aabcab")
    running = start_all(lane)
    assert numbers(running) == [1, 3, 4]
    lane.finish(running[1])
    lane.finish(running[0])
    assert numbers(start_all(lane)) == [6, 2]


def test_a_failing_record_is_the_only_one_left_when_all_others_are_finished_or_wait_behind_it():
    lane = make_lane("key", "baba")
    assert lane.only_failing is None  # nothing has failed
    second, first = start_all(lane)
    lane.retry_at(first, 100)
    assert lane.only_failing is None  # another one runs
    lane.retry_at(second, 50)
    assert lane.only_failing == (second.record, 0)  # the first in the stream, whichever is due first
    (again,) = start_all(lane, 60)
    lane.finish(again)
    assert lane.only_failing is None  # one that waited behind it is ready
    (follower,) = start_all(lane, 60)
    lane.finish(follower)
    assert lane.only_failing == (first.record, 0)


def test_a_failing_record_is_not_the_only_one_left_while_records_wait_to_be_looked_at():
    lane = make_lane("shard", "ab")
    lane.retry_at(lane.next(0), 100)
    assert lane.only_failing is None


@pytest.mark.parametrize("order", ["key", "none"])
def test_a_wary_lane_starts_nothing_beside_a_record_that_runs_or_waits_to_be_tried_again(order):
    lane = make_lane(order, "abc")
    lane.one_at_a_time = True
    (first,) = start_all(lane)
    lane.retry_at(first, 10)
    assert not start_all(lane, 9)
    assert start_all(lane, 10) == [first]
    lane.finish(first)
    lane.one_at_a_time = False
    assert numbers(start_all(lane)) == [2, 3]


def test_order_none_starts_whatever_is_there():
    assert numbers(start_all(make_lane("none", "aaab"))) == [1, 2, 3, 4]


def test_a_record_to_be_tried_again_keeps_its_shard_waiting():
    lane = make_lane("shard", "ab")
    (entry,) = start_all(lane)
    lane.retry_at(entry, 50)
    assert start_all(lane, 49) == []
    assert lane.next_deadline_ms == 50
    assert start_all(lane, 50) == [entry]
    assert lane.next_deadline_ms is None


def test_a_record_to_be_tried_again_keeps_its_key_waiting_and_no_other():
    lane = make_lane("key", "aba")
    first, second = start_all(lane)
    lane.retry_at(first, 50)
    lane.finish(second)
    assert start_all(lane, 49) == []
    assert start_all(lane, 60) == [first]
    lane.finish(first)
    assert numbers(start_all(lane, 60)) == [3]


def test_a_record_that_was_not_started_after_all_is_the_next_one_again():
    lane = make_lane("key", "ab")
    first = lane.next(0)
    lane.give_back(first)
    assert lane.next(0) is first


@pytest.mark.parametrize("order", ["shard", "key", "none"])
def test_nothing_is_started_after_the_stop_and_what_runs_may_finish(order):
    lane = make_lane(order, "aab")
    entry = lane.next(0)
    lane.retry_at(lane.next(0) or entry, 5)
    lane.stop()
    assert lane.next(1000) is None
    assert lane.next_deadline_ms is None


def test_what_runs_at_the_stop_still_counts_when_it_ends():
    lane = make_lane("key", "aab")
    first, other = start_all(lane)
    lane.stop()
    lane.finish(first)
    lane.finish(other)
    assert lane.next(0) is None
    assert (lane.finished_count, lane.unfinished_count) == (2, 1)
    assert lane.checkpoint().watermark == Position(1)
    assert lane.first_unfinished.sequence_number == "2"


def test_what_the_owner_before_finished_is_passed_over_and_its_bytes_are_freed():
    inherited = Checkpoint(watermark=Position(0), frontier=Position(3), order="key")
    lane = make_lane("key", "abca", checkpoint=inherited)
    assert numbers(start_all(lane)) == [4]
    assert lane._window.collect_freed() > 0
    assert lane.finished_count == 0


def test_as_many_keys_as_allowed_are_open_at_once():
    lane = make_lane("key", "abcd", open_keys_max=2)
    first, _ = start_all(lane)
    assert lane.stall_reason == OpenKeysLimit(key_count=2)
    lane.finish(first)
    assert numbers(start_all(lane)) == [3]


def test_without_order_as_many_records_as_allowed_are_open_at_once():
    lane = make_lane("none", "aaaa", open_keys_max=3)
    running = start_all(lane)
    assert len(running) == 3
    lane.retry_at(running[0], 10)
    assert start_all(lane) == []
    lane.finish(running[1])
    assert numbers(start_all(lane)) == [4]


def test_what_waits_behind_a_busy_key_is_bounded_in_bytes():
    lane = make_lane("key", "aaaaab", held_back_bytes_max=2 * ENTRY_BYTES)
    (first,) = start_all(lane)
    assert lane.stall_reason == HeldBackBytesLimit(held_back_bytes=2 * (ENTRY_BYTES + 7))
    lane.finish(first)
    assert numbers(start_all(lane)) == [2]  # one was freed, and the fourth took its place
    assert lane.stall_reason is not None


def test_what_a_fail_over_would_read_again_is_bounded():
    lane = make_lane("key", "abcdef", replay_bytes_max=30, data=b"ninebytes")
    parked = lane.next(0)
    while (entry := lane.next(0)) is not None:
        lane.finish(entry)
    assert lane.stall_reason == ReplayBytesLimit(position="1", partition_key="a", replay_bytes=30)
    lane.finish(parked)
    assert lane.stall_reason is None
    assert numbers(start_all(lane)) == [4, 5, 6]


@pytest.mark.parametrize("order", ["shard", "none"])
def test_without_keys_everything_unfinished_is_named_in_the_checkpoint(order):
    lane = make_lane(order, "aabb")
    entries = start_all(lane)
    if order == "shard":
        lane.retry_at(entries[0], 5)
        assert lane.checkpoint() == Checkpoint()
        return
    lane.retry_at(entries[0], 5)
    lane.give_back(entries[1])
    lane.finish(entries[3])
    committed = lane.checkpoint(7.0)
    assert {entry.first_open for entry in committed.open_keys} == {Position(1), Position(2), Position(3)}
    assert committed.seen_through_seconds == 7.0


def test_the_checkpoint_names_each_open_key_by_its_first_record():
    lane = make_lane("key", "aabab")
    first, second = start_all(lane)
    lane.finish(second)
    committed = lane.checkpoint()
    assert [(entry.first_open, entry.attempts) for entry in committed.open_keys] == [(Position(1), 0)]
    assert committed.frontier == Position(3)
    assert isinstance(committed.open_keys[0], OpenKey)
    assert first.record == lane.first_unfinished


def test_a_window_full_of_one_busy_key_is_walked_through_in_steps():
    lane = make_lane("key", "a" * (2 * SCAN_MAX + 5) + "b")
    assert numbers([lane.next(0)]) == [1]
    assert lane.next(0) is None
    assert lane.scan_is_cut
    assert lane.stall_reason is None
    assert lane.next(0) is None
    assert numbers([lane.next(0)]) == [2 * SCAN_MAX + 6]
    assert not lane.scan_is_cut


def test_what_waits_behind_busy_keys_is_an_eighth_of_the_budget_for_all_lanes_together():
    budget = Budget()
    budget.held_back_bytes_max = 4 * ENTRY_BYTES
    first, second, third = (
        RecordLane(
            Checkpoint(),
            make_window(*(plain(n, key) for n, key in enumerate(keys, 1))),
            RecordsOneByOne("key"),
            budget,
        )
        for keys in ("aaaaab", "cccccd", "ef")
    )
    assert numbers(start_all(first)) == [1]
    assert budget.held_back_bytes == first.held_back_bytes == 4 * (ENTRY_BYTES + 7)
    assert first.stall_reason == HeldBackBytesLimit(held_back_bytes=4 * (ENTRY_BYTES + 7), all_shards=True)
    (head,) = start_all(second)
    assert numbers([head]) == [1]
    assert budget.held_back_bytes == 5 * (ENTRY_BYTES + 7)  # one record more of each lane, so that it has seen one
    assert numbers(start_all(third)) == [1, 2]  # a shard without such keys does not notice
    first.forget()
    assert budget.held_back_bytes == ENTRY_BYTES + 7
    second.finish(head)
    assert budget.held_back_bytes == 0


def test_opened_sub_records_that_are_held_back_are_paid_for_by_the_budget_and_given_back():
    budget = Budget(READ_RESERVE_BYTES)
    window = make_window(aggregated(1, ("a", b"x"), ("a", b"yy"), ("a", b"zzz"), ("b", b"")))
    lane = RecordLane(Checkpoint(), window, RecordsOneByOne("key"), budget)
    first, other = start_all(lane)
    assert budget.used_bytes == 2 + 3 + 2 * ENTRY_BYTES
    lane.finish(first)
    assert budget.used_bytes == 3 + ENTRY_BYTES
    lane.forget()
    assert budget.used_bytes == 0
    assert other.record.partition_key == "b"


def test_nothing_is_opened_beyond_what_the_budget_has_room_for():
    budget = Budget(READ_RESERVE_BYTES)
    budget.try_reserve(READ_RESERVE_BYTES - ENTRY_BYTES - 2)
    window = make_window(aggregated(1, ("a", b"x"), ("a", b"yy"), ("a", b"zzz"), ("b", b"")), plain(2, "a"))
    lane = RecordLane(Checkpoint(), window, RecordsOneByOne("key"), budget)
    (first,) = start_all(lane)
    assert lane.stall_reason == NoRoomForHeldBack()
    assert budget.used_bytes == budget.limit_bytes
    lane.finish(first)
    second = lane.next(0)
    assert second.record.data == b"yy"
    assert budget.used_bytes == budget.limit_bytes - ENTRY_BYTES - 2
    lane.finish(second)
    assert [entry.record.data for entry in start_all(lane)] == [b"zzz", b""]


def test_plain_records_that_are_held_back_cost_nothing_beside_their_page():
    budget = Budget(READ_RESERVE_BYTES)
    window = make_window(plain(1, "a"), plain(2, "a"), plain(3, "b"))
    lane = RecordLane(Checkpoint(), window, RecordsOneByOne("key"), budget)
    assert numbers(start_all(lane)) == [1, 3]
    assert budget.used_bytes == 0
