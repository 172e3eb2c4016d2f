"""Sessions: states, what counts as handled, what may have been lost, and the bytes they release."""

import pytest
from msgspec.structs import replace

from anabranch._core.reading.service_time import HORIZON_MARGIN_SECONDS
from anabranch._core.session import MOVES, ReadPage, Session
from anabranch._model.leases import Checkpoint
from anabranch._model.streams import Position
from anabranch.reasons import StoppedByCrashes
from held_sessions import add_page, handle_all, make_session, read, stop
from shard_records import plain


def test_a_shard_is_exhausted_when_it_has_ended_and_all_of_it_is_finished():
    session = make_session(order="key")
    read(session, plain(1), plain(2), is_end=True)
    assert not session.is_exhausted
    handle_all(session)
    assert session.is_exhausted


def test_a_shard_whose_end_lies_after_the_end_time_is_at_its_tip_and_not_exhausted():
    session = make_session(until_seconds=2.0)
    read(session, plain(1), plain(2), plain(3), is_end=True)
    handle_all(session)
    assert session.lane.finished_count == 1
    assert not session.is_exhausted  # otherwise it would be finished without records 2 and 3
    assert session.is_at_tip


@pytest.mark.parametrize("order", ["shard", "key", "none", "batch"])
@pytest.mark.parametrize("end", [stop, Session.lose])
def test_a_stalled_shard_holds_no_bytes_and_can_still_be_committed(order, end):
    session = make_session(order=order)
    read(session, *(plain(number, key) for number, key in enumerate("aabacab", 1)))
    read(session, plain(8), is_end=True)
    lane = session.lane
    work = session.next_work(1_000)
    assert session.next_work(1_000) is None or order in {"key", "none"}
    session.finish(work, 2 if order == "batch" else None)
    committed, finished_count = lane.checkpoint(), lane.finished_count
    end(session)
    assert session.budget.used_bytes == session.describe(None, wall_ms=0).held_bytes == 0
    assert (lane.checkpoint(), lane.finished_count) == (committed, finished_count)
    assert (lane.unfinished_count, lane.first_unfinished) == (0, None)
    assert session.next_work(9999) is None


def test_a_read_that_arrives_after_everything_was_forgotten_costs_nothing():
    session = make_session(order="key")
    session.lose()
    read(session, plain(1))
    assert session.budget.used_bytes == 0


DAY = 24 * 3600.0
NOW = 100 * DAY


def answer(*records, behind_ms=0, is_end=False):
    return ReadPage(list(records), 0.0, behind_ms, is_end)


def hear(session, page, server_seconds):
    """One read, as a reader makes it. Returns whether records may have been lost before it."""
    page = replace(page, server_seconds=server_seconds)
    lost = session.may_have_lost(page)
    add_page(session, page)
    return lost


def test_a_shard_is_read_through_until_the_answers_time_less_what_it_lies_behind():
    session = make_session(order="key")
    assert session.read_through_seconds is None
    hear(session, answer(plain(1), behind_ms=60_000), NOW)
    assert session.read_through_seconds == NOW - 60
    hear(session, answer(behind_ms=None), NOW + 1)
    hear(session, answer(behind_ms=90_000), NOW + 1)
    assert session.read_through_seconds == NOW - 60
    hear(session, answer(), NOW + 2)
    assert session.read_through_seconds == NOW + 2


def test_the_answer_that_closes_a_shard_counts_by_its_records():
    session = make_session(order="key")
    hear(session, answer(), 5.0)
    hear(session, answer(plain(7), is_end=True), NOW)
    assert session.read_through_seconds == plain(7).arrival_seconds
    session = make_session(order="key")
    hear(session, answer(), 5.0)
    hear(session, answer(is_end=True), NOW)
    assert session.read_through_seconds == 5.0


