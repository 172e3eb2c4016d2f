"""One shard while this worker holds its lease: from taking it until the shard is finished, given away or lost.

A session has the shard's window, lane and read position. The poller fills it, a sink empties it, the checkpointer
commits it. Nothing in it survives the lease; only the lease row does.
"""

import asyncio
from collections.abc import Callable

from anabranch._core.handling.batches import BatchLane
from anabranch._core.handling.lanes import RecordLane
from anabranch._core.leases.lease_table import Holding
from anabranch._core.reading.horizon import HORIZON_MARGIN_SECONDS, TrimHorizon, may_have_lost
from anabranch._core.reading.lifecycle import Phase, Transition, next_phase
from anabranch._core.reading.pace import Pace
from anabranch._core.reading.window import RECORD_OVERHEAD_BYTES, Unpacker, Window
from anabranch._model.leases import LeaseKey, LeaseRow, Stopped
from anabranch._model.streams import Position, StartingPosition, StreamName, after_sequence_number, at_sequence_number
from anabranch._wire.messages import ChildShard, GetRecordsResponse, KinesisRecord
from anabranch.budget import Budget
from anabranch.reports import ShardState, StoppedShard

WHOLE_RECORD = 1 << 62
"""Larger than any sub-sequence number: the position after a whole Kinesis record."""
BUDGET_FULL_MS = 1_000
"""How long the budget may stay full before we report it. Reads in flight reserve much and return most of it."""


