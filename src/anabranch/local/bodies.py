"""Request and response bodies: JSON for most SDKs, CBOR for the AWS SDK for Java and KCL.

A codec decodes a body into the members of a request and converts them to the types of their shapes. A wrong type raises
SerializationException; `shapes.validate` checks constraints later. Unknown members are dropped, and null members count
as absent.

JSON encodes blobs as base64 strings and timestamps as seconds. CBOR encodes blobs as byte strings and timestamps as
milliseconds, with or without a tag.
"""

import binascii
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import pybase64

from anabranch.errors import CodecError
from anabranch.local import cbor
from anabranch.local.actions.records import PutRecordsRequest
from anabranch.local.errors import LocalError, unknown_operation
from anabranch.local.shapes import (
    REQUESTS,
    BlobShape,
    BooleanShape,
    IntegerShape,
    ListShape,
    MapShape,
    Shape,
    StringShape,
    StructureShape,
)
from anabranch.local.state.identifiers import Timestamp
from anabranch.local.state.shard import StoredRecord


def from_json(operation: str, members: Any) -> dict[str, Any]:
    return _request(operation, members, _JSON_ENCODING)


def from_cbor(operation: str, members: Any) -> dict[str, Any]:
    return _request(operation, members, _CBOR_ENCODING)


class _Encoding(NamedTuple):
    """How one format decodes the types that JSON and CBOR encode differently."""

    blob: Callable[[Any], bytes]
    timestamp: Callable[[Any], Timestamp]


def _request(operation: str, members: Any, encoding: _Encoding) -> dict[str, Any]:
    shape = REQUESTS.get(operation)
    if shape is None:
        raise unknown_operation(operation)
    return _structure(shape, members, encoding)


def _structure(shape: StructureShape, value: Any, encoding: _Encoding) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _type_error(value, "Structure")
    members = shape.members
    return {
        name: _member(members[name], member, encoding)
        for name, member in value.items()
        if member is not None and name in members
    }


def _member(shape: Shape, value: Any, encoding: _Encoding) -> Any:
    match shape:
        case StringShape():
            return _exactly(str, value, "String")
        case IntegerShape():
            return _integer(value)
        case BooleanShape():
            return _exactly(bool, value, "Boolean")
        case BlobShape():
            return encoding.blob(value)
        case ListShape():
            items = _exactly(list, value, "List")
            return [_member(shape.item, item, encoding) for item in items if item is not None]
        case MapShape():
            pairs = _exactly(dict, value, "Map")
            return {key: _exactly(str, member, "String") for key, member in pairs.items() if member is not None}
        case StructureShape():
            return _structure(shape, value, encoding)
        case _:
            return encoding.timestamp(value)


def _exactly(kind: type, value: Any, name: str) -> Any:
    if type(value) is not kind:
        raise _type_error(value, name)
    return value


def _integer(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise _type_error(value, "Integer")
    return value


def _json_blob(value: Any) -> bytes:
    if type(value) is not str:
        raise _type_error(value, "Blob")
    try:
        return pybase64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise _serialization_error(f"'{value[:80]}' can not be converted to a Blob: it is not base64") from None


def _cbor_blob(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    raise _type_error(value, "Blob")


def _json_timestamp(value: Any) -> Timestamp:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _type_error(value, "Timestamp")
    return _timestamp(value * 1000)


def _cbor_timestamp(value: Any) -> Timestamp:
    if isinstance(value, Timestamp):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _type_error(value, "Timestamp")
    return _timestamp(value)


def _timestamp(milliseconds: float) -> Timestamp:
    try:
        return Timestamp.from_milliseconds(milliseconds)
    except (CodecError, OverflowError):
        raise _serialization_error("A number this large can not be converted to a Timestamp") from None


def _serialization_error(message: str) -> LocalError:
    return LocalError("SerializationException", message)


def _type_error(value: Any, expected: str) -> LocalError:
    """In the words of AWS's parser, which names Java classes."""
    if isinstance(value, list):
        return _serialization_error("Start of list found where not expected")
    if isinstance(value, dict):
        return _serialization_error("Start of structure or map found where not expected.")
    found = "java.lang.Object"
    if isinstance(value, bool):
        found = "java.lang.Boolean"
    elif isinstance(value, str):
        found = "java.lang.String"
    elif isinstance(value, bytes):
        found = "java.nio.HeapByteBuffer"
    elif isinstance(value, int | float):
        found = "com.amazon.coral.value.json.numbers.TruncatingBigNumber"
    return _serialization_error(f"class {found} can not be converted to an {expected}")


_JSON_ENCODING = _Encoding(_json_blob, _json_timestamp)
_CBOR_ENCODING = _Encoding(_cbor_blob, _cbor_timestamp)


RequestMembers = dict[str, Any] | PutRecordsRequest
"""PutRecords is the hot path and has its own type."""


class BodyCodec(Protocol):
    @property
    def content_type(self) -> str: ...
    def decode(self, operation: str, body: bytes | bytearray) -> RequestMembers: ...
    def encode(self, response: Any) -> bytes: ...


class _Json:
    content_type: Final = "application/x-amz-json-1.1"

    def __init__(self) -> None:
        self._put_records = msgspec.json.Decoder(PutRecordsRequest)
        self._encoder = msgspec.json.Encoder(enc_hook=float)  # for a Timestamp: its seconds

    def decode(self, operation: str, body: bytes | bytearray) -> RequestMembers:
        if operation == "PutRecords":
            try:
                return self._put_records.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # decode it below, for AWS's error messages
        try:
            members = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise LocalError("SerializationException", "") from None
        return from_json(operation, members)

    def encode(self, response: Any) -> bytes:
        return self._encoder.encode(response)


class _Cbor:
    content_type: Final = "application/x-amz-cbor-1.1"

    def decode(self, operation: str, body: bytes | bytearray) -> RequestMembers:
        try:
            members = cbor.decode(body)
        except CodecError:
            raise LocalError("SerializationException", "") from None
        return from_cbor(operation, members)

    def encode(self, response: Any) -> bytes:
        return cbor.encode(_records_as_dicts(response))


def _records_as_dicts(value: Any) -> Any:
    """The CBOR encoder does not know structs."""
    if isinstance(value, dict):
        return {name: _records_as_dicts(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_records_as_dicts(item) for item in value]
    return value.members() if isinstance(value, StoredRecord) else value


JSON: Final[BodyCodec] = _Json()
CBOR: Final[BodyCodec] = _Cbor()
CODECS: Final[dict[str, BodyCodec]] = {JSON.content_type: JSON, CBOR.content_type: CBOR}
