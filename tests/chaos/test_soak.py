"""The chaos runs at full size, minutes each: `make test-long`, or `make test-long ONLY=fleet` for one of them."""

import asyncio

import fleet_chaos
import flood
import namespaces
import pytest
import redis_failover
import restarts
import s3_takeover
import store_chaos

from anabranch.limits import MIB

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1_800)]


def test_fleet_of_eight_processes_for_two_minutes_of_kills_stops_splits_and_merges(tmp_path):
    found = asyncio.run(fleet_chaos.run_chaos(str(tmp_path), seconds=120, seed=2, patience=180))
    print(fleet_chaos.describe(found))
    assert found.report.ok, found.report
    assert found.report.zombie_count == 0


@pytest.mark.parametrize("kind", ["dynamodb", "redis"])
def test_fleet_on_a_store_for_two_minutes_of_kills_stops_cuts_and_a_store_that_is_killed(tmp_path, kind):
    found = asyncio.run(store_chaos.run_chaos(kind, str(tmp_path), seconds=120, seed=2, patience=240))
    print(store_chaos.describe(kind, found))
    assert found.report.ok, found.report
    assert found.report.zombie_count == 0


def test_fleet_on_redis_whose_replica_becomes_the_primary_while_a_worker_stays_with_the_old_one(tmp_path):
    found = asyncio.run(redis_failover.run_failover(str(tmp_path), "?replicas=1", seconds=60))
    print(redis_failover.describe(found))
    assert found.report.ok, found.report
    assert found.stale_starts == 0


def test_fleet_on_redis_without_acknowledging_replicas_has_two_owners_until_the_old_primary_is_gone(tmp_path):
    """What `accept_loss` accepts."""
    found = asyncio.run(redis_failover.run_failover(str(tmp_path), "?durability=accept_loss", seconds=60))
    print(redis_failover.describe(found))
    assert found.report.lost_count == 0, found.report
    assert found.stale_starts > 0


def test_fleet_on_redis_that_is_restored_from_a_backup_continues_from_there(tmp_path):
    found = asyncio.run(redis_failover.run_restored(str(tmp_path)))
    print(f"Redis restored: all shards went on after {found.taken_seconds:.1f} s; {found.report}")
    assert found.report.ok, found.report
    assert found.stale_starts == 0


def test_worker_on_s3_is_killed_and_started_again_and_a_second_one_takes_over(tmp_path):
    found = asyncio.run(s3_takeover.run_takeover(str(tmp_path)))
    print(s3_takeover.describe(found))
    assert found.lost_count == 0
    assert found.first_exit_code == 1
    assert "has written the positions of application 'billing'" in found.first_words


def test_fleet_on_two_machines_of_which_one_is_cut_off_for_thirty_seconds(tmp_path):
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    found = asyncio.run(namespaces.run_cut_off(str(tmp_path)))
    print(namespaces.describe(found))
    assert found.report.ok, found.report
    assert (found.report.zombie_count, found.late_starts) == (0, 0)


@pytest.mark.parametrize("order, aggregate", [("shard", False), ("key", True)])
def test_restarts_of_one_worker_over_a_million_records(tmp_path, order, aggregate):
    found = asyncio.run(
        restarts.run_restarts(str(tmp_path), records=1_000_000, order=order, aggregate=aggregate, seed=3, patience=1500)
    )
    print(restarts.describe(found))
    assert found.report.ok, found.report
    assert found.report.zombie_count == 0


def test_flood_of_a_minute_against_a_handler_that_sleeps(tmp_path):
    held, total_bytes = asyncio.run(
        flood.run_flood(str(tmp_path), reads="polling", shards=8, budget_bytes=256 * MIB, seconds=60)
    )
    print(flood.describe(held, total_bytes))
    assert held.handled_count
    assert held.peak_bytes <= held.limit_bytes < total_bytes
