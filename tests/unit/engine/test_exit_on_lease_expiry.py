"""The guard that ends a process before its calls can run beside another owner's."""

import asyncio

import pytest

from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._core.leases.store_calls import Moment
from anabranch._core.leases.timing import lease_timing
from anabranch._engine.fleet import EXIT_STATUS, exit_on_lease_expiry
from anabranch._model.leases import MemberRow
from anabranch.events import ZombieCall
from anabranch.testing import ManualClock

from stream_world import run

TIMING = lease_timing()
ROW = MemberRow(member_id="a#1", expiry_ms=TIMING.expiry_ms)
CALL = ZombieCall(position="1", fence_token=7)


class Guarded:
    def __init__(self, running):
        self.clock = ManualClock(now_ms=1_000)
        self.heart = HeartbeatState("a#1", TIMING)
        self.heart.registered(ROW, "disk", Moment(self.clock.now_ms(), self.clock.wall_ms()))
        self.said, self.ended = [], []
        guard = exit_on_lease_expiry(self.heart, self.clock, lambda: running, self.said.append, self.ended.append)
        self.task = asyncio.create_task(guard)

    async def pass_time(self, by_ms):
        await asyncio.sleep(0)
        self.clock.advance(by_ms)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_a_call_that_runs_on_after_fence_and_grace_ends_the_process_before_the_expiry():
    async def main():
        guarded = Guarded([CALL])
        await guarded.pass_time(TIMING.fence_ms + TIMING.grace_ms - 1)
        assert not guarded.ended
        await guarded.pass_time(TIMING.slack_ms // 2)
        assert guarded.ended == [EXIT_STATUS]
        assert guarded.said == [CALL]
        assert guarded.clock.now_ms() - 1_000 < TIMING.expiry_ms * 99 // 100

    run(main)


@pytest.mark.parametrize("why", ["nothing runs", "a later heartbeat was answered", "it has left"])
def test_the_process_continues_where(why):
    async def main():
        guarded = Guarded([] if why == "nothing runs" else [CALL])
        await guarded.pass_time(TIMING.fence_ms - 100)
        if why == "a later heartbeat was answered":
            guarded.heart.begin(guarded.clock.now_ms(), guarded.clock.wall_ms())
            guarded.heart.answered(ROW)
        elif why == "it has left":
            guarded.heart.end("left")
        await guarded.pass_time(TIMING.grace_ms + TIMING.slack_ms)
        assert not guarded.ended
        assert guarded.task.done() == (why == "it has left")
        guarded.task.cancel()

    run(main)


def test_a_call_of_a_member_that_was_ended_counts_from_its_last_fence():
    async def main():
        guarded = Guarded([CALL])
        await guarded.pass_time(1)
        guarded.heart.end("sealed")
        await guarded.pass_time(TIMING.fence_ms + TIMING.grace_ms + TIMING.slack_ms)
        assert guarded.ended == [EXIT_STATUS]

    run(main)
