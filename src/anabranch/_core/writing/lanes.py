"""Lanes: records that must follow one another, and where they queue.

A lane is a shard (its range of hash keys) where records are aggregated by shard, and a partition key otherwise.
With `order="key"` at most one Kinesis record of a lane is in flight, and a lane has one entry in a call at most, so
neither a partial failure nor two calls that overtake each other can change the order of a key. What failed goes
first again.

A lane belongs to one queue: that of the shard it is predicted for, which sets the pace, or the queue without a shard.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Final, Literal

from anabranch._core.writing.bundles import (
    AGGREGATE_BYTES,
    AGGREGATE_BYTES_LOADED,
    Bundle,
    Failures,
    OutgoingRecord,
    Packing,
)
from anabranch._core.writing.limiter import ShardPace
from anabranch._core.writing.shard_map import MappedShard, ShardMap, digest_of_hash_key
from anabranch._model.hash_keys import check_partition_key, md5_digest, parse_hash_key
from anabranch._wire.messages import PutRecordsEntry
from anabranch.limits import KIB, PUT_RECORDS_BYTES_MAX, PUT_RECORDS_ENTRIES_MAX
from anabranch.records import Attempt

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


REMEMBERED_KEYS_MAX: Final = 1 << 16


def check_keys(partition_key: str, explicit_hash_key: str | None) -> bytes:
    """The digest that decides the shard. ValueError or TypeError for keys that the service would not accept."""
    check_partition_key(partition_key)
    if explicit_hash_key is None:
        return md5_digest(partition_key)
    if not isinstance(explicit_hash_key, str):
        raise TypeError(f"explicit_hash_key is {explicit_hash_key!r}; it must be text in decimal digits, such as '5'")
    return digest_of_hash_key(parse_hash_key(explicit_hash_key))


class Routing:
    __slots__ = (
        "_draining_keys", "_draining_shards", "_generation", "_key_lanes", "_paces", "_queues", "_shard_lanes",
        "_shard_share", "aggregate", "is_ordered", "lane_of_key", "predicts", "ready", "shard_map",
    )  # fmt: skip

    def __init__(
        self, shard_map: ShardMap, *, aggregate: Literal["shard", "key"] | None, is_ordered: bool, shard_share: float
    ) -> None:
        self.shard_map = shard_map
        self.aggregate: Literal["shard", "key"] | None = aggregate
        self.is_ordered = is_ordered
        self.predicts = True
        """False where the service places records as it likes."""
        self.lane_of_key: dict[str, Lane] = {}
        """A bounded memory of where keys without an explicit hash key go, for the hot path."""
        self.ready: deque[ShardQueue] = deque()
        """Queues that hold lanes with something to send, served in turn."""
        self._shard_share = shard_share
        self._generation = shard_map.generation
        self._queues: dict[str | None, ShardQueue] = {}
        self._paces: dict[str, ShardPace] = {}
        self._shard_lanes: dict[str | None, Lane] = {}
        self._key_lanes: dict[LaneId, Lane] = {}
        self._draining_shards: list[Lane] = []
        self._draining_keys: dict[LaneId, Lane] = {}

    def lanes(self) -> Iterator[Lane]:
        yield from self._shard_lanes.values()
        yield from self._key_lanes.values()

    def lane_for(self, partition_key: str, explicit_hash_key: str | None, digest: bytes, now_ms: int) -> Lane:
        """The lane that this key's next record joins."""
        shard = self.shard_map.predict(digest) if self.predicts else None
        if self.aggregate == "key" or (self.is_ordered and (self.aggregate is None or shard is None)):
            return self._key_lane(partition_key, explicit_hash_key, digest, shard, now_ms)
        name = None if shard is None else shard.shard_id
        lane = self._shard_lanes.get(name)
        if lane is None:
            queue = self._queue_of(shard, now_ms)
            lane = Lane(shard, None, queue, grows=shard is not None and self.aggregate is not None)
            self._shard_lanes[name] = lane
            if self.is_ordered:
                lane.waits = sum(_shares_keys(old, lane) for old in self._draining_shards)
                lane.waits += sum(_range(lane).holds(_digest(old)) for old in self._draining_keys.values())
        if explicit_hash_key is None:
            if len(self.lane_of_key) >= REMEMBERED_KEYS_MAX:
                self.lane_of_key.clear()
            self.lane_of_key[partition_key] = lane
        return lane

    def _key_lane(
        self, partition_key: str, explicit_hash_key: str | None, digest: bytes, shard: MappedShard | None, now_ms: int
    ) -> Lane:
        lane_id = partition_key if explicit_hash_key is None else (partition_key, explicit_hash_key)
        lane = self._key_lanes.get(lane_id)
        if lane is None:
            lane = Lane(lane_id, digest, self._queue_of(shard, now_ms), grows=self._keys_grow)
            self._key_lanes[lane_id] = lane
            if self.is_ordered:
                lane.waits = sum(_shares_keys(old, lane) for old in self._draining_shards)
                lane.waits += lane_id in self._draining_keys
        return lane

    @property
    def _keys_grow(self) -> bool:
        """Not before the first listing: until then it is not known whether the service places records by key."""
        return self.aggregate == "key" and self.shard_map.updated_at_ms is not None

    def _queue_of(self, shard: MappedShard | None, now_ms: int) -> ShardQueue:
        name = None if shard is None else shard.shard_id
        queue = self._queues.get(name)
        if queue is None:
            pace = None
            if name is not None and (pace := self._paces.get(name)) is None:
                pace = self._paces[name] = ShardPace(self._shard_share, now_ms)
            queue = self._queues[name] = ShardQueue(shard, pace)
        return queue

    def lanes_of(self, records: Iterable[OutgoingRecord]) -> list[Lane]:
        """The lanes in which later records of the same keys wait, if there are any."""
        found: dict[int, Lane] = {}
        for record in records:
            key, hash_key = record.partition_key, record.explicit_hash_key
            lane = self._key_lanes.get(key if hash_key is None else (key, hash_key))
            if lane is None:
                lane = self._shard_lane_of(record.digest)
            if lane is not None:
                found[id(lane)] = lane
        return list(found.values())

    def _shard_lane_of(self, digest: bytes) -> Lane | None:
        shard = self.shard_map.predict(digest) if self.predicts else None
        return self._shard_lanes.get(None if shard is None else shard.shard_id)

    def discard_empty(self) -> None:
        """Key lanes that were emptied without a landing."""
        for lane in [lane for lane in self._key_lanes.values() if lane.is_empty]:
            del self._key_lanes[lane.lane_id]

    def pace_of(self, shard_id: str | None) -> ShardPace | None:
        return None if shard_id is None else self._paces.get(shard_id)

    def touch(self, lane: Lane, now_ms: int) -> None:
        """Lists the lane if it has something that may go now."""
        if lane.is_ready or lane.is_retired:
            return
        if self.is_ordered:
            if lane.in_flight or lane.waits or lane.is_empty:
                return
        elif not lane.closed_bundles and (lane.open is None or (lane.in_flight and now_ms < lane.open.due_ms)):
            return
        lane.is_ready = True
        queue = lane.queue
        queue.ready.append(lane)
        if not queue.is_listed:
            queue.is_listed = True
            self.ready.append(queue)

    def land(self, lane: Lane, now_ms: int) -> None:
        """One of its bundles in flight is resolved, and what is to be sent again is back at its head."""
        lane.in_flight -= 1
        if not lane.is_retired:
            if lane.digest is not None and lane.is_empty:
                del self._key_lanes[lane.lane_id]
            else:
                self.touch(lane, now_ms)
        elif not lane.in_flight:
            self._drained(lane, now_ms)

    def _drained(self, old: Lane, now_ms: int) -> None:
        if old.digest is None:
            self._draining_shards.remove(old)
        else:
            del self._draining_keys[old.lane_id]
        if not self.is_ordered:
            return
        if old.digest is None:
            followers = [lane for lane in self.lanes() if _shares_keys(old, lane)]
        else:
            heirs = (self._key_lanes.get(old.lane_id), self._shard_lane_of(old.digest))
            followers = [lane for lane in heirs if lane is not None]
        for lane in followers:
            lane.waits -= 1
            self.touch(lane, now_ms)

    def stop_ordering(self) -> None:
        """The service places records itself: nothing can be aggregated for a shard, and no key has an order."""
        self.predicts = False
        self.aggregate = None
        self.is_ordered = False
        self._generation = -1

    def rebase(self, now_ms: int) -> list[Bundle]:
        """Follows the shard map. Returns the unsent bundles of lanes that are no more, in order, to be placed anew."""
        if self._generation == self.shard_map.generation:
            return []
        self._generation = self.shard_map.generation
        self.lane_of_key.clear()
        self.ready.clear()
        self._queues.clear()
        current = {shard.shard_id for shard in self.shard_map.shards}
        self._paces = {name: pace for name, pace in self._paces.items() if name in current}
        homeless: list[Bundle] = []
        shard_lanes, self._shard_lanes = self._shard_lanes, {}
        for name, lane in shard_lanes.items():
            shard = lane.queue.shard
            if shard is not None and self.shard_map.is_current(shard) and lane.grows == (self.aggregate == "shard"):
                self._shard_lanes[name] = lane
                self._list_anew(lane, shard, now_ms)
            else:
                homeless += self._retire(lane)
        for lane in list(self._key_lanes.values()):
            shard = self.shard_map.predict(_digest(lane))
            if self._keeps(lane, shard):
                lane.grows = self._keys_grow
                self._list_anew(lane, shard, now_ms)
            else:
                del self._key_lanes[lane.lane_id]
                homeless += self._retire(lane)
        return homeless

    def _keeps(self, lane: Lane, shard: MappedShard | None) -> bool:
        if self.aggregate == "key":
            return True
        return self.is_ordered and not lane.grows and (self.aggregate is None or shard is None)

    def _list_anew(self, lane: Lane, shard: MappedShard | None, now_ms: int) -> None:
        lane.queue = self._queue_of(shard, now_ms)
        lane.is_ready = False
        self.touch(lane, now_ms)

    def _retire(self, lane: Lane) -> list[Bundle]:
        lane.is_retired = True
        if lane.in_flight and lane.digest is None:
            self._draining_shards.append(lane)
        elif lane.in_flight:
            self._draining_keys[lane.lane_id] = lane
        return lane.take_unsent()


