"""Lanes hold records until they are sent, and decide the order in which they are sent.

- A lane belongs to a shard (its range of hash keys) if records are aggregated by shard, or neither aggregated nor
  ordered. Otherwise it belongs to a partition key.
- With `order="key"` a lane has at most one Kinesis record in flight, and at most one entry per call. So neither a
  partial failure nor two calls that overtake each other can change the order of a key. Retries go first.
- All unsent records of a key are in one lane, and its next record joins them.
- When a shard leaves the map, its lane is retired. Its unsent records move, in order, to the lanes that own their keys
  now. Its records in flight stay, and the new lanes send nothing until those are resolved (`blocker_count`). So a key
  never has two records in flight, however its shards change.
- Until the shards are listed, no shard can be predicted: with order, each key has its own lane, and each record is
  sent on its own.
- Each lane is in one queue: that of its predicted shard, which limits the rate, or the queue for unknown shards. With
  limits set by the user, that queue has the rate of one shard.
- A call takes the first bundle of each lane, from one queue after the other. It has at most 500 entries and 10 MiB (API
  limits). It has at most 256 KiB per shard, unless a single record is larger: a shard that gets a full second's quota
  in one call throttles part of it. A queue that is over its rate is skipped, and does not delay the others.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from anabranch._core.writing.bundles import (
    AGGREGATE_BYTES,
    AGGREGATE_BYTES_BUSY,
    RECORD_COST_BYTES,
    Bundle,
    OutgoingRecord,
    UnseenFailures,
    WriteOptions,
)
from anabranch._core.writing.limiter import ShardPace
from anabranch._core.writing.shard_map import HIGHEST, LOWEST, MappedShard, ShardMap, digest_of_hash_key
from anabranch._model.entropy import Entropy
from anabranch._model.hash_keys import check_partition_key, md5_digest, parse_hash_key
from anabranch._wire.messages import PutRecordsEntry
from anabranch.limits import KIB, PUT_RECORDS_BYTES_MAX, PUT_RECORDS_ENTRIES_MAX
from anabranch.measures import WriteCounters
from anabranch.records import Attempt

REMEMBERED_KEYS_MAX: Final = 1 << 16
SHARD_BYTES_PER_CALL_MAX: Final = 256 * KIB
_GROWTH_BYTES: Final = AGGREGATE_BYTES_BUSY - AGGREGATE_BYTES


class LocalCode:
    """Codes of attempts that failed in the producer, not in the service."""

    TIMEOUT: Final = "DeliveryTimeout"
    """The attempt was not made: the record's delivery timeout had passed."""
    ORDER: Final = "OrderKept"
    CLOSED: Final = "ProducerClosed"
    FAILED: Final = "ProducerFailed"
    BROKEN: Final = "AnswerBroken"
    WRONG_SHARD: Final = "Wrong Shard"
    """The KPL's term for an aggregate that landed in a shard where not all of its records belong."""


LaneKey = str | tuple[str, str]
"""A partition key, with its explicit hash key if it has one."""


def check_keys(partition_key: str, explicit_hash_key: str | None) -> bytes:
    """Returns the digest that selects the shard. Raises ValueError or TypeError for keys that Kinesis would reject."""
    check_partition_key(partition_key)
    if explicit_hash_key is None:
        return md5_digest(partition_key)
    if not isinstance(explicit_hash_key, str):
        raise TypeError(f"explicit_hash_key is {explicit_hash_key!r}; it must be a string of digits, such as '5'")
    return digest_of_hash_key(parse_hash_key(explicit_hash_key))


class ShardQueue(msgspec.Struct, eq=False):
    """The lanes of one shard that can send now, first come first served."""

    shard: MappedShard | None
    pace: ShardPace | None
    """None if the shard is unknown and no limit is set."""
    ready: deque["WriteLane"] = msgspec.field(default_factory=deque)
    is_queued: bool = False
    """Whether it is in `Lanes.ready`."""


