"""AWS event-stream messages: the frames in which SubscribeToShard pushes its events.

    total length (4) | header length (4) | CRC-32 of these 8 bytes (4) | headers | payload | CRC-32 of all before (4)

All numbers are big-endian. `MessageDecoder` accepts bytes that are split anywhere. It uses a length only after checking
its checksum and its bounds, so at most one frame is buffered. A stream repeats a few header blocks. So each block is
parsed once and cached, and messages share its headers, read-only. SubscribeToShard uses text headers only, so headers
of other types are skipped.

The meaning of messages is in `bodies`.
"""

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from zlib import crc32

import msgspec

from anabranch.errors import CodecError

FRAME_BYTES_MAX: Final = 24 << 20  # the limit of the AWS SDKs
HEADERS_BYTES_MAX: Final = 128 << 10  # the limit of the AWS SDKs

_PRELUDE: Final = struct.Struct(">III")
_LENGTHS: Final = struct.Struct(">II")
_CRC: Final = struct.Struct(">I")
_VALUE_LENGTH: Final = struct.Struct(">H")
_OVERHEAD_BYTES: Final = _PRELUDE.size + _CRC.size
_CACHED_BLOCKS_MAX: Final = 64
_CACHED_BLOCK_BYTES_MAX: Final = 1024

# types of header values
_BYTES_TYPE, _STRING_TYPE = 6, 7
_FIXED_SIZES: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""The size of each other type: true, false, integers of 1, 2, 4 and 8 bytes, timestamp, UUID."""


class Message(msgspec.Struct, frozen=True):
    headers: Mapping[str, str]
    payload: bytes | memoryview


class MessageDecoder:
    """Splits a stream of bytes into messages. After a CodecError the decoder is out of sync: close the stream."""

    __slots__ = ("_cached_headers", "_frame", "expected_bytes")

    def __init__(self) -> None:
        self._frame = bytearray()
        """The received part of the incomplete frame. It grows as bytes arrive, not to the length in a header."""
        self.expected_bytes = 0
        """The total length of the incomplete message; 0 until its first twelve bytes have arrived."""
        self._cached_headers: dict[bytes, Mapping[str, str]] = {}
        """Parsed headers, by the bytes of their block."""

    @property
    def buffered_bytes(self) -> int:
        """The size of the incomplete message. If it is not 0 when the stream ends, that message was cut off."""
        return len(self._frame)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Returns the messages that are complete now. Their payloads refer to a copy of `data`."""
        self._frame += data
        if len(self._frame) < max(self.expected_bytes, _PRELUDE.size):
            return []
        messages: list[Message] = []
        view, start = memoryview(self._frame), 0
        self.expected_bytes = 0
        while len(view) - start >= _PRELUDE.size:
            total, headers_bytes = _read_prelude(view, start)
            if len(view) - start < total:
                self.expected_bytes = total
                break
            whole = view[start : start + total]
            headers = self._checked_headers(whole, headers_bytes)
            messages.append(Message(headers, whole[_PRELUDE.size + headers_bytes : -_CRC.size]))
            start += total
        if start:
            self._frame = bytearray(view[start:])
        return messages

    def _checked_headers(self, whole: memoryview, headers_bytes: int) -> Mapping[str, str]:
        """Checks the checksum of `whole`, one frame with checked lengths, and returns its headers."""
        end = len(whole) - _CRC.size
        if crc32(whole[:end]) != _CRC.unpack_from(whole, end)[0]:
            raise CodecError(f"event-stream frame of {len(whole)} bytes has a wrong checksum")
        return self._headers(bytes(whole[_PRELUDE.size : _PRELUDE.size + headers_bytes]))

    def _headers(self, block: bytes) -> Mapping[str, str]:
        known = self._cached_headers.get(block)
        if known is None:
            known = MappingProxyType(_decode_headers(block))
            if len(self._cached_headers) < _CACHED_BLOCKS_MAX and len(block) <= _CACHED_BLOCK_BYTES_MAX:
                self._cached_headers[block] = known
        return known


def _read_prelude(view: memoryview, start: int) -> tuple[int, int]:
    """Returns the lengths of the frame and of its headers, both checked."""
    total, headers_bytes, prelude_crc = _PRELUDE.unpack_from(view, start)
    if crc32(view[start : start + _LENGTHS.size]) != prelude_crc:
        raise CodecError("event-stream frame has a wrong checksum over its lengths")
    if not _OVERHEAD_BYTES + headers_bytes <= total <= FRAME_BYTES_MAX or headers_bytes > HEADERS_BYTES_MAX:
        raise CodecError(f"event-stream frame claims {total} bytes, {headers_bytes} of them headers")
    return total, headers_bytes


def _decode_headers(block: bytes) -> dict[str, str]:
    headers: dict[str, str] = {}
    position = 0
    try:
        while position < len(block):
            name_end = position + 1 + block[position]
            name = block[position + 1 : name_end].decode()
            if not name or name in headers:
                raise CodecError(f"event-stream header {name!r} is empty or appears twice")
            text, position = _read_value(block, name_end)
            if text is not None:
                headers[name] = text
    except (IndexError, struct.error):
        raise CodecError("event-stream header is longer than the header block") from None
    except UnicodeDecodeError as error:
        raise CodecError(f"event-stream header is not UTF-8: {error}") from None
    return headers


def _read_value(block: bytes, position: int) -> tuple[str | None, int]:
    """Returns the value, or None if it is not text, and the position after it."""
    kind = block[position]
    position += 1
    if kind in (_BYTES_TYPE, _STRING_TYPE):
        (size,) = _VALUE_LENGTH.unpack_from(block, position)
        position += _VALUE_LENGTH.size
    elif kind in _FIXED_SIZES:
        size = _FIXED_SIZES[kind]
    else:
        raise CodecError(f"event-stream header has the unknown type {kind}")
    end = position + size
    if end > len(block):
        raise IndexError
    return block[position:end].decode() if kind == _STRING_TYPE else None, end


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Returns the header block for `encode_frame`. If the same headers are sent repeatedly, keep it."""
    parts: list[bytes] = []
    for name, text in headers.items():
        name_bytes, value = name.encode(), text.encode()
        parts += (
            bytes([len(name_bytes)]), name_bytes, bytes([_STRING_TYPE]), _VALUE_LENGTH.pack(len(value)), value,
        )  # fmt: skip
    return b"".join(parts)


def encode_frame(header_block: bytes, payload: bytes) -> bytes:
    lengths = _LENGTHS.pack(_OVERHEAD_BYTES + len(header_block) + len(payload), len(header_block))
    prelude_crc = _CRC.pack(crc := crc32(lengths))
    crc = crc32(payload, crc32(header_block, crc32(prelude_crc, crc)))  # over all parts: each call continues the last
    return b"".join((lengths, prelude_crc, header_block, payload, _CRC.pack(crc)))


def encode_message(headers: Mapping[str, str], payload: bytes) -> bytes:
    return encode_frame(encode_headers(headers), payload)
