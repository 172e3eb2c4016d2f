"""A chunked request body, put together piece by piece from bytes that are split anywhere. Pure.

Extensions and trailers are read past and dropped. The sum of the chunks, and what is held of a size line, are bounded.
"""

import re
from typing import Final

from anabranch._http.request_head import BadRequest

__all__ = ["ChunkedBody"]

_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?")
_LINE_BYTES_MAX: Final = 4_096
_TRAILER_BYTES_MAX: Final = 16_384


class ChunkedBody:
    def __init__(self, bytes_max: int) -> None:
        self.body = bytearray()
        self.complete = False
        self._bytes_max = bytes_max
        self._chunk_left = 0
        self._chunk_open = False  # the CRLF behind a chunk's data is still to come
        self._in_trailers = False
        self._trailer_bytes = 0

    def feed(self, data: bytes | bytearray | memoryview) -> int:
        """Takes what it can use and returns how many bytes that was; the rest is for the next call or request."""
        view = memoryview(data)
        used = 0
        while not self.complete:
            step = self._take(view[used:])
            if step == 0:
                break
            used += step
        return used

    def _take(self, view: memoryview) -> int:
        if self._chunk_left:
            step = min(self._chunk_left, len(view))
            self.body += view[:step]
            self._chunk_left -= step
            return step
        if self._chunk_open:
            if len(view) < 2:
                return 0
            if bytes(view[:2]) != b"\r\n":
                raise BadRequest(400, "a chunk is longer than its size says")
            self._chunk_open = False
            return 2
        line_end = bytes(view[: _LINE_BYTES_MAX + 2]).find(b"\r\n")
        if line_end < 0:
            if len(view) > _LINE_BYTES_MAX:
                raise BadRequest(400, "a chunk's size line has no end")
            return 0
        self._take_line(bytes(view[:line_end]))
        return line_end + 2

    def _take_line(self, line: bytes) -> None:
        if self._in_trailers:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > _TRAILER_BYTES_MAX:
                raise BadRequest(431, "the trailers are too long")
            self.complete = not line
            return
        match = _SIZE.fullmatch(line)
        if match is None:
            raise BadRequest(400, "a chunk's size is not a hexadecimal number")
        self._chunk_left = int(match[1], 16)
        if len(self.body) + self._chunk_left > self._bytes_max:
            raise BadRequest(413, f"the body is longer than {self._bytes_max} bytes")
        if self._chunk_left:
            self._chunk_open = True
        else:
            self._in_trailers = True
