"""One shard's records, as reads bring them and as handlers see them, for tests of the pure core."""

from anabranch._core.reading.window import Unpacker, Window
from anabranch._wire.aggregate import AggregateBuilder
from anabranch._wire.messages import KinesisRecord
from anabranch.records import Record

STREAM = "orders"
SHARD = "shardId-000000000000"


def make_record(number, key="a", *, sub=-1, data=b"payload"):
    return Record(
        stream=STREAM,
        shard_id=SHARD,
        sequence_number=str(number),
        sub_sequence_number=sub,
        partition_key=key,
        arrival_seconds=float(number),
        data=data,
        value=data,
    )


def plain(number, key="a", data=b"payload"):
    return KinesisRecord(data=data, partition_key=key, sequence_number=str(number), arrival_seconds=float(number))


def aggregated(number, *subs, tags=()):
    """An aggregate of (key, data) or (key, data, explicit hash key); `tags` mark its first sub-record."""
    builder = AggregateBuilder()
    for index, (key, data, *hash_key) in enumerate(subs):
        assert builder.add(key, data, hash_key[0] if hash_key else None, () if index else tags, size_max=1 << 24)
    return plain(number, "an aggregate", builder.finish())


def make_window(*records, after=None, unpacker=None):
    """A window that one read has filled."""
    window = Window(unpacker or Unpacker(STREAM, SHARD, None))
    if records:
        window.accept(list(records), after)
    return window


def pull_all(window):
    pulled = []
    while (one := window.pull()) is not None:
        pulled.append(one)
    return pulled


def places(records):
    """Records as (number, sub-sequence number) pairs."""
    return [tuple(record.position) for record in records]
