"""The asyncio driver of the lease machine: what a fork inherits of it."""

import asyncio
import os
import random

import pytest

from anabranch._core.leases.machine import MemberProfile
from anabranch._core.leases.plan import Write
from anabranch._core.leases.store_calls import Description
from anabranch._core.leases.timing import lease_timing
from anabranch._engine.fleet import Fleet
from anabranch._model.leases import LeaseKey, LeaseRow
from anabranch._ports import Ports
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.testing import ManualClock
from lease_machine_driver import APP, STREAM

from stream_world import run, until

KEY = LeaseKey("1:orders:1", 0, "shardId-000000000000")


def make_fleet(store, group, changes):
    ports = Ports(kinesis=None, store=store, clock=ManualClock(), entropy=random.Random(1), emit=lambda event: None)
    return Fleet(
        ports,
        lease_timing(),
        MemberProfile(worker_id="w"),
        group,
        stall_limit_ms=120_000,
        on_change=changes.append,
        on_status=lambda: None,
        describe=Description,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_no_member_and_writes_nothing():
    async def main():
        store, changes = MemoryLeaseStore(), []
        async with asyncio.TaskGroup() as group:
            fleet = make_fleet(store, group, changes)
            await fleet.open(APP, "memory", may_create=True)
            await store.put_stream(STREAM)
            await store.create_lease(LeaseRow(key=KEY))
            await fleet.join((STREAM.stream_key,))
            rounds = group.create_task(fleet.run())
            await until(lambda: bool(changes), "the lease, while no time passes")
            row = changes[0].holding.row
            step = Write(row, row.version)
            child = os.fork()
            if child == 0:
                os._exit(10 + fleet.may_start() + 2 * (await fleet.write(step) != "lost"))
            _, status = os.waitpid(child, 0)  # noqa: ASYNC222 -- it ends at once
            assert os.waitstatus_to_exitcode(status) == 10
            assert fleet.may_start()
            assert await fleet.write(step) == "written"
            rounds.cancel()
            fleet.close()

    run(main)
