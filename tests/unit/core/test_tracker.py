"""What may be committed while records are finished in any order, and what a new owner makes of it."""

import itertools
import sys

import pytest

from anabranch._core import tracker as tracker_module
from anabranch._core.reading.window import Page
from anabranch._core.tracker import Tracker, adopt, discards, key_digest
from anabranch._model.leases import Checkpoint, OpenKey
from anabranch._model.streams import Position
from anabranch.letters import Failure
from shard_records import make_record

PAGE = Page((), None)
FRESH = Checkpoint()


def digest(key):
    return key_digest(make_record(0, key), "key")


def enter(tracker, *pairs):
    return [tracker.enter(make_record(number, key), PAGE) for number, key in pairs]


def key_checkpoint(watermark, frontier, **open_keys):
    return Checkpoint(
        watermark=Position(watermark),
        frontier=Position(frontier),
        open_keys=tuple(sorted((OpenKey(digest(key), Position(at)) for key, at in open_keys.items()), key=hash_of)),
        order="key",
    )


def hash_of(entry):
    return entry.digest


def test_nothing_finished_commits_what_was_there_before():
    before = Checkpoint(watermark=Position(7), seek_epoch=3, order="key", seen_through_seconds=11.0)
    tracker = Tracker(before, "key")
    entries = enter(tracker, (8, "a"), (9, "b"))
    assert tracker.checkpoint(entries) == before
    assert tracker.first_unfinished == entries[0].record


def test_the_watermark_waits_for_the_first_unfinished_record():
    tracker = Tracker(FRESH, "key")
    first, second, third = enter(tracker, (1, "a"), (2, "b"), (3, "c"))
    tracker.finish(second)
    held = tracker.checkpoint([first, third])
    assert held == Checkpoint(
        watermark=None, frontier=Position(2), open_keys=(OpenKey(digest("a"), Position(1)),), order="key"
    )
    tracker.finish(first)
    assert tracker.checkpoint([third]) == Checkpoint(watermark=Position(2), order="key")
    tracker.finish(third)
    assert tracker.checkpoint([]) == Checkpoint(watermark=Position(3), order="key")
    assert (tracker.finished_count, tracker.unfinished_count) == (3, 0)


def test_a_record_that_is_merely_started_changes_no_checkpoint():
    tracker = Tracker(FRESH, "shard")
    (first,) = enter(tracker, (1, "a"))
    tracker.finish(first)
    idle = tracker.checkpoint([])
    assert tracker.checkpoint(enter(tracker, (2, "a"))) == idle


def test_keys_above_the_frontier_are_not_listed_as_open():
    tracker = Tracker(FRESH, "key")
    entries = enter(tracker, (1, "a"), (2, "b"), (3, "c"))
    tracker.finish(entries[1])
    assert [entry.first_open for entry in tracker.checkpoint([entries[0], entries[2]]).open_keys] == [Position(1)]


def test_the_number_of_attempts_is_kept_with_the_open_key():
    tracker = Tracker(FRESH, "key")
    first, second = enter(tracker, (1, "a"), (2, "b"))
    first.attempts = 2
    tracker.finish(second)
    committed = tracker.checkpoint([first])
    heir = Tracker(committed, "key")
    assert [entry.attempts for entry in enter(heir, (1, "a"), (2, "b"), (3, "a"))] == [2, 0, 0]


def test_the_end_of_a_long_error_type_is_kept_as_it_has_the_class():
    tracker = Tracker(FRESH, "key")
    (entry,) = enter(tracker, (1, "a"))
    entry.attempts = 3
    entry.failure = Failure(error_type=f"{'package.' * 9}NoSuchCustomerError", fingerprint="abcd")
    (opened,) = tracker.checkpoint([entry]).open_keys
    assert len(opened.error_type) == 40
    assert opened.error_type.endswith(".NoSuchCustomerError")


