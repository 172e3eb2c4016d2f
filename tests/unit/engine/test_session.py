"""One holding of one shard: what it counts as handled, and the bytes that it gives back."""

import pytest

from anabranch._core.handling.batches import BatchLane, BatchLimits
from anabranch._core.handling.lanes import Lane
from anabranch._core.leases.book import Holding
from anabranch._core.reading.pace import Pace, PaceLimits
from anabranch._core.reading.unpacking import Unpacker
from anabranch._engine.session import Session
from anabranch._model.leases import Checkpoint, LeaseKey, LeaseRow
from anabranch._model.streams import StreamName
from anabranch.budget import READ_RESERVE_BYTES, Budget
from shard_records import SHARD, STREAM, plain


def make_session(order="key", checkpoint=None, until_seconds=None):
    row = LeaseRow(key=LeaseKey("1:orders:1", 0, SHARD), checkpoint=checkpoint or Checkpoint())
    unpacker = Unpacker(STREAM, SHARD, None, until_seconds=until_seconds)
    session = Session(Holding(row), StreamName(STREAM), unpacker, Pace(PaceLimits(), 0), Budget())
    if order == "batch":
        session.lane = BatchLane(row.checkpoint, session.window, BatchLimits())
    else:
        session.lane = Lane(row.checkpoint, order, session.window)
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
    assert not session.is_exhausted  # else it would be written as finished, and records 2 and 3 were lost
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
    assert session.budget.used_bytes == session.state().held_bytes == 0
    assert (lane.checkpoint(), lane.finished_count) == (committed, finished_count)
    assert (lane.unfinished_count, lane.running_count, lane.first_unfinished) == (0, 0, None)
    assert (lane.next(9999, ended=True) if order == "batch" else lane.next(9999)) is None


def test_a_read_that_arrives_after_everything_was_forgotten_costs_nothing():
    session = make_session()
    session.empty()
    read(session, plain(1))
    assert session.budget.used_bytes == 0


def test_the_time_that_a_shard_was_seen_through_is_noted_once_an_hour():
    session = make_session()
    session.behind_ms = 0
    session.note_idle(None)
    assert session.seen_through_seconds is None
    session.note_idle(1000.0)
    session.note_idle(1001.0)
    assert session.seen_through_seconds == 1000.0
    session.note_idle(4600.0)
    assert session.seen_through_seconds == 4600.0


def test_a_new_owner_goes_by_the_time_that_the_row_has():
    session = make_session(checkpoint=Checkpoint(seen_through_seconds=1000.0))
    session.behind_ms = 0
    session.note_idle(2000.0)
    assert session.seen_through_seconds is None


def test_nothing_is_seen_through_while_something_that_was_read_is_unhandled():
    session = make_session()
    session.behind_ms = 0
    read(session, plain(1))
    session.note_idle(1000.0)
    assert session.seen_through_seconds is None
    handle_all(session)
    session.behind_ms = 5
    session.note_idle(1000.0)
    assert session.seen_through_seconds is None


def test_nothing_is_seen_through_when_records_were_left_alone():
    session = make_session(until_seconds=1.0)
    session.behind_ms = 0
    read(session, plain(1))
    handle_all(session)
    session.note_idle(1000.0)
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
