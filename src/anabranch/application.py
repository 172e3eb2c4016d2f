"""`Application`: observe and manage a whole fleet through its lease store, from any process.

It is not a member of the fleet and holds no lease, with one exception: to apply a command while no worker runs, it
joins the fleet and takes one lease for a moment.
"""

import asyncio
import contextlib
import getpass
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Self

from msgspec.structs import replace

from anabranch._core.leases.commands import RESUME, SKIP, STOP_ID_ARGUMENT, apply_to_row, stop_id
from anabranch._core.leases.status import (
    WATCH_RENEWED_EVERY_MS,
    WATCHED_STATUS_EVERY_MS,
    FleetObserver,
    FleetRows,
    desired_workers,
)
from anabranch._core.leases.timing import LEASE_EXPIRY_MS_DEFAULT
from anabranch._core.monitor import AlertState, FleetLag
from anabranch._engine.clock import SystemClock
from anabranch._model.kinds import check_arguments, refuse
from anabranch._model.leases import Conflict, ControlRow, LeaseRow, MemberRow, Place
from anabranch._model.streams import Position
from anabranch._ports import Clock, LeaseStore
from anabranch.alerts import Alert, check_alerts, report_alert
from anabranch.config import Aws
from anabranch.errors import ConfigurationError, LeaseError, LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.events import Event, StoreAnswered, StoreUnanswered
from anabranch.logs import make_emit
from anabranch.reports import CommandResult, DesiredWorkers, FleetMember, FleetStatus
from anabranch.stores.catalogue import check_copy, copy_rows, delete_leftovers, find_store
from anabranch.stores.urls import open_store

__all__ = ["Application"]

_POLL_SECONDS: Final = 0.25
_ANSWER_MS: Final = 10_000
"""A command waits for a worker's answer for the longest lease expiry of the fleet, and this much longer."""
_APPLY_SECONDS: Final = 5.0
"""How long it may take to apply a command without a worker: far less than the lease expiry."""
_REQUESTER_CHARACTERS_MAX: Final = 30
"""How much of the requester's name is in the id of the member that applies a command."""
_WATCH_WRITE_SECONDS: Final = 1.0
"""How long `status` waits for the write that asks the workers to report."""


