"""Sends one member's heartbeats and publishes what their answers say.

It runs on a thread of its own, or as a task beside the others (in the simulation); it shares nothing with the rest but
two references: the report that it is given, and the status that it publishes.
"""

import asyncio
from collections.abc import Callable

from anabranch._core.leases.heartbeat import HeartbeatState, HeartbeatStatus
from anabranch._engine.clock import Alarm
from anabranch._model.leases import HeartbeatWrite, MemberRow
from anabranch._ports import Clock, LeaseStore
from anabranch.errors import LeaseStoreError

__all__ = ["Heartbeat"]


class Heartbeat:
    def __init__(
        self,
        heart: HeartbeatState,
        store: LeaseStore,
        clock: Clock,
        *,
        report: Callable[[], HeartbeatWrite | None],
        on_status: Callable[[HeartbeatStatus], None],
    ) -> None:
        self._heart = heart
        self._store = store
        self._clock = clock
        self._report = report
        self._on_status = on_status
        self._alarm = Alarm(clock)
        self._storage: str | None = None
        self._is_sure = True
        """No call has failed since the storage was last seen to be the one that the member was registered in."""

    async def register(self, row: MemberRow) -> None:
        """Writes the member's row; repeated until the store has answered or the caller gives up."""
        heart, clock = self._heart, self._clock
        heart.begin_registration(clock.now_ms(), clock.wall_ms())
        async with asyncio.timeout(heart.timing.call_deadline_ms / 1000):
            self._storage = await self._store.incarnation()
            heart.answered(await self._store.register_member(row))
        self._on_status(heart.status)

    def wake(self) -> None:
        """Something worth telling has changed: the next heartbeat goes now."""
        self._heart.wake(self._clock.now_ms())
        self._alarm.ring()

    async def run(self) -> None:
        """Until this member is over. No report (None) means that the worker has stalled: then nothing is renewed."""
        heart, clock = self._heart, self._clock
        while heart.status.fence.ending is None:
            if heart.next_heartbeat_ms is not None and clock.now_ms() < heart.next_heartbeat_ms:
                await self._alarm.wait(heart.next_heartbeat_ms)
                continue
            report = self._report()
            if report is None:
                await self._alarm.wait(clock.now_ms() + heart.timing.heartbeat_interval_ms)
                continue
            write = heart.begin(clock.now_ms(), clock.wall_ms(), report)
            try:
                async with asyncio.timeout(heart.timing.call_deadline_ms / 1000):
                    if not await self._is_same_storage():
                        heart.end("rolled_back")
                        self._on_status(heart.status)
                        return
                    row = await self._store.heartbeat(write)
            except (LeaseStoreError, TimeoutError):
                self._is_sure = False
                heart.failed(clock.now_ms())
            else:
                heart.answered(row)
                self._on_status(heart.status)

    async def _is_same_storage(self) -> bool:
        """After a failed call there may be another storage behind the next one, and its `live` would mean nothing: it
        may have forgotten that this member was sealed (rule L13).
        """
        if not self._is_sure:
            self._is_sure = await self._store.incarnation() == self._storage
        return self._is_sure
