"""One holding of one shard: from the take of its lease until it is finished, given away or lost.

A session owns the shard's window, its lane and its read position. It decides nothing by itself: the poller feeds it,
a sink empties it, the checkpointer commits it. What is in it is gone with it; the lease row is all that stays.
"""

import asyncio
from collections.abc import Callable

from anabranch._core.handling.batches import BatchLane
from anabranch._core.handling.lanes import Lane
from anabranch._core.leases.lease_table import Holding
from anabranch._core.reading.horizon import EDGE_SECONDS, Horizon, may_have_lost
from anabranch._core.reading.lifecycle import Move, Phase, next_phase
from anabranch._core.reading.pace import Pace
from anabranch._core.reading.window import RECORD_OVERHEAD_BYTES, Unpacker, Window
from anabranch._model.leases import LeaseKey, LeaseRow, Stopped
from anabranch._model.streams import Position, StartingPosition, StreamName, after_sequence_number, at_sequence_number
from anabranch._wire.messages import ChildShard, GetRecordsResponse, KinesisRecord
from anabranch.budget import Budget
from anabranch.reports import ShardState, StoppedShard

WHOLE_RECORD = 1 << 62
"""A sub-sequence number above any: the position after everything in a record."""
BUDGET_FULL_MS = 1_000
"""What the byte budget may be without room before that counts: reads that are under way need much, and give it back."""


