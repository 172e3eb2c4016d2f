"""Checks of a store that keeps its rows: what was acknowledged is there after everybody closed it."""

from msgspec.structs import replace

from anabranch._model.leases import Beat, ControlRow, StreamRow
from anabranch._model.start_positions import TRIM_HORIZON
from anabranch.testing.lease_store_contract.arena import APP_ID, STREAM, Arena, at, expect, lease, member

__all__ = ["CHECKS"]


async def what_was_acknowledged_outlives_the_handles(arena: Arena) -> None:
    store = await arena.open()
    await store.register_member(member("a"))
    beaten = await store.heartbeat(Beat(member_id="a", attempt=1))
    await store.put_stream(
        StreamRow(stream_key=STREAM, name="orders", arn="", created_seconds=1.0, origin=TRIM_HORIZON), app_id=APP_ID
    )
    await store.create_lease(lease(owner="a"), app_id=APP_ID)
    committed = await store.write_lease(replace(lease(owner="a"), checkpoint=at(5)), member_id="a", expected_version=0)
    await store.put_control(ControlRow(command_id="c", action="pause"))
    incarnation = await store.incarnation()
    await arena.close()

    store = await arena.open()
    expect(await store.read_lease(lease().key) == committed, "the last commit is there")
    expect(list(await store.read_members()) == [beaten], "the members are there")
    expect(len(await store.read_streams()) == 1, "the streams are there")
    expect(len(await store.read_controls()) == 1, "the commands are there")
    expect(await store.incarnation() == incarnation, "it is the same incarnation")


async def applications_do_not_see_each_other(arena: Arena) -> None:
    store = await arena.open()
    await store.create_lease(lease(owner="a"), app_id=APP_ID)
    await store.register_member(member("a"))
    arena.app += " too"
    other = await arena.open()
    await other.create_lease(lease(1), app_id=APP_ID)
    await other.register_member(member("b"))
    expect([row.key for row in await other.read_leases()] == [lease(1).key], "leases are the application's own")
    expect([row.member_id for row in await other.read_members()] == ["b"], "so are members")
    expect(await other.read_lease(lease().key) is None, "and single rows")


CHECKS = (what_was_acknowledged_outlives_the_handles, applications_do_not_see_each_other)
