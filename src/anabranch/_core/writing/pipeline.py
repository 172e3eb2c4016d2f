"""Decides how records are written to one stream: `put` takes records, `tick` returns PutRecords calls, `on_response`
takes their results.

`put` is the hot path: it finds the record's lane, appends the record to the lane's open bundle and returns the handle.
Everything else works on whole bundles. The engine calls `tick` when `wants_tick` is set, which every response does, and
at `next_deadline_ms`. It then performs the calls and the refresh that `tick` returned, and wakes the tasks that await
records of the settled bundles.

A pipeline does not know other streams, nor the buffer that all streams share.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from anabranch._core.writing.bundles import Bundle, OutgoingRecord, UnseenFailures
from anabranch._core.writing.lanes import Lanes, PutRecordsCall, WriteLane, check_keys
from anabranch._core.writing.settlement import ORDER_MESSAGE, LocalCode, Settlement
from anabranch._core.writing.shard_map import ShardMap
from anabranch._model.entropy import Entropy
from anabranch._model.streams import Shard
from anabranch._wire.aggregate import AGGREGATE_OVERHEAD_BYTES, MAGIC
from anabranch._wire.messages import PutRecordsResponse, StreamSummary
from anabranch.errors import AnabranchError
from anabranch.events import AggregationOff, Event, KeyBlocked, ShardMapFailed, StreamChanged
from anabranch.limits import PARTITION_KEY_CHARACTERS_MAX, RECORD_BYTES_MAX

EXPIRY_CHECK_INTERVAL_MS: Final = 100
BLOCKED_EVENT_INTERVAL_MS: Final = 10_000
_KEY_BYTES_MAX: Final = 4 * PARTITION_KEY_CHARACTERS_MAX
# The most that an aggregate adds to a single record: magic number and digest, field headers, the key once more, an
# explicit hash key of 39 digits and our tag.
_WRAPPING_BYTES: Final = AGGREGATE_OVERHEAD_BYTES + _KEY_BYTES_MAX + 96

R = TypeVar("R", bound=OutgoingRecord)


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    order: Literal["key", "none"] = "key"
    aggregate: Literal["shard", "key"] | None = "shard"
    linger_ms: int = 100
    delivery_timeout_ms: int = 120_000
    shard_share: float = 1.0
    requests_in_flight_max: int = 8
    aggregate_partition_key: str | None = None
    after_failure: Literal["fail", "continue"] = "fail"


class WriteSteps(NamedTuple):
    """What the engine does after a tick."""

    calls: Sequence[PutRecordsCall]
    refresh: bool = False
    """List the open shards. If `wants_summary` is set, describe the stream first."""


class Pipeline(Generic[R]):
    __slots__ = (
        "_blocked_count", "_blocked_event_ms", "_blocked_keys", "_check_expiry_ms", "_fitting_cost_bytes",
        "_lane_of_key", "_lanes", "_lingering", "_notify", "_options", "_record_bytes_max", "_record_type",
        "_requests_in_flight", "_settlement", "_shard_map", "failures", "fault", "is_auto", "next_deadline_ms",
        "stream", "wants_summary", "wants_tick",
    )  # fmt: skip

    def __init__(
        self,
        stream: str,
        options: WriteOptions,
        record_type: Callable[..., R],
        *,
        entropy: Entropy,
        notify: Callable[[Event], None],
    ) -> None:
        self.stream = stream
        self.failures = UnseenFailures(blocks_keys=options.order == "key" and options.after_failure == "fail")
        self.wants_tick = False
        """The engine should call `tick` now."""
        self.wants_summary = True
        """The next refresh should also describe the stream."""
        self.next_deadline_ms: int | None = None
        self.is_auto = False
        """The stream's record distribution is AUTO: records are neither aggregated nor kept in order."""
        self.fault: Exception | None = None
        """An unexpected error in `put` or `flush`. The state may be inconsistent, so the writer must stop."""
        self._options = options
        self._record_type = record_type
        self._notify = notify
        self._shard_map = ShardMap(entropy=entropy)
        self._lanes = Lanes(
            stream,
            self._shard_map,
            self.failures,
            aggregate=options.aggregate,
            is_ordered=options.order == "key",
            shard_share=options.shard_share,
            linger_ms=options.linger_ms,
            aggregate_partition_key=options.aggregate_partition_key,
        )
        self._settlement = Settlement(stream, self._lanes, entropy, notify)
        self._blocked_keys = self.failures.blocked_keys
        self._lane_of_key = self._lanes.lane_of_key
        self._lingering = self._lanes.lingering
        self._requests_in_flight = 0
        self._blocked_count = self._blocked_event_ms = 0
        self._check_expiry_ms: int | None = None
        self._set_record_bytes_max(RECORD_BYTES_MAX)

    # putting

    def put(self, data: bytes, partition_key: str, explicit_hash_key: str | None, cost_bytes: int, now_ms: int) -> R:
        """Returns the record's handle. Raises ValueError for a key or a size that the service would reject."""
        if cost_bytes > self._fitting_cost_bytes:
            self._check_size(data, partition_key)
        lane = self._lane_of_key.get(partition_key) if explicit_hash_key is None else None
        digest = check_keys(partition_key, explicit_hash_key) if lane is None else b""
        try:
            if partition_key in self._blocked_keys:
                return self._fail_blocked(data, partition_key, explicit_hash_key, now_ms)
            if lane is None:
                lane = self._lanes.lane_for(partition_key, explicit_hash_key, digest, now_ms)
            bundle = lane.open_bundle
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

    def _fail_blocked(self, data: bytes, partition_key: str, explicit_hash_key: str | None, now_ms: int) -> R:
        """Fails a record because an earlier record of its key failed, and nobody has seen that failure yet."""
        record = self._record_type(None, 0, partition_key, explicit_hash_key, data, now_ms)
        self._lanes.fail_new(record, self._settlement.local_attempt(LocalCode.ORDER, ORDER_MESSAGE, now_ms))
        self.wants_tick = True
        self._blocked_count += 1
        if now_ms >= self._blocked_event_ms:
            self._notify(KeyBlocked(stream=self.stream, partition_key=partition_key, record_count=self._blocked_count))
            self._blocked_count, self._blocked_event_ms = 0, now_ms + BLOCKED_EVENT_INTERVAL_MS
        return record

    def _add(self, lane: WriteLane, record: R, now_ms: int) -> None:
        if self._shard_map.is_stale(now_ms) and self.is_idle:
            self._shard_map.clear()
            self._lanes.follow_map(now_ms)
            lane = self._lanes.lane_for(record.partition_key, record.explicit_hash_key, record.digest, now_ms)
        self._lanes.add(lane, record, self._lanes.epoch, now_ms)
        self.wants_tick = True
        if self._check_expiry_ms is None:
            self._check_expiry_ms = now_ms + self._options.delivery_timeout_ms

    def _check_size(self, data: bytes, partition_key: str) -> None:
        size_bytes = len(data) + len(partition_key.encode())
        # Data that looks like an aggregate is sent inside one, so that readers return it unchanged.
        if self._lanes.packing.aggregates and data.startswith(MAGIC):
            size_bytes += _WRAPPING_BYTES
        if size_bytes > self._record_bytes_max:
            raise ValueError(
                f"the record has {size_bytes} bytes with its partition key; stream {self.stream} accepts at most "
                f"{self._record_bytes_max}"
            )

    def _set_record_bytes_max(self, limit_bytes: int) -> None:
        """`put` does not check the size of records up to `_fitting_cost_bytes`: they fit with any partition key."""
        self._record_bytes_max = limit_bytes
        self._fitting_cost_bytes = limit_bytes - _KEY_BYTES_MAX - _WRAPPING_BYTES

    # time

    @property
    def is_idle(self) -> bool:
        """Every record that was put is delivered or failed."""
        return self._lanes.is_settled

    def tick(self, now_ms: int, wall_ms: int) -> WriteSteps:
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
        return WriteSteps(calls, refresh)

    def _end_lingering(self, now_ms: int) -> None:
        while self._lingering:
            lane, bundle = self._lingering[0]
            if lane.open_bundle is bundle:
                if bundle.due_ms > now_ms:
                    return
                self._lanes.queue_if_ready(lane, now_ms)
            self._lingering.popleft()

    def _collect(self, now_ms: int, wall_ms: int) -> tuple[Sequence[PutRecordsCall], int | None]:
        free = self._options.requests_in_flight_max - self._requests_in_flight
        if not self._lanes.ready or free <= 0:
            return (), None
        if now_ms < self._settlement.paused_until_ms:
            return (), self._settlement.paused_until_ms
        calls, wake_at_ms = self._lanes.collect(now_ms, wall_ms, free)
        self._requests_in_flight += len(calls)
        return calls, wake_at_ms

    def _deadline_ms(self, wake_at_ms: int | None) -> int | None:
        if self.is_idle:
            return None
        lingering_until_ms = self._lingering[0][1].due_ms if self._lingering else None
        deadlines = (wake_at_ms, lingering_until_ms, self._check_expiry_ms, self._shard_map.next_deadline_ms)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _expire(self, now_ms: int) -> None:
        """Fails unsent records after their delivery timeout. For those in flight the response decides, however late."""
        cutoff_ms = now_ms - self._options.delivery_timeout_ms

        def is_expired(record: OutgoingRecord) -> bool:
            return record.put_ms <= cutoff_ms

        seconds = self._options.delivery_timeout_ms / 1_000
        attempt = self._settlement.local_attempt(LocalCode.TIMEOUT, f"not delivered within {seconds:g} s", now_ms)
        late = [lane for lane in self._lanes.active() if lane.oldest_unsent_ms(now_ms) <= cutoff_ms]
        failed = self._lanes.fail_unsent(late, is_expired, attempt)
        self._settlement.fail_awaiting_map(is_expired, attempt, now_ms)
        self._settlement.fail_followers(failed, now_ms)
        self._lanes.discard_empty()
        for lane in late:
            self._lanes.queue_if_ready(lane, now_ms)
        if self.is_idle:
            self._check_expiry_ms = None
            return
        oldest_ms = min((lane.oldest_unsent_ms(now_ms) for lane in self._lanes.active()), default=now_ms)
        oldest_ms = min(oldest_ms, self._settlement.awaiting_map_since_ms(now_ms))
        self._check_expiry_ms = max(now_ms + EXPIRY_CHECK_INTERVAL_MS, oldest_ms + self._options.delivery_timeout_ms)

    # flushing and closing

    def flush(self, now_ms: int) -> int:
        """Ends the lingering of everything put so far. Returns the epoch to pass to `is_flushed`."""
        self.wants_tick = True
        try:
            for lane in list(self._lanes.active()):
                lane.close_bundle()
                self._lanes.queue_if_ready(lane, now_ms)
        except Exception as error:
            self.fault = error
            raise
        self._lanes.epoch += 1
        return self._lanes.epoch - 1

    def is_flushed(self, epoch: int) -> bool:
        return self._lanes.is_flushed(epoch)

    def abandon(self, failure: str | None, now_ms: int) -> None:
        """Fails all records, because the producer was closed or failed. Those in flight may still be written."""
        if failure is None:
            code, message = LocalCode.CLOSED, "the producer was closed before the record was delivered"
        else:
            code, message = LocalCode.FAILED, failure
        self._lanes.fail_all(self._settlement.local_attempt(code, message, now_ms))

    def count_unfinished(self) -> int:
        """Unsettled records, and failures that nobody has seen."""
        unsettled = sum(len(bundle.records) for bundle in self._lanes.bundles.values())
        return unsettled + len(self.failures)

    def count_waiting(self) -> int:
        """Unsettled records that are not in flight."""
        bundles = (bundle for lane in self._lanes.active() for bundle in (*lane.closed_bundles, lane.open_bundle))
        waiting = sum(len(bundle.records) for bundle in bundles if bundle is not None)
        return waiting + self._settlement.awaiting_map_count

    def take_settled(self) -> Iterator[Bundle]:
        """Yields one bundle at a time. If the caller fails at one, the others stay queued."""
        while self._lanes.settled:
            yield self._lanes.settled.popleft()

    # responses

    def on_response(self, call: PutRecordsCall, response: PutRecordsResponse | AnabranchError, now_ms: int) -> None:
        self._requests_in_flight -= 1
        self.wants_tick = True
        if isinstance(response, AnabranchError):
            self._settlement.on_error(call, response, now_ms)
        else:
            self._settlement.on_response(call, response, now_ms)

    def on_listing(self, shards: Sequence[Shard], summary: StreamSummary | None, now_ms: int) -> None:
        """Takes a complete listing of the open shards. `summary` is None if it was not wanted or could not be read."""
        self.wants_tick = True
        self.wants_summary = False
        if summary is not None:
            self._set_record_bytes_max(summary.record_bytes_max)
            if summary.record_distribution == "AUTO" and not self.is_auto:
                self._switch_to_auto()
        if self._shard_map.install(shards, now_ms):
            self.wants_summary = True
            self._shard_map.request_refresh()
            self._notify(StreamChanged(stream=self.stream, change="the stream was deleted and created again"))
        self._settlement.on_map(now_ms)

    def on_listing_failed(self, error: AnabranchError, now_ms: int) -> None:
        self.wants_tick = True
        self._shard_map.fail(now_ms)
        self._settlement.on_map_failed(now_ms)
        self._notify(ShardMapFailed(stream=self.stream, error=str(error)))

    def _switch_to_auto(self) -> None:
        self.is_auto = True
        self.failures.blocks_keys = False
        self._lanes.stop_ordering()
        self._notify(AggregationOff(stream=self.stream))
