"""The aggregate format by protobuf itself: its descriptor is built here, from the KPL's aggregation-format.md."""

import hashlib
from collections.abc import Iterable

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

MAGIC = b"\xf3\x89\x9a\xc2"
DIGEST_BYTES = 16

_OPTIONAL, _REQUIRED, _REPEATED = (
    FieldDescriptorProto.LABEL_OPTIONAL,
    FieldDescriptorProto.LABEL_REQUIRED,
    FieldDescriptorProto.LABEL_REPEATED,
)
_UINT64, _STRING, _BYTES, _MESSAGE = (
    FieldDescriptorProto.TYPE_UINT64,
    FieldDescriptorProto.TYPE_STRING,
    FieldDescriptorProto.TYPE_BYTES,
    FieldDescriptorProto.TYPE_MESSAGE,
)


def _message(name: str, *fields: tuple[str, int, int, str]) -> DescriptorProto:
    """Fields are (name, label, type, name of the message type); their numbers count from 1."""
    return DescriptorProto(
        name=name,
        field=[
            FieldDescriptorProto(name=field, number=number, label=label, type=kind, type_name=type_name or None)
            for number, (field, label, kind, type_name) in enumerate(fields, 1)
        ],
    )


_POOL = DescriptorPool()
_POOL.Add(
    FileDescriptorProto(
        name="aggregated_record.proto",
        syntax="proto2",
        message_type=[
            _message(
                "AggregatedRecord",
                ("partition_key_table", _REPEATED, _STRING, ""),
                ("explicit_hash_key_table", _REPEATED, _STRING, ""),
                ("records", _REPEATED, _MESSAGE, ".Record"),
            ),
            _message("Tag", ("key", _REQUIRED, _STRING, ""), ("value", _OPTIONAL, _STRING, "")),
            _message(
                "Record",
                ("partition_key_index", _REQUIRED, _UINT64, ""),
                ("explicit_hash_key_index", _OPTIONAL, _UINT64, ""),
                ("data", _REQUIRED, _BYTES, ""),
                ("tags", _REPEATED, _MESSAGE, ".Tag"),
            ),
        ],
    )
)
AggregatedRecord = GetMessageClass(_POOL.FindMessageTypeByName("AggregatedRecord"))


def write_aggregate(records: Iterable[tuple[str, str | None, bytes]]) -> bytes:
    """Records are (partition key, explicit hash key, data). Each table holds a text once, in the order of first use."""
    message = AggregatedRecord()
    keys: dict[str, int] = {}
    hash_keys: dict[str, int] = {}
    for partition_key, explicit_hash_key, data in records:
        record = message.records.add(partition_key_index=keys.setdefault(partition_key, len(keys)), data=data)
        if explicit_hash_key is not None:
            record.explicit_hash_key_index = hash_keys.setdefault(explicit_hash_key, len(hash_keys))
    message.partition_key_table.extend(keys)
    message.explicit_hash_key_table.extend(hash_keys)
    encoded = message.SerializeToString(deterministic=True)
    return MAGIC + encoded + hashlib.md5(encoded).digest()


def read_aggregate(data: bytes) -> list[tuple[str, str | None, bytes]] | None:
    """None if the data is not an aggregate by its magic number and digest. Raises if its message is not valid."""
    message = data[len(MAGIC) : -DIGEST_BYTES]
    if not data.startswith(MAGIC) or hashlib.md5(message).digest() != data[-DIGEST_BYTES:]:
        return None
    parsed = AggregatedRecord.FromString(message)
    return [
        (
            parsed.partition_key_table[record.partition_key_index],
            parsed.explicit_hash_key_table[record.explicit_hash_key_index]
            if record.HasField("explicit_hash_key_index")
            else None,
            record.data,
        )
        for record in parsed.records
    ]
