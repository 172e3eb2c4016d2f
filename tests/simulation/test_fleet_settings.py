"""Workers with different settings start at the same moment, with the real engine: those that stay agree."""

import asyncio
import random

import pytest

from anabranch._core.leases.machine import LeaseMachine, MemberProfile
from anabranch._core.leases.store_calls import Description
from anabranch._core.leases.timing import lease_timing
from anabranch._engine.fleet import Fleet
from anabranch._model.leases import AppRow
from anabranch._ports import Ports
from anabranch.errors import FleetMismatchError, LeaseStoreError
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.testing.loop import SimulationLoop, run
from anabranch.testing.world.processes import SimulatedClock

WORKERS = 4
SECONDS = 40.0


class SlowStore(MemoryLeaseStore):
    """Every call takes a while before and after its effect, and some answers are lost."""

    def __init__(self, dice):
        super().__init__()
        self._dice = dice

    async def _slowly(self, call, *arguments):
        await asyncio.sleep(self._dice.choice([0.0, 0.01, 0.3]))
        answer = await call(*arguments)
        await asyncio.sleep(self._dice.choice([0.0, 0.01, 0.3]))
        if self._dice.random() < 0.05:
            raise LeaseStoreError("the answer was lost")
        return answer

    async def poll(self):
        return await self._slowly(super().poll)

    async def register_member(self, row):
        return await self._slowly(super().register_member, row)

    async def heartbeat(self, beat):
        return await self._slowly(super().heartbeat, beat)


class Race:
    def __init__(self, seed):
        self.dice = random.Random(f"settings {seed}")
        self.loop = SimulationLoop(seed)
        self.store = SlowStore(self.dice)
        self.inside: dict[str, str] = {}
        """Workers that were admitted, with their settings."""
        self.outcomes: list[str] = []

    async def worker(self, number):
        dice = self.dice
        settings = dice.choice(["key", "shard"])
        clock = SimulatedClock(self.loop, dice.choice([-10_000, 0, 10_000]))
        ports = Ports(kinesis=None, store=self.store, clock=clock, entropy=dice, emit=lambda event: None)
        profile = MemberProfile(worker_id=f"worker-{number}", order=settings)
        await asyncio.sleep(dice.choice([0.0, 0.0, 0.1, 5.0]))
        async with asyncio.TaskGroup() as group:
            fleet = Fleet(
                ports,
                lease_timing(),
                profile,
                group,
                stall_limit_ms=120_000,
                on_change=lambda change: None,
                on_status=lambda: None,
                describe=Description,
            )
            try:
                await fleet.check_fleet()
                await fleet.join(())
            except FleetMismatchError:
                self.outcomes.append("refused")
                return
            self.inside[fleet.member_id] = settings
            assert len(set(self.inside.values())) == 1, self.inside
            self.outcomes.append("admitted")
            await asyncio.sleep(SECONDS)
            fleet.close()

    async def main(self):
        await self.store.open(AppRow(app="billing", app_id="1", created_wall_ms=0))
        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(self.worker(number))


def _race(seeds):
    """The outcomes of the workers, for each seed."""
    outcomes = []
    for seed in seeds:
        race = Race(seed)
        run(race.main, loop=race.loop)
        outcomes.append(race.outcomes)
    return outcomes


def test_workers_that_differ_never_both_stay_however_they_start():
    outcomes = _race(range(150))
    for seed, some in enumerate(outcomes):
        assert len(some) == WORKERS
        assert "admitted" in some, f"seed {seed}: no worker is left"
    assert sum(some.count("refused") for some in outcomes) > 100


def test_workers_that_look_only_before_they_register_are_caught(monkeypatch):
    be_admitted = LeaseMachine._be_admitted

    def look_once(self):
        if not self.member_id:
            yield from be_admitted(self)

    monkeypatch.setattr(LeaseMachine, "_be_admitted", look_once)
    with pytest.raises(ExceptionGroup) as caught:
        _race(range(50))
    assert caught.group_contains(AssertionError, match="key")
