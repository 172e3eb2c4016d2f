"""The status of a fleet from its rows: which members are alive, who owns what, and why a shard is stalled.

It only observes. As between members, a member is alive if its counter moves on the observer's own clock; no stored time
is used (rule L5). In the first view a live row counts as alive, unless its process is known to be dead (rule L17).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import asdict

from anabranch._core.shards import gate
from anabranch._model.leases import (
    AppRow,
    LeaseKey,
    LeaseRow,
    MemberRow,
    ShardStatus,
    StatusRow,
    StreamRow,
    SubscriptionStatus,
)
from anabranch._model.streams import StartingPosition
from anabranch.reasons import (
    ApplicationMoved,
    NoLiveWorker,
    NotTakenYet,
    PausedInStore,
    Reason,
    StoppedAtRecord,
    StreamNotRead,
    WaitsForParents,
    WorkersFull,
    WorkersStopping,
)
from anabranch.reports import FleetMember, FleetShard, FleetStatus, FleetSubscription, StoppedRecord

State = Literal["reading", "stalled", "stopped", "paused", "waiting", "orphaned", "unowned", "finished"]
FRESH_MS: Final = 15_000
"""A status counts as new for this long. While a viewer runs, it is written every 5 s."""

MemberState = Literal["live", "silent", "dead", "evicted", "left"]


class FleetRows(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of an application, read one after another."""

    app: AppRow
    streams: Sequence[StreamRow]
    members: Sequence[MemberRow]
    leases: Sequence[LeaseRow]
    """Including finished ones."""
    statuses: Sequence[StatusRow] = ()
    dead_members: Collection[str] = ()


class _ObservedCounter(msgspec.Struct, frozen=True):
    """A member's counter, since when it has this value, and whether it was seen to move."""

    counter: int
    since_ms: int
    moved: bool


class FleetObserver:
    """Views a fleet again and again, and remembers when a member's counter or status was seen to change."""

    def __init__(self) -> None:
        self._counters: dict[str, _ObservedCounter] = {}
        self._revisions: dict[str, int] = {}
        self._written_ms: dict[str, int] = {}
        """When each member was seen to write a status: between two views that are not far apart."""
        self._viewed_ms: int | None = None

    def view(self, rows: FleetRows, now_ms: int, wall_seconds: float) -> FleetStatus:
        self._observe_counters(rows.members, now_ms)
        self._observe_statuses(rows.statuses, now_ms)
        self._viewed_ms = now_ms
        streams = _current_streams(rows.streams)
        leases = [row for row in rows.leases if _is_current(row, streams)]
        reported = {(row.member_id, shard.lease): shard for row in rows.statuses for shard in row.shards}
        totals = {row.member_id: row for row in rows.statuses if self._is_fresh(row, now_ms)}
        held = Counter(row.owner for row in leases if not row.is_finished)
        members = {
            row.member_id: _member(
                row,
                self._counters[row.member_id],
                now_ms,
                row.member_id in rows.dead_members,
                held[row.member_id],
                totals.get(row.member_id),
            )
            for row in rows.members
        }
        view = _View(
            {row.key: row for row in leases},
            {row.member_id: row for row in rows.members},
            members,
            reported,
            streams,
            rows.app.other_url if rows.app.place in {"leaving", "moved"} else None,
            wall_seconds,
        )
        live = {member_id for member_id, member in members.items() if member.is_live}
        return FleetStatus(
            app=rows.app.app,
            created_seconds=rows.app.created_wall_ms / 1000,
            streams=tuple(sorted(row.name for row in streams.values())),
            members=tuple(members.values()),
            shards=tuple(view.shard(row) for row in leases),
            unreported_count=sum(
                row.owner in live and (row.owner, row.key.short_name) not in reported for row in leases
            ),
        )

    def _observe_counters(self, members: Sequence[MemberRow], now_ms: int) -> None:
        seen: dict[str, _ObservedCounter] = {}
        for row in members:
            before = self._counters.get(row.member_id)
            if before is not None and before.counter == row.counter:
                seen[row.member_id] = before
            else:
                seen[row.member_id] = _ObservedCounter(row.counter, now_ms, before is not None)
        self._counters = seen

    def _observe_statuses(self, statuses: Sequence[StatusRow], now_ms: int) -> None:
        """While no viewer runs, workers rarely write a status. So one that is new after a long time may be old."""
        if self._viewed_ms is not None and now_ms - self._viewed_ms < FRESH_MS:
            for row in statuses:
                if self._revisions.get(row.member_id) != row.revision:
                    self._written_ms[row.member_id] = now_ms
        self._revisions = {row.member_id: row.revision for row in statuses}
        self._written_ms = {name: at_ms for name, at_ms in self._written_ms.items() if name in self._revisions}

    def _is_fresh(self, row: StatusRow, now_ms: int) -> bool:
        """Otherwise the member's lag and rate are unknown, and its reasons may be a minute old."""
        written_ms = self._written_ms.get(row.member_id)
        return written_ms is not None and now_ms - written_ms < FRESH_MS