@pytest.mark.parametrize("order", ["shard", "key", "none"])
def test_a_record_that_failed_is_named_though_nothing_after_it_is_finished(order):
    tracker = Tracker(FRESH, order)
    _, second = entries = enter(tracker, (1, "a"), (2, "b"))
    tracker.finish(entries[0])
    second.attempts = 2
    committed = tracker.checkpoint([second])
    assert (committed.watermark, committed.frontier) == (Position(1), None)
    assert [(entry.first_open, entry.attempts) for entry in committed.open_keys] == [(Position(2), 2)]
    heir = Tracker(committed, order)
    assert heir.checkpoint(()) == committed
    assert [entry.attempts for entry in enter(heir, (2, "b"), (3, "b"))] == [2, 0]


def test_attempts_at_a_record_that_has_not_come_yet_are_carried_on_and_at_one_that_never_comes_forgotten():
    failed = (OpenKey(b"trimmed ", Position(2), 1), OpenKey(b"to come ", Position(9), 2))
    tracker = Tracker(Checkpoint(watermark=Position(1), order="key", open_keys=failed), "key")
    (entry,) = enter(tracker, (3, "a"))
    assert entry.attempts == 0
    tracker.finish(entry)
    assert tracker.checkpoint(()).open_keys == failed[1:]


def test_the_attempts_at_a_stretch_are_named_with_its_first_record_until_that_is_finished():
    tracker = Tracker(FRESH, "shard")
    tracker.fail_slice(make_record(1), 2)
    committed = tracker.checkpoint(())
    assert [(entry.first_open, entry.attempts) for entry in committed.open_keys] == [(Position(1), 2)]
    heir = Tracker(committed, "shard")
    assert heir.prior_mark(make_record(1)).attempts == 2
    heir.fail_slice(make_record(1), 3)
    heir.finish_through(make_record(1), 1)
    assert heir.checkpoint(()).open_keys == ()


def test_failures_of_earlier_owners_in_the_midst_of_a_stretch_are_over_when_it_is_finished():
    failed = tuple(OpenKey(digest(key), Position(number), 1) for number, key in ((3, "a"), (5, "b"), (9, "c")))
    heir = Tracker(Checkpoint(watermark=Position(1), open_keys=failed, order="key"), "shard")
    assert heir.prior_mark(make_record(2)) is None
    heir.finish_through(make_record(6), 4)
    assert [entry.first_open for entry in heir.checkpoint(()).open_keys] == [Position(9)]


@pytest.mark.parametrize("before, now", list(itertools.product(["shard", "key", "none"], repeat=2)))
def test_what_is_finished_above_the_watermark_is_discarded_only_where_it_had_no_order(before, now):
    checkpoint = Checkpoint(watermark=Position(1), frontier=Position(9), order=before)
    assert discards(checkpoint, now) == (before == "none" != now)
    assert not discards(Checkpoint(watermark=Position(1), order=before), now)


def test_a_record_is_finished_once():
    tracker = Tracker(FRESH, "key")
    (entry,) = enter(tracker, (1, "a"))
    tracker.finish(entry)
    with pytest.raises(AssertionError, match="finished twice: 1"):
        tracker.finish(entry)


def test_what_the_owner_before_finished_comes_back_finished():
    tracker = Tracker(key_checkpoint(5, 10, a=6), "key")
    entries = enter(tracker, (6, "a"), (7, "b"), (8, "a"), (10, "c"), (11, "c"))
    assert [entry.finished for entry in entries] == [False, True, False, True, False]
    assert tracker.finished_count == 0


