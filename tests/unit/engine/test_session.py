"""Sessions: what counts as handled, what may have been lost, and the bytes they release."""

import pytest

from anabranch._core.handling.batches import BatchLane, BatchLimits
from anabranch._core.handling.lanes import RecordLane
from anabranch._core.leases.lease_table import Holding
from anabranch._core.reading.horizon import HORIZON_MARGIN_SECONDS, TrimHorizon
from anabranch._core.reading.pace import Pace, PaceLimits
from anabranch._core.reading.window import Unpacker
from anabranch._engine.session import Session
from anabranch._model.leases import Checkpoint, LeaseKey, LeaseRow
from anabranch._model.streams import Position, StreamName
from anabranch._wire.messages import GetRecordsResponse
from anabranch.budget import READ_RESERVE_BYTES, Budget
from shard_records import SHARD, STREAM, plain


def make_session(order="key", checkpoint=None, until_seconds=None, waits_for=()):
    key = LeaseKey("1:orders:1", 0, SHARD)
    row = LeaseRow(key=key, checkpoint=checkpoint or Checkpoint(), waits_for=waits_for)
    unpacker = Unpacker(STREAM, SHARD, None, until_seconds=until_seconds)
    session = Session(Holding(row), StreamName(STREAM), unpacker, Pace(PaceLimits(), 0), Budget(), TrimHorizon(24, 0.0))
    if order == "batch":
        session.lane = BatchLane(row.checkpoint, session.window, BatchLimits())
    else:
        session.lane = RecordLane(row.checkpoint, order, session.window)
    return session


def read(session, *records):
    assert session.budget.try_reserve(READ_RESERVE_BYTES)
    session.accept(list(records), READ_RESERVE_BYTES)


def handle_all(session):
    while (entry := session.lane.next(0)) is not None:
        session.lane.finish(entry)
    session.settle()


def test_a_shard_is_exhausted_when_it_has_ended_and_all_of_it_is_finished():
    session = make_session()
    read(session, plain(1), plain(2))
    session.move("end")
    assert not session.is_exhausted
    handle_all(session)
    assert session.is_exhausted


def test_a_shard_whose_end_lies_after_the_end_time_is_at_its_tip_and_not_exhausted():
    session = make_session(until_seconds=2.0)
    read(session, plain(1), plain(2), plain(3))
    session.move("end")
    handle_all(session)
    assert session.lane.finished_count == 1
    assert not session.is_exhausted  # otherwise it would be finished without records 2 and 3
    assert session.is_at_tip


@pytest.mark.parametrize("order", ["shard", "key", "none", "batch"])
@pytest.mark.parametrize("move", ["stop", "lose"])
def test_a_shard_that_stands_still_holds_no_bytes_and_can_still_be_committed(order, move):
    session = make_session(order)
    read(session, *(plain(number, key) for number, key in enumerate("aabacab", 1)))
    read(session, plain(8))
    lane = session.lane
    if order == "batch":
        lane.next(0, ended=True)
        lane.finish_through(2)
    else:
        first = lane.next(0)
        lane.next(0)
        lane.finish(first)
    session.settle()
    committed, finished_count = lane.checkpoint(), lane.finished_count
    session.move(move)
    session.empty()
    assert session.budget.used_bytes == session.state(None).held_bytes == 0
    assert (lane.checkpoint(), lane.finished_count) == (committed, finished_count)
    assert (lane.unfinished_count, lane.running_count, lane.first_unfinished) == (0, 0, None)
    assert (lane.next(9999, ended=True) if order == "batch" else lane.next(9999)) is None


def test_a_read_that_arrives_after_everything_was_forgotten_costs_nothing():
    session = make_session()
    session.empty()
    read(session, plain(1))
    assert session.budget.used_bytes == 0


DAY = 24 * 3600.0
NOW = 100 * DAY


def answer(*records, behind_ms=0, following="next"):
    return GetRecordsResponse(list(records), following, behind_ms)


def hear(session, response, server_seconds):
    """One read, as the poller makes it. Returns whether records may have been lost before it."""
    lost = session.may_have_lost(response, server_seconds)
    session.record_read(response, server_seconds)
    read(session, *response.records)
    return lost


def test_a_shard_is_read_through_until_the_answers_time_less_what_it_lies_behind():
    session = make_session()
    assert session.read_through_seconds is None
    hear(session, answer(plain(1), behind_ms=60_000), NOW)
    assert session.read_through_seconds == NOW - 60
    hear(session, answer(behind_ms=None), NOW + 1)
    hear(session, answer(behind_ms=90_000), NOW + 1)
    assert session.read_through_seconds == NOW - 60
    hear(session, answer(), NOW + 2)
    assert session.read_through_seconds == NOW + 2


