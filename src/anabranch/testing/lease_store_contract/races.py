"""Checks of calls that meet: of all writes under one condition exactly one holds, through however many handles."""

import asyncio

from msgspec.structs import replace

from anabranch._model.leases import Beat, Conflict, HandOffRequest, LeaseRow, StreamRow
from anabranch._model.start_positions import at_timestamp
from anabranch.testing.lease_store_contract.arena import APP_ID, STREAM, Arena, at, expect, lease, lease_key, member

__all__ = ["CHECKS"]

_HANDLES = 3
_RACERS = 8
_ROUNDS = 5


async def one_of_many_takes_holds(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    for number in range(_ROUNDS):
        key = lease_key(number)
        await stores[0].create_lease(lease(number), app_id=APP_ID)
        takes = (
            stores[racer % _HANDLES].take_lease(key, f"m{racer}", expected_owner=None, expected_version=0)
            for racer in range(_RACERS)
        )
        outcomes = await asyncio.gather(*takes)
        won = [outcome for outcome in outcomes if isinstance(outcome, LeaseRow)]
        expect(len(won) == 1, "exactly one of the takes holds", outcomes)
        lost = [outcome.row for outcome in outcomes if isinstance(outcome, Conflict)]
        expect(all(row == won[0] for row in lost), "every loser is shown the winner's row", lost)


async def one_of_many_writes_of_a_version_holds(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    row = lease(owner="a")
    await stores[0].create_lease(row, app_id=APP_ID)
    for version in range(_ROUNDS):
        writes = (
            stores[racer % _HANDLES].write_lease(
                replace(row, checkpoint=at(version * 100 + racer)), member_id="a", expected_version=version
            )
            for racer in range(_RACERS)
        )
        outcomes = await asyncio.gather(*writes)
        won = [outcome for outcome in outcomes if isinstance(outcome, LeaseRow)]
        expect(len(won) == 1 and won[0].version == version + 1, "exactly one write of a version holds", outcomes)
        expect(await stores[-1].read_lease(row.key) == won[0], "and it is what every handle reads")


async def many_who_create_agree_on_one_row(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    leases = await asyncio.gather(
        *(
            stores[racer % _HANDLES].create_lease(lease(start=at_timestamp(float(racer))), app_id=APP_ID)
            for racer in range(_RACERS)
        )
    )
    expect(all(row == leases[0] for row in leases), "all who create a lease get the same row", leases)
    streams = await asyncio.gather(
        *(
            stores[racer % _HANDLES].put_stream(
                StreamRow(
                    stream_key=STREAM, name="orders", arn="", created_seconds=1.0, origin=at_timestamp(float(racer))
                ),
                app_id=APP_ID,
            )
            for racer in range(_RACERS)
        )
    )
    expect(all(row == streams[0] for row in streams), "all first workers agree on one pin", streams)


async def nothing_outlives_the_application_that_it_was_made_in(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    for number in range(_ROUNDS):
        app_id, successor = f"{APP_ID}{number or ''}", f"{APP_ID}{number + 1}"
        outcomes = await asyncio.gather(
            *(stores[racer % _HANDLES].create_lease(lease(racer), app_id=app_id) for racer in range(_RACERS // 2)),
            stores[0].delete_app(app_id),
            stores[1].open(arena.app_row(successor)),
            *(stores[racer % _HANDLES].create_lease(lease(racer), app_id=app_id) for racer in range(_RACERS)),
        )
        await stores[0].open(arena.app_row(successor))
        rest = await stores[-1].read_leases(with_finished=True)
        expect(not rest, "what was made went with its application, and what came later was not made", (outcomes, rest))


async def a_seal_and_a_heartbeat_do_not_both_hold(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    for number in range(_ROUNDS):
        name = f"m{number}"
        await stores[0].register_member(member(name))
        sealed, beaten = await asyncio.gather(
            stores[1].seal_member(name, 0), stores[2].heartbeat(Beat(member_id=name, attempt=1))
        )
        final = next(row for row in await stores[0].read_members() if row.member_id == name)
        allowed = {("sealed", 0), ("live", 1)}
        expect((final.state, final.counter) in allowed, "either the seal holds or the heartbeat does", final)
        expect(sealed is not None and sealed.state == final.state, "the sealer is told which", sealed)
        expect(beaten is not None and beaten.state == final.state, "the member is told which", beaten)


async def no_request_is_lost_to_a_heartbeat(arena: Arena) -> None:
    stores = [await arena.open() for _ in range(_HANDLES)]
    await stores[0].register_member(member("a"))
    requests = [HandOffRequest(lease_key(number), "b") for number in range(_ROUNDS)]
    await asyncio.gather(
        *(stores[number % _HANDLES].request_hand_off("a", request) for number, request in enumerate(requests)),
        *(stores[attempt % _HANDLES].heartbeat(Beat(member_id="a", attempt=attempt + 1)) for attempt in range(_ROUNDS)),
    )
    (row,) = await stores[0].read_members()
    expect(sorted(row.wanted, key=lambda one: one.key) == requests, "every request is in the row", row.wanted)
    expect(row.counter == _ROUNDS, "and the counter is the highest attempt", row.counter)


CHECKS = (
    one_of_many_takes_holds,
    one_of_many_writes_of_a_version_holds,
    many_who_create_agree_on_one_row,
    nothing_outlives_the_application_that_it_was_made_in,
    a_seal_and_a_heartbeat_do_not_both_hold,
    no_request_is_lost_to_a_heartbeat,
)
