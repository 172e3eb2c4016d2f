"""The contract of lease stores. Run it against your own store in a test:

    def test_my_store_keeps_the_contract():
        check_lease_store(lambda app: MyStore(url, app))

Each check uses an application of its own and several handles at once. All failures are reported together. The checks
cover what the safety of a fleet depends on: the condition of each write, races, lost answers and the order of reads.
"""

import asyncio
import inspect
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import (
    CHANGED_MAX,
    REQUESTS_MAX,
    AppRow,
    Checkpoint,
    Conflict,
    ControlRow,
    FanOutConsumer,
    Finish,
    HandOffRequest,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    MemberRow,
    OpenKey,
    ShardStatus,
    StatusRow,
    Stopped,
    StreamRow,
    short_id,
)
from anabranch._model.streams import TRIM_HORIZON, Position, after_sequence_number, at_timestamp
from anabranch._ports import LeaseStore
from anabranch.errors import LeaseStoreError
from anabranch.limits import HASH_KEY_MAX
from anabranch.reasons import PausedByProgram, StoppedByCrashes, StoppedByHandler

MakeStore = Callable[[str], LeaseStore]
T = TypeVar("T")

APP_ID = "first"
"""Of the application that `open` makes."""
STREAM = "123456789012:orders:1700000000"


class Arena:
    """One application of its own for each check. `open` gives a further handle on the same rows, as another process
    would have; a store that keeps nothing, or is for one worker, gives the same handle again.
    """

    def __init__(
        self,
        make_store: MakeStore,
        *,
        durable: bool,
        single_worker: bool,
        slow: Callable[[], AbstractContextManager[Any]] | None,
        snapshot: Callable[[], Callable[[], None]] | None,
    ) -> None:
        self._make_store = make_store
        self.is_durable = durable
        self._has_one_handle = single_worker or not durable
        self.slow = slow
        self.snapshot = snapshot
        self._stores: list[LeaseStore] = []
        self.app = f"contract-{uuid.uuid4().hex}"

    def make(self) -> LeaseStore:
        if not self._stores or not self._has_one_handle:
            self._stores.append(self._make_store(self.app))
        return self._stores[-1]

    async def open(self) -> LeaseStore:
        store = self.make()
        await store.open(self.app_row())
        return store

    async def another(self) -> LeaseStore:
        """A handle on an application of its own, in the same storage."""
        self.app += " too"
        self._stores.append(self._make_store(self.app))
        await self._stores[-1].open(self.app_row())
        return self._stores[-1]

    def app_row(self, app_id: str = APP_ID) -> AppRow:
        return AppRow(app=self.app, app_id=app_id, created_wall_ms=1_700_000_000_000)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
        self._stores.clear()


def expect(holds: bool, rule: str, found: Any = None) -> None:  # noqa: FBT001 -- reads as an assertion
    """Not `assert`, which vanishes under -O: a contract that was not checked must not pass."""
    if not holds:
        raise AssertionError(rule if found is None else f"{rule}; found {found!r}")


def member(member_id: str, **fields: Any) -> MemberRow:
    return MemberRow(member_id=member_id, expiry_ms=10_000, **fields)


def lease_key(number: int = 0, generation: int = 0) -> LeaseKey:
    return LeaseKey(STREAM, generation, f"shardId-{number:012d}")


def _requests(count: int) -> tuple[str, ...]:
    return tuple(HandOffRequest(lease_key(number), "b").short_name for number in range(count))


def lease(number: int = 0, **fields: Any) -> LeaseRow:
    return LeaseRow(key=lease_key(number), **fields)


def at(sequence_number: int) -> Checkpoint:
    return Checkpoint(watermark=Position(sequence_number))


def _stream(number: int = 0) -> StreamRow:
    return StreamRow(
        stream_key=f"{STREAM}{number}",
        name="orders",
        arn="arn:aws:kinesis:eu-west-1:123456789012:stream/orders",
        created_seconds=1_699_999_999.5,
        origin=at_timestamp(1_700_000_000.123),
    )


async def _beat(store: LeaseStore, member_id: str, attempt: int, **carried: Any) -> MemberRow | None:
    return (await store.heartbeat(HeartbeatWrite(member_id=member_id, attempt=attempt, **carried))).row


async def _take(store: LeaseStore, number: int, member_id: str, owner: str | None, version: int) -> LeaseRow | Conflict:
    return await store.take_lease(lease_key(number), member_id, expected_owner=owner, expected_version=version)


async def _write(store: LeaseStore, row: LeaseRow, member_id: str, version: int) -> LeaseRow | Conflict:
    return await store.write_lease(row, member_id=member_id, expected_version=version)


async def _stored(store: LeaseStore, member_id: str) -> MemberRow | None:
    """What is stored, and not what a write says about it."""
    return next((row for row in (await store.poll()).members if row.member_id == member_id), None)


async def _rows(store: LeaseStore) -> list[Any]:
    """All rows of the application except its own."""
    leases, streams = await store.read_leases(with_finished=True), await store.read_streams()
    controls, statuses = await store.read_controls(), await store.read_statuses()
    return [*(await store.poll()).members, *leases, *streams, *controls, *statuses]


