"""The status of a fleet: what a member reports, what a viewer derives from the rows, how many workers are needed.

The status row of a member is for people who look at the fleet (`top`, `explain`); no worker reads it. So it is written
when a reason changes, at most once a minute, and while a viewer runs: viewers renew a mark in the application's row
every 5 s, and every poll shows that row.

A viewer only observes. As between members, a member is alive if its counter moves on the observer's own clock; no
stored time is used (rule L5). In the first view a live row counts as alive, unless its process is known to be dead
(rule L17).

A fleet that is behind works as fast as it can: if each worker handles as much as now, `1 + lag / catch_up` times as
many workers handle what arrives and what has piled up. Workers beyond the number of shards would be idle. Shards that
more workers cannot help (stopped, paused or throttled) do not count.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import asdict, replace

from anabranch._core.shards import lifecycle
from anabranch._model.leases import (
    AppRow,
    LeaseKey,
    LeaseRow,
    MemberRow,
    ShardStatus,
    StatusRow,
    StreamRow,
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
from anabranch.reports import DesiredWorkers, FleetMember, FleetShard, FleetStatus, FleetSubscription, StoppedRecord

# what a member reports

SHARDS_MAX: Final = 20
SHARDS_BYTES_MAX: Final = 3_600
"""With member id and totals the row stays under 4 KB."""
WATCH_RENEWED_EVERY_MS: Final = 5_000
"""How often one viewer renews the watch mark, which asks all members for their status."""
WATCHED_STATUS_EVERY_MS: Final = 2_000
"""How often a member writes its status at most, if several viewers ask for it."""
REASONS_EVERY_MS: Final = 60_000
REASON_CHARACTERS_MAX: Final = 120
"""The limit of each text in a reason, so that many reasons fit."""


class StatusReporter:
    """Decides for one member when its status is written."""

    def __init__(self, member_id: str) -> None:
        self._member_id = member_id
        self._revision = 0
        self._reasons: dict[str, Reason] = {}
        self._written_ms: int | None = None
        self._mark: int | None = None
        self._is_awaited = False

    def observe_mark(self, mark: int) -> None:
        """The mark in the application's row, as just read. The first one only sets the baseline."""
        if self._mark is not None and mark != self._mark:
            self._is_awaited = True
        self._mark = mark

    def next_row(self, shards: Sequence[ShardStatus], now_ms: int) -> StatusRow | None:
        """The row to write now, from the worst shard to the best; None if no write is due."""
        if not self._is_awaited and _reasons(shards) == self._reasons:
            return None
        every_ms = WATCHED_STATUS_EVERY_MS if self._is_awaited else REASONS_EVERY_MS
        if self._written_ms is not None and now_ms - self._written_ms < every_ms:
            return None
        self._revision += 1  # even if the last write had no answer: it may still take effect
        lags = [shard.millis_behind_latest for shard in shards if shard.millis_behind_latest is not None]
        return StatusRow(
            member_id=self._member_id,
            revision=self._revision,
            shard_count=len(shards),
            stalled_count=sum(shard.reason is not None for shard in shards),
            millis_behind_latest=max(lags, default=None),
            records_per_second=round(sum(shard.records_per_second for shard in shards), 1),
            shards=_worst(shards),
        )

    def written(self, shards: Sequence[ShardStatus], now_ms: int) -> None:
        """The last row was acknowledged; it was made of these shards."""
        self._reasons = _reasons(shards)
        self._written_ms = now_ms
        self._is_awaited = False


def _reasons(shards: Sequence[ShardStatus]) -> dict[str, Reason]:
    return {one.lease: one.reason for one in shards if one.reason is not None}


def _worst(shards: Sequence[ShardStatus]) -> tuple[ShardStatus, ...]:
    """As many as fit, and always the one furthest behind: the application's lag is read from it."""
    kept: list[ShardStatus] = []
    room = SHARDS_BYTES_MAX
    furthest = max(shards, key=lambda shard: shard.lag_ms or 0, default=None)
    others = [shard for shard in shards if shard is not furthest]
    worst = [*([] if furthest is None else [furthest]), *others][:SHARDS_MAX]
    for shard in worst:
        reason = None if shard.reason is None else shard.reason.shortened(REASON_CHARACTERS_MAX)
        shorter = replace(shard, reason=reason)
        room -= _stored_bytes(_without_text(shorter))
        if room < 0:
            break
        kept.append(shorter)
    return tuple(kept)


def shards_json(shards: Sequence[ShardStatus]) -> str:
    """As stores keep them. Texts are for versions that do not know the reason, and are left out if they do not fit."""
    whole = [msgspec.to_builtins(shard) for shard in shards]
    kept = whole if _stored_bytes(whole) <= SHARDS_BYTES_MAX else [_without_text(shard) for shard in shards]
    return msgspec.json.encode(kept).decode()


def _without_text(shard: ShardStatus) -> list[Any]:
    fields: list[Any] = msgspec.to_builtins(shard)
    if shard.reason is not None:
        fields[1] = {name: value for name, value in fields[1].items() if name != "text"}
    return fields


def _stored_bytes(document: object) -> int:
    """Its size as JSON in a JSON string, as stores keep it."""
    return len(msgspec.json.encode(msgspec.json.encode(document).decode()))


