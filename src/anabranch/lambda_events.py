"""Kinesis events as AWS Lambda hands them to a function, opened into the records that were written.

    def handler(event, context):
        for record in anabranch.deaggregate(event):
            print(record.partition_key, record.data)

Lambda knows nothing of aggregates, so a function sees their bytes; here they become the records inside. Lambda does
not tell a shard's range of hash keys either: aggregates that straddled a reshard cannot be told apart, and are
opened like any other.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import pybase64

from anabranch._model.sequence_numbers import BEFORE_FIRST_SUB
from anabranch._wire.aggregate import open_aggregate
from anabranch.errors import CodecError
from anabranch.records import Record
from anabranch.values import Decoder, decode_with

__all__ = ["deaggregate"]


def deaggregate(event: Mapping[str, Any], *, decode: Decoder[Any] = bytes) -> list[Record[Any]]:
    """The records of a Lambda event, in order; `record.sequence_number` is the item identifier of a batch failure."""
    to_value = decode_with(decode)
    records: list[Record[Any]] = []
    try:
        for item in event["Records"]:
            records += _open(item)
    except (KeyError, TypeError, AttributeError) as error:
        raise CodecError(
            "this is no Kinesis event of Lambda's: that has Records, each with a `kinesis` part of data, partitionKey "
            f"and sequenceNumber ({type(error).__name__}: {error})"
        ) from error
    if to_value is None:
        return records
    return [msgspec.structs.replace(record, value=to_value(record.data)) for record in records]


def _open(item: Mapping[str, Any]) -> list[Record[Any]]:
    kinesis = item["kinesis"]
    try:
        data = pybase64.b64decode(kinesis["data"], validate=True)
    except ValueError as error:
        raise CodecError(f"the data of record {kinesis['sequenceNumber']} is not base64: {error}") from error
    aggregate = open_aggregate(data)
    inner = [(kinesis["partitionKey"], None, data)] if aggregate is None else aggregate.sub_records()
    return [
        Record(
            stream=_stream_name(item.get("eventSourceARN", "")),
            shard_id=str(item.get("eventID", "")).partition(":")[0],
            sequence_number=kinesis["sequenceNumber"],
            sub_sequence_number=BEFORE_FIRST_SUB if aggregate is None else index,
            partition_key=partition_key,
            explicit_hash_key=explicit_hash_key,
            arrival_seconds=float(kinesis.get("approximateArrivalTimestamp", 0.0)),
            data=payload,
            value=payload,
        )
        for index, (partition_key, explicit_hash_key, payload) in enumerate(inner)
    ]


def _stream_name(arn: str) -> str:
    """`orders` of arn:aws:kinesis:eu-west-1:123456789012:stream/orders, also with a consumer behind it."""
    return arn.partition(":stream/")[2].partition("/")[0]
