"""Bytes to values and back: what `decode=` and `encode=` accept.

| given                                   | decodes                     | encodes                      |
|-----------------------------------------|-----------------------------|------------------------------|
| `bytes` (the default)                   | the data itself             | bytes, bytearray, memoryview |
| `str`                                   | UTF-8                       | UTF-8                        |
| a pydantic model                        | JSON                        | JSON                         |
| any other type: dataclass, TypedDict,   | JSON, checked against it    | JSON                         |
| msgspec.Struct, dict, list[int], ...    |                             |                              |
| a function                              | what it returns             | the bytes that it returns    |
| `json_lines(type)`                      | a list, one value per line  | one line per value           |

pydantic models are recognised by their methods; pydantic is not imported. Errors are raised unchanged.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast, get_origin

import msgspec

from anabranch._model.kinds import is_async
from anabranch.errors import ConfigurationError

__all__ = ["Decoder", "Encoder", "JsonLines", "decode_with", "encode_with", "json_lines"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    ValueT = TypeVar("ValueT", default=bytes)  # a Consumer without decode= is a Consumer[bytes]
else:
    from typing import TypeVar

    ValueT = TypeVar("ValueT")

T = TypeVar("T")

Decoder: TypeAlias = type[T] | Callable[[bytes], T]
Encoder: TypeAlias = type[T] | Callable[[T], bytes]


class JsonLines(msgspec.Struct, frozen=True):
    """Several values in one record, one per line. The record is acknowledged as a whole."""

    type: Any

    def decode(self, data: bytes) -> list[Any]:
        return msgspec.json.Decoder(self.type).decode_lines(data)

    def encode(self, values: Sequence[Any]) -> bytes:
        return msgspec.json.Encoder().encode_lines(values)


def json_lines(of: Any = Any) -> Any:
    return JsonLines(of)


def decode_with(decode: Any) -> Callable[[bytes], Any] | None:
    """A function from bytes to the value; None if the value is the data itself."""
    if decode is bytes:
        return None
    if decode is str:
        return bytes.decode
    if isinstance(decode, JsonLines):
        return decode.decode
    if hasattr(decode, "model_validate_json"):
        return cast("Callable[[bytes], Any]", decode.model_validate_json)
    if _is_type(decode):
        try:
            return msgspec.json.Decoder(decode).decode
        except TypeError as error:
            raise ConfigurationError(f"decode={decode!r} is not a type that JSON can decode to: {error}") from error
    if is_async(decode):
        raise ConfigurationError(f"decode={decode!r} is an async function; pass a plain function that takes bytes")
    if callable(decode):
        return cast("Callable[[bytes], Any]", decode)
    raise ConfigurationError(f"decode must be a type or a function that takes bytes, not {decode!r}")


def encode_with(encode: Any) -> Callable[[Any], bytes]:
    """A function from the value to bytes."""
    if encode is bytes:
        return _encode_bytes
    if encode is str:
        return _encode_text
    if isinstance(encode, JsonLines):
        return encode.encode
    if hasattr(encode, "model_dump_json"):
        return _encode_model
    if _is_type(encode):
        return msgspec.json.Encoder().encode
    if is_async(encode):
        raise ConfigurationError(f"encode={encode!r} is an async function; pass a plain function that returns bytes")
    if callable(encode):
        return partial(_encode_by, encode)
    raise ConfigurationError(f"encode must be a type or a function that returns bytes, not {encode!r}")


def _is_type(given: Any) -> bool:
    """Types, including generic ones (list[int]) and unions (Order | Refund), but not functions."""
    return inspect.isclass(given) or get_origin(given) is not None or given is Any or hasattr(given, "__supertype__")


def _encode_by(function: Callable[[Any], Any], value: Any) -> bytes:
    data = function(value)
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    name = f"{function.__module__}.{function.__qualname__}" if inspect.isfunction(function) else repr(function)
    if isinstance(data, str):
        raise TypeError(
            f"encode={name} returned str; it must return bytes, as in "
            f"encode=lambda value: {getattr(function, '__name__', 'function')}(value).encode()"
        )
    raise TypeError(f"encode={name} returned {type(data).__name__}; it must return bytes")


def _encode_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"the value is {type(value).__name__}, not bytes: encode it, or pass encode= to the producer")


def _encode_text(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"encode=str takes str, not {type(value).__name__}")


def _encode_model(value: Any) -> bytes:
    return str(value.model_dump_json()).encode()