def _digest(lane: Lane) -> bytes:
    assert lane.digest is not None
    return lane.digest


def _range(lane: Lane) -> MappedShard:
    assert isinstance(lane.lane_id, MappedShard)  # the lane without a shard exists only where nothing waits
    return lane.lane_id


def _shares_keys(old: Lane, lane: Lane) -> bool:
    shard = _range(old)
    if lane.digest is not None:
        return shard.holds(lane.digest)
    other = _range(lane)
    return other.start <= shard.end and shard.start <= other.end


_GROWTH_BYTES: Final = AGGREGATE_BYTES_LOADED - AGGREGATE_BYTES


class Placement:
    __slots__ = (
        "_linger_ms",
        "_stream",
        "_unsettled",
        "bundles",
        "epoch",
        "failures",
        "lingering",
        "packing",
        "routing",
        "settled",
    )

    def __init__(
        self, stream: str, routing: Routing, failures: Failures, *, outer_partition_key: str | None, linger_ms: int
    ) -> None:
        self.routing = routing
        self.failures = failures
        self.packing = Packing(outer_partition_key, wraps=routing.aggregate is not None)
        self.epoch = 0
        self.bundles: dict[int, Bundle] = {}
        """All on their way, by id, wherever they are: from their creation until they are settled or dissolved."""
        self.settled: deque[Bundle] = deque()
        """Delivered, failed or dissolved since the engine last looked."""
        self.lingering: deque[tuple[Lane, Bundle]] = deque()
        """Where lanes may have several bundles in flight: the open ones, the oldest first; some have gone already."""
        self._stream = stream
        self._linger_ms = linger_ms
        self._unsettled: dict[int, int] = {}

    # epochs

    @property
    def unsettled_count(self) -> int:
        """Bundles on their way."""
        return len(self.bundles)

    def is_flushed(self, epoch: int) -> bool:
        """Whether everything put before that flush is settled."""
        return all(unsettled > epoch for unsettled in self._unsettled)

    def _new_bundle(self, lane: Lane | None, epoch: int) -> Bundle:
        self._unsettled[epoch] = self._unsettled.get(epoch, 0) + 1
        bundle = Bundle(self._stream, self.packing, None if lane is None else lane.queue.shard, epoch)
        self.bundles[id(bundle)] = bundle
        return bundle

    def _done_with(self, bundle: Bundle) -> None:
        self.settled.append(bundle)
        del self.bundles[id(bundle)]
        left = self._unsettled[bundle.epoch] - 1
        if left:
            self._unsettled[bundle.epoch] = left
        else:
            del self._unsettled[bundle.epoch]

    # new records

    def add(self, lane: Lane, record: OutgoingRecord, epoch: int, now_ms: int) -> None:
        """At the end of its lane: into the open bundle where it fits, else into one of its own that may grow."""
        bundle = lane.open
        if bundle is not None:
            if bundle.epoch == epoch and self._fits(lane, bundle, record):
                bundle.append(record)
                return
            lane.close_bundle()
        bundle = self._new_bundle(lane, epoch)
        if lane.grows:
            bundle.open_with(record, AGGREGATE_BYTES)
            bundle.due_ms = now_ms + self._linger_ms
            lane.open = bundle
            if not self.routing.is_ordered:
                self.lingering.append((lane, bundle))
        else:
            bundle.append(record)
            lane.closed_bundles.append(bundle)
        self.routing.touch(lane, now_ms)

    def _fits(self, lane: Lane, bundle: Bundle, record: OutgoingRecord) -> bool:
        builder = bundle.builder
        assert builder is not None
        key, data, hash_key = record.partition_key, record.data, record.explicit_hash_key
        if builder.add(key, data, hash_key, size_max=bundle.size_max):
            return True
        # A lane that has to wait anyway makes fewer and larger records.
        is_loaded = lane.is_loaded if self.routing.is_ordered else bool(lane.closed_bundles)
        if not is_loaded or bundle.size_max > AGGREGATE_BYTES:
            return False
        bundle.size_max += _GROWTH_BYTES
        bundle.due_ms = 0  # full by the usual measure: it takes company only as long as it has to wait
        return builder.add(key, data, hash_key, size_max=bundle.size_max)

    # records that come back

    def place_first(self, records: Sequence[OutgoingRecord], origin: Bundle, now_ms: int) -> None:
        """Before everything that their lanes hold, with the history of the bundle they were in."""
        placed = self._divide(records, origin, now_ms)
        for lane, bundle in reversed(placed):
            lane.closed_bundles.appendleft(bundle)
        for lane, _ in placed:
            self.routing.touch(lane, now_ms)
        self._done_with(origin)

    def place_last(self, bundles: Iterable[Bundle], now_ms: int) -> None:
        """After everything that their lanes hold; what was never sent is packed anew."""
        for origin in bundles:
            if origin.attempts:
                for lane, bundle in self._divide(origin.records, origin, now_ms):
                    lane.close_bundle()
                    lane.closed_bundles.append(bundle)
                    self.routing.touch(lane, now_ms)
            else:
                for record in origin.records:
                    self.add(self._lane_of(record, now_ms), record, origin.epoch, now_ms)
            self._done_with(origin)

    def halve(self, lane: Lane, origin: Bundle, now_ms: int) -> None:
        """Two bundles instead of one, in their place."""
        middle = len(origin.records) // 2
        for part in (origin.records[middle:], origin.records[:middle]):
            bundle = self._new_bundle(lane, origin.epoch)
            bundle.hold(part, origin)
            lane.closed_bundles.appendleft(bundle)
        self.routing.touch(lane, now_ms)
        self._done_with(origin)

    def _divide(self, records: Sequence[OutgoingRecord], origin: Bundle, now_ms: int) -> list[tuple[Lane, Bundle]]:
        groups: dict[int, tuple[Lane, list[OutgoingRecord]]] = {}
        placed: list[tuple[Lane, Bundle]] = []
        for record in records:
            lane = self._lane_of(record, now_ms)
            if lane.grows:
                groups.setdefault(id(lane), (lane, []))[1].append(record)
            else:
                placed.append((lane, self._new_bundle(lane, origin.epoch)))
                placed[-1][1].hold([record], origin)
        for lane, group in groups.values():
            placed.append((lane, self._new_bundle(lane, origin.epoch)))
            placed[-1][1].hold(group, origin)
        return placed

    def _lane_of(self, record: OutgoingRecord, now_ms: int) -> Lane:
        return self.routing.lane_for(record.partition_key, record.explicit_hash_key, record.digest, now_ms)

    # ends

    def deliver(self, bundle: Bundle, shard_id: str, sequence_number: str) -> None:
        bundle.deliver(shard_id, sequence_number)
        self._done_with(bundle)

    def fail(self, bundle: Bundle, attempt: Attempt, *, maybe_written: bool = False) -> None:
        bundle.maybe_written = bundle.maybe_written or maybe_written
        bundle.fail(self.failures, attempt)
        self.failures.add(bundle.records)
        self._done_with(bundle)

    def fail_all(self, attempt: Attempt) -> None:
        """Nothing goes on after this. Lanes are not looked at: an unexpected error may have left them in any state."""
        for bundle in self.bundles.values():
            if not bundle.is_settled:
                bundle.maybe_written = bundle.maybe_written or bundle.in_flight
                bundle.fail(self.failures, attempt)
                self.failures.add(record for record in bundle.records if record.bundle is bundle)
            self.settled.append(bundle)
        self.bundles.clear()
        self._unsettled.clear()

    def refuse(self, record: OutgoingRecord, attempt: Attempt) -> None:
        """A record that fails before it was ever in a lane."""
        bundle = self._new_bundle(None, self.epoch)
        bundle.append(record)
        self.fail(bundle, attempt)

    def fail_where(
        self, lanes: Iterable[Lane], is_doomed: Callable[[OutgoingRecord], bool], attempt: Attempt
    ) -> list[OutgoingRecord]:
        """Fails and returns those of the unsent records, and leaves the others where they are."""
        failed: list[OutgoingRecord] = []
        for lane in lanes:
            kept: list[Bundle] = []
            for origin in lane.take_unsent():
                doomed = [record for record in origin.records if is_doomed(record)]
                if not doomed:
                    kept.append(origin)
                    continue
                failed += doomed
                if len(doomed) == len(origin.records):
                    self.fail(origin, attempt)
                    continue
                kept.append(self._part(lane, origin, [record for record in origin.records if not is_doomed(record)]))
                self.fail(self._part(lane, origin, doomed), attempt)
                self._done_with(origin)
            lane.closed_bundles.extend(kept)
        return failed

    def _part(self, lane: Lane, origin: Bundle, records: Sequence[OutgoingRecord]) -> Bundle:
        bundle = self._new_bundle(lane, origin.epoch)
        bundle.hold(records, origin)
        return bundle