class WriteLane(msgspec.Struct, eq=False):
    key: LaneKey | None
    """None if it belongs to a shard, or has unordered records of unknown shards."""
    lowest: bytes
    """The lowest hash key that its records may have."""
    highest: bytes
    queue: ShardQueue
    aggregates: bool
    open_bundle: Bundle | None = None
    closed_bundles: deque[Bundle] = msgspec.field(default_factory=deque)
    """They no longer grow, and are sent before the open one."""
    in_flight: int = 0
    blocker_count: int = 0
    """How many retired lanes have records of its keys in flight. Until they drain, this lane sends nothing."""
    is_queued: bool = False
    """Whether it is in its queue's `ready`."""
    is_retired: bool = False
    """Its keys belong to other lanes now. It ends when nothing of it is in flight."""
    last_shard_id: str | None = None
    last_sequence_number: str = ""

    @property
    def is_empty(self) -> bool:
        return self.open_bundle is None and not self.closed_bundles and not self.in_flight

    def head(self) -> Bundle | None:
        return self.closed_bundles[0] if self.closed_bundles else self.open_bundle

    def oldest_unsent_ms(self, now_ms: int) -> int:
        """When its oldest unsent record was put; now, if there is none."""
        head = self.head()
        return now_ms if head is None else head.records[0].put_ms

    def close_bundle(self) -> None:
        if self.open_bundle is not None:
            self.closed_bundles.append(self.open_bundle)
            self.open_bundle = None

    def launch(self) -> Bundle:
        """Removes the first bundle and marks it as in flight."""
        if self.closed_bundles:
            bundle = self.closed_bundles.popleft()
        else:
            assert self.open_bundle is not None
            bundle, self.open_bundle = self.open_bundle, None
        bundle.predicted = self.queue.shard  # the shard may have changed while the bundle waited
        self.in_flight += 1
        bundle.in_flight = True
        return bundle

    def take_unsent(self) -> list[Bundle]:
        self.close_bundle()
        unsent = list(self.closed_bundles)
        self.closed_bundles.clear()
        return unsent

    def confirm_order(self, shard_id: str, sequence_number: str) -> bool:
        """Remembers the newest delivered record. False if an older one in the same shard has a higher number."""
        is_comparable, previous = shard_id == self.last_shard_id, self.last_sequence_number
        self.last_shard_id, self.last_sequence_number = shard_id, sequence_number
        # Decimal numbers without leading zeros: the longer one is larger.
        return not is_comparable or (len(previous), previous) < (len(sequence_number), sequence_number)


class PutRecordsCall(msgspec.Struct, eq=False):
    """One PutRecords request. `bundles`, `lanes` and `entries` have one item for each entry of the response."""

    started_ms: int
    started_seconds: float
    bundles: list[Bundle] = []
    lanes: list[WriteLane] = []
    entries: list[PutRecordsEntry] = []
    entries_max: int = PUT_RECORDS_ENTRIES_MAX
    size_bytes: int = 0

    def has_room_for(self, bundle: Bundle, size_bytes: int) -> bool:
        count = len(self.entries)
        return not count or (
            count < self.entries_max
            and count < bundle.entries_per_call_max
            and self.size_bytes + size_bytes <= PUT_RECORDS_BYTES_MAX
        )

    def count(self, counted: WriteCounters) -> None:
        """Adds this call, which is about to be sent."""
        counted.request_count += 1
        counted.attempt_count += len(self.bundles)
        for bundle in self.bundles:
            counted.user_attempt_count += len(bundle.records)
            if bundle.attempts:
                counted.retry_count += 1
            else:
                counted.buffering.add(self.started_ms - bundle.records[0].put_ms)

    def append(self, lane: WriteLane, bundle: Bundle, size_bytes: int) -> None:
        self.lanes.append(lane)
        self.bundles.append(bundle)
        self.entries.append(bundle.entry or bundle.freeze())
        self.entries_max = min(self.entries_max, bundle.entries_per_call_max)
        self.size_bytes += size_bytes


_Stop = Literal["empty", "shard_full", "call_full", "rate_limited"]
"""Why a queue adds no more entries to a call."""


