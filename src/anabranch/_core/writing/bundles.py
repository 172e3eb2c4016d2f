"""Bundles: records that become one Kinesis record, either a single user record or a KPL aggregate.

- A bundle is open (it grows), then frozen (every retry sends the same bytes), then settled (delivered or failed, once)
  or dissolved (its records moved to other bundles).
- Its exact size is known while it grows, so nothing is packed twice.
- A single record is sent unchanged. If its data is itself an aggregate, it is wrapped in another one; otherwise
  consumers would deaggregate it. With `trace="wrap"` a record that carries a trace parent is wrapped too (rule O1).
- Our aggregates carry a tag on their first record. If a record of a tagged aggregate is outside the shard's range, our
  consumers skip the whole aggregate: the producer reported none of it as delivered and sends all of it again.
- The partition key of an aggregate only selects the shard. By default it is that of the first record.

A record is also its delivery handle (the engine's `Delivery` extends it): one small object for each put. It references
its bundle, so the handle sees the bundle's outcome without a look-up.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import msgspec

from anabranch._core.writing.shard_map import HASH_KEY_BYTES, MappedShard
from anabranch._model.hash_keys import md5_digest
from anabranch._model.streams import BEFORE_FIRST_SUB
from anabranch._wire.aggregate import MAGIC, PRODUCER_TAG, AggregateBuilder, Tag
from anabranch._wire.messages import PutRecordsEntry
from anabranch.config import ProducerSettings
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
    def tags(self) -> tuple[Tag, ...]:
        """What an aggregate says about this record besides its keys and data."""
        return ()

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


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a `Producer` that the core needs."""

    order: Literal["key", "none"] = "key"
    aggregate: Literal["shard", "key"] | None = "shard"
    """If None, every record is sent unchanged."""
    linger_ms: int = 100
    delivery_timeout_ms: int = 120_000
    settings: ProducerSettings = ProducerSettings()

    @property
    def is_limited(self) -> bool:
        """Whether the user wants less than a shard takes."""
        limits = self.settings.shard_bytes_per_second, self.settings.shard_records_per_second
        return self.settings.shard_share < 1.0 or limits != (None, None)


class Bundle(msgspec.Struct, eq=False):
    stream: str
    options: WriteOptions
    predicted: MappedShard | None
    """The shard in which we expect all of its records; None if unknown or irrelevant."""
    epoch: int
    """How many flushes were requested before its records were put."""
    records: list[Any] = []
    builder: AggregateBuilder | None = None
    size_max: int = 0
    """How many bytes its aggregate may have, without the partition key."""
    cost_bytes: int = 0
    """How much of the buffer its records use."""
    due_ms: int = 0
    """From when on an open bundle is sent even if its lane is busy."""
    entry: PutRecordsEntry | None = None
    is_aggregate: bool = False
    entries_per_call_max: int = PUT_RECORDS_ENTRIES_MAX
    """How many entries a call with this bundle may have. Halved when the service rejects the call as invalid."""
    attempts: tuple[Attempt, ...] = ()
    in_flight: bool = False
    """Sent, and no response was processed yet: it may be written."""
    maybe_written: bool = False
    is_settled: bool = False
    shard_id: str | None = None
    sequence_number: str | None = None
    failures: "UnseenFailures | None" = None
    """Set if it failed: holds its records until the caller sees the failure."""
    waiters: list[tuple[OutgoingRecord, Callable[[], None]]] | None = None
    """For the engine: callbacks by record, to be called once when the bundle is settled or dissolved."""

    def open_with(self, record: OutgoingRecord, size_max: int) -> None:
        """Adds the first record. The entry may grow to `size_max` bytes, including its partition key."""
        self.builder = builder = AggregateBuilder()
        outer = self.options.settings.aggregate_partition_key or record.partition_key
        self.size_max = size_max - len(outer.encode())
        # No limit for the first record: one that is larger than any aggregate is sent alone.
        tags = _OWN_TAGS + record.tags
        builder.add(record.partition_key, record.data, record.explicit_hash_key, tags)
        self.append(record)

    def append(self, record: OutgoingRecord) -> None:
        record.bundle = self
        record.index = len(self.records)
        self.records.append(record)
        self.cost_bytes += cost_of(record.data, record.partition_key)

    @property
    def _is_sent_unchanged(self) -> bool:
        if len(self.records) != 1:
            return False
        options, first = self.options, self.records[0]
        if options.aggregate is None:
            return True
        wraps_tags = options.settings.trace == "wrap"  # so that they travel with the record (rule O1)
        return not (first.data.startswith(MAGIC) or (wraps_tags and first.tags))

    @property
    def entry_bytes(self) -> int:
        """Its size in a call: data and partition key."""
        if self.builder is None:
            entry = self.freeze()
            return len(entry.data) + len(entry.partition_key.encode())
        first = self.records[0]
        if self._is_sent_unchanged:
            return len(first.data) + len(first.partition_key.encode())
        outer = self.options.settings.aggregate_partition_key or first.partition_key
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
                tags = record.tags if builder.count else _OWN_TAGS + record.tags
                builder.add(record.partition_key, record.data, record.explicit_hash_key, tags)
        outer, hash_key = self.options.settings.aggregate_partition_key, first.explicit_hash_key
        if outer is None:
            outer = first.partition_key
        elif hash_key is None:
            hash_key = str(int.from_bytes(first.digest))
        return PutRecordsEntry(builder.finish(), outer, hash_key)

    def is_within(self, shard: MappedShard) -> bool:
        return all(shard.holds(record.digest) for record in self.records)

    @property
    def has_one_hash_key(self) -> bool:
        """If so, all of its records belong to the same shard."""
        first = self.records[0].digest
        return all(record.digest == first for record in self.records)

    def release(self) -> None:
        """Drops everything but the outcome. Users keep records alive through their handles."""
        self.records = []
        self.entry = None
        self.builder = None


class UnseenFailures:
    """Failed records of a stream that nobody has seen yet.

    A failure stays here, with its record and its buffer space, until somebody sees it: by awaiting its delivery, by
    `on_undelivered`, or when `flush` raises it. So no failure is lost, and the buffer limits the memory that unseen
    failures use.

    With `order="key"` a failure blocks its key until it is seen: later records of the key fail too. Writing them would
    put them before the failed one, which the caller may want to send again.
    """

    def __init__(self, owner: Any, *, blocks_keys: bool) -> None:
        self.owner = owner
        """The engine's writer, for the handles: a handle that shows its failure tells it that space is free."""
        self.blocks_keys = blocks_keys
        self.blocked_keys: dict[str, None] = {}
        self._unseen: dict[int, OutgoingRecord] = {}

    def __len__(self) -> int:
        return len(self._unseen)

    def add(self, records: Iterable[OutgoingRecord]) -> None:
        for record in records:
            self._unseen[id(record)] = record
            if self.blocks_keys:
                self.blocked_keys[record.partition_key] = None

    def mark_seen(self, record: OutgoingRecord) -> bool:
        """The caller has seen this failure; False if it was seen before.

        That also unblocks its key, even if other failures of it are unseen.
        """
        if self._unseen.pop(id(record), None) is None:
            return False
        self.blocked_keys.pop(record.partition_key, None)
        return True

    def take_all(self) -> list[OutgoingRecord]:
        records = list(self._unseen.values())
        for record in records:
            self.mark_seen(record)
        return records