def test_commits_carry_on_what_was_inherited_until_its_frontier_is_passed():
    inherited = key_checkpoint(5, 10, a=6, b=8)
    tracker = Tracker(inherited, "key")
    assert tracker.checkpoint([]) == inherited
    (first,) = enter(tracker, (6, "a"))
    assert tracker.checkpoint([first]) == inherited
    tracker.finish(first)
    # The owner before had not begun b's 8, and may have more of a's above 6: both stay open from there.
    moved = tracker.checkpoint([])
    assert moved.watermark == Position(6)
    assert moved.frontier == Position(10)
    assert {entry.digest: entry.first_open for entry in moved.open_keys} == {
        digest("a"): Position(6, 0),
        digest("b"): Position(8),
    }
    second, third, fourth = enter(tracker, (7, "c"), (8, "b"), (11, "b"))
    assert second.finished
    own = tracker.checkpoint([third])
    assert own == Checkpoint(watermark=Position(7), order="key")
    tracker.finish(fourth)
    assert tracker.checkpoint([third]).frontier == Position(11)


def test_a_clash_of_digests_repeats_and_never_skips(monkeypatch):
    monkeypatch.setattr(tracker_module, "key_digest", lambda record, order: b"same")
    tracker = Tracker(FRESH, "key")
    entries = enter(tracker, (1, "a"), (2, "b"), (3, "b"), (4, "c"))
    tracker.finish(entries[1])
    tracker.finish(entries[3])
    committed = tracker.checkpoint([entries[2], entries[0]])
    assert committed == tracker.checkpoint([entries[0], entries[2]])
    assert committed.open_keys == (OpenKey(b"same", Position(1)),)
    heir = Tracker(committed, "key")
    repeated = enter(heir, (1, "a"), (2, "b"))
    assert not any(entry.finished for entry in repeated)


@pytest.mark.parametrize("order", ["key", "none"])
def test_a_clash_with_an_inherited_key_that_is_finished_now_still_repeats(monkeypatch, order):
    monkeypatch.setattr(tracker_module, "key_digest", lambda record, order: b"same")
    inherited = Checkpoint(
        watermark=Position(0), frontier=Position(9), open_keys=(OpenKey(b"same", Position(1)),), order=order
    )
    tracker = Tracker(inherited, order)
    (entry,) = enter(tracker, (1, "a"))
    tracker.finish(entry)
    heir = Tracker(tracker.checkpoint([]), order)
    (clashing,) = enter(heir, (5, "b"))
    assert not clashing.finished


@pytest.mark.parametrize("order", ["shard", "key", "none"])
def test_a_map_of_keys_is_kept_by_every_order(order):
    inherited = key_checkpoint(5, 10, a=6)
    assert adopt(inherited, order) is inherited
    assert [entry.finished for entry in enter(Tracker(inherited, order), (6, "a"), (7, "b"))] == [False, True]


def test_with_order_none_every_record_is_a_key_of_its_own():
    tracker = Tracker(FRESH, "none")
    entries = enter(tracker, (1, "a"), (2, "a"), (3, "a"))
    tracker.finish(entries[1])
    committed = tracker.checkpoint([entries[0], entries[2]])
    assert [entry.first_open for entry in committed.open_keys] == [Position(1)]
    assert adopt(committed, "none") is committed
    heir = Tracker(committed, "none")
    assert [entry.finished for entry in enter(heir, (1, "a"), (2, "a"), (3, "a"))] == [False, True, False]


@pytest.mark.parametrize("order", ["shard", "key"])
def test_a_map_written_without_order_is_dropped_by_an_owner_that_keeps_order(order):
    committed = Checkpoint(
        watermark=Position(4),
        frontier=Position(9),
        open_keys=(OpenKey(b"12345678", Position(5)),),
        seek_epoch=2,
        order="none",
        seen_through_seconds=1.5,
    )
    assert adopt(committed, order) == Checkpoint(
        watermark=Position(4), seek_epoch=2, order=order, seen_through_seconds=1.5
    )
    assert not any(entry.finished for entry in enter(Tracker(committed, order), (5, "a"), (6, "a")))


