"""The lease store of a simulated fleet: one set of rows, reached by each process over the network.

The rows are the memory store's, and so are its conditions. On bad days it goes back in time, and says that it is
another storage; requests that were on their way to the one before are lost.
"""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

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
from anabranch.errors import LeaseStoreError
from anabranch.stores.memory import MemoryLeaseStore
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


class ForgetfulRows(MemoryLeaseStore):
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
        self._past: list[tuple[int, tuple[Any, ...]]] = []
        self.processes: dict[str, str] = {}
        """By member: which process has registered it."""

    async def incarnation(self) -> str:
        return f"storage-{self.storage}"

    async def create_lease(self, row: LeaseRow, *, app_id: str) -> LeaseRow | None:
        answer = await super().create_lease(row, app_id=app_id)
        if answer is not None:
            self._journal.tell(LeaseCreated(self._noted(answer)))
        return answer

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        answer = await super().write_lease(row, member_id=member_id, expected_version=expected_version)
        if not isinstance(answer, Conflict):
            self._journal.tell(LeaseCommitted(self._noted(answer)))
            if answer.owner != member_id:
                self._journal.tell(OwnerChanged(self._noted(answer), self._owner(answer)))
        return answer

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        answer = await super().take_lease(
            key, member_id, expected_owner=expected_owner, expected_version=expected_version, epoch_floor=epoch_floor
        )
        if not isinstance(answer, Conflict):
            self._journal.tell(OwnerChanged(self._noted(answer), self._owner(answer)))
        return answer

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        row = await super().seal_member(member_id, observed_counter)
        if row is not None and row.state != "live":
            self._journal.tell(MemberLeft(self._now_ms(), member_id))
        return row

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
            rows = (self._app, dict(self._members), dict(self._streams), dict(self._leases), dict(self._controls))
            self._past.append((self._now_ms(), rows))

    def go_back(self, by_ms: int) -> bool:
        """Forgets what was written in the last `by_ms`. False: there is nothing to forget."""
        wanted_ms = self._now_ms() - by_ms
        kept = next((rows for ended_ms, rows in self._past if ended_ms > wanted_ms), None)
        if kept is None or kept[0] is None:
            return False
        begun = dict(self._streams)
        self._app, self._members, self._streams, self._leases, self._controls = kept
        if any(self._streams.get(key) != row for key, row in begun.items()):
            self.has_lost_streams = True
        self._past.clear()
        self.storage += 1
        self._journal.tell(StoreWentBack())
        return True

    @property
    def has_streams(self) -> bool:
        return bool(self._streams)

    @property
    def have_begun(self) -> bool:
        """Of every shard it is known how far it was read; before that, nothing is promised of what falls off."""
        return bool(self._leases) and all(
            row.is_finished or row.checkpoint.watermark is not None or row.checkpoint.seen_through_seconds is not None
            for row in self._leases.values()
        )

    def empty(self, processes: Iterable[str], *, moves: bool) -> None:
        """Forgets everything while these processes are at work; `moves`: it says that it is another storage."""
        self._app, self._members, self._streams, self._leases, self._controls = None, {}, {}, {}, {}
        self._past.clear()
        self.emptied_count += 1
        self.storage += moves
        self.has_lost_streams = True
        self._journal.tell(StoreEmptied(tuple(processes)))

    def made(self, process: str, what: str) -> None:
        self._journal.tell(RowMade(self._now_ms(), process, what))


