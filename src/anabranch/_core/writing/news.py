"""Events about the writes to one stream: progress, at most once a second, and recoveries."""

from collections.abc import Iterator
from typing import Final

from anabranch._core.writing.limiter import ShardPace
from anabranch.events import DeliveryProgress, Event, ListingRecovered, WriteRecovered, WriteUnthrottled
from anabranch.measures import WriteCounters

FLOW_EVERY_MS: Final = 1_000


class WriteNews:
    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._reported = WriteCounters()
        """The state that was last reported."""
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
