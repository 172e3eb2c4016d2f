"""The answers of the Kinesis calls as typed values, named as in AWS's API.

They are the values of the Kinesis port: the client decodes bytes into them, the simulated stream builds them directly.
Those that are decoded straight from JSON have AWS's names in their fields.
"""

import msgspec

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Shard
from anabranch.limits import KIB, RECORD_BYTES_DEFAULT_MAX


class KinesisRecord(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A record as the service returns it. It may be an aggregate."""

    data: bytes = msgspec.field(name="Data")
    partition_key: str = msgspec.field(name="PartitionKey", default="")
    """Empty if it was written without one, as streams with AUTO distribution allow."""
    sequence_number: str = msgspec.field(name="SequenceNumber")
    arrival_seconds: float = msgspec.field(name="ApproximateArrivalTimestamp", default=0.0)


class ChildShard(msgspec.Struct, frozen=True):
    shard_id: str
    parent_shard_ids: tuple[str, ...]
    hash_key_range: HashKeyRange


class GetRecordsResponse(msgspec.Struct, frozen=True):
    records: list[KinesisRecord]
    next_shard_iterator: str | None
    """None at the end of a closed shard."""
    millis_behind_latest: int | None = None
    child_shards: tuple[ChildShard, ...] = ()
    """Set at the end of a closed shard, but the service may leave it out."""
    server_seconds: float | None = None
    """The service's clock: the Date header of this answer."""


class ListShardsResponse(msgspec.Struct, frozen=True):
    shards: tuple[Shard, ...]
    next_token: str | None = None


class _ModeDetails(msgspec.Struct, frozen=True):
    stream_mode: str = msgspec.field(name="StreamMode")


class StreamSummary(msgspec.Struct, frozen=True, kw_only=True):
    name: str = msgspec.field(name="StreamName")
    arn: str = msgspec.field(name="StreamARN")
    status: str = msgspec.field(name="StreamStatus")
    """CREATING, UPDATING, ACTIVE or DELETING."""
    created_seconds: float = msgspec.field(name="StreamCreationTimestamp")
    retention_hours: int = msgspec.field(name="RetentionPeriodHours")
    open_shard_count: int = msgspec.field(name="OpenShardCount")
    mode_details: _ModeDetails | None = msgspec.field(name="StreamModeDetails", default=None)
    record_kib_max: int | None = msgspec.field(name="MaxRecordSizeInKiB", default=None)
    record_distribution: str | None = msgspec.field(name="RecordDistributionStrategy", default=None)
    """AUTO if the service places records itself and ignores partition keys."""
    server_seconds: float | None = None
    """The service's clock: the Date header of this answer."""

    @property
    def stream_mode(self) -> str:
        return "PROVISIONED" if self.mode_details is None else self.mode_details.stream_mode

    @property
    def record_bytes_max(self) -> int:
        return RECORD_BYTES_DEFAULT_MAX if self.record_kib_max is None else self.record_kib_max * KIB


class PutRecordsEntry(msgspec.Struct, frozen=True, gc=False):
    data: bytes
    partition_key: str
    explicit_hash_key: str | None = None


class PutRecordsResultEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a PutRecords answer: written (sequence number and shard) or failed (code and message)."""

    sequence_number: str | None = msgspec.field(name="SequenceNumber", default=None)
    shard_id: str | None = msgspec.field(name="ShardId", default=None)
    error_code: str | None = msgspec.field(name="ErrorCode", default=None)
    error_message: str | None = msgspec.field(name="ErrorMessage", default=None)


class PutRecordsResponse(msgspec.Struct, frozen=True):
    entries: list[PutRecordsResultEntry]
    request_id: str | None = None


class SubscribeToShardEvent(msgspec.Struct, frozen=True):
    """One pushed event of a subscription. It may have no records."""

    records: list[KinesisRecord]
    continuation_sequence_number: str | None
    """Where to continue; None at the end of a closed shard."""
    millis_behind_latest: int | None = None
    child_shards: tuple[ChildShard, ...] = ()


class ConsumerDescription(msgspec.Struct, frozen=True):
    name: str = msgspec.field(name="ConsumerName")
    arn: str = msgspec.field(name="ConsumerARN")
    status: str = msgspec.field(name="ConsumerStatus")
    """CREATING, ACTIVE or DELETING."""
    created_seconds: float = msgspec.field(name="ConsumerCreationTimestamp")


class ListStreamConsumersResponse(msgspec.Struct, frozen=True, rename="pascal"):
    consumers: tuple[ConsumerDescription, ...] = ()
    next_token: str | None = None
