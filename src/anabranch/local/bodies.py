"""Request and response bodies: JSON for most SDKs, CBOR for the AWS SDK for Java and KCL.

A codec decodes a body into the members of a request, in the types of their shapes. A wrong type raises
SerializationException; `shapes.validate` checks constraints later. Unknown members and null members are dropped.

JSON encodes blobs as base64 strings and timestamps as seconds. CBOR encodes blobs as byte strings and timestamps as
milliseconds, with or without a tag.
"""

import binascii
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, TypeVar

import msgspec
import pybase64

from anabranch.errors import CodecError
from anabranch.local import cbor, shapes
from anabranch.local.actions.records import PutRecordsRequest
from anabranch.local.errors import LocalError, serialization
from anabranch.local.state.identifiers import Timestamp

T = TypeVar("T")

RequestMembers = dict[str, Any] | PutRecordsRequest
"""PutRecords is the hot path and has its own type."""


class BodyCodec(ABC):
    content_type: ClassVar[str]
    timestamp_unit_ms: ClassVar[int]

    @abstractmethod
    def decode(self, operation: str, body: bytes | bytearray) -> RequestMembers: ...

    @abstractmethod
    def encode(self, response: Any) -> bytes: ...

    @abstractmethod
    def _blob(self, value: Any) -> bytes: ...

    def convert(self, operation: str, members: Any) -> dict[str, Any]:
        """The decoded members of a request in the types of their shapes."""
        return self._structure(shapes.REQUESTS[operation], members)

    def _structure(self, shape: shapes.StructureShape, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _type_error(value, "Structure")
        members = shape.members
        return {
            name: self._member(members[name], member)
            for name, member in value.items()
            if member is not None and name in members
        }

    def _member(self, shape: shapes.Shape, value: Any) -> Any:
        match shape:
            case shapes.StringShape():
                return _exactly(str, value, "String")
            case shapes.IntegerShape():
                is_whole = isinstance(value, float) and value.is_integer()
                return _exactly(int, int(value) if is_whole else value, "Integer")
            case shapes.BooleanShape():
                return _exactly(bool, value, "Boolean")
            case shapes.BlobShape():
                return self._blob(value)
            case shapes.ListShape():
                items = _exactly(list, value, "List")
                return [self._member(shape.item, item) for item in items if item is not None]
            case shapes.MapShape():
                pairs = _exactly(dict, value, "Map")
                return {key: _exactly(str, member, "String") for key, member in pairs.items() if member is not None}
            case shapes.StructureShape():
                return self._structure(shape, value)
            case _:
                return self._timestamp(value)

    def _timestamp(self, value: Any) -> Timestamp:
        if isinstance(value, Timestamp):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _type_error(value, "Timestamp")
        try:
            return Timestamp.from_milliseconds(value * self.timestamp_unit_ms)
        except (CodecError, OverflowError):
            raise serialization("A number this large can not be converted to a Timestamp") from None


class _Json(BodyCodec):
    content_type = "application/x-amz-json-1.1"
    timestamp_unit_ms = 1000
    _put_records: ClassVar = msgspec.json.Decoder(PutRecordsRequest)
    _encoder: ClassVar = msgspec.json.Encoder(enc_hook=float)  # for a Timestamp: its seconds

    def decode(self, operation: str, body: bytes | bytearray) -> RequestMembers:
        if operation == "PutRecords":
            try:
                return self._put_records.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # decode it below, for AWS's error messages
        try:
            members = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise serialization("") from None
        return self.convert(operation, members)

    def encode(self, response: Any) -> bytes:
        return self._encoder.encode(response)

    def _blob(self, value: Any) -> bytes:
        try:
            return pybase64.b64decode(_exactly(str, value, "Blob"), validate=True)
        except (binascii.Error, ValueError):
            raise serialization(f"'{value[:80]}' can not be converted to a Blob: it is not base64") from None


class _Cbor(BodyCodec):
    content_type = "application/x-amz-cbor-1.1"
    timestamp_unit_ms = 1

    def decode(self, operation: str, body: bytes | bytearray) -> RequestMembers:
        try:
            members = cbor.decode(body)
        except CodecError:
            raise serialization("") from None
        return self.convert(operation, members)

    def encode(self, response: Any) -> bytes:
        return cbor.encode(response)

    def _blob(self, value: Any) -> bytes:
        return _exactly(bytes, value, "Blob")


def _exactly(kind: type[T], value: Any, name: str) -> T:
    if type(value) is not kind:
        raise _type_error(value, name)
    return value


_JAVA_CLASSES: Final[dict[type, str]] = {
    bool: "java.lang.Boolean",
    bytes: "java.nio.HeapByteBuffer",
    str: "java.lang.String",
    **dict.fromkeys((int, float, Timestamp), "com.amazon.coral.value.json.numbers.TruncatingBigNumber"),
}


def _type_error(value: Any, expected: str) -> LocalError:
    """In the words of AWS's parser, which names Java classes."""
    if isinstance(value, list):
        return serialization("Start of list found where not expected")
    if isinstance(value, dict):
        return serialization("Start of structure or map found where not expected.")
    found = _JAVA_CLASSES.get(type(value), "java.lang.Object")
    return serialization(f"class {found} can not be converted to an {expected}")


JSON: Final[BodyCodec] = _Json()
CBOR: Final[BodyCodec] = _Cbor()
CODECS: Final[dict[str, BodyCodec]] = {JSON.content_type: JSON, CBOR.content_type: CBOR}
