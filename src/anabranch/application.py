"""`Application`: a whole fleet, seen and managed through its lease store, from any process.

A facade: it reads the rows and lets the core say what they mean. It is no member of the fleet and holds no lease.
"""

import asyncio
import os
from types import TracebackType
from typing import Final, Self

from anabranch._core.leases.fleet_view import FleetRows, HeartbeatObserver, view_fleet
from anabranch._engine.clock import SystemClock
from anabranch._ports.lease_store import LeaseStore
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.reports import FleetMember, FleetStatus
from anabranch.stores.catalogue import find_store

__all__ = ["Application"]

_LOOK_EVERY_SECONDS: Final = 0.25


class Application:
    """The application of this name, by its lease store: `leases=` as its workers have it.

    Without `leases=` it is looked for among the embedded stores of this machine. Nothing is made: an application that
    is not there is an error that names those that are.
    """

    def __init__(self, app: str, *, leases: str | LeaseStore | None = None) -> None:
        self._app = app
        self._leases = leases
        self._store: LeaseStore | None = None
        self._sightings = HeartbeatObserver()
        self._clock = SystemClock()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the store, unless it was given as an object."""
        store, self._store = self._store, None
        if store is not None and store is not self._leases:
            await store.close()

    async def _open(self) -> LeaseStore:
        if self._store is None:
            self._store = await find_store(self._app, self._leases, os.environ)
        return self._store

    async def status(self, *, watch: bool = False) -> FleetStatus:
        """All members and shards now. Hearts are watched from one call to the next: the first has seen none beat.

        With `watch` it takes up to half of a lease's expiry: until every live member was seen to beat, or would have.
        """
        status, _ = await self._look()
        if watch:
            deadline_ms = self._clock.now_ms() + max((_patience_ms(one) for one in status.live_members), default=0)
            while self._clock.now_ms() < deadline_ms and not all(member.beats for member in status.live_members):
                await asyncio.sleep(_LOOK_EVERY_SECONDS)
                status, _ = await self._look()
        return status

    async def _look(self) -> tuple[FleetStatus, FleetRows]:
        store = await self._open()
        app = await store.read_app()
        if app is None:
            raise LeaseStoreInvalidError(f"application {self._app!r} was deleted meanwhile")
        members = await store.read_members()
        now_ms = self._clock.now_ms()
        sightings = self._sightings.observe(members, now_ms)
        rows = FleetRows(
            app=app,
            streams=await store.read_streams(),
            members=members,
            leases=await store.read_leases(with_finished=True),
            dead_members=await store.dead_members(),
        )
        return view_fleet(rows, sightings, now_ms), rows

    async def delete(self) -> None:
        """Forgets the application: its leases, its checkpoints, all. Refused while a worker of it lives.

        Whether one lives is seen from its heart. Where the store cannot prove that a process is gone, that takes as
        long as a lease's expiry.
        """
        store = await self._open()
        while True:
            status, rows = await self._look()
            if beating := [member.worker_id for member in status.live_members if member.beats]:
                raise UsageError(f"application {self._app!r} has live workers ({', '.join(beating)}): stop them first")
            if not status.live_members:
                break
            await asyncio.sleep(_LOOK_EVERY_SECONDS)
        for row in rows.members:
            if row.state == "live":
                await store.seal_member(row.member_id, row.counter)
        if not await store.delete_app(rows.app.app_id):
            raise LeaseStoreError(f"application {self._app!r} was not deleted: a worker showed life at that moment")


def _patience_ms(member: FleetMember) -> int:
    """A heart beats four times in its expiry; a beat may be late."""
    return round(member.expiry * 1000) // 2
