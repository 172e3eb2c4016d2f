"""Lanes: records that must follow one another, and where they queue.

A lane is a shard (its range of hash keys) where records are aggregated by shard, and a partition key otherwise.
With `order="key"` at most one Kinesis record of a lane is in flight, and a lane has one entry in a call at most, so
neither a partial failure nor two calls that overtake each other can change the order of a key. What failed goes
first again.

A lane belongs to one queue: that of the shard it is predicted for, which sets the pace, or the queue without a shard.
"""

from collections import deque

from anabranch._core.writing.aggregation import Bundle
from anabranch._core.writing.limiter import ShardPace
from anabranch._core.writing.shard_map import MappedShard

__all__ = ["Lane", "LaneId", "ShardQueue"]

LaneId = str | tuple[str, str] | MappedShard | None
"""A partition key, one with its explicit hash key, a shard, or nothing: the lane of all records that have no order."""


class ShardQueue:
    """The lanes of one shard that have something to send, in the order in which they got it."""

    __slots__ = ("is_listed", "pace", "ready", "shard")

    def __init__(self, shard: MappedShard | None, pace: ShardPace | None) -> None:
        self.shard = shard
        self.pace = pace
        """None where no shard is known: then nothing is known about its load either."""
        self.ready: deque[Lane] = deque()
        self.is_listed = False
        """Whether it stands among the queues to be served."""


class Lane:
    __slots__ = (
        "closed_bundles",
        "digest",
        "grows",
        "in_flight",
        "is_ready",
        "is_retired",
        "lane_id",
        "last_sequence_number",
        "last_shard_id",
        "open",
        "queue",
        "waits",
    )  # fmt: skip

    def __init__(self, lane_id: LaneId, digest: bytes | None, queue: ShardQueue, *, grows: bool) -> None:
        self.lane_id = lane_id
        self.digest = digest
        """The hash key of a key's lane; None for a shard's."""
        self.queue = queue
        self.grows = grows
        """Whether its records are aggregated."""
        self.open: Bundle | None = None
        self.closed_bundles: deque[Bundle] = deque()
        """They grow no more; each goes before the open one."""
        self.in_flight = 0
        self.waits = 0
        """Lanes that held some of its keys before a reshard and have not drained: until then it sends nothing."""
        self.is_ready = False
        self.is_retired = False
        """Its keys belong to other lanes now; it ends with what it has in flight."""
        self.last_shard_id: str | None = None
        self.last_sequence_number = ""

    @property
    def is_empty(self) -> bool:
        return self.open is None and not self.closed_bundles and not self.in_flight

    @property
    def is_loaded(self) -> bool:
        """Something goes before the open bundle."""
        return bool(self.closed_bundles or self.in_flight)

    def head(self) -> Bundle | None:
        return self.closed_bundles[0] if self.closed_bundles else self.open

    def waits_since_ms(self, now_ms: int) -> int:
        """When the oldest of its unsent records was put; now, if there is none."""
        head = self.head()
        return now_ms if head is None else head.records[0].put_ms

    def close_bundle(self) -> None:
        if self.open is not None:
            self.closed_bundles.append(self.open)
            self.open = None

    def launch(self) -> Bundle:
        """Takes the head into flight."""
        if self.closed_bundles:
            bundle = self.closed_bundles.popleft()
        else:
            assert self.open is not None
            bundle, self.open = self.open, None
        bundle.predicted = self.queue.shard  # it may have waited through a reshard
        self.in_flight += 1
        bundle.in_flight = True
        return bundle

    def take_unsent(self) -> list[Bundle]:
        self.close_bundle()
        unsent = list(self.closed_bundles)
        self.closed_bundles.clear()
        return unsent

    def follows(self, shard_id: str, sequence_number: str) -> bool:
        """Notes where its newest record is; False if the service numbered it before an older one of the lane."""
        previous = self.last_sequence_number if shard_id == self.last_shard_id else ""
        self.last_shard_id, self.last_sequence_number = shard_id, sequence_number
        # Decimal numbers without leading zeros: the longer one is larger.
        return (len(previous), previous) < (len(sequence_number), sequence_number)
