"""When a shard's next batch is handed out, and what is finished of it."""

import pytest

from anabranch._core.handling.batches import BatchLane, BatchLimits
from anabranch._core.tracker import key_digest
from anabranch._model.leases import Checkpoint, OpenKey
from anabranch._model.streams import Position
from shard_records import make_record, make_window, places, plain


def make_lane(*records, checkpoint=None, **limits):
    window = make_window(*records)
    return BatchLane(checkpoint or Checkpoint(), window, BatchLimits(**limits)), window


def some(count, data=b"payload"):
    return [plain(number, "a", data) for number in range(1, count + 1)]


def numbers(batch):
    return None if batch is None else [int(record.sequence_number) for record in batch]


def test_a_batch_that_is_full_by_count_is_handed_out_at_once():
    lane, _ = make_lane(*some(5), max_records=2)
    assert numbers(lane.next(0, flush=False)) == [1, 2]


def test_a_failing_record_is_the_only_one_left_if_it_is_alone_and_nothing_was_read_beyond_it():
    lane, _ = make_lane(*some(3), max_records=2, max_wait_ms=0)
    lane.next(0, flush=True)
    lane.retry_at(5, 1)
    assert lane.only_failing is None  # the third record follows
    lane.next(5, flush=True)
    lane.finish_through(2)
    (record,) = lane.next(5, flush=True)
    assert lane.only_failing is None  # it runs
    lane.retry_at(9, 2)
    assert lane.only_failing == (record, 2)


def fail_batches_with(lane, poison, *, attempts_max=3):
    """Handles everything; what contains the record fails. Returns the pieces that were handed out, failed or not."""
    handed_out = []
    while (piece := lane.next(0, flush=True)) is not None:
        handed_out.append(numbers(piece))
        if poison not in numbers(piece):
            lane.finish_through(len(piece))
        elif len(piece) == 1 and lane.attempts + 1 == attempts_max:
            lane.finish_through(1)  # as if it were skipped
        else:
            lane.retry_at(0, lane.attempts + 1)
    return handed_out


def test_a_batch_that_fails_twice_is_halved_until_the_record_that_fails_is_alone():
    lane, _ = make_lane(*some(8), max_records=8)
    assert fail_batches_with(lane, 6) == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 5, 6, 7, 8],  # an outage of a second ends here
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [5, 6],
        [5],
        [6], [6], [6],
        [7, 8],
    ]  # fmt: skip
    assert lane.checkpoint().watermark == Position(8)


@pytest.mark.parametrize("count", range(1, 20))
def test_of_any_batch_only_the_record_that_fails_is_given_up(count):
    for poison in range(1, count + 1):
        lane, window = make_lane(*some(count), max_records=count)
        handed_out = fail_batches_with(lane, poison)
        finished = [piece for piece in handed_out if poison not in piece] + [[poison]]
        assert sorted(number for piece in finished for number in piece) == list(range(1, count + 1))
        assert handed_out.count([poison]) == 3
        assert lane.unfinished_count == 0
        assert window.is_empty


def test_a_record_that_failed_alone_is_alone_for_the_next_owner_too_and_keeps_its_attempts():
    lane, _ = make_lane(*some(4), max_records=4)
    for _ in range(4):  # whole, whole, [1, 2], [1]: and now record 1 has failed once
        lane.next(0, flush=True)
        lane.retry_at(0, lane.attempts + 1)
    heir, _ = make_lane(*some(4), max_records=4, checkpoint=lane.checkpoint())
    assert (numbers(heir.next(0, flush=True)), heir.attempts) == ([1], 1)
    heir.finish_through(1)
    assert (numbers(heir.next(0, flush=True)), heir.attempts) == ([2, 3, 4], 0)


def test_what_was_finished_before_a_failed_record_is_not_handed_out_again():
    lane, _ = make_lane(*some(4), max_records=4)
    lane.next(0, flush=True)
    lane.finish_through(2)
    lane.retry_at(0, 1)
    assert lane.checkpoint().watermark == Position(2)
    assert numbers(lane.next(0, flush=True)) == [3, 4]
    lane.retry_at(0, 1)
    assert numbers(lane.next(0, flush=True)) == [3, 4]  # whole once more, as this is progress
    lane.retry_at(0, 2)
    assert numbers(lane.next(0, flush=True)) == [3]


def test_a_wary_lane_hands_out_one_record_at_a_time():
    lane, _ = make_lane(*some(3), max_records=10)
    lane.one_at_a_time = True
    assert numbers(lane.next(0, flush=False)) == [1]
    lane.finish_through(1)
    lane.one_at_a_time = False
    assert numbers(lane.next(0, flush=True)) == [2, 3]


def test_a_batch_that_would_be_too_large_with_the_next_record_is_handed_out_without_it():
    lane, _ = make_lane(*some(5, bytes(40)), max_bytes=100)
    assert numbers(lane.next(0, flush=False)) == [1, 2]


@pytest.mark.parametrize("size", [100, 101, 5000])
def test_a_batch_that_is_full_to_the_byte_waits_for_nothing(size):
    lane, _ = make_lane(*some(1, bytes(size)), max_bytes=100)
    assert numbers(lane.next(0, flush=False)) == [1]


def test_a_record_larger_than_a_batch_is_one_of_its_own():
    lane, _ = make_lane(plain(1, data=b"x"), plain(2, data=bytes(500)), plain(3, data=b"x"), max_bytes=100)
    batches = []
    while (batch := lane.next(0, flush=True)) is not None:
        batches.append(numbers(batch))
        lane.finish_through(len(batch))
    assert batches == [[1], [2], [3]]