def _current_streams(rows: Sequence[StreamRow]) -> dict[str, StreamRow]:
    """If a stream was deleted and created again, only the newest."""
    newest: dict[str, StreamRow] = {}
    for row in rows:
        if row.arn not in newest or newest[row.arn].created_seconds < row.created_seconds:
            newest[row.arn] = row
    return {row.stream_key: row for row in newest.values()}


def _is_current(row: LeaseRow, streams: Mapping[str, StreamRow]) -> bool:
    stream = streams.get(row.key.stream_key)
    return stream is not None and stream.generation == row.key.generation


def _member(
    row: MemberRow,
    observed: _ObservedCounter,
    now_ms: int,
    is_dead: bool,  # noqa: FBT001 -- a private function
    shard_count: int,
    totals: StatusRow | None,
) -> FleetMember:
    age_ms = now_ms - observed.since_ms
    state: MemberState = "evicted" if row.state == "sealed" else row.state
    if row.state == "live" and is_dead:
        state = "dead"
    elif row.state == "live" and age_ms >= row.expiry_ms:
        state = "silent"
    if state != "live":
        totals = None
    return FleetMember(
        member_id=row.member_id,
        worker_id=row.worker_id,
        state=state,
        heartbeat_seen=observed.moved,
        heartbeat_age=age_ms / 1000,
        expiry=row.expiry_ms / 1000,
        joined_seconds=row.joined_wall_ms / 1000,
        shard_count=shard_count,
        shards_max=row.shards_max,
        records_per_second=None if totals is None else totals.records_per_second,
        reads_healthy=row.reads_healthy,
        draining=row.draining,
        status_seen=totals is not None,
        lag=None if totals is None else _largest_lag(totals),
        millis_behind_latest=None if totals is None else totals.millis_behind_latest,
    )


def _largest_lag(row: StatusRow) -> float | None:
    return max((shard.lag_ms / 1000 for shard in row.shards if shard.lag_ms is not None), default=None)


def _subscription(status: SubscriptionStatus | None) -> FleetSubscription | None:
    return None if status is None else FleetSubscription(**asdict(status))


