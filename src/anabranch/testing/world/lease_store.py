"""The lease store of a simulated fleet: one set of rows, reached by each process over the network.

Each process has a handle of its own. The rows are those of the memory store. On bad days the store goes back in time,
and says that it is another storage; requests that were under way to the one before are lost.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from anabranch._model.leases import AppRow, Conflict, HeartbeatWrite, LeaseKey, LeaseRow, MemberRow, StreamRow
from anabranch.errors import LeaseStoreError
from anabranch.stores.memory import MemoryRows
from anabranch.stores.row_store import Changed, Found, Row, RowKey, RowLeaseStore, Scope, Update
from anabranch.testing.journal import (
    Journal,
    LeaseCommitted,
    LeaseCreated,
    LeaseWrite,
    MemberLeft,
    OwnerChanged,
    RowMade,
    StoreEmptied,
    StoreWentBack,
)
from anabranch.testing.world.processes import Network, SimulatedProcess

__all__ = ["ForgetfulRows", "SimulatedLeaseStore"]

_Places = dict[tuple[str, str, str], dict[RowKey, Row]]


class ForgetfulRows(MemoryRows):
    """The rows themselves, and their past."""

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
        """It has once forgotten the application or one of its streams."""
        self._journal = journal
        self._now_ms = now_ms
        self._incarnation_of = incarnation_of
        """Of the stream that a lease is of."""
        self._keeps_history = keeps_history
        self._past: list[tuple[int, _Places]] = []
        self.processes: dict[str, str] = {}
        """By member: which process has registered it."""

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
                self._journal.tell(LeaseCreated(self._noted(after)))
            case LeaseRow(), LeaseRow():
                is_take = after.takes_without_progress > before.takes_without_progress and before.owner != after.owner
                if not is_take:
                    self._journal.tell(LeaseCommitted(self._noted(after)))
                if before.owner != after.owner:
                    self._journal.tell(OwnerChanged(self._noted(after), self._owner(after)))
            case _, MemberRow() if after.state != "live":
                self.note_leaving(after.member_id)
            case _:
                pass

    def note_leaving(self, member_id: str) -> None:
        """From the moment that it asks: the request may take effect at any time, with or without an answer."""
        self._journal.tell(MemberLeft(self._now_ms(), member_id))

    def _owner(self, row: LeaseRow) -> str | None:
        return None if row.owner is None else self.processes[row.owner]

    def _noted(self, row: LeaseRow) -> LeaseWrite:
        return LeaseWrite(self._now_ms(), row, self._incarnation_of(row.key))

    def note(self) -> None:
        """Keeps the rows as they are until now."""
        if self._keeps_history:
            self._past.append((self._now_ms(), {place: dict(kept) for place, kept in self.places.items()}))

    def go_back(self, by_ms: int) -> bool:
        """Forgets what was written in the last `by_ms`. False: there is nothing to forget."""
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
    def have_begun(self) -> bool:
        """Of every shard it is known how far it was read; before that, nothing is promised of what falls off."""
        return bool(self.leases) and all(
            row.is_finished or row.checkpoint.watermark is not None or row.checkpoint.seen_through_seconds is not None
            for row in self.leases
        )

    def empty(self, processes: Iterable[str], *, moves: bool) -> None:
        """Forgets everything while these processes are at work; `moves`: it says that it is another storage."""
        self.places = {}
        self._past.clear()
        self.emptied_count += 1
        self.storage += moves
        self.has_lost_streams = True
        self._journal.tell(StoreEmptied(tuple(processes)))

    def made(self, process: str, key: RowKey, row: Row | None) -> None:
        """A process has written a row after the store was emptied. Nobody sees a row under an old `app_id`."""
        is_seen = any(isinstance(app, AppRow) and app.app_id == key.app_id for app in self._all(AppRow).values())
        if row is not None and key.kind in _MADE and (is_seen or isinstance(row, AppRow)):
            self._journal.tell(RowMade(self._now_ms(), process, _MADE[key.kind]))


_MADE = {"app": "the application", "lease": "a lease", "stream": "a stream"}


class _Connection(RowLeaseStore):
    def __init__(
        self,
        app: str,
        rows: ForgetfulRows,
        network: Network,
        process: SimulatedProcess,
        *,
        hindered_seconds: float | None = None,
    ) -> None:
        super().__init__(app)
        self._rows = rows
        self._network = network
        self._process = process
        self._storage = rows.storage
        """The storage that this connection was made to."""
        self._hindered_seconds = hindered_seconds
        """How long the sender waits for an answer, if a call that has none holds up its commits."""

    async def _ask(self, call: Callable[[], Any]) -> Any:
        storage = self._storage

        def request() -> Any:
            if self._rows.storage != storage:
                self._storage = self._rows.storage
                raise LeaseStoreError("the connection was lost: the store has failed over")
            self._rows.note()
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
        return partial(self._process.block_commits, self._hindered_seconds, since=self._process.world_ms() / 1000)

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
            was_under_way = emptied_count != self._rows.emptied_count  # that is nobody's fault
            for key, old, new in zip(keys, before, after, strict=True):
                if emptied_count and not was_under_way and new is not old:
                    self._rows.made(self._process.name, key, new)
            return Changed(before, after, self._rows.identity)

        return await self._ask(call)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """The rows stay."""


class SimulatedLeaseStore(_Connection):
    """One process's handle. Heartbeats have a connection of their own."""

    def __init__(
        self, app: str, rows: ForgetfulRows, network: Network, process: SimulatedProcess, *, call_deadline_ms: int
    ) -> None:
        super().__init__(app, rows, network, process)
        self._heart = _Connection(app, rows, network, process)
        self._commits = _Connection(app, rows, network, process, hindered_seconds=call_deadline_ms / 1000)

    async def open(self, app: AppRow) -> AppRow:
        row = await super().open(app)
        self._heart._app_id = self._commits._app_id = row.app_id  # noqa: SLF001 -- one handle, three connections
        return row

    async def register_member(self, row: MemberRow) -> MemberRow:
        self._rows.processes[row.member_id] = self._process.name
        return await super().register_member(row)

    async def heartbeat(self, write: HeartbeatWrite) -> MemberRow | None:
        return await self._heart.heartbeat(write)

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        return await self._commits.write_lease(row, member_id=member_id, expected_version=expected_version)

    async def leave(self, member_id: str) -> MemberRow | None:
        self._rows.note_leaving(member_id)
        return await super().leave(member_id)
