"""What becomes of a Kinesis record after an attempt to write it: one table.

First an attempt is given its `Outcome`, from the slot of the answer or from the error of the whole call; then
`RULINGS` says what follows. An aggregate that landed in another shard than predicted counts only if *all* of its
records belong there: consumers skip an aggregate whole if one of them does not, so the records that do belong would
be lost with it.

`maybe_written` is about what is not known: a call that was sent and never answered may have taken effect.
"""

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

import msgspec

from anabranch._core.backoff import backoff_ms
from anabranch._core.writing.bundles import Bundle, OutgoingRecord
from anabranch._core.writing.lanes import Call, Lane, Placement
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

_THROTTLED_SLOT: Final = "ProvisionedThroughputExceededException"
_SHARD_ID: Final = re.compile(r"shardId-\d{12}")


class Outcome(Enum):
    # the slot says written
    WHERE_PREDICTED = auto()
    ALONE = auto()
    """A single record: it is right wherever the service put it."""
    ELSEWHERE_IN_RANGE = auto()
    ELSEWHERE_STRADDLING = auto()
    ELSEWHERE_UNKNOWN = auto()
    """In a shard whose range is not known yet."""
    # the slot says not written
    SLOT_THROTTLED = auto()
    SLOT_FAILED = auto()
    # the whole call
    CALL_TURNED_AWAY = auto()
    """Over a quota, an expired token, a stream that is changing: not written, and it may work later."""
    CALL_UNAVAILABLE = auto()
    CALL_UNANSWERED = auto()
    CALL_NOT_SENT = auto()
    CALL_INVALID = auto()
    CALL_REFUSED = auto()
    ANSWER_BROKEN = auto()
    """Not one slot for each entry."""


class Next(Enum):
    DELIVERED = auto()
    SEND_AGAIN = auto()
    """The same bytes, before anything newer of its lane."""
    SEND_APART = auto()
    """All of its records, by the shards they belong to now."""
    AWAIT_MAP = auto()
    """Judged again when the map has been refreshed."""
    BISECT = auto()
    """In smaller calls, then in smaller bundles, until the record is found that the service does not accept."""
    FAIL = auto()


class Pause(Enum):
    NONE = auto()
    SHARD = auto()
    """For a moment, as it is the shard that had a problem."""
    SHARD_IF_MOST = auto()
    """For a moment, if it is not this record alone: most of the shard's last records were refused."""
    SHARD_IF_MOST_SLOWER = auto()
    """The same, and at a lower rate from then on."""
    STREAM = auto()


class Ruling(msgspec.Struct, frozen=True):
    next: Next
    maybe_written: bool = False
    pause: Pause = Pause.NONE


