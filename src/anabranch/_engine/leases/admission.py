"""Looks at the fleet until this worker may be one of it, or may not (`_core.leases.admission` decides)."""

from functools import partial

from anabranch._core.leases.admission import Admission, members_with_worker_id
from anabranch._core.leases.timing import LeaseTiming
from anabranch._engine.leases.store_calls import retry_store_call
from anabranch._engine.ports import Ports
from anabranch._model.leases import MemberRow
from anabranch.errors import FleetMismatchError
from anabranch.events import MemberSealed

__all__ = ["be_admitted", "mismatch", "seal_namesakes"]

SEAL_ROUNDS = 3
"""A heartbeat that was still on its way can be in the way of a seal once."""


async def be_admitted(ports: Ports, me: MemberRow, timing: LeaseTiming, *, any_order: bool = False) -> None:
    """Returns when no member of another mind is there; raises if one is that stays."""
    admission = Admission(me, timing, any_order=any_order)
    store, deadline_ms = ports.store, timing.call_deadline_ms
    while True:
        rows = await retry_store_call(ports, store.read_members, deadline_ms=deadline_ms)
        dead = await retry_store_call(ports, store.dead_members, deadline_ms=deadline_ms)
        review = admission.review(rows, dead, ports.clock.now_ms())
        if review.refused_by is not None:
            raise mismatch(me, review.refused_by)
        if review.is_admitted:
            return
        for seal in review.seals:
            call = partial(store.seal_member, seal.member_id, seal.observed_counter)
            await retry_store_call(ports, call, deadline_ms=deadline_ms)
        if not review.seals:
            await ports.clock.sleep_until_ms(ports.clock.now_ms() + timing.poll_interval_ms)


async def seal_namesakes(ports: Ports, worker_id: str, timing: LeaseTiming) -> None:
    """Ends earlier lives of this worker at once, since nobody else may have its name (rule L17). To be called once in
    the life of a process: one that comes back from a pause must not end its successor.
    """
    store, deadline_ms = ports.store, timing.call_deadline_ms
    for _ in range(SEAL_ROUNDS):
        earlier = members_with_worker_id(
            worker_id, await retry_store_call(ports, store.read_members, deadline_ms=deadline_ms)
        )
        if not earlier:
            return
        for row in earlier:
            call = partial(store.seal_member, row.member_id, row.counter)
            sealed = await retry_store_call(ports, call, deadline_ms=deadline_ms)
            if sealed is not None and sealed.state == "sealed":
                ports.emit(MemberSealed(member_id=row.member_id))


def mismatch(me: MemberRow, other: MemberRow) -> FleetMismatchError:
    return FleetMismatchError(
        f"this worker ({me.fingerprint}; protocol {me.protocol}) differs from worker {other.worker_id!r} of the same "
        f"application, which came first ({other.fingerprint}; protocol {other.protocol}): stop that one, or use "
        "another app=; to roll out another order=, start the new workers with LeaseSettings(any_order=True)"
    )
