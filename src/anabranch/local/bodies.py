"""Bodies as the service writes them: JSON, which most SDKs speak, and CBOR, which AWS's Java SDK and KCL speak.

A codec turns a body into a request of plain members and an answer into bytes. What a member must be is known to
`serialization`, what it may be to `validation`; here are only bytes.
"""

from typing import Any, Final, Protocol

import msgspec

from anabranch._wire import cbor
from anabranch._wire.timestamps import json_enc_hook
from anabranch.errors import CodecError
from anabranch.local.calls import PutRecordsRequest
from anabranch.local.errors import LocalError
from anabranch.local.serialization import from_cbor, from_json

__all__ = ["CBOR", "CODECS", "JSON", "BodyCodec", "Call"]

Call = dict[str, Any] | PutRecordsRequest
"""A request's members, or the typed form of the one request that is worth it."""


class BodyCodec(Protocol):
    @property
    def content_type(self) -> str: ...
    def decode(self, operation: str, body: bytes | bytearray) -> Call: ...
    def encode(self, answer: Any) -> bytes: ...


class _Json:
    content_type: Final = "application/x-amz-json-1.1"

    def __init__(self) -> None:
        self._put_records = msgspec.json.Decoder(PutRecordsRequest)
        self._encoder = msgspec.json.Encoder(enc_hook=json_enc_hook)

    def decode(self, operation: str, body: bytes | bytearray) -> Call:
        if operation == "PutRecords":
            try:
                return self._put_records.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # the generic path knows AWS's words for what is wrong
        try:
            members = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise LocalError("SerializationException", "") from None
        return from_json(operation, members)

    def encode(self, answer: Any) -> bytes:
        return self._encoder.encode(answer)


class _Cbor:
    content_type: Final = "application/x-amz-cbor-1.1"

    def decode(self, operation: str, body: bytes | bytearray) -> Call:
        try:
            members = cbor.decode(body)
        except CodecError:
            raise LocalError("SerializationException", "") from None
        return from_cbor(operation, members)

    def encode(self, answer: Any) -> bytes:
        return cbor.encode(_plain(answer))


def _plain(value: Any) -> Any:
    """Dicts and lists all the way down: CBOR has no typed structs."""
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return _plain(value.members())  # type: ignore[attr-defined]
    return value


JSON: Final[BodyCodec] = _Json()
CBOR: Final[BodyCodec] = _Cbor()
CODECS: Final[dict[str, BodyCodec]] = {JSON.content_type: JSON, CBOR.content_type: CBOR}