# what a viewer sees

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
        current = {(row.stream_key, row.generation) for row in streams.values()}
        leases = [row for row in rows.leases if (row.key.stream_key, row.key.generation) in current]
        reported = {(row.member_id, shard.lease): shard for row in rows.statuses for shard in row.shards}
        totals = {row.member_id: row for row in rows.statuses if self._is_fresh(row, now_ms)}
        held = Counter(row.owner for row in leases if not row.is_finished)
        members: dict[str, FleetMember] = {}
        for member in rows.members:
            name, is_dead = member.member_id, member.member_id in rows.dead_members
            members[name] = self._member(member, now_ms, held[name], totals.get(name), is_dead=is_dead)
        snapshot = _FleetSnapshot(
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
            shards=tuple(snapshot.shard(row) for row in leases),
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

    def _member(
        self, row: MemberRow, now_ms: int, shard_count: int, totals: StatusRow | None, *, is_dead: bool
    ) -> FleetMember:
        observed = self._counters[row.member_id]
        age_ms = now_ms - observed.since_ms
        state: MemberState = "evicted" if row.state == "sealed" else row.state
        if row.state == "live" and is_dead:
            state = "dead"
        elif row.state == "live" and age_ms >= row.expiry_ms:
            state = "silent"
        if state != "live":
            totals = None
        lags_ms = [] if totals is None else [shard.lag_ms for shard in totals.shards if shard.lag_ms is not None]
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
            lag=max(lags_ms) / 1000 if lags_ms else None,
            millis_behind_latest=None if totals is None else totals.millis_behind_latest,
        )


def _current_streams(rows: Sequence[StreamRow]) -> dict[str, StreamRow]:
    """If a stream was deleted and created again, only the newest."""
    newest: dict[str, StreamRow] = {}
    for row in rows:
        if row.arn not in newest or newest[row.arn].created_seconds < row.created_seconds:
            newest[row.arn] = row
    return {row.stream_key: row for row in newest.values()}


class _FleetSnapshot(msgspec.Struct, frozen=True):
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
        subscription = None if measured is None else measured.subscription
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
            waits_for=() if row.is_finished else lifecycle.open_parents(row, self.leases),
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
            subscription=None if subscription is None else FleetSubscription(**asdict(subscription)),
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
        if parents := lifecycle.open_parents(row, self.leases):
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


# how many workers are needed

HELPED_BY_WORKERS: Final = frozenset(
    {
        "budget-full",
        "held-back-bytes-limit",
        "no-room-for-held-back",
        "open-keys-limit",
        "record-in-handler",
        "record-unfinished",
        "replay-bytes-limit",
    }
)
"""Codes of reasons of a stalled shard: its worker has too much to do."""


def desired_workers(
    status: FleetStatus,
    *,
    target_lag: float,
    catch_up: float,
    worker_rate: float | None,
    minimum: int,
    maximum: int | None,
) -> DesiredWorkers:
    """`worker_rate` is how many records a busy worker handles in a second; None if unknown. Then fewer workers than now
    are advised only if there are more workers than shards, or if no records arrive. The rate never lowers the number of
    workers while the fleet is behind, or while its lag or rate is unknown.
    """
    live = [member for member in status.live_members if not member.draining]
    shards = [shard for shard in status.unfinished_shards if shard.state not in {"waiting", "paused", "stopped"}]
    lag = max((shard.lag for shard in shards if shard.lag is not None and _is_helped(shard)), default=None)
    rate = status.records_per_second
    behind = lag is not None and lag > target_lag
    factor = 1.0 + (lag or 0.0) / catch_up if behind else 1.0
    if worker_rate is not None:
        wanted, why = ceil(rate * factor / worker_rate), f"{rate:.0f} records/s at {worker_rate:g} for each worker"
    elif behind:
        wanted, why = ceil(len(live) * factor), f"to catch up in {catch_up:.0f} s"
    elif lag == 0 and rate == 0:
        wanted, why = 0, "nothing arrives"
    else:
        wanted, why = len(live), "the lag is within its target" if lag is not None else "the lag is not known"
    if wanted < len(live) and (doubt := _doubt(live, lag, behind=behind)) is not None:
        wanted, why = len(live), doubt
    if behind:
        why = f"{lag:.0f} s behind: {why}"
    most = min((member.shards_max for member in live if member.shards_max), default=None)
    if most is not None and (needed := ceil(len(shards) / most)) > wanted:
        wanted, why = needed, f"a worker takes {most} shards at most"
    if wanted > len(shards):
        wanted, why = len(shards), f"{why}; there are {len(shards)} shards"
    workers = max(wanted, minimum, 1 if shards else 0)
    return DesiredWorkers(
        workers=workers if maximum is None else min(workers, maximum),
        live_workers=len(live),
        shard_count=len(shards),
        lag=lag,
        records_per_second=rate,
        why=why,
    )


def _doubt(live: Sequence[FleetMember], lag: float | None, *, behind: bool) -> str | None:
    """Why the rate does not show that fewer workers are enough; None if it does."""
    if behind:
        return "each worker handles less than worker_rate"
    if lag is None:
        return "the lag is not known"
    return "the rate is not known" if any(member.records_per_second is None for member in live) else None


def _is_helped(shard: FleetShard) -> bool:
    if shard.state == "stalled":
        return shard.reason is not None and shard.reason.code in HELPED_BY_WORKERS
    return True
