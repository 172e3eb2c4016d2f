"""Leases in memory: for consumers that keep no position, for tests, and for the simulated store.

The rows live as long as the object. All consumers that get the same object form one fleet. The conditions are those of
`_core.leases.rows`. A lock makes each write atomic, because heartbeats come from their own thread.
"""

import threading
from collections.abc import Sequence

from msgspec.structs import replace

from anabranch._core.leases import rows
from anabranch._model.leases import (
    AppRow,
    Conflict,
    ControlRow,
    HandOffRequest,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    MemberRow,
    StreamRow,
)
from anabranch._ports import LeaseStore
from anabranch.errors import UsageError

__all__ = ["MemoryLeaseStore"]


class MemoryLeaseStore(LeaseStore):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._app: AppRow | None = None
        self._members: dict[str, MemberRow] = {}
        self._streams: dict[str, StreamRow] = {}
        self._leases: dict[LeaseKey, LeaseRow] = {}
        self._controls: dict[str, ControlRow] = {}

    def __str__(self) -> str:
        return "memory://"

    async def open(self, app: AppRow) -> AppRow:
        made = replace(app, incarnation=await self.incarnation())
        with self._lock:
            if self._app is None:
                self._app = made
            if self._app.app != app.app:
                raise UsageError(
                    f"this memory store holds application {self._app.app!r}; make another one for {app.app!r}"
                )
            return self._app

    async def read_app(self) -> AppRow | None:
        return self._app

    async def incarnation(self) -> str:
        return "memory"  # never changes: the rows end with the process

    async def record_incarnation(self, expected: str, incarnation: str) -> AppRow | None:
        with self._lock:
            self._app = rows.record_incarnation(self._app, expected, incarnation)
            return self._app

    async def delete_app(self, app_id: str) -> bool:
        with self._lock:
            if not rows.may_delete_app(self._app, self._members.values(), app_id):
                return False
            self._app = None
            for kept in (self._members, self._streams, self._leases, self._controls):
                kept.clear()
            return True

    async def close(self) -> None:
        """Keeps the rows, because other consumers may share this object."""

    # members
    async def register_member(self, row: MemberRow) -> MemberRow:
        with self._lock:
            return self._members.setdefault(row.member_id, row)

    async def heartbeat(self, write: HeartbeatWrite) -> MemberRow | None:
        with self._lock:
            return self._put_member(write.member_id, rows.heartbeat(self._members.get(write.member_id), write))

    async def read_members(self) -> Sequence[MemberRow]:
        with self._lock:
            return [self._members[member_id] for member_id in sorted(self._members)]

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        with self._lock:
            return self._put_member(member_id, rows.seal_member(self._members.get(member_id), observed_counter))

    async def leave(self, member_id: str) -> MemberRow | None:
        with self._lock:
            return self._put_member(member_id, rows.leave(self._members.get(member_id)))

    async def request_hand_off(self, donor: str, request: HandOffRequest) -> MemberRow | None:
        with self._lock:
            return self._put_member(donor, rows.request_hand_off(self._members.get(donor), request))

    async def delete_member(self, member_id: str) -> bool:
        with self._lock:
            if not rows.may_delete_member(self._members.get(member_id)):
                return False
            del self._members[member_id]
            return True

    def _put_member(self, member_id: str, row: MemberRow | None) -> MemberRow | None:
        if row is not None:
            self._members[member_id] = row
        return row

    # streams
    async def put_stream(self, row: StreamRow, *, app_id: str) -> StreamRow | None:
        with self._lock:
            return self._streams.setdefault(row.stream_key, row) if rows.may_begin(self._app, app_id) else None

    async def write_stream(self, row: StreamRow, expected_version: int, *, app_id: str) -> StreamRow | None:
        with self._lock:
            if not rows.may_begin(self._app, app_id):
                return None
            written = rows.write_stream(self._streams.get(row.stream_key), row, expected_version)
            if written is not None:
                self._streams[row.stream_key] = written
            return written

    async def read_streams(self) -> Sequence[StreamRow]:
        with self._lock:
            return [self._streams[stream_key] for stream_key in sorted(self._streams)]

    # leases
    async def create_lease(self, row: LeaseRow, *, app_id: str) -> LeaseRow | None:
        with self._lock:
            return self._leases.setdefault(row.key, row) if rows.may_begin(self._app, app_id) else None

    async def read_leases(self, *, with_finished: bool = False) -> Sequence[LeaseRow]:
        with self._lock:
            found = (self._leases[key] for key in sorted(self._leases))
            return [row for row in found if with_finished or not row.is_finished]

    async def read_lease(self, key: LeaseKey) -> LeaseRow | None:
        return self._leases.get(key)

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        with self._lock:
            return self._put_lease(
                rows.take_lease(
                    self._leases.get(key),
                    member_id,
                    expected_owner=expected_owner,
                    expected_version=expected_version,
                    epoch_floor=epoch_floor,
                )
            )

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        with self._lock:
            stored = self._leases.get(row.key)
            return self._put_lease(
                rows.write_lease(stored, row, member_id=member_id, expected_version=expected_version)
            )

    async def delete_lease(self, key: LeaseKey, expected_version: int) -> bool:
        with self._lock:
            if not rows.may_delete_lease(self._leases.get(key), expected_version):
                return False
            del self._leases[key]
            return True

    def _put_lease(self, outcome: LeaseRow | Conflict) -> LeaseRow | Conflict:
        if isinstance(outcome, LeaseRow):
            self._leases[outcome.key] = outcome
        return outcome

    # commands
    async def put_control(self, row: ControlRow) -> None:
        with self._lock:
            self._controls.setdefault(row.command_id, row)

    async def write_control(self, row: ControlRow) -> bool:
        with self._lock:
            written = rows.write_control(self._controls.get(row.command_id), row)
            if written is not None:
                self._controls[row.command_id] = written
            return written is not None

    async def read_controls(self) -> Sequence[ControlRow]:
        with self._lock:
            return sorted(self._controls.values(), key=lambda row: (row.requested_wall_ms, row.command_id))