class Application:
    """An existing application. Pass the same `leases=` as its workers. Without it, we search the store that
    ANABRANCH_LEASES names, or the embedded stores of this machine. If the application is not found, the error names
    those that exist. `aws` has the region and credentials for a store in AWS; `clock` is for tests.
    """

    def __init__(
        self, app: str, *, leases: str | LeaseStore | None = None, aws: Aws | None = None, clock: Clock | None = None
    ) -> None:
        self._app = app
        self._leases = leases
        self._aws = aws
        self._store: LeaseStore | None = None
        self._observer = FleetObserver()
        self._renewed_ms: int | None = None
        self._app_id: str | None = None
        self._clock = clock or SystemClock()

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except LeaseStoreInvalidError as error:
            if error.code != "half_deleted":  # `delete` completes the deletion
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the store, unless it was passed as an object."""
        store, self._store = self._store, None
        if store is not None and store is not self._leases:
            await store.close()

    async def _open(self) -> LeaseStore:
        if self._store is None:
            self._store = await find_store(self._app, self._leases, os.environ, self._aws)
        return self._store

    async def status(self, *, watch: bool = False) -> FleetStatus:
        """Reads all members and shards, and asks the workers to report, at most every 5 seconds. Heartbeat ages, lags
        and rates are None in the first call: they need a second one at most 15 seconds later. Reasons in the first call
        may be a minute old.

        With `watch`, it polls until every live member has sent a heartbeat and a report. This takes a few seconds, and
        at most half the lease expiry plus 2 seconds. It does not wait if the store publishes changes late, as S3 does.
        """
        await self._renew_watch()
        status, _ = await self._read()
        if watch and not (await self._open()).publish_interval:
            deadline_ms = self._clock.now_ms() + max((_watch_ms(member) for member in status.live_members), default=0)
            while self._clock.now_ms() < deadline_ms and not all(
                member.heartbeat_seen and member.status_seen for member in status.live_members
            ):
                await asyncio.sleep(_POLL_SECONDS)
                await self._renew_watch()
                status, _ = await self._read()
        return status

    async def watch(
        self, *, interval: float = 5.0, alerts: Sequence[Alert] = (), on_event: Callable[[Event], None] | None = None
    ) -> AsyncIterator[FleetStatus]:
        """Yields the status every `interval` seconds. Alerts apply to the worst shard of the fleet, even if no worker
        runs: they are logged, passed to `on_event`, and call their hooks. If the lease store does not answer, the first
        failure emits an event, and no status is yielded until it answers again.
        """
        check_arguments(Application.watch, locals(), but=("alerts", "on_event"))
        if not 0.1 <= interval <= 15:
            raise ConfigurationError(f"interval is {interval}; it must be from 0.1 to 15 seconds, or lags are not seen")
        alerts, emit = check_alerts(alerts), make_emit(on_event)
        fleet_lag, states = FleetLag(), [AlertState(alert, self._clock.now_ms()) for alert in alerts]
        failure_count, failing_since_ms = 0, 0
        while True:
            now_ms = self._clock.now_ms()
            try:
                status = await self.status()
            except LeaseStoreError as error:
                if not failure_count:
                    failing_since_ms = now_ms
                    emit(StoreUnanswered(error=str(error), code=error.code, failure_count=1))
                failure_count += 1
            else:
                if failure_count:
                    emit(StoreAnswered(failure_count=failure_count, seconds=(now_ms - failing_since_ms) / 1000))
                    failure_count = 0
                lag = fleet_lag.observe(status, now_ms)
                for state in states:
                    if (event := state.observe(lag, now_ms)) is not None:
                        report_alert(emit, state.alert, event)
                yield status
            await asyncio.sleep(interval)

    async def desired_workers(
        self,
        *,
        target_lag: float = 60.0,
        catch_up: float = 300.0,
        worker_rate: float | None = None,
        minimum: int = 1,
        maximum: int | None = None,
    ) -> DesiredWorkers:
        """How many workers the fleet should have: from `minimum` to `maximum`, and at most one per shard that can be
        handled. A fleet that is more than `target_lag` seconds behind needs as many as catch up within `catch_up`
        seconds. Fewer workers are only advised with `worker_rate`, the records per second that one busy worker handles.
        Takes a few seconds, as `status(watch=True)` does.
        """
        violations = check_arguments(Application.desired_workers, locals())
        for name, value in (("target_lag", target_lag), ("catch_up", catch_up), ("worker_rate", worker_rate)):
            if value is not None and value <= 0:
                violations.append(f"{name} is {value}; it must be positive")
        if minimum < 0 or (maximum is not None and maximum < max(minimum, 1)):
            violations.append(f"minimum is {minimum} and maximum {maximum}; 0 <= minimum <= maximum is needed")
        refuse(violations)
        return desired_workers(
            await self.status(watch=True),
            target_lag=target_lag,
            catch_up=catch_up,
            worker_rate=worker_rate,
            minimum=minimum,
            maximum=maximum,
        )

    async def _renew_watch(self) -> None:
        """Asks the workers to write their status. Failures are ignored: a read-only store can still be read."""
        store, now_ms = await self._open(), self._clock.now_ms()
        if self._renewed_ms is None or now_ms - self._renewed_ms >= WATCH_RENEWED_EVERY_MS:
            self._renewed_ms = now_ms
            with contextlib.suppress(LeaseError, TimeoutError):
                async with asyncio.timeout(_WATCH_WRITE_SECONDS):
                    await store.renew_watch()

    async def _read(self) -> tuple[FleetStatus, FleetRows]:
        store = await self._open()
        poll = await store.poll()
        if poll.app is not None and self._app_id not in {None, poll.app.app_id}:
            # It was deleted and created again: the rows of the new one are stored under another id.
            await store.open(poll.app)
            poll = await store.poll()
        app = poll.app
        if app is None:
            raise LeaseStoreInvalidError(f"application {self._app!r} was deleted in the meantime")
        self._app_id = app.app_id
        # In a store that publishes changes late, a live member may seem silent for two intervals and the save itself.
        expiry_ms_min = round(2_000 * store.publish_interval + 10_000) if store.publish_interval else 0
        members = [replace(row, expiry_ms=max(row.expiry_ms, expiry_ms_min)) for row in poll.members]
        now_ms = self._clock.now_ms()
        statuses = await store.read_statuses()
        rows = FleetRows(
            app=app,
            streams=await store.read_streams(),
            members=members,
            leases=await store.read_leases(with_finished=True),
            statuses=statuses,
            dead_members=poll.known_dead,
        )
        return self._observer.view(rows, now_ms, self._clock.wall_ms() / 1000), rows

    # commands

    async def skip(self, shard_id: str, position: str, *, stream: str | None = None) -> CommandResult:
        """Skips a record that keeps failing: `position` is its sequence number, with `:sub-sequence number` for a
        record of an aggregate. A running worker applies it within about a second; if none runs, this method applies it.
        `stream` is needed if several streams have such a shard.
        """
        try:
            parsed = Position.parse(position)
        except ValueError as error:
            raise UsageError(
                f"{position!r} is not a position (SEQUENCE or SEQUENCE:SUB): `anabranch explain` shows it"
            ) from error
        return await self._command(SKIP, shard_id, stream, {"position": str(parsed)})

    async def resume(self, shard_id: str, *, stream: str | None = None) -> CommandResult:
        """Tries the record at which a shard is stopped once more. Applied as `skip` is."""
        return await self._command(RESUME, shard_id, stream, {})

    async def commands(self) -> tuple[CommandResult, ...]:
        """All commands, oldest first, with their senders and results."""
        store = await self._open()
        return tuple(_command_result(row) for row in await store.read_controls() if row.key is not None)

    async def _command(
        self, action: str, shard_id: str, stream: str | None, arguments: dict[str, str]
    ) -> CommandResult:
        store = await self._open()
        _, rows = await self._read()
        lease = _find_lease(rows, shard_id, stream)
        if rows.app.place == "moved":
            raise UsageError(f"application {self._app!r} is in {rows.app.other_url}: send commands there")
        if rows.app.place != "here":
            raise UsageError(f"application {self._app!r} is being copied to another store: complete the copy first")
        if lease.is_finished:
            raise UsageError(f"{shard_id} is finished: there is nothing to {action}")
        if action == RESUME and lease.stopped is None:
            raise UsageError(f"{shard_id} is not stopped: there is nothing to resume")
        if lease.stopped is not None:
            arguments = {**arguments, STOP_ID_ARGUMENT: stop_id(lease.stopped)}
        command = ControlRow(
            command_id=secrets.token_hex(8),
            action=action,
            key=lease.key,
            arguments=arguments,
            requested_by=_requester(),
            requested_wall_ms=self._clock.wall_ms(),
        )
        await store.put_control(command)
        return _command_result(await self._await_answer(store, command))

    async def _await_answer(self, store: LeaseStore, command: ControlRow) -> ControlRow:
        """Waits for a worker to answer. If none runs, joins as a member, applies the command and leaves."""
        deadline_ms: int | None = None
        while True:
            stored = next((row for row in await store.read_controls() if row.command_id == command.command_id), command)
            if stored.state != "pending":
                return stored
            status, rows = await self._read()
            now_ms = self._clock.now_ms()
            if not status.live_members and await self._apply_without_workers(store, command, rows):
                continue
            if deadline_ms is None:
                longest = max((member.expiry for member in status.live_members), default=0.0)
                deadline_ms = now_ms + round(longest * 1000) + _ANSWER_MS
            if now_ms >= deadline_ms:
                # A worker may answer first. The next round reads which of the two was written.
                expired = replace(command, state="expired", result="no worker answered in time")
                await store.write_control(expired)
            await asyncio.sleep(_POLL_SECONDS)

    async def _apply_without_workers(self, store: LeaseStore, command: ControlRow, rows: FleetRows) -> bool:
        """Applies a command while no worker runs. Returns False if a worker may have started meanwhile."""
        for row in rows.members:
            if row.state == "live":
                sealed = await store.seal_member(row.member_id, row.counter)
                if sealed is not None and sealed.state == "live":
                    return False
        assert command.key is not None
        lease = await store.read_lease(command.key)
        if lease is None:
            raise LeaseStoreInvalidError(f"the lease of {command.key.shard_id} was deleted in the meantime")
        if lease.owner is not None and lease.owner not in {row.member_id for row in rows.members}:
            return False  # the owner may have joined after the poll (rule L7)
        outcome = apply_to_row(command, lease)
        if outcome.row is not None:
            member = MemberRow(
                member_id=f"{command.requested_by[:_REQUESTER_CHARACTERS_MAX]}#{secrets.token_hex(16)}",
                expiry_ms=LEASE_EXPIRY_MS_DEFAULT,
                order=lease.checkpoint.order,
                shards_max=0,  # so workers that start meanwhile do not give it shards
                joined_wall_ms=self._clock.wall_ms(),
            )
            if not await self._write_as_member(store, member, lease, command):
                return False
        answered = replace(command, state=outcome.state, result=f"{outcome.result} (no worker was running)")
        await store.write_control(answered)
        return True

    async def _write_as_member(
        self, store: LeaseStore, member: MemberRow, lease: LeaseRow, command: ControlRow
    ) -> bool:
        """Takes the lease, writes the outcome and releases it, so fast that no heartbeat is needed. Returns False if
        another member has changed the lease.
        """
        await store.register_member(member)
        try:
            async with asyncio.timeout(_APPLY_SECONDS):
                taken = await store.take_lease(
                    lease.key, member.member_id, expected_owner=lease.owner, expected_version=lease.version
                )
                if isinstance(taken, Conflict):
                    return False
                outcome = apply_to_row(command, taken)
                assert outcome.row is not None, "the version shows that nobody has changed the lease meanwhile"
                # Restores the counter: our take says nothing about a record that crashes its workers.
                written = replace(outcome.row, owner=None, takes_without_progress=lease.takes_without_progress)
                answer = await store.write_lease(written, member_id=member.member_id, expected_version=taken.version)
                return not isinstance(answer, Conflict)
        except TimeoutError as error:
            raise LeaseStoreError(
                f"lease store {store} gave no answer within {_APPLY_SECONDS:.0f} s: repeat the command, or start a "
                "worker, which applies it"
            ) from error
        finally:
            await store.leave(member.member_id)

    async def delete(self) -> None:
        """Deletes the application with its leases and checkpoints, or completes a deletion that failed half-way.
        Refuses while any worker is still heartbeating. To find out, it may wait for one lease expiry.
        """
        try:
            store = await self._open()
        except LeaseStoreInvalidError as error:
            if error.code != "half_deleted":
                raise
        else:
            rows = await self._seal_dead_members()
            if not await store.delete_app(rows.app.app_id):
                raise LeaseStoreError(f"application {self._app!r} was not deleted: a worker is heartbeating again")
        await delete_leftovers(self._app, self._leases, os.environ, self._aws)

    async def copy_to(self, leases: str | LeaseStore) -> int:
        """Copies the application to another lease store, and returns the number of its leases. Refuses while any worker
        is still heartbeating. Afterwards workers start only with the other store; this one keeps the rows, but workers
        refuse to start with it.

        A copy that failed half-way can be repeated; until then, workers refuse to start with either store. A complete
        copy cannot be repeated, also not to a third store.
        """
        source = await self._open()
        target = open_store(leases, self._app, self._aws)
        try:
            _, rows = await self._read()
            await check_copy(source, target, rows.app)
            if rows.app.place != "moved":
                await self._mark_as_leaving(source, target, rows.app.place)
            return await copy_rows(source, target, rows.app)
        finally:
            if target is not leases:
                await target.close()

    async def _mark_as_leaving(self, source: LeaseStore, target: LeaseStore, place: Place) -> None:
        """Marks the source, so that no worker starts with it from then on."""
        await self._seal_dead_members()
        marked = await source.move_app(place, "leaving", str(target))
        # A worker that starts meanwhile is seen here, or sees the mark in its first poll.
        status, _ = await self._read()
        if marked is None or marked.place != "leaving" or status.live_members:
            await source.move_app("leaving", "here", "")
            raise UsageError(f"application {self._app!r} was not moved: a worker started at that moment")

    async def _seal_dead_members(self) -> FleetRows:
        """Evicts all members, so that none can write any more. Waits until each is known to be dead, and raises
        `UsageError` if one sends a heartbeat.
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
        return rows


