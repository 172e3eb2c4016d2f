"""One shard's subscription (enhanced fan-out) as a table of states and moves: when to subscribe, where, and what
follows when a subscription ends.

| state       | meaning                                                                        | read by      |
|-------------|--------------------------------------------------------------------------------|--------------|
| waiting     | subscribes at `due_at_ms`                                                      | nothing      |
| subscribing | the request is sent                                                            | nothing      |
| active      | the service accepted it and pushes events                                      | subscription |
| taken_over  | another subscription replaced it; a heartbeat must prove the lease (rule F3)   | nothing      |
| full        | closed, because the byte budget had no room (rule B3)                          | nothing      |
| polled      | subscriptions fail, so the shard is polled; subscribes again at `due_at_ms`    | polling      |
| probing     | as polled, and the request is sent                                             | polling      |
| closed      | nothing may be read now: paused, or being handed over                          | nothing      |
| ended       | the shard was read to its end; final                                           | nothing      |

The read position is not here: it belongs to the session and moves in the step that accepts an event. A continuation is
only an argument for the next subscription, stored in that same step (rule F1).
"""

from typing import Final, Literal, TypeAlias

from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch._model.streams import Position, StartingPosition, after_sequence_number
from anabranch.budget import READ_RESERVE_BYTES
from anabranch.errors import (
    AccessDeniedError,
    AnabranchError,
    InvalidRequestError,
    ResourceInUseError,
    ServiceError,
    StreamNotFoundError,
    ThrottledError,
)
from anabranch.limits import SUBSCRIPTION_TAKE_OVER_MS
from anabranch.reasons import (
    ConsumerMissing,
    ConsumerNameShared,
    Reason,
    StreamKeyDenied,
    SubscriptionDenied,
    SubscriptionFailing,
    SubscriptionInUse,
    SubscriptionTakenOver,
)

State = Literal["waiting", "subscribing", "active", "taken_over", "full", "polled", "probing", "closed", "ended"]
Move = Literal[
    "subscribe", "accept", "retry", "poll", "take_over", "prove", "fill", "find_room", "close", "open", "end"
]

MOVES: Final[dict[State, dict[Move, State]]] = {
    "waiting": {"subscribe": "subscribing", "close": "closed", "end": "ended"},
    "subscribing": {"accept": "active", "retry": "waiting", "poll": "polled", "close": "closed", "end": "ended"},
    "active": {
        "retry": "waiting",
        "poll": "polled",
        "take_over": "taken_over",
        "fill": "full",
        "close": "closed",
        "end": "ended",
    },
    "taken_over": {"prove": "waiting", "poll": "polled", "close": "closed", "end": "ended"},
    "full": {"find_room": "waiting", "close": "closed", "end": "ended"},
    "polled": {"subscribe": "probing", "close": "closed", "end": "ended"},
    "probing": {"accept": "active", "retry": "polled", "poll": "polled", "close": "closed", "end": "ended"},
    "closed": {"open": "waiting", "close": "closed", "end": "ended"},
    "ended": {"end": "ended", "close": "ended"},
}
"""A move that is not in the table is a bug, and raises KeyError."""

Outcome: TypeAlias = Literal[
    "expired", "broken", "silent", "in_use", "throttled", "failed", "denied", "key_denied", "missing", "rejected"
]
"""How a subscription ended, or why it was not accepted:

- expired: the service ended it in the usual way, after five minutes;
- broken: no answer, or the connection or a message broke; silent: no event for too long;
- in_use: ResourceInUse; throttled: over a quota; failed: a failure inside the service;
- denied: no permission to subscribe; key_denied: a KMS key cannot be used;
- missing: the service does not know the consumer or the shard; rejected: it does not accept the position.
"""

CALL_EVERY_MS: Final = 1_000
"""AWS allows one SubscribeToShard per second for each consumer and shard (rule F7)."""
IN_USE_RETRY_MS: Final = 1_000
"""A longer pause would only delay the new owner after a hand-off."""
FIRST_PAUSE_MS: Final = 2_000
PAUSE_MAX_MS: Final = 60_000
JITTER: Final = 0.1
POLLED_AFTER_FAILURES: Final = 3
BREAKS_MS: Final = 120_000
"""Three breaks within this time are a failure, even after events: three half-open connections in a row take 90 s."""
POLLED_MS: Final = 300_000
"""How long a shard is polled if subscribing again soon cannot help."""
TAKE_OVERS_MAX: Final = 3
TAKE_OVERS_MS: Final = 60_000
SILENT_AFTER_MS: Final = 30_000
"""The service sends an event every five seconds, an empty one if there are no records (rule F7)."""
FULL_AFTER_MS: Final = 10_000
"""How long an event may wait for the byte budget before its subscription is closed (rule B3)."""
SPREAD_STEP_MS: Final = 200
SPREAD_MAX_MS: Final = 3_000


