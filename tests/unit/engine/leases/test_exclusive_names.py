"""A worker whose name nobody else may have: its earlier lives are over in the moment that it starts (rule L17)."""

import asyncio
import random

import pytest
from msgspec.structs import replace

from anabranch._core.leases.timing import lease_timing
from anabranch._engine.leases.admission import seal_namesakes
from anabranch._engine.leases.member import Member, MemberProfile
from anabranch._engine.ports import Ports
from anabranch._model.leases import AppRow, HeartbeatWrite, MemberRow
from anabranch.config import LeaseSettings
from anabranch.errors import ConfigurationError
from anabranch.events import MemberSealed
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.testing.clock import ManualClock

from stream_world import run

EARLIER = MemberRow(member_id="pod-0#1", worker_id="pod-0", expiry_ms=10_000, fingerprint="order shard", counter=7)
NEIGHBOUR = replace(EARLIER, member_id="pod-1#1", worker_id="pod-1", fingerprint="order key")


def look_around(store, *, is_exclusive):
    happened = []

    async def main():
        await store.open(AppRow(app="billing", app_id="1", created_wall_ms=1))
        for row in (EARLIER, NEIGHBOUR):
            await store.register_member(row)
        ports = Ports(kinesis=None, store=store, clock=ManualClock(), entropy=random.Random(1), emit=happened.append)
        profile = MemberProfile(worker_id="pod-0", fingerprint="order key", is_exclusive=is_exclusive)
        async with asyncio.TaskGroup() as group:
            member = Member(ports, lease_timing(), profile, group, stall_limit_ms=120_000)
            async with asyncio.timeout(0.05 if not is_exclusive else 5):
                await member.look_around()

    run(main)
    return happened


def states(store):
    return {member_id: row.state for member_id, row in store._members.items()}


def test_the_earlier_life_of_an_exclusive_name_is_sealed_at_once_and_refuses_nobody():
    store = MemoryLeaseStore()
    assert look_around(store, is_exclusive=True) == [MemberSealed(member_id="pod-0#1")]
    assert states(store) == {"pod-0#1": "sealed", "pod-1#1": "live"}


def test_without_that_word_it_is_waited_for():
    store = MemoryLeaseStore()
    with pytest.raises(BaseExceptionGroup) as caught:
        look_around(store, is_exclusive=False)
    assert caught.group_contains(TimeoutError)
    assert states(store) == {"pod-0#1": "live", "pod-1#1": "live"}


class LateHeartbeats(MemoryLeaseStore):
    """A heartbeat that was on its way arrives between the look and the seal."""

    def __init__(self, count):
        super().__init__()
        self._left = count

    async def seal_member(self, member_id, observed_counter):
        if self._left:
            self._left -= 1
            await self.heartbeat(HeartbeatWrite(member_id=member_id, attempt=observed_counter + 1))
        return await super().seal_member(member_id, observed_counter)


@pytest.mark.parametrize("late, state", [(1, "sealed"), (3, "live")])
def test_a_late_heartbeat_delays_the_seal_and_one_that_goes_on_beating_is_left_to_its_expiry(late, state):
    store, happened = LateHeartbeats(late), []

    async def main():
        await store.open(AppRow(app="billing", app_id="1", created_wall_ms=1))
        await store.register_member(EARLIER)
        ports = Ports(kinesis=None, store=store, clock=ManualClock(), entropy=random.Random(1), emit=happened.append)
        await seal_namesakes(ports, "pod-0", lease_timing())

    run(main)
    assert states(store) == {"pod-0#1": state}
    assert bool(happened) == (state == "sealed")


def test_an_exclusive_name_must_be_given():
    with pytest.raises(ConfigurationError, match="worker_id_exclusive needs a worker_id"):
        LeaseSettings(worker_id_exclusive=True)
