"""Suspects are handled alone; then the other shards continue."""

import asyncio
import random
from types import SimpleNamespace

from anabranch._engine.quarantine import CHECK_MS, Quarantine
from anabranch._engine.work_queue import WorkQueue
from anabranch._ports import Ports
from anabranch.testing import ManualClock
from held_sessions import make_session, read
from shard_records import plain

from stream_world import run, until


def test_the_others_continue_when_a_suspect_was_lost_in_its_turn_and_its_last_call_has_ended():
    async def main():
        clock, offered, running = ManualClock(), [], []

        async def agree(*_):
            return "written"

        changes = SimpleNamespace(finished=lambda session: None)
        queue = WorkQueue(clock, None, SimpleNamespace(may_start=lambda: True), changes, False)
        queue.offer = offered.append
        processor = SimpleNamespace(manual_ack=False, running=lambda: running, queue=queue)
        suspect, other = make_session(0, takes_without_progress=3), make_session(1, takes_without_progress=1)
        sessions = {suspect.key: suspect, other.key: other}
        quarantine = Quarantine(
            Ports(kinesis=None, store=None, clock=clock, entropy=random.Random(1), emit=[].append),
            SimpleNamespace(is_performing=False, write=agree),
            SimpleNamespace(commit_all=agree, lock=lambda session: asyncio.Lock()),
            processor,
            changes,
            sessions,
        )
        for session in (suspect, other):
            read(session, plain(1))
        quarantine.add(suspect)
        quarantine.add(other)
        task = asyncio.create_task(quarantine.run())
        await until(lambda: suspect in offered, "its turn")
        running.append("a call")
        suspect.lose()
        del sessions[suspect.key]
        quarantine.remove(suspect)
        await asyncio.sleep(0)
        clock.advance(CHECK_MS)
        for _ in range(5):
            await asyncio.sleep(0)
        assert queue.is_held(other)
        running.clear()
        quarantine.notify()
        await until(lambda: not queue.is_held(other), "the turn of the other")
        assert other in offered
        task.cancel()

    run(main)
