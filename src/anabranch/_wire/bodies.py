"""Bodies of calls, JSON and CBOR: what every operation's codec stands on.

Requests go out as JSON, as a list of pieces, so that a large one is hashed and written without ever being joined.
Answers are decoded by their content type into structs that carry AWS's member names; CBOR's milliseconds become
JSON's seconds on the way, so that one struct serves both. Bytes may be given in any buffer: nothing refers to them
afterwards.
"""

from typing import Any, Final, Generic, TypeVar

import msgspec

from anabranch._model.streams import StreamName
from anabranch._wire import cbor
from anabranch._wire.timestamps import Timestamp
from anabranch.errors import CodecError

__all__ = ["CBOR", "JSON", "AnswerDecoder", "Buffer", "encode_request", "is_cbor", "stream_members"]

JSON: Final = "application/x-amz-json-1.1"
CBOR: Final = "application/x-amz-cbor-1.1"

Buffer = bytes | bytearray | memoryview
W = TypeVar("W")

_encode_json: Final = msgspec.json.Encoder().encode


def is_cbor(content_type: str | None) -> bool:
    return content_type is not None and "cbor" in content_type.lower()


def encode_request(members: dict[str, Any]) -> list[bytes]:
    """One piece: the members that are not None."""
    try:
        return [_encode_json({name: value for name, value in members.items() if value is not None})]
    except UnicodeEncodeError as error:
        raise CodecError(f"a request holds a text that is not Unicode: {error}") from None


def stream_members(stream: StreamName) -> dict[str, str]:
    """An ARN where it is known: it is what names a stream of another account."""
    return {"StreamName": stream.name} if stream.arn is None else {"StreamARN": stream.arn}


class AnswerDecoder(Generic[W]):
    """Decodes one operation's answers into `shape`, whose field names on the wire are AWS's."""

    __slots__ = ("_decode_json", "_operation", "_shape")

    def __init__(self, operation: str, shape: type[W]) -> None:
        self._operation = operation
        self._shape = shape
        self._decode_json = msgspec.json.Decoder(shape).decode

    def decode(self, body: Buffer, content_type: str | None) -> W:
        try:
            if is_cbor(content_type):
                return msgspec.convert(_with_seconds(cbor.decode(body)), self._shape)
            return self._decode_json(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # bad UTF-8 and cbor's are ValueErrors
            raise CodecError(
                f"{self._operation} was answered with {len(body)} bytes of something else: {error}"
            ) from None


def _with_seconds(value: Any) -> Any:
    """CBOR's timestamps as JSON has them. Kinesis names each `...Timestamp`, which tells where the tag is missing."""
    if isinstance(value, dict):
        return {
            name: _seconds(member) if name.endswith("Timestamp") else _with_seconds(member)
            for name, member in value.items()
        }
    if isinstance(value, list):
        return [_with_seconds(item) for item in value]
    return float(value) if isinstance(value, Timestamp) else value


def _seconds(value: Any) -> Any:
    if type(value) in (int, float):
        value = Timestamp.from_milliseconds(value)
    return float(value) if isinstance(value, Timestamp) else value