def test_a_reader_that_stalled_beyond_the_retention_may_have_lost_records_once():
    session = make_session(order="key")
    assert not hear(session, answer(plain(1)), NOW)
    assert not hear(session, answer(), NOW + DAY - 1)
    assert not hear(session, answer(), NOW + 2 * DAY - 2)
    assert hear(session, answer(plain(2)), NOW + 3 * DAY - 2)
    assert not hear(session, answer(plain(3)), NOW + 3 * DAY)


def test_a_reader_at_the_horizon_is_given_a_few_seconds():
    session = make_session(order="key")
    day_ms = round(DAY * 1000)
    assert not hear(session, answer(behind_ms=day_ms), NOW)
    assert not hear(session, answer(behind_ms=day_ms), NOW + HORIZON_MARGIN_SECONDS - 1)
    assert hear(session, answer(behind_ms=day_ms), NOW + 2 * HORIZON_MARGIN_SECONDS)


def test_an_answer_that_comes_after_a_look_at_the_stream_was_read_through_until_its_own_time():
    session = make_session(order="key")
    hear(session, answer(plain(1)), NOW)
    session.horizon.observe(24, NOW + DAY)
    hear(session, answer(), NOW + 1)  # records of the next five seconds may be trimmed by then
    assert session.read_through_seconds == NOW + 1
    assert hear(session, answer(plain(3)), NOW + DAY + 2)


def test_a_child_is_judged_by_the_time_until_which_its_parent_was_read():
    born = Checkpoint(seen_through_seconds=NOW)
    assert not hear(make_session(checkpoint=born), answer(plain(1)), NOW + DAY - 1)
    assert hear(make_session(checkpoint=born), answer(plain(1)), NOW + DAY)
    assert not hear(make_session(order="key"), answer(plain(1)), NOW + DAY)  # a root: what was there before is unknown


def test_a_child_with_an_unknown_unread_time_may_have_lost_records_once():
    session = make_session(waits_for=("shardId-000000000000",))
    assert hear(session, answer(), NOW)
    assert not hear(session, answer(plain(1)), NOW + 1)


def test_an_empty_root_that_has_ended_was_read_until_the_horizon_and_its_children_are_unread_since_then():
    session = make_session(order="key")
    assert not hear(session, answer(is_end=True), NOW)
    assert session.read_through_seconds == NOW - DAY + HORIZON_MARGIN_SECONDS


@pytest.mark.parametrize("seen_through", [None, NOW])
def test_a_shard_whose_checkpoint_is_still_there_has_lost_nothing(seen_through):
    session = make_session(checkpoint=Checkpoint(watermark=Position(3), seen_through_seconds=seen_through))
    assert not hear(session, answer(behind_ms=5), NOW + 2 * DAY)  # empty, but not at the tip yet
    assert session.read_through_seconds == seen_through
    assert not hear(session, answer(plain(3)), NOW + 2 * DAY)
    assert session.read_through_seconds == NOW + 2 * DAY


@pytest.mark.parametrize("response", [answer(plain(4)), answer(), answer(behind_ms=7, is_end=True)])
@pytest.mark.parametrize("seen_through, lost", [(None, True), (NOW, True), (NOW + DAY + 1, False)])
def test_a_shard_whose_checkpoint_is_gone_has_lost_what_came_after_it_was_seen_through(response, seen_through, lost):
    session = make_session(checkpoint=Checkpoint(watermark=Position(3), seen_through_seconds=seen_through))
    assert hear(session, response, NOW + 2 * DAY) == lost


def test_an_idle_shard_whose_checkpoint_is_gone_is_not_asked_about_again():
    session = make_session(checkpoint=Checkpoint(watermark=Position(3)))
    assert hear(session, answer(), NOW)
    assert not hear(session, answer(), NOW + 1)
    assert not hear(session, answer(plain(4)), NOW + 2)


def test_a_shard_is_seen_through_when_all_that_was_received_is_handled():
    session = make_session(order="key")
    hear(session, answer(plain(1)), NOW)
    assert session.seen_through_seconds is None
    handle_all(session)
    assert session.seen_through_seconds == NOW


