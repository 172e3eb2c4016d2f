"""An application moves between stores with everything that matters, once, also if the copy fails at any step."""

import asyncio
import random
from contextlib import suppress

import pytest
from msgspec.structs import replace

from anabranch._core.leases.dialogue import StoreDialogue
from anabranch._model.leases import (
    AppRow,
    Checkpoint,
    ControlRow,
    Finish,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    MemberRow,
    StreamRow,
)
from anabranch._model.streams import Position, at_timestamp
from anabranch.application import Application
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.stores import MemoryLeaseStore, SqliteLeaseStore
from anabranch.stores.dynamodb import DynamoDbLeaseStore
from anabranch.testing.loop import run
from anabranch.testing.world.processes import SimulatedClock
from memory_dynamodb import FailingDynamoDb, MemoryClients, MemoryDynamoDb

APP = AppRow(app="billing", app_id="first", created_wall_ms=1)
STREAM = StreamRow(
    stream_key="1:orders:1", name="orders", arn="arn", created_seconds=1.0, origin=at_timestamp(5.5), bootstrapped=True
)
LEASES = [
    LeaseRow(
        key=LeaseKey("1:orders:1", 0, "shardId-000000000000"), epoch=7, finish=Finish("end", ("shardId-000000000001",))
    ),
    LeaseRow(
        key=LeaseKey("1:orders:1", 0, "shardId-000000000001"),
        owner="a#1",
        version=9,
        epoch=8,
        waits_for=("shardId-000000000000",),
        checkpoint=Checkpoint(watermark=Position(10**55, 3)),
        extra={"colour": "red"},
    ),
]
EXPIRY_MS = 3_000
MOVED = [replace(row, owner=None) for row in LEASES]


def dynamodb(database, table="anabranch"):
    store = DynamoDbLeaseStore("billing", table)
    store.table._clients = MemoryClients(database)
    return store


async def fill(store, member_state="left"):
    await store.open(APP)
    await store.put_stream(STREAM)
    for row in LEASES:
        await store.create_lease(row)
    await store.register_member(MemberRow(member_id="a#1", expiry_ms=EXPIRY_MS))
    if member_state == "left":
        await store.leave("a#1")
    await store.put_control(ControlRow(command_id="1", action="pause"))
    await store.put_control(ControlRow(command_id="2", action="pause", state="applied"))


async def check_arrived(store):
    await store.open(APP)
    assert list(await store.read_streams()) == [STREAM]
    assert list(await store.read_leases(with_finished=True)) == MOVED
    poll = await store.poll()
    assert poll.app is not None
    assert (poll.app.app_id, poll.app.place, poll.app.incarnation) == ("first", "here", await store.identity())
    assert [row.command_id for row in poll.commands] == ["1"]
    assert not poll.members


def test_an_application_moves_with_all_positions_and_refuses_to_start_where_it_was(tmp_path):
    async def main():
        source, target = SqliteLeaseStore(tmp_path / "leases.db", "billing"), dynamodb(MemoryDynamoDb())
        await fill(source)
        assert await Application("billing", leases=source).copy_to(target) == 2
        await check_arrived(target)
        app = (await source.poll()).app
        assert (app.place, app.other_url) == ("moved", "dynamodb://anabranch")
        status = await Application("billing", leases=source).status()
        assert [shard.reason and shard.reason.code for shard in status.shards] == [None, "application-moved"]
        with pytest.raises(UsageError, match="was moved to dynamodb://anabranch already"):
            await Application("billing", leases=source).copy_to(target)
        with pytest.raises(UsageError, match="was moved to dynamodb://anabranch already"):
            await Application("billing", leases=source).copy_to(SqliteLeaseStore(tmp_path / "other.db", "billing"))
        await Application("billing", leases=target).copy_to(
            SqliteLeaseStore(tmp_path / "third.db", "billing")
        )  # and on
        await source.close()

    asyncio.run(main())


def test_a_member_that_did_not_leave_is_watched_for_its_expiry_and_sealed():
    async def main():
        source, target = dynamodb(MemoryDynamoDb()), dynamodb(MemoryDynamoDb(), "other")
        await fill(source, member_state="live")
        clock = SimulatedClock(asyncio.get_running_loop(), 0)
        await Application("billing", leases=source, clock=clock).copy_to(target)
        assert clock.now_ms() >= EXPIRY_MS
        await check_arrived(target)
        assert [row.state for row in (await source.poll()).members] == ["sealed"]

    run(main)


