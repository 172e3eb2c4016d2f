"""Commits: an unreachable store, and what a stopped shard writes."""

import asyncio

import pytest
from msgspec.structs import replace

from anabranch._core.session import SEEN_THROUGH_EVERY_SECONDS
from anabranch._engine.checkpointer import WRITES_AT_ONCE, Checkpointer
from anabranch._engine.work_queue import Processor
from anabranch._model.leases import Finish, Stopped
from anabranch._model.streams import Position
from anabranch._ports import Ports
from anabranch.config import CheckpointSettings
from anabranch.reasons import StoppedByCrashes
from anabranch.testing import ManualClock
from held_sessions import make_session, read, stop
from shard_records import plain

from stream_world import run, until


class Leases:
    """Only the writes of a fleet: each has the same outcome."""

    def __init__(self, outcome):
        self.outcome = outcome
        self.written = []
        self.holdings = {}
        self.trouble = None
        self.is_draining = False

    async def write(self, step):
        self.written.append(step.row)
        if step.row.key in self.holdings:
            self.holdings[step.row.key].row = step.row
        return self.outcome


def make_checkpointer(outcome):
    leases, happened = Leases(outcome), []
    ports = Ports(kinesis=None, store=None, clock=ManualClock(), entropy=None, emit=happened.append)
    return Checkpointer(ports, leases, CheckpointSettings(interval=1.0), Processor(None, None)), leases


def finished_session(number=0, **row):
    """A session whose only record is handled."""
    session = make_session(number, owner="me#1", **row)
    read(session, plain(1))
    session.finish(session.next_work(0))
    return session


def test_a_store_that_is_away_costs_one_deadline_and_not_one_for_each_shard():
    async def main():
        checkpointer, leases = make_checkpointer("unknown")
        for number in range(3 * WRITES_AT_ONCE):
            checkpointer.mark_dirty(finished_session(number))
        assert not await checkpointer.commit_all()
        first = [row.key for row in leases.written]
        assert len(first) == WRITES_AT_ONCE
        leases.outcome = "written"
        assert await checkpointer.commit_all()
        assert leases.written[WRITES_AT_ONCE].key not in first  # those not tried go first
        assert len({row.key for row in leases.written[WRITES_AT_ONCE:]}) == 3 * WRITES_AT_ONCE

    run(main)


def test_a_store_that_refuses_at_once_is_asked_once_an_interval_however_much_is_finished():
    async def main():
        checkpointer, leases = make_checkpointer("unknown")
        session, clock = finished_session(), checkpointer._ports.clock
        session.isolate(isolated=True)  # every finished record asks for a commit
        running = asyncio.create_task(checkpointer.run())
        for second in range(1, 4):
            for _ in range(20):
                checkpointer.mark_dirty(session)
                await asyncio.sleep(0)
            assert len(leases.written) == second
            clock.advance(1_000)
        running.cancel()

    run(main)


def test_a_stopped_shard_writes_nothing_more():
    async def main():
        stopped = Stopped(
            reason=StoppedByCrashes(owner_count=5), position=None, partition_key=None, member_id="me#1", at_wall_ms=0
        )
        checkpointer, leases = make_checkpointer("written")
        session = finished_session(stopped=stopped, takes_without_progress=6)
        stop(session)
        assert await checkpointer.write(session) == "written"
        assert not leases.written

    run(main)


def test_a_stop_ends_the_count_of_owners_without_progress():
    checkpointer, _ = make_checkpointer("written")
    session = finished_session(takes_without_progress=6)
    session.stop(StoppedByCrashes(owner_count=5))
    session.begin_stop()
    stopped = session.plan_stop("me#1", 0)
    row, _ = checkpointer.plan(session)
    assert row.takes_without_progress == 0
    assert row.stopped == stopped


