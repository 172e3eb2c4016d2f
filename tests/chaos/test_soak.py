"""The chaos runs at full size, minutes each: `make test-long`, or `make test-long ONLY=fleet` for one of them."""

import asyncio

import fleet_chaos
import flood
import pytest
import restarts

from anabranch.limits import MIB

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1_800)]


def test_fleet_of_eight_processes_for_two_minutes_of_kills_stops_splits_and_merges(tmp_path):
    found = asyncio.run(fleet_chaos.run_chaos(str(tmp_path), seconds=120, seed=2, patience=180))
    print(fleet_chaos.describe(found))
    assert found.report.ok, found.report
    assert found.report.zombie_count == 0


@pytest.mark.parametrize("order, aggregate", [("shard", False), ("key", True)])
def test_restarts_of_one_worker_over_a_million_records(tmp_path, order, aggregate):
    found = asyncio.run(
        restarts.run_restarts(str(tmp_path), records=1_000_000, order=order, aggregate=aggregate, seed=3, patience=1500)
    )
    print(restarts.describe(found))
    assert found.report.ok, found.report
    assert found.report.zombie_count == 0


def test_flood_of_a_minute_against_a_handler_that_sleeps(tmp_path):
    held, total_bytes = asyncio.run(flood.run_flood(str(tmp_path), shards=8, budget_bytes=256 * MIB, seconds=60))
    print(flood.describe(held, total_bytes))
    assert held.handled_count
    assert held.peak_bytes <= held.limit_bytes < total_bytes
