"""Suspects are handled alone; then the other shards go on."""

import asyncio
import random
from types import SimpleNamespace

from anabranch._core.handling.lanes import RecordLane
from anabranch._core.leases.lease_table import Holding
from anabranch._core.reading.horizon import TrimHorizon
from anabranch._core.reading.pace import Pace, PaceLimits
from anabranch._core.reading.window import Unpacker
from anabranch._engine.ports import Ports
from anabranch._engine.quarantine import CHECK_MS, Quarantine
from anabranch._engine.session import Session
from anabranch._model.leases import LeaseKey, LeaseRow
from anabranch._model.streams import StreamName
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.testing import ManualClock
from shard_records import STREAM, plain

from stream_world import run, until


def make_session(number, takes):
    shard_id = f"shardId-{number:012}"
    key = LeaseKey("1:orders:1", 0, shard_id)
    row = LeaseRow(key=key, owner="me#1", takes_without_progress=takes)
    unpacker = Unpacker(STREAM, shard_id, None)
    session = Session(Holding(row), StreamName(STREAM), unpacker, Pace(PaceLimits(), 0), Budget(), TrimHorizon(24, 0.0))
    session.lane = RecordLane(row.checkpoint, "shard", session.window)
    assert session.budget.try_reserve(READ_RESERVE_BYTES)
    session.accept([plain(1)], READ_RESERVE_BYTES)
    return session


def test_the_others_go_on_when_a_suspect_was_lost_in_its_turn_and_its_last_call_has_ended():
    async def main():
        clock, offered, running = ManualClock(), [], []

        async def agree(*_):
            return "written"

        sink = SimpleNamespace(
            manual_ack=False,
            running=lambda: running,
            before_commit=lambda: None,
            ready=SimpleNamespace(offer=offered.append),
        )
        quarantine = Quarantine(
            Ports(kinesis=None, store=None, clock=clock, entropy=random.Random(1), emit=[].append),
            SimpleNamespace(is_performing=False, write=agree),
            SimpleNamespace(commit_all=agree),
            sink,
            on_failed=lambda *_: None,
        )
        suspect, other = make_session(0, takes=3), make_session(1, takes=1)
        quarantine.add(suspect)
        quarantine.add(other)
        task = asyncio.create_task(quarantine.run())
        await until(lambda: suspect in offered, "its turn")
        running.append("a call")
        suspect.move("lose")
        quarantine.remove(suspect)
        await asyncio.sleep(0)
        clock.advance(CHECK_MS)
        for _ in range(5):
            await asyncio.sleep(0)
        assert other.held_for_isolation
        running.clear()
        quarantine.notify(suspect)
        await until(lambda: not other.held_for_isolation, "the turn of the other")
        assert other in offered
        task.cancel()

    run(main, 10)
