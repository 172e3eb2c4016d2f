"""Checks of member rows: heartbeats, the seal, leaving, hand-off requests (rules L1 to L3, L12, L17)."""

from msgspec.structs import replace

from anabranch._model.leases import Beat, HandOffRequest, MemberRow, ShardStatus
from anabranch.testing.lease_store_contract.arena import APP_ID, Arena, expect, lease, lease_key, member

__all__ = ["CHECKS"]


async def a_member_is_registered_once(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    row = MemberRow(
        member_id="a",
        worker_id="host 1",
        counter=1,
        expiry_ms=5_000,
        protocol="1.2",
        fingerprint="order=key",
        generation=2,
        shards_max=3,
        load=4,
        lease_version=5,
        reads_healthy=False,
        draining=True,
        wanted=(HandOffRequest(lease_key(1), "b"),),
        status=(ShardStatus("shardId-000000000000", "paused", 1_500, 2.5), ShardStatus("shardId-000000000001")),
        joined_wall_ms=6,
    )
    new = await store.register_member(row)
    expect(new == row, "register_member keeps and returns the whole row", new)
    again = await other.register_member(replace(row, expiry_ms=1))
    expect(again == row, "register_member never replaces a row", again)
    await other.register_member(member("A"))
    found = [one.member_id for one in await store.read_members()]
    expect(found == ["A", "a"], "read_members returns all, in the order of their ids", found)


async def a_heartbeat_raises_the_counter_of_a_live_row_and_makes_none(arena: Arena) -> None:
    store = await arena.open()
    expect(await store.heartbeat(Beat(member_id="a", attempt=1)) is None, "a heartbeat without a row finds None")
    expect(not await store.read_members(), "a heartbeat is never an upsert")
    await store.register_member(member("a"))
    status = (ShardStatus("shardId-000000000000", "paused", 1_500, 2.5), ShardStatus("shardId-000000000001"))
    beat = Beat(member_id="a", attempt=3, load=7, lease_version=2, reads_healthy=False, draining=True, status=status)
    row = await store.heartbeat(beat)
    expected = member("a", counter=3, load=7, lease_version=2, reads_healthy=False, draining=True, status=status)
    expect(row == expected, "a heartbeat writes its attempt as the counter, and all that it carries", row)
    late = await store.heartbeat(Beat(member_id="a", attempt=2))
    expect(late == expected, "a heartbeat that arrives late changes nothing and returns the row", late)
    same = await store.heartbeat(replace(beat, load=9))
    expect(same == expected, "a heartbeat that arrives twice is one", same)


async def a_seal_holds_only_for_the_observed_counter_and_is_final(arena: Arena) -> None:
    store = await arena.open()
    expect(await store.seal_member("a", 0) is None, "sealing nobody finds None")
    await store.register_member(member("a"))
    await store.heartbeat(Beat(member_id="a", attempt=4))
    row = await store.seal_member("a", 3)
    expect(row is not None and row.state == "live", "a counter that moved saves its member", row)
    row = await store.seal_member("a", 4)
    expect(row is not None and row.state == "sealed", "the observed counter seals", row)
    beaten = await store.heartbeat(Beat(member_id="a", attempt=5))
    expect(beaten == row, "a heartbeat after the seal changes nothing, and tells", beaten)
    left = await store.leave("a")
    expect(left == row, "a sealed member does not leave: sealed is final", left)


async def leaving_is_one_write_and_final(arena: Arena) -> None:
    store = await arena.open()
    expect(await store.leave("a") is None, "nobody leaves: None")
    await store.register_member(member("a"))
    row = await store.leave("a")
    expect(row is not None and row.state == "left", "leave makes a live row left", row)
    expect(await store.heartbeat(Beat(member_id="a", attempt=9)) == row, "a member that left does not come back")
    expect(await store.seal_member("a", 0) == row, "left is not sealed afterwards")


async def a_hand_off_is_asked_for_once_and_answered_by_a_heartbeat(arena: Arena) -> None:
    store = await arena.open()
    first, second = HandOffRequest(lease_key(1), "b"), HandOffRequest(lease_key(2), "b")
    expect(await store.request_hand_off("a", first) is None, "a request to nobody finds None")
    await store.register_member(member("a"))
    await store.request_hand_off("a", first)
    await store.request_hand_off("a", second)
    row = await store.request_hand_off("a", first)
    expect(row is not None and row.wanted == (first, second), "a request is kept once, in order", row)
    row = await store.heartbeat(Beat(member_id="a", attempt=1, answered=(first,)))
    expect(row is not None and row.wanted == (second,), "what was answered goes, what was not stays", row)
    await store.leave("a")
    row = await store.request_hand_off("a", first)
    expect(row is not None and row.wanted == (second,), "a member that left is asked for nothing", row)


async def a_member_is_deleted_only_when_it_is_over_and_named_nowhere(arena: Arena) -> None:
    store = await arena.open()
    await store.register_member(member("a"))
    expect(not await store.delete_member("a"), "a live member is not deleted")
    expect(not await store.delete_member("b"), "nobody is not deleted")
    await store.create_lease(lease(owner="a"), app_id=APP_ID)
    await store.leave("a")
    expect(not await store.delete_member("a"), "a member that a lease names is not deleted")
    await store.register_member(member("c"))
    await store.seal_member("c", 0)
    expect(await store.delete_member("c"), "a sealed member that no lease names is deleted")
    found = [row.member_id for row in await store.read_members()]
    expect(found == ["a"], "only the deleted row is gone", found)


async def no_member_of_this_process_is_called_dead(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    await store.register_member(member("a"))
    await other.register_member(member("b"))
    for handle in (store, other):
        dead = list(await handle.dead_members())
        expect(dead == [], "dead_members names only members whose process is gone", dead)


CHECKS = (
    a_member_is_registered_once,
    a_heartbeat_raises_the_counter_of_a_live_row_and_makes_none,
    a_seal_holds_only_for_the_observed_counter_and_is_final,
    leaving_is_one_write_and_final,
    a_hand_off_is_asked_for_once_and_answered_by_a_heartbeat,
    a_member_is_deleted_only_when_it_is_over_and_named_nowhere,
    no_member_of_this_process_is_called_dead,
)