class Session:
    def __init__(
        self,
        holding: Holding,
        stream: StreamName,
        unpacker: Unpacker,
        pace: Pace,
        budget: Budget,
        horizon: Horizon,
    ) -> None:
        self.holding = holding
        self.stream = stream
        self.unpacker = unpacker
        self.window = Window(unpacker)
        self.pace = pace
        self.lane: Lane | BatchLane
        self.phase: Phase = "reading"
        self.is_live = True
        """Whether its records may still be finished: it is read, or was read to its end."""
        self.is_draining = False
        """Nothing more is started: the shard is to be handed over, or everything stops."""
        self.held_for_isolation = False
        """Nothing is started: records of a shard on which owners died are handled alone (rule D5)."""
        self.crash_counted = True
        """Whether this owner is among the row's takes without progress (rule D5)."""
        self.iterator: str | None = None
        self.read_after: Position | None = holding.row.checkpoint.watermark
        """Everything up to here was received. Not the checkpoint: that follows what is finished."""
        self.in_read = False
        self.budget_full_since_ms: int | None = None
        """Since when it is due to be read, and the byte budget has no room for that."""
        self.children: tuple[ChildShard, ...] = ()
        self.behind_ms: int | None = None
        self.read_at_seconds = 0.0
        """The service's time of the last read."""
        self.horizon = horizon
        self.read_through_seconds = holding.row.checkpoint.seen_through_seconds
        """What arrived before was received, by the service's clock (rule T4); None: who knows."""
        self.reason: str | None = None
        """Why it does not move, for people; None while it does."""
        self.stopped: StoppedShard | None = None
        """Where and why it stops, from the moment that this is decided (rule D4)."""
        self.stop_row: Stopped | None = None
        """What its row says of that, from the first write on."""
        self.trimmed = False
        """It left the stream before it was read to its end."""
        self.finish_in_progress = False
        """Its end is being written."""
        self.committed_count = 0
        self.commit_lock = asyncio.Lock()
        """One write of a lease row at a time (rule L7)."""
        self.on_settled: Callable[[], None] = lambda: None
        self.budget = budget
        self.read_below_bytes = 0
        """Where it is not read because it holds too much: it is looked at again when it holds less than this."""
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

    def move(self, move: Move) -> None:
        self.phase = next_phase(self.phase, move)
        self.is_live = self.phase in {"reading", "ended"}

    @property
    def may_start(self) -> bool:
        """Whether its records may be started as far as this shard is concerned; the fence is asked besides."""
        holding = self.holding
        may_move = self.is_live and not self.is_draining and not self.held_for_isolation
        return may_move and holding.state == "held" and not holding.row.paused

    @property
    def is_exhausted(self) -> bool:
        """The shard has ended and all of it is finished."""
        all_finished = self.phase == "ended" and self.lane.unfinished_count == 0 and self.window.is_empty
        return all_finished and not self.unpacker.reached_until  # there, the rest is left for another run

    @property
    def is_at_tip(self) -> bool:
        """Nothing of it is left to handle now: it was read to its tip, or stands still on purpose."""
        if self.phase == "stopped":
            return True
        if self.lane.unfinished_count or not self.window.is_empty:
            return False
        return self.is_live if self.unpacker.reached_until else self.phase == "reading" and self.behind_ms == 0

    @property
    def is_at_end(self) -> bool:
        """At its tip, and where it is read until a time, after that time."""
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
        """What arrived before is handled; None while something that was received is not, or was left alone (T4)."""
        is_all_handled = self.lane.unfinished_count == 0 and self.window.is_empty and not self.unpacker.reached_until
        return self.read_through_seconds if is_all_handled else None

    def may_have_lost(self, response: GetRecordsResponse, server_seconds: float) -> bool:
        """Whether records may have left the stream unread between the last answer and this one (rule T4)."""
        known = self.read_through_seconds
        if self._has_lost_its_place(response) if self._may_repeat else known is not None or self.is_unread_child:
            return may_have_lost(known, self.horizon.at(server_seconds))
        return False

    @property
    def is_unread_child(self) -> bool:
        """Nothing was ever read of it, though there were shards before it: what it has lost was promised to be read."""
        return self.read_after is None and bool(self.row.waits_for)

    def _has_lost_its_place(self, response: GetRecordsResponse) -> bool:
        """A read that resumed at the checkpoint begins with the checkpoint's record, unless that has been trimmed."""
        position = self.read_after
        assert position is not None, "a shard that was never read has no place in it"
        if not response.records:
            return _is_last(response)
        return int(response.records[0].sequence_number) > position.sequence_number

    def record_read(self, response: GetRecordsResponse, server_seconds: float) -> None:
        """The answer that closes a shard says nothing of the time since: its children have what came then."""
        if self._may_repeat and not response.records and not _is_last(response):
            return  # whether the checkpoint's record is still there will show by the first one that comes
        edge, known = self.horizon.at(server_seconds) + EDGE_SECONDS, self.read_through_seconds
        if response.next_shard_iterator is not None and response.millis_behind_latest is not None:
            through = max(server_seconds - response.millis_behind_latest / 1000, edge)
        elif response.records:
            through = response.records[-1].arrival_seconds
        else:
            through = edge if known is None else known  # of what it has lost before this all was said that will be
        self.read_through_seconds = through if known is None else max(through, known)

    def starting_position(self) -> StartingPosition:
        """Where a new iterator begins (rule T3): after what was received, at the checkpoint's record, at the pin."""
        position = self.read_after
        if position is None:
            return self.row.start
        if position.sub_sequence_number == WHOLE_RECORD:
            return after_sequence_number(position.sequence_number)
        return at_sequence_number(position.sequence_number)

    def accept(self, records: list[KinesisRecord], reserved_bytes: int) -> int:
        """All records of one read; returns what they weigh. Room that was reserved and is not needed is given back."""
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
        """Whether the reads so far began inside a record, so that the next may begin with what was handled before."""
        return self.read_after is not None and self.read_after.sub_sequence_number != WHOLE_RECORD

    # bytes

    @property
    def busy_bytes(self) -> int:
        """What it holds, but for what waits behind unfinished records of its keys: that has a limit of its own."""
        return self._held_bytes - self.lane.held_back_bytes

    def reads_blocked(self, now_ms: int) -> bool:
        """It is not read until something is finished, of its own or of others: what waits for more waits in vain."""
        since_ms = self.budget_full_since_ms
        return self.read_below_bytes > 0 or (since_ms is not None and now_ms >= since_ms + BUDGET_FULL_MS)

    def settle(self) -> None:
        """Gives the bytes of finished records back to the budget."""
        freed = self.window.collect_freed()
        if freed:
            self._held_bytes -= freed
            self.budget.release(freed)
        if (self.busy_bytes < self.read_below_bytes) if self.read_below_bytes else freed:
            self.on_settled()

    def empty(self) -> None:
        """Forgets everything: a shard that stands still holds no bytes (rule D6)."""
        self.window.clear()
        self.settle()
        if not self.is_live:
            self.lane.forget()


def _is_last(response: GetRecordsResponse) -> bool:
    """Whether it reaches all that is in the shard now; an empty answer that does not is only a step on the way."""
    return response.next_shard_iterator is None or response.millis_behind_latest == 0