SHARD_BYTES_PER_CALL_MAX: Final = 256 * KIB


class Call:
    """One PutRecords request. `bundles`, `lanes` and `entries` run in parallel with the slots of its answer."""

    __slots__ = ("bundles", "entries", "entries_max", "lanes", "size_bytes", "started_ms", "started_seconds")

    def __init__(self, now_ms: int, wall_ms: int) -> None:
        self.started_ms = now_ms
        self.started_seconds = wall_ms / 1_000
        self.bundles: list[Bundle] = []
        self.lanes: list[Lane] = []
        self.entries: list[PutRecordsEntry] = []
        self.entries_max = PUT_RECORDS_ENTRIES_MAX
        self.size_bytes = 0

    def has_room_for(self, bundle: Bundle, size_bytes: int) -> bool:
        if not self.entries:
            return True
        if len(self.entries) >= min(self.entries_max, bundle.companions_max):
            return False
        return self.size_bytes + size_bytes <= PUT_RECORDS_BYTES_MAX

    def append(self, lane: Lane, bundle: Bundle, size_bytes: int) -> None:
        self.lanes.append(lane)
        self.bundles.append(bundle)
        self.entries.append(bundle.freeze())
        self.entries_max = min(self.entries_max, bundle.companions_max)
        self.size_bytes += size_bytes