def test_the_answer_that_closes_a_shard_counts_by_its_records():
    session = make_session()
    hear(session, answer(), 5.0)
    hear(session, answer(plain(7), following=None), NOW)
    assert session.read_through_seconds == plain(7).arrival_seconds
    session = make_session()
    hear(session, answer(), 5.0)
    hear(session, answer(following=None), NOW)
    assert session.read_through_seconds == 5.0


def test_a_reader_that_stood_still_beyond_the_retention_may_have_lost_records_once():
    session = make_session()
    assert not hear(session, answer(plain(1)), NOW)
    assert not hear(session, answer(), NOW + DAY - 1)
    assert not hear(session, answer(), NOW + 2 * DAY - 2)
    assert hear(session, answer(plain(2)), NOW + 3 * DAY - 2)
    assert not hear(session, answer(plain(3)), NOW + 3 * DAY)


def test_a_reader_at_the_horizon_is_given_a_few_seconds():
    session = make_session()
    day_ms = round(DAY * 1000)
    assert not hear(session, answer(behind_ms=day_ms), NOW)
    assert not hear(session, answer(behind_ms=day_ms), NOW + HORIZON_MARGIN_SECONDS - 1)
    assert hear(session, answer(behind_ms=day_ms), NOW + 2 * HORIZON_MARGIN_SECONDS)


def test_an_answer_that_comes_after_a_look_at_the_stream_was_read_through_until_its_own_time():
    session = make_session()
    hear(session, answer(plain(1)), NOW)
    session.horizon.observe(24, NOW + DAY)
    hear(session, answer(), NOW + 1)  # records of the next five seconds may be trimmed by then
    assert session.read_through_seconds == NOW + 1
    assert hear(session, answer(plain(3)), NOW + DAY + 2)


def test_a_child_is_judged_by_the_time_until_which_its_parent_was_read():
    born = Checkpoint(seen_through_seconds=NOW)
    assert not hear(make_session(checkpoint=born), answer(plain(1)), NOW + DAY - 1)
    assert hear(make_session(checkpoint=born), answer(plain(1)), NOW + DAY)
    assert not hear(make_session(), answer(plain(1)), NOW + DAY)  # a root: what was there before is unknown


def test_a_child_of_which_nobody_knows_since_when_it_is_unread_may_have_lost_records_once():
    session = make_session(waits_for=("shardId-000000000000",))
    assert hear(session, answer(), NOW)
    assert not hear(session, answer(plain(1)), NOW + 1)


def test_an_empty_root_that_has_ended_was_read_until_the_horizon_and_its_children_are_unread_since_then():
    session = make_session()
    assert not hear(session, answer(following=None), NOW)
    assert session.read_through_seconds == NOW - DAY + HORIZON_MARGIN_SECONDS


@pytest.mark.parametrize("seen_through", [None, NOW])
def test_a_shard_whose_checkpoint_is_still_there_has_lost_nothing(seen_through):
    session = make_session(checkpoint=Checkpoint(watermark=Position(3), seen_through_seconds=seen_through))
    assert not hear(session, answer(behind_ms=5), NOW + 2 * DAY)  # empty, but not at the tip yet
    assert session.read_through_seconds == seen_through
    assert not hear(session, answer(plain(3)), NOW + 2 * DAY)
    assert session.read_through_seconds == NOW + 2 * DAY


@pytest.mark.parametrize("response", [answer(plain(4)), answer(), answer(behind_ms=7, following=None)])
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
    session = make_session()
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
    session, looks = make_session("shard"), []
    session.on_settled = lambda: looks.append(session.busy_bytes)
    read(session, plain(1), plain(2), plain(3))
    session.read_below_bytes = session.busy_bytes - 1
    session.settle()
    assert looks == []
    handle_all(session)
    assert looks == [0]


def test_what_waits_behind_a_busy_key_does_not_keep_a_shard_from_being_read():
    session, looks = make_session("key"), []
    session.on_settled = lambda: looks.append(session.busy_bytes)
    read(session, plain(1, "a"), plain(2, "a"), plain(3, "a"))
    session.read_below_bytes = held = session.busy_bytes
    assert session.lane.next(0) is not None
    assert session.lane.next(0) is None  # the others were held back
    session.settle()
    assert looks == [session.busy_bytes]
    assert session.busy_bytes < held