def _find_lease(rows: FleetRows, shard_id: str, stream: str | None) -> LeaseRow:
    """`stream` is a name or a stream key. A lease that is not finished is preferred."""
    names = {row.stream_key: row.name for row in rows.streams}
    found = [
        row
        for row in rows.leases
        if row.key.shard_id == shard_id and stream in {None, names.get(row.key.stream_key), row.key.stream_key}
    ]
    found = [row for row in found if not row.is_finished] or found
    if not found:
        of_stream = "" if stream is None else f" of stream {stream}"
        raise UsageError(f"application {rows.app.app!r} has no lease for {shard_id}{of_stream}")
    if len(found) > 1:
        keys = ", ".join(sorted(names.get(row.key.stream_key, row.key.stream_key) for row in found))
        raise UsageError(f"several streams have a {shard_id} ({keys}): say which one (stream=, --stream)")
    return found[0]


def _command_result(row: ControlRow) -> CommandResult:
    assert row.key is not None
    return CommandResult(
        command_id=row.command_id,
        action=row.action,
        stream=row.key.stream_name,
        shard_id=row.key.shard_id,
        position=row.arguments.get("position"),
        requested_by=row.requested_by,
        requested_seconds=row.requested_wall_ms / 1000,
        state=row.state,
        result=row.result,
    )


def _requester() -> str:
    """Who sends a command, as `user@host`. It is stored with the command."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = f"user {os.getuid()}" if hasattr(os, "getuid") else "somebody"
    return f"{user}@{socket.gethostname()}"


def _watch_ms(member: FleetMember) -> int:
    """How long a live member may take to show a heartbeat and a report. It sends four heartbeats per expiry, and one
    may be late: half the expiry. If it has just reported to another viewer, its next report comes this much later.
    """
    return round(member.expiry * 1000) // 2 + WATCHED_STATUS_EVERY_MS
