"""Putting records into bundles, and bundles into lanes.

New records are appended to their lane's open bundle; records that come back, from a lane that is no more or an
aggregate that straddled, are placed so that nothing newer of their key is before them. Bundles are counted by epoch
(how many flushes had been asked for), so that a flush knows when everything before it is settled.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from anabranch._core.writing.aggregation import (
    AGGREGATE_BYTES,
    AGGREGATE_BYTES_LOADED,
    Bundle,
    OutgoingRecord,
    Packing,
)
from anabranch._core.writing.failures import Failures
from anabranch._core.writing.lanes import Lane
from anabranch._core.writing.routing import Routing
from anabranch.records import Attempt

__all__ = ["Placement"]

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
