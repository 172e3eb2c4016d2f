"""The lease loop: what follows at once, and what waits for the next look at the store."""

import asyncio
import os
import random
from contextlib import asynccontextmanager

import pytest

from anabranch._core.leases.plan import Take, Write
from anabranch._core.leases.timing import lease_timing
from anabranch._engine.leases.lease_loop import LeaseLoop
from anabranch._engine.leases.member import Member, MemberProfile
from anabranch._engine.ports import Ports
from anabranch._model.leases import AppRow, HandOffRequest, LeaseKey, LeaseRow
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.events import StoreReset
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.testing.clock import ManualClock

from stream_world import run

APP = AppRow(app="billing", app_id="1", created_wall_ms=1)
KEY = LeaseKey("1:orders:1", 0, "shardId-000000000000")


@asynccontextmanager
async def lease_loop(store, held, happened=None, clock=None, shards_max=None, dropped=None):
    """A member that has joined, while no time passes, and its loop."""
    emit = [].append if happened is None else happened.append
    clock = clock or ManualClock()
    ports = Ports(kinesis=None, store=store, clock=clock, entropy=random.Random(1), emit=emit)
    async with asyncio.TaskGroup() as group:
        profile = MemberProfile(worker_id="w", fingerprint="", shards_max=shards_max)
        member = Member(ports, lease_timing(), profile, group, stall_limit_ms=120_000)
        await member.join()
        yield LeaseLoop(
            ports,
            member,
            await store.open(APP),
            on_held=held.append,
            on_dropped=lambda key, reason: None if dropped is None else dropped.append(reason),
            on_drain=lambda request: None,
            is_healthy=lambda: True,
            status=tuple,
        )
        member.close()


def test_every_take_goes_above_the_epochs_that_a_store_has_forgotten():
    async def main():
        store, held = MemoryLeaseStore(), []
        await store.open(APP)
        await store.create_lease(LeaseRow(key=KEY), app_id="1")
        async with lease_loop(store, held) as loop:
            loop.table.epoch_floors[KEY] = 6
            loop.observe_lease(LeaseRow(key=KEY))
            await loop.take(Take(KEY, None, 0))
        assert [holding.row.epoch for holding in held] == [7]

    run(main)


def test_a_row_that_was_read_on_the_side_and_names_this_member_is_worked_on_at_once():
    async def main():
        store, held = MemoryLeaseStore(), []
        await store.open(APP)
        async with lease_loop(store, held) as loop:
            loop.observe_lease(LeaseRow(key=KEY, owner=loop.table.member_id, version=1))
            assert [holding.row.key for holding in held] == [KEY]

    run(main)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_no_member_and_writes_nothing():
    async def main():
        store, held = MemoryLeaseStore(), []
        await store.open(APP)
        await store.create_lease(LeaseRow(key=KEY), app_id="1")
        async with lease_loop(store, held) as loop:
            loop.observe_lease(LeaseRow(key=KEY))
            await loop.take(Take(KEY, None, 0))
            step = Write(held[0].row, held[0].row.version)
            child = os.fork()
            if child == 0:
                os._exit(10 + loop.may_take() + 2 * (await loop.write(step) != "lost"))
            _, status = os.waitpid(child, 0)  # noqa: ASYNC222 -- it ends at once
            assert os.waitstatus_to_exitcode(status) == 10
            assert loop.may_take()
            assert await loop.write(step) == "written"

    run(main)


class StoreThatAnswersLate(MemoryLeaseStore):
    """A write takes effect at once; its answer comes when it is let go."""

    def __init__(self):
        super().__init__()
        self.answers = asyncio.Event()
        self.written = asyncio.Event()

    async def write_lease(self, row, *, member_id, expected_version):
        answer = await super().write_lease(row, member_id=member_id, expected_version=expected_version)
        self.written.set()
        await self.answers.wait()
        return answer


