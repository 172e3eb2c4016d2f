"""The bytes of an HTTP/1.1 request: its head and its chunked body. Pure.

The parser is strict where leniency would let two readers see two different requests (folded lines, spaces before the
colon, two lengths, a length beside a transfer coding). Every refusal carries the status to answer with.
"""

import re
from dataclasses import dataclass
from typing import Final

_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FORBIDDEN_IN_VALUE = re.compile(r"[\x00\r\n]")
_LENGTH = re.compile(r"[0-9]{1,18}")
_HEADERS_MAX = 256

_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?")
_LINE_BYTES_MAX: Final = 4_096
_TRAILER_BYTES_MAX: Final = 16_384


class BadRequest(Exception):  # noqa: N818 -- an answer to the client, not an error of ours
    """The bytes are not a request that this server accepts."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(slots=True)
class RequestHead:
    method: str
    target: str
    http_version: str
    headers: dict[str, str]
    content_length: int
    """0 if there is no body, or if the body is chunked."""
    chunked: bool
    keep_alive: bool
    expects_continue: bool


def parse_request_head(head: bytes) -> RequestHead:
    """`head` is everything before the empty line."""
    line, _, rest = head.partition(b"\r\n")
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        if b" HTTP/" in line and not line.rpartition(b" HTTP/")[2].startswith(b"1."):
            raise BadRequest(505, "this server supports HTTP/1.1 and HTTP/2")
        raise BadRequest(400, "the request line is not `METHOD target HTTP/1.1`")
    headers = _parse_headers(rest.decode("latin-1"))
    http_version = "1.1" if match[3] == b"1" else "1.0"
    if http_version == "1.1" and "host" not in headers:
        raise BadRequest(400, "the host header is missing")
    content_length, chunked = _body_length(headers)
    connection = headers.get("connection", "").lower()
    return RequestHead(
        method=match[1].decode("ascii"),
        target=match[2].decode("latin-1"),
        http_version=http_version,
        headers=headers,
        content_length=content_length,
        chunked=chunked,
        keep_alive="close" not in connection and (http_version == "1.1" or "keep-alive" in connection),
        expects_continue=headers.get("expect", "").lower() == "100-continue",
    )


def _parse_headers(text: str) -> dict[str, str]:
    headers: dict[str, str] = {}
    if not text:
        return headers
    lines = text.split("\r\n")
    if len(lines) > _HEADERS_MAX:
        raise BadRequest(431, f"more than {_HEADERS_MAX} headers")
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or _NAME.fullmatch(name) is None:
            raise BadRequest(400, "a header line is not `name: value`")
        if _FORBIDDEN_IN_VALUE.search(value):
            raise BadRequest(400, "a header value contains a control character")
        name = name.lower()
        value = value.strip(" \t")
        if name == "host" and name in headers:
            raise BadRequest(400, "there is more than one host header")  # RFC 9112, 3.2
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _body_length(headers: dict[str, str]) -> tuple[int, bool]:
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if length is not None:
            raise BadRequest(400, "a request must not have both content-length and transfer-encoding")
        if coding.lower() != "chunked":
            raise BadRequest(501, "the only supported transfer coding is chunked")
        return 0, True
    if length is None:
        return 0, False
    if _LENGTH.fullmatch(length) is None:
        raise BadRequest(400, "content-length is not one number")
    return int(length), False


class ChunkedBody:
    """A chunked request body, assembled from bytes that are split anywhere. Extensions and trailers are ignored."""

    def __init__(self, bytes_max: int) -> None:
        self.body = bytearray()
        self.complete = False
        self._bytes_max = bytes_max
        self._chunk_left = 0
        self._chunk_open = False  # the CRLF after a chunk's data is still missing
        self._in_trailers = False
        self._trailer_bytes = 0

    def feed(self, data: bytes | bytearray | memoryview) -> int:
        """Returns how many bytes were used; the rest belongs to the next call or request."""
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
                raise BadRequest(400, "a chunk is longer than its size")
            self._chunk_open = False
            return 2
        line_end = bytes(view[: _LINE_BYTES_MAX + 2]).find(b"\r\n")
        if line_end < 0:
            if len(view) > _LINE_BYTES_MAX:
                raise BadRequest(400, "the size line of a chunk is too long")
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
            raise BadRequest(400, "the size of a chunk is not a hexadecimal number")
        self._chunk_left = int(match[1], 16)
        if len(self.body) + self._chunk_left > self._bytes_max:
            raise BadRequest(413, f"the body is longer than {self._bytes_max} bytes")
        if self._chunk_left:
            self._chunk_open = True
        else:
            self._in_trailers = True