def test_nothing_is_seen_through_when_records_were_left_alone():
    session = make_session(until_seconds=1.0)
    hear(session, answer(plain(1)), NOW)
    handle_all(session)
    assert session.seen_through_seconds is None


def test_a_shard_that_holds_too_much_is_looked_at_again_when_it_holds_less():
    session = make_session(order="shard")
    read(session, plain(1), plain(2), plain(3))
    session.pause_reading(below_bytes=session.busy_bytes - 1)
    assert not session.take_room()
    handle_all(session)
    assert session.take_room()
    assert not session.take_room()  # said once


def test_what_waits_behind_a_busy_key_does_not_keep_a_shard_from_being_read():
    session = make_session(order="key")
    read(session, plain(1, "a"), plain(2, "a"), plain(3, "a"))
    session.pause_reading(below_bytes=session.busy_bytes)
    assert session.next_work(0) is not None
    assert session.next_work(0) is None  # the others were held back
    assert session.take_room()


def test_every_state_but_the_final_ones_can_be_left_by_losing_the_lease():
    assert {state for state, moves in MOVES.items() if moves.get("lose") != "lost"} == {"finished", "lost"}


def test_a_declined_hand_over_continues_where_the_shard_was():
    session = make_session(order="key")
    session.drain()
    assert not session.may_start
    session.keep()
    assert session.state == "reading"
    session.drain()
    read(session, plain(1), is_end=True)  # a read that was under way
    session.keep()
    assert (session.state, session.may_start) == ("ended", True)


def test_a_shard_that_failed_is_neither_kept_nor_closed():
    session = make_session(order="key")
    read(session, plain(1, "a"), plain(2, "b"), is_end=True)
    first, second = session.next_work(0), session.next_work(0)
    session.retry_at(first, 0)
    session.stop(StoppedByCrashes(owner_count=1), first.records[0])
    session.stop(StoppedByCrashes(owner_count=2), second.records[0])
    session.drain()
    session.keep()
    session.finish(second)
    assert not session.close()
    assert session.begin_stop()
    assert not session.begin_stop()
    assert session.stopped.reason.owner_count == 1  # the first failure is the one that is reported


def test_the_end_of_a_shard_is_written_once_also_while_it_drains():
    session = make_session(order="key")
    read(session, plain(1), is_end=True)
    work = session.next_work(0)
    session.drain()
    assert not session.close()
    session.finish(work)
    assert session.close()
    assert not session.close()
    session.lose(finished=True)
    assert session.state == "finished"


def test_a_failed_batch_is_due_again_later_whole():
    session = make_session(order="batch")
    read(session, plain(1), plain(2), is_end=True)
    work = session.next_work(0)
    session.retry_at(work, 500)
    assert session.next_work(499) is None
    assert session.next_work_at_ms(0) == 500
    assert session.only_failing is None  # its records can still be tried alone
    again = session.next_work(500)
    assert (again.records, again.attempts) == (work.records, 1)
    session.give_back(again)
    assert session.next_work(500).attempts == 1


def test_an_isolated_shard_waits_for_the_commit_of_each_record():
    session = make_session(order="key")
    session.isolate(isolated=True)
    read(session, plain(1, "a"), plain(2, "b"))
    session.finish(session.next_work(0))
    assert session.next_work(0) is None
    assert session.upcoming(0, 10) == []
    session.committed(1)
    assert session.next_work(0) is not None


def test_an_empty_page_is_news_only_when_a_commit_would_differ():
    session = make_session(order="key")
    hear(session, answer(), NOW)
    assert session.has_unwritten_progress  # the row does not say until when everything was seen
    row, _ = session.plan_commit(0)
    session.holding.row = row
    hear(session, answer(), NOW + 1)
    assert not session.has_unwritten_progress
    hear(session, answer(), NOW + 3601)
    assert session.has_unwritten_progress
