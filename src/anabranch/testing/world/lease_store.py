"""The lease store of a simulated fleet: one set of rows, reached by each process over the network.

The rows are those of the memory store. Each process has its own handle.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from anabranch._model.leases import AppRow, Conflict, HeartbeatAnswer, HeartbeatWrite, LeaseRow, MemberRow
from anabranch.errors import LeaseStoreError
from anabranch.stores.memory import MemoryRows
from anabranch.stores.row_store import Changed, Found, Row, RowKey, RowLeaseStore, Scope, Update
from anabranch.testing.journal import LeaseCommitted, LeaseCreated, LeaseWrite, MemberLeft, OwnerChanged
from anabranch.testing.world.options import APP
from anabranch.testing.world.processes import SimulatedProcess

if TYPE_CHECKING:
    from anabranch.testing.world.fleet import SimulatedFleet


class SimulatedRows(MemoryRows):
    """Tells the journal every change."""

    identity = "storage-0"

    def __init__(self, fleet: "SimulatedFleet") -> None:
        super().__init__()
        self._journal = fleet.journal
        self._now_ms = fleet.now_ms
        self.processes: dict[str, str] = {}
        """The process of each member."""

    def change(self, keys: Sequence[RowKey], update: Update) -> tuple[Sequence[Row | None], Sequence[Row | None]]:
        changes = super().change(keys, update)
        for before, after in zip(*changes, strict=True):
            if after is not before and after is not None:
                self._note_change(before, after)
        return changes

    def _note_change(self, before: Row | None, after: Row) -> None:
        match before, after:
            case None, LeaseRow():
                self._journal.tell(LeaseCreated(self._lease_write(after)))
            case LeaseRow(), LeaseRow():
                is_take = after.takes_without_progress > before.takes_without_progress and before.owner != after.owner
                if not is_take:
                    self._journal.tell(LeaseCommitted(self._lease_write(after)))
                if before.owner != after.owner:
                    self._journal.tell(OwnerChanged(self._lease_write(after), self._owner(after)))
            case _, MemberRow() if after.state != "live":
                self.tell_left(after.member_id)
            case _:
                pass

    def tell_left(self, member_id: str) -> None:
        """A member counts as left once it has sent the request: that may take effect later, even without an answer."""
        self._journal.tell(MemberLeft(self._now_ms(), member_id))

    def _owner(self, row: LeaseRow) -> str | None:
        return None if row.owner is None else self.processes[row.owner]

    def _lease_write(self, row: LeaseRow) -> LeaseWrite:
        return LeaseWrite(self._now_ms(), row)

    @property
    def leases(self) -> list[LeaseRow]:
        return [row for rows in self.places.values() for row in rows.values() if isinstance(row, LeaseRow)]


class StoreConnection(RowLeaseStore):
    def __init__(
        self, fleet: "SimulatedFleet", process: SimulatedProcess, *, blocked_seconds: float | None = None
    ) -> None:
        super().__init__(APP)
        self._rows = fleet.rows
        self._network = fleet.network
        self._process = process
        self._blocked_seconds = blocked_seconds
        """If set: a lost or late message blocks the process's commits for this long, the deadline of a call."""

    async def _ask(self, call: Callable[[], Any]) -> Any:
        sent_seconds = self._process.world_ms() / 1000

        def on_trouble() -> None:
            if self._blocked_seconds is not None:
                self._process.report_commits_blocked(self._blocked_seconds, since=sent_seconds)

        return await self._network.call(
            self._process, "store", call, LeaseStoreError("the lease store gave no answer"), on_trouble
        )

    async def identity(self) -> str:
        return await self._ask(lambda: self._rows.identity)  # type: ignore[no-any-return]

    async def get(self, keys: Sequence[RowKey]) -> Found:
        return await self._ask(lambda: Found(self._rows.get(keys), self._rows.identity))  # type: ignore[no-any-return]

    async def scan(self, scopes: Sequence[Scope]) -> Found:
        return await self._ask(lambda: Found(self._rows.scan(scopes), self._rows.identity))  # type: ignore[no-any-return]

    async def change(self, keys: Sequence[RowKey], update: Update) -> Changed:
        return await self._ask(lambda: Changed(*self._rows.change(keys, update), self._rows.identity))  # type: ignore[no-any-return]

    async def close(self) -> None:
        """The rows stay."""


class SimulatedLeaseStore(StoreConnection):
    """One process's handle. Heartbeats and commits have their own connections."""

    connection_class: ClassVar[type[StoreConnection]] = StoreConnection

    def __init__(self, fleet: "SimulatedFleet", process: SimulatedProcess, *, call_deadline_ms: int) -> None:
        super().__init__(fleet, process)
        self._heartbeats = self.connection_class(fleet, process)
        self._commits = self.connection_class(fleet, process, blocked_seconds=call_deadline_ms / 1000)

    async def open(self, app: AppRow) -> AppRow:
        row = await super().open(app)
        self._heartbeats._app_id = self._commits._app_id = row.app_id  # noqa: SLF001 -- one handle, three connections
        return row

    async def register_member(self, row: MemberRow) -> MemberRow:
        self._rows.processes[row.member_id] = self._process.name
        return await super().register_member(row)

    async def heartbeat(self, write: HeartbeatWrite) -> HeartbeatAnswer:
        return await self._heartbeats.heartbeat(write)

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        return await self._commits.write_lease(row, member_id=member_id, expected_version=expected_version)

    async def leave(self, member_id: str) -> MemberRow | None:
        self._rows.tell_left(member_id)
        return await super().leave(member_id)
