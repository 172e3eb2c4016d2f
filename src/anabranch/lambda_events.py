"""Deaggregates the Kinesis events that AWS Lambda passes to a function.

    def handler(event, context):
        for record in anabranch.deaggregate(event):
            print(record.partition_key, record.data)

Lambda passes KPL aggregates on as single records. It does not pass the shard's hash key range, so an aggregate that
straddled a reshard cannot be recognised: its records are returned, although its producer may have sent them again.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import pybase64

from anabranch._model.streams import BEFORE_FIRST_SUB
from anabranch._wire.aggregate import open_aggregate
from anabranch.errors import CodecError
from anabranch.records import Record
from anabranch.values import Decoder, decode_with

__all__ = ["deaggregate"]


def deaggregate(event: Mapping[str, Any], *, decode: Decoder[Any] = bytes) -> list[Record[Any]]:
    """Returns the records of a Lambda event, in order. For a partial batch failure, `itemIdentifier` is a
    record's `sequence_number`.
    """
    to_value = decode_with(decode)
    records: list[Record[Any]] = []
    try:
        for item in event["Records"]:
            records += _records_of(item)
    except (KeyError, TypeError, AttributeError) as error:
        raise CodecError(
            "this is not a Kinesis event from Lambda: each of its Records needs kinesis.data, kinesis.partitionKey and "
            f"kinesis.sequenceNumber ({type(error).__name__}: {error})"
        ) from error
    if to_value is None:
        return records
    return [msgspec.structs.replace(record, value=to_value(record.data)) for record in records]


def _records_of(item: Mapping[str, Any]) -> list[Record[Any]]:
    kinesis = item["kinesis"]
    try:
        data = pybase64.b64decode(kinesis["data"], validate=True)
    except ValueError as error:
        raise CodecError(f"the data of record {kinesis['sequenceNumber']} is not base64: {error}") from error
    aggregate = open_aggregate(data)
    traced = {} if aggregate is None else aggregate.trace_parents
    sub_records = [(kinesis["partitionKey"], None, data)] if aggregate is None else aggregate.sub_records()
    # `orders` from arn:aws:kinesis:eu-west-1:123456789012:stream/orders, also from a consumer's ARN
    stream = item.get("eventSourceARN", "").partition(":stream/")[2].partition("/")[0]
    return [
        Record(
            stream=stream,
            shard_id=str(item.get("eventID", "")).partition(":")[0],
            sequence_number=kinesis["sequenceNumber"],
            sub_sequence_number=BEFORE_FIRST_SUB if aggregate is None else index,
            partition_key=partition_key,
            explicit_hash_key=explicit_hash_key,
            arrival_seconds=float(kinesis.get("approximateArrivalTimestamp", 0.0)),
            data=payload,
            value=payload,
            trace_parent=traced.get(index),
        )
        for index, (partition_key, explicit_hash_key, payload) in enumerate(sub_records)
    ]
