"""One shard while this worker holds its lease: from taking it until the shard is finished, given away or lost.

| state     | meaning                                                            | new records start |
|-----------|--------------------------------------------------------------------|-------------------|
| reading   | the shard is read, and its records are handled                     | yes               |
| ended     | its last record was read; some records may be unfinished           | yes               |
| finishing | all records are finished; the end is being written                 | there are none    |
| draining  | another member or the stop of this worker waits for running calls  | no                |
| failed    | a record cannot be handled (rule D4)                               | no                |
| stopping  | running calls end, then the stop is written                        | no                |
| stopped   | the lease row says where and why it stopped; the lease is kept     | no                |
| finished  | the lease row says that the shard is finished; final               | no                |
| lost      | the lease was lost, given away or released; final                  | no                |

Pages go in, `Work` comes out, and `plan_commit` says what is safe to write. Only methods of a session write its
fields. It knows nothing of tasks, handlers, stores or where pages come from. Only the lease row survives it.
"""

from dataclasses import InitVar, dataclass, field
from typing import Final, Literal, TypeAlias, TypedDict

import msgspec
from msgspec.structs import replace

from anabranch._core.handling.batches import BatchLane, BatchLimits
from anabranch._core.handling.failures import OutageGuard
from anabranch._core.handling.lanes import RecordLane, RecordsOneByOne
from anabranch._core.leases.lease_table import Holding
from anabranch._core.reading.service_time import HORIZON_MARGIN_SECONDS, ServiceClock, TrimHorizon, may_have_lost
from anabranch._core.reading.window import RECORD_OVERHEAD_BYTES, Unpacker, Window
from anabranch._core.tracker import Entry
from anabranch._model.leases import Finish, LeaseKey, LeaseRow, OpenKey, Stopped
from anabranch._model.streams import Position, StartingPosition, StreamName, after_sequence_number, at_sequence_number
from anabranch._wire.messages import ChildShard, KinesisRecord
from anabranch.budget import Budget
from anabranch.letters import Failure
from anabranch.measures import BUCKET_LAST_MS, BUCKET_OF_MS, Counters
from anabranch.reasons import Reason, StoppedAtRecord
from anabranch.records import Record
from anabranch.reports import ShardState, StoppedShard, SubscriptionState

State = Literal["reading", "ended", "finishing", "draining", "failed", "stopping", "stopped", "finished", "lost"]
Move = Literal[
    "end", "drain", "keep_reading", "keep_ended", "close", "finish", "fail", "begin_stop", "confirm_stop", "lose"
]

MOVES: Final[dict[State, dict[Move, State]]] = {
    "reading": {"end": "ended", "drain": "draining", "fail": "failed", "lose": "lost"},
    "ended": {"drain": "draining", "close": "finishing", "fail": "failed", "lose": "lost"},
    "finishing": {"finish": "finished", "lose": "lost"},
    "draining": {
        "keep_reading": "reading",
        "keep_ended": "ended",
        "close": "finishing",
        "fail": "failed",
        "lose": "lost",
    },
    "failed": {"begin_stop": "stopping", "lose": "lost"},
    "stopping": {"confirm_stop": "stopped", "lose": "lost"},
    "stopped": {"lose": "lost"},
    "finished": {},
    "lost": {},
}
"""A move that is not in the table is a bug, and raises KeyError."""

WHOLE_RECORD: Final = 1 << 62
"""Larger than any sub-sequence number: the position after a whole Kinesis record."""
BUDGET_FULL_MS: Final = 1_000
"""How long the budget may stay full before we report it. Reads in flight reserve much and return most of it."""
SEEN_THROUGH_EVERY_SECONDS: Final = 3600
"""`seen_through_seconds` is written with each commit that advances, and otherwise once an hour."""
READ_IS_OLD_SECONDS: Final = 10.0
"""If a shard was not read for so long, that time counts as lag, too (rule O4). Subscriptions have events every 5 s."""
COMMITTED_ONE_BY_ONE: Final = 100
"""How many records of an isolated shard are committed one by one; after that it runs at full speed (rule D5)."""


DeliveryMode: TypeAlias = RecordsOneByOne | BatchLimits
"""How records are delivered: one by one, or as batches of consecutive records."""


class ShardNames(TypedDict):
    """What names a shard in events: `Event(**session.names)`."""

    stream: str
    shard_id: str