def first_at_ms(now_ms: int, last_at_ms: int | None, entropy: Entropy) -> int:
    """When a new owner subscribes. First subscriptions are spread over time, so that renewals are too (rule F4). A
    single shard does not wait. `last_at_ms`: the latest time that was given to another shard.
    """
    if last_at_ms is None or (at_ms := last_at_ms + SPREAD_STEP_MS) <= now_ms:
        return now_ms
    return at_ms if at_ms <= now_ms + SPREAD_MAX_MS else now_ms + round(SPREAD_MAX_MS * entropy.random())


def event_reserve_bytes(frame_bytes: int) -> int:
    """Room for an event's JSON text and its records; not more than one read needs, for which every budget has room."""
    return min(READ_RESERVE_BYTES, 3 * frame_bytes)


def outcome_of(error: AnabranchError) -> Outcome:
    """What an error of SubscribeToShard means, as its answer or inside its stream."""
    match error:
        case ResourceInUseError():
            return "in_use"
        case ThrottledError():
            return "throttled"
        case ServiceError() if error.code.startswith("KMS"):
            return "key_denied"
        case AccessDeniedError():
            return "denied"
        case StreamNotFoundError():
            return "missing"
        case InvalidRequestError():
            return "rejected"
        case ServiceError():
            return "failed"
        case _:
            return "broken"


