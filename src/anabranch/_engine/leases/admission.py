"""Looks at the fleet until this worker may be one of it, or may not (`_core.leases.admission` decides)."""

from functools import partial

from anabranch._core.leases.admission import Admission
from anabranch._core.leases.timing import LeaseTiming
from anabranch._engine.leases.store_calls import insist
from anabranch._engine.outside import Outside
from anabranch._model.leases import MemberRow
from anabranch.errors import FleetMismatchError

__all__ = ["be_admitted", "mismatch"]


async def be_admitted(outside: Outside, me: MemberRow, timing: LeaseTiming) -> None:
    """Returns when no member of another mind is there; raises if one is that stays."""
    admission, store, deadline_ms = Admission(me, timing), outside.store, timing.call_deadline_ms
    while True:
        rows = await insist(outside, store.read_members, deadline_ms=deadline_ms)
        dead = await insist(outside, store.dead_members, deadline_ms=deadline_ms)
        review = admission.review(rows, dead, outside.clock.now_ms())
        if review.refused_by is not None:
            raise mismatch(me, review.refused_by)
        if review.is_admitted:
            return
        for seal in review.seals:
            call = partial(store.seal_member, seal.member_id, seal.observed_counter)
            await insist(outside, call, deadline_ms=deadline_ms)
        if not review.seals:
            await outside.clock.sleep_until_ms(outside.clock.now_ms() + timing.poll_interval_ms)


def mismatch(me: MemberRow, other: MemberRow) -> FleetMismatchError:
    return FleetMismatchError(
        f"this worker ({me.fingerprint}; protocol {me.protocol}) differs from worker {other.worker_id!r} of the same "
        f"application, which came first ({other.fingerprint}; protocol {other.protocol}): stop that one, or use "
        "another app="
    )
