"""Fleets of real processes: recovery times against three times their bounds, and a short run of everything at once."""

import asyncio

import fleet_chaos
import pytest
import recovery

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TOLERANCE = 3
BUSY_SECONDS = 5.0
"""What a busy machine may add. The shortest wait that must not show, for a lease to expire, takes ten."""
CLEAN = ("join", "clean stop", "rolling restart")


def test_shards_are_read_again_within_three_times_the_promised_times_and_clean_moves_repeat_nothing(tmp_path):
    measured, report = asyncio.run(recovery.run_recovery(str(tmp_path), workers=3, shards=12))
    print(recovery.describe(measured))
    assert report.ok, report
    late = {
        what: seconds
        for what, seconds in measured.seconds.items()
        if seconds > max(TOLERANCE * recovery.BOUNDS_SECONDS[what], recovery.BOUNDS_SECONDS[what] + BUSY_SECONDS)
    }
    assert not late
    assert measured.seconds.keys() == recovery.BOUNDS_SECONDS.keys()
    assert {what: measured.repeats[what] for what in CLEAN} == dict.fromkeys(CLEAN, 0)


def test_eight_workers_keep_every_promise_while_they_are_killed_and_stopped_and_32_shards_split_and_merge(tmp_path):
    found = asyncio.run(fleet_chaos.run_chaos(str(tmp_path), seconds=25, seed=1, patience=90))
    print(fleet_chaos.describe(found))
    assert found.report.ok, found.report
    assert found.gaps[-1] < TOLERANCE * recovery.BOUNDS_SECONDS["SIGSTOP"]
