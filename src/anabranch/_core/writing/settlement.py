"""What the result of a PutRecords call means for each Kinesis record in it.

Each attempt gets an `Outcome`, from its entry of the response or from the error of the whole call. `RETRY_TABLE` says
what follows, and `Settlement` applies it:

1. The shard map learns from every entry.
2. The lanes follow the map.
3. Each bundle gets its outcome. Whatever is sent again is placed with the newest map, before anything newer of its key.

If an aggregate landed in another shard than predicted, it counts only if *all* of its records belong there. Consumers
skip the whole aggregate if one record does not, so the others would be lost with it. If the range of that shard is
unknown, the aggregate waits for the next listing, and its lane waits with it.

`maybe_written` covers what we cannot know: a request that was sent and not answered may have been written.
"""

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

import msgspec

from anabranch._core.backoff import backoff_ms
from anabranch._core.writing.bundles import Bundle, OutgoingRecord
from anabranch._core.writing.lanes import Lanes, PutRecordsCall, WriteLane
from anabranch._core.writing.limiter import RefusedShare, ShardPace
from anabranch._core.writing.shard_map import ShardMap
from anabranch._model.entropy import Entropy
from anabranch._wire.messages import PutRecordsResponse, PutRecordsResultEntry
from anabranch.errors import (
    AnabranchError,
    InvalidRequestError,
    ServiceError,
    StreamNotFoundError,
    TransportError,
    UnavailableError,
)
from anabranch.events import AggregateStraddled, Event, OrderUnconfirmed, WriteFailed, WriteThrottled
from anabranch.records import Attempt

STREAM_PAUSE_MIN_MS: Final = 50
STREAM_PAUSE_MAX_MS: Final = 5_000
ATTEMPTS_BEFORE_PAUSE: Final = 3
"""Of one record whose shard is unknown."""

ORDER_MESSAGE: Final = "an earlier record of this key failed, and that failure has not been handled yet"

_NO_RESULT: Final = PutRecordsResultEntry()
_THROTTLED: Final = "ProvisionedThroughputExceededException"
_SHARD_ID: Final = re.compile(r"shardId-\d{12}")


class LocalCode:
    """Codes of attempts that failed in the producer, not in the service."""

    TIMEOUT: Final = "DeliveryTimeout"
    ORDER: Final = "OrderKept"
    CLOSED: Final = "ProducerClosed"
    FAILED: Final = "ProducerFailed"
    BROKEN: Final = "AnswerBroken"


class Outcome(Enum):
    # the entry was written
    WHERE_PREDICTED = auto()
    SINGLE_RECORD = auto()
    """Any shard is right for a record that is not in an aggregate."""
    ELSEWHERE_IN_RANGE = auto()
    ELSEWHERE_STRADDLING = auto()
    ELSEWHERE_UNKNOWN = auto()
    """In a shard whose range is not known yet."""
    # the entry was not written
    ENTRY_THROTTLED = auto()
    ENTRY_FAILED = auto()
    # the whole call
    CALL_REJECTED_FOR_NOW = auto()
    """Over a quota, an expired token, a stream that is changing: not written, a retry may succeed."""
    CALL_UNAVAILABLE = auto()
    CALL_UNANSWERED = auto()
    CALL_NOT_SENT = auto()
    CALL_INVALID = auto()
    CALL_REFUSED = auto()
    RESPONSE_BROKEN = auto()
    """It does not have one result per entry."""


class NextStep(Enum):
    DELIVERED = auto()
    SEND_AGAIN = auto()
    """The same bytes, before anything newer of the lane."""
    REPACK = auto()
    """Send all records again, grouped by the shards they belong to now."""
    AWAIT_MAP = auto()
    """Decide when the shard map has been refreshed."""
    BISECT = auto()
    """Send smaller calls, then smaller bundles, until the record that the service rejects is found."""
    FAIL = auto()


class Pause(Enum):
    NONE = auto()
    SHARD = auto()
    SHARD_IF_MOST_FAILED = auto()
    """Only if most of the shard's last records failed, not this one alone."""
    SHARD_IF_MOST_THROTTLED = auto()
    """The same, and lower the rate."""
    STREAM = auto()