RULINGS: Final = {
    Outcome.WHERE_PREDICTED: Ruling(Next.DELIVERED),
    Outcome.ALONE: Ruling(Next.DELIVERED),
    Outcome.ELSEWHERE_IN_RANGE: Ruling(Next.DELIVERED),
    # Written, but consumers that check ranges skip it: others may see its records twice.
    Outcome.ELSEWHERE_STRADDLING: Ruling(Next.SEND_APART, maybe_written=True, pause=Pause.SHARD),
    Outcome.ELSEWHERE_UNKNOWN: Ruling(Next.AWAIT_MAP, maybe_written=True),
    Outcome.SLOT_THROTTLED: Ruling(Next.SEND_AGAIN, pause=Pause.SHARD_IF_MOST_SLOWER),
    Outcome.SLOT_FAILED: Ruling(Next.SEND_AGAIN, pause=Pause.SHARD_IF_MOST),
    Outcome.CALL_TURNED_AWAY: Ruling(Next.SEND_AGAIN, pause=Pause.STREAM),
    Outcome.CALL_UNAVAILABLE: Ruling(Next.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
    Outcome.CALL_UNANSWERED: Ruling(Next.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
    Outcome.CALL_NOT_SENT: Ruling(Next.SEND_AGAIN, pause=Pause.STREAM),
    Outcome.CALL_INVALID: Ruling(Next.BISECT),
    Outcome.CALL_REFUSED: Ruling(Next.FAIL),
    Outcome.ANSWER_BROKEN: Ruling(Next.SEND_AGAIN, maybe_written=True, pause=Pause.STREAM),
}


def outcome_of_slot(slot: PutRecordsResultEntry, bundle: Bundle, shard_map: ShardMap, now_ms: int) -> Outcome:
    if slot.error_code is not None:
        return Outcome.SLOT_THROTTLED if slot.error_code == _THROTTLED_SLOT else Outcome.SLOT_FAILED
    if slot.shard_id is None or slot.sequence_number is None:
        return Outcome.ANSWER_BROKEN
    if not bundle.is_aggregate:
        return Outcome.ALONE
    if bundle.predicted is not None and bundle.predicted.shard_id == slot.shard_id:
        return Outcome.WHERE_PREDICTED
    actual = shard_map.find(slot.shard_id, now_ms)
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
            return Outcome.CALL_TURNED_AWAY
        case _:
            return Outcome.CALL_REFUSED


def refused_shard_id(message: str | None) -> str | None:
    """The shard that a throttled slot's message names."""
    found = _SHARD_ID.search(message or "")
    return found[0] if found else None


STREAM_PAUSE_MIN_MS: Final = 50
STREAM_PAUSE_MAX_MS: Final = 5_000
ATTEMPTS_BEFORE_REST: Final = 3
"""Of one record, where its shard is not known."""
_NOTHING: Final = PutRecordsResultEntry()


class OURS:
    """Codes of attempts that failed on our side of the wire."""

    TIMEOUT: Final = "DeliveryTimeout"
    ORDER: Final = "OrderKept"
    CLOSED: Final = "ProducerClosed"
    FAILED: Final = "ProducerFailed"
    BROKEN: Final = "AnswerBroken"


ORDER_MESSAGE: Final = "an earlier record of this key was not delivered, and nobody has seen that failure yet"


class _Undecided(msgspec.Struct, frozen=True):
    lane: Lane
    bundle: Bundle
    slot: PutRecordsResultEntry
    attempt: Attempt
    seen_ms: int


class _Refused(msgspec.Struct, frozen=True):
    """A record that its shard did not take."""

    pace: ShardPace | None
    shard_id: str | None
    is_throttled: bool
    attempt_count: int


class Settlement:
    __slots__ = (
        "_entropy", "_failures_in_a_row", "_placement", "_refused", "_refused_share", "_routing", "_stream",
        "_undecided", "notify", "paused_until_ms", "wall_offset_ms",
    )  # fmt: skip

    def __init__(self, stream: str, placement: Placement, entropy: Entropy, notify: Callable[[Event], None]) -> None:
        self.paused_until_ms = 0
        """Whole calls were turned away: nothing is sent to this stream before then."""
        self.wall_offset_ms = 0
        """From the engine's clock to the time of day."""
        self.notify = notify
        self._stream = stream
        self._placement = placement
        self._routing = placement.routing
        self._entropy = entropy
        self._failures_in_a_row = 0
        self._refused: list[_Refused] = []
        """Of the call that is being settled."""
        self._refused_share = RefusedShare()
        """Of records whose shard is not known."""
        self._undecided: list[_Undecided] = []

    @property
    def undecided_count(self) -> int:
        return sum(len(entry.bundle.records) for entry in self._undecided)

    def undecided_since_ms(self, now_ms: int) -> int:
        """When the oldest record was put that waits for a listing; now, if there is none."""
        return min((entry.bundle.records[0].put_ms for entry in self._undecided), default=now_ms)

    # answers

    def on_answer(self, call: Call, answer: PutRecordsResponse, now_ms: int) -> None:
        slots = answer.entries
        if len(slots) != len(call.entries):
            attempt = self._attempt(call, now_ms, OURS.BROKEN, "not one slot for each entry", answer.request_id)
            self._on_whole_call(call, Outcome.ANSWER_BROKEN, attempt, now_ms)
            return
        self._failures_in_a_row = 0
        self._routing.shard_map.confirm(now_ms)
        for bundle, slot in zip(call.bundles, slots, strict=True):
            self._learn(bundle, slot, now_ms)
        self._follow_map(now_ms)
        for lane, bundle, slot in zip(call.lanes, call.bundles, slots, strict=True):
            outcome = outcome_of_slot(slot, bundle, self._routing.shard_map, now_ms)
            attempt = self._attempt(call, now_ms, slot.error_code, slot.error_message, answer.request_id)
            self._judge(lane, bundle, outcome, slot, attempt, now_ms)
        self._rest_refusing_shards(now_ms)

    def on_error(self, call: Call, error: AnabranchError, now_ms: int) -> None:
        if isinstance(error, ServiceError):
            attempt = self._attempt(call, now_ms, error.code, error.message, error.request_id)
        else:
            attempt = self._attempt(call, now_ms, type(error).__name__, str(error), None)
        self.notify(WriteFailed(stream=self._stream, error=str(error), entry_count=len(call.entries)))
        if isinstance(error, StreamNotFoundError):
            self._routing.shard_map.forget()
            self._follow_map(now_ms)
        outcome = outcome_of_error(error)
        if outcome is Outcome.CALL_INVALID:
            for bundle in call.bundles:
                bundle.companions_max = max(1, len(call.entries) // 2)
        self._on_whole_call(call, outcome, attempt, now_ms)
        if outcome is Outcome.CALL_REFUSED:  # and so it would be for all that waits behind
            self._placement.fail_where(list(self._routing.lanes()), lambda _: True, attempt)
            self._routing.discard_empty()

    def _on_whole_call(self, call: Call, outcome: Outcome, attempt: Attempt, now_ms: int) -> None:
        # Calls that fail together, or were sent before the last pause, count once.
        if RULINGS[outcome].pause is Pause.STREAM and now_ms >= self.paused_until_ms:
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
            self._judge(lane, bundle, outcome, _NOTHING, attempt, now_ms, is_alone=is_alone)

    def on_map(self, now_ms: int) -> None:
        """A listing was installed: what waited for it is judged. A shard that it does not name is gone already."""
        self._follow_map(now_ms)
        undecided, self._undecided = self._undecided, []
        shard_map = self._routing.shard_map
        assert shard_map.updated_at_ms is not None
        for entry in undecided:
            if entry.seen_ms > shard_map.updated_at_ms:  # the listing had been asked for before
                self._undecided.append(entry)
                shard_map.distrust()
                continue
            outcome = outcome_of_slot(entry.slot, entry.bundle, shard_map, now_ms)
            if outcome is Outcome.ELSEWHERE_UNKNOWN:
                outcome = Outcome.ELSEWHERE_STRADDLING
            self._judge(entry.lane, entry.bundle, outcome, entry.slot, entry.attempt, now_ms)

    def on_no_map(self, now_ms: int) -> None:
        """The listing failed. What waited for it is sent again: twice in the stream is better than late by minutes."""
        undecided, self._undecided = self._undecided, []
        for entry in undecided:
            self._judge(entry.lane, entry.bundle, Outcome.ELSEWHERE_STRADDLING, entry.slot, entry.attempt, now_ms)

    # consequences

    def _judge(
        self, lane: Lane, bundle: Bundle, outcome: Outcome, slot: PutRecordsResultEntry, attempt: Attempt, now_ms: int,
        *, is_alone: bool = False,
    ) -> None:  # fmt: skip
        ruling = RULINGS[outcome]
        if ruling.next is Next.AWAIT_MAP:
            self._undecided.append(_Undecided(lane, bundle, slot, attempt, now_ms))
            self._routing.shard_map.distrust()
            return
        bundle.maybe_written = bundle.maybe_written or ruling.maybe_written
        if ruling.next is Next.DELIVERED:
            self._deliver(lane, bundle, slot, attempt)
        elif ruling.next is Next.FAIL or (ruling.next is Next.BISECT and is_alone and len(bundle.records) == 1):
            self._placement.fail(bundle, attempt)
            self.fail_followers(bundle.records, now_ms)
        else:
            bundle.attempts = (*bundle.attempts, attempt)
            bundle.in_flight = False
            self._rest(lane, bundle, slot, ruling.pause, now_ms)
            self._send_again(lane, bundle, ruling.next, now_ms, is_alone=is_alone)
        self._routing.land(lane, now_ms)

    def _deliver(self, lane: Lane, bundle: Bundle, slot: PutRecordsResultEntry, attempt: Attempt) -> None:
        assert slot.shard_id is not None
        assert slot.sequence_number is not None
        bundle.attempts = (*bundle.attempts, attempt)
        pace = self._routing.pace_of(slot.shard_id) or lane.queue.pace
        if pace is None:
            self._refused_share.add_accepted()
        else:
            pace.on_accepted()
        if self._routing.is_ordered and not lane.follows(slot.shard_id, slot.sequence_number):
            self.notify(
                OrderUnconfirmed(stream=self._stream, shard_id=slot.shard_id, sequence_number=slot.sequence_number)
            )
        self._placement.deliver(bundle, slot.shard_id, slot.sequence_number)

    def _send_again(self, lane: Lane, bundle: Bundle, action: Next, now_ms: int, *, is_alone: bool) -> None:
        if action is Next.SEND_APART:
            self.notify(AggregateStraddled(stream=self._stream, record_count=len(bundle.records)))
        if action is Next.SEND_APART or lane.is_retired:
            self._placement.place_first(list(bundle.records), bundle, now_ms)
        elif action is Next.BISECT and is_alone:
            self._placement.halve(lane, bundle, now_ms)
        else:
            lane.closed_bundles.appendleft(bundle)

    def _rest(self, lane: Lane, bundle: Bundle, slot: PutRecordsResultEntry, pause: Pause, now_ms: int) -> None:
        if pause is Pause.STREAM or pause is Pause.NONE:
            return
        shard_id = refused_shard_id(slot.error_message)
        if shard_id is None and bundle.predicted is not None:
            shard_id = bundle.predicted.shard_id
        pace = self._routing.pace_of(shard_id) or lane.queue.pace
        if pause is not Pause.SHARD:
            (self._refused_share if pace is None else pace.refused_share).add_refused()
            is_throttled = pause is Pause.SHARD_IF_MOST_SLOWER
            self._refused.append(_Refused(pace, shard_id, is_throttled, len(bundle.attempts)))
        elif pace is not None:
            pace.rest(now_ms, self._entropy)
        else:
            self._rest_stream(now_ms)

    def _rest_refusing_shards(self, now_ms: int) -> None:
        """After all records of a call were judged: one of many that was refused says little about its shard."""
        by_pace: dict[ShardPace | None, list[_Refused]] = {}
        for refused in self._refused:
            by_pace.setdefault(refused.pace, []).append(refused)
        self._refused.clear()
        for pace, records in by_pace.items():
            throttled = [refused for refused in records if refused.is_throttled]
            if pace is None:
                # One full shard among many does not show in the share, but its records are refused again and again.
                is_stubborn = any(refused.attempt_count >= ATTEMPTS_BEFORE_REST for refused in records)
                if is_stubborn or self._refused_share.is_most:
                    self._rest_stream(now_ms)
            elif not throttled:
                pace.on_failed(now_ms, self._entropy)
            elif pace.on_refused(now_ms, self._entropy, len(throttled)):
                share_percent = round(pace.factor * 100)
                shard_id = throttled[-1].shard_id
                self.notify(WriteThrottled(stream=self._stream, shard_id=shard_id, share_percent=share_percent))

    def _rest_stream(self, now_ms: int) -> None:
        """No shard is known that could rest alone: the stream does, for as long as a shard would at first."""
        self.paused_until_ms = max(self.paused_until_ms, now_ms + STREAM_PAUSE_MIN_MS)

    def _learn(self, bundle: Bundle, slot: PutRecordsResultEntry, now_ms: int) -> None:
        shard_id = slot.shard_id or refused_shard_id(slot.error_message)
        predicted = bundle.predicted
        if predicted is not None and shard_id is not None and shard_id != predicted.shard_id:
            self._routing.shard_map.learn(predicted, bundle.records[0].digest, shard_id, now_ms)

    def _follow_map(self, now_ms: int) -> None:
        self._placement.place_last(self._routing.rebase(now_ms), now_ms)

    # failures

    def fail_followers(self, failed: list[OutgoingRecord], now_ms: int) -> None:
        """Later records of the same keys, where order is kept and failures wait to be seen."""
        if not self._placement.failures.blocks_keys:
            return
        keys = {record.partition_key for record in failed}
        lanes = self._routing.lanes_of(failed)
        attempt = self.own_attempt(OURS.ORDER, ORDER_MESSAGE, now_ms)
        self._placement.fail_where(lanes, lambda record: record.partition_key in keys, attempt)
        self._routing.discard_empty()

    def give_up(self, is_doomed: Callable[[OutgoingRecord], bool], attempt: Attempt, now_ms: int) -> None:
        """Fails what waits for the map, without knowing where it is."""
        for waiting in [entry for entry in self._undecided if is_doomed(entry.bundle.records[0])]:
            self._undecided.remove(waiting)
            waiting.bundle.attempts = (*waiting.bundle.attempts, waiting.attempt)
            self._placement.fail(waiting.bundle, attempt, maybe_written=True)
            self._routing.land(waiting.lane, now_ms)

    def own_attempt(self, code: str, message: str, now_ms: int) -> Attempt:
        """An end that the service knows nothing of."""
        return Attempt(
            started_seconds=(now_ms + self.wall_offset_ms) / 1_000, duration_seconds=0.0, code=code, message=message
        )

    @staticmethod
    def _attempt(call: Call, now_ms: int, code: str | None, message: str | None, request_id: str | None) -> Attempt:
        return Attempt(
            started_seconds=call.started_seconds,
            duration_seconds=(now_ms - call.started_ms) / 1_000,
            code=code,
            message=message,
            request_id=request_id,
        )