def test_what_a_fail_over_would_read_again_is_counted_from_watermark_to_frontier():
    tracker = Tracker(FRESH, "key")
    assert tracker.replay_bytes == 0
    entries = [tracker.enter(make_record(number, "k", data=bytes(99)), PAGE) for number in range(4)]
    assert tracker.replay_bytes == 0
    tracker.finish(entries[2])
    assert tracker.replay_bytes == 300
    tracker.finish(entries[0])
    assert tracker.replay_bytes == 200
    tracker.finish(entries[1])
    assert tracker.replay_bytes == 0
    tracker.finish(entries[3])
    assert (tracker.replay_bytes, tracker.first_unfinished) == (0, None)


def test_finished_records_are_let_go_of_while_an_earlier_one_is_unfinished():
    tracker = Tracker(FRESH, "key")
    parked = tracker.enter(make_record(0, "parked"), PAGE)
    payloads = [bytes([number]) * 100 for number in range(50)]
    held_by_the_test = [sys.getrefcount(payload) for payload in payloads]
    for number, payload in enumerate(payloads, 1):
        tracker.finish(tracker.enter(make_record(number, str(number), data=payload), PAGE))
    assert tracker.checkpoint([parked]).frontier == Position(50)
    del payload
    assert [sys.getrefcount(payload) for payload in payloads] == held_by_the_test


def test_the_time_that_the_shard_was_seen_through_is_committed():
    tracker = Tracker(Checkpoint(seen_through_seconds=5.0), "shard")
    assert tracker.checkpoint([]).seen_through_seconds == 5.0
    assert tracker.checkpoint([], 9.0).seen_through_seconds == 9.0


def test_stretches_move_the_watermark_with_their_last_finished_record():
    tracker = Tracker(Checkpoint(watermark=Position(1)), "shard")
    assert not tracker.already_done(make_record(2))
    tracker.finish_through(make_record(4, sub=2), 3)
    assert tracker.checkpoint(()) == Checkpoint(watermark=Position(4, 2))
    assert tracker.finished_count == 3


def test_stretches_pass_over_what_the_owner_before_finished():
    tracker = Tracker(key_checkpoint(5, 10, a=6, b=9), "shard")
    skipped = [
        n for n, key in [(6, "a"), (7, "c"), (8, "a"), (9, "b"), (10, "a")] if tracker.already_done(make_record(n, key))
    ]
    assert skipped == [7]
    tracker.finish_through(make_record(8, "a"), 2)
    carried = tracker.checkpoint(())
    assert carried.watermark == Position(8)
    assert {entry.digest: entry.first_open for entry in carried.open_keys} == {
        digest("a"): Position(8, 0),
        digest("b"): Position(9),
    }
    assert not tracker.already_done(make_record(11, "c"))
    tracker.finish_through(make_record(10, "a"), 2)
    assert tracker.checkpoint(()) == Checkpoint(watermark=Position(10))
    assert not tracker.already_done(make_record(10, "c"))


def test_stretches_and_single_records_are_not_mixed():
    tracker = Tracker(FRESH, "shard")
    enter(tracker, (1, "a"))
    with pytest.raises(AssertionError, match="not mixed"):
        tracker.finish_through(make_record(1), 1)


def test_a_row_that_would_grow_too_large_names_the_lowest_open_records_and_counts_nothing_beyond_them():
    tracker = Tracker(FRESH, "none")
    entries = enter(tracker, *((number, "a") for number in range(1, tracker_module.OPEN_KEYS_MAX + 4)))
    tracker.finish(entries[0])
    tracker.finish(entries[-1])
    opened = entries[1:-1]
    assert len(opened) == tracker_module.OPEN_KEYS_MAX + 1
    checkpoint = tracker.checkpoint(opened)
    assert checkpoint.watermark == Position(1)
    assert [entry.first_open for entry in sorted(checkpoint.open_keys, key=lambda entry: entry.first_open)] == [
        entry.record.position for entry in opened[:-1]
    ]
    assert opened[-2].record.position <= checkpoint.frontier < opened[-1].record.position
    tracker.finish(opened.pop())
    assert len(tracker.checkpoint(opened).open_keys) == tracker_module.OPEN_KEYS_MAX
