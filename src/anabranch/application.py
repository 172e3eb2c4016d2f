"""`Application`: observe and manage a whole fleet through its lease store, from any process.

It is not a member of the fleet and holds no lease.
"""

import asyncio
import contextlib
import os
from types import TracebackType
from typing import Final, Self

from anabranch._core.leases.fleet_view import FleetRows, HeartbeatObserver, StatusObserver, view_fleet
from anabranch._core.leases.status import ANSWERED_EVERY_MS, RENEWED_EVERY_MS
from anabranch._engine.clock import SystemClock
from anabranch._ports import LeaseStore
from anabranch.errors import LeaseError, LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.reports import FleetMember, FleetStatus
from anabranch.stores.catalogue import find_store

__all__ = ["Application"]

_POLL_SECONDS: Final = 0.25
_RENEWAL_SECONDS: Final = 1.0


class Application:
    """An existing application. Pass the same `leases=` as its workers; without it, the embedded stores of this machine
    are searched. It creates nothing: for an unknown application it raises an error that names the known ones.
    """

    def __init__(self, app: str, *, leases: str | LeaseStore | None = None) -> None:
        self._app = app
        self._leases = leases
        self._store: LeaseStore | None = None
        self._heartbeats = HeartbeatObserver()
        self._statuses = StatusObserver()
        self._renewed_ms: int | None = None
        self._clock = SystemClock()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the store, unless it was passed as an object."""
        store, self._store = self._store, None
        if store is not None and store is not self._leases:
            await store.close()

    async def _open(self) -> LeaseStore:
        if self._store is None:
            self._store = await find_store(self._app, self._leases, os.environ)
        return self._store

    async def status(self, *, watch: bool = False) -> FleetStatus:
        """Reads all members and shards, and asks the workers to report, at most every 5 seconds. Heartbeats and reports
        are seen as a change between two calls, at most 15 seconds apart: the first call sees no heartbeat, no lag and
        no rate, and the reasons that it sees may be a minute old.

        With `watch`, it polls until every live member has sent a heartbeat and a report: a few seconds, at most half of
        a lease's expiry and 2 seconds.
        """
        await self._renew_watch()
        status, _ = await self._read()
        if watch:
            deadline_ms = self._clock.now_ms() + max((_watch_ms(member) for member in status.live_members), default=0)
            while self._clock.now_ms() < deadline_ms and not all(
                member.heartbeat_seen and member.status_seen for member in status.live_members
            ):
                await asyncio.sleep(_POLL_SECONDS)
                await self._renew_watch()
                status, _ = await self._read()
        return status

    async def _renew_watch(self) -> None:
        """Workers that see it write their status. A store that refuses writes can still be read."""
        store, now_ms = await self._open(), self._clock.now_ms()
        if self._renewed_ms is None or now_ms - self._renewed_ms >= RENEWED_EVERY_MS:
            self._renewed_ms = now_ms
            with contextlib.suppress(LeaseError, TimeoutError):
                async with asyncio.timeout(_RENEWAL_SECONDS):
                    await store.renew_watch()

    async def _read(self) -> tuple[FleetStatus, FleetRows]:
        store = await self._open()
        poll = await store.poll()
        app, members = poll.app, poll.members
        if app is None:
            raise LeaseStoreInvalidError(f"application {self._app!r} was deleted in the meantime")
        now_ms = self._clock.now_ms()
        counters = self._heartbeats.observe(members, now_ms)
        statuses = await store.read_statuses()
        rows = FleetRows(
            app=app,
            streams=await store.read_streams(),
            members=members,
            leases=await store.read_leases(with_finished=True),
            statuses=statuses,
            dead_members=poll.known_dead,
        )
        return view_fleet(rows, counters, now_ms, self._statuses.observe(statuses, now_ms)), rows

    async def delete(self) -> None:
        """Deletes the application with its leases and checkpoints. Refuses while any worker is still heartbeating.

        If the store cannot prove that a process is dead, this takes as long as a lease's expiry.
        """
        store = await self._open()
        while True:
            status, rows = await self._read()
            if live := [member.worker_id for member in status.live_members if member.heartbeat_seen]:
                raise UsageError(f"application {self._app!r} has live workers ({', '.join(live)}): stop them first")
            if not status.live_members:
                break
            await asyncio.sleep(_POLL_SECONDS)
        for row in rows.members:
            if row.state == "live":
                await store.seal_member(row.member_id, row.counter)
        if not await store.delete_app(rows.app.app_id):
            raise LeaseStoreError(
                f"application {self._app!r} was not deleted: a worker sent a heartbeat at that moment"
            )


def _watch_ms(member: FleetMember) -> int:
    """A member sends four heartbeats per expiry; one may be late. It may just have reported to another viewer."""
    return round(member.expiry * 1000) // 2 + ANSWERED_EVERY_MS
