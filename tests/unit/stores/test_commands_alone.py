"""Commands while no worker runs: the command joins as a member, changes the lease row, and leaves (rule C3)."""

import asyncio

import pytest
from msgspec.structs import replace

from anabranch import Application
from anabranch._core.tracker import digest_of
from anabranch._model.leases import AppRow, Checkpoint, LeaseKey, LeaseRow, MemberRow, OpenKey, Stopped, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Position
from anabranch.errors import LeaseStoreError, UsageError
from anabranch.reasons import StoppedByHandler
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore

SHARD = "shardId-000000000000"
KEY = LeaseKey("1:orders:1", 0, SHARD)
REASON = StoppedByHandler(position="50", partition_key="user-1", attempts=3, error="ValueError")
STOPPED = Stopped(REASON, Position(50), "user-1", "a#1", 0)
FAILED = OpenKey(digest_of("user-1", Position(50), "shard"), Position(50), 3)
LEASE = LeaseRow(
    key=KEY,
    owner="a#1",
    checkpoint=Checkpoint(watermark=Position(49), open_keys=(FAILED,)),
    stopped=STOPPED,
    takes_without_progress=1,
)


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    return MemoryLeaseStore() if request.param == "memory" else SqliteLeaseStore(tmp_path / "leases.db", "billing")


async def prepare(store, lease=LEASE, *more, member_state="left"):
    await store.open(AppRow(app="billing", app_id="id", created_wall_ms=0))
    for row in (lease, *more):
        name = row.key.stream_key.split(":")[1]
        await store.put_stream(
            StreamRow(stream_key=row.key.stream_key, name=name, arn="", created_seconds=1.0, origin=TRIM_HORIZON)
        )
        await store.create_lease(row)
    await store.register_member(MemberRow(member_id="a#1", expiry_ms=300))
    if member_state == "left":
        await store.leave("a#1")


def run(main, store):
    async def closing():
        try:
            await main()
        finally:
            await store.close()

    asyncio.run(closing())


@pytest.mark.parametrize("member_state", ["left", "live"])
def test_a_stopped_record_is_skipped_without_a_fleet(store, member_state):
    async def main():
        await prepare(store, member_state=member_state)  # a live one is silent: it is sealed after its expiry
        async with Application("billing", leases=store) as application:
            answer = await application.skip(SHARD, "50")
            assert answer.state == "applied"
            assert answer.result == "record 50 will be skipped (no worker was running)"
            assert "@" in answer.requested_by
            (audited,) = await application.commands()
            assert audited == answer
            assert (await application.skip(SHARD, "50")).state == "applied"  # a second one changes nothing
        lease = await store.read_lease(KEY)
        assert (lease.stopped, lease.owner) == (None, None)
        assert lease.checkpoint.open_keys == (replace(FAILED, state="skipping"),)
        assert lease.takes_without_progress == 1
        poll = await store.poll()
        assert poll.commands == ()
        assert {member.state for member in poll.members} <= {"left", "sealed"}

    run(main, store)


def test_a_stopped_shard_is_resumed_without_a_fleet(store):
    async def main():
        await prepare(store)
        async with Application("billing", leases=store) as application:
            assert (await application.resume(SHARD)).state == "applied"
            with pytest.raises(UsageError, match="is not stopped"):
                await application.resume(SHARD)
        lease = await store.read_lease(KEY)
        assert lease.stopped is None
        assert lease.checkpoint == LEASE.checkpoint

    run(main, store)


def test_a_record_that_did_not_fail_is_not_skipped(store):
    async def main():
        await prepare(store, replace(LEASE, stopped=None))
        async with Application("billing", leases=store) as application:
            refused = await application.skip(SHARD, "51")
            assert (refused.state, refused.result[:27]) == ("refused", "record 51 has not failed (n")
            assert (await application.skip(SHARD, "50")).state == "applied"  # it waits for a retry
        lease = await store.read_lease(KEY)
        assert lease.checkpoint.open_keys[0].state == "skipping"

    run(main, store)


