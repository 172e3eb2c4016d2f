"""The bytes of an HTTP/1.1 response: its head and its chunked body. Pure.

The parser is strict where leniency would let two readers see two different responses: folded lines, header names that
are not tokens, two lengths that differ. A refused response is a `TransportError`: the service may have acted, but the
response cannot be read.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from anabranch.errors import TransportError

CHUNKED: Final = -1
UNTIL_CLOSE: Final = -2

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n\x00]{0,200})?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_HEADERS_MAX: Final = 128

_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?")
_SHORT_LINE_BYTES: Final = 16  # nearly every size line fits into this
_LINE_BYTES_MAX: Final = 4_096
_TRAILER_BYTES_MAX: Final = 16_384


@dataclass(slots=True)
class ResponseHead:
    status: int
    headers: dict[bytes, bytes]
    """Names in lower case. The values of a repeated name are joined with commas."""
    length: int
    """The length of the body in bytes, or CHUNKED, or UNTIL_CLOSE."""
    keep_alive: bool


def parse_response_head(block: bytes) -> ResponseHead:
    """`block` is everything before the empty line."""
    lines = block.split(b"\r\n")
    status, keep_alive = _status(lines[0])
    if len(lines) > _HEADERS_MAX:
        raise TransportError(f"the response has more than {_HEADERS_MAX} headers")
    headers: dict[bytes, bytes] = {}
    for line in lines[1:]:
        written, colon, value = line.partition(b":")
        if not colon:
            raise TransportError(f"a response header is not `name: value`: {line[:80]!r}")
        name = _name(written)
        value = value.strip(b" \t")
        headers[name] = headers[name] + b", " + value if name in headers else value
    length = _body_length(status, headers)
    if b"connection" in headers:
        wish = headers[b"connection"].lower()
        keep_alive = b"close" not in wish and (keep_alive or b"keep-alive" in wish)
    if length == UNTIL_CLOSE or (length == CHUNKED and b"content-length" in headers):
        keep_alive = False  # RFC 9112, 6.3: with both framings, read it as chunked and close the connection
    return ResponseHead(status, headers, length, keep_alive)


# A server repeats the same few status lines and names: each is checked once.


@lru_cache(64)
def _status(line: bytes) -> tuple[int, bool]:
    """The status, and whether this HTTP version keeps connections open by default."""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise TransportError(f"the response is not HTTP/1.1: it starts with {line[:80]!r}")
    return int(match[2]), match[1] == b"1"


@lru_cache(256)
def _name(written: bytes) -> bytes:
    if _NAME.fullmatch(written) is None:
        raise TransportError(f"a response header is not `name: value`: its name is {written[:80]!r}")
    return written.lower()


def _body_length(status: int, headers: dict[bytes, bytes]) -> int:
    if status < 200 or status in {204, 304}:
        return 0
    coding = headers.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked":
            raise TransportError(f"the response has an unsupported transfer coding: {coding[:80]!r}")
        return CHUNKED
    length = headers.get(b"content-length")
    if length is None:
        return UNTIL_CLOSE
    if _LENGTH.fullmatch(length) is None:
        first, *others = length.split(b", ")
        if _LENGTH.fullmatch(first) is None or any(other != first for other in others):
            raise TransportError(f"the content-length of the response is not one number: {length[:80]!r}")
        length = first
    return int(length)


class ResponseChunks:
    """Returns the payload of a chunked body as views, without copying. The body may be split anywhere.

    Extensions and trailers are ignored. The caller limits the size of the body: a stream has no end.
    """

    def __init__(self) -> None:
        self.complete = False
        self.surplus = False
        """There are bytes after the end: the connection cannot be reused."""
        self._left = 0  # bytes of the current chunk's payload
        self._after_payload = False  # the CRLF after a payload is still missing
        self._in_trailers = False
        self._trailer_bytes = 0
        self._line = b""  # the start of a line that was cut at the end of the last call

    def feed(self, view: memoryview) -> list[memoryview]:
        payloads: list[memoryview] = []
        position, end = 0, len(view)
        while position < end:
            if self.complete:
                self.surplus = True
                break
            if self._left:
                step = min(self._left, end - position)
                payloads.append(view[position : position + step])
                self._left -= step
                position += step
                continue
            if self._after_payload and not self._line and bytes(view[position : position + 2]) == b"\r\n":
                self._after_payload = False
                position += 2
                continue
            position = self._take_line(view, position)
        return payloads

    def _take_line(self, view: memoryview, position: int) -> int:
        held = len(self._line)
        window = self._line + bytes(view[position : position + _SHORT_LINE_BYTES])
        line_end = window.find(b"\r\n")
        if line_end < 0:
            window = self._line + bytes(view[position : position + _LINE_BYTES_MAX + 2])
            line_end = window.find(b"\r\n")
        if line_end < 0:
            if len(window) > _LINE_BYTES_MAX:
                raise TransportError("the size line of a response chunk is too long")
            self._line = window
            return len(view)
        self._line = b""
        self._apply(window[:line_end])
        return position + line_end + 2 - held

    def _apply(self, line: bytes) -> None:
        if self._after_payload:
            if line:
                raise TransportError("a response chunk is longer than its size")
            self._after_payload = False
        elif self._in_trailers:
            self._trailer_bytes += len(line) + 2
            if self._trailer_bytes > _TRAILER_BYTES_MAX:
                raise TransportError("the trailers of the response are too long")
            self.complete = not line
        else:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise TransportError(f"the size of a response chunk is not a hexadecimal number: {line[:40]!r}")
            self._left = int(match[1], 16)
            self._after_payload = self._left > 0
            self._in_trailers = self._left == 0