def test_a_batch_that_is_not_full_waits_from_its_first_record_on():
    lane, window = make_lane(plain(1), max_wait_ms=100)
    assert lane.next_deadline_ms is None
    assert lane.next(50, flush=False) is None
    assert lane.next_deadline_ms == 150
    window.accept([plain(2)], None)
    assert lane.next(149, flush=False) is None
    assert lane.unfinished_count == 2
    assert lane.first_unfinished.sequence_number == "1"
    assert numbers(lane.next(150, flush=False)) == [1, 2]


def test_the_last_batch_of_a_shard_waits_for_nothing():
    lane, _ = make_lane(*some(3))
    assert numbers(lane.next(0, flush=True)) == [1, 2, 3]


def test_a_batch_waits_for_nothing_where_there_is_no_room_for_more():
    lane, _ = make_lane(*some(3))
    assert lane.next(0, flush=False) is None
    assert numbers(lane.next(0, flush=True)) == [1, 2, 3]


def test_an_empty_shard_has_no_batch():
    lane, _ = make_lane()
    assert lane.next(0, flush=True) is None
    assert lane.next(0, flush=True) is None
    assert lane.first_unfinished is None


def test_the_next_batch_follows_when_this_one_is_finished():
    lane, _ = make_lane(*some(4), max_records=2)
    lane.next(0, flush=False)
    assert lane.next_deadline_ms is None
    assert lane.next(10_000, flush=True) is None
    lane.finish_through(2)
    assert numbers(lane.next(0, flush=False)) == [3, 4]


def test_a_batch_can_be_finished_record_by_record():
    lane, window = make_lane(*some(3), max_records=3)
    lane.next(0, flush=False)
    assert lane.checkpoint().watermark is None
    lane.finish_through(0)
    lane.finish_through(2)
    lane.finish_through(2)
    assert lane.checkpoint(4.0) == Checkpoint(watermark=Position(2), seen_through_seconds=4.0)
    assert (lane.finished_count, lane.unfinished_count) == (2, 1)
    assert lane.first_unfinished.sequence_number == "3"
    lane.finish_through(3)
    assert lane.checkpoint().watermark == Position(3)
    assert (lane.finished_count, lane.unfinished_count) == (3, 0)
    assert window.is_empty
    assert window.collect_freed() > 0


def test_attempts_are_counted_for_each_batch():
    lane, _ = make_lane(*some(2), max_records=1)
    lane.next(0, flush=False)
    lane.retry_at(0, 1)
    lane.next(0, flush=False)
    lane.retry_at(0, 2)
    lane.next(0, flush=False)
    assert lane.attempts == 2
    lane.finish_through(1)
    lane.next(0, flush=False)
    assert lane.attempts == 0


def test_every_owner_of_an_unfinished_batch_continues_its_attempt_count():
    lane, _ = make_lane(*some(2), max_records=1)
    lane.next(0, flush=False)
    lane.retry_at(0, 1)
    checkpoint = lane.checkpoint()
    for _ in range(2):  # owners that hand it out, and end before it does
        heir, _ = make_lane(*some(2), max_records=1, checkpoint=checkpoint)
        heir.next(0, flush=False)
        assert heir.attempts == 1
        assert heir.checkpoint() == checkpoint
        checkpoint = heir.checkpoint()


def test_nothing_is_handed_out_after_the_stop_and_what_is_out_may_finish():
    lane, _ = make_lane(*some(3), max_records=2)
    lane.next(0, flush=False)
    lane.stop()
    lane.finish_through(2)
    assert lane.next(10_000, flush=True) is None
    assert lane.checkpoint().watermark == Position(2)


def test_a_batch_being_filled_has_no_deadline_after_the_stop():
    lane, _ = make_lane(*some(1))
    assert lane.next(0, flush=False) is None
    lane.stop()
    assert lane.next_deadline_ms is None


def test_what_the_owner_before_finished_is_in_no_batch_and_the_watermark_passes_it():
    records = [plain(number, key) for number, key in enumerate("bbabab", 1)]
    opened = OpenKey(key_digest(make_record(3, "a"), "key"), Position(3))
    inherited = Checkpoint(watermark=Position(0), frontier=Position(6), open_keys=(opened,), order="key")
    lane, window = make_lane(*records, checkpoint=inherited)
    batch = lane.next(0, flush=True)
    assert places(batch) == [(3, -1), (5, -1)]
    assert lane.checkpoint().watermark == Position(2)
    lane.finish_through(1)
    assert lane.checkpoint().frontier == Position(6)
    lane.finish_through(2)
    assert lane.checkpoint() == Checkpoint(watermark=Position(6), order="shard")
    assert lane.finished_count == 2
    assert window.is_empty


def test_a_portion_that_is_partly_finished_is_freed_with_its_last_record():
    lane, window = make_lane(*some(3), max_records=3)
    lane.next(0, flush=False)
    assert window.is_empty
    lane.finish_through(2)
    assert window.collect_freed() == 0
    lane.finish_through(3)
    assert window.collect_freed() > 0


def test_a_lane_that_forgets_lets_go_of_its_records_and_keeps_what_is_safe_to_commit():
    lane, _ = make_lane(*some(5), max_records=2)
    lane.next(0, flush=False)
    lane.finish_through(1)
    lane.forget()
    assert (lane.unfinished_count, lane.first_unfinished) == (0, None)
    assert lane.next(10_000, flush=True) is None
    assert lane.checkpoint().watermark == Position(1)
