"""Handlers that block the event loop of a real process."""

import asyncio

import pytest
from stalls import run_block, run_stall

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


def test_a_handler_that_sleeps_thirty_seconds_in_the_loop_loses_no_lease(tmp_path):
    events, report = asyncio.run(run_block(str(tmp_path), seconds=30))
    said = {event["kind"] for event in events}
    assert "LoopBlocked" in said
    assert not said & {"LeaseLost", "LeaseTaken", "MemberEnded", "MemberEvicted", "ZombieCall"}
    assert report.ok, report
    assert report.repeated_count == 0


def test_a_handler_that_blocks_past_the_stall_limit_gives_its_shards_up_and_is_named(tmp_path):
    said, taken_over_seconds, report = asyncio.run(run_stall(str(tmp_path), stall_limit=4, seconds=16))
    print(f"stalled after 4 s, read elsewhere after {taken_over_seconds:.1f} s")
    assert said["blocked_ms"] > 4_000
    assert "time.sleep(float(seconds))" in said["stack"]
    assert report.ok, report