class SimulatedLeaseStore(LeaseStore):
    """One process's connection to the rows."""

    def __init__(
        self, rows: ForgetfulRows, network: Network, process: SimulatedProcess, *, call_deadline_ms: int
    ) -> None:
        self._rows = rows
        self._call_seconds = call_deadline_ms / 1000
        """How long this process waits for an answer."""
        self._network = network
        self._process = process
        self._connections = {"heart": rows.storage, "main": rows.storage}
        """The storage that each connection was made to: heartbeats have one of their own."""

    async def _ask(
        self,
        call: Callable[[], Coroutine[Any, Any, Any]],
        connection: str = "main",
        makes: str | None = None,
        on_trouble: Callable[[], None] = lambda: None,
    ) -> Any:
        storage, emptied_count = self._connections[connection], self._rows.emptied_count

        def request() -> Any:
            if self._rows.storage != storage:
                self._connections[connection] = self._rows.storage
                raise LeaseStoreError("the connection was lost: the store has failed over")
            self._rows.note()
            answer = _at_once(call())
            was_under_way = emptied_count != self._rows.emptied_count  # that is nobody's fault
            if makes is not None and answer is not None and emptied_count and not was_under_way:
                self._rows.made(self._process.name, makes)
            return answer

        return await self._network.call(
            self._process, "store", request, lambda: LeaseStoreError("the lease store gave no answer"), on_trouble
        )

    async def open(self, app: AppRow) -> AppRow:
        return await self._ask(partial(self._rows.open, app), makes="the application")  # type: ignore[no-any-return]

    async def read_app(self) -> AppRow | None:
        return await self._ask(self._rows.read_app)  # type: ignore[no-any-return]

    async def incarnation(self) -> str:
        return await self._ask(self._rows.incarnation)  # type: ignore[no-any-return]

    async def record_incarnation(self, expected: str, incarnation: str) -> AppRow | None:
        return await self._ask(partial(self._rows.record_incarnation, expected, incarnation))  # type: ignore[no-any-return]

    async def delete_app(self, app_id: str) -> bool:
        return await self._ask(partial(self._rows.delete_app, app_id))  # type: ignore[no-any-return]

    async def close(self) -> None:
        """The rows stay."""

    async def register_member(self, row: MemberRow) -> MemberRow:
        self._rows.processes[row.member_id] = self._process.name
        return await self._ask(partial(self._rows.register_member, row))  # type: ignore[no-any-return]

    async def heartbeat(self, write: HeartbeatWrite) -> MemberRow | None:
        return await self._ask(partial(self._rows.heartbeat, write), "heart")  # type: ignore[no-any-return]

    async def read_members(self) -> Sequence[MemberRow]:
        return await self._ask(self._rows.read_members)  # type: ignore[no-any-return]

    async def dead_members(self) -> Sequence[str]:
        """Nobody vouches for a process on another machine."""
        return ()

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        return await self._ask(partial(self._rows.seal_member, member_id, observed_counter))  # type: ignore[no-any-return]

    async def leave(self, member_id: str) -> MemberRow | None:
        self._rows.note_leaving(member_id)
        return await self._ask(partial(self._rows.leave, member_id))  # type: ignore[no-any-return]

    async def request_hand_off(self, donor: str, request: HandOffRequest) -> MemberRow | None:
        return await self._ask(partial(self._rows.request_hand_off, donor, request))  # type: ignore[no-any-return]

    async def delete_member(self, member_id: str) -> bool:
        return await self._ask(partial(self._rows.delete_member, member_id))  # type: ignore[no-any-return]

    async def put_stream(self, row: StreamRow, *, app_id: str) -> StreamRow | None:
        call = partial(self._rows.put_stream, row, app_id=app_id)
        return await self._ask(call, makes="a stream")  # type: ignore[no-any-return]

    async def write_stream(self, row: StreamRow, expected_version: int, *, app_id: str) -> StreamRow | None:
        call = partial(self._rows.write_stream, row, expected_version, app_id=app_id)
        return await self._ask(call, makes="the mark of a stream")  # type: ignore[no-any-return]

    async def read_streams(self) -> Sequence[StreamRow]:
        return await self._ask(self._rows.read_streams)  # type: ignore[no-any-return]

    async def create_lease(self, row: LeaseRow, *, app_id: str) -> LeaseRow | None:
        call = partial(self._rows.create_lease, row, app_id=app_id)
        return await self._ask(call, makes="a lease")  # type: ignore[no-any-return]

    async def read_leases(self, *, with_finished: bool = False) -> Sequence[LeaseRow]:
        return await self._ask(partial(self._rows.read_leases, with_finished=with_finished))  # type: ignore[no-any-return]

    async def read_lease(self, key: LeaseKey) -> LeaseRow | None:
        return await self._ask(partial(self._rows.read_lease, key))  # type: ignore[no-any-return]

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        call = partial(
            self._rows.take_lease,
            key,
            member_id,
            expected_owner=expected_owner,
            expected_version=expected_version,
            epoch_floor=epoch_floor,
        )
        return await self._ask(call)  # type: ignore[no-any-return]

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        call = partial(self._rows.write_lease, row, member_id=member_id, expected_version=expected_version)
        # Its sender waits for no answer longer than its deadline.
        on_trouble = partial(self._process.block_commits, self._call_seconds, since=self._process.world_ms() / 1000)
        return await self._ask(call, on_trouble=on_trouble)  # type: ignore[no-any-return]

    async def delete_lease(self, key: LeaseKey, expected_version: int) -> bool:
        return await self._ask(partial(self._rows.delete_lease, key, expected_version))  # type: ignore[no-any-return]

    async def put_control(self, row: ControlRow) -> None:
        await self._ask(partial(self._rows.put_control, row))

    async def write_control(self, row: ControlRow) -> bool:
        return await self._ask(partial(self._rows.write_control, row))  # type: ignore[no-any-return]

    async def read_controls(self) -> Sequence[ControlRow]:
        return await self._ask(self._rows.read_controls)  # type: ignore[no-any-return]


def _at_once(call: Coroutine[Any, Any, Any]) -> Any:
    """The memory store's methods wait for nothing: their first step is their last."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the memory store waited for something")