class Lanes:
    """All lanes of one stream, the shard map they follow, and the bundles in them or in flight.

    A bundle's epoch is the number of flushes requested before its records were put, so a flush knows when everything
    before it is settled.
    """

    def __init__(self, stream: str, options: WriteOptions, failures: UnseenFailures, entropy: Entropy) -> None:
        self.shard_map = ShardMap(entropy=entropy)
        self.failures = failures
        self.options = options
        self.is_ordered = options.order == "key"
        self.predicts = True
        """False if the service chooses the shard of each record itself."""
        self.lane_of_key: dict[str, WriteLane] = {}
        """Bounded cache of the lanes of keys without an explicit hash key, for the hot path."""
        self.ready: deque[ShardQueue] = deque()
        """Queues with lanes that can send, served in turn."""
        self.epoch = 0
        self.bundles: dict[int, Bundle] = {}
        """By id, from creation until settled or dissolved, in a lane or in flight."""
        self.ended: deque[Bundle] = deque()
        """Delivered, failed or dissolved. The engine takes each one out when it has performed what follows."""
        self.counted = WriteCounters()
        self.shards_counted = defaultdict[str, WriteCounters](WriteCounters)
        """By shard id, including shards that left the map."""
        self._stream = stream
        self._generation = self.shard_map.generation
        self._queues: dict[str | None, ShardQueue] = {}
        self.paces: dict[str, ShardPace] = {}
        """By shard id, of the shards in the map that were written to."""
        self._pace_of_unknown: ShardPace | None = None
        self._shard_lanes: dict[str | None, WriteLane] = {}
        self._key_lanes: dict[LaneKey, WriteLane] = {}
        self._lingering: deque[tuple[WriteLane, Bundle]] = deque()
        """Without order: opened bundles, oldest first. Some may have been sent since."""
        self._draining: list[WriteLane] = []
        """Retired lanes with records in flight."""

    # finding lanes

    def active(self) -> Iterator[WriteLane]:
        """All lanes that are not retired."""
        yield from self._shard_lanes.values()
        yield from self._key_lanes.values()

    def lane_for(self, partition_key: str, explicit_hash_key: str | None, digest: bytes, now_ms: int) -> WriteLane:
        """The lane that this key's next record joins."""
        shard = self.shard_map.predict(digest) if self.predicts else None
        aggregate = self.options.aggregate
        if aggregate == "key" or (self.is_ordered and (aggregate is None or shard is None)):
            key = partition_key if explicit_hash_key is None else (partition_key, explicit_hash_key)
            lane = self._key_lanes.get(key)
            if lane is None:
                queue = self._queue_of(shard, now_ms)
                lane = self._key_lanes[key] = WriteLane(key, digest, digest, queue, self._aggregates_keys)
                self._count_blockers(lane)
            return lane
        shard_id = None if shard is None else shard.shard_id
        lane = self._shard_lanes.get(shard_id)
        if lane is None:
            lowest, highest = (LOWEST, HIGHEST) if shard is None else (shard.start, shard.end)
            aggregates = shard is not None and aggregate is not None
            lane = WriteLane(None, lowest, highest, self._queue_of(shard, now_ms), aggregates)
            self._shard_lanes[shard_id] = lane
            self._count_blockers(lane)
        if explicit_hash_key is None:
            if len(self.lane_of_key) >= REMEMBERED_KEYS_MAX:
                self.lane_of_key.clear()
            self.lane_of_key[partition_key] = lane
        return lane

    def _lane_of(self, record: OutgoingRecord, now_ms: int) -> WriteLane:
        return self.lane_for(record.partition_key, record.explicit_hash_key, record.digest, now_ms)

    def _count_blockers(self, lane: WriteLane) -> None:
        if self.is_ordered:
            lane.blocker_count = sum(_shares_keys(old, lane) for old in self._draining)

    @property
    def _aggregates_keys(self) -> bool:
        """Whether lanes of keys aggregate: not before the first listing, because the service may ignore the keys."""
        return self.options.aggregate == "key" and self.shard_map.updated_at_ms is not None

    def _queue_of(self, shard: MappedShard | None, now_ms: int) -> ShardQueue:
        shard_id = None if shard is None else shard.shard_id
        queue = self._queues.get(shard_id)
        if queue is None:
            pace = self._unknown_pace(now_ms) if shard_id is None else self._pace_of(shard_id, now_ms)
            queue = self._queues[shard_id] = ShardQueue(shard, pace)
        return queue

    def _unknown_pace(self, now_ms: int) -> ShardPace | None:
        """One pace for all unknown shards, because all their records may belong to one shard. None if the user set no
        limit: then the service's throttling is enough. None also if the service chooses the shards: then we cannot know
        how many records a shard gets.
        """
        if not (self.options.is_limited and self.predicts):
            return None
        if self._pace_of_unknown is None:
            self._pace_of_unknown = ShardPace(self.options.settings, now_ms)
        return self._pace_of_unknown

    def _pace_of(self, shard_id: str, now_ms: int) -> ShardPace:
        pace = self.paces.get(shard_id)
        if pace is None:
            pace = self.paces[shard_id] = ShardPace(self.options.settings, now_ms)
            if self._pace_of_unknown is not None:
                pace.spend(*self._pace_of_unknown.spent(now_ms))  # it may all have gone to this shard
        return pace

    def lanes_of(self, records: Iterable[OutgoingRecord]) -> list[WriteLane]:
        """The lanes in which later records of the same keys wait."""
        found: dict[int, WriteLane] = {}
        for record in records:
            key, hash_key = record.partition_key, record.explicit_hash_key
            lane = self._key_lanes.get(key if hash_key is None else (key, hash_key))
            lane = lane or self._shard_lane_of(record.digest)
            if lane is not None:
                found[id(lane)] = lane
        return list(found.values())

    def _shard_lane_of(self, digest: bytes) -> WriteLane | None:
        shard = self.shard_map.predict(digest) if self.predicts else None
        return self._shard_lanes.get(None if shard is None else shard.shard_id)

    def known_pace(self, shard_id: str | None) -> ShardPace | None:
        return None if shard_id is None else self.paces.get(shard_id)

    # order

    def queue_if_ready(self, lane: WriteLane, now_ms: int) -> None:
        """Queues the lane if it has something that may be sent now."""
        if lane.is_queued or lane.is_retired:
            return
        if self.is_ordered:
            if lane.in_flight or lane.blocker_count or lane.is_empty:
                return
        elif not lane.closed_bundles and (
            lane.open_bundle is None or (lane.in_flight and now_ms < lane.open_bundle.due_ms)
        ):
            return
        lane.is_queued = True
        queue = lane.queue
        queue.ready.append(lane)
        if not queue.is_queued:
            queue.is_queued = True
            self.ready.append(queue)

    def end_flight(self, lane: WriteLane, now_ms: int) -> None:
        """A bundle in flight has its outcome. If it is retried, it is at the head of its lane again."""
        lane.in_flight -= 1
        if not lane.is_retired:
            if lane.key is not None and lane.is_empty:
                del self._key_lanes[lane.key]
            else:
                self.queue_if_ready(lane, now_ms)
        elif not lane.in_flight:
            self._on_drained(lane, now_ms)

    def _on_drained(self, old: WriteLane, now_ms: int) -> None:
        self._draining.remove(old)
        if not self.is_ordered:
            return
        if old.key is None:
            blocked = [lane for lane in self.active() if _shares_keys(old, lane)]
        else:
            successors = (self._key_lanes.get(old.key), self._shard_lane_of(old.lowest))
            blocked = [lane for lane in successors if lane is not None]
        for lane in blocked:
            lane.blocker_count -= 1
            self.queue_if_ready(lane, now_ms)

    def stop_ordering(self) -> None:
        """The service chooses the shards itself: we cannot aggregate for a shard, and no key has an order."""
        self.predicts = False
        self.options = msgspec.structs.replace(self.options, aggregate=None)
        self.is_ordered = False
        self._generation = -1  # so that `follow_map` moves all records

    # following the shard map

    def follow_map(self, now_ms: int) -> None:
        """If the map has changed, retires lanes whose shards are gone and moves their unsent records."""
        if self._generation == self.shard_map.generation:
            return
        self._generation = self.shard_map.generation
        self.lane_of_key.clear()
        self.ready.clear()
        self._queues.clear()
        current = {shard.shard_id for shard in self.shard_map.shards}
        self.paces = {shard_id: pace for shard_id, pace in self.paces.items() if shard_id in current}
        displaced: list[Bundle] = []
        shard_lanes, self._shard_lanes = self._shard_lanes, {}
        for shard_id, lane in shard_lanes.items():
            shard = lane.queue.shard
            packs_as_before = lane.aggregates == (self.options.aggregate == "shard")
            if shard is not None and self.shard_map.is_current(shard) and packs_as_before:
                self._shard_lanes[shard_id] = lane
                self._requeue_lane(lane, shard, now_ms)
            else:
                displaced += self._retire(lane)
        for key, lane in list(self._key_lanes.items()):
            shard = self.shard_map.predict(lane.lowest)
            if self._keeps_key_lane(lane, shard):
                lane.aggregates = self._aggregates_keys
                self._requeue_lane(lane, shard, now_ms)
            else:
                del self._key_lanes[key]
                displaced += self._retire(lane)
        self.requeue_last(displaced, now_ms)

    def _keeps_key_lane(self, lane: WriteLane, shard: MappedShard | None) -> bool:
        aggregate = self.options.aggregate
        if aggregate == "key":
            return True
        return self.is_ordered and not lane.aggregates and (aggregate is None or shard is None)

    def _requeue_lane(self, lane: WriteLane, shard: MappedShard | None, now_ms: int) -> None:
        lane.queue = self._queue_of(shard, now_ms)
        lane.is_queued = False
        self.queue_if_ready(lane, now_ms)

    def _retire(self, lane: WriteLane) -> list[Bundle]:
        lane.is_retired = True
        if lane.in_flight:
            self._draining.append(lane)
        return lane.take_unsent()

    # flushing and lingering

    def begin_epoch(self, now_ms: int) -> int:
        """Closes all open bundles, so that they are sent. Returns the epoch of everything put before."""
        for lane in self.active():
            lane.close_bundle()
            self.queue_if_ready(lane, now_ms)
        self.epoch += 1
        return self.epoch - 1

    def is_flushed(self, epoch: int) -> bool:
        return all(bundle.epoch > epoch for bundle in self.bundles.values())  # the oldest comes first

    def end_lingering(self, now_ms: int) -> None:
        """Queues lanes whose open bundles have waited long enough."""
        while self._lingering:
            lane, bundle = self._lingering[0]
            if lane.open_bundle is bundle:
                if bundle.due_ms > now_ms:
                    return
                self.queue_if_ready(lane, now_ms)
            self._lingering.popleft()

    @property
    def lingers_until_ms(self) -> int | None:
        return self._lingering[0][1].due_ms if self._lingering else None

    # bundles

    def _new_bundle(self, lane: WriteLane | None, epoch: int) -> Bundle:
        bundle = Bundle(self._stream, self.options, None if lane is None else lane.queue.shard, epoch)
        self.bundles[id(bundle)] = bundle
        return bundle

    def _end_bundle(self, bundle: Bundle) -> None:
        """The bundle is settled, or dissolved: its records are in other bundles."""
        self.ended.append(bundle)
        del self.bundles[id(bundle)]

    def add(self, lane: WriteLane, record: OutgoingRecord, epoch: int, now_ms: int) -> None:
        """Appends a record to its lane: to the open bundle if it fits, else to a new one."""
        bundle = lane.open_bundle
        if bundle is not None:
            if bundle.epoch == epoch and self._try_pack(lane, bundle, record):
                bundle.append(record)
                return
            lane.close_bundle()
        bundle = self._new_bundle(lane, epoch)
        if lane.aggregates:
            bundle.open_with(record, AGGREGATE_BYTES)
            bundle.due_ms = now_ms + self.options.linger_ms
            lane.open_bundle = bundle
            if not self.is_ordered:
                self._lingering.append((lane, bundle))
        else:
            bundle.append(record)
            lane.closed_bundles.append(bundle)
        self.queue_if_ready(lane, now_ms)

    def _try_pack(self, lane: WriteLane, bundle: Bundle, record: OutgoingRecord) -> bool:
        """Adds the record to the aggregate of the open bundle. False if it does not fit."""
        builder = bundle.builder
        assert builder is not None
        key, data, hash_key, tags = record.partition_key, record.data, record.explicit_hash_key, record.tags
        if builder.add(key, data, hash_key, tags, size_max=bundle.size_max):
            return True
        # A lane that has to wait anyway makes fewer and larger aggregates.
        has_to_wait = lane.closed_bundles or (self.is_ordered and lane.in_flight)
        if not has_to_wait or bundle.size_max > AGGREGATE_BYTES:
            return False
        bundle.size_max += _GROWTH_BYTES
        bundle.due_ms = 0  # it has its normal size: send it as soon as possible
        return builder.add(key, data, hash_key, tags, size_max=bundle.size_max)

    def requeue_first(self, records: Sequence[OutgoingRecord], origin: Bundle, now_ms: int) -> None:
        """Puts records back before all others of their lanes, with the attempts of the bundle they were in."""
        placed = self._divide(records, origin, now_ms)
        for lane, bundle in reversed(placed):
            lane.closed_bundles.appendleft(bundle)
        for lane, _ in placed:
            self.queue_if_ready(lane, now_ms)
        self._end_bundle(origin)

    def requeue_last(self, bundles: Iterable[Bundle], now_ms: int) -> None:
        """Puts records back after all others of their lanes. Bundles that were never sent are packed again."""
        for origin in bundles:
            if origin.attempts:
                for lane, bundle in self._divide(origin.records, origin, now_ms):
                    lane.close_bundle()
                    lane.closed_bundles.append(bundle)
                    self.queue_if_ready(lane, now_ms)
            else:
                for record in origin.records:
                    self.add(self._lane_of(record, now_ms), record, origin.epoch, now_ms)
            self._end_bundle(origin)

    def halve(self, lane: WriteLane, origin: Bundle, now_ms: int) -> None:
        """Replaces a bundle with two halves, at the head of its lane."""
        middle = len(origin.records) // 2
        for part in (origin.records[middle:], origin.records[:middle]):
            lane.closed_bundles.appendleft(self._part_of(lane, origin, part))
        self.queue_if_ready(lane, now_ms)
        self._end_bundle(origin)

    def _divide(self, records: Sequence[OutgoingRecord], origin: Bundle, now_ms: int) -> list[tuple[WriteLane, Bundle]]:
        """Puts the records of a bundle into new ones, one or more for each of their current lanes."""
        groups: dict[int, tuple[WriteLane, list[OutgoingRecord]]] = {}
        placed: list[tuple[WriteLane, Bundle]] = []
        for record in records:
            lane = self._lane_of(record, now_ms)
            if lane.aggregates:
                groups.setdefault(id(lane), (lane, []))[1].append(record)
            else:
                placed.append((lane, self._part_of(lane, origin, [record])))
        placed += [(lane, self._part_of(lane, origin, group)) for lane, group in groups.values()]
        return placed

    def _part_of(self, lane: WriteLane, origin: Bundle, records: Sequence[OutgoingRecord]) -> Bundle:
        """A new bundle with these records of another one, and with its attempts."""
        bundle = self._new_bundle(lane, origin.epoch)
        bundle.attempts = origin.attempts
        bundle.maybe_written = origin.maybe_written
        bundle.entries_per_call_max = origin.entries_per_call_max
        for record in records:
            bundle.append(record)
        return bundle

    # outcomes

    def deliver(self, bundle: Bundle, shard_id: str, sequence_number: str) -> None:
        assert not bundle.is_settled
        bundle.is_settled = True
        bundle.shard_id, bundle.sequence_number = shard_id, sequence_number
        count, entry = len(bundle.records), bundle.freeze()
        for counted in (self.counted, self.shards_counted[shard_id]):
            counted.delivered_count += count
            counted.delivered_bytes += bundle.cost_bytes - count * RECORD_COST_BYTES
            counted.aggregated_count += count if bundle.is_aggregate else 0
            counted.kinesis_count += 1
            counted.kinesis_bytes += len(entry.data)
        self._end_bundle(bundle)

    def fail(self, bundle: Bundle, attempt: Attempt, *, maybe_written: bool = False) -> None:
        self._mark_failed(bundle, attempt, maybe_written=maybe_written)
        self._end_bundle(bundle)

    def _mark_failed(self, bundle: Bundle, attempt: Attempt, *, maybe_written: bool) -> None:
        assert not bundle.is_settled
        bundle.is_settled = True
        bundle.maybe_written = bundle.maybe_written or maybe_written
        bundle.attempts = (*bundle.attempts, attempt)
        bundle.failures = self.failures
        self.failures.add(record for record in bundle.records if record.bundle is bundle)  # others were moved meanwhile
        self.counted.failed_count += len(bundle.records)
        if attempt.code == LocalCode.TIMEOUT:
            self.counted.expired_count += len(bundle.records)

    def fail_all(self, attempt: Attempt) -> None:
        """Fails everything, for good. Does not use the lanes: an unexpected error may have left them in any state."""
        for bundle in self.bundles.values():
            if not bundle.is_settled:
                self._mark_failed(bundle, attempt, maybe_written=bundle.in_flight)
            self.ended.append(bundle)
        self.bundles.clear()

    def fail_new(self, record: OutgoingRecord, attempt: Attempt) -> None:
        """Fails a record that has never been in a lane."""
        bundle = self._new_bundle(None, self.epoch)
        bundle.append(record)
        self.fail(bundle, attempt)

    def fail_unsent(
        self, lanes: Iterable[WriteLane], should_fail: Callable[[OutgoingRecord], bool], attempt: Attempt
    ) -> list[OutgoingRecord]:
        """Fails and returns the matching unsent records. The others stay in their lanes."""
        failed: list[OutgoingRecord] = []
        for lane in lanes:
            kept: list[Bundle] = []
            for origin in lane.take_unsent():
                failing = [record for record in origin.records if should_fail(record)]
                others = [record for record in origin.records if not should_fail(record)]
                failed += failing
                if not failing:
                    kept.append(origin)
                elif not others:
                    self.fail(origin, attempt)
                else:
                    kept.append(self._part_of(lane, origin, others))
                    self.fail(self._part_of(lane, origin, failing), attempt)
                    self._end_bundle(origin)
            lane.closed_bundles.extend(kept)
            if lane.key is not None and lane.is_empty:
                del self._key_lanes[lane.key]
        return failed

    # calls

    def collect(self, now_ms: int, wall_ms: int, calls_max: int) -> tuple[list[PutRecordsCall], int | None]:
        """The calls to start now, and when the first rate-limited queue may send again."""
        calls: list[PutRecordsCall] = []
        wake_at_ms: int | None = None
        waiting, rate_limited = self.ready, deque[ShardQueue]()
        while waiting and len(calls) < calls_max:
            call = PutRecordsCall(now_ms, wall_ms / 1_000)
            for_next_call: deque[ShardQueue] = deque()
            while waiting:
                queue = waiting.popleft()
                stop, open_at_ms = self._fill(call, queue, now_ms)
                if stop == "rate_limited":
                    rate_limited.append(queue)
                    wake_at_ms = open_at_ms if wake_at_ms is None else min(wake_at_ms, open_at_ms)
                elif stop != "empty":
                    for_next_call.append(queue)
                if stop == "call_full":
                    break
            waiting.extend(for_next_call)
            if call.entries:
                call.count(self.counted)
                calls.append(call)
        waiting.extend(rate_limited)
        return calls, wake_at_ms

    def _fill(self, call: PutRecordsCall, queue: ShardQueue, now_ms: int) -> tuple[_Stop, int]:
        """Adds entries of one queue. Returns why it stopped, and when a rate-limited queue may send again."""
        pace, ready = queue.pace, queue.ready
        shard_bytes = 0
        while ready:
            lane = ready[0]
            bundle = lane.head()
            if bundle is None:  # its records failed while it was queued
                ready.popleft().is_queued = False
                continue
            size_bytes = bundle.entry_bytes
            if pace is not None and shard_bytes and shard_bytes + size_bytes > SHARD_BYTES_PER_CALL_MAX:
                return "shard_full", now_ms
            if not call.has_room_for(bundle, size_bytes):
                return "call_full", now_ms
            if pace is not None:
                if (open_at_ms := pace.open_at_ms(size_bytes, now_ms)) > now_ms:
                    return "rate_limited", open_at_ms
                pace.take(size_bytes)
            shard_bytes += size_bytes
            ready.popleft().is_queued = False
            call.append(lane, lane.launch(), size_bytes)
            self.queue_if_ready(lane, now_ms)
        queue.is_queued = False
        return "empty", now_ms


def _shares_keys(old: WriteLane, lane: WriteLane) -> bool:
    if old.key is not None and lane.key is not None:
        return old.key == lane.key
    return lane.lowest <= old.highest and old.lowest <= lane.highest