class _View(msgspec.Struct, frozen=True):
    """One snapshot of a fleet."""

    leases: Mapping[LeaseKey, LeaseRow]
    rows: Mapping[str, MemberRow]
    members: Mapping[str, FleetMember]
    reported: Mapping[tuple[str, str], ShardStatus]
    streams: Mapping[str, StreamRow]
    moved_to: str | None
    wall_seconds: float

    def shard(self, row: LeaseRow) -> FleetShard:
        owner = self.members.get(row.owner or "")
        status = self.reported.get((row.owner or "", row.key.short_name))
        live_status = status if owner is not None and owner.is_live else None
        state, reason = self._state(row, owner, live_status)
        measured = live_status if owner is not None and owner.status_seen else None
        lag, left = self._lag(row, owner, status, measured, reason)
        watermark, stopped = row.checkpoint.watermark, row.stopped
        written_ms = row.checkpointed_at_wall_ms
        return FleetShard(
            stream=self.streams[row.key.stream_key].name,
            shard_id=row.key.shard_id,
            state=state,
            reason=reason,
            owner=row.owner,
            worker_id=None if owner is None else owner.worker_id,
            checkpoint=None if watermark is None else str(watermark),
            starts_at=_start(row.start),
            checkpointed_seconds=None if written_ms is None else written_ms / 1000,
            lag=lag,
            retention_left=left,
            millis_behind_latest=None if measured is None else measured.millis_behind_latest,
            records_per_second=None if measured is None else measured.records_per_second,
            records_handled=row.records_handled,
            waits_for=() if row.is_finished else gate.open_parents(row, self.leases),
            children=() if row.finish is None else row.finish.children,
            stopped=None
            if stopped is None
            else StoppedRecord(
                reason=stopped.reason,
                position=None if stopped.position is None else str(stopped.position),
                partition_key=stopped.partition_key,
                member_id=stopped.member_id,
                stopped_seconds=stopped.at_wall_ms / 1000,
            ),
            takes_without_progress=row.takes_without_progress,
            fence_token=row.fence_token,
            subscription=None if measured is None else _subscription(measured.subscription),
        )

    def _lag(
        self,
        row: LeaseRow,
        owner: FleetMember | None,
        status: ShardStatus | None,
        measured: ShardStatus | None,
        reason: Reason | None,
    ) -> tuple[float | None, float | None]:
        """The lag, and the time until its oldest unfinished record is trimmed (rule O4)."""
        if row.is_finished:
            return None, None
        if measured is not None and measured.lag_ms is not None:
            return measured.lag_ms / 1000, measured.retention_left_seconds
        if row.stopped is not None:
            stopped = row.stopped.reason
            return self._age(stopped.arrival_seconds if isinstance(stopped, StoppedAtRecord) else None), None
        if (owner is not None and owner.is_live) or isinstance(reason, WaitsForParents | ApplicationMoved):
            return None, None
        return self._lag_without_owner(row, status, reason)

    def _lag_without_owner(
        self, row: LeaseRow, status: ShardStatus | None, reason: Reason | None
    ) -> tuple[float | None, float | None]:
        """Nobody has finished a record since the owner died, so the lag grows with time. `status` is the owner's last
        one; the checkpoint may be newer. A free shard that a worker is about to take has just been read.
        """
        reported = None if status is None else status.handled_through_seconds
        stored = None if isinstance(reason, NotTakenYet) else row.checkpoint.seen_through_seconds
        lag = self._age(max((seconds for seconds in (reported, stored) if seconds is not None), default=None))
        if lag is None or status is None or status.lag_ms is None or status.retention_left_seconds is None:
            return lag, None
        return lag, max(0.0, status.lag_ms / 1000 + status.retention_left_seconds - lag)

    def _age(self, seconds: float | None) -> float | None:
        return None if seconds is None else max(0.0, self.wall_seconds - seconds)

    def _state(
        self, row: LeaseRow, owner: FleetMember | None, live_status: ShardStatus | None
    ) -> tuple[State, Reason | None]:
        if row.is_finished:
            return "finished", None
        if self.moved_to is not None:
            return "unowned", ApplicationMoved(store=self.moved_to)
        if row.stopped is not None and not self._is_tried_again(row, live_status, row.stopped.at_wall_ms):
            return "stopped", row.stopped.reason
        if row.paused:
            return "paused", PausedInStore()
        if owner is None or owner.state in {"evicted", "left"}:
            return self._unowned_state(row)
        if (silence := owner.silence) is not None:
            return "orphaned", silence
        if live_status is not None and live_status.reason is not None:
            return "stalled", live_status.reason
        return "reading", None

    def _is_tried_again(self, row: LeaseRow, live_status: ShardStatus | None, stopped_wall_ms: int) -> bool:
        """A process that started after the stop retries the record (rule D4). One that started before it and joined
        again, because it was evicted, does not, and reports that the shard is stopped.
        """
        if live_status is not None and isinstance(live_status.reason, StoppedAtRecord):
            return False
        owner = self.rows.get(row.owner or "")
        if owner is None or not self.members[owner.member_id].is_live:
            return False
        return owner.joined_wall_ms > stopped_wall_ms

    def _unowned_state(self, row: LeaseRow) -> tuple[State, Reason]:
        if parents := gate.open_parents(row, self.leases):
            return "waiting", WaitsForParents(parents=parents)
        live = [member for member in self.members.values() if member.is_live]
        if not live:
            return "unowned", NoLiveWorker()
        readers = [member for member in live if self.rows[member.member_id].reads(row.key.stream_key)]
        if not readers:
            return "unowned", StreamNotRead(stream=self.streams[row.key.stream_key].name)
        takers = [member for member in readers if not member.draining]
        if not takers:
            return "unowned", WorkersStopping()
        if all(member.shards_max is not None and member.shard_count >= member.shards_max for member in takers):
            return "unowned", WorkersFull()
        return "unowned", NotTakenYet()


def _start(start: StartingPosition) -> str:
    if start.timestamp_seconds is not None:
        return f"{start.type} {start.timestamp_seconds:.3f}"
    return start.type if start.sequence_number is None else f"{start.type} {start.sequence_number}"
