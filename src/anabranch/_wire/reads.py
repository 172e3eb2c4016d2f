"""Bodies of the calls that read: GetShardIterator, GetRecords and SubscribeToShard.

GetRecords' answer and a pushed event carry the same list of records, and are decoded in the same two ways: small
payloads by msgspec's own base64, large ones as text that pybase64 decodes several times faster. A look at the first
few kilobytes decides; both ways are equally strict and give equal values.
"""

from typing import Final, Generic, TypeVar

import msgspec
from pybase64 import b64decode

from anabranch._model.start_positions import StartingPosition
from anabranch._model.streams import StreamName
from anabranch._wire.bodies import AnswerDecoder, Buffer, encode_request, stream_members
from anabranch._wire.messages import ChildShard, GetRecordsResponse, KinesisRecord, SubscribeToShardEvent
from anabranch._wire.shards import WireChildShard
from anabranch.errors import CodecError

__all__ = [
    "decode_get_records",
    "decode_get_shard_iterator",
    "decode_subscribe_to_shard_event",
    "encode_get_records",
    "encode_get_shard_iterator",
    "encode_subscribe_to_shard",
]

_SAMPLE_BYTES: Final = 16 << 10
_LARGE_RECORD_BYTES: Final = 800  # of JSON a record, where the two ways cost the same: payloads of about 450 bytes

R = TypeVar("R")


class _TextRecord(msgspec.Struct, gc=False, frozen=True):
    """`KinesisRecord` with its payload still in base64."""

    data: str = msgspec.field(name="Data")
    sequence_number: str = msgspec.field(name="SequenceNumber")
    partition_key: str = msgspec.field(name="PartitionKey", default="")
    arrival_seconds: float = msgspec.field(name="ApproximateArrivalTimestamp", default=0.0)
    encryption_type: str | None = msgspec.field(name="EncryptionType", default=None)


class _Records(msgspec.Struct, Generic[R], rename="pascal"):
    """GetRecords' answer or SubscribeToShard's event: they differ in how they say where to go on."""

    records: list[R]
    next_shard_iterator: str | None = None
    continuation_sequence_number: str | None = None
    millis_behind_latest: int | None = None
    child_shards: list[WireChildShard] | None = None


class _ShardIterator(msgspec.Struct, rename="pascal"):
    shard_iterator: str


class _RecordsDecoder:
    __slots__ = ("_large", "_operation", "_small")

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._small = AnswerDecoder(operation, _Records[KinesisRecord])
        self._large = AnswerDecoder(operation, _Records[_TextRecord])

    def decode(self, body: Buffer) -> tuple[_Records[KinesisRecord], tuple[ChildShard, ...]]:
        answer = self._decode_large(body) if _holds_large_records(body) else self._small.decode(body)
        children = answer.child_shards
        return answer, tuple(child.value(self._operation) for child in children) if children else ()

    def _decode_large(self, body: Buffer) -> _Records[KinesisRecord]:
        answer = self._large.decode(body)
        try:
            records = [
                KinesisRecord(
                    data=b64decode(record.data, None, True),
                    partition_key=record.partition_key,
                    sequence_number=record.sequence_number,
                    arrival_seconds=record.arrival_seconds,
                    encryption_type=record.encryption_type,
                )
                for record in answer.records
            ]
        except ValueError as error:
            raise CodecError(f"{self._operation} was answered with a payload that is not base64: {error}") from None
        return _Records(
            records,
            answer.next_shard_iterator,
            answer.continuation_sequence_number,
            answer.millis_behind_latest,
            answer.child_shards,
        )


def _holds_large_records(body: Buffer) -> bool:
    """An estimate: how many records begin in the first bytes. A wrong one costs time, never correctness."""
    sample = bytes(body[:_SAMPLE_BYTES])
    return len(sample) > _LARGE_RECORD_BYTES * max(1, sample.count(b'"Data"'))


_SHARD_ITERATOR: Final = AnswerDecoder("GetShardIterator", _ShardIterator)
_GET_RECORDS: Final = _RecordsDecoder("GetRecords")
_EVENT: Final = _RecordsDecoder("SubscribeToShard")


def encode_get_shard_iterator(stream: StreamName, shard_id: str, position: StartingPosition) -> list[bytes]:
    return encode_request(
        stream_members(stream)
        | {
            "ShardId": shard_id,
            "ShardIteratorType": position.type,
            "StartingSequenceNumber": position.sequence_number,
            "Timestamp": position.timestamp_seconds,
        }
    )


def decode_get_shard_iterator(body: Buffer) -> str:
    return _SHARD_ITERATOR.decode(body).shard_iterator


def encode_get_records(stream: StreamName, shard_iterator: str, *, limit: int | None = None) -> list[bytes]:
    """The iterator names the stream; an ARN is sent beside it where it is known."""
    return encode_request({"StreamARN": stream.arn, "ShardIterator": shard_iterator, "Limit": limit})


def decode_get_records(body: Buffer, *, server_seconds: float | None = None) -> GetRecordsResponse:
    answer, children = _GET_RECORDS.decode(body)
    return GetRecordsResponse(
        records=answer.records,
        next_shard_iterator=answer.next_shard_iterator,
        millis_behind_latest=answer.millis_behind_latest,
        child_shards=children,
        server_seconds=server_seconds,
    )


def encode_subscribe_to_shard(consumer_arn: str, shard_id: str, position: StartingPosition) -> list[bytes]:
    starting_position = {
        "Type": position.type,
        "SequenceNumber": position.sequence_number,
        "Timestamp": position.timestamp_seconds,
    }
    return encode_request(
        {
            "ConsumerARN": consumer_arn,
            "ShardId": shard_id,
            "StartingPosition": {name: value for name, value in starting_position.items() if value is not None},
        }
    )


def decode_subscribe_to_shard_event(payload: Buffer) -> SubscribeToShardEvent:
    event, children = _EVENT.decode(payload)
    return SubscribeToShardEvent(
        records=event.records,
        continuation_sequence_number=event.continuation_sequence_number,
        millis_behind_latest=event.millis_behind_latest,
        child_shards=children,
    )
