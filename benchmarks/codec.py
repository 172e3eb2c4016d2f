"""The aggregate codec beside aws-kinesis-agg, aiokpl's codec and protobuf itself.

Every candidate starts from the same records and ends with the same bytes, magic number and MD5 included, or the other
way round. `md5 alone` is the floor that the format sets: no codec can be faster than that.
"""

import base64
import hashlib

import aiokpl.aggregation
import aws_kinesis_agg.aggregator
import aws_kinesis_agg.deaggregator
from aws_kinesis_agg.messages_pb2 import AggregatedRecord

from anabranch._wire import aggregate
from anabranch._wire.aggregate import MAGIC, AggregateBuilder, open_aggregate
from measure import compare, print_table, target

OURS = "anabranch"
BUILD = "pure" if aggregate.__file__.endswith(".py") else "compiled"


def records(count, keys, data_bytes):
    return [(f"customer-{number % keys:07d}", bytes([number % 256]) * data_bytes) for number in range(count)]


SHAPES = {
    "100 records of 100 B, 100 keys": records(100, 100, 100),
    "100 records of 100 B, 10 keys": records(100, 10, 100),
    "40 records of 1 KiB, 40 keys": records(40, 40, 1024),
}


def encode_ours(batch):
    builder = AggregateBuilder()
    add = builder.add
    for partition_key, data in batch:
        add(partition_key, data, size_max=1 << 20)
    return builder.finish()


def encode_aws_kinesis_agg(batch):
    aggregator = aws_kinesis_agg.aggregator.RecordAggregator()
    for partition_key, data in batch:
        aggregator.add_user_record(partition_key, data)
    return aggregator.clear_and_get().get_contents()[2]


def encode_aiokpl(batch):
    return aiokpl.aggregation.encode_aggregated([aiokpl.aggregation.UserRecord(*record) for record in batch])


def encode_protobuf(batch):
    message = AggregatedRecord()
    indexes = {}
    add = message.records.add
    for partition_key, data in batch:
        index = indexes.get(partition_key)
        if index is None:
            index = indexes[partition_key] = len(indexes)
            message.partition_key_table.append(partition_key)
        add(partition_key_index=index, data=data)
    body = message.SerializeToString()
    return MAGIC + body + hashlib.md5(body, usedforsecurity=False).digest()


def decode_ours(encoded):
    return open_aggregate(encoded).sub_records()


def decode_aws_kinesis_agg(record):
    # It returns dicts of base64, as Lambda events have it; a caller decodes what it reads.
    found = aws_kinesis_agg.deaggregator.iter_deaggregate_records(record, data_format="Boto3")
    return [(it["kinesis"]["partitionKey"], base64.b64decode(it["kinesis"]["data"])) for it in found]


def decode_aiokpl(encoded):
    return [(record.partition_key, record.data) for record in aiokpl.aggregation.decode_aggregated(encoded)]


def decode_protobuf(encoded):
    body = encoded[len(MAGIC) : -16]
    if not encoded.startswith(MAGIC) or hashlib.md5(body, usedforsecurity=False).digest() != encoded[-16:]:
        raise ValueError("no aggregate")
    message = AggregatedRecord.FromString(body)
    keys = list(message.partition_key_table)
    return [(keys[record.partition_key_index], record.data) for record in message.records]


def main():
    for title, batch in SHAPES.items():
        encoded = encode_ours(batch)
        boto3_record = {
            "Data": encoded, "PartitionKey": "a", "SequenceNumber": "1", "ApproximateArrivalTimestamp": 0,
            "EncryptionType": "NONE",
        }  # fmt: skip
        encoders = {
            OURS: lambda batch=batch: encode_ours(batch),
            "protobuf (C)": lambda batch=batch: encode_protobuf(batch),
            "aiokpl": lambda batch=batch: encode_aiokpl(batch),
            "aws-kinesis-agg": lambda batch=batch: encode_aws_kinesis_agg(batch),
        }
        decoders = {
            OURS: lambda encoded=encoded: decode_ours(encoded),
            "protobuf (C)": lambda encoded=encoded: decode_protobuf(encoded),
            "aiokpl": lambda encoded=encoded: decode_aiokpl(encoded),
            "aws-kinesis-agg": lambda record=boto3_record: decode_aws_kinesis_agg(record),
        }
        floor = {"md5 alone": lambda encoded=encoded: hashlib.md5(encoded, usedforsecurity=False).digest()}
        for name, encode in encoders.items():
            assert encode() == encoded, name
        for name, decode in decoders.items():
            assert [(record[0], record[-1]) for record in decode()] == batch, name
        for verb, candidates in (("encode", encoders), ("decode", decoders)):
            figures = compare(candidates | floor, len(batch), reference=OURS)
            print_table(f"{verb}: {title}, {BUILD}", figures, unit="record", reference=OURS)
            if verb == "decode" and BUILD == "compiled":
                ratio = figures["protobuf (C)"].ratio
                # Equal speed, with 3 % for the noise of the measurement.
                print(f"  {target(f'decode {title}: protobuf in C / ours, compiled', ratio, 0.97)}")


if __name__ == "__main__":
    main()
