"""Shards come and go: roots where a stream begins, children at a shard's end, strays by listing.

The core plans (`_core.shards`); this performs, in the order that survives a crash at any point: rows of children before
the finish of their parent, everything put-if-absent, nobody reads before a stream is bootstrapped.
"""

from functools import partial

from msgspec.structs import replace

from anabranch._core.leases.plan import Take
from anabranch._core.leases.timing import LeaseTiming
from anabranch._core.reading.horizon import EDGE_SECONDS, Horizon, may_have_lost
from anabranch._core.shards.bootstrap import listing_filter, missing_leases
from anabranch._core.shards.gate import (
    CHILDREN_UNKNOWN,
    ShardEnd,
    adoptable,
    classify_missing_shard,
    plan_end,
    plan_trimmed,
    removable,
)
from anabranch._core.shards.graph import ShardGraph, opened_after_horizon, unread_since
from anabranch._engine.alarm import Alarm
from anabranch._engine.checkpoints.checkpointer import Checkpointer
from anabranch._engine.leases.lease_loop import LeaseLoop
from anabranch._engine.outside import Outside
from anabranch._engine.session import Session
from anabranch._engine.shards.beginning import Beginning, Start
from anabranch._engine.shards.losses import Losses
from anabranch._engine.shards.shared_look import SharedLook
from anabranch._engine.shards.topology import await_stream, find_summary, list_all_shards
from anabranch._model.leases import AppRow, LeaseKey, LeaseRow, StreamRow
from anabranch._model.shard_filters import AT_TRIM_HORIZON
from anabranch._model.shards import Shard
from anabranch._model.start_positions import TRIM_HORIZON
from anabranch._model.streams import StreamName
from anabranch._wire.messages import StreamSummary
from anabranch.config import ConsumerSettings
from anabranch.errors import (
    AnabranchError,
    CredentialsError,
    LeaseStoreError,
    ServiceError,
    StreamDeletedError,
    StreamNotFoundError,
    StreamRecreatedError,
    TransportError,
)
from anabranch.events import KeysUnordered, ListingFailed, ShardFinished, StreamChanged

__all__ = ["Lineage"]

RETRY_MS = 500
UNANSWERED = (ServiceError, TransportError, CredentialsError, LeaseStoreError)
"""What may be otherwise the next time it is asked; a denied access too, once somebody has granted it."""


