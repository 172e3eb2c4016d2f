"""The lease store of a simulated fleet: one set of rows, reached by each process over the network.

The rows are those of the memory store. Each process has its own handle. As a fault, the store can be rolled back; it
then reports another storage identity, and requests on their way to the old storage are lost.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any

from anabranch._model.leases import (
    AppRow,
    Conflict,
    HeartbeatAnswer,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    MemberRow,
    StreamRow,
)
from anabranch.errors import LeaseStoreError
from anabranch.stores.memory import MemoryRows
from anabranch.stores.row_store import Changed, Found, Row, RowKey, RowLeaseStore, Scope, Update
from anabranch.testing.journal import (
    Journal,
    LeaseCommitted,
    LeaseCreated,
    LeaseDeleted,
    LeaseWrite,
    MemberLeft,
    OwnerChanged,
    RowMade,
    StoreEmptied,
    StoreWentBack,
)
from anabranch.testing.world.processes import Network, SimulatedProcess

_Places = dict[tuple[str, str, str], dict[RowKey, Row]]


class SimulatedRows(MemoryRows):
    """The rows and their history."""

    def __init__(
        self,
        journal: Journal,
        now_ms: Callable[[], int],
        incarnation_of: Callable[[LeaseKey], int],
        *,
        keeps_history: bool,
    ) -> None:
        super().__init__()
        self.storage = 0
        self.emptied_count = 0
        self.has_lost_streams = False
        """The store has lost the application or one of its streams at least once."""
        self._journal = journal
        self._now_ms = now_ms
        self._incarnation_of = incarnation_of
        """Returns the incarnation of the lease's stream."""
        self._keeps_history = keeps_history
        self._past: list[tuple[int, _Places]] = []
        self.processes: dict[str, str] = {}
        """The process of each member."""

    @property
    def identity(self) -> str:
        return f"storage-{self.storage}"

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
        """A member counts as left from its request on, which may take effect at any time, also without an answer."""
        self._journal.tell(MemberLeft(self._now_ms(), member_id))

    def _owner(self, row: LeaseRow) -> str | None:
        return None if row.owner is None else self.processes[row.owner]

    def _lease_write(self, row: LeaseRow) -> LeaseWrite:
        return LeaseWrite(self._now_ms(), row, self._incarnation_of(row.key))

    def remember(self) -> None:
        """Remembers the rows as they are now, before the next change."""
        if self._keeps_history:
            self._past.append((self._now_ms(), {place: dict(kept) for place, kept in self.places.items()}))

    def roll_back(self, by_ms: int) -> bool:
        """Undoes the writes of the last `by_ms`. Returns False if there is no state to go back to."""
        wanted_ms = self._now_ms() - by_ms
        kept = next((places for ended_ms, places in self._past if ended_ms > wanted_ms), None)
        if kept is None or not any(isinstance(row, AppRow) for rows in kept.values() for row in rows.values()):
            return False
        begun = self._all(StreamRow)
        self.places = kept
        there = self._all(StreamRow)
        if any(there.get(key) != row for key, row in begun.items()):
            self.has_lost_streams = True
        self._past.clear()
        self.storage += 1
        self._journal.tell(StoreWentBack())
        return True

    def _all(self, kind: type[Row]) -> dict[RowKey, Row]:
        return {key: row for rows in self.places.values() for key, row in rows.items() if isinstance(row, kind)}

    @property
    def has_streams(self) -> bool:
        return bool(self._all(StreamRow))

    @property
    def leases(self) -> list[LeaseRow]:
        return [row for rows in self.places.values() for row in rows.values() if isinstance(row, LeaseRow)]

    @property
    def all_shards_have_progress(self) -> bool:
        """The rows show for every shard how far it was read. Before that, losses by trimming need not be reported."""
        return bool(self.leases) and all(
            row.is_finished or row.checkpoint.watermark is not None or row.checkpoint.seen_through_seconds is not None
            for row in self.leases
        )

    def delete_lease(self, random: Random) -> None:
        """Deletes a lease row as an operator would, behind the back of the fleet. One row stays."""
        places = [
            (rows, key) for rows in self.places.values() for key, row in rows.items() if isinstance(row, LeaseRow)
        ]
        if len(places) > 1:
            rows, key = random.choice(places)
            row = rows.pop(key)
            assert isinstance(row, LeaseRow)
            self._journal.tell(LeaseDeleted(self._lease_write(row).shard_id, row))

    def empty(self, processes: Iterable[str], *, moves: bool) -> None:
        """Deletes everything while these processes are running. `moves`: the store then reports another storage."""
        self.places = {}
        self._past.clear()
        self.emptied_count += 1
        self.storage += moves
        self.has_lost_streams = True
        self._journal.tell(StoreEmptied(tuple(processes)))

    def made(self, process: str, key: RowKey, row: Row | None) -> None:
        """Reports a row that a process wrote after the store was emptied. Nobody sees a row under an old `app_id`."""
        is_seen = any(isinstance(app, AppRow) and app.app_id == key.app_id for app in self._all(AppRow).values())
        if row is not None and key.kind in _MADE and (is_seen or isinstance(row, AppRow)):
            self._journal.tell(RowMade(self._now_ms(), process, _MADE[key.kind]))


