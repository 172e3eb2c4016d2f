"""The watch over the main loop: it reports a blocked loop, and only a blocked one."""

import asyncio
import threading
import time

import pytest

from anabranch._engine import fleet
from anabranch._engine.clock import SystemClock
from anabranch._engine.fleet import HeartbeatThread
from anabranch.events import LoopBlocked, LoopStalled, LoopUnblocked

from stream_world import run, until


async def no_heartbeats():
    await asyncio.Event().wait()


class SuspendingClock(SystemClock):
    """The machine is suspended during every other sleep of the watch; in the next one the main loop turns again."""

    def __init__(self):
        self.suspended_ms = 0
        self.sleeps = 0
        self.wake_main_loop = lambda: None

    def now_ms(self):
        return super().now_ms() + self.suspended_ms

    async def sleep_until_ms(self, at_ms):
        await super().sleep_until_ms(at_ms)
        self.sleeps += 1
        if self.sleeps % 2:
            self.suspended_ms += 60_000
        else:
            self.wake_main_loop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(fleet, "LOOK_EVERY_MS", 10)
    monkeypatch.setattr(fleet, "BLOCKED_AFTER_MS", 60)


@pytest.fixture
def said():
    return []


def block_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("event, stall_limit_ms", [(LoopBlocked, 3_600_000), (LoopStalled, 100)])
def test_a_blocked_loop_is_named_with_its_stack_and_so_is_one_whose_shards_are_given_up(said, event, stall_limit_ms):
    async def main():
        thread = HeartbeatThread(SystemClock(), stall_limit_ms, said.append)
        thread.start(no_heartbeats)
        block_until(lambda: any(isinstance(one, event) for one in said))
        thread.stop()
        assert thread.is_stalled() == (event is LoopStalled)
        assert __file__ in said[-1].stack, "on a busy machine it may stand before or after block_until"
        assert str(said[-1].blocked_ms) in str(said[-1])

    run(main)


def test_a_loop_that_runs_again_is_said_to_once(said):
    async def main():
        thread = HeartbeatThread(SystemClock(), 3_600_000, said.append)
        thread.start(no_heartbeats)
        block_until(lambda: said)

        def has_ended():
            thread.tick()
            return any(isinstance(one, LoopUnblocked) for one in said)

        await until(has_ended, "the end of it")
        thread.stop()
        assert isinstance(said[0], LoopBlocked)
        assert said[-1].blocked_ms >= 60
        assert sum(isinstance(one, LoopUnblocked) for one in said) == 1

    run(main)


def test_a_process_that_was_stopped_is_not_said_to_be_blocked(said):
    async def main():
        clock = SuspendingClock()
        thread = HeartbeatThread(clock, 1_000, said.append)
        clock.wake_main_loop = thread.tick
        thread.start(no_heartbeats)
        await until(lambda: clock.sleeps > 10, "some looks")
        thread.stop()
        assert said == []

    run(main)


def test_a_thread_that_cannot_start_leaves_no_caller_waiting(monkeypatch):
    def fail(coroutine):
        coroutine.close()
        raise OSError("too many open files")

    monkeypatch.setattr(fleet.asyncio, "run", fail)
    thread = HeartbeatThread(SystemClock(), 1_000, lambda event: None)
    thread.start()
    thread._thread.join()
    assert "too many open files" in str(thread.failure)
    assert thread.restart_reason == "the heartbeat thread has ended: OSError('too many open files')"


def test_a_loop_that_is_blocked_for_too_long_is_a_reason_to_restart_and_a_shorter_time_is_not():
    thread = HeartbeatThread(SystemClock(), 100, lambda event: None)
    assert thread.restart_reason is None
    block_until(thread.is_stalled)
    assert thread.restart_reason == "the event loop has been blocked for longer than 0.1 s"
    thread.tick()
    assert thread.restart_reason is None


def test_nothing_is_renewed_for_a_thread_that_is_gone():
    made = []
    owner = threading.Thread(target=lambda: made.append(HeartbeatThread(SystemClock(), 3_600_000, lambda event: None)))
    owner.start()
    owner.join()
    assert made[0].is_stalled()
    assert "is gone" in made[0]._stack()
