"""A chunked answer, unframed without copying: bytes split anywhere go in, views of their payload come out. Pure.

A size line or trailer cut in two is the only thing kept between calls, and that is bounded. Extensions and trailers
are read past and dropped. Who wants the whole body bounds it himself: a stream has no end.
"""

import re
from typing import Final

from anabranch.errors import TransportError

__all__ = ["ResponseChunks"]

_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?")
_SHORT_LINE_BYTES: Final = 16  # what nearly every size line fits into
_LINE_BYTES_MAX: Final = 4_096
_TRAILER_BYTES_MAX: Final = 16_384


class ResponseChunks:
    def __init__(self) -> None:
        self.complete = False
        self.surplus = False
        """Bytes came after the end: this connection cannot be used again."""
        self._left = 0  # of the open chunk's payload
        self._after_payload = False  # the CRLF behind a payload is still to come
        self._in_trailers = False
        self._trailer_bytes = 0
        self._line = b""  # the part of a line that the last call ended with

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
                raise TransportError("a chunk's size line in the answer has no end")
            self._line = window
            return len(view)
        self._line = b""
        self._apply(window[:line_end])
        return position + line_end + 2 - held

    def _apply(self, line: bytes) -> None:
        if self._after_payload:
            if line:
                raise TransportError("a chunk of the answer is longer than its size says")
            self._after_payload = False
        elif self._in_trailers:
            self._trailer_bytes += len(line) + 2
            if self._trailer_bytes > _TRAILER_BYTES_MAX:
                raise TransportError("the trailers of the answer are too long")
            self.complete = not line
        else:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise TransportError(f"a chunk's size in the answer is not a hexadecimal number: {line[:40]!r}")
            self._left = int(match[1], 16)
            self._after_payload = self._left > 0
            self._in_trailers = self._left == 0
