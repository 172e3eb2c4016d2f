"""From a decoded body to a request: every member of the type its shape asks for, or a SerializationException.

JSON has blobs as base64 text and timestamps as numbers of seconds; CBOR has byte strings, and milliseconds with or
without their tag. Members that the service does not know are dropped, null members count as absent. Constraints
are checked later, by `validation`.
"""

import binascii
from collections.abc import Callable
from typing import Any, NamedTuple

import pybase64

from anabranch._wire.timestamps import Timestamp
from anabranch.errors import CodecError
from anabranch.local.actions.registry import REQUESTS
from anabranch.local.errors import LocalError, unknown_operation
from anabranch.local.shapes import (
    BlobShape,
    BooleanShape,
    IntegerShape,
    ListShape,
    MapShape,
    Shape,
    StringShape,
    StructureShape,
)

__all__ = ["from_cbor", "from_json"]


def from_json(operation: str, body: Any) -> dict[str, Any]:
    return _request(operation, body, _JSON)


def from_cbor(operation: str, body: Any) -> dict[str, Any]:
    return _request(operation, body, _CBOR)


class _Encoding(NamedTuple):
    blob: Callable[[Any], bytes]
    timestamp: Callable[[Any], Timestamp]


def _request(operation: str, body: Any, encoding: _Encoding) -> dict[str, Any]:
    shape = REQUESTS.get(operation)
    if shape is None:
        raise unknown_operation(operation)
    return _structure(shape, body, encoding)


def _structure(shape: StructureShape, value: Any, encoding: _Encoding) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _misplaced(value, "Structure")
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
        raise _misplaced(value, name)
    return value


def _integer(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise _misplaced(value, "Integer")
    return value


def _json_blob(value: Any) -> bytes:
    if type(value) is not str:
        raise _misplaced(value, "Blob")
    try:
        return pybase64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise _refused(f"'{value[:80]}' can not be converted to a Blob: it is not base64") from None


def _cbor_blob(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    raise _misplaced(value, "Blob")


def _json_timestamp(value: Any) -> Timestamp:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _misplaced(value, "Timestamp")
    return _timestamp(value * 1000)


def _cbor_timestamp(value: Any) -> Timestamp:
    if isinstance(value, Timestamp):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _misplaced(value, "Timestamp")
    return _timestamp(value)


def _timestamp(milliseconds: float) -> Timestamp:
    try:
        return Timestamp.from_milliseconds(milliseconds)
    except (CodecError, OverflowError):
        raise _refused("A number this large can not be converted to a Timestamp") from None


def _refused(message: str) -> LocalError:
    return LocalError("SerializationException", message)


def _misplaced(value: Any, expected: str) -> LocalError:
    """The words of the service's Java parser, which name Java's classes."""
    if isinstance(value, list):
        return _refused("Start of list found where not expected")
    if isinstance(value, dict):
        return _refused("Start of structure or map found where not expected.")
    found = "java.lang.Object"
    if isinstance(value, bool):
        found = "java.lang.Boolean"
    elif isinstance(value, str):
        found = "java.lang.String"
    elif isinstance(value, bytes):
        found = "java.nio.HeapByteBuffer"
    elif isinstance(value, int | float):
        found = "com.amazon.coral.value.json.numbers.TruncatingBigNumber"
    return _refused(f"class {found} can not be converted to an {expected}")


_JSON = _Encoding(_json_blob, _json_timestamp)
_CBOR = _Encoding(_cbor_blob, _cbor_timestamp)