class Lineage:
    def __init__(
        self,
        outside: Outside,
        streams: tuple[StreamName, ...],
        start: Start,
        settings: ConsumerSettings,
        timing: LeaseTiming,
    ) -> None:
        self._outside = outside
        self._call_deadline_ms = timing.call_deadline_ms
        self._start_timeout_ms = round(settings.start_timeout * 1000)
        self._wanted = streams
        self._start = start
        self._settings = settings
        self._rows: dict[str, StreamRow] = {}
        self._names: dict[str, StreamName] = {}
        self._graphs: dict[str, ShardGraph] = {}
        self._auto: dict[str, None] = {}
        """Keys of streams whose records the service places itself."""
        self._looks: dict[str, SharedLook] = {}
        self._losses = Losses(outside)
        self._listings = Alarm(outside.clock)
        self._beginning: Beginning
        self._leases: LeaseLoop

    def attach(self, leases: LeaseLoop) -> None:
        self._leases = leases

    @property
    def stream_keys(self) -> tuple[str, ...]:
        return tuple(self._rows)

    def stream_of(self, key: LeaseKey) -> StreamName | None:
        """None for a stream that this worker does not read."""
        return self._names.get(key.stream_key)

    def horizon_of(self, key: LeaseKey) -> Horizon:
        return self._losses.horizon_of(key.stream_key)

    def is_placed_by_key(self, key: LeaseKey) -> bool:
        """Whether a record's shard follows from its partition key, as it does nearly everywhere."""
        return key.stream_key not in self._auto

    # the start

    async def prepare(self, app: AppRow) -> None:
        """Every stream has its row and its root leases, whoever made them."""
        self._beginning = Beginning(
            self._outside,
            app,
            self._start,
            call_deadline_ms=self._call_deadline_ms,
            start_timeout_ms=self._start_timeout_ms,
        )
        for stream in self._wanted:
            summary = await await_stream(self._outside, stream, self._start_timeout_ms)
            await self._beginning.tell_if_new(summary)
            await self._begin(stream, summary)

    async def _begin(self, stream: StreamName, summary: StreamSummary) -> None:
        row = await self._beginning.begin(stream, summary)
        self._names[row.stream_key] = stream
        self._losses.look(row.stream_key, summary)
        self._graphs[row.stream_key] = ShardGraph()
        self._looks[row.stream_key] = SharedLook(partial(self._same_stream, row.stream_key, None))
        if summary.record_distribution == "AUTO":
            self._auto[row.stream_key] = None
            self._outside.emit(KeysUnordered(stream=summary.name))
        self._rows[row.stream_key] = row

    # the end of a shard

    async def finish(self, session: Session, checkpointer: Checkpointer) -> None:
        """The shard's last record is finished: children first, then its own end, then the children that may run."""
        outside = self._outside
        while session.phase == "ended":
            life = self._leases.table.member_id
            end = await self._try_to_plan_end(session)
            if end is not None and await self._write_end(session, end, checkpointer, life):
                outside.emit(
                    ShardFinished(
                        stream=session.stream.name,
                        shard_id=session.shard_id,
                        children=end.finish.children,
                        reason=end.finish.reason,
                    )
                )
                await self._adopt(session.key, end)
                if session.trimmed:
                    # Of two parents that are trimmed at a time, each leaves the child to the other: now one is left.
                    self._listings.ring()
                return
            await outside.clock.sleep_until_ms(outside.clock.now_ms() + RETRY_MS)

    async def _try_to_plan_end(self, session: Session) -> ShardEnd | None:
        """None while the children are unknown, or nobody can be asked about them: it is tried again."""
        try:
            return await self._plan_end(session)
        except StreamNotFoundError as error:
            await self._same_stream(session.key.stream_key, error)
            session.reason = str(error)
        except UNANSWERED as error:
            session.reason = str(error)
        return None

    async def _plan_end(self, session: Session) -> ShardEnd | None:
        row = self._rows[session.key.stream_key]
        leases = await self._beginning.lease_rows(row)
        if all(lease.key != session.key for lease in leases):
            return None  # the store has forgotten this shard: nothing is made of that, the lease loop will notice (L14)
        graph = self._graphs[row.stream_key].united(child_shards=session.children, rows=leases)
        through = session.read_through_seconds
        end = None if session.trimmed else plan_end(session.row, graph, None, leases, through)
        if end is None:
            listing = await list_all_shards(self._outside, session.stream, None)
            await self._same_stream(row.stream_key, None)
            scope = {shard.shard_id: shard for shard in listing}
            graph = graph.united(shards=listing)
            if session.trimmed:
                end = plan_trimmed(row, session.row, graph, scope, leases, through)
            else:
                end = plan_end(session.row, graph, scope, leases, through)
        self._graphs[row.stream_key] = graph
        session.reason = CHILDREN_UNKNOWN if end is None else None
        return end

    async def _write_end(self, session: Session, end: ShardEnd, checkpointer: Checkpointer, life: str) -> bool:
        store = self._outside.store
        for row in end.rows:
            created = await self._leases.create_lease(row, life=life)
            if created is None:
                return False
            self._leases.observe_lease(created)
        key = session.key
        outcome = await checkpointer.write(session, finish=end.finish)
        if outcome == "lost":
            stored = await self._leases.call(store.read_lease(key))
            return stored is not None and stored.is_finished
        return outcome == "written"

    async def _adopt(self, key: LeaseKey, end: ShardEnd) -> None:
        """Who finishes a child's last parent takes the child at once (rule S4)."""
        rows = await self._leases.call(self._outside.store.read_leases())
        if rows is None:
            self._leases.wake()
            return
        names = set(end.finish.children)
        children = [row for row in rows if row.key.shard_id in names and row.key.stream_key == key.stream_key]
        for row in adoptable(children, {row.key: row for row in rows}):
            if self._leases.may_take() and self._leases.has_room():
                self._leases.observe_lease(row)
                await self._leases.take(Take(row.key, row.owner, row.version))
        self._leases.wake()

    # a shard that is not there

    async def on_gone(self, session: Session, error: ServiceError) -> None:
        """The service does not know the shard, or a place in it: that is proved before anything is concluded from it
        (rule S3).
        """
        await self._same_stream(session.key.stream_key, error)
        if not await self._is_gone(session.stream, session.shard_id):
            return
        await self._look_before(session)
        if session.phase == "reading":
            session.trimmed = True
            session.move("end")
            self._losses.tell(session)

    async def on_begun(self, session: Session) -> None:
        """A shard's beginning says nothing of its stream: another one of the same name has one, too."""
        await self._looks[session.key.stream_key].wait()

    async def on_trimmed(self, session: Session) -> None:
        """Records may have left its shard unread, by what was last known of the stream."""
        await self._same_stream(session.key.stream_key, None)
        await self._look_before(session)
        self._losses.tell(session)

    async def _look_before(self, session: Session) -> None:
        """Of a shard that was never read, the rows of those before it may say more by now than they did when its own
        was made. Who its parents are, only a listing says: its row names others besides. A listing also says whether it
        opened after the trim horizon, so that it has lost nothing (rule T4).
        """
        if not session.is_unread_child:
            return
        key, shard_id = session.key, session.shard_id
        if shard_id not in self._graphs[key.stream_key].listed:
            listing = await list_all_shards(self._outside, session.stream, None)
            self._graphs[key.stream_key] = self._graphs[key.stream_key].united(shards=listing)
        found = await self._leases.call(self._outside.store.read_leases(with_finished=True))
        graph = self._graphs[key.stream_key]
        if found is None or shard_id not in graph.listed:
            return
        rows = [row for row in found if row.key == replace(key, shard_id=row.key.shard_id)]
        graph, with_rows = graph.united(rows=rows), [row.key.shard_id for row in rows]
        since = unread_since(graph, shard_id, rows, with_rows)
        known = [time for time in (since, session.read_through_seconds) if time is not None]
        session.read_through_seconds = max(known, default=None)
        horizon_seconds = session.horizon.reached_seconds
        if may_have_lost(session.read_through_seconds, horizon_seconds):
            listing = await list_all_shards(self._outside, session.stream, AT_TRIM_HORIZON)
            if opened_after_horizon(graph, shard_id, [shard.shard_id for shard in listing], with_rows):
                session.read_through_seconds = horizon_seconds + EDGE_SECONDS

    async def _same_stream(self, stream_key: str, error: ServiceError | None) -> StreamSummary:
        """The stream's summary. Raises if the stream was deleted, or if another one has its name now (rule S3)."""
        outside, row = self._outside, self._rows[stream_key]
        summary = await find_summary(outside, self._names[stream_key])
        verdict = classify_missing_shard(row, summary)
        if summary is None or verdict == "stream_deleted":
            outside.emit(StreamChanged(stream=row.name, change="the stream was deleted"))
            raise StreamDeletedError(
                f"stream {row.name} was deleted while this application was reading it; nothing was marked as finished"
            ) from error
        if verdict == "stream_recreated":
            outside.emit(StreamChanged(stream=row.name, change="the stream was deleted and created again"))
            raise StreamRecreatedError(
                f"stream {row.name} was deleted and created again while this application was reading it; "
                "restart the worker to read the new stream"
            ) from error
        self._losses.look(stream_key, summary)
        return summary

    async def _is_gone(self, stream: StreamName, shard_id: str) -> bool:
        """Whether the service itself says that it does not know the shard; any other answer proves nothing."""
        try:
            await self._outside.kinesis.get_shard_iterator(stream, shard_id, TRIM_HORIZON)
        except StreamNotFoundError:
            return True
        except AnabranchError:
            return False
        return False

    # what nobody has named

    async def run(self) -> None:
        """Lists the streams from time to time: listings only ever add shards (rule S5)."""
        clock, interval_ms = self._outside.clock, round(self._settings.polling.listing_interval * 1000)
        next_ms = clock.now_ms() + interval_ms
        while True:
            await self._listings.wait(next_ms)
            is_due = clock.now_ms() >= next_ms
            for row in [self._rows[key] for key in self.stream_keys]:
                try:
                    await self._look_for_missing(row, cleans_up=is_due)
                except UNANSWERED as error:
                    self._outside.emit(ListingFailed(stream=row.name, error=str(error)))
            if is_due:
                next_ms = clock.now_ms() + interval_ms

    async def _look_for_missing(self, row: StreamRow, *, cleans_up: bool) -> None:
        """What was listed is of this stream if the stream is the same afterwards."""
        unknown: StreamNotFoundError | None = None
        listing: list[Shard] = []
        try:
            listing = await list_all_shards(self._outside, self._names[row.stream_key], listing_filter(row.origin))
        except StreamNotFoundError as error:
            unknown = error
        await self._same_stream(row.stream_key, unknown)
        if unknown is not None:
            raise unknown
        await self._find_missing(row, listing, cleans_up=cleans_up)

    async def _find_missing(self, row: StreamRow, listing: list[Shard], *, cleans_up: bool) -> None:
        life = self._leases.table.member_id
        leases = await self._beginning.lease_rows(row)
        if not leases:
            self._leases.miss_birth()  # rows are never all removed: this is no new beginning (rule L14)
        graph = self._graphs[row.stream_key].united(shards=listing, rows=leases)
        self._graphs[row.stream_key] = graph
        scope = {shard.shard_id: shard for shard in listing}
        for lease in missing_leases(row, graph, scope, leases):
            created = await self._leases.create_lease(lease, life=life)
            if created is None:
                return  # by the next listing the others may have been made, and more
            self._leases.observe_lease(created)
            self._leases.wake()
        if cleans_up:
            await self._clean_up(row, graph, leases)

    async def _clean_up(self, row: StreamRow, graph: ShardGraph, leases: list[LeaseRow]) -> None:
        """Removes rows that have served, once the service proves that their shards are gone (rules S3, S6)."""
        outside, stream = self._outside, self._names[row.stream_key]
        if not any(lease.is_finished for lease in leases):
            return
        listed = [shard.shard_id for shard in await list_all_shards(outside, stream, None)]
        for lease in removable(leases, graph, listed):
            same = classify_missing_shard(row, await find_summary(outside, stream)) == "trimmed"
            if same and await self._is_gone(stream, lease.key.shard_id):
                await self._leases.call(outside.store.delete_lease(lease.key, lease.version))