class ReadPage(msgspec.Struct, frozen=True):
    """The result of one read, however it was made."""

    records: list[KinesisRecord]
    server_seconds: float
    """The service's clock, when the page was received."""
    behind_ms: int | None = None
    """How far the read ended behind the tip; None if unknown."""
    is_end: bool = False
    """The shard has no records after these."""
    children: tuple[ChildShard, ...] = ()
    made_seconds: float | None = None
    """The service made the page at this time or later (None: at that time). A subscription's event has no date."""

    @property
    def is_last(self) -> bool:
        """Whether it reaches the tip or the end of the shard. An empty page may also be a step on the way."""
        return self.is_end or self.behind_ms == 0


class EndOfShard(msgspec.Struct, frozen=True):
    children: tuple[ChildShard, ...] = ()
    trimmed: bool = False
    """The shard left the stream before it was read to its end."""


class Work(msgspec.Struct, gc=False, eq=False):
    """Records of one shard that are handled together: one record, or a batch."""

    session: "Session"
    records: list[Record[bytes]]
    attempts: int = 0
    """Failed attempts, including those of earlier owners."""
    entry: Entry | None = None
    """The record's entry in its lane; None for a batch."""
    started_at_ms: int = 0
    """When it was taken."""


class PendingLetter(msgspec.Struct, frozen=True, eq=False):
    """A record on its way to the dead letters (rule D1). Its lane counts it as running."""

    position: Position
    failure: Failure
    attempts: int
    attempted_seconds: tuple[float, ...] = ()
    """When it failed, as far as this owner knows."""
    work: Work | None = None
    """The record alone; None if it was trimmed from the stream."""
    recovered: bool = False
    """An earlier owner decided it, and may have written the letter."""

    @property
    def record(self) -> Record[bytes] | None:
        return None if self.work is None else self.work.records[0]


