"""The contract of lease stores, for ours and for yours: `check_lease_store(make_store)` in a test of your own.

    def test_my_store_keeps_the_contract():
        check_lease_store(lambda app: MyStore(url, app))

It runs every check on an application of its own, with several handles at once, and reports all that fail together.
What is checked is what a fleet's safety rests on: each condition of each write, races, lost answers, order of reads.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

from anabranch.testing.lease_store_contract import application, durability, leases, members, races
from anabranch.testing.lease_store_contract.arena import Arena, MakeStore

__all__ = ["check_lease_store"]

_CHECKS: tuple[Callable[[Arena], Awaitable[None]], ...] = (
    *application.CHECKS,
    *members.CHECKS,
    *leases.CHECKS,
    *races.CHECKS,
)


def check_lease_store(make_store: MakeStore, *, durable: bool = True) -> None:
    """Raises an `ExceptionGroup` of `AssertionError`s, one for each rule that does not hold.

    `make_store(app)` returns a new, unopened handle; handles of the same application share its rows. A store that
    lives in one object only is checked with `durable=False`: then one handle serves for all.
    """
    checks = _CHECKS + (durability.CHECKS if durable else ())
    failures = [failure for check in checks if (failure := _failure(check, make_store, durable=durable)) is not None]
    if failures:
        raise ExceptionGroup(
            f"{len(failures)} of {len(checks)} rules of the lease store contract do not hold", failures
        )


def _failure(check: Callable[[Arena], Awaitable[None]], make_store: MakeStore, *, durable: bool) -> Exception | None:
    async def run() -> None:
        arena = Arena(make_store, f"contract-{uuid.uuid4().hex}", durable=durable)
        try:
            await check(arena)
        finally:
            await arena.close()

    try:
        asyncio.run(run())
    except Exception as error:  # noqa: BLE001 -- the supervisor of the checks: all failures are reported at once
        error.add_note(f"in the check {check.__name__.replace('_', ' ')!r}")
        return error
    return None
