"""Which lane a record joins, and how keys move between lanes when the shard map changes.

Rules that hold here:

- All unsent records of a key are in one lane: the one that its next record will join.
- When a shard leaves the map its lane is retired: what was not sent moves to the lanes that hold its keys now, in
  order; what is in flight stays, and until it is resolved those lanes send nothing (`waits`). So a key never has
  two records in flight, whatever the service did to its shards.
- With `order="none"` nothing waits.

Where no shard is predicted, each key has a lane of its own and its records go alone, until a listing tells better.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from anabranch._core.writing.aggregation import Bundle, OutgoingRecord
from anabranch._core.writing.lanes import Lane, LaneId, ShardQueue
from anabranch._core.writing.limiter import ShardPace
from anabranch._core.writing.shard_map import MappedShard, ShardMap, digest_of_hash_key
from anabranch._model.hash_keys import check_partition_key, md5_digest, parse_hash_key

__all__ = ["Routing", "check_keys"]

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