class _Stop(Enum):
    EMPTY = auto()
    SHARD_FULL = auto()
    CALL_FULL = auto()
    PACED = auto()


def collect(routing: Routing, now_ms: int, wall_ms: int, calls_max: int) -> tuple[list[Call], int | None]:
    """As many calls as may start now, and when a queue that was held back by its pace wants to be asked again."""
    calls: list[Call] = []
    wake_at_ms: int | None = None
    waiting, held_back = routing.ready, deque[ShardQueue]()
    while waiting and len(calls) < calls_max:
        call = Call(now_ms, wall_ms)
        next_call: deque[ShardQueue] = deque()
        while waiting:
            queue = waiting.popleft()
            stop, open_at_ms = _fill(call, queue, routing, now_ms)
            if stop is _Stop.PACED:
                held_back.append(queue)
                wake_at_ms = open_at_ms if wake_at_ms is None else min(wake_at_ms, open_at_ms)
            elif stop is not _Stop.EMPTY:
                next_call.append(queue)
            if stop is _Stop.CALL_FULL:
                break
        waiting.extend(next_call)
        if call.entries:
            calls.append(call)
    waiting.extend(held_back)
    return calls, wake_at_ms


def _fill(call: Call, queue: ShardQueue, routing: Routing, now_ms: int) -> tuple[_Stop, int]:
    pace, ready = queue.pace, queue.ready
    shard_bytes = 0
    while ready:
        lane = ready[0]
        bundle = lane.head()
        if bundle is None:  # emptied while it was listed
            ready.popleft().is_ready = False
            continue
        size_bytes = bundle.entry_bytes
        if pace is not None and shard_bytes and shard_bytes + size_bytes > SHARD_BYTES_PER_CALL_MAX:
            return _Stop.SHARD_FULL, now_ms
        if not call.has_room_for(bundle, size_bytes):
            return _Stop.CALL_FULL, now_ms
        if pace is not None:
            if (open_at_ms := pace.open_at_ms(size_bytes, now_ms)) > now_ms:
                return _Stop.PACED, open_at_ms
            pace.take(size_bytes)
        shard_bytes += size_bytes
        ready.popleft().is_ready = False
        call.append(lane, lane.launch(), size_bytes)
        routing.touch(lane, now_ms)
    queue.is_listed = False
    return _Stop.EMPTY, now_ms
