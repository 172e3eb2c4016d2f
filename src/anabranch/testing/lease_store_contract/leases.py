"""Checks of lease rows: what is kept, who may take, who may write (rules L7, S6, U3, INV-1)."""

from msgspec.structs import replace

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import Checkpoint, Conflict, Finish, LeaseKey, LeaseRow, OpenKey, Stopped
from anabranch._model.sequence_numbers import Position
from anabranch._model.start_positions import TRIM_HORIZON, after_sequence_number, at_timestamp
from anabranch._ports.lease_store import LeaseStore
from anabranch.limits import HASH_KEY_MAX
from anabranch.testing.lease_store_contract.arena import APP_ID, Arena, at, expect, lease, lease_key, member

__all__ = ["CHECKS"]

_LARGE = 10**128 + 7  # a sequence number may have 129 digits


async def a_row_is_kept_whole(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    full = LeaseRow(
        key=LeaseKey("123456789012:clicks:1", 3, "shardId-000000000009"),
        start=at_timestamp(1_700_000_000.25),
        waits_for=("shardId-000000000001", "shardId-000000000002"),
        hash_key_range=HashKeyRange(1, HASH_KEY_MAX),
        owner="nobody we know / ünïcode",
        version=4,
        epoch=5,
        checkpoint=Checkpoint(
            watermark=Position(_LARGE, 3),
            frontier=Position(_LARGE + 1),
            open_keys=(
                OpenKey(b"\x00\xff345678", Position(_LARGE, 4), 2, "dead_lettering"),
                OpenKey(b"abcdefgh", Position(_LARGE + 1)),
            ),
            seek_epoch=6,
            order="key",
            seen_through_seconds=1_700_000_001.5,
        ),
        finish=Finish("trimmed", ("shardId-000000000010",)),
        stopped=Stopped("the handler failed", Position(_LARGE), "user-1", "m", 7),
        paused=True,
        takes_without_progress=8,
        records_handled=9,
        checkpointed_at_wall_ms=10,
    )
    plain = lease(start=after_sequence_number(_LARGE), stopped=Stopped("", None, None, "", 0))
    for row in (full, plain, lease(1)):
        await store.create_lease(row, app_id=APP_ID)
        found = await other.read_lease(row.key)
        expect(found == row, f"a row is read as it was written: {row!r}", found)


async def a_lease_is_created_once(arena: Arena) -> None:
    store = await arena.open()
    row = lease(start=TRIM_HORIZON)
    expect(await store.create_lease(row, app_id=APP_ID) == row, "create_lease returns the new row")
    again = await store.create_lease(lease(start=at_timestamp(5.0), owner="b"), app_id=APP_ID)
    expect(again == row, "create_lease never replaces a row, and returns the one that stands", again)
    expect(await store.read_lease(lease_key(1)) is None, "a row that is not there is None")


async def rows_are_read_in_order_and_finished_ones_only_when_asked_for(arena: Arena) -> None:
    store = await arena.open()
    keys = [LeaseKey("b:s:1", 0, "x"), LeaseKey("a:s:1", 10, "x"), LeaseKey("a:s:1", 9, "y"), LeaseKey("a:s:1", 9, "x")]
    for key in keys:
        await store.create_lease(LeaseRow(key=key), app_id=APP_ID)
    done = LeaseRow(key=LeaseKey("a:s:1", 9, "w"), finish=Finish("end", ("x", "y")))
    await store.create_lease(done, app_id=APP_ID)
    found = [row.key for row in await store.read_leases()]
    expect(found == sorted(keys), "unfinished rows, ordered by stream, generation number and shard", found)
    found = [row.key for row in await store.read_leases(with_finished=True)]
    expect(found == sorted([*keys, done.key]), "with_finished adds the finished ones, in the same order", found)
    expect(await store.read_lease(done.key) == done, "read_lease finds a finished row too")


async def _take(store: LeaseStore, number: int, member_id: str, owner: str | None, version: int) -> LeaseRow | Conflict:
    return await store.take_lease(lease_key(number), member_id, expected_owner=owner, expected_version=version)


async def a_lease_is_taken_from_nobody_or_from_the_dead(arena: Arena) -> None:
    store = await arena.open()
    await store.register_member(member("a"))
    await store.create_lease(lease(), app_id=APP_ID)
    taken = await _take(store, 0, "a", None, 0)
    expected = lease(owner="a", version=1, epoch=1, takes_without_progress=1)
    expect(taken == expected, "a take sets owner and adds 1 to version, epoch, takes_without_progress", taken)
    expect(await _take(store, 0, "b", "a", 1) == Conflict(expected), "nothing is taken from a live member")
    expect(await _take(store, 0, "b", None, 1) == Conflict(expected), "the owner must be the expected one")
    await store.seal_member("a", 0)
    expect(await _take(store, 0, "b", "a", 0) == Conflict(expected), "the version must be the expected one")
    taken = await _take(store, 0, "b", "a", 1)
    expect(isinstance(taken, LeaseRow) and taken.owner == "b", "a sealed member's lease is taken", taken)
    expect(isinstance(taken, LeaseRow) and (taken.version, taken.epoch) == (2, 2), "version and epoch grow", taken)
    await store.register_member(member("c"))
    await store.create_lease(lease(1, owner="c"), app_id=APP_ID)
    await store.leave("c")
    expect(isinstance(await _take(store, 1, "b", "c", 0), LeaseRow), "the lease of a member that left is taken")
    expect(await _take(store, 2, "b", None, 0) == Conflict(None), "a take of a row that is not there: Conflict(None)")
    over = lease(3, finish=Finish("end"))
    await store.create_lease(over, app_id=APP_ID)
    expect(await _take(store, 3, "b", None, 0) == Conflict(over), "a finished lease is not taken")


async def the_epoch_of_a_take_passes_its_floor(arena: Arena) -> None:
    store = await arena.open()
    await store.create_lease(lease(epoch=2), app_id=APP_ID)
    row = await store.take_lease(lease_key(), "a", expected_owner=None, expected_version=0, epoch_floor=7)
    expect(isinstance(row, LeaseRow) and row.epoch == 8, "a child's epoch starts above its parents'", row)
    await store.create_lease(lease(1, epoch=9), app_id=APP_ID)
    row = await store.take_lease(lease_key(1), "a", expected_owner=None, expected_version=0, epoch_floor=7)
    expect(isinstance(row, LeaseRow) and row.epoch == 10, "a floor never lowers an epoch", row)


async def only_the_owner_writes_a_lease_and_only_over_what_it_saw(arena: Arena) -> None:
    store = await arena.open()
    row = lease(owner="a", version=1)
    await store.create_lease(row, app_id=APP_ID)
    written = await store.write_lease(replace(row, checkpoint=at(5)), member_id="a", expected_version=1)
    expected = replace(row, checkpoint=at(5), version=2)
    expect(written == expected, "the owner's write is stored with one version more", written)
    other = await store.write_lease(replace(row, checkpoint=at(9)), member_id="b", expected_version=2)
    expect(other == Conflict(expected), "another member's write is refused with the row that stands", other)
    old = await store.write_lease(replace(row, checkpoint=at(4)), member_id="a", expected_version=1)
    expect(old == Conflict(expected), "an older write does not replace a newer one", old)
    none = await store.write_lease(lease(7), member_id="a", expected_version=0)
    expect(none == Conflict(None), "a write makes no row", none)
    given = await store.write_lease(replace(expected, owner="b"), member_id="a", expected_version=2)
    expect(isinstance(given, LeaseRow) and given.owner == "b", "a lease is given by its owner's write", given)
    freed = await store.write_lease(replace(expected, owner=None), member_id="b", expected_version=3)
    expect(isinstance(freed, LeaseRow) and freed.owner is None, "a lease is released by its owner's write", freed)
    expect(await store.read_lease(row.key) == freed, "what was acknowledged is what is read")


async def a_lost_answer_is_found_out_by_asking_again(arena: Arena) -> None:
    store = await arena.open()
    await store.create_lease(lease(), app_id=APP_ID)
    await _take(store, 0, "a", None, 0)  # the answer of this one is lost
    again = await _take(store, 0, "a", None, 0)
    expect(isinstance(again, Conflict), "the same take twice is a conflict", again)
    mine = again.row if isinstance(again, Conflict) else None
    expect(mine is not None and mine.owner == "a" and mine.version == 1, "which shows that the lease is mine", mine)
    assert mine is not None
    commit = replace(mine, checkpoint=at(5))
    await store.write_lease(commit, member_id="a", expected_version=1)  # lost too
    again = await store.write_lease(commit, member_id="a", expected_version=1)
    shown = again.row if isinstance(again, Conflict) else None
    expect(shown == replace(commit, version=2), "the same commit twice is a conflict that shows the commit", shown)


async def only_a_finished_row_is_deleted(arena: Arena) -> None:
    store = await arena.open()
    row = lease(owner="a")
    await store.create_lease(row, app_id=APP_ID)
    expect(not await store.delete_lease(row.key, 0), "an unfinished row is not deleted")
    done = replace(row, owner=None, finish=Finish("end"))
    await store.write_lease(done, member_id="a", expected_version=0)
    expect(not await store.delete_lease(row.key, 0), "a row of another version is not deleted")
    expect(await store.delete_lease(row.key, 1), "a finished row of the expected version is deleted")
    expect(await store.read_lease(row.key) is None, "and gone")
    expect(not await store.delete_lease(row.key, 1), "and not deleted twice")


CHECKS = (
    a_row_is_kept_whole,
    a_lease_is_created_once,
    rows_are_read_in_order_and_finished_ones_only_when_asked_for,
    a_lease_is_taken_from_nobody_or_from_the_dead,
    the_epoch_of_a_take_passes_its_floor,
    only_the_owner_writes_a_lease_and_only_over_what_it_saw,
    a_lost_answer_is_found_out_by_asking_again,
    only_a_finished_row_is_deleted,
)
