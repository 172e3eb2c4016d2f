"""JSON bodies of calls: what the codec of every operation uses.

A request is encoded as a list of pieces, so that a large one is hashed and written without being joined. Answers are
decoded into structs that carry AWS's member names. A body may be any buffer: nothing refers to it afterwards.
"""

from typing import Any, Final, Generic, TypeVar

import msgspec

from anabranch._model.streams import StreamName
from anabranch.errors import CodecError

__all__ = ["JSON", "AnswerDecoder", "Buffer", "encode_request", "stream_members"]

JSON: Final = "application/x-amz-json-1.1"

Buffer = bytes | bytearray | memoryview
W = TypeVar("W")

_encode_json: Final = msgspec.json.Encoder().encode


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

    __slots__ = ("_decode_json", "_operation")

    def __init__(self, operation: str, shape: type[W]) -> None:
        self._operation = operation
        self._decode_json = msgspec.json.Decoder(shape).decode

    def decode(self, body: Buffer) -> W:
        try:
            return self._decode_json(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError
            raise CodecError(
                f"{self._operation} was answered with {len(body)} bytes of something else: {error}"
            ) from None