class RetryAction(msgspec.Struct, frozen=True):
    next: NextStep
    maybe_written: bool = False
    pause: Pause = Pause.NONE


RETRY_TABLE: Final = {
    Outcome.WHERE_PREDICTED: RetryAction(NextStep.DELIVERED),
    Outcome.SINGLE_RECORD: RetryAction(NextStep.DELIVERED),
    Outcome.ELSEWHERE_IN_RANGE: RetryAction(NextStep.DELIVERED),
    # Written, but consumers that check ranges skip it. Others may see its records twice.
    Outcome.ELSEWHERE_STRADDLING: RetryAction(NextStep.REPACK, maybe_written=True, pause=Pause.SHARD),
    Outcome.ELSEWHERE_UNKNOWN: RetryAction(NextStep.AWAIT_MAP, maybe_written=True),
    Outcome.ENTRY_THROTTLED: RetryAction(NextStep.SEND_AGAIN, pause=Pause.SHARD_IF_MOST_THROTTLED),
    Outcome.ENTRY_FAILED: RetryAction(NextStep.SEND_AGAIN, pause=Pause.SHARD_IF_MOST_FAILED),
    Outcome.CALL_REJECTED_FOR_NOW: RetryAction(NextStep.SEND_AGAIN, pause=Pause.STREAM),
    Outcome.CALL_UNAVAILABLE: RetryAction(NextStep.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
    Outcome.CALL_UNANSWERED: RetryAction(NextStep.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
    Outcome.CALL_NOT_SENT: RetryAction(NextStep.SEND_AGAIN, pause=Pause.STREAM),
    Outcome.CALL_INVALID: RetryAction(NextStep.BISECT),
    Outcome.CALL_REFUSED: RetryAction(NextStep.FAIL),
    Outcome.RESPONSE_BROKEN: RetryAction(NextStep.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
}


def outcome_of_result(result: PutRecordsResultEntry, bundle: Bundle, shard_map: ShardMap, now_ms: int) -> Outcome:
    if result.error_code is not None:
        return Outcome.ENTRY_THROTTLED if result.error_code == _THROTTLED else Outcome.ENTRY_FAILED
    if result.shard_id is None or result.sequence_number is None:
        return Outcome.RESPONSE_BROKEN
    if not bundle.is_aggregate:
        return Outcome.SINGLE_RECORD
    if bundle.predicted is not None and bundle.predicted.shard_id == result.shard_id:
        return Outcome.WHERE_PREDICTED
    actual = shard_map.find(result.shard_id, now_ms)
    if actual is not None:
        return Outcome.ELSEWHERE_IN_RANGE if bundle.is_within(actual) else Outcome.ELSEWHERE_STRADDLING
    if bundle.has_one_hash_key:
        return Outcome.ELSEWHERE_IN_RANGE
    return Outcome.ELSEWHERE_UNKNOWN


def outcome_of_error(error: AnabranchError) -> Outcome:
    match error:
        case InvalidRequestError():
            return Outcome.CALL_INVALID
        case TransportError():
            return Outcome.CALL_UNANSWERED if error.maybe_sent else Outcome.CALL_NOT_SENT
        case UnavailableError():
            return Outcome.CALL_UNAVAILABLE
        case ServiceError() if error.retryable:
            return Outcome.CALL_REJECTED_FOR_NOW
        case _:
            return Outcome.CALL_REFUSED


def refused_shard_id(message: str | None) -> str | None:
    """The shard named in the error message of a throttled entry."""
    found = _SHARD_ID.search(message or "")
    return found[0] if found else None


class _AwaitingMap(msgspec.Struct, frozen=True):
    """A bundle in a shard whose range is unknown."""

    lane: WriteLane
    bundle: Bundle
    result: PutRecordsResultEntry
    attempt: Attempt
    seen_ms: int


class _Refused(msgspec.Struct, frozen=True):
    """A record that its shard did not accept."""

    pace: ShardPace | None
    shard_id: str | None
    is_throttled: bool
    attempt_count: int


class Settlement:
    __slots__ = (
        "_awaiting_map", "_entropy", "_failures_in_a_row", "_lanes", "_refused", "_refused_share", "_stream", "notify",
        "paused_until_ms", "wall_offset_ms",
    )  # fmt: skip

    def __init__(self, stream: str, lanes: Lanes, entropy: Entropy, notify: Callable[[Event], None]) -> None:
        self.paused_until_ms = 0
        """Whole calls failed: nothing is sent to this stream before then."""
        self.wall_offset_ms = 0
        """From the engine's clock to the time of day."""
        self.notify = notify
        self._stream = stream
        self._lanes = lanes
        self._entropy = entropy
        self._failures_in_a_row = 0
        self._refused: list[_Refused] = []
        """In the response that is being processed."""
        self._refused_share = RefusedShare()
        """Of records whose shard is unknown."""
        self._awaiting_map: list[_AwaitingMap] = []

    @property
    def awaiting_map_count(self) -> int:
        """Records in bundles that wait for the next listing."""
        return sum(len(waiting.bundle.records) for waiting in self._awaiting_map)

    def awaiting_map_since_ms(self, now_ms: int) -> int:
        """When the oldest of them was put; now, if there is none."""
        return min((waiting.bundle.records[0].put_ms for waiting in self._awaiting_map), default=now_ms)

    # responses

    def on_response(self, call: PutRecordsCall, response: PutRecordsResponse, now_ms: int) -> None:
        results = response.entries
        if len(results) != len(call.entries):
            message = "the response does not have one result per entry"
            attempt = self._attempt(call, now_ms, LocalCode.BROKEN, message, response.request_id)
            self._on_whole_call(call, Outcome.RESPONSE_BROKEN, attempt, now_ms)
            return
        self._failures_in_a_row = 0
        self._lanes.shard_map.confirm(now_ms)
        for bundle, result in zip(call.bundles, results, strict=True):
            self._learn(bundle, result, now_ms)
        self._lanes.follow_map(now_ms)
        for lane, bundle, result in zip(call.lanes, call.bundles, results, strict=True):
            outcome = outcome_of_result(result, bundle, self._lanes.shard_map, now_ms)
            attempt = self._attempt(call, now_ms, result.error_code, result.error_message, response.request_id)
            self._apply_outcome(lane, bundle, outcome, result, attempt, now_ms)
        self._pause_refusing_shards(now_ms)

    def on_error(self, call: PutRecordsCall, error: AnabranchError, now_ms: int) -> None:
        if isinstance(error, ServiceError):
            attempt = self._attempt(call, now_ms, error.code, error.message, error.request_id)
        else:
            attempt = self._attempt(call, now_ms, type(error).__name__, str(error), None)
        self.notify(WriteFailed(stream=self._stream, error=str(error), entry_count=len(call.entries)))
        if isinstance(error, StreamNotFoundError):
            self._lanes.shard_map.clear()
            self._lanes.follow_map(now_ms)
        outcome = outcome_of_error(error)
        if outcome is Outcome.CALL_INVALID:
            for bundle in call.bundles:
                bundle.entries_per_call_max = max(1, len(call.entries) // 2)
        self._on_whole_call(call, outcome, attempt, now_ms)
        if outcome is Outcome.CALL_REFUSED:  # all unsent records would be refused too
            self._lanes.fail_unsent(list(self._lanes.active()), lambda _: True, attempt)
            self._lanes.discard_empty()

    def _on_whole_call(self, call: PutRecordsCall, outcome: Outcome, attempt: Attempt, now_ms: int) -> None:
        # Calls that fail together, or were sent before the last pause, count once.
        if RETRY_TABLE[outcome].pause is Pause.STREAM and now_ms >= self.paused_until_ms:
            self._failures_in_a_row += 1
            self.paused_until_ms = now_ms + backoff_ms(
                self._failures_in_a_row,
                self._entropy,
                first_ms=STREAM_PAUSE_MIN_MS,
                max_ms=STREAM_PAUSE_MAX_MS,
                min_share=0.5,
            )
        is_alone = len(call.entries) == 1
        for lane, bundle in zip(call.lanes, call.bundles, strict=True):
            self._apply_outcome(lane, bundle, outcome, _NO_RESULT, attempt, now_ms, is_alone=is_alone)

    def on_map(self, now_ms: int) -> None:
        """Decides on the bundles that waited for a listing. A shard that the listing does not have is gone already."""
        self._lanes.follow_map(now_ms)
        awaiting_map, self._awaiting_map = self._awaiting_map, []
        shard_map = self._lanes.shard_map
        assert shard_map.updated_at_ms is not None
        for waiting in awaiting_map:
            if waiting.seen_ms > shard_map.updated_at_ms:  # the listing was requested before
                self._awaiting_map.append(waiting)
                shard_map.request_refresh()
                continue
            outcome = outcome_of_result(waiting.result, waiting.bundle, shard_map, now_ms)
            if outcome is Outcome.ELSEWHERE_UNKNOWN:
                outcome = Outcome.ELSEWHERE_STRADDLING
            self._apply_outcome(waiting.lane, waiting.bundle, outcome, waiting.result, waiting.attempt, now_ms)

    def on_map_failed(self, now_ms: int) -> None:
        """Sends the bundles that waited for the listing again: a duplicate is better than a delay of minutes."""
        awaiting_map, self._awaiting_map = self._awaiting_map, []
        for waiting in awaiting_map:
            outcome = Outcome.ELSEWHERE_STRADDLING
            self._apply_outcome(waiting.lane, waiting.bundle, outcome, waiting.result, waiting.attempt, now_ms)

    # applying outcomes

    def _apply_outcome(
        self, lane: WriteLane, bundle: Bundle, outcome: Outcome, result: PutRecordsResultEntry, attempt: Attempt,
        now_ms: int, *, is_alone: bool = False,
    ) -> None:  # fmt: skip
        action = RETRY_TABLE[outcome]
        if action.next is NextStep.AWAIT_MAP:
            self._awaiting_map.append(_AwaitingMap(lane, bundle, result, attempt, now_ms))
            self._lanes.shard_map.request_refresh()
            return
        bundle.maybe_written = bundle.maybe_written or action.maybe_written
        if action.next is NextStep.DELIVERED:
            self._deliver(lane, bundle, result, attempt)
        elif action.next is NextStep.FAIL or (action.next is NextStep.BISECT and is_alone and len(bundle.records) == 1):
            self._lanes.fail(bundle, attempt)
            self.fail_followers(bundle.records, now_ms)
        else:
            bundle.attempts = (*bundle.attempts, attempt)
            bundle.in_flight = False
            self._pause(lane, bundle, result, action.pause, now_ms)
            self._send_again(lane, bundle, action.next, now_ms, is_alone=is_alone)
        self._lanes.end_flight(lane, now_ms)

    def _deliver(self, lane: WriteLane, bundle: Bundle, result: PutRecordsResultEntry, attempt: Attempt) -> None:
        assert result.shard_id is not None
        assert result.sequence_number is not None
        bundle.attempts = (*bundle.attempts, attempt)
        pace = self._lanes.pace_of(result.shard_id) or lane.queue.pace
        if pace is None:
            self._refused_share.add_accepted()
        else:
            pace.on_accepted()
        if self._lanes.is_ordered and not lane.confirm_order(result.shard_id, result.sequence_number):
            self.notify(
                OrderUnconfirmed(stream=self._stream, shard_id=result.shard_id, sequence_number=result.sequence_number)
            )
        self._lanes.deliver(bundle, result.shard_id, result.sequence_number)

    def _send_again(self, lane: WriteLane, bundle: Bundle, next_step: NextStep, now_ms: int, *, is_alone: bool) -> None:
        if next_step is NextStep.REPACK:
            self.notify(AggregateStraddled(stream=self._stream, record_count=len(bundle.records)))
        if next_step is NextStep.REPACK or lane.is_retired:
            self._lanes.requeue_first(list(bundle.records), bundle, now_ms)
        elif next_step is NextStep.BISECT and is_alone:
            self._lanes.halve(lane, bundle, now_ms)
        else:
            lane.closed_bundles.appendleft(bundle)

    def _learn(self, bundle: Bundle, result: PutRecordsResultEntry, now_ms: int) -> None:
        shard_id = result.shard_id or refused_shard_id(result.error_message)
        predicted = bundle.predicted
        if predicted is not None and shard_id is not None and shard_id != predicted.shard_id:
            self._lanes.shard_map.learn(predicted, bundle.records[0].digest, shard_id, now_ms)

    # pauses

    def _pause(self, lane: WriteLane, bundle: Bundle, result: PutRecordsResultEntry, pause: Pause, now_ms: int) -> None:
        if pause is Pause.STREAM or pause is Pause.NONE:
            return
        shard_id = refused_shard_id(result.error_message)
        if shard_id is None and bundle.predicted is not None:
            shard_id = bundle.predicted.shard_id
        pace = self._lanes.pace_of(shard_id) or lane.queue.pace
        if pause is not Pause.SHARD:
            (self._refused_share if pace is None else pace.refused_share).add_refused()
            is_throttled = pause is Pause.SHARD_IF_MOST_THROTTLED
            self._refused.append(_Refused(pace, shard_id, is_throttled, len(bundle.attempts)))
        elif pace is not None:
            pace.pause(now_ms, self._entropy)
        else:
            self._pause_stream(now_ms)

    def _pause_refusing_shards(self, now_ms: int) -> None:
        """Runs after all entries of a response: a single refused record says little about its shard."""
        by_pace: dict[ShardPace | None, list[_Refused]] = {}
        for refused in self._refused:
            by_pace.setdefault(refused.pace, []).append(refused)
        self._refused.clear()
        for pace, records in by_pace.items():
            throttled = [refused for refused in records if refused.is_throttled]
            if pace is None:
                # One full shard among many does not show in the share, but its records fail again and again.
                fails_repeatedly = any(refused.attempt_count >= ATTEMPTS_BEFORE_PAUSE for refused in records)
                if fails_repeatedly or self._refused_share.is_most:
                    self._pause_stream(now_ms)
            elif not throttled:
                pace.on_failed(now_ms, self._entropy)
            elif pace.on_refused(now_ms, self._entropy, len(throttled)):
                share_percent = round(pace.factor * 100)
                shard_id = throttled[-1].shard_id
                self.notify(WriteThrottled(stream=self._stream, shard_id=shard_id, share_percent=share_percent))

    def _pause_stream(self, now_ms: int) -> None:
        """The shard is unknown, so the whole stream pauses, for as long as a shard's first pause."""
        self.paused_until_ms = max(self.paused_until_ms, now_ms + STREAM_PAUSE_MIN_MS)

    # failures

    def fail_followers(self, failed: list[OutgoingRecord], now_ms: int) -> None:
        """Fails later records of the same keys, if keys are blocked until their failures are seen."""
        if not self._lanes.failures.blocks_keys:
            return
        keys = {record.partition_key for record in failed}
        lanes = self._lanes.lanes_of(failed)
        attempt = self.local_attempt(LocalCode.ORDER, ORDER_MESSAGE, now_ms)
        self._lanes.fail_unsent(lanes, lambda record: record.partition_key in keys, attempt)
        self._lanes.discard_empty()

    def fail_awaiting_map(self, should_fail: Callable[[OutgoingRecord], bool], attempt: Attempt, now_ms: int) -> None:
        for waiting in [entry for entry in self._awaiting_map if should_fail(entry.bundle.records[0])]:
            self._awaiting_map.remove(waiting)
            waiting.bundle.attempts = (*waiting.bundle.attempts, waiting.attempt)
            self._lanes.fail(waiting.bundle, attempt, maybe_written=True)
            self._lanes.end_flight(waiting.lane, now_ms)

    def local_attempt(self, code: str, message: str, now_ms: int) -> Attempt:
        """A failure that the service knows nothing about."""
        return Attempt(
            started_seconds=(now_ms + self.wall_offset_ms) / 1_000, duration_seconds=0.0, code=code, message=message
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
