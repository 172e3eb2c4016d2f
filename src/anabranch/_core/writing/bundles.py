"""Bundles: records that become one Kinesis record, either a single user record or a KPL aggregate.

- A bundle is open (it grows), then frozen (every retry sends the same bytes), then settled (delivered or failed, once)
  or dissolved (its records moved to other bundles).
- Its exact size is known while it grows, so nothing is packed twice.
- A single record is sent unchanged. If its data is itself an aggregate, it is wrapped in another one; otherwise
  consumers would deaggregate it.
- Our aggregates carry a tag on their first record. If a record of a tagged aggregate is outside the shard's range, our
  consumers skip the whole aggregate: the producer reported none of it as delivered and sends all of it again.
- The partition key of an aggregate only selects the shard. By default it is that of the first record.

A record is also its delivery handle (the engine's `Delivery` extends it): one small object for each put. It references
its bundle, so the handle sees the bundle's outcome without a look-up.
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
AGGREGATE_BYTES_BUSY: Final = 256 * KIB  # for a lane that has to wait anyway

RECORD_COST_BYTES: Final = 256
"""Memory for the handle, list slots and parts of the aggregate; measured on CPython 3.11 and rounded up."""

_OWN_TAGS: Final = (PRODUCER_TAG,)


def cost_of(data: bytes, partition_key: str) -> int:
    """How many bytes of the buffer a record uses: its data, its key, and the objects around them."""
    return len(data) + len(partition_key) + RECORD_COST_BYTES


class OutgoingRecord(msgspec.Struct, gc=False, eq=False):
    """A record in the producer, not tracked by the garbage collector: `Bundle.release` breaks the reference cycle."""

    bundle: "Bundle"
    index: int
    """Its position in the bundle: the sub-sequence number, if the bundle is sent as an aggregate."""
    partition_key: str
    explicit_hash_key: str | None
    data: bytes
    put_ms: int

    @property
    def digest(self) -> bytes:
        """The hash key that selects the shard."""
        if self.explicit_hash_key is not None:
            return int(self.explicit_hash_key).to_bytes(HASH_KEY_BYTES)
        return md5_digest(self.partition_key)

    @property
    def put_result(self) -> PutResult:
        """Only for a settled bundle."""
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
    """How a bundle becomes a Kinesis record."""

    aggregate_partition_key: str | None = None
    """The partition key of aggregates. None uses that of their first record."""
    aggregates: bool = True
    """If False, every record is sent unchanged."""


class Bundle:
    __slots__ = (
        "attempts",
        "builder",
        "cost_bytes",
        "due_ms",
        "entries_per_call_max",
        "entry",
        "epoch",
        "failures",
        "in_flight",
        "is_aggregate",
        "is_settled",
        "maybe_written",
        "packing",
        "predicted",
        "records",
        "sequence_number",
        "shard_id",
        "size_max",
        "stream",
        "waiters",
    )  # fmt: skip

    def __init__(self, stream: str, packing: Packing, predicted: MappedShard | None, epoch: int) -> None:
        self.stream = stream
        self.packing = packing
        self.predicted = predicted
        """The shard in which we expect all of its records; None if unknown or irrelevant."""
        self.epoch = epoch
        """How many flushes were requested before its records were put."""
        self.records: list[Any] = []
        self.builder: AggregateBuilder | None = None
        self.size_max = 0
        """How many bytes its aggregate may have, without the partition key."""
        self.cost_bytes = 0
        """How much of the buffer its records use."""
        self.due_ms = 0
        """When an open bundle should be sent although its lane is busy."""
        self.entry: PutRecordsEntry | None = None
        self.is_aggregate = False
        self.entries_per_call_max = PUT_RECORDS_ENTRIES_MAX
        """How many entries a call with this bundle may have. Halved when the service rejects the call as invalid."""
        self.attempts: tuple[Attempt, ...] = ()
        self.in_flight = False
        """Sent, and no response was processed yet: it may be written."""
        self.maybe_written = False
        self.is_settled = False
        self.shard_id: str | None = None
        self.sequence_number: str | None = None
        self.failures: UnseenFailures | None = None
        """Set if it failed: holds its records until the caller sees the failure."""
        self.waiters: list[tuple[OutgoingRecord, Callable[[], None]]] | None = None
        """For the engine: callbacks by record, to be called once when the bundle is settled or dissolved."""

    def open_with(self, record: OutgoingRecord, size_max: int) -> None:
        """Adds the first record. The entry may grow to `size_max` bytes, including its partition key."""
        self.builder = builder = AggregateBuilder()
        outer = self.packing.aggregate_partition_key or record.partition_key
        self.size_max = size_max - len(outer.encode())
        # No limit for the first record: one that is larger than any aggregate is sent alone.
        builder.add(record.partition_key, record.data, record.explicit_hash_key, _OWN_TAGS, size_max=1 << 62)
        self.append(record)

    def move_from(self, origin: "Bundle", records: Sequence[OutgoingRecord]) -> None:
        """Takes records of another bundle, with that bundle's attempts."""
        self.attempts = origin.attempts
        self.maybe_written = origin.maybe_written
        self.entries_per_call_max = origin.entries_per_call_max
        for record in records:
            self.append(record)

    def append(self, record: OutgoingRecord) -> None:
        record.bundle = self
        record.index = len(self.records)
        self.records.append(record)
        self.cost_bytes += cost_of(record.data, record.partition_key)

    @property
    def _is_sent_unchanged(self) -> bool:
        return len(self.records) == 1 and not (self.packing.aggregates and self.records[0].data.startswith(MAGIC))

    @property
    def entry_bytes(self) -> int:
        """Its size in a call: data and partition key."""
        if self.builder is None:
            entry = self.freeze()
            return len(entry.data) + len(entry.partition_key.encode())
        first = self.records[0]
        if self._is_sent_unchanged:
            return len(first.data) + len(first.partition_key.encode())
        outer = self.packing.aggregate_partition_key or first.partition_key
        return self.builder.size + len(outer.encode())

    def freeze(self) -> PutRecordsEntry:
        """The entry that every attempt sends."""
        if self.entry is None:
            first = self.records[0]
            if self._is_sent_unchanged:
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
        outer, hash_key = self.packing.aggregate_partition_key, first.explicit_hash_key
        if outer is None:
            outer = first.partition_key
        elif hash_key is None:
            hash_key = str(int.from_bytes(first.digest))
        return PutRecordsEntry(builder.finish(), outer, hash_key)

    def is_within(self, shard: MappedShard) -> bool:
        """Whether all of its records belong to the shard."""
        return all(shard.holds(record.digest) for record in self.records)

    @property
    def has_one_hash_key(self) -> bool:
        """If so, all of its records belong to the same shard."""
        first = self.records[0].digest
        return all(record.digest == first for record in self.records)

    def deliver(self, shard_id: str, sequence_number: str) -> None:
        assert not self.is_settled
        self.is_settled = True
        self.shard_id = shard_id
        self.sequence_number = sequence_number

    def fail(self, failures: "UnseenFailures", attempt: Attempt) -> None:
        assert not self.is_settled
        self.is_settled = True
        self.attempts = (*self.attempts, attempt)
        self.failures = failures

    def release(self) -> None:
        """Drops everything but the outcome. Users keep records alive through their handles."""
        self.records = []
        self.entry = None
        self.builder = None