@dataclass(eq=False, repr=False)
class Session:
    holding: Holding
    stream: StreamName
    unpacker: Unpacker
    mode: InitVar[DeliveryMode]
    budget: Budget
    horizon: TrimHorizon
    service_clock: ServiceClock
    state: State = "reading"
    end: EndOfShard | None = None
    """Set when the shard was read to its end, or its rest is gone."""
    behind_ms: int | None = None
    read_at_seconds: float = 0.0
    """When the last page was made, by the service's clock."""
    answered_seconds: float = 0.0
    """When the last page came, by the service's clock."""
    budget_full_since_ms: int | None = None
    """Since when a read is due but does not fit into the byte budget."""
    read_below_bytes: int = 0
    """Reading paused because the shard holds too many bytes; it resumes below this. 0 if it is not paused."""
    reason: Reason | None = None
    """Why the shard is stalled; None if it is not, or if the engine has to find the reason."""
    stopped: StoppedShard | None = None
    """Where and why the shard stops, set as soon as that is decided (rule D4)."""
    committed_count: int = 0
    crash_counted: bool = True
    """Whether the row counts this owner as a take without progress (rule D5)."""
    _stop_row: Stopped | None = None
    """The stop as it is written to the lease row."""
    counters: Counters = field(default_factory=Counters)
    """Since the lease was taken, without what the lane counts; `counted` has both."""
    outage: OutageGuard = field(default_factory=OutageGuard)
    _failures: dict[Position, tuple[tuple[float, ...], Failure]] = field(default_factory=dict)
    """For dead letters: when the calls started that failed with each record alone, and how the last one failed."""
    letters_due: list[PendingLetter] = field(default_factory=list)
    """What the engine has to write, until it takes them."""
    skipped: list[Record[bytes]] = field(default_factory=list)
    """What was skipped since the engine looked."""

    def __post_init__(self, mode: DeliveryMode) -> None:
        checkpoint = self.row.checkpoint
        self.window = Window(self.unpacker)
        self.lane: RecordLane | BatchLane = (
            BatchLane(checkpoint, self.window, mode)
            if isinstance(mode, BatchLimits)
            else RecordLane(checkpoint, self.window, mode, self.budget)
        )
        self.read_after: Position | None = checkpoint.watermark
        """Everything up to here was received. The checkpoint instead follows what is finished."""
        self.read_through_seconds = checkpoint.seen_through_seconds
        """All records that arrived before this time, by the service's clock, were received (rule T4)."""

    # what it is

    @property
    def key(self) -> LeaseKey:
        return self.holding.row.key

    @property
    def row(self) -> LeaseRow:
        return self.holding.row

    @property
    def shard_id(self) -> str:
        return self.holding.row.key.shard_id

    @property
    def names(self) -> ShardNames:
        return {"stream": self.stream.name, "shard_id": self.shard_id}

    @property
    def is_live(self) -> bool:
        """Whether records may still finish."""
        return self.state not in {"stopped", "finished", "lost"}

    @property
    def may_start(self) -> bool:
        """Whether this shard allows new handler calls. The caller checks the fence as well."""
        return self.state in {"reading", "ended"} and not self.holding.row.paused

    @property
    def is_idle(self) -> bool:
        """Everything that was read is finished."""
        return self.lane.unfinished_count == 0 and self.window.is_empty and not self.lane.tracker.has_trimmed

    @property
    def is_exhausted(self) -> bool:
        """The shard has ended and all its records are finished. False after `until`: the rest is for another run."""
        return self.end is not None and self.is_idle and not self.unpacker.reached_until

    @property
    def is_at_tip(self) -> bool:
        """Nothing to handle now: the shard was read to its tip, or is stopped."""
        if self.state == "stopped":
            return True
        if not self.is_idle or not self.is_live:
            return False
        return self.unpacker.reached_until or (self.end is None and self.behind_ms == 0)

    @property
    def is_at_end(self) -> bool:
        """At the tip; with an `until` time, also past that time."""
        until_seconds = self.unpacker.until_seconds
        if until_seconds is None or self.unpacker.reached_until or self.state == "stopped":
            return self.is_at_tip
        return self.is_at_tip and self.read_at_seconds >= until_seconds

    def describe(
        self,
        reason: Reason | None,
        subscription: SubscriptionState | None = None,
        *,
        wall_ms: int,
        service_seconds: float | None = None,
    ) -> ShardState:
        """`service_seconds`: the time by the service's clock; None before its first answer."""
        watermark, lag = self.row.checkpoint.watermark, self.lag_seconds(service_seconds)
        written_ms = self.row.checkpointed_at_wall_ms
        return ShardState(
            stream=self.stream.name,
            shard_id=self.shard_id,
            phase=self.state,
            reason=reason,
            checkpoint=None if watermark is None else str(watermark),
            lag=lag,
            retention_left=self.retention_left_seconds(lag, service_seconds),
            millis_behind_latest=self.behind_ms,
            checkpoint_age=None if written_ms is None else max(0, wall_ms - written_ms) / 1000,
            unfinished_count=self.lane.unfinished_count,
            counters=self.counted,
            held_bytes=self.window.held_bytes,
            fence_token=self.row.fence_token,
            subscription=subscription,
        )

    # how far it is

    @property
    def oldest_unfinished(self) -> Record[bytes] | None:
        """The first unfinished record, the one at which the shard stopped, or the first one in the window."""
        stopped = None if self.stopped is None else self.stopped.record
        return self.lane.first_unfinished or stopped or self.window.peek()

    def lag_seconds(self, service_seconds: float | None) -> float | None:
        """The age of the oldest unfinished record. With none, how far the last read was behind the tip, and also the
        time since then if that is long: it is unknown what has arrived (rule O4). None before the first read.
        """
        if service_seconds is None:
            return None
        oldest = self.oldest_unfinished
        arrival_seconds = None if oldest is None else oldest.arrival_seconds
        if self.stopped is not None and isinstance(self.stopped.reason, StoppedAtRecord) and oldest is None:
            arrival_seconds = self.stopped.reason.arrival_seconds  # another worker stopped the shard
        if arrival_seconds is not None:
            return round(max(0.0, service_seconds - arrival_seconds), 3)
        if self.behind_ms is None or self.stopped is not None:
            return None
        unread_seconds = 0.0 if self.end is not None else service_seconds - self.answered_seconds
        return round(self.behind_ms / 1000 + (unread_seconds if unread_seconds >= READ_IS_OLD_SECONDS else 0.0), 3)

    def retention_left_seconds(self, lag_seconds: float | None, service_seconds: float | None) -> float | None:
        """How long until the oldest unfinished record, with this lag, is trimmed; None before the first read."""
        if lag_seconds is None or service_seconds is None:
            return None
        return round(max(0.0, service_seconds - lag_seconds - self.horizon.at(service_seconds)), 1)

    @property
    def counted(self) -> Counters:
        """A copy of all its counters."""
        counted, tracker = self.counters.copy(), self.lane.tracker
        counted.handled_count, counted.handled_bytes = tracker.finished_count, tracker.finished_bytes
        return counted

    def count_failed_read(self, *, throttled: bool) -> None:
        self.counters.throttle_count += throttled
        self.counters.read_failure_count += not throttled

    def count_failed_attempt(self, elapsed_ms: int, *, retried: bool) -> None:
        self.counters.failed_count += 1
        self.counters.retry_count += retried
        self.count_calls(elapsed_ms, 1)

    def count_calls(self, elapsed_ms: int, count: int) -> None:
        """`elapsed_ms`: of all these calls together. `finish` counts the calls of work that is finished as a whole."""
        self.counters.calls.add(elapsed_ms, count)

    # its life

    def _move(self, move: Move) -> None:
        self.state = MOVES[self.state][move]

    def drain(self) -> None:
        """Starts no more records: the shard is handed over, or the worker stops."""
        if self.state in {"reading", "ended"}:
            self._move("drain")

    def keep(self) -> None:
        """The hand-over was declined: handling continues."""
        if self.state == "draining":
            self._move("keep_reading" if self.end is None else "keep_ended")
            self.reason = None

    def close(self) -> bool:
        """Whether the end of the shard has to be written now. True once."""
        if self.state in {"ended", "draining"} and self.is_exhausted:
            self._move("close")
            return True
        return False

    def stop(self, reason: Reason, record: Record[bytes] | None = None, error: BaseException | None = None) -> None:
        """A record cannot be handled: starts nothing more (rule D4)."""
        self.lane.stop()
        if self.state in {"reading", "ended", "draining"}:  # otherwise an earlier failure is being reported
            self._move("fail")
            if record is not None and isinstance(reason, StoppedAtRecord):
                reason = replace(reason, arrival_seconds=record.arrival_seconds)  # its age is the shard's lag
            self.stopped = StoppedShard(
                stream=self.stream.name,
                shard_id=self.shard_id,
                reason=reason,
                position=None if record is None else str(record.position),
                partition_key=None if record is None else record.partition_key,
                record=record,
                error=error,
            )

    def begin_stop(self) -> bool:
        """Whether the stop has to be performed now. True once."""
        if self.state == "failed":
            self._move("begin_stop")
            return True
        return False

    def plan_stop(self, member_id: str, wall_ms: int) -> Stopped:
        """From now on, commits write the stop to the row."""
        assert self.stopped is not None, "not stopped"
        record = self.stopped.record
        self._stop_row = Stopped(
            reason=self.stopped.reason,
            position=None if record is None else record.position,
            partition_key=self.stopped.partition_key,
            member_id=member_id,
            at_wall_ms=wall_ms,
        )
        return self._stop_row

    def confirm_stop(self) -> None:
        """The row says that the shard is stopped, and nothing runs. A stopped shard holds no bytes (rule D6)."""
        self._move("confirm_stop")
        self._forget()

    def stay_stopped(self, stopped: Stopped) -> None:
        """The shard was stopped before this worker took it."""
        self.stop(stopped.reason)
        assert self.stopped is not None
        position = None if stopped.position is None else str(stopped.position)
        self.stopped = replace(self.stopped, position=position, partition_key=stopped.partition_key)
        self.reason = stopped.reason
        self.begin_stop()
        self.confirm_stop()

    def lose(self, *, finished: bool = False) -> None:
        """The lease is gone: the shard is finished, or another member may have it."""
        if self.state not in {"finished", "lost"}:
            self._move("finish" if finished and self.state == "finishing" else "lose")
        self._forget()

    def _forget(self) -> None:
        self.window.clear()
        self._settle()
        self.lane.forget()

    def report(self, reason: Reason | None) -> None:
        """Why the shard is stalled; None if it no longer is."""
        self.reason = reason

    # reading

    @property
    def seen_through_seconds(self) -> float | None:
        """All records that arrived before this time are handled (rule T4). None while some are unfinished."""
        return self.read_through_seconds if self.is_idle and not self.unpacker.reached_until else None

    def may_have_lost(self, page: ReadPage) -> bool:
        """Whether records may have been trimmed between the last page and this one (rule T4)."""
        known = self.read_through_seconds
        is_possible = may_have_lost(known, self.horizon.at(page.server_seconds))
        if self._may_repeat:
            return is_possible and self._has_lost_its_place(page)
        return is_possible and (known is not None or self.is_unread_child)

    @property
    def is_unread_child(self) -> bool:
        """A child shard of which nothing was read yet: records trimmed from it count as lost."""
        return self.read_after is None and bool(self.row.waits_for)

    def _has_lost_its_place(self, page: ReadPage) -> bool:
        """A read that resumes at the checkpoint starts with the checkpoint's record, unless it has been trimmed."""
        position = self.read_after
        assert position is not None, "never read"
        if not page.records:
            return page.is_last
        return int(page.records[0].sequence_number) > position.sequence_number

    def add_page(self, page: ReadPage, reserved_bytes: int) -> int:
        """Accepts all records of one read in one step, returns their size, and releases the rest of the reservation."""
        if not self.is_live:
            self.budget.release(reserved_bytes)
            return 0
        self._record_read_time(page)
        records, charged = self._unread(page.records), 0
        if self.lane.tracker.has_prior_state and (records or page.is_last):
            self._find_trimmed_letters(int(records[0].sequence_number) if records else None)
        if records:
            charged = self.window.accept(records, self.read_after if self._may_repeat else None)
            self.read_after = Position(int(records[-1].sequence_number), WHOLE_RECORD)
        self.budget.release(reserved_bytes - charged)
        made_seconds = page.server_seconds if page.made_seconds is None else page.made_seconds
        self.behind_ms, self.read_at_seconds, self.reason = page.behind_ms, made_seconds, None
        self.answered_seconds = page.server_seconds
        if page.is_end:
            self._end(EndOfShard(page.children))
        read_bytes = charged - RECORD_OVERHEAD_BYTES * len(records)
        self.counters.read_count += len(records)
        self.counters.read_bytes += read_bytes
        return read_bytes

    def _unread(self, records: list[KinesisRecord]) -> list[KinesisRecord]:
        """Without the records up to the read position: two reads may overlap, and the position never moves back
        (rule F1). Records are in order, so the first one tells whether there are any.
        """
        if not records or self.read_after is None or self._may_repeat:
            return records
        last = self.read_after.sequence_number
        if int(records[0].sequence_number) > last:
            return records
        return [record for record in records if int(record.sequence_number) > last]

    def end_trimmed(self) -> bool:
        """The shard is gone from the stream. False if its end was already known."""
        if self.end is not None or not self.is_live:
            return False
        self._find_trimmed_letters(None)
        self._end(EndOfShard(trimmed=True))
        return True

    def _end(self, end: EndOfShard) -> None:
        self.end = end
        if self.state == "reading":
            self._move("end")

    def _record_read_time(self, page: ReadPage) -> None:
        """The last page of a shard proves nothing about later records: they are in its children."""
        if self._may_repeat and not page.records and not page.is_last:
            return  # the first record will show whether the checkpoint's record is still there
        edge, known = self.horizon.at(page.server_seconds) + HORIZON_MARGIN_SECONDS, self.read_through_seconds
        made_seconds = page.server_seconds if page.made_seconds is None else page.made_seconds
        if not page.is_end and page.behind_ms is not None:
            through = max(made_seconds - page.behind_ms / 1000, edge)
        elif page.records:
            through = page.records[-1].arrival_seconds
        else:
            through = edge if known is None else known  # earlier losses were already reported
        self.read_through_seconds = through if known is None else max(through, known)

    def learn_read_through(self, seconds: float | None) -> None:
        """Sets the time from the rows of the shards before it, or from the trim horizon (rule T4)."""
        self.read_through_seconds = seconds

    def starting_position(self) -> StartingPosition:
        """Where a new read starts (rule T3)."""
        position = self.read_after
        if position is None:
            return self.row.start
        if position.sub_sequence_number == WHOLE_RECORD:
            return after_sequence_number(position.sequence_number)
        return at_sequence_number(position.sequence_number)

    def checkpoint_position(self) -> StartingPosition:
        """Where the next owner would start. What was read since then is not accepted again."""
        watermark = self.row.checkpoint.watermark
        return self.row.start if watermark is None else at_sequence_number(watermark.sequence_number)

    @property
    def _may_repeat(self) -> bool:
        """Whether reading starts inside an aggregated record, so the next page may repeat handled records."""
        return self.read_after is not None and self.read_after.sub_sequence_number != WHOLE_RECORD

    # room for reading

    @property
    def busy_bytes(self) -> int:
        """Bytes held, without records that wait for an unfinished record of their key: those have their own limit."""
        return self.window.held_bytes - self.lane.held_back_bytes

    def pause_reading(self, below_bytes: int) -> None:
        """The shard holds too many bytes. It is read again when it holds less than this."""
        self.read_below_bytes = below_bytes

    def wait_for_budget(self, now_ms: int) -> None:
        """A read is due but does not fit into the byte budget."""
        self.budget_full_since_ms = now_ms

    def begin_read(self) -> None:
        self.budget_full_since_ms = None

    def take_room(self) -> bool:
        """Whether a paused shard may be read again. True once."""
        if self.read_below_bytes and self.busy_bytes < self.read_below_bytes:
            self.read_below_bytes = 0
            return True
        return False

    def reads_blocked(self, now_ms: int) -> bool:
        """No more reads until records finish, here or in other shards: deliver partial batches now."""
        since_ms = self.budget_full_since_ms
        return self.read_below_bytes > 0 or (since_ms is not None and now_ms >= since_ms + BUDGET_FULL_MS)

    def _settle(self) -> None:
        """Releases the bytes of finished records to the budget."""
        freed = self.window.collect_freed()
        if freed:
            self.budget.release(freed)

    # work

    def next_work(self, now_ms: int) -> Work | None:
        """What may start now. The caller checks `may_start` and the fence, and reports how the work ended."""
        while not (self.awaits_commit or self.lane.tracker.has_trimmed):
            work, prior = self._take_work(now_ms)
            if work is None:
                self._settle()  # records that the previous owner finished were skipped
            if work is None or prior is None:
                return work
            self._continue_prior(work, prior)
            if self.skipped:
                return None  # that is reported before another record starts
        return None

    def _take_work(self, now_ms: int) -> tuple[Work | None, OpenKey | None]:
        """The next work, and what an earlier owner has decided about it."""
        lane = self.lane
        if isinstance(lane, BatchLane):
            batch = lane.next(now_ms, flush=self.end is not None or self.reads_blocked(now_ms))
            return (None, None) if batch is None else (Work(self, batch, lane.attempts, None, now_ms), lane.prior)
        entry = lane.next(now_ms)
        if entry is None:
            return None, None
        return Work(self, [entry.record], entry.attempts, entry, now_ms), entry.prior

    def next_work_at_ms(self, now_ms: int) -> int | None:
        """When there may be work although nothing else changes; None if a change decides."""
        lane = self.lane
        return now_ms if isinstance(lane, RecordLane) and lane.scan_is_cut else lane.next_deadline_ms

    def upcoming(self, now_ms: int, count_max: int) -> list[Record[bytes]]:
        """Records that may be handled one after another without taking each as work. See `RecordLane.upcoming`."""
        lane = self.lane
        assert isinstance(lane, RecordLane), "batches are taken as work"
        return [] if self.awaits_commit or lane.tracker.has_trimmed else lane.upcoming(now_ms, count_max)

    def finish_upcoming(self, count: int, elapsed_ms: int) -> None:
        """The first `count` upcoming records were handled, one after another, in this time."""
        assert isinstance(self.lane, RecordLane)
        self.count_calls(elapsed_ms, count)
        self.lane.finish_prefix(count)
        self._settle()

    def begin_upcoming(self, now_ms: int) -> Work:
        """The first upcoming record was started and still runs: it is work from now on."""
        assert isinstance(self.lane, RecordLane)
        entry = self.lane.begin()
        return Work(self, [entry.record], entry.attempts, entry, now_ms)

    def finish(self, work: Work, count: int | None = None, *, ended_at_ms: int | None = None) -> None:
        """The first `count` records are finished; all by default. `ended_at_ms`: when the one call for them ended."""
        if not self.is_live:
            return
        if ended_at_ms is not None:
            # As `count_calls`, without a function call: this runs for each record.
            calls, elapsed_ms = self.counters.calls, ended_at_ms - work.started_at_ms
            calls.counts[BUCKET_OF_MS[elapsed_ms if elapsed_ms < BUCKET_LAST_MS else BUCKET_LAST_MS]] += 1  # noqa: FURB136
            calls.total_ms += elapsed_ms
        if isinstance(self.lane, BatchLane):
            self.lane.finish_through(len(work.records) if count is None else count)
        elif work.entry is not None:
            self.lane.finish(work.entry)
        if self._failures:
            for record in work.records[:count]:
                self._failures.pop(record.position, None)
        self._settle()

    def note_failure(self, record: Record[bytes], started_seconds: float, failure: Failure) -> None:
        """A call with this record alone failed. It may get a dead letter."""
        earlier, _ = self._failures.get(record.position, ((), failure))
        self._failures[record.position] = (*earlier, started_seconds), failure

    def retry_at(self, work: Work, at_ms: int, *, halve: bool = False) -> None:
        """The attempt failed; its key or shard waits until that time. `halve`: a batch is not tried whole again."""
        if not self.is_live:
            return
        work.attempts += 1
        if isinstance(self.lane, BatchLane):
            self.lane.retry_at(at_ms, work.attempts, halve=halve)
        elif work.entry is not None:
            work.entry.attempts = work.attempts
            self.lane.retry_at(work.entry, at_ms)

    def give_back(self, work: Work) -> None:
        """The work was taken but not started: it is the next one again."""
        if not self.is_live:
            return
        if isinstance(self.lane, BatchLane):
            self.lane.give_back()
        elif work.entry is not None:
            self.lane.give_back(work.entry)

    # records that are not handled

    @property
    def success_count(self) -> int:
        """Records that were handled, in this holding."""
        return self.lane.finished_count - self.counters.skipped_count - self.counters.dead_letter_count

    def skip(self, work: Work, index: int = 0) -> None:
        """Goes on without this record of the work. Those before it are finished."""
        if not self.is_live:
            return
        single = self._single_out(work, index)
        self.skipped += single.records
        self.counters.skipped_count += 1
        self.finish(single)

    def dead_letter(self, work: Work, failure: Failure, attempts: int, index: int = 0) -> None:
        """This record of the work goes to the dead letters. Those before it are finished."""
        if self.is_live:
            self._add_letter(self._single_out(work, index), failure, attempts)

    def _add_letter(self, work: Work, failure: Failure, attempts: int, *, recovered: bool = False) -> None:
        if isinstance(self.lane, BatchLane):
            self.lane.dead_letter(attempts, failure)
        elif work.entry is not None:
            work.entry.attempts, work.entry.failure = attempts, failure
        position = work.records[0].position
        attempted_seconds, _ = self._failures.get(position, ((), failure))
        self.letters_due.append(PendingLetter(position, failure, attempts, attempted_seconds, work, recovered))

    def _single_out(self, work: Work, index: int) -> Work:
        """This record of the work alone."""
        if isinstance(self.lane, BatchLane):
            self.lane.single_out(index)
        return Work(self, [work.records[index]], entry=work.entry)

    def _continue_prior(self, work: Work, prior: OpenKey) -> None:
        if prior.state == "skipping":
            self.skip(work)
        else:
            failure = Failure(error_type=prior.error_type, fingerprint=prior.fingerprint)
            self._add_letter(work, failure, prior.attempts, recovered=True)

    def _find_trimmed_letters(self, before: int | None) -> None:
        """`before` is the first sequence number in the stream that was not read; None if there is none."""
        for mark in self.lane.tracker.take_trimmed(self.read_after, before):
            failure = Failure(error_type=mark.error_type, fingerprint=mark.fingerprint)
            self.letters_due.append(PendingLetter(mark.first_open, failure, mark.attempts, recovered=True))

    def take_letters(self) -> list[PendingLetter]:
        due, self.letters_due = self.letters_due, []
        return due

    def take_skipped(self) -> list[Record[bytes]]:
        skipped, self.skipped = self.skipped, []
        return skipped

    def finish_letter(self, letter: PendingLetter, *, skipped: bool = False) -> None:
        """The letter is durable, or an operator wants the record skipped: continues after it."""
        if not self.is_live:
            return
        if letter.work is None:
            self.lane.tracker.finish_trimmed(letter.position)
            return
        if skipped:
            self.skipped += letter.work.records
        self.counters.skipped_count += skipped
        self.counters.dead_letter_count += not skipped
        self.finish(letter.work)

    def take_waiting(self, position: Position) -> tuple[Work, Failure | None] | None:
        """The record with this position, if it waits for a retry, and its last failure. It counts as running again."""
        lane = self.lane
        _, failure = self._failures.get(position, ((), None))
        if isinstance(lane, BatchLane):
            record = lane.first_unfinished
            if record is None or not lane.take_waiting(position):
                return None
            return Work(self, [record], lane.attempts), failure
        entry = lane.take_waiting(position)
        return None if entry is None else (Work(self, [entry.record], entry.attempts, entry), failure)

    @property
    def only_failing(self) -> tuple[Record[bytes], int] | None:
        """The first record that waits for a retry, and its attempts, if the children wait for no other (rule M4)."""
        return None if self.end is None else self.lane.only_failing

    def next_record(self, now_ms: int) -> Record[bytes] | None:
        """The record that would start next, or runs. It is taken out of the window if necessary."""
        if self.lane.first_unfinished is None:
            if isinstance(self.lane, BatchLane):
                self.lane.next(now_ms, flush=True)
            else:
                self.lane.next(now_ms)
        return self.lane.first_unfinished

    # isolation

    def isolate(self, *, isolated: bool) -> None:
        """While isolated, one record is handled at a time, and each of the first is committed before the next."""
        self.lane.one_at_a_time = isolated

    @property
    def awaits_commit(self) -> bool:
        """Whether an isolated shard waits for the commit of its last record (rule D5)."""
        return self.lane.one_at_a_time and self.committed_count < self.lane.finished_count <= COMMITTED_ONE_BY_ONE

    def count_crash(self, *, counted: bool) -> None:
        self.crash_counted = counted

    # commits

    @property
    def uncommitted_count(self) -> int:
        return self.lane.finished_count - self.committed_count

    def plan_commit(
        self,
        wall_ms: int,
        *,
        finish: Finish | None = None,
        transferring: bool = False,
        leaving: bool = False,
    ) -> tuple[LeaseRow, int]:
        """The lease row to write now, and how many finished records it covers. `transferring`: the lease is about to be
        released or given away. `leaving`: the worker stops.
        """
        row, count = self.row, self.lane.finished_count
        if self.state == "stopped":
            return row, count  # a later commit must not undo the stop (rule D4)
        stopped = self._stop_row
        before, known = row.checkpoint, row.checkpoint.seen_through_seconds
        seen = self.seen_through_seconds or known
        checkpoint = self.lane.checkpoint(seen)
        advanced = checkpoint.watermark != before.watermark or checkpoint.frontier != before.frontier
        if not advanced and finish is None and seen and known and seen - known < SEEN_THROUGH_EVERY_SECONDS:
            checkpoint = replace(checkpoint, seen_through_seconds=known)
        # Reaching the tip counts as progress (rule D5). So does a stop: counting starts again when a process that
        # starts later retries the record (rule D4).
        takes = row.takes_without_progress
        if advanced or self.is_at_tip or stopped is not None:
            takes = 0
        elif transferring:
            takes += not self.crash_counted  # the next owner counts instead of this one
        elif leaving:
            takes = max(0, takes - self.crash_counted)  # a graceful stop is no crash; the next owner counts itself
        # A stopped shard that was retried, and has nothing left to handle, is not stopped any more.
        is_retried = row.stopped is not None and stopped is None and self.is_at_tip
        stop_changes = is_retried or stopped not in (None, row.stopped)
        unchanged = checkpoint == row.checkpoint and finish is None and not stop_changes
        if unchanged and (takes == row.takes_without_progress or row.takes_without_progress <= 1):
            return row, count
        return replace(
            row,
            checkpoint=checkpoint,
            finish=finish,
            stopped=stopped,
            owner=None if finish is not None else row.owner,
            takes_without_progress=takes,
            records_handled=row.records_handled + count - self.committed_count,
            checkpointed_at_wall_ms=wall_ms,
        ), count

    @property
    def has_unwritten_progress(self) -> bool:
        """Whether a page without records changes what a commit would write."""
        if self.row.takes_without_progress > 1:
            return self.is_at_tip  # which counts as progress (rule D5)
        seen, known = self.seen_through_seconds, self.row.checkpoint.seen_through_seconds
        return seen is not None and (known is None or seen - known >= SEEN_THROUGH_EVERY_SECONDS)

    def committed(self, count: int) -> None:
        """The row covers this many finished records."""
        self.counters.committed_count += count - self.committed_count
        self.committed_count = count