class Subscription:
    def __init__(self, consumer_name: str, due_at_ms: int) -> None:
        self._consumer_name = consumer_name
        self.state: State = "waiting"
        self.due_at_ms = due_at_ms
        """When to subscribe, while waiting or polled."""
        self.reason: Reason | None = None
        """Why it is not active; None if it is, or is about to be."""
        self.since_ms: int | None = None
        """When the present subscription was accepted; None if there is none."""
        self.renewal_count = 0
        self.event_at_ms: int | None = None
        """When the last event was accepted."""
        self.failure_count = 0
        """In a row, without an event."""
        self._continuation: int | None = None
        self._rejected_count = 0
        """How many of the possible starting positions the service rejected. They are tried from the best on."""
        self._called_at_ms: int | None = None
        self._accepted_at_ms: int | None = None
        self._listens_since_ms: int | None = None
        """Since when an event could have come; None while there is no room for one."""
        self._had_event = False
        self._taken_over_ms: tuple[int, ...] = ()
        self._broken_ms: tuple[int, ...] = ()

    @property
    def is_polled(self) -> bool:
        return self.state in {"polled", "probing"}

    @property
    def is_due(self) -> bool:
        """Whether it subscribes when `due_at_ms` has come."""
        return self.state in {"waiting", "polled"}

    @property
    def silent_at_ms(self) -> int | None:
        """When the connection counts as dead, if no event comes before. None while we accept no data."""
        since_ms = self._listens_since_ms
        return None if self.state != "active" or since_ms is None else since_ms + SILENT_AFTER_MS

    @property
    def positions_are_used_up(self) -> bool:
        """The service rejected every position that could be right: perhaps the shard is gone."""
        return self._rejected_count >= 3

    def _move(self, move: Move) -> None:
        self.state = MOVES[self.state][move]
        if self.state != "active":
            self.since_ms = None

    # subscribing

    def starting_position(
        self, read_after: Position | None, last_record: StartingPosition, checkpoint: StartingPosition
    ) -> StartingPosition:
        """The continuation, if reading has not passed it. If the service rejects that: the last record, then the
        checkpoint (rule F1).
        """
        continuation = self._continuation
        is_ahead = continuation is not None and (read_after is None or continuation >= read_after.sequence_number)
        if is_ahead and self._rejected_count == 0:
            return after_sequence_number(str(continuation))
        return last_record if self._rejected_count <= 1 else checkpoint

    def begin(self, now_ms: int) -> None:
        """SubscribeToShard is called now."""
        self._move("subscribe")
        self._called_at_ms = now_ms
        self._had_event = False

    def accept(self, now_ms: int) -> None:
        """The service accepted it. The time without events counts from now."""
        self._move("accept")
        self.since_ms = self._accepted_at_ms = self._listens_since_ms = now_ms

    def receive(self, continuation: str | None, now_ms: int) -> None:
        """An event was accepted. Call it in the step that adds its records to the session (rule F1)."""
        self.event_at_ms = self._listens_since_ms = now_ms
        self.failure_count = self._rejected_count = 0
        self.reason = None
        self._had_event = True
        if continuation is not None:
            self._continuation = max(int(continuation), self._continuation or 0)

    def hold(self) -> None:
        """The next event waits for room, so its absence does not count as silence."""
        self._listens_since_ms = None

    def listen(self, now_ms: int) -> None:
        """There is room for the next event."""
        self._listens_since_ms = now_ms

    # ending

    def end(self, outcome: Outcome, error: str, now_ms: int, entropy: Entropy) -> None:
        """The subscription ended, or was not accepted."""
        was_active = self.state == "active"
        match outcome:
            case "expired" if self._had_event:
                self.renewal_count += 1
                self._retry(now_ms, 0)
            case "broken" | "silent" | "failed" if self._had_event:
                self._break(outcome, error, now_ms, entropy)
            case "expired" | "broken" | "silent" | "failed":
                self._fail(error, now_ms, entropy)
            case "in_use" if was_active:
                self._move("take_over")
                self._taken_over_ms = (*(at for at in self._taken_over_ms if at > now_ms - TAKE_OVERS_MS), now_ms)
                self.reason = SubscriptionTakenOver()
            case "in_use":
                self._poll(SubscriptionInUse(error=error), now_ms, IN_USE_RETRY_MS)
            case "throttled":
                pause_ms = self._next_pause_ms(entropy)
                self.reason = SubscriptionFailing(error=error, failure_count=self.failure_count)
                if was_active:  # a KMS error: polling would get it, too
                    self._retry(now_ms, pause_ms)
                else:
                    self._poll(self.reason, now_ms, pause_ms)
            case "denied":
                self._poll(SubscriptionDenied(error=error), now_ms, POLLED_MS)
            case "key_denied":
                self.reason = StreamKeyDenied(error=error)
                self._retry(now_ms, self._next_pause_ms(entropy))
            case "missing":
                missing = ConsumerMissing(consumer=self._consumer_name, error=error)
                self._poll(missing, now_ms, self._next_pause_ms(entropy))
            case "rejected":
                self._reject(error, now_ms, entropy)

    def _reject(self, error: str, now_ms: int, entropy: Entropy) -> None:
        """Counts two positions if there was no continuation: then the last record's position was rejected."""
        self._rejected_count += 1 if self._continuation is not None or self._rejected_count else 2
        self._continuation = None
        if self.positions_are_used_up:
            self._fail(error, now_ms, entropy)
        else:
            self._retry(now_ms, 0)

    def _break(self, outcome: Outcome, error: str, now_ms: int, entropy: Entropy) -> None:
        """It ended unexpectedly, after events. A single break is no reason to wait; many are a failure."""
        self._broken_ms = (*(at for at in self._broken_ms if at > now_ms - BREAKS_MS), now_ms)
        if outcome != "failed" and len(self._broken_ms) < POLLED_AFTER_FAILURES:
            self._retry(now_ms, 0)
        else:
            self.failure_count = len(self._broken_ms) - 1
            self._fail(error, now_ms, entropy)

    def _fail(self, error: str, now_ms: int, entropy: Entropy) -> None:
        pause_ms = self._next_pause_ms(entropy)
        self.reason = SubscriptionFailing(error=error, failure_count=self.failure_count)
        if self.failure_count >= POLLED_AFTER_FAILURES:
            self._poll(self.reason, now_ms, pause_ms)
        else:
            self._retry(now_ms, pause_ms)

    def _next_pause_ms(self, entropy: Entropy) -> int:
        """Counts a failure. 2 s, doubling to 60 s, and up to a tenth more (rule F7)."""
        self.failure_count += 1
        more = 1 + JITTER
        return backoff_ms(
            self.failure_count, entropy, first_ms=FIRST_PAUSE_MS * more, max_ms=PAUSE_MAX_MS * more, min_share=1 / more
        )

    def _retry(self, now_ms: int, pause_ms: int) -> None:
        self._move("retry")
        self._set_due(now_ms + pause_ms)

    def _poll(self, reason: Reason, now_ms: int, pause_ms: int) -> None:
        self._move("poll")
        self.reason = reason
        self._set_due(now_ms + pause_ms)

    def _set_due(self, at_ms: int) -> None:
        called_ms = self._called_at_ms
        self.due_at_ms = at_ms if called_ms is None else max(at_ms, called_ms + CALL_EVERY_MS)

    # between two subscriptions

    def prove(self, heartbeat_sent_ms: int, now_ms: int) -> bool:
        """A heartbeat that was sent at that time is acknowledged. True if it proves that the lease is still ours after
        the take-over. If this happens again and again, another fleet uses the same consumer (rule F3).
        """
        if self.state != "taken_over" or heartbeat_sent_ms <= self._taken_over_ms[-1]:
            return False
        if len(self._taken_over_ms) >= TAKE_OVERS_MAX:
            self._taken_over_ms = ()
            self._poll(ConsumerNameShared(consumer=self._consumer_name), now_ms, POLLED_MS)
        else:
            self._move("prove")
            self._set_due(now_ms)
        return True

    def fill(self) -> None:
        """The byte budget had no room for an event for too long (rule B3)."""
        self._move("fill")

    def find_room(self, now_ms: int) -> None:
        """There is room again. Sooner than five seconds after it was accepted, the service would refuse another."""
        self._move("find_room")
        self._set_due(max(now_ms, (self._accepted_at_ms or 0) + SUBSCRIPTION_TAKE_OVER_MS))

    def close(self) -> None:
        """Nothing may be read now."""
        self._move("close")

    def open(self, now_ms: int) -> None:
        """Reading continues."""
        self._move("open")
        self._set_due(now_ms)

    def finish(self) -> None:
        """The shard was read to its end."""
        self._move("end")
        self.reason = None

    def subscribe_soon(self, now_ms: int) -> None:
        """The cause of the failure is repaired: subscribes as soon as the service allows."""
        if self.is_due:
            self._set_due(min(self.due_at_ms, now_ms))