class UnseenFailures:
    """Failed records that nobody has seen yet.

    A failure stays here, with its record and its buffer space, until somebody sees it: by awaiting its delivery, by
    `on_undelivered`, or when `flush` raises it. So no failure is lost, and the buffer limits the memory that unseen
    failures use.

    With `order="key"` a failure blocks its key until it is seen: later records of the key fail too. Writing them would
    put them before the failed one, which the caller may want to send again.
    """

    __slots__ = ("_unseen", "blocked_keys", "blocks_keys", "freed_bytes", "on_seen")

    def __init__(self, *, blocks_keys: bool) -> None:
        self.blocks_keys = blocks_keys
        self.blocked_keys: dict[str, None] = {}
        self.freed_bytes = 0
        """Buffer space of seen failures that the engine has not taken back yet."""
        self.on_seen: Callable[[], None] | None = None
        """Called when buffer space was freed."""
        self._unseen: dict[int, OutgoingRecord] = {}

    def __len__(self) -> int:
        return len(self._unseen)

    def add(self, records: Iterable[OutgoingRecord]) -> None:
        for record in records:
            self._unseen[id(record)] = record
            if self.blocks_keys:
                self.blocked_keys[record.partition_key] = None

    def mark_seen(self, record: OutgoingRecord) -> None:
        """The caller has seen this failure. That also unblocks its key, even if other failures of it are unseen."""
        if self._unseen.pop(id(record), None) is not None:
            self.freed_bytes += cost_of(record.data, record.partition_key)
            self.blocked_keys.pop(record.partition_key, None)
            if self.on_seen is not None:
                self.on_seen()

    def take_all(self) -> list[OutgoingRecord]:
        records = list(self._unseen.values())
        for record in records:
            self.mark_seen(record)
        return records

    def take_freed_bytes(self) -> int:
        freed, self.freed_bytes = self.freed_bytes, 0
        return freed
