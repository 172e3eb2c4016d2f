"""Fleets of real processes on Redis: a short run of all faults, a Redis that forgets everything, and a fail-over."""

import asyncio
from pathlib import Path

import pytest
import redis_failover
import store_chaos
from worker_fleet import Fleet
from worker_process import WorkerOptions

from patience import PATIENCE

from services import RedisServerProcess
from stream_world import stream_world

pytestmark = [pytest.mark.long, pytest.mark.services, pytest.mark.timeout(300)]


def test_a_fleet_keeps_every_promise_while_workers_are_killed_and_cut_off_and_redis_is_killed(tmp_path):
    found = asyncio.run(store_chaos.run_chaos("redis", str(tmp_path), seconds=20, seed=3, patience=150, workers=3))
    print(store_chaos.describe("redis", found))
    assert found.report.ok, found.report
    assert found.report.zombie_count == 0


async def ended(worker):
    async with asyncio.timeout(PATIENCE):
        await worker.process.wait()
    return worker.process.returncode


@pytest.mark.parametrize("how", ["emptied", "restarted without its file"])
def test_a_redis_that_forgets_everything_stops_its_workers_loudly_and_gets_no_new_application(tmp_path, how):
    async def main():
        with RedisServerProcess(tmp_path / "redis") as server:
            options = WorkerOptions(stream="orders", app="billing", folder=str(tmp_path), leases=server.leases())
            async with stream_world(shards=2) as world, Fleet(options, world.kinesis.environment()) as fleet:
                workers = await fleet.join(2)
                if how == "emptied":
                    server.call("FLUSHALL")
                else:
                    server.kill()
                    server.forget()
                    server.start()
                assert [await ended(worker) for worker in workers] == [1, 1]
                for worker in workers:
                    text = Path(tmp_path, worker.name).read_text()  # noqa: ASYNC240 -- a moment
                    assert "the lease store no longer holds application 'billing' as this worker knows it" in text
                assert fleet.events("StoreReset")
                assert server.call("KEYS", "*app") == []

    asyncio.run(main())


def test_a_worker_that_is_cut_off_with_the_old_primary_stops_before_its_successor_begins(tmp_path):
    found = asyncio.run(redis_failover.run_failover(str(tmp_path), "?replicas=1", seconds=15))
    print(redis_failover.describe(found))
    assert found.report.ok, found.report
    assert found.stale_starts == 0
