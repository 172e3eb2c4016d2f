"""One stream's writing, as decisions: records go in by `put`, calls come out of `tick`, answers come back.

`put` is the hot path: it routes the record, appends it to its lane's open bundle and returns the handle. Everything
else happens for whole bundles. The engine calls `tick` when `wants_tick` is set, after every answer and at
`next_deadline_ms`; it performs the calls and the refresh that come out, and gives every settled bundle back to
whoever waits for it.

A pipeline knows nothing of other streams, nor of the buffer they share.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from anabranch._core.writing.bundles import Bundle, Failures, OutgoingRecord, Packing
from anabranch._core.writing.lanes import Call, Lane, Placement, Routing, check_keys, collect
from anabranch._core.writing.settlement import ORDER_MESSAGE, OURS, Settlement
from anabranch._core.writing.shard_map import ShardMap
from anabranch._model.entropy import Entropy
from anabranch._model.streams import Shard
from anabranch._wire.aggregate import AGGREGATE_OVERHEAD_BYTES, MAGIC
from anabranch._wire.messages import PutRecordsResponse, StreamSummary
from anabranch.errors import AnabranchError
from anabranch.events import AggregationOff, Event, KeyBlocked, ShardMapFailed, StreamChanged
from anabranch.limits import PARTITION_KEY_CHARACTERS_MAX, RECORD_BYTES_MAX

EXPIRY_CHECKS_APART_MS: Final = 100
BLOCKED_TOLD_APART_MS: Final = 10_000
_KEY_BYTES_MAX: Final = 4 * PARTITION_KEY_CHARACTERS_MAX
# What an aggregate of one record adds to it at most: magic number and digest, heads of its fields, the key once more,
# an explicit hash key of 39 digits and our tag.
_WRAPPING_BYTES: Final = AGGREGATE_OVERHEAD_BYTES + _KEY_BYTES_MAX + 96

R = TypeVar("R", bound=OutgoingRecord)


class WritingRules(msgspec.Struct, frozen=True, kw_only=True):
    order: Literal["key", "none"] = "key"
    aggregate: Literal["shard", "key"] | None = "shard"
    linger_ms: int = 100
    delivery_timeout_ms: int = 120_000
    shard_share: float = 1.0
    requests_max: int = 8
    outer_partition_key: str | None = None
    after_failure: Literal["fail", "continue"] = "fail"


class Steps(NamedTuple):
    """What the engine has to do."""

    calls: Sequence[Call]
    refresh: bool = False
    """List the open shards; if `wants_summary`, describe the stream first."""


class Pipeline(Generic[R]):
    __slots__ = (
        "_blocked_count", "_calls_in_flight", "_check_expiry_ms", "_failed_keys", "_lane_of_key", "_lingering",
        "_notify", "_placement", "_record_bytes_max", "_record_type", "_routing", "_rules", "_settlement", "_shard_map",
        "_small_cost_bytes", "_tell_blocked_ms", "failures", "fault", "is_auto", "next_deadline_ms", "stream",
        "wants_summary", "wants_tick",
    )  # fmt: skip

    def __init__(
        self,
        stream: str,
        rules: WritingRules,
        record_type: Callable[..., R],
        *,
        entropy: Entropy,
        notify: Callable[[Event], None],
    ) -> None:
        self.stream = stream
        self.failures = Failures(blocks_keys=rules.order == "key" and rules.after_failure == "fail")
        self.wants_tick = False
        """Something was put that may be sent, or has to be timed."""
        self.wants_summary = True
        self.next_deadline_ms: int | None = None
        self.is_auto = False
        self.fault: Exception | None = None
        """An unexpected error of a put or a flush. It may have left anything half done: the writer must end."""
        self._rules = rules
        self._record_type = record_type
        self._notify = notify
        self._shard_map = ShardMap(entropy=entropy)
        self._routing = Routing(
            self._shard_map,
            aggregate=rules.aggregate,
            is_ordered=rules.order == "key",
            shard_share=rules.shard_share,
        )
        self._placement = Placement(
            stream,
            self._routing,
            self.failures,
            outer_partition_key=rules.outer_partition_key,
            linger_ms=rules.linger_ms,
        )
        self._settlement = Settlement(stream, self._placement, entropy, notify)
        self._failed_keys = self.failures.keys
        self._lane_of_key = self._routing.lane_of_key
        self._lingering = self._placement.lingering
        self._calls_in_flight = 0
        self._blocked_count = self._tell_blocked_ms = 0
        self._check_expiry_ms: int | None = None
        self._set_record_bytes_max(RECORD_BYTES_MAX)

    # putting

    def put(self, data: bytes, partition_key: str, explicit_hash_key: str | None, cost_bytes: int, now_ms: int) -> R:
        """The record's handle. ValueError for a key or a size that the service would not accept."""
        if cost_bytes > self._small_cost_bytes:
            self._check_size(data, partition_key)
        lane = self._lane_of_key.get(partition_key) if explicit_hash_key is None else None
        digest = check_keys(partition_key, explicit_hash_key) if lane is None else b""
        try:
            if partition_key in self._failed_keys:
                return self._refuse(data, partition_key, explicit_hash_key, now_ms)
            if lane is None:
                lane = self._routing.lane_for(partition_key, explicit_hash_key, digest, now_ms)
            bundle = lane.open
            if bundle is not None:
                builder = bundle.builder
                assert builder is not None
                if builder.add(partition_key, data, explicit_hash_key, size_max=bundle.size_max):
                    records = bundle.records
                    record = self._record_type(bundle, len(records), partition_key, explicit_hash_key, data, now_ms)
                    records.append(record)
                    bundle.cost_bytes += cost_bytes
                    return record
            record = self._record_type(bundle, 0, partition_key, explicit_hash_key, data, now_ms)
            self._add(lane, record, now_ms)
        except Exception as error:
            self.fault, self.wants_tick = error, True
            raise
        return record

    def _refuse(self, data: bytes, partition_key: str, explicit_hash_key: str | None, now_ms: int) -> R:
        """An earlier record of the key failed, and nobody has seen that yet."""
        record = self._record_type(None, 0, partition_key, explicit_hash_key, data, now_ms)
        self._placement.refuse(record, self._settlement.own_attempt(OURS.ORDER, ORDER_MESSAGE, now_ms))
        self.wants_tick = True
        self._blocked_count += 1
        if now_ms >= self._tell_blocked_ms:
            self._notify(KeyBlocked(stream=self.stream, partition_key=partition_key, record_count=self._blocked_count))
            self._blocked_count, self._tell_blocked_ms = 0, now_ms + BLOCKED_TOLD_APART_MS
        return record

    def _add(self, lane: Lane, record: R, now_ms: int) -> None:
        if self._shard_map.is_doubtful(now_ms) and self.is_idle:
            self._shard_map.forget()
            self._routing.rebase(now_ms)
            lane = self._routing.lane_for(record.partition_key, record.explicit_hash_key, record.digest, now_ms)
        self._placement.add(lane, record, self._placement.epoch, now_ms)
        self.wants_tick = True
        if self._check_expiry_ms is None:
            self._check_expiry_ms = now_ms + self._rules.delivery_timeout_ms

    def _check_size(self, data: bytes, partition_key: str) -> None:
        size_bytes = len(data) + len(partition_key.encode())
        if self._placement.packing.wraps and data.startswith(MAGIC):
            size_bytes += _WRAPPING_BYTES
        if size_bytes > self._record_bytes_max:
            raise ValueError(
                f"a record of stream {self.stream} has at most {self._record_bytes_max} bytes with its partition key, "
                f"not {size_bytes}"
            )

    def _set_record_bytes_max(self, limit_bytes: int) -> None:
        self._record_bytes_max = limit_bytes
        self._small_cost_bytes = limit_bytes - _KEY_BYTES_MAX - _WRAPPING_BYTES

    # time

    @property
    def is_idle(self) -> bool:
        """Everything that was put is settled."""
        return not self._placement.unsettled_count

    def tick(self, now_ms: int, wall_ms: int) -> Steps:
        self.wants_tick = False
        self._settlement.wall_offset_ms = wall_ms - now_ms
        if self._check_expiry_ms is not None and now_ms >= self._check_expiry_ms:
            self._expire(now_ms)
        self._end_lingering(now_ms)
        refresh = not self.is_idle and self._shard_map.wants_refresh(now_ms)
        if refresh:
            self._shard_map.begin(now_ms)
        calls, wake_at_ms = self._collect(now_ms, wall_ms)
        self.next_deadline_ms = self._deadline_ms(wake_at_ms)
        return Steps(calls, refresh)

    def _end_lingering(self, now_ms: int) -> None:
        while self._lingering:
            lane, bundle = self._lingering[0]
            if lane.open is bundle:
                if bundle.due_ms > now_ms:
                    return
                self._routing.touch(lane, now_ms)
            self._lingering.popleft()

    def _collect(self, now_ms: int, wall_ms: int) -> tuple[Sequence[Call], int | None]:
        free = self._rules.requests_max - self._calls_in_flight
        if not self._routing.ready or free <= 0:
            return (), None
        if now_ms < self._settlement.paused_until_ms:
            return (), self._settlement.paused_until_ms
        calls, wake_at_ms = collect(self._routing, now_ms, wall_ms, free)
        self._calls_in_flight += len(calls)
        return calls, wake_at_ms

    def _deadline_ms(self, wake_at_ms: int | None) -> int | None:
        if self.is_idle:
            return None
        lingering_until_ms = self._lingering[0][1].due_ms if self._lingering else None
        deadlines = (wake_at_ms, lingering_until_ms, self._check_expiry_ms, self._shard_map.next_deadline_ms)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _expire(self, now_ms: int) -> None:
        """Fails what has waited for too long. What is in flight is judged by its answer, however late."""
        cutoff_ms = now_ms - self._rules.delivery_timeout_ms

        def is_expired(record: OutgoingRecord) -> bool:
            return record.put_ms <= cutoff_ms

        seconds = self._rules.delivery_timeout_ms / 1_000
        attempt = self._settlement.own_attempt(OURS.TIMEOUT, f"not delivered within {seconds:g} s", now_ms)
        late = [lane for lane in self._routing.lanes() if lane.waits_since_ms(now_ms) <= cutoff_ms]
        failed = self._placement.fail_where(late, is_expired, attempt)
        self._settlement.give_up(is_expired, attempt, now_ms)
        self._settlement.fail_followers(failed, now_ms)
        self._routing.discard_empty()
        for lane in late:
            self._routing.touch(lane, now_ms)
        if self.is_idle:
            self._check_expiry_ms = None
            return
        oldest_ms = min((lane.waits_since_ms(now_ms) for lane in self._routing.lanes()), default=now_ms)
        oldest_ms = min(oldest_ms, self._settlement.undecided_since_ms(now_ms))
        self._check_expiry_ms = max(now_ms + EXPIRY_CHECKS_APART_MS, oldest_ms + self._rules.delivery_timeout_ms)

    # flushing and closing

    def flush(self, now_ms: int) -> int:
        """Everything put until now goes as soon as it may. Returns the epoch to ask `is_flushed` for."""
        self.wants_tick = True
        try:
            for lane in list(self._routing.lanes()):
                lane.close_bundle()
                self._routing.touch(lane, now_ms)
        except Exception as error:
            self.fault = error
            raise
        self._placement.epoch += 1
        return self._placement.epoch - 1

    def is_flushed(self, epoch: int) -> bool:
        return self._placement.is_flushed(epoch)

    def abandon(self, failure: str | None, now_ms: int) -> None:
        """The producer ends, closed or failed: fails everything. What is in flight may be written."""
        if failure is None:
            code, message = OURS.CLOSED, "the producer was closed before it was delivered"
        else:
            code, message = OURS.FAILED, failure
        self._placement.fail_all(self._settlement.own_attempt(code, message, now_ms))

    def count_unfinished(self) -> int:
        """Records on their way, and failures that nobody has seen."""
        on_their_way = sum(len(bundle.records) for bundle in self._placement.bundles.values())
        return on_their_way + len(self.failures)

    def count_waiting(self) -> int:
        """Records that are on their way and not in flight."""
        bundles = (bundle for lane in self._routing.lanes() for bundle in (*lane.closed_bundles, lane.open))
        waiting = sum(len(bundle.records) for bundle in bundles if bundle is not None)
        return waiting + self._settlement.undecided_count

    def take_settled(self) -> Iterator[Bundle]:
        """One at a time: what an error leaves untaken is still there afterwards."""
        while self._placement.settled:
            yield self._placement.settled.popleft()

    # what the service says

    def on_answer(self, call: Call, answer: PutRecordsResponse | AnabranchError, now_ms: int) -> None:
        self._calls_in_flight -= 1
        self.wants_tick = True
        if isinstance(answer, AnabranchError):
            self._settlement.on_error(call, answer, now_ms)
        else:
            self._settlement.on_answer(call, answer, now_ms)

    def on_listing(self, shards: Sequence[Shard], summary: StreamSummary | None, now_ms: int) -> None:
        """A complete listing of the open shards, and the stream's summary if it was wanted and could be had."""
        self.wants_tick = True
        self.wants_summary = False
        if summary is not None:
            self._set_record_bytes_max(summary.record_bytes_max)
            if summary.record_distribution == "AUTO" and not self.is_auto:
                self._turn_auto()
        if self._shard_map.install(shards, now_ms):
            self.wants_summary = True
            self._shard_map.distrust()
            self._notify(StreamChanged(stream=self.stream, change="the stream was deleted and created anew"))
        self._settlement.on_map(now_ms)

    def on_listing_failed(self, error: AnabranchError, now_ms: int) -> None:
        self.wants_tick = True
        self._shard_map.fail(now_ms)
        self._settlement.on_no_map(now_ms)
        self._notify(ShardMapFailed(stream=self.stream, error=str(error)))

    def _turn_auto(self) -> None:
        self.is_auto = True
        self.failures.blocks_keys = False
        self._placement.packing = Packing(wraps=False)
        self._routing.stop_ordering()
        self._notify(AggregationOff(stream=self.stream))