def test_an_answer_that_comes_after_the_lease_was_lost_and_taken_anew_leaves_the_new_holding_alone():
    async def main():
        store, held = StoreThatAnswersLate(), []
        await store.open(APP)
        await store.create_lease(LeaseRow(key=KEY), app_id="1")
        async with lease_loop(store, held) as loop:
            loop.observe_lease(LeaseRow(key=KEY))
            await loop.take(Take(KEY, None, 0))
            before = loop.table.member_id
            commit = asyncio.create_task(loop.write(Write(held[0].row, held[0].row.version)))
            await store.written.wait()
            await store.seal_member(before, 0)
            loop.table.held.clear()  # as the loop does when its heart says that the member was sealed
            loop.table.become("me#2")
            loop.observe_lease(await store.read_lease(KEY))
            await loop.take(Take(KEY, before, 2))
            assert [holding.row.owner for holding in held] == [before, "me#2"]
            store.answers.set()
            assert await commit == "lost"
            assert loop.table.held[KEY] is held[1]
            assert not loop.table.rolled_back

    run(main)


class StoreThatTakesNoGift(MemoryLeaseStore):
    async def write_lease(self, row, *, member_id, expected_version):
        raise LeaseStoreError("away")


def test_a_gift_that_got_no_answer_before_its_giver_was_sealed_is_a_loss():
    async def main():
        store, held, dropped = StoreThatTakesNoGift(), [], []
        await store.open(APP)
        await store.create_lease(LeaseRow(key=KEY), app_id="1")
        async with lease_loop(store, held, dropped=dropped) as loop:
            loop.observe_lease(LeaseRow(key=KEY))
            await loop.take(Take(KEY, None, 0))
            loop.table.drain(HandOffRequest(KEY, "b#1"))
            gift = loop.table.transfer(KEY)
            assert await loop.write(Write(gift, held[0].row.version)) == "unknown"
            await store.seal_member(loop.table.member_id, 0)
            loop._member.end("sealed")
            await loop.round()
        assert dropped == ["no longer ours"]

    run(main)


async def make_lease(loop):
    """By a plan of this moment."""
    return await loop.create_lease(LeaseRow(key=KEY), life=loop.table.member_id)


class StoreThatIsEmptiedAfterALook(MemoryLeaseStore):
    is_due = False

    async def read_app(self):
        row = self._app
        if self.is_due:
            self._app = None
        return row


def test_a_look_at_whose_the_store_is_does_not_let_a_lease_be_made_in_what_it_is_by_then():
    async def main():
        store, happened = StoreThatIsEmptiedAfterALook(), []
        await store.open(APP)
        async with lease_loop(store, [], happened) as loop:
            await loop.round()
            store.is_due = True
            with pytest.raises(LeaseStoreInvalidError, match="Nothing was created in its place"):
                await make_lease(loop)
        assert not await store.read_leases()
        assert any(isinstance(event, StoreReset) for event in happened)

    run(main)


class StoreThatFailsOver(MemoryLeaseStore):
    storage = "first"

    async def incarnation(self):
        return self.storage


def test_a_plan_that_rests_on_rows_of_another_storage_or_of_an_earlier_life_makes_no_lease():
    async def main():
        store = StoreThatFailsOver()
        await store.open(APP)
        async with lease_loop(store, []) as loop:
            await loop.round()
            life = loop.table.member_id
            store.storage = "second"
            assert await make_lease(loop) is None
            await loop.round()  # it notices, and is another member from now on
            await loop.round()
            assert await loop.create_lease(LeaseRow(key=KEY), life=life) is None
            assert not await store.read_leases()
            assert await make_lease(loop) == LeaseRow(key=KEY)

    run(main)


class StoreThatDoesNotSay(MemoryLeaseStore):
    """Whose it is."""

    async def read_app(self):
        raise LeaseStoreError("away")


def test_no_lease_is_made_in_a_store_that_does_not_say_whose_it_is():
    async def main():
        store = StoreThatDoesNotSay()
        await store.open(APP)
        async with lease_loop(store, []) as loop:
            await loop.round()
            assert await make_lease(loop) is None
        assert not await store.read_leases()

    run(main)


def test_no_lease_is_made_by_a_member_that_stood_still_beyond_its_fence():
    """What it had planned before may have been made, finished and cleaned up by others since."""

    async def main():
        store, clock = MemoryLeaseStore(), ManualClock()
        await store.open(APP)
        async with lease_loop(store, [], clock=clock) as loop:
            await loop.round()
            clock.advance(lease_timing().fence_ms + 1)
            assert await make_lease(loop) is None
        assert not await store.read_leases()

    run(main)