def test_an_owner_that_ends_or_gives_its_shard_away_in_order_is_not_counted_and_those_before_it_are():
    checkpointer, leases = make_checkpointer("written")
    session = finished_session(takes_without_progress=3)
    read(session, behind_ms=1000)
    session.holding.row = session.plan_commit(0)[0]  # nothing was finished since
    session.holding.row = replace(session.row, takes_without_progress=3)
    session.committed(1)
    assert checkpointer.plan(session)[0].takes_without_progress == 3
    # A hand-over counts the next owner instead of this one; a take counts itself.
    assert checkpointer.plan(session, transferring=True)[0].takes_without_progress == 3
    leases.is_draining = True
    assert checkpointer.plan(session)[0].takes_without_progress == 2
    session.holding.row = replace(session.row, takes_without_progress=0)
    assert checkpointer.plan(session)[0] is session.row
    session.holding.row = replace(session.row, takes_without_progress=3)
    session.count_crash(counted=False)
    assert checkpointer.plan(session)[0].takes_without_progress == 3
    leases.is_draining = False
    assert checkpointer.plan(session, transferring=True)[0].takes_without_progress == 4


def test_an_unanswered_gift_is_repeated_because_it_has_the_last_commit():
    async def main():
        checkpointer, leases = make_checkpointer("unknown")
        session = finished_session()
        session.holding.pending_transfer = replace(session.row, owner="other#1", checkpoint=session.lane.checkpoint())
        assert await checkpointer.write(session) == "unknown"
        leases.outcome = "written"
        assert await checkpointer.write(session) == "lost"  # it was given away, not committed
        assert leases.written == [session.holding.pending_transfer] * 2

    run(main)


def test_a_lane_of_one_record_at_a_time_is_committed_record_by_record():
    async def main():
        checkpointer, leases = make_checkpointer("written")
        session = finished_session(takes_without_progress=3)
        session.isolate(isolated=True)
        leases.holdings[session.key] = session.holding
        checkpointer.mark_dirty(session)
        committing = asyncio.create_task(checkpointer.run())
        await until(lambda: bool(leases.written), "the commit, while no time passes")
        committing.cancel()
        assert leases.written[0].takes_without_progress == 0

    run(main)


@pytest.mark.parametrize("draining", [False, True])
def test_a_stop_knows_of_finished_records_that_were_lost_with_their_lease(draining):
    async def main():
        checkpointer, leases = make_checkpointer("lost")
        leases.is_draining = draining
        checkpointer.mark_dirty(finished_session())
        assert await checkpointer.commit_all()  # there is nothing left to try
        assert checkpointer.has_lost == draining

    run(main)


def test_how_far_a_shard_was_seen_through_goes_with_its_commits_and_alone_once_an_hour():
    checkpointer, _ = make_checkpointer("written")
    session = finished_session()
    session.learn_read_through(1_000.0)
    row, _ = checkpointer.plan(session)
    assert row.checkpoint.seen_through_seconds == 1_000.0
    session.holding.row = row
    session.learn_read_through(1_000.0 + SEEN_THROUGH_EVERY_SECONDS - 1)
    assert checkpointer.plan(session)[0] is row
    finished, _ = checkpointer.plan(session, finish=Finish("end"))
    assert finished.checkpoint.seen_through_seconds == session.read_through_seconds  # its children need it
    session.learn_read_through(later := 1_000.0 + SEEN_THROUGH_EVERY_SECONDS)
    assert checkpointer.plan(session)[0].checkpoint.seen_through_seconds == later
    read(session, plain(2), plain(3))
    session.finish(session.next_work(0))
    session.learn_read_through(later)
    row, _ = checkpointer.plan(session)
    assert row.checkpoint.watermark == Position(2)
    assert row.checkpoint.seen_through_seconds == 1_000.0  # record 3 is not handled


def test_a_commit_whose_answer_was_lost_counts_once_its_row_is_known():
    async def main():
        checkpointer, leases = make_checkpointer("unknown")
        session = finished_session()
        leases.holdings[session.key] = session.holding  # it succeeded, and the row was read again
        assert await checkpointer.write(session) == "unknown"
        assert session.committed_count == 0
        assert await checkpointer.write(session) == "written"
        assert len(leases.written) == 1
        assert session.committed_count == session.lane.finished_count == 1

    run(main)
