"""Checks of what belongs to the application as a whole: its own row, its streams, its commands."""

from msgspec.structs import replace

from anabranch._model.leases import ControlRow, StreamRow
from anabranch._model.start_positions import TRIM_HORIZON, at_timestamp
from anabranch.testing.lease_store_contract.arena import APP_ID, STREAM, Arena, expect, lease, lease_key, member

__all__ = ["CHECKS"]


def _stream(number: int = 0) -> StreamRow:
    return StreamRow(
        stream_key=f"{STREAM}{number}",
        name="orders",
        arn="arn:aws:kinesis:eu-west-1:123456789012:stream/orders",
        created_seconds=1_699_999_999.5,
        origin=at_timestamp(1_700_000_000.123),
    )


async def an_application_is_made_once(arena: Arena) -> None:
    store = arena.make()
    expect(await store.read_app() is None, "read_app before the first open finds nothing")
    first = await store.open(arena.app_row("first"))
    expect(first == arena.app_row("first"), "open returns the row that it made", first)
    again = await (await arena.open()).open(arena.app_row("second"))
    expect(again.app_id == "first", "open keeps the row that stands and returns it", again)
    expect(await store.read_app() == first, "read_app returns the row that stands")


async def the_incarnation_stays_and_is_recorded_under_a_condition(arena: Arena) -> None:
    store, other = await arena.open(), await arena.open()
    incarnation = await store.incarnation()
    expect(bool(incarnation), "incarnation is not empty")
    expect(await other.incarnation() == incarnation, "every handle sees the same incarnation")
    recorded = await store.record_incarnation("", incarnation)
    expect(recorded is not None and recorded.incarnation == incarnation, "record_incarnation writes", recorded)
    late = await other.record_incarnation("", "another")
    expect(late == recorded, "record_incarnation changes nothing where the expected one is not the stored one", late)
    expect(await other.read_app() == recorded, "the recorded incarnation is read by others")


async def a_stream_is_put_once_and_written_by_version(arena: Arena) -> None:
    store = await arena.open()
    row = _stream()
    expect(await store.put_stream(row, app_id=APP_ID) == row, "put_stream returns the new row")
    other = replace(row, origin=TRIM_HORIZON)
    expect(
        await store.put_stream(other, app_id=APP_ID) == row,
        "put_stream never replaces: one worker's pin is everybody's",
    )
    done = await store.write_stream(replace(row, bootstrapped=True), 0, app_id=APP_ID)
    expect(done == replace(row, bootstrapped=True, version=1), "write_stream adds 1 to the version", done)
    expect(await store.write_stream(row, 0, app_id=APP_ID) is None, "write_stream refuses an old version")
    expect(await store.write_stream(_stream(7), 0, app_id=APP_ID) is None, "write_stream makes no row")
    await store.put_stream(_stream(1), app_id=APP_ID)
    found = [stream.stream_key for stream in await store.read_streams()]
    expect(found == [f"{STREAM}0", f"{STREAM}1"], "read_streams returns all, in the order of their keys", found)


async def nothing_begins_in_another_application_of_the_name(arena: Arena) -> None:
    store = arena.make()
    await store.open(arena.app_row("second"))
    row = _stream()
    expect(await store.put_stream(row, app_id=APP_ID) is None, "put_stream makes nothing under another id")
    expect(await store.create_lease(lease(), app_id=APP_ID) is None, "create_lease makes nothing under another id")
    expect(not await store.read_streams(), "there is no stream")
    expect(not await store.read_leases(with_finished=True), "there is no lease")
    await store.put_stream(row, app_id="second")
    marked = await store.write_stream(replace(row, bootstrapped=True), 0, app_id=APP_ID)
    expect(marked is None, "write_stream writes nothing under another id", marked)
    expect(list(await store.read_streams()) == [row], "the stream is not marked as begun")
    await store.create_lease(lease(), app_id="second")
    found = await store.create_lease(lease(), app_id=APP_ID)
    expect(found is None, "nor is what stands shown as the caller's own", found)
    expect(await store.delete_app("second"), "the application is deleted")
    expect(await store.put_stream(row, app_id="second") is None, "put_stream makes nothing where there is none")
    expect(await store.create_lease(lease(), app_id="second") is None, "nor does create_lease")
    await store.open(arena.app_row("third"))
    rest = [*await store.read_streams(), *await store.read_leases(with_finished=True)]
    expect(not rest, "and what comes late is not found by the next one", rest)


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
    expect(not await store.write_control(replace(early, command_id="none")), "an unknown command is not made")
    expect(list(await store.read_controls()) == [applied, late], "the answer is kept")


async def an_application_is_deleted_whole_and_never_while_a_member_lives(arena: Arena) -> None:
    store = await arena.open()
    await store.put_stream(_stream(), app_id=APP_ID)
    await store.create_lease(lease(), app_id=APP_ID)
    await store.put_control(ControlRow(command_id="a", action="pause"))
    await store.register_member(member("a"))
    expect(not await store.delete_app("first"), "delete_app refuses while a member is live")
    await store.leave("a")
    expect(not await store.delete_app("second"), "delete_app refuses under another id")
    expect(len(await store.read_members()) == 1, "a refused delete_app removes nothing")
    expect(await store.delete_app("first"), "delete_app removes an application whose members have all left")
    expect(not await store.delete_app("first"), "delete_app finds nothing the second time")
    expect(await store.read_app() is None, "the application's row is gone")
    await store.open(arena.app_row("second"))
    rest = [await store.read_members(), await store.read_streams(), await store.read_controls()]
    rest.append(await store.read_leases(with_finished=True))
    expect(not any(rest), "nothing of it is left for a new application of the name", rest)


CHECKS = (
    an_application_is_made_once,
    an_application_is_deleted_whole_and_never_while_a_member_lives,
    the_incarnation_stays_and_is_recorded_under_a_condition,
    a_stream_is_put_once_and_written_by_version,
    nothing_begins_in_another_application_of_the_name,
    a_command_is_answered_once,
)
