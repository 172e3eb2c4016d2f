"""The lease store: one application's rows, each written under a condition.

Rules for every implementation, checked by `anabranch.testing.check_lease_store`:
- every write is atomic and conditional; a condition that does not hold is an outcome (`Conflict`, `None`),
  never an exception;
- reads see every write that was acknowledged before the read began;
- nothing is retried inside; a call that cannot be completed raises `LeaseStoreError`, and may or may not have
  taken effect;
- rows are returned as stored after the write, so that a caller whose earlier answer was lost learns what is
  there;
- what begins something (a stream, its mark, a lease) is written under the application's id, on the condition that the
  application's row still has it, in one step with the write (rule L14). So nothing that was on its way, however long,
  begins in a store that was emptied meanwhile, or that another has begun anew.

What each condition means is written once, in `_core.leases.rows`, as functions over rows. The store compares
versions, owners and counters. It knows no clock, decides no expiry and never changes a row
by itself.
"""

from collections.abc import Sequence
from typing import Protocol

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

__all__ = ["Conflict", "HeartbeatWrite", "LeaseStore"]


class LeaseStore(Protocol):
    async def open(self, app: AppRow) -> AppRow:
        """Makes the tables and the application's row where there are none; returns the row that stands. A new row names
        the storage that it is made in (`incarnation`), so that a worker that starts after a roll-back sees it.
        """

    async def read_app(self) -> AppRow | None:
        """Also before `open`; makes nothing."""

    async def incarnation(self) -> str:
        """An identity of the storage itself: another one means that acknowledged writes may be gone (rule L13)."""

    async def record_incarnation(self, expected: str, incarnation: str) -> AppRow | None:
        """Writes the app row's incarnation if it is still the expected one; returns the row as it is then."""

    async def delete_app(self, app_id: str) -> bool:
        """Removes every row of the application, if it still has this id and none of its members is live."""

    async def close(self) -> None: ...

    # members
    async def register_member(self, row: MemberRow) -> MemberRow:
        """Put if absent; returns the row that stands."""

    async def heartbeat(self, write: HeartbeatWrite) -> MemberRow | None:
        """Updates the row if it exists and is live; returns it as it is then, None if there is none. No upsert."""

    async def read_members(self) -> Sequence[MemberRow]:
        """In the order of their ids, whatever their state."""

    async def dead_members(self) -> Sequence[str]:
        """Live rows whose process is dead for certain, so that they may be sealed without waiting (rule L17).

        Only a store that can prove it names any; "not seen for long" is no proof.
        """
        return ()

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        """Live -> sealed if the counter is still the observed one; returns the row as it is then (rule L3)."""

    async def leave(self, member_id: str) -> MemberRow | None:
        """Live -> left: one write frees all the member's leases."""

    async def request_hand_off(self, donor: str, request: HandOffRequest) -> MemberRow | None:
        """Adds to a live donor's `wanted`, once; returns the donor's row as it is then."""

    async def delete_member(self, member_id: str) -> bool:
        """Removes a sealed or left member. The caller has seen that no lease names it."""

    # streams
    async def put_stream(self, row: StreamRow, *, app_id: str) -> StreamRow | None:
        """Put if absent; returns the row that stands. None, and nothing is made: the application is not this one."""

    async def write_stream(self, row: StreamRow, expected_version: int, *, app_id: str) -> StreamRow | None:
        """Replaces the row if its version is still the expected one, and the application this one; None if not."""

    async def read_streams(self) -> Sequence[StreamRow]: ...

    # leases
    async def create_lease(self, row: LeaseRow, *, app_id: str) -> LeaseRow | None:
        """Put if absent; returns the row that stands. None, and nothing is made: the application is not this one."""

    async def read_leases(self, *, with_finished: bool = False) -> Sequence[LeaseRow]:
        """In the order of their keys. Finished rows are left out unless asked for (rule S6: waiting for retention is
        free).
        """

    async def read_lease(self, key: LeaseKey) -> LeaseRow | None: ...

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        """Owner becomes `member_id`; version and `takes_without_progress` grow by one, epoch to one more than the
        larger of its own and the floor (rule U3: the highest epoch of the parents).

        Holds only while the row has the expected owner and version. The caller has seen that owner sealed or left, or
        missing for its whole expiry (rule L7); the store does not look at its row.
        """

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        """The owner's own write: `row` with version `expected_version + 1` replaces the stored one.

        Holds only while the stored row names `member_id` as its owner and has the expected version. Commits, finishes,
        stops, releases (owner None) and gives (owner another member) are all this write.
        """

    async def delete_lease(self, key: LeaseKey, expected_version: int) -> bool:
        """Removes a finished row of the expected version (rule S6)."""

    # commands
    async def put_control(self, row: ControlRow) -> None:
        """Put if absent: a command whose answer was lost may be sent again under its id."""

    async def write_control(self, row: ControlRow) -> bool:
        """Replaces a pending command; False if it is pending no more."""

    async def read_controls(self) -> Sequence[ControlRow]:
        """In the order in which they were requested, then of their ids."""
