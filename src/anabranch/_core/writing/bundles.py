"""Records that travel together: a bundle becomes one Kinesis record, alone as it is or as a KPL aggregate of many.

Rules that hold here:

- A bundle is open (it grows), then frozen (its bytes never change again: every retry sends the same ones), then settled
  (delivered or failed, once) or dissolved (its records went on into other bundles).
- Sizes are exact while it grows: nothing is packed, measured and packed again.
- One record goes as it is. If it is itself an aggregate it is wrapped in another, or consumers would open it.
- An aggregate of ours carries one tag on its first record. Consumers that know it skip the aggregate whole when any of
  its records lies outside the shard's range: none of it was reported as delivered, and all of it is sent again.
- The outer key only routes: it hashes to where the first record belongs.

A record is also its own delivery handle (the engine's `Delivery` extends it): one small object for each put. It names
its bundle, so whatever becomes of the bundle is known to the handle without a look-up.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from anabranch._core.writing.shard_map import HASH_KEY_BYTES, MappedShard
from anabranch._model.hash_keys import md5_digest
from anabranch._model.streams import BEFORE_FIRST_SUB
from anabranch._wire.aggregate import MAGIC, PRODUCER_TAG, AggregateBuilder
from anabranch._wire.messages import PutRecordsEntry
from anabranch.limits import KIB, PUT_RECORDS_ENTRIES_MAX
from anabranch.records import Attempt, PutResult

AGGREGATE_BYTES: Final = 50 * KIB  # two of the 25 KB units that the service bills
AGGREGATE_BYTES_LOADED: Final = 256 * KIB  # where a lane has to wait anyway

RECORD_COST_BYTES: Final = 256
"""Of handle, list slots and pieces of the aggregate; measured on CPython 3.11 and rounded up."""

_OWN_TAGS: Final = (PRODUCER_TAG,)


def cost_of(data: bytes, partition_key: str) -> int:
    """What a record weighs in the buffer: its bytes, and the objects around them."""
    return len(data) + len(partition_key) + RECORD_COST_BYTES


class OutgoingRecord(msgspec.Struct, gc=False, eq=False):
    """One record on its way, and where it is now. Not tracked by the collector: settling breaks the cycle with it."""

    bundle: "Bundle"
    index: int
    """Its place in the bundle: the sub-sequence number, if the bundle is sent as an aggregate."""
    partition_key: str
    explicit_hash_key: str | None
    data: bytes
    put_ms: int

    @property
    def digest(self) -> bytes:
        """The hash key that decides the shard."""
        if self.explicit_hash_key is not None:
            return int(self.explicit_hash_key).to_bytes(HASH_KEY_BYTES)
        return md5_digest(self.partition_key)

    @property
    def put_result(self) -> PutResult:
        """How it ended; only for a settled bundle."""
        bundle = self.bundle
        is_delivered = bundle.sequence_number is not None
        return PutResult(
            stream=bundle.stream,
            partition_key=self.partition_key,
            explicit_hash_key=self.explicit_hash_key,
            data=self.data,
            shard_id=bundle.shard_id,
            sequence_number=bundle.sequence_number,
            sub_sequence_number=self.index if is_delivered and bundle.is_aggregate else BEFORE_FIRST_SUB,
            attempts=bundle.attempts,
            maybe_written=bundle.maybe_written,
        )


class Packing(msgspec.Struct, frozen=True):
    """How records become Kinesis records."""

    outer_partition_key: str | None = None
    """The partition key of aggregates; None: that of their first record."""
    wraps: bool = True
    """False where nothing is aggregated: then every record goes exactly as it was given."""


class Bundle:
    __slots__ = (
        "attempts", "builder", "companions_max", "cost_bytes", "due_ms", "entry", "epoch", "failures", "in_flight",
        "is_aggregate", "is_settled", "maybe_written", "packing", "predicted", "records", "sequence_number", "shard_id",
        "size_max", "stream", "waiters",
    )  # fmt: skip

    def __init__(self, stream: str, packing: Packing, predicted: MappedShard | None, epoch: int) -> None:
        self.stream = stream
        self.packing = packing
        self.predicted = predicted
        """The shard that all of its records should land in; None where it is not known or does not matter."""
        self.epoch = epoch
        """How many flushes had been asked for when its records were put."""
        self.records: list[Any] = []
        self.builder: AggregateBuilder | None = None
        self.size_max = 0
        self.cost_bytes = 0
        """What its records weigh in the buffer."""
        self.due_ms = 0
        """When an open bundle should go although its lane is busy."""
        self.entry: PutRecordsEntry | None = None
        self.is_aggregate = False
        self.companions_max = PUT_RECORDS_ENTRIES_MAX
        """How many entries a call with this bundle may have: halved each time such a call was refused as invalid."""
        self.attempts: tuple[Attempt, ...] = ()
        self.in_flight = False
        """Launched, and no answer has been applied yet: should nothing more be heard of it, it may be written."""
        self.maybe_written = False
        self.is_settled = False
        self.shard_id: str | None = None
        self.sequence_number: str | None = None
        self.failures: Any = None
        self.waiters: list[tuple[OutgoingRecord, Callable[[], None]]] | None = None
        """For the engine: who awaits which record, to be called once when the bundle is settled or dissolved."""

    def open_with(self, record: OutgoingRecord, size_max: int) -> None:
        """The first record of a bundle that may grow to an entry of `size_max` bytes, its outer key included."""
        self.builder = builder = AggregateBuilder()
        outer = self.packing.outer_partition_key or record.partition_key
        self.size_max = size_max - len(outer.encode())
        # A record larger than any aggregate goes alone, so the builder's word on the first one does not count.
        builder.add(record.partition_key, record.data, record.explicit_hash_key, _OWN_TAGS, size_max=1 << 62)
        self.append(record)

    def hold(self, records: Sequence[OutgoingRecord], origin: "Bundle") -> None:
        """Records of another bundle, with its history: none of them is newer than what it knows."""
        self.attempts = origin.attempts
        self.maybe_written = origin.maybe_written
        self.companions_max = origin.companions_max
        for record in records:
            self.append(record)

    def append(self, record: OutgoingRecord) -> None:
        record.bundle = self
        record.index = len(self.records)
        self.records.append(record)
        self.cost_bytes += cost_of(record.data, record.partition_key)

    @property
    def _goes_as_it_is(self) -> bool:
        return len(self.records) == 1 and not (self.packing.wraps and self.records[0].data.startswith(MAGIC))

    @property
    def entry_bytes(self) -> int:
        """What it would weigh in a call now: data and partition key."""
        if self.builder is None:
            entry = self.freeze()
            return len(entry.data) + len(entry.partition_key.encode())
        first = self.records[0]
        if self._goes_as_it_is:
            return len(first.data) + len(first.partition_key.encode())
        outer = self.packing.outer_partition_key or first.partition_key
        return self.builder.size + len(outer.encode())

    def freeze(self) -> PutRecordsEntry:
        """The bytes that every attempt will send."""
        if self.entry is None:
            first = self.records[0]
            if self._goes_as_it_is:
                self.entry = PutRecordsEntry(first.data, first.partition_key, first.explicit_hash_key)
            else:
                self.is_aggregate = True
                self.entry = self._aggregate(first)
            self.builder = None
        return self.entry

    def _aggregate(self, first: OutgoingRecord) -> PutRecordsEntry:
        builder = self.builder
        if builder is None:
            builder = AggregateBuilder()
            for record in self.records:
                tags = () if builder.count else _OWN_TAGS
                builder.add(record.partition_key, record.data, record.explicit_hash_key, tags, size_max=1 << 62)
        outer, hash_key = self.packing.outer_partition_key, first.explicit_hash_key
        if outer is None:
            outer = first.partition_key
        elif hash_key is None:
            hash_key = str(int.from_bytes(first.digest))
        return PutRecordsEntry(builder.finish(), outer, hash_key)

    def is_within(self, shard: MappedShard) -> bool:
        """Whether all of its records belong there."""
        return all(shard.holds(record.digest) for record in self.records)

    @property
    def has_one_hash_key(self) -> bool:
        """Then it can straddle nothing."""
        first = self.records[0].digest
        return all(record.digest == first for record in self.records)

    def deliver(self, shard_id: str, sequence_number: str) -> None:
        assert not self.is_settled
        self.is_settled = True
        self.shard_id = shard_id
        self.sequence_number = sequence_number

    def fail(self, failures: Any, attempt: Attempt) -> None:
        """`failures` is where its records wait to be seen."""
        assert not self.is_settled
        self.is_settled = True
        self.attempts = (*self.attempts, attempt)
        self.failures = failures

    def release(self) -> None:
        """What is settled keeps its outcome only; records keep themselves alive through their handles."""
        self.records = []
        self.entry = None
        self.builder = None


class Failures:
    __slots__ = ("_unseen", "blocks_keys", "freed_bytes", "keys", "on_seen")

    def __init__(self, *, blocks_keys: bool) -> None:
        self.blocks_keys = blocks_keys
        self.keys: dict[str, None] = {}
        """Keys whose later records fail too."""
        self.freed_bytes = 0
        """What failures that were seen gave back to the buffer, until the engine takes it."""
        self.on_seen: Callable[[], None] | None = None
        """Called when the buffer has got room by it."""
        self._unseen: dict[int, OutgoingRecord] = {}

    def __len__(self) -> int:
        return len(self._unseen)

    def add(self, records: Iterable[OutgoingRecord]) -> None:
        for record in records:
            self._unseen[id(record)] = record
            if self.blocks_keys:
                self.keys[record.partition_key] = None

    def see(self, record: OutgoingRecord) -> None:
        """Its failure has come to the knowledge of whoever wrote it. One is enough to acknowledge its key."""
        if self._unseen.pop(id(record), None) is not None:
            self.freed_bytes += cost_of(record.data, record.partition_key)
            self.keys.pop(record.partition_key, None)
            if self.on_seen is not None:
                self.on_seen()

    def see_all(self) -> list[OutgoingRecord]:
        records = list(self._unseen.values())
        for record in records:
            self.see(record)
        return records

    def take_freed_bytes(self) -> int:
        freed, self.freed_bytes = self.freed_bytes, 0
        return freed