def test_a_live_worker_keeps_its_application():
    async def main():
        source, target = dynamodb(MemoryDynamoDb()), dynamodb(MemoryDynamoDb(), "other")
        await fill(source, member_state="live")

        async def beat():
            for attempt in range(1, 100):
                await source.heartbeat(HeartbeatWrite(member_id="a#1", attempt=attempt))
                await asyncio.sleep(0.1)

        beating = asyncio.create_task(beat())
        clock = SimulatedClock(asyncio.get_running_loop(), 0)
        with pytest.raises(UsageError, match=r"has live workers \(a\): stop them first"):
            await Application("billing", leases=source, clock=clock).copy_to(target)
        beating.cancel()
        assert (await source.poll()).app.place == "here"
        assert await target.read_app() is None

    run(main)


def test_a_worker_that_starts_at_the_same_moment_keeps_its_application():
    """It registers after the copy has looked, and before the mark: the copy looks again."""

    class Racing(DynamoDbLeaseStore):
        async def move_app(self, expected, place, other_store):
            if place == "leaving":
                await self.register_member(MemberRow(member_id="b#1", expiry_ms=3_000))
            return await super().move_app(expected, place, other_store)

    async def main():
        source, target = Racing("billing"), dynamodb(MemoryDynamoDb(), "other")
        source.table._clients = MemoryClients(MemoryDynamoDb())
        await fill(source)
        with pytest.raises(UsageError, match="a worker started at that moment"):
            await Application("billing", leases=source).copy_to(target)
        assert (await source.poll()).app.place == "here"
        assert await target.read_app() is None

    asyncio.run(main())


def test_an_application_of_the_target_is_not_overwritten():
    async def main():
        source, target = dynamodb(MemoryDynamoDb()), dynamodb(MemoryDynamoDb(), "other")
        await fill(source)
        await target.open(replace(APP, app_id="another"))
        with pytest.raises(UsageError, match="has another application 'billing'"):
            await Application("billing", leases=source).copy_to(target)
        with pytest.raises(UsageError, match="is lost with its process"):
            await Application("billing", leases=source).copy_to(MemoryLeaseStore())
        assert (await source.poll()).app.place == "here"

    asyncio.run(main())


@pytest.mark.parametrize("breaks", ["before", "after"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_copy_that_fails_at_any_step_can_be_repeated(side, breaks):
    async def main(calls):
        databases = {"source": FailingDynamoDb(), "target": FailingDynamoDb()}
        source, target = dynamodb(databases["source"]), dynamodb(databases["target"], "other")
        await fill(source)
        failing = databases[side]
        failing.calls_left, failing.breaks = calls, breaks
        try:
            await Application("billing", leases=source).copy_to(target)
        except LeaseStoreError:
            is_done = False
        else:
            is_done = True
        failing.calls_left = None
        places = tuple(row and row.place for row in (await source.read_app(), await target.read_app()))
        assert places in {
            ("here", None), ("leaving", None), ("leaving", "arriving"), ("moved", "arriving"), ("moved", "here")
        }  # fmt: skip
        if places != ("moved", "here"):
            assert not is_done
            await Application("billing", leases=source).copy_to(target)
        await check_arrived(target)
        assert (await source.poll()).app.place == "moved"
        return is_done

    for calls in range(1, 100):
        if asyncio.run(main(calls)):
            assert calls > 5
            return
    raise AssertionError("it never ended")


def test_a_second_store_with_the_same_url_does_not_get_a_copy_too():
    """The URL is the same, but the region, the account or the endpoint of the environment is another."""

    async def main(calls):
        source, first, elsewhere = dynamodb(MemoryDynamoDb()), FailingDynamoDb(), MemoryDynamoDb()
        elsewhere.region = "ap-south-1"
        second = dynamodb(elsewhere, "other")
        await fill(source)
        first.calls_left = calls
        with suppress(LeaseStoreError):
            await Application("billing", leases=source).copy_to(dynamodb(first, "other"))
        first.calls_left = None
        for target in (second, dynamodb(first, "other"), second):
            with suppress(UsageError):
                await Application("billing", leases=source).copy_to(target)
        rows = [await store.read_app() for store in (source, dynamodb(first, "other"), second)]
        places = [row and row.place for row in rows]
        assert (places[0], places.count("here")) == ("moved", 1), places

    for calls in range(1, 40):
        asyncio.run(main(calls))


@pytest.mark.parametrize(
    "place, words",
    [
        ("moved", "was moved to elsewhere://: name that store"),
        ("leaving", "is being moved to elsewhere://, and the copy is not complete"),
        ("arriving", "is being copied here from elsewhere://, and the copy is not complete"),
    ],
)
def test_a_worker_refuses_to_start_where_its_application_is_not(place, words):
    with pytest.raises(LeaseStoreInvalidError, match=words) as caught:
        StoreDialogue(random.Random(1))._check_place(replace(APP, place=place, other_store="elsewhere://\nidentity"))
    assert caught.value.code == "moved"