def test_a_store_that_stops_answering_is_named_and_the_command_stays_pending(monkeypatch):
    monkeypatch.setattr("anabranch.application._APPLY_SECONDS", 0.01)

    class SilentStore(MemoryLeaseStore):
        is_silent = True

        async def take_lease(self, *arguments, **options):
            if self.is_silent:
                await asyncio.Event().wait()
            return await super().take_lease(*arguments, **options)

    store = SilentStore()

    async def main():
        await prepare(store)
        async with Application("billing", leases=store) as application:
            with pytest.raises(LeaseStoreError, match="gave no answer within"):
                await application.skip(SHARD, "50")
            assert [command.state for command in await application.commands()] == ["pending"]
            store.is_silent = False
            assert (await application.skip(SHARD, "50")).state == "applied"

    run(main, store)


def test_a_record_whose_position_is_all_that_is_known_is_skipped(store):
    async def main():
        await prepare(store, replace(LEASE, checkpoint=Checkpoint(watermark=Position(49))))
        async with Application("billing", leases=store) as application:
            assert (await application.skip(SHARD, "50")).state == "applied"
        lease = await store.read_lease(KEY)
        assert lease.checkpoint.open_keys == (replace(FAILED, attempts=0, state="skipping"),)

    run(main, store)


def test_the_stream_must_be_named_if_two_have_such_a_shard(store):
    async def main():
        other = replace(LEASE, key=LeaseKey("1:returns:1", 0, SHARD))
        await prepare(store, LEASE, other)
        async with Application("billing", leases=store) as application:
            with pytest.raises(
                UsageError, match=r"several streams have a shardId-000000000000 \(orders, returns\): say"
            ):
                await application.resume(SHARD)
            assert (await application.resume(SHARD, stream="returns")).stream == "returns"
            with pytest.raises(UsageError, match="no lease for shardId-000000000000 of stream invoices"):
                await application.resume(SHARD, stream="invoices")
        assert (await store.read_lease(KEY)).stopped == STOPPED
        assert (await store.read_lease(other.key)).stopped is None

    run(main, store)


def test_a_command_that_no_worker_answers_expires(store, monkeypatch):
    async def main():
        monkeypatch.setattr("anabranch.application._ANSWER_MS", 100)
        await prepare(store, member_state="live")
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(beat(store))
            async with Application("billing", leases=store) as application:
                answer = await application.skip(SHARD, "50")
            beating.cancel()
        assert (answer.state, answer.result) == ("expired", "no worker answered in time")
        assert (await store.read_lease(KEY)).stopped == STOPPED
        assert (await store.poll()).commands == ()

    run(main, store)


async def beat(store):
    from anabranch._model.leases import HeartbeatWrite

    for attempt in range(1, 1000):
        await store.heartbeat(HeartbeatWrite(member_id="a#1", attempt=attempt))
        await asyncio.sleep(0.05)


def test_a_worker_that_starts_at_the_same_moment_keeps_its_lease(monkeypatch):
    """It takes the lease after the command has seen no live worker, and before the command reads the lease."""

    class Racing(MemoryLeaseStore):
        has_joined = False

        async def read_lease(self, key):
            if not self.has_joined:
                self.has_joined = True
                await self.register_member(MemberRow(member_id="b#1", expiry_ms=10_000))
                await self.take_lease(key, "b#1", expected_owner="a#1", expected_version=0)
            return await super().read_lease(key)

    async def main(position):
        store = Racing()
        await prepare(store)
        async with Application("billing", leases=store) as application:
            answer = await application.skip(SHARD, position)
        assert (answer.state, answer.result) == ("expired", "no worker answered in time")
        lease = await store.read_lease(KEY)
        assert (lease.owner, lease.version, lease.stopped) == ("b#1", 1, STOPPED)

    monkeypatch.setattr("anabranch.application._ANSWER_MS", 100)
    asyncio.run(main("50"))
    asyncio.run(main("51"))  # and only that worker refuses it
