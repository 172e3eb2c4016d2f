"""Decides how records are written to one stream.

`put` takes a record. `tick` returns the PutRecords calls to send, and `on_response` takes their results. `put` is the
hot path: it finds the record's lane, appends the record to the lane's open bundle and returns the handle. Everything
else works on whole bundles, and returns `WriteSteps` for the engine to perform. The engine calls `tick` at
`tick_at_ms`, which a put and a response set to 0: now.

A response is applied in three steps:

1. The shard map learns from every entry.
2. The lanes follow the map.
3. Each bundle gets its outcome. Whatever is sent again is placed with the newest map, before anything newer of its key.

A stream writer does not know other streams, nor the buffer that all streams share.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from anabranch._core.backoff import backoff_ms
from anabranch._core.writing.bundles import Bundle, OutgoingRecord, UnseenFailures, WriteOptions
from anabranch._core.writing.lanes import Lanes, LocalCode, PutRecordsCall, WriteLane, check_keys
from anabranch._core.writing.limiter import RefusedShare, ShardPace
from anabranch._core.writing.settlement import (
    RETRY_TABLE,
    NextStep,
    Outcome,
    Pause,
    outcome_of_error,
    outcome_of_result,
    refused_shard_id,
)
from anabranch._model.entropy import Entropy
from anabranch._model.streams import Shard, StreamName
from anabranch._wire.aggregate import AGGREGATE_OVERHEAD_BYTES, MAGIC
from anabranch._wire.messages import PutRecordsResponse, PutRecordsResultEntry, StreamSummary
from anabranch.errors import AnabranchError, ServiceError, StreamNotFoundError
from anabranch.events import (
    AggregateStraddled,
    AggregationOff,
    DeliveryProgress,
    Event,
    KeyBlocked,
    ListingFailed,
    ListingRecovered,
    OrderUnconfirmed,
    StreamChanged,
    WriteFailed,
    WriteRecovered,
    WriteThrottled,
    WriteUnthrottled,
)
from anabranch.limits import MIB, PARTITION_KEY_CHARACTERS_MAX, RECORD_BYTES_MAX
from anabranch.measures import WriteCounters
from anabranch.records import Attempt
from anabranch.reports import ShardWrites, StreamWrites

EXPIRY_CHECK_INTERVAL_MS: Final = 100
BLOCKED_EVENT_INTERVAL_MS: Final = 10_000
FLOW_EVERY_MS: Final = 1_000
STREAM_PAUSE_MIN_MS: Final = 50
STREAM_PAUSE_MAX_MS: Final = 5_000
ATTEMPTS_BEFORE_PAUSE: Final = 3
"""If a record whose shard is unknown fails this often, the stream pauses."""

_KEY_BYTES_MAX: Final = 4 * PARTITION_KEY_CHARACTERS_MAX
# The most that an aggregate adds to a single record: magic number and digest, field headers, the key once more, an
# explicit hash key of 39 digits and our tag.
_WRAPPING_BYTES: Final = AGGREGATE_OVERHEAD_BYTES + _KEY_BYTES_MAX + 96
_ORDER_MESSAGE: Final = "an earlier record of this key failed, and that failure has not been handled yet"
_NO_RESULT: Final = PutRecordsResultEntry()

R = TypeVar("R", bound=OutgoingRecord)


class WriteSteps(NamedTuple):
    """What the engine has to perform.

    It takes bundles and events out of their queues, one by one. What it leaves there is returned again the next time,
    so an unexpected error loses no outcome.
    """

    ended: deque[Bundle]
    """Delivered, failed or dissolved: the tasks that await their records wake up."""
    events: deque[Event]
    calls: Sequence[PutRecordsCall] = ()
    refresh: bool = False
    """List the open shards. If `wants_summary` is set, describe the stream first."""


class _AwaitingMap(msgspec.Struct, frozen=True):
    """A bundle that was written to a shard whose range is unknown."""

    lane: WriteLane
    bundle: Bundle
    result: PutRecordsResultEntry
    attempt: Attempt
    seen_ms: int


class _Refused(msgspec.Struct, frozen=True):
    """A record that its shard did not accept."""

    shard_id: str | None
    is_throttled: bool
    attempt_count: int


class StreamWriter(Generic[R]):
    def __init__(
        self,
        name: StreamName,
        options: WriteOptions,
        record_type: Callable[..., R],
        owner: object,
        *,
        entropy: Entropy,
    ) -> None:
        """The handles tell `owner` when a failure was seen."""
        self.name = name
        self.stream = str(name)
        self.failures = UnseenFailures(
            owner, blocks_keys=options.order == "key" and options.settings.after_failure == "fail"
        )
        self.tick_at_ms: int | None = None
        self.wants_summary = True
        """The next refresh should also describe the stream."""
        self._options = options
        self._record_type = record_type
        self._entropy = entropy
        self._lanes = Lanes(self.stream, options, self.failures, entropy)
        self._shard_map = self._lanes.shard_map
        self._blocked_keys = self.failures.blocked_keys
        self._lane_of_key = self._lanes.lane_of_key
        self._events: deque[Event] = deque()
        self._fault: Exception | None = None
        """An unexpected error in `put` or `flush`. The state may be inconsistent, so `tick` raises it again."""
        self._wall_offset_ms = 0
        """From the engine's clock to the time of day."""
        self._record_bytes_max = RECORD_BYTES_MAX
        self._fitting_cost_bytes = _fitting_cost_bytes(RECORD_BYTES_MAX)
        self._requests_in_flight = 0
        self._paused_until_ms = 0
        """Whole calls failed: nothing is sent to this stream before then."""
        self._failures_in_a_row = 0
        self._refused: dict[ShardPace | None, list[_Refused]] = {}
        """The refused records of the response that is being processed."""
        self._refused_share = RefusedShare()
        """Of records whose shard is unknown."""
        self._awaiting_map: list[_AwaitingMap] = []
        self._news = WriteNews(self.stream)
        self._blocked_count = self._blocked_event_ms = 0
        self._check_expiry_ms: int | None = None

    # putting

    def put(self, data: bytes, partition_key: str, explicit_hash_key: str | None, cost_bytes: int, now_ms: int) -> R:
        """Returns the record's handle. Raises ValueError for a key or a size that the service would reject."""
        if cost_bytes > self._fitting_cost_bytes:
            self._check_size(data, partition_key)
        lane = self._lane_of_key.get(partition_key) if explicit_hash_key is None else None
        if lane is None:
            digest = check_keys(partition_key, explicit_hash_key)
        try:
            if self._blocked_keys and partition_key in self._blocked_keys:
                record = self._record_type(None, 0, partition_key, explicit_hash_key, data, now_ms)
                return self._fail_blocked(record, now_ms)
            if lane is None:
                lane = self._lanes.lane_for(partition_key, explicit_hash_key, digest, now_ms)
            bundle = lane.open_bundle
            if bundle is not None:
                builder = bundle.builder
                assert builder is not None
                # By position: Python calls a function with keywords slower, and this runs for each record.
                if builder.add(partition_key, data, explicit_hash_key, (), bundle.size_max):
                    records = bundle.records
                    record = self._record_type(bundle, len(records), partition_key, explicit_hash_key, data, now_ms)
                    records.append(record)
                    bundle.cost_bytes += cost_bytes
                    return record
            record = self._record_type(bundle, 0, partition_key, explicit_hash_key, data, now_ms)
            self._add(lane, record, now_ms)
        except Exception as error:
            self._fault, self.tick_at_ms = error, 0
            raise
        return record

    def put_record(self, record: R, cost_bytes: int, now_ms: int) -> R:
        """Like `put`, for a record object that exists already. If it has tags, its data must not be longer than
        `tagged_bytes_max`.
        """
        partition_key, explicit_hash_key = record.partition_key, record.explicit_hash_key
        if cost_bytes > self._fitting_cost_bytes:
            self._check_size(record.data, partition_key)
        digest = check_keys(partition_key, explicit_hash_key)
        try:
            if self._blocked_keys and partition_key in self._blocked_keys:
                return self._fail_blocked(record, now_ms)
            self._add(self._lanes.lane_for(partition_key, explicit_hash_key, digest, now_ms), record, now_ms)
        except Exception as error:
            self._fault, self.tick_at_ms = error, 0
            raise
        return record

    @property
    def tagged_bytes_max(self) -> int:
        """The largest data of a record that is sent in an aggregate of its own, with one tag. Limited to what every
        stream accepts, because the limit of this stream may be unknown.
        """
        return min(self._record_bytes_max, MIB) - 2 * _KEY_BYTES_MAX - _WRAPPING_BYTES

    def _fail_blocked(self, record: R, now_ms: int) -> R:
        """Fails a record because an earlier record of its key failed, and that failure was not seen yet."""
        self._lanes.fail_new(record, self._local_attempt(LocalCode.ORDER, _ORDER_MESSAGE, now_ms))
        self.tick_at_ms = 0
        self._blocked_count += 1
        if now_ms >= self._blocked_event_ms:
            blocked = KeyBlocked(
                stream=self.stream, partition_key=record.partition_key, record_count=self._blocked_count
            )
            self._events.append(blocked)
            self._blocked_count, self._blocked_event_ms = 0, now_ms + BLOCKED_EVENT_INTERVAL_MS
        return record

    def _add(self, lane: WriteLane, record: R, now_ms: int) -> None:
        if self._shard_map.is_stale(now_ms) and self.is_idle:
            self._shard_map.clear()
            self._lanes.follow_map(now_ms)
            lane = self._lanes.lane_for(record.partition_key, record.explicit_hash_key, record.digest, now_ms)
        self._lanes.add(lane, record, self._lanes.epoch, now_ms)
        self.tick_at_ms = 0
        if self._check_expiry_ms is None:
            self._check_expiry_ms = now_ms + self._options.delivery_timeout_ms

    def _check_size(self, data: bytes, partition_key: str) -> None:
        size_bytes = len(data) + len(partition_key.encode())
        # Data that looks like an aggregate is sent inside one, so that readers return it unchanged.
        if self._lanes.options.aggregate is not None and data.startswith(MAGIC):
            size_bytes += _WRAPPING_BYTES
        if size_bytes > self._record_bytes_max:
            raise ValueError(
                f"the record has {size_bytes} bytes with its partition key; stream {self.stream} accepts at most "
                f"{self._record_bytes_max}"
            )

    # time

    @property
    def is_idle(self) -> bool:
        """Every record that was put is delivered or failed."""
        return not self._lanes.bundles

    def tick(self, now_ms: int, wall_ms: int) -> WriteSteps:
        if self._fault is not None:
            raise self._fault
        self._wall_offset_ms = wall_ms - now_ms
        if self._check_expiry_ms is not None and now_ms >= self._check_expiry_ms:
            self._expire(now_ms)
        self._lanes.end_lingering(now_ms)
        refresh = not self.is_idle and self._shard_map.wants_refresh(now_ms)
        if refresh:
            self._shard_map.begin(now_ms)
        calls, wake_at_ms = self._collect(now_ms, wall_ms)
        self.tick_at_ms = self._next_tick_ms(wake_at_ms, now_ms)
        return self._steps(calls, refresh=refresh)

    def _collect(self, now_ms: int, wall_ms: int) -> tuple[Sequence[PutRecordsCall], int | None]:
        free = self._options.settings.requests_in_flight - self._requests_in_flight
        if not self._lanes.ready or free <= 0:
            return (), None
        if now_ms < self._paused_until_ms:
            return (), self._paused_until_ms
        calls, wake_at_ms = self._lanes.collect(now_ms, wall_ms, free)
        self._requests_in_flight += len(calls)
        return calls, wake_at_ms

    def _next_tick_ms(self, wake_at_ms: int | None, now_ms: int) -> int | None:
        if self.is_idle:
            return None
        times = (wake_at_ms, self._lanes.lingers_until_ms, self._check_expiry_ms, self._shard_map.next_deadline_ms)
        at_ms = min((at_ms for at_ms in times if at_ms is not None), default=None)
        return None if at_ms is None else max(at_ms, now_ms + 1)

    def _expire(self, now_ms: int) -> None:
        """Fails unsent records after their delivery timeout. For those in flight the response decides, however late."""
        cutoff_ms = now_ms - self._options.delivery_timeout_ms

        def is_expired(record: OutgoingRecord) -> bool:
            return record.put_ms <= cutoff_ms

        seconds = self._options.delivery_timeout_ms / 1_000
        attempt = self._local_attempt(LocalCode.TIMEOUT, f"not delivered within {seconds:g} s", now_ms)
        late = [lane for lane in self._lanes.active() if lane.oldest_unsent_ms(now_ms) <= cutoff_ms]
        failed = self._lanes.fail_unsent(late, is_expired, attempt)
        for waiting in [waiting for waiting in self._awaiting_map if is_expired(waiting.bundle.records[0])]:
            self._awaiting_map.remove(waiting)
            waiting.bundle.attempts = (*waiting.bundle.attempts, waiting.attempt)
            self._lanes.fail(waiting.bundle, attempt, maybe_written=True)
            self._lanes.end_flight(waiting.lane, now_ms)
        self._fail_followers(failed, now_ms)
        for lane in late:
            self._lanes.queue_if_ready(lane, now_ms)
        if self.is_idle:
            self._check_expiry_ms = None
            return
        puts_ms = [lane.oldest_unsent_ms(now_ms) for lane in self._lanes.active()]
        puts_ms += [waiting.bundle.records[0].put_ms for waiting in self._awaiting_map]
        oldest_ms = min(puts_ms, default=now_ms)
        self._check_expiry_ms = max(now_ms + EXPIRY_CHECK_INTERVAL_MS, oldest_ms + self._options.delivery_timeout_ms)

    # flushing and closing

    def flush(self, now_ms: int) -> int:
        """Ends the lingering of everything put so far. Returns the epoch to pass to `is_flushed`."""
        self.tick_at_ms = 0
        try:
            return self._lanes.begin_epoch(now_ms)
        except Exception as error:
            self._fault = error
            raise

    def is_flushed(self, epoch: int) -> bool:
        """Whether everything put before that flush is settled."""
        return self._lanes.is_flushed(epoch)

    def abandon(self, failure: str | None, now_ms: int) -> WriteSteps:
        """Fails all records, because the producer was closed or failed. Those in flight may still be written."""
        if failure is None:
            code, message = LocalCode.CLOSED, "the producer was closed before the record was delivered"
        else:
            code, message = LocalCode.FAILED, failure
        self._lanes.fail_all(self._local_attempt(code, message, now_ms))
        self._events += self._news.flow(self._lanes.counted, now_ms)
        return self._steps()

    def count_unfinished(self) -> int:
        """Unsettled records, and failures that nobody has seen."""
        return self.count_pending() + len(self.failures)

    def count_pending(self) -> int:
        """Unsettled records, in flight or not."""
        return sum(len(bundle.records) for bundle in self._lanes.bundles.values())

    def writes(self, now_ms: int) -> StreamWrites:
        """The current state, for `status()`."""
        counted, paces = self._lanes.shards_counted, self._lanes.paces
        return StreamWrites(
            stream=self.stream,
            pending_count=self.count_pending(),
            requests_in_flight=self._requests_in_flight,
            unseen_failure_count=len(self.failures),
            paused=max(0, self._paused_until_ms - now_ms) / 1_000,
            failures_in_a_row=self._failures_in_a_row,
            aggregates=self._lanes.options.aggregate is not None,
            counters=self._lanes.counted.copy(),
            shards=tuple(
                ShardWrites(
                    shard_id=shard_id,
                    rate_share=round(pace.factor, 3),
                    paused=max(0, pace.paused_until_ms - now_ms) / 1_000,
                    counters=counted[shard_id].copy() if shard_id in counted else WriteCounters(),
                )
                for shard_id, pace in sorted(paces.items())
            ),
        )

    # responses

    def on_response(
        self, call: PutRecordsCall, response: PutRecordsResponse | AnabranchError, now_ms: int
    ) -> WriteSteps:
        self._requests_in_flight -= 1
        self._lanes.counted.requests.add(now_ms - call.started_ms)
        self.tick_at_ms = 0
        if isinstance(response, AnabranchError):
            self._on_error(call, response, now_ms)
        elif len(response.entries) != len(call.entries):
            message = "the response does not have one result per entry"
            attempt = self._attempt(call, now_ms, LocalCode.BROKEN, message, response.request_id)
            self._on_whole_call(call, "call_maybe_written", attempt, now_ms)
        else:
            self._on_results(call, response, now_ms)
        return self._steps()

    def _on_results(self, call: PutRecordsCall, response: PutRecordsResponse, now_ms: int) -> None:
        results = response.entries
        self._failures_in_a_row = 0
        self._shard_map.confirm(now_ms)
        for bundle, result in zip(call.bundles, results, strict=True):
            if bundle.predicted is not None and bundle.predicted.shard_id != result.shard_id:
                shard_id = result.shard_id or refused_shard_id(result.error_message)
                if shard_id is not None:
                    self._shard_map.learn(bundle.predicted, bundle.records[0].digest, shard_id, now_ms)
        self._lanes.follow_map(now_ms)
        written = self._attempt(call, now_ms, None, None, response.request_id)
        for lane, bundle, result in zip(call.lanes, call.bundles, results, strict=True):
            attempt = written
            if result.error_code is not None:
                attempt = self._attempt(call, now_ms, result.error_code, result.error_message, response.request_id)
            outcome = outcome_of_result(result, bundle, self._shard_map, now_ms)
            self._apply_outcome(lane, bundle, outcome, result, attempt, now_ms)
        self._pause_refusing_shards(now_ms)
        self._events += self._news.call_succeeded(self._lanes.counted, now_ms)

    def _on_error(self, call: PutRecordsCall, error: AnabranchError, now_ms: int) -> None:
        if isinstance(error, ServiceError):
            attempt = self._attempt(call, now_ms, error.code, error.message, error.request_id)
        else:
            attempt = self._attempt(call, now_ms, type(error).__name__, str(error), None)
        self._news.call_failed(now_ms)
        self._events.append(WriteFailed(stream=self.stream, error=str(error), entry_count=len(call.entries)))
        if isinstance(error, StreamNotFoundError):
            self._shard_map.clear()
            self._lanes.follow_map(now_ms)
        outcome = outcome_of_error(error)
        if outcome == "call_invalid":
            for bundle in call.bundles:
                bundle.entries_per_call_max = max(1, len(call.entries) // 2)
        self._on_whole_call(call, outcome, attempt, now_ms)
        if outcome == "call_refused":  # all unsent records would be refused too
            self._lanes.fail_unsent(list(self._lanes.active()), lambda _: True, attempt)

    def _on_whole_call(self, call: PutRecordsCall, outcome: Outcome, attempt: Attempt, now_ms: int) -> None:
        # Calls that fail together, or were sent before the last pause, count once.
        if RETRY_TABLE[outcome].pause == "stream" and now_ms >= self._paused_until_ms:
            self._failures_in_a_row += 1
            self._paused_until_ms = now_ms + backoff_ms(
                self._failures_in_a_row,
                self._entropy,
                first_ms=STREAM_PAUSE_MIN_MS,
                max_ms=STREAM_PAUSE_MAX_MS,
                min_share=0.5,
            )
        is_alone = len(call.entries) == 1
        for lane, bundle in zip(call.lanes, call.bundles, strict=True):
            self._apply_outcome(lane, bundle, outcome, _NO_RESULT, attempt, now_ms, is_alone=is_alone)

    # listings

    def on_listing(self, shards: Sequence[Shard], summary: StreamSummary | None, now_ms: int) -> WriteSteps:
        """Takes a complete listing of the open shards. `summary` is None if it was not wanted or could not be read."""
        self.tick_at_ms = 0
        self.wants_summary = False
        if summary is not None:
            self._record_bytes_max = summary.record_bytes_max
            self._fitting_cost_bytes = _fitting_cost_bytes(summary.record_bytes_max)
            if summary.record_distribution == "AUTO" and self._lanes.predicts:
                self.failures.blocks_keys = False
                self._lanes.stop_ordering()
                self._events.append(AggregationOff(stream=self.stream))
        if self._shard_map.install(shards, now_ms):
            self.wants_summary = True
            self._shard_map.request_refresh()
            self._events.append(StreamChanged(stream=self.stream, change="the stream was deleted and created again"))
        self._lanes.follow_map(now_ms)
        self._decide_awaiting(now_ms)
        self._events += self._news.listed()
        return self._steps()

    def _decide_awaiting(self, now_ms: int) -> None:
        """Decides on the bundles that waited for a listing. A shard that the listing does not have is gone already."""
        assert self._shard_map.updated_at_ms is not None
        awaiting_map, self._awaiting_map = self._awaiting_map, []
        for waiting in awaiting_map:
            if waiting.seen_ms > self._shard_map.updated_at_ms:  # the listing was requested before
                self._awaiting_map.append(waiting)
                self._shard_map.request_refresh()
                continue
            outcome = outcome_of_result(waiting.result, waiting.bundle, self._shard_map, now_ms)
            if outcome == "written_elsewhere":
                outcome = "written_straddling"
            self._apply_outcome(waiting.lane, waiting.bundle, outcome, waiting.result, waiting.attempt, now_ms)

    def on_listing_failed(self, error: AnabranchError, now_ms: int) -> WriteSteps:
        """Sends the bundles that waited for the listing again: a duplicate is better than a delay of minutes."""
        self.tick_at_ms = 0
        self._shard_map.fail(now_ms)
        awaiting_map, self._awaiting_map = self._awaiting_map, []
        for waiting in awaiting_map:
            lane, bundle = waiting.lane, waiting.bundle
            self._apply_outcome(lane, bundle, "written_straddling", waiting.result, waiting.attempt, now_ms)
        self._news.listing_failed()
        self._events.append(ListingFailed(stream=self.stream, error=str(error)))
        return self._steps()

    # outcomes

    def _apply_outcome(
        self, lane: WriteLane, bundle: Bundle, outcome: Outcome, result: PutRecordsResultEntry, attempt: Attempt,
        now_ms: int, *, is_alone: bool = False,
    ) -> None:  # fmt: skip
        action = RETRY_TABLE[outcome]
        if action.next == "await_map":
            self._awaiting_map.append(_AwaitingMap(lane, bundle, result, attempt, now_ms))
            self._shard_map.request_refresh()
            return
        if action.next != "deliver":
            self._count_error(bundle, outcome, result, attempt)
        if action.maybe_written:
            bundle.maybe_written = True
        if action.next == "deliver":
            self._deliver(lane, bundle, result, attempt)
        elif action.next == "fail" or (action.next == "bisect" and is_alone and len(bundle.records) == 1):
            self._lanes.fail(bundle, attempt)
            self._fail_followers(bundle.records, now_ms)
        else:
            bundle.attempts = (*bundle.attempts, attempt)
            bundle.in_flight = False
            self._pause(lane, bundle, result, action.pause, now_ms)
            self._send_again(lane, bundle, action.next, now_ms, is_alone=is_alone)
        self._lanes.end_flight(lane, now_ms)

    def _count_error(self, bundle: Bundle, outcome: Outcome, result: PutRecordsResultEntry, attempt: Attempt) -> None:
        shard_id = result.shard_id or refused_shard_id(result.error_message)
        if shard_id is None and bundle.predicted is not None:
            shard_id = bundle.predicted.shard_id
        code = attempt.code or LocalCode.WRONG_SHARD
        for counted in [self._lanes.counted] + ([] if shard_id is None else [self._lanes.shards_counted[shard_id]]):
            counted.errors[code] = counted.errors.get(code, 0) + 1
            counted.throttle_count += outcome == "entry_throttled"

    def _deliver(self, lane: WriteLane, bundle: Bundle, result: PutRecordsResultEntry, attempt: Attempt) -> None:
        shard_id, sequence_number = result.shard_id, result.sequence_number
        assert shard_id is not None
        assert sequence_number is not None
        bundle.attempts = (*bundle.attempts, attempt)
        pace = self._lanes.known_pace(shard_id) or lane.queue.pace
        if pace is None:
            self._refused_share.add_accepted()
        else:
            pace.on_accepted()
        if self._lanes.is_ordered and not lane.confirm_order(shard_id, sequence_number):
            unconfirmed = OrderUnconfirmed(stream=self.stream, shard_id=shard_id, sequence_number=sequence_number)
            self._events.append(unconfirmed)
        self._lanes.deliver(bundle, shard_id, sequence_number)

    def _send_again(self, lane: WriteLane, bundle: Bundle, next_step: NextStep, now_ms: int, *, is_alone: bool) -> None:
        if next_step == "repack":
            self._events.append(AggregateStraddled(stream=self.stream, record_count=len(bundle.records)))
        if next_step == "repack" or lane.is_retired:
            self._lanes.requeue_first(list(bundle.records), bundle, now_ms)
        elif next_step == "bisect" and is_alone:
            self._lanes.halve(lane, bundle, now_ms)
        else:
            lane.closed_bundles.appendleft(bundle)  # the same bytes

    def _fail_followers(self, failed: list[OutgoingRecord], now_ms: int) -> None:
        """Fails later records of the same keys, if keys are blocked until their failures are seen."""
        if not self.failures.blocks_keys:
            return
        keys = {record.partition_key for record in failed}
        lanes = self._lanes.lanes_of(failed)
        attempt = self._local_attempt(LocalCode.ORDER, _ORDER_MESSAGE, now_ms)
        self._lanes.fail_unsent(lanes, lambda record: record.partition_key in keys, attempt)

    # pauses

    def _pause(self, lane: WriteLane, bundle: Bundle, result: PutRecordsResultEntry, pause: Pause, now_ms: int) -> None:
        if pause in {"stream", "none"}:
            return
        shard_id = refused_shard_id(result.error_message)
        if shard_id is None and bundle.predicted is not None:
            shard_id = bundle.predicted.shard_id
        pace = self._lanes.known_pace(shard_id) or lane.queue.pace
        if pause != "shard":
            (self._refused_share if pace is None else pace.refused_share).add_refused()
            is_throttled = pause == "shard_if_most_throttled"
            self._refused.setdefault(pace, []).append(_Refused(shard_id, is_throttled, len(bundle.attempts)))
        elif pace is not None:
            pace.pause(now_ms, self._entropy)
        else:
            self._pause_stream(now_ms)

    def _pause_refusing_shards(self, now_ms: int) -> None:
        """Runs after all entries of a response: a single refused record says little about its shard."""
        refused, self._refused = self._refused, {}
        for pace, records in refused.items():
            throttled = [record for record in records if record.is_throttled]
            if pace is None:
                # One full shard among many does not show in the share, but its records fail again and again.
                fails_repeatedly = any(record.attempt_count >= ATTEMPTS_BEFORE_PAUSE for record in records)
                if fails_repeatedly or self._refused_share.is_most:
                    self._pause_stream(now_ms)
            elif not throttled:
                pace.on_failed(now_ms, self._entropy)
            elif pace.on_refused(now_ms, self._entropy, len(throttled)):
                share_percent = round(pace.factor * 100)
                shard_id = throttled[-1].shard_id
                self._news.throttled(pace, shard_id, now_ms)
                self._events.append(WriteThrottled(stream=self.stream, shard_id=shard_id, share_percent=share_percent))

    def _pause_stream(self, now_ms: int) -> None:
        """The shard is unknown, so the whole stream pauses, for as long as a shard's first pause."""
        self._paused_until_ms = max(self._paused_until_ms, now_ms + STREAM_PAUSE_MIN_MS)

    # values

    def _steps(self, calls: Sequence[PutRecordsCall] = (), *, refresh: bool = False) -> WriteSteps:
        return WriteSteps(self._lanes.ended, self._events, calls, refresh)

    def _local_attempt(self, code: str, message: str, now_ms: int) -> Attempt:
        """A failure that the service knows nothing about."""
        return Attempt(
            started_seconds=(now_ms + self._wall_offset_ms) / 1_000, duration_seconds=0.0, code=code, message=message
        )

    @staticmethod
    def _attempt(
        call: PutRecordsCall, now_ms: int, code: str | None, message: str | None, request_id: str | None
    ) -> Attempt:
        return Attempt(
            started_seconds=call.started_seconds,
            duration_seconds=(now_ms - call.started_ms) / 1_000,
            code=code,
            message=message,
            request_id=request_id,
        )


def _fitting_cost_bytes(record_bytes_max: int) -> int:
    """Up to this cost `put` does not check the size of a record: it fits with any partition key."""
    return record_bytes_max - _KEY_BYTES_MAX - _WRAPPING_BYTES


class WriteNews:
    """Makes events about the writes to one stream: progress, at most once a second, and recoveries."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._reported = WriteCounters()
        self._reported_ms: int | None = None
        self._failing_since_ms: int | None = None
        self._failure_count = 0
        """Requests that failed since one succeeded."""
        self._throttled: dict[ShardPace, tuple[str | None, int]] = {}
        """Shards that were reported as throttled, and since when."""
        self._map_has_failed = False

    # failures

    def call_failed(self, now_ms: int) -> None:
        self._failure_count += 1
        if self._failing_since_ms is None:
            self._failing_since_ms = now_ms

    def throttled(self, pace: ShardPace, shard_id: str | None, now_ms: int) -> None:
        self._throttled.setdefault(pace, (shard_id, now_ms))

    def listing_failed(self) -> None:
        self._map_has_failed = True

    # recoveries and progress

    def listed(self) -> Iterator[Event]:
        if self._map_has_failed:
            self._map_has_failed = False
            yield ListingRecovered(stream=self._stream)

    def call_succeeded(self, counters: WriteCounters, now_ms: int) -> Iterator[Event]:
        if self._failing_since_ms is not None:
            seconds = (now_ms - self._failing_since_ms) / 1000
            yield WriteRecovered(stream=self._stream, failure_count=self._failure_count, seconds=seconds)
            self._failing_since_ms, self._failure_count = None, 0
        for pace in [pace for pace in self._throttled if pace.factor >= 1.0]:
            shard_id, since_ms = self._throttled.pop(pace)
            yield WriteUnthrottled(stream=self._stream, shard_id=shard_id, seconds=(now_ms - since_ms) / 1000)
        if self._reported_ms is None:
            self._reported_ms = now_ms
        elif now_ms - self._reported_ms >= FLOW_EVERY_MS:
            yield from self.flow(counters, now_ms)

    def flow(self, counters: WriteCounters, now_ms: int) -> Iterator[Event]:
        """What was delivered since the last time, if anything was."""
        before, since_ms = self._reported, now_ms if self._reported_ms is None else self._reported_ms
        if (counters.delivered_count, counters.failed_count) == (before.delivered_count, before.failed_count):
            return
        self._reported, self._reported_ms = counters.copy(), now_ms
        yield DeliveryProgress(
            stream=self._stream,
            seconds=(now_ms - since_ms) / 1000,
            delivered_count=counters.delivered_count - before.delivered_count,
            delivered_bytes=counters.delivered_bytes - before.delivered_bytes,
            kinesis_count=counters.kinesis_count - before.kinesis_count,
            failed_count=counters.failed_count - before.failed_count,
            requests=counters.requests.since(before.requests),
        )
