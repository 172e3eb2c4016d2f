"""One SubscribeToShard: which events a consumer gets and when, without a socket.

`poll` returns one event at a time, so nothing is buffered here. A subscription ends without an event after its
lifetime, with ChildShards and no continuation at the end of its shard, and with an exception if another call took it
over or its stream or consumer was deleted.

An event is due at once if there are records, otherwise after HEARTBEAT_MS. Its ContinuationSequenceNumber is above all
records that were sent and below all that follow, so a client may continue AT it or AFTER it.
"""

from typing import Any, Final, NamedTuple

from anabranch import limits
from anabranch.local.errors import LocalError
from anabranch.local.settings import LocalSettings
from anabranch.local.state.identifiers import COUNTER_MAX, COUNTER_SHIFT
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Consumer, Stream
from anabranch.local.state.throughput import TokenBucket

HEARTBEAT_MS: Final = 5_000
_EVENT_BYTES_MAX: Final = 1 * limits.MIB
_EVENT_RECORDS_MAX: Final = 1_000


class SubscriptionEvent(NamedTuple):
    type: str
    """SubscribeToShardEvent, or the code of the exception that ends the subscription."""
    members: dict[str, Any]

    @property
    def is_exception(self) -> bool:
        return self.type != "SubscribeToShardEvent"


class Subscription:
    def __init__(
        self, settings: LocalSettings, stream: Stream, consumer: Consumer, shard: Shard, position: int, now_ms: int
    ) -> None:
        self._settings = settings
        self._stream = stream
        self._shard = shard
        self.stream_name = stream.name
        self.consumer_arn = consumer.arn
        self.shard_id = shard.shard_id
        self._position = position
        self._error: LocalError | None = None
        self._started_ms = now_ms
        self._next_heartbeat_ms = now_ms  # the first event is due at once
        self._bucket = TokenBucket(limits.SHARD_READ_BYTES_PER_SECOND) if settings.limits == "aws" else None
        self._resumes_ms: int | None = None  # when a consumer that used up its 2 MiB per second gets more
        self.is_over = False

    def is_fresh(self, now_ms: int) -> bool:
        """Too new to be taken over."""
        return now_ms - self._started_ms < self._settings.scaled_ms(limits.SUBSCRIPTION_TAKE_OVER_MS)

    @property
    def next_deadline_ms(self) -> int:
        """When to poll again if the shard does not change before."""
        deadline_ms = min(self._ends_ms, self._next_heartbeat_ms)
        return deadline_ms if self._resumes_ms is None else min(deadline_ms, self._resumes_ms)

    def poll(self, now_ms: int) -> SubscriptionEvent | None:
        if self.is_over:
            return None
        if self._error is not None:
            self.is_over = True
            return SubscriptionEvent(self._error.code, {"message": self._error.message})
        if now_ms >= self._ends_ms:
            self.is_over = True
            return None
        return self._next_event(now_ms)

    def end(self, error: LocalError) -> None:
        """The next poll returns the error as the last event."""
        self._error = error

    def close(self) -> None:
        """The client disconnected."""
        self.is_over = True

    @property
    def _ends_ms(self) -> int:
        return self._started_ms + self._settings.scaled_ms(limits.SUBSCRIPTION_LIFETIME_MS)

    def _next_event(self, now_ms: int) -> SubscriptionEvent | None:
        shard, log = self._shard, self._shard.log
        log.trim(self._stream.horizon_ms(now_ms, self._settings.time_scale))
        begin = end = log.index_at(self._position)
        self._resumes_ms = None
        if self._bucket is None or self._bucket.level(now_ms) > 0:
            end = log.end_of_read(begin, _EVENT_RECORDS_MAX, _EVENT_BYTES_MAX)
        elif begin < len(log.numbers):
            self._resumes_ms = self._bucket.ready_ms(now_ms)
        is_at_tip = end == len(log.numbers)
        is_end = is_at_tip and not shard.is_open
        if begin == end and not is_end and now_ms < self._next_heartbeat_ms:
            return None
        if self._bucket is not None:
            self._bucket.charge(log.bytes_between(begin, end), now_ms)
        self._next_heartbeat_ms = now_ms + self._settings.scaled_ms(HEARTBEAT_MS)
        members: dict[str, Any] = {"Records": log.records[begin:end]}
        if is_end:
            self.is_over = True
            members["ChildShards"] = self._stream.children_of(shard)
        else:
            if is_at_tip or end > begin:
                counter = shard.counter if is_at_tip else log.numbers[end - 1] >> COUNTER_SHIFT & COUNTER_MAX
                self._position = shard.continuation(counter, now_ms)
            members["ContinuationSequenceNumber"] = str(self._position)
        members["MillisBehindLatest"] = log.behind_ms(end, now_ms)
        return SubscriptionEvent("SubscribeToShardEvent", members)