async def an_application_is_made_once(arena: Arena) -> None:
    store = arena.make()
    expect(await store.read_app() is None, "read_app before the first open finds nothing")
    expect(not await store.leftovers(), "nothing is left of an earlier one")
    first = await store.open(arena.app_row("first"))
    made = replace(arena.app_row("first"), incarnation=await store.identity())
    expect(first == made, "open returns the row that it made, with the storage's incarnation", first)
    again = await (await arena.open()).open(arena.app_row("second"))
    expect(again.app_id == "first", "open keeps an existing row and returns it", again)
    expect(await store.read_app() == first, "read_app returns the stored row")


async def the_incarnation_stays_and_is_recorded_under_a_condition(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    incarnation = await store.identity()
    expect(bool(incarnation), "incarnation is not empty")
    expect(await other.identity() == incarnation, "every handle sees the same incarnation")
    recorded = await store.record_incarnation(incarnation, "restored")
    expect(recorded is not None and recorded.incarnation == "restored", "record_incarnation writes", recorded)
    late = await other.record_incarnation(incarnation, "another")
    expect(late == recorded, "record_incarnation changes nothing where the expected one is not the stored one", late)
    expect(await other.read_app() == recorded, "the recorded incarnation is read by others")


async def an_application_is_moved_under_a_condition(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    before = await store.read_app()
    assert before is not None
    moved = await store.move_app("here", "moved", "elsewhere://")
    expect(moved == replace(before, place="moved", other_store="elsewhere://"), "move_app writes the place", moved)
    late = await other.move_app("here", "arriving", "")
    expect(late == moved, "move_app changes nothing where the place is not the expected one", late)
    expect((await other.poll()).app == moved, "a poll shows the new place")
    back = await other.move_app("moved", "here", "")
    expect(back == before, "an application can be moved back", back)
    await store.delete_app(APP_ID)
    expect(await store.move_app("here", "moved", "x") is None, "move_app creates no row")
    await store.open(arena.app_row("second"))
    expect(
        await other.move_app("here", "moved", "x") == await store.read_app(),
        "move_app does not change another application's row",
    )
    expect((await store.poll()).app == await store.read_app(), "move_app returns the stored row")


async def a_stream_is_put_once_and_written_by_version(arena: Arena) -> None:
    store = await arena.open()
    row = _stream()
    expect(await store.put_stream(row) == row, "put_stream returns the new row")
    other = replace(row, origin=TRIM_HORIZON)
    expect(await store.put_stream(other) == row, "put_stream never replaces a row: all workers share the first pin")
    done = await store.write_stream(replace(row, bootstrapped=True), 0)
    expect(done == replace(row, bootstrapped=True, version=1), "write_stream adds 1 to the version", done)
    expect(await store.write_stream(row, 0) is None, "write_stream refuses an old version")
    consumer = FanOutConsumer(name="billing", arn=f"{row.arn}/consumer/billing:1700000000", state="registered")
    with_consumer = await store.write_stream(replace(row, bootstrapped=True, fanout=consumer), 1)
    expect(with_consumer is not None and with_consumer.fanout == consumer, "a stream keeps its fan-out consumer")
    expect(with_consumer in list(await store.read_streams()), "every handle reads a stream's fan-out consumer")
    without = await store.write_stream(replace(row, bootstrapped=True), 2)
    expect(without is not None and without.fanout is None, "a stream's fan-out consumer can be removed", without)
    expect(await store.write_stream(_stream(7), 0) is None, "write_stream creates no row")
    await store.put_stream(_stream(1))
    found = [stream.stream_key for stream in await store.read_streams()]
    expect(found == [f"{STREAM}0", f"{STREAM}1"], "read_streams returns all, in the order of their keys", found)


async def a_command_is_answered_once(arena: Arena) -> None:
    store = await arena.open()
    late = ControlRow(command_id="a", action="pause", key=lease_key(), requested_wall_ms=2)
    early = ControlRow(command_id="b", action="seek", arguments={"to": "tip"}, requested_by="me", requested_wall_ms=1)
    await store.put_control(late)
    await store.put_control(early)
    await store.put_control(replace(early, action="skip"))
    found = list(await store.read_controls())
    expect(found == [early, late], "commands are put once and read in the order of their requests", found)
    applied = replace(early, state="applied", result="done")
    expect(await store.write_control(applied), "a pending command is answered")
    expect(not await store.write_control(replace(early, state="refused")), "an answered command stays as it is")
    expect(not await store.write_control(replace(early, command_id="none")), "an unknown command is not created")
    expect(list(await store.read_controls()) == [applied, late], "the answer is kept")


async def an_application_is_deleted_whole(arena: Arena) -> None:
    store = await arena.open()
    await store.put_stream(_stream())
    await store.create_lease(lease())
    await store.put_control(ControlRow(command_id="a", action="pause"))
    await store.register_member(member("a"))
    expect(not await store.delete_app("second"), "delete_app refuses under another id")
    expect(len((await store.poll()).members) == 1, "a refused delete_app removes nothing")
    expect(await store.delete_app("first"), "delete_app removes the application")
    expect(not await store.delete_app("first"), "delete_app finds nothing the second time")
    expect(not await store.leftovers(), "a completed deletion leaves nothing behind")
    expect(await store.read_app() is None, "the application's row is gone")
    rest = await _rows(store)
    expect(not rest, "nothing is left under its id", rest)
    await store.open(arena.app_row("second"))
    rest = await _rows(store)
    expect(not rest, "nothing of it shows in a new application of the name", rest)


async def a_poll_shows_the_application_its_members_and_pending_commands(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    await store.register_member(member("b"))
    await store.register_member(member("a"))
    await store.leave("b")
    done = ControlRow(command_id="0", action="pause", requested_wall_ms=1)
    await store.put_control(done)
    await store.write_control(replace(done, state="applied"))
    for command_id, asked_ms in (("2", 5), ("1", 7)):
        await store.put_control(ControlRow(command_id=command_id, action="pause", requested_wall_ms=asked_ms))
    poll = await other.poll()
    expect(poll.app == await store.read_app(), "a poll shows the application's row", poll.app)
    members = [(row.member_id, row.state) for row in poll.members]
    expect(members == [("a", "live"), ("b", "left")], "a poll shows all members, in the order of their ids", members)
    commands = [row.command_id for row in poll.commands]
    expect(commands == ["2", "1"], "a poll shows the pending commands, in the order of their requests", commands)
    expect(poll.evidence in {None, await store.identity()}, "a poll says which storage it came from", poll.evidence)
    expect(poll.known_dead == (), "members of this process are not called dead", poll.known_dead)
    await store.delete_app(APP_ID)
    expect((await other.poll()).app is None, "a poll shows that the application is gone")


async def a_viewer_is_noticed(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    before = await store.read_app()
    if store.publish_interval:
        return  # viewers write nothing there
    await other.renew_watch()
    await other.renew_watch()
    after = (await store.poll()).app
    expect(after is not None and before is not None and after.watch == before.watch + 2, "renew_watch adds 1", after)
    await store.delete_app(APP_ID)
    await other.renew_watch()
    expect(await store.read_app() is None, "renew_watch creates no row")


async def a_status_is_a_row_of_its_own_and_the_newest_stays(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    await store.register_member(member("a"))
    row = StatusRow(
        member_id="a",
        revision=3,
        shard_count=2,
        stalled_count=1,
        millis_behind_latest=1_500,
        records_per_second=2.5,
        shards=(
            ShardStatus(lease(0).key.short_name, PausedByProgram(), 1_500, 2.5, None, 9_000, 3_600, 1.7e9),
            ShardStatus(lease(1).key.short_name),
        ),
        extra={"colour": "red"},
    )
    await store.write_status(row)
    await store.write_status(StatusRow(member_id="A", revision=1))
    found = list(await other.read_statuses())
    expect(found == [StatusRow(member_id="A", revision=1), row], "read_statuses shows all, in the order of ids", found)
    for late in (2, 3):
        await other.write_status(StatusRow(member_id="a", revision=late))
    expect((await store.read_statuses())[1] == row, "a status that arrives late changes nothing")
    await other.write_status(StatusRow(member_id="a", revision=4))
    newest = (await store.read_statuses())[1]
    expect(newest == StatusRow(member_id="a", revision=4, extra=row.extra), "a newer one replaces all else", newest)
    expect(list((await store.poll()).members) == [member("a")], "a status changes no member and makes none")
    await store.delete_member("a")
    expect(len(await store.read_statuses()) == 2, "the status of a live member stays")
    await store.leave("a")
    await store.delete_member("a")
    expect([one.member_id for one in await store.read_statuses()] == ["A"], "a status is deleted with its member")
    await store.delete_app(APP_ID)
    expect(not await store.read_statuses(), "statuses are deleted with their application")


async def fields_of_a_newer_version_are_kept(arena: Arena) -> None:
    store = await arena.open()
    extra = {"colour": "red", "sizes": [1, 2], "more": {"a": None}}
    await store.register_member(member("a", extra=extra))
    await _beat(store, "a", 1)
    await store.request_hand_off("a", *_requests(1))
    row = await store.leave("a")
    expect(row is not None and row.extra == extra, "unknown fields of a member survive every write", row)
    await store.create_lease(lease(extra=extra))
    taken = await _take(store, 0, "b", None, 0)
    expect(isinstance(taken, LeaseRow) and taken.extra == extra, "unknown fields of a lease survive a take", taken)
    await _write(store, lease(owner="b", checkpoint=at(7)), "b", 1)
    kept = await store.read_lease(lease_key())
    expect(kept is not None and kept.extra == extra, "unknown fields of a lease survive a write of its owner", kept)
    stream = replace(_stream(), extra=extra)
    await store.put_stream(stream)
    marked = await store.write_stream(replace(_stream(), bootstrapped=True), 0)
    expect(marked is not None and marked.extra == extra, "unknown fields of a stream survive write_stream", marked)
    command = ControlRow(command_id="a", action="pause", extra=extra)
    await store.put_control(command)
    await store.write_control(replace(command, state="applied", extra={}))
    (answered,) = await store.read_controls()
    expect(answered.extra == extra, "unknown fields of a command survive its answer", answered)
    await store.delete_app(APP_ID)
    await store.open(replace(arena.app_row("newer"), extra=extra))
    await store.renew_watch()
    await store.record_incarnation(await store.identity(), "restored")
    await store.move_app("here", "moved", "elsewhere://")
    app = await store.read_app()
    expect(app is not None and app.extra == extra, "unknown fields of an application survive every write", app)
    expect((await store.poll()).app == app, "a poll shows unknown fields of an application")


async def a_member_is_registered_once(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    row = MemberRow(
        member_id="a",
        counter=1,
        expiry_ms=5_000,
        protocol="1.2",
        order="key",
        streams=(short_id(STREAM), "other1"),
        shards_max=3,
        load=4,
        change_count=5,
        changed=tuple(lease_key(number).short_name for number in range(CHANGED_MAX)),
        reads_healthy=False,
        draining=True,
        wanted=_requests(REQUESTS_MAX),
        joined_wall_ms=6,
    )
    new = await store.register_member(row)
    expect(new == row, "register_member keeps and returns the whole row", new)
    again = await other.register_member(replace(row, expiry_ms=1))
    expect(again == row, "register_member never replaces a row", again)
    await other.register_member(member("A"))
    found = [one.member_id for one in (await store.poll()).members]
    expect(found == ["A", "a"], "a poll shows all members, in the order of their ids", found)


async def a_heartbeat_raises_the_counter_of_a_live_row_and_makes_none(arena: Arena) -> None:
    store = await arena.open()
    expect(await _beat(store, "a", 1) is None, "a heartbeat without a row finds None")
    expect(not (await store.poll()).members, "a heartbeat is never an upsert")
    await store.register_member(member("a"))
    names = tuple(lease_key(number).short_name for number in range(2))
    carried = {"load": 7, "change_count": 2, "changed": names, "reads_healthy": False, "draining": True}
    row = await _beat(store, "a", 3, **carried)
    expected = member("a", counter=3, **carried)
    expect(row == expected, "a heartbeat writes its attempt as the counter, and all that it carries", row)
    late = await _beat(store, "a", 2)
    expect(late == expected, "a heartbeat that arrives late changes nothing and returns the row", late)
    same = await _beat(store, "a", 3, **carried | {"load": 9})
    expect(same == expected, "a heartbeat that arrives twice counts once", same)
    expect(
        await _stored(store, "a") == expected, "a heartbeat that is late or repeated leaves the stored row as it was"
    )
    answer = await store.heartbeat(HeartbeatWrite(member_id="a", attempt=8))
    expect(answer.counter_before == 3, "a heartbeat returns the counter that was stored before", answer)
    expect(answer.evidence in {None, await store.identity()}, "a heartbeat says which storage answered", answer)


async def a_seal_holds_only_for_the_observed_counter_and_is_final(arena: Arena) -> None:
    store = await arena.open()
    expect(await store.seal_member("a", 0) is None, "sealing an unknown member returns None")
    await store.register_member(member("a"))
    await _beat(store, "a", 4)
    row = await store.seal_member("a", 3)
    expect(row is not None and row.state == "live", "a member whose counter moved is not sealed", row)
    expect(await _stored(store, "a") == row, "a refused seal leaves the stored row as it was")
    row = await store.seal_member("a", 4)
    expect(row is not None and row.state == "sealed", "a member with the observed counter is sealed", row)
    beaten = await _beat(store, "a", 5)
    expect(beaten == row, "a heartbeat after the seal changes nothing, and returns the sealed row", beaten)
    left = await store.leave("a")
    expect(left == row, "a sealed member does not leave: sealed is final", left)
    expect(await _stored(store, "a") == row, "a sealed member's stored row stays as it was")


async def leaving_is_one_write_and_final(arena: Arena) -> None:
    store = await arena.open()
    expect(await store.leave("a") is None, "leave of an unknown member returns None")
    await store.register_member(member("a"))
    row = await store.leave("a")
    expect(row is not None and row.state == "left", "leave changes a live member to left", row)
    expect(await _beat(store, "a", 9) == row, "a member that left does not come back")
    expect(await store.seal_member("a", 0) == row, "a member that left cannot be sealed")
    expect(await _stored(store, "a") == row, "the stored row of a member that left stays as it was")


async def a_hand_off_is_asked_for_once_and_answered_by_a_heartbeat(arena: Arena) -> None:
    store = await arena.open()
    first, second, *others = _requests(REQUESTS_MAX + 1)
    expect(await store.request_hand_off("a", first) is None, "a request to an unknown member returns None")
    await store.register_member(member("a"))
    await store.request_hand_off("a", first)
    await store.request_hand_off("a", second)
    row = await store.request_hand_off("a", first)
    expect(row is not None and row.wanted == (first, second), "a request is kept once, in order", row)
    expect(await _stored(store, "a") == row, "the stored requests are those that request_hand_off returned")
    row = await _beat(store, "a", 1, answered=(first,))
    expect(row is not None and row.wanted == (second,), "answered requests are removed, others stay", row)
    for request in others:
        row = await store.request_hand_off("a", request)
    full = (second, *others)
    expect(row is not None and row.wanted == full, "a row accepts the maximum number of requests", row)
    row = await store.request_hand_off("a", first)
    expect(row is not None and row.wanted == full, "a row rejects one request more", row)
    expect(await _stored(store, "a") == row, "the stored requests are those that request_hand_off returned")
    await _beat(store, "a", 2, answered=full[1:])
    await store.leave("a")
    row = await store.request_hand_off("a", first)
    expect(row is not None and row.wanted == (second,), "a member that left accepts no request", row)
    expect(await _stored(store, "a") == row, "a refused request leaves the stored row as it was")


async def a_member_is_deleted_only_after_it_ended(arena: Arena) -> None:
    store = await arena.open()
    await store.register_member(member("a"))
    expect(not await store.delete_member("a"), "a live member is not deleted")
    expect(not await store.delete_member("b"), "an unknown member cannot be deleted")
    await store.register_member(member("c"))
    await store.seal_member("c", 0)
    expect(await store.delete_member("c"), "a sealed member is deleted")
    await store.register_member(member("d"))
    await store.leave("d")
    expect(await store.delete_member("d"), "a member that left is deleted")
    found = [row.member_id for row in (await store.poll()).members]
    expect(found == ["a"], "only the deleted rows are gone", found)


async def no_member_of_this_process_is_called_dead(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    await store.register_member(member("a"))
    await other.register_member(member("b"))
    for handle in (store, other):
        dead = list((await handle.poll()).known_dead)
        expect(dead == [], "known_dead names only members whose process is gone", dead)


_LARGE = 10**128 + 7  # a sequence number may have 129 digits
_HANDLER_FAILED = StoppedByHandler(position=str(_LARGE), partition_key="user-1", attempts=3, error="ValueError: café")


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
        stopped=Stopped(_HANDLER_FAILED, Position(_LARGE), "user-1", "m", 7),
        paused=True,
        takes_without_progress=8,
        records_handled=9,
        checkpointed_at_wall_ms=10,
    )
    plain = lease(
        start=after_sequence_number(_LARGE), stopped=Stopped(StoppedByCrashes(owner_count=6), None, None, "", 0)
    )
    for row in (full, plain, lease(1)):
        await store.create_lease(row)
        found = await other.read_lease(row.key)
        expect(found == row, f"a row is read as it was written: {row!r}", found)


async def a_lease_is_created_once(arena: Arena) -> None:
    store = await arena.open()
    row = lease(start=TRIM_HORIZON)
    expect(await store.create_lease(row) == row, "create_lease returns the new row")
    again = await store.create_lease(lease(start=at_timestamp(5.0), owner="b"))
    expect(again == row, "create_lease never replaces a row, and returns the stored one", again)
    expect(await store.read_lease(lease_key(1)) is None, "a row that is not there is None")


async def rows_are_read_in_order_and_finished_ones_only_when_asked_for(arena: Arena) -> None:
    store = await arena.open()
    keys = [LeaseKey("b:s:1", 0, "x"), LeaseKey("a:s:1", 10, "x"), LeaseKey("a:s:1", 9, "y"), LeaseKey("a:s:1", 9, "x")]
    for key in keys:
        await store.create_lease(LeaseRow(key=key))
    done = LeaseRow(key=LeaseKey("a:s:1", 9, "w"), finish=Finish("end", ("x", "y")))
    await store.create_lease(done)
    leases = await store.read_leases()
    expect(leases.evidence in {None, await store.identity()}, "the answer says which storage it came from", leases)
    found = [row.key for row in leases]
    expect(found == sorted(keys), "unfinished rows, ordered by stream, generation number and shard", found)
    found = [row.key for row in await store.read_leases(with_finished=True)]
    expect(found == sorted([*keys, done.key]), "with_finished adds the finished ones, in the same order", found)
    expect(await store.read_lease(done.key) == done, "read_lease finds a finished row too")


async def a_lease_is_taken_from_the_expected_owner_at_the_expected_version(arena: Arena) -> None:
    store = await arena.open()
    await store.register_member(member("a"))
    await store.create_lease(lease())
    taken = await _take(store, 0, "a", None, 0)
    expected = lease(owner="a", version=1, epoch=1, takes_without_progress=1)
    expect(taken == expected, "a take sets owner and adds 1 to version, epoch, takes_without_progress", taken)
    expect(await _take(store, 0, "b", None, 1) == Conflict(expected), "the owner must be the expected one")
    expect(await _take(store, 0, "b", "a", 0) == Conflict(expected), "the version must be the expected one")
    taken = await _take(store, 0, "b", "a", 1)
    expected = lease(owner="b", version=2, epoch=2, takes_without_progress=2)
    expect(taken == expected, "a take compares owner and version, and no other row; version and epoch grow", taken)
    expect(await _take(store, 2, "b", None, 0) == Conflict(None), "a take of a row that is not there: Conflict(None)")
    over = lease(3, finish=Finish("end"))
    await store.create_lease(over)
    expect(await _take(store, 3, "b", None, 0) == Conflict(over), "a finished lease is not taken")
    found = list(await store.read_leases(with_finished=True))
    expect(found == [taken, over], "what was refused has changed nothing", found)


async def the_epoch_of_a_take_passes_its_floor(arena: Arena) -> None:
    store = await arena.open()
    await store.create_lease(lease(epoch=2))
    row = await store.take_lease(lease_key(), "a", expected_owner=None, expected_version=0, epoch_floor=7)
    expect(isinstance(row, LeaseRow) and row.epoch == 8, "a child's epoch starts above its parents'", row)
    await store.create_lease(lease(1, epoch=9))
    row = await store.take_lease(lease_key(1), "a", expected_owner=None, expected_version=0, epoch_floor=7)
    expect(isinstance(row, LeaseRow) and row.epoch == 10, "a floor never lowers an epoch", row)
    found = [one.epoch for one in await store.read_leases()]
    expect(found == [8, 10], "the stored epochs are those that take_lease returned", found)


async def only_the_owner_writes_a_lease_and_only_over_what_it_saw(arena: Arena) -> None:
    store = await arena.open()
    row = lease(owner="a", version=1)
    await store.create_lease(row)
    written = await _write(store, replace(row, checkpoint=at(5)), "a", 1)
    expected = replace(row, checkpoint=at(5), version=2)
    expect(written == expected, "the owner's write is stored with one version more", written)
    other = await _write(store, replace(row, checkpoint=at(9)), "b", 2)
    expect(other == Conflict(expected), "another member's write is refused, and returns the stored row", other)
    old = await _write(store, replace(row, checkpoint=at(4)), "a", 1)
    expect(old == Conflict(expected), "an older write does not replace a newer one", old)
    none = await _write(store, lease(7), "a", 0)
    expect(none == Conflict(None), "a write creates no row", none)
    given = await _write(store, replace(expected, owner="b"), "a", 2)
    expect(isinstance(given, LeaseRow) and given.owner == "b", "a lease is given by its owner's write", given)
    freed = await _write(store, replace(expected, owner=None), "b", 3)
    expect(isinstance(freed, LeaseRow) and freed.owner is None, "a lease is released by its owner's write", freed)
    expect(await store.read_lease(row.key) == freed, "what was acknowledged is what is read")


async def a_lost_answer_is_recognised_by_a_retry(arena: Arena) -> None:
    store = await arena.open()
    await store.create_lease(lease())
    await _take(store, 0, "a", None, 0)  # the answer of this one is lost
    again = await _take(store, 0, "a", None, 0)
    expect(isinstance(again, Conflict), "the same take twice is a conflict", again)
    assert isinstance(again, Conflict)
    mine = again.row
    expect(mine is not None and (mine.owner, mine.version) == ("a", 1), "the conflict shows the taker as owner", mine)
    assert mine is not None
    commit = replace(mine, checkpoint=at(5))
    await _write(store, commit, "a", 1)  # lost too
    again = await _write(store, commit, "a", 1)
    expected = Conflict(replace(commit, version=2))
    expect(again == expected, "the same commit twice is a conflict that shows the commit", again)


async def only_a_finished_row_is_deleted(arena: Arena) -> None:
    store = await arena.open()
    row = lease(owner="a")
    await store.create_lease(row)
    expect(not await store.delete_lease(row.key, 0), "an unfinished row is not deleted")
    done = replace(row, owner=None, finish=Finish("end"))
    await _write(store, done, "a", 0)
    expect(not await store.delete_lease(row.key, 0), "a row of another version is not deleted")
    expect(await store.delete_lease(row.key, 1), "a finished row of the expected version is deleted")
    expect(await store.read_lease(row.key) is None, "a deleted row is gone")
    expect(not await store.delete_lease(row.key, 1), "a row is not deleted twice")


_HANDLES = 3
_RACERS = 8
_ROUNDS = 5


async def _race(stores: Sequence[LeaseStore], call: Callable[[LeaseStore, int], Awaitable[T]]) -> list[T]:
    """The outcomes of concurrent calls, each with the number of its racer."""
    return await asyncio.gather(*(call(stores[racer % len(stores)], racer) for racer in range(_RACERS)))


async def one_of_many_takes_holds(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    for number in range(_ROUNDS):
        await stores[0].create_lease(lease(number))

        def take(store: LeaseStore, racer: int, number: int = number) -> Awaitable[LeaseRow | Conflict]:
            return _take(store, number, f"m{racer}", None, 0)

        outcomes = await _race(stores, take)
        won = [outcome for outcome in outcomes if isinstance(outcome, LeaseRow)]
        expect(len(won) == 1, "exactly one of the takes succeeds", outcomes)
        lost = [outcome.row for outcome in outcomes if isinstance(outcome, Conflict)]
        expect(all(row == won[0] for row in lost), "every loser gets the winner's row", lost)


async def one_of_many_writes_of_a_version_holds(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    row = lease(owner="a")
    await stores[0].create_lease(row)
    for version in range(_ROUNDS):

        def write(store: LeaseStore, racer: int, version: int = version) -> Awaitable[LeaseRow | Conflict]:
            return _write(store, replace(row, checkpoint=at(version * 100 + racer)), "a", version)

        outcomes = await _race(stores, write)
        won = [outcome for outcome in outcomes if isinstance(outcome, LeaseRow)]
        expect(len(won) == 1 and won[0].version == version + 1, "exactly one write of a version succeeds", outcomes)
        expect(await stores[-1].read_lease(row.key) == won[0], "every handle reads the write that succeeded")


async def concurrent_opens_agree_on_one_application(arena: Arena) -> None:
    stores = [arena.make() for _ in range(_RACERS)]
    rows = await _race(stores, lambda store, racer: store.open(arena.app_row(f"id-{racer}")))
    expect(all(row == rows[0] for row in rows), "all callers of open get the same row", rows)
    expect(await stores[0].read_app() == rows[0], "the row that open returned is stored")


async def concurrent_creates_agree_on_one_row(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    leases = await _race(stores, lambda store, racer: store.create_lease(lease(start=at_timestamp(float(racer)))))
    expect(all(row == leases[0] for row in leases), "all callers of create_lease get the same row", leases)
    streams = await _race(
        stores, lambda store, racer: store.put_stream(replace(_stream(), origin=at_timestamp(float(racer))))
    )
    expect(all(row == streams[0] for row in streams), "all first workers agree on one pin", streams)


async def a_seal_and_a_heartbeat_do_not_both_hold(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    for number in range(_ROUNDS):
        name = f"m{number}"
        await stores[0].register_member(member(name))
        sealed, beaten = await asyncio.gather(stores[1].seal_member(name, 0), _beat(stores[2], name, 1))
        final = await _stored(stores[0], name)
        assert final is not None
        allowed = {("sealed", 0), ("live", 1)}
        expect((final.state, final.counter) in allowed, "either the seal or the heartbeat succeeds, not both", final)
        expect(sealed is not None and sealed.state == final.state, "the result of the seal says which", sealed)
        expect(beaten is not None and beaten.state == final.state, "the result of the heartbeat says which", beaten)


async def no_request_is_lost_to_a_heartbeat(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    await stores[0].register_member(member("a"))
    requests = _requests(REQUESTS_MAX)
    await asyncio.gather(
        *(stores[number % _HANDLES].request_hand_off("a", request) for number, request in enumerate(requests)),
        *(_beat(stores[attempt % _HANDLES], "a", attempt + 1) for attempt in range(_ROUNDS)),
    )
    (row,) = (await stores[0].poll()).members
    expect(sorted(row.wanted) == sorted(requests), "every request is in the row", row.wanted)
    expect(row.counter == _ROUNDS, "the counter is the highest attempt", row.counter)


async def what_was_acknowledged_outlives_the_handles(arena: Arena) -> None:
    store = await arena.open()
    await store.register_member(member("a"))
    beaten = await _beat(store, "a", 1)
    await store.put_stream(_stream())
    await store.create_lease(lease(owner="a"))
    committed = await _write(store, lease(owner="a", checkpoint=at(5)), "a", 0)
    await store.put_control(ControlRow(command_id="c", action="pause"))
    incarnation = await store.identity()
    await arena.close()

    store = await arena.open()
    expect(await store.read_lease(lease().key) == committed, "the last commit is there")
    expect(list((await store.poll()).members) == [beaten], "the members are there")
    expect(len(await store.read_streams()) == 1, "the streams are there")
    expect(len(await store.read_controls()) == 1, "the commands are there")
    expect(await store.identity() == incarnation, "the incarnation outlives the handles")


async def a_late_write_does_not_show_in_the_next_application_of_the_name(arena: Arena) -> None:
    old, new = await arena.open(), await arena.open()
    for number in range(_ROUNDS):
        app_id, successor = f"{APP_ID}{number or ''}", f"{APP_ID}{number + 1}"
        await asyncio.gather(
            *(old.create_lease(lease(racer)) for racer in range(_RACERS // 2)),
            new.delete_app(app_id),
            *(old.create_lease(lease(racer)) for racer in range(_RACERS)),
        )
        await new.open(arena.app_row(successor))
        await old.put_stream(_stream())
        await old.write_stream(replace(_stream(), bootstrapped=True), 0)
        await old.create_lease(lease())
        await old.register_member(member("a"))
        await old.put_control(ControlRow(command_id="a", action="pause"))
        await old.write_status(StatusRow(member_id="a", revision=1))
        await old.renew_watch()
        await old.record_incarnation(await old.identity(), "another")
        app = await new.read_app()
        expect(app == replace(arena.app_row(successor), incarnation=await new.identity()), "its row is its own", app)
        rest = await _rows(new)
        expect(not rest, "rows are stored under the app_id that their handle opened", rest)
        poll = await old.poll()
        expect(poll.app == app, "a poll shows the application that there is now", poll.app)
        await old.open(arena.app_row(successor))


async def applications_do_not_see_each_other(arena: Arena) -> None:
    store = await arena.open()
    await store.create_lease(lease(owner="a"))
    await store.register_member(member("a"))
    other = await arena.another()
    await other.create_lease(lease(1))
    await other.register_member(member("b"))
    expect([row.key for row in await other.read_leases()] == [lease(1).key], "leases are the application's own")
    expect([row.member_id for row in (await other.poll()).members] == ["b"], "members are the application's own")
    expect(await other.read_lease(lease().key) is None, "read_lease finds only rows of the application")


# event loops, threads, deadlines


_BEATS = 20
_THREADS = 4
_GIVE_UP_SECONDS = 0.2
_ANSWERED_SECONDS = 10.0


def _in_a_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Future[T]":
    """The work on an event loop of its own, as the heartbeats of a worker."""
    return asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(work()))


async def two_event_loops_use_one_handle(arena: Arena) -> None:
    store = await arena.open()
    await store.register_member(member("a"))
    await store.create_lease(lease(owner="a"))

    async def beat(first: int) -> list[MemberRow | None]:
        return [await _beat(store, "a", first + n) for n in range(_BEATS)]

    for life in range(2):  # a worker that was sealed starts another thread
        beating = _in_a_thread(partial(beat, life * _BEATS + 1))
        for number in range(_BEATS):
            version = life * _BEATS + number
            written = await _write(store, lease(owner="a", checkpoint=at(version)), "a", version)
            expect(isinstance(written, LeaseRow), "one loop writes while heartbeats come from another", written)
            await store.poll()
        counters = [row.counter for row in await beating if row is not None]
        expected = [life * _BEATS + 1 + number for number in range(_BEATS)]
        expect(counters == expected, "heartbeats from a loop of their own are all written", counters)
    row = await _stored(store, "a")
    expect(row is not None and row.counter == 2 * _BEATS, "the first loop sees the heartbeats of the other", row)


async def threads_with_handles_of_their_own_race_for_one_lease(arena: Arena) -> None:
    store = await arena.open()
    await store.create_lease(lease())
    handles = [arena.make() for _ in range(_THREADS)]

    async def race(handle: LeaseStore, number: int) -> LeaseRow | Conflict:
        await handle.open(arena.app_row())
        taken = await _take(handle, 0, f"m{number}", None, 0)
        if arena.is_durable:
            await handle.close()
        return taken

    outcomes = await asyncio.gather(
        *(_in_a_thread(partial(race, handle, number)) for number, handle in enumerate(handles))
    )
    won = [outcome for outcome in outcomes if isinstance(outcome, LeaseRow)]
    expect(len(won) == 1, "exactly one of the threads takes the lease", outcomes)


async def a_cancelled_call_leaves_the_handle_usable(arena: Arena) -> None:
    store = await arena.open()
    row = lease(owner="a")
    await store.create_lease(row)
    for number in range(_ROUNDS):
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await _write(store, replace(row, checkpoint=at(number)), "a", row.version)
        row = await _write_over_what_is_stored(store, row, number)
    expect(await store.read_lease(row.key) == row, "what was written last is what is read")


async def _write_over_what_is_stored(store: LeaseStore, row: LeaseRow, number: int) -> LeaseRow:
    """A cancelled write may take effect at any time, so the next write of the owner may conflict with it, once."""
    for _ in range(2):
        outcome = await _write(store, replace(row, checkpoint=at(100 + number)), "a", row.version)
        if isinstance(outcome, LeaseRow):
            return outcome
        expect(
            outcome.row is not None and outcome.row.version == row.version + 1,
            "a conflict shows the cancelled write, which took effect once",
            outcome,
        )
        assert outcome.row is not None
        row = outcome.row
    raise AssertionError("a cancelled call takes effect at most once")


async def a_call_to_a_slow_store_can_be_cancelled_and_the_store_answers_later(arena: Arena) -> None:
    if arena.slow is None:
        return
    store = await arena.open()
    row = lease(owner="a")
    await store.create_lease(row)
    with arena.slow():
        started = time.monotonic()
        try:
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                await _write(store, replace(row, checkpoint=at(1)), "a", 0)
        except (TimeoutError, LeaseStoreError):
            pass
        else:
            raise AssertionError("slow= must keep the storage from answering a write")
        waited = time.monotonic() - started
        expect(waited < _ANSWERED_SECONDS, "a call can be cancelled at its deadline", waited)
    deadline = time.monotonic() + _ANSWERED_SECONDS
    while True:
        try:
            found = await store.read_lease(row.key)
            assert found is not None
            await _write_over_what_is_stored(store, found, 0)
        except LeaseStoreError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            return


async def a_roll_back_shows(arena: Arena) -> None:
    if arena.snapshot is None:
        return
    store = await arena.open()
    await store.register_member(member("a"))
    await store.create_lease(lease(owner="a"))
    await _beat(store, "a", 1)
    roll_back = arena.snapshot()
    await _beat(store, "a", 5)
    await _write(store, lease(owner="a", checkpoint=at(5)), "a", 0)
    before = await store.poll()
    roll_back()
    try:
        after = await store.poll()
        leases = await store.read_leases()
    except LeaseStoreError:
        return  # the store refuses to answer, so no caller sees old rows
    if before.evidence is not None and after.evidence != before.evidence:
        return
    counters, versions = [row.counter for row in after.members], [row.version for row in leases]
    expect(counters == [1], "after a rollback the identity differs, or the old rows are returned", counters)
    expect(versions == [0], "after a rollback the identity differs, or the old leases are returned", versions)
    answer = await store.heartbeat(HeartbeatWrite(member_id="a", attempt=6))
    expect(answer.counter_before == 1, "after a rollback, a heartbeat returns the counter that was stored", answer)


_CHECKS: list[Callable[[Arena], Awaitable[None]]] = [
    check for name, check in list(globals().items()) if inspect.iscoroutinefunction(check) and name[0] != "_"
]
"""All public coroutine functions of this module."""
_DURABLE_CHECKS = (
    what_was_acknowledged_outlives_the_handles,
    a_late_write_does_not_show_in_the_next_application_of_the_name,
    applications_do_not_see_each_other,
)
_SEVERAL_WORKERS_CHECKS = (
    threads_with_handles_of_their_own_race_for_one_lease,
    a_late_write_does_not_show_in_the_next_application_of_the_name,
)


def check_lease_store(
    make_store: MakeStore,
    *,
    durable: bool = True,
    single_worker: bool = False,
    slow: Callable[[], AbstractContextManager[Any]] | None = None,
    snapshot: Callable[[], Callable[[], None]] | None = None,
) -> None:
    """Raises an `ExceptionGroup` of `AssertionError`s, one for each rule that does not hold.

    `make_store(app)` returns a new, unopened handle; handles of the same application share its rows. If the rows live
    in a single object, pass `durable=False`: all checks then share one handle. They also do with `single_worker=True`,
    for a store that only one worker can use at a time; acknowledged writes must survive closing the handle.

    `slow` is a context manager in which the storage answers no write; with it, deadlines are tested too. `snapshot` is
    a function that saves the storage and returns a function that restores it; with it, rollbacks are tested too.
    """
    omitted = (*(() if durable else _DURABLE_CHECKS), *(_SEVERAL_WORKERS_CHECKS if single_worker else ()))
    checks = [check for check in _CHECKS if check not in omitted]
    failures: list[Exception] = []
    for check in checks:
        arena = Arena(make_store, durable=durable, single_worker=single_worker, slow=slow, snapshot=snapshot)
        try:
            asyncio.run(_run(check, arena))
        except Exception as error:  # noqa: BLE001 -- all failures are reported at once
            error.add_note(f"in the check {check.__name__.replace('_', ' ')!r}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(
            f"{len(failures)} of {len(checks)} rules of the lease store contract do not hold", failures
        )


async def _run(check: Callable[[Arena], Awaitable[None]], arena: Arena) -> None:
    try:
        await check(arena)
    finally:
        await arena.close()