_MADE = {"app": "the application", "lease": "a lease", "stream": "a stream"}


class _Connection(RowLeaseStore):
    def __init__(
        self,
        app: str,
        rows: SimulatedRows,
        network: Network,
        process: SimulatedProcess,
        *,
        blocked_seconds: float | None = None,
    ) -> None:
        super().__init__(app)
        self._rows = rows
        self._network = network
        self._process = process
        self._storage = rows.storage
        """The storage that this connection leads to."""
        self._hindered_seconds = blocked_seconds
        """If set: a lost or late message blocks the process's commits for this long, the deadline of a call."""

    async def _ask(self, call: Callable[[], Any]) -> Any:
        storage = self._storage

        def request() -> Any:
            if self._rows.storage != storage:
                self._storage = self._rows.storage
                raise LeaseStoreError("the connection was lost: the store failed over")
            self._rows.remember()
            return call()

        return await self._network.call(
            self._process,
            "store",
            request,
            lambda: LeaseStoreError("the lease store gave no answer"),
            self._on_trouble(),
        )

    def _on_trouble(self) -> Callable[[], None]:
        if self._hindered_seconds is None:
            return lambda: None
        return partial(
            self._process.report_commits_blocked, self._hindered_seconds, since=self._process.world_ms() / 1000
        )

    async def identity(self) -> str:
        return await self._ask(lambda: self._rows.identity)  # type: ignore[no-any-return]

    async def get(self, keys: Sequence[RowKey]) -> Found:
        return await self._ask(lambda: Found(self._rows.get(keys), self._rows.identity))  # type: ignore[no-any-return]

    async def scan(self, scopes: Sequence[Scope]) -> Found:
        return await self._ask(lambda: Found(self._rows.scan(scopes), self._rows.identity))  # type: ignore[no-any-return]

    async def change(self, keys: Sequence[RowKey], update: Update) -> Changed:
        emptied_count = self._rows.emptied_count

        def call() -> Changed:
            before, after = self._rows.change(keys, update)
            was_on_its_way = emptied_count != self._rows.emptied_count  # sent before, so no mistake
            for key, old, new in zip(keys, before, after, strict=True):
                if emptied_count and not was_on_its_way and new is not old:
                    self._rows.made(self._process.name, key, new)
            return Changed(before, after, self._rows.identity)

        return await self._ask(call)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """The rows stay."""


class SimulatedLeaseStore(_Connection):
    """One process's handle. Heartbeats have their own connection."""

    def __init__(
        self, app: str, rows: SimulatedRows, network: Network, process: SimulatedProcess, *, call_deadline_ms: int
    ) -> None:
        super().__init__(app, rows, network, process)
        self._heartbeats = _Connection(app, rows, network, process)
        self._commits = _Connection(app, rows, network, process, blocked_seconds=call_deadline_ms / 1000)

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
