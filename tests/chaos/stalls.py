"""Handlers that block the event loop: briefly, which delays records; for too long, which also loses leases."""

import time

from recovery import keys_of, measured_fleet, recovered_at, settle, shards_per_process

from anabranch.testing import AuditReport


async def run_block(folder: str, *, seconds: float) -> tuple[list[dict], AuditReport]:
    """Default settings: one handler blocks the loop of its worker. The events of both workers, and the audit."""
    async with measured_fleet(folder, shards=4) as (measured, writing):
        fleet, traffic = measured.fleet, measured.traffic
        await fleet.join(2)
        await fleet.until(lambda: shards_per_process(fleet.effects) == [2, 2], "both at work on two shards")
        before = len(fleet.events())
        await traffic.command(traffic.keys[0], f"block {seconds}")
        key, at_ns = {traffic.keys[0]}, time.monotonic_ns()
        blocked_until_ns = at_ns + int(seconds * 1e9)
        await fleet.until(
            lambda: bool(recovered_at(fleet.effects, key, blocked_until_ns, not_by=0)), "the loop turning again", 90
        )
        await fleet.until(lambda: any(event["kind"] == "LoopBlocked" for event in fleet.events()[before:]), "the event")
        events = fleet.events()[before:]
        return events, await settle(measured, writing)


async def run_stall(folder: str, *, stall_limit: float, seconds: float) -> tuple[dict, float, AuditReport]:
    """An event loop that is blocked for longer than the limit: the event, the seconds until others had its shards, and
    the audit. When the loop continues, the worker joins again as a new member.
    """
    async with measured_fleet(folder, shards=4, expiry=3.0, stall_limit=stall_limit) as (measured, writing):
        fleet, traffic = measured.fleet, measured.traffic
        await fleet.join(2)
        await fleet.until(lambda: len({effect.process_id for effect in fleet.effects}) == 2, "both at work")
        fleet.look()
        victim = fleet.workers[0]
        at_ns = time.monotonic_ns()
        keys = keys_of(fleet.effects, victim.id, at_ns)
        await traffic.command(min(keys), f"block {seconds}")
        await fleet.until(
            lambda: recovered_at(fleet.effects, keys, at_ns, victim.id).keys() == keys, "its shards read elsewhere", 60
        )
        taken_over = (max(recovered_at(fleet.effects, keys, at_ns, victim.id).values()) - at_ns) / 1e9
        await fleet.event("MemberEnded", victim)
        (said,) = fleet.events("LoopStalled", victim)
        return said, taken_over, await settle(measured, writing)