class Session:
    def __init__(
        self,
        holding: Holding,
        stream: StreamName,
        unpacker: Unpacker,
        pace: Pace,
        budget: Budget,
        horizon: TrimHorizon,
    ) -> None:
        self.holding = holding
        self.stream = stream
        self.unpacker = unpacker
        self.window = Window(unpacker)
        self.pace = pace
        self.lane: RecordLane | BatchLane
        self.phase: Phase = "reading"
        self.is_live = True
        """Whether records may still finish: the shard is being read, or was read to its end."""
        self.is_draining = False
        """No new records start: the shard is being handed over, or the worker is stopping."""
        self.held_for_isolation = False
        """No new records start: a quarantined shard is being tried alone (rule D5)."""
        self.crash_counted = True
        """Whether the row counts this owner as a take without progress (rule D5)."""
        self.iterator: str | None = None
        self.read_after: Position | None = holding.row.checkpoint.watermark
        """Everything up to here was received. The checkpoint instead follows what is finished."""
        self.in_read = False
        self.budget_full_since_ms: int | None = None
        """Since when a read is due but does not fit into the byte budget."""
        self.children: tuple[ChildShard, ...] = ()
        self.behind_ms: int | None = None
        self.read_at_seconds = 0.0
        """When it was last read, by the service's clock."""
        self.horizon = horizon
        self.read_through_seconds = holding.row.checkpoint.seen_through_seconds
        """All records that arrived before this time were received, by the service's clock (rule T4). None if unknown.
        """
        self.reason: str | None = None
        """Why the shard is stalled, as text; None if it is not."""
        self.stopped: StoppedShard | None = None
        """Where and why the shard stops, set as soon as that is decided (rule D4)."""
        self.stop_row: Stopped | None = None
        """The stop as it is written to the lease row."""
        self.trimmed = False
        """The shard left the stream before it was read to its end."""
        self.finish_in_progress = False
        """A task is writing the end of the shard."""
        self.committed_count = 0
        self.commit_lock = asyncio.Lock()
        """One write of the lease row at a time (rule L7)."""
        self.on_settled: Callable[[], None] = lambda: None
        self.budget = budget
        self.read_below_bytes = 0
        """Reading paused because the shard holds too many bytes; it resumes below this. 0 if it is not paused."""
        self._held_bytes = 0

    @property
    def key(self) -> LeaseKey:
        return self.holding.row.key

    @property
    def row(self) -> LeaseRow:
        return self.holding.row

    @property
    def shard_id(self) -> str:
        return self.holding.row.key.shard_id

    def move(self, transition: Transition) -> None:
        self.phase = next_phase(self.phase, transition)
        self.is_live = self.phase in {"reading", "ended"}

    @property
    def may_start(self) -> bool:
        """Whether this shard allows new handler calls. The caller checks the fence as well."""
        holding = self.holding
        may_move = self.is_live and not self.is_draining and not self.held_for_isolation
        return may_move and holding.state == "held" and not holding.row.paused

    @property
    def is_exhausted(self) -> bool:
        """The shard has ended and all its records are finished."""
        all_finished = self.phase == "ended" and self.lane.unfinished_count == 0 and self.window.is_empty
        return all_finished and not self.unpacker.reached_until  # otherwise the rest is left for another run

    @property
    def is_at_tip(self) -> bool:
        """Nothing to handle now: the shard was read to its tip, or is stopped."""
        if self.phase == "stopped":
            return True
        if self.lane.unfinished_count or not self.window.is_empty:
            return False
        return self.is_live if self.unpacker.reached_until else self.phase == "reading" and self.behind_ms == 0

    @property
    def is_at_end(self) -> bool:
        """At the tip; with an `until` time, also past that time."""
        until_seconds = self.unpacker.until_seconds
        if until_seconds is None or self.unpacker.reached_until or self.phase == "stopped":
            return self.is_at_tip
        return self.is_at_tip and self.read_at_seconds >= until_seconds

    def state(self, reason: str | None) -> ShardState:
        watermark = self.row.checkpoint.watermark
        return ShardState(
            stream=self.stream.name,
            shard_id=self.shard_id,
            phase=self.phase,
            reason=reason,
            checkpoint=None if watermark is None else str(watermark),
            millis_behind_latest=self.behind_ms,
            unfinished_count=self.lane.unfinished_count,
            finished_count=self.lane.finished_count,
            held_bytes=self._held_bytes,
            fence_token=self.row.fence_token,
        )

    # reading

    @property
    def seen_through_seconds(self) -> float | None:
        """All records that arrived before this time are handled (rule T4). None while some are unfinished."""
        is_all_handled = self.lane.unfinished_count == 0 and self.window.is_empty and not self.unpacker.reached_until
        return self.read_through_seconds if is_all_handled else None

    def may_have_lost(self, response: GetRecordsResponse, server_seconds: float) -> bool:
        """Whether records may have been trimmed between the last response and this one (rule T4)."""
        known = self.read_through_seconds
        if self._has_lost_its_place(response) if self._may_repeat else known is not None or self.is_unread_child:
            return may_have_lost(known, self.horizon.at(server_seconds))
        return False

    @property
    def is_unread_child(self) -> bool:
        """A child shard of which nothing was read yet: records trimmed from it count as lost."""
        return self.read_after is None and bool(self.row.waits_for)

    def _has_lost_its_place(self, response: GetRecordsResponse) -> bool:
        """A read that resumes at the checkpoint starts with the checkpoint's record, unless it has been trimmed."""
        position = self.read_after
        assert position is not None, "never read"
        if not response.records:
            return _is_last(response)
        return int(response.records[0].sequence_number) > position.sequence_number

    def record_read(self, response: GetRecordsResponse, server_seconds: float) -> None:
        """Updates `read_through_seconds`. The last response of a shard proves nothing about later records: they are in
        its children.
        """
        if self._may_repeat and not response.records and not _is_last(response):
            return  # the first record will show whether the checkpoint's record is still there
        edge, known = self.horizon.at(server_seconds) + HORIZON_MARGIN_SECONDS, self.read_through_seconds
        if response.next_shard_iterator is not None and response.millis_behind_latest is not None:
            through = max(server_seconds - response.millis_behind_latest / 1000, edge)
        elif response.records:
            through = response.records[-1].arrival_seconds
        else:
            through = edge if known is None else known  # earlier losses were already reported
        self.read_through_seconds = through if known is None else max(through, known)

    def starting_position(self) -> StartingPosition:
        """Where a new iterator starts (rule T3): after the last received record, at the checkpoint, or at the start
        position.
        """
        position = self.read_after
        if position is None:
            return self.row.start
        if position.sub_sequence_number == WHOLE_RECORD:
            return after_sequence_number(position.sequence_number)
        return at_sequence_number(position.sequence_number)

    def accept(self, records: list[KinesisRecord], reserved_bytes: int) -> int:
        """Adds the records of one read and returns their size. Releases the unused part of the reservation."""
        charged = 0
        if records:
            after = self.read_after if self._may_repeat else None
            charged = self.window.accept(records, after)
            self.read_after = Position(int(records[-1].sequence_number), WHOLE_RECORD)
        self._held_bytes += charged
        self.budget.release(reserved_bytes - charged)
        return charged - RECORD_OVERHEAD_BYTES * len(records)

    @property
    def _may_repeat(self) -> bool:
        """Whether reading starts inside an aggregated record, so the next response may repeat handled records."""
        return self.read_after is not None and self.read_after.sub_sequence_number != WHOLE_RECORD

    # bytes

    @property
    def busy_bytes(self) -> int:
        """Bytes held, without records that wait for an unfinished record of their key: those have their own limit."""
        return self._held_bytes - self.lane.held_back_bytes

    def reads_blocked(self, now_ms: int) -> bool:
        """No more reads until records finish, here or in other shards: deliver partial batches now."""
        since_ms = self.budget_full_since_ms
        return self.read_below_bytes > 0 or (since_ms is not None and now_ms >= since_ms + BUDGET_FULL_MS)

    def settle(self) -> None:
        """Releases the bytes of finished records to the budget."""
        freed = self.window.collect_freed()
        if freed:
            self._held_bytes -= freed
            self.budget.release(freed)
        if (self.busy_bytes < self.read_below_bytes) if self.read_below_bytes else freed:
            self.on_settled()

    def empty(self) -> None:
        """Drops all buffered records: a stopped shard holds no bytes (rule D6)."""
        self.window.clear()
        self.settle()
        if not self.is_live:
            self.lane.forget()


def _is_last(response: GetRecordsResponse) -> bool:
    """Whether the response reaches the tip or the end of the shard. An empty response may also be a step on the way."""
    return response.next_shard_iterator is None or response.millis_behind_latest == 0
