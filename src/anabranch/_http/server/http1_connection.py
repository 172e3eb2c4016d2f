"""One HTTP/1.1 connection of a server: requests are answered one at a time, in order.

Bytes are received into one growing buffer. (With `asyncio.Protocol`, TLS would allocate 256 KiB for each 16 KiB that it
reads.) A pipelined request waits in the buffer until the previous one is answered; if too much is pipelined, reading
pauses. An HTTP/2 client, recognized by ALPN or by its preface, is handed over to an `Http2ServerConnection`.
"""

import asyncio
import time
from http import HTTPStatus
from typing import Final, cast

from anabranch._http.server.exchange import (
    Abandon,
    Exchange,
    Headers,
    Request,
    Response,
    ServerState,
    StreamingResponse,
    date_header,
)
from anabranch._http.server.http2_connection import PREFACE, Http2ServerConnection
from anabranch._http.server.request_framing import BadRequest, ChunkedBody, RequestHead, parse_request_head

_BUFFER_BYTES: Final = 64 << 10
_KEPT_BUFFER_BYTES: Final = 1 << 20
_WRITE_BYTES: Final = 64 << 10  # TLS encrypts pieces of this size faster than one large body
_PIPELINED_BYTES_MAX: Final = 64 << 10
_LINGER_SECONDS: Final = 2.0
_WITHOUT_BODY: Final = frozenset({204, 304})
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}


class Http1ServerConnection(asyncio.BufferedProtocol):
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._transport = asyncio.Transport()  # the connection's own comes with `connection_made`, before any use
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = 0
        self._end = 0
        self._head: RequestHead | None = None
        self._chunks: ChunkedBody | None = None
        self._exchange: Exchange | None = None
        self._keep_alive = True
        self._version_known = False
        self._reading_paused = False
        self._writable: asyncio.Event = asyncio.Event()
        self._writable.set()
        self._advancing = False
        self._discarding = False
        self._head_only = False
        self._chunked_answer = True
        self._deadline: float | None = None

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        if self._state.stopping or len(self._state.connections) >= self._state.limits.connections_max:
            self._keep_alive = False
            self._send(Response(503, b"too many connections\n"))
            transport.close()
            return
        ssl_object = transport.get_extra_info("ssl_object")
        if ssl_object is not None and ssl_object.selected_alpn_protocol() == "h2":
            self._hand_over()
            return
        self._state.add(self)
        self._set_deadline(self._state.limits.idle_timeout)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._state.remove(self)
        self._writable.set()
        if self._exchange is not None:
            self._exchange.cancel()

    def get_buffer(self, _sizehint: int) -> memoryview:
        free = len(self._buffer) - self._end
        if free < _BUFFER_BYTES // 4:
            self._make_room()
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._discarding:
            return
        self._end += nbytes
        if self._exchange is None:
            self._advance()
        elif self._end - self._start > _PIPELINED_BYTES_MAX and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """True keeps the connection open for an answer in progress: the client may have closed only its own half."""
        self._keep_alive = False
        if self._transport.get_extra_info("ssl_object") is not None:
            return False  # TLS cannot be half closed
        return self._exchange is not None and not self._exchange.streaming and not self._discarding

    def pause_writing(self) -> None:
        self._writable.clear()
        self._set_deadline(self._state.limits.write_timeout)

    def resume_writing(self) -> None:
        self._writable.set()
        self._deadline = None
        if self._exchange is None and not self._discarding:
            self._next_request()

    # Called by the server

    def check(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._transport.abort()

    def drain(self) -> None:
        self._keep_alive = False
        if self._exchange is None or self._discarding:
            self._transport.close()
        elif self._exchange.streaming:
            if self._chunked_answer:
                self._transport.write(b"0\r\n\r\n")
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # Requests

    def _make_room(self) -> None:
        """Allocates a new buffer, because the transport may still hold a view of the old one."""
        waiting = self._end - self._start
        size = max(_BUFFER_BYTES, 2 * waiting)
        buffer = bytearray(size)
        buffer[:waiting] = memoryview(self._buffer)[self._start : self._end]
        self._buffer, self._start, self._end = buffer, 0, waiting

    def _advance(self) -> None:
        """Reads and answers what is in the buffer, in a loop: pipelined requests must not recurse."""
        self._advancing = True
        try:
            while self._exchange is None and self._writable.is_set() and not self._transport.is_closing():
                request = self._read_request() if self._recognise_version() else None
                if request is None:
                    break
                self._deadline = None
                self._exchange = Exchange(self._state, self)
                self._exchange.begin(request)
        except BadRequest as refused:
            self._refuse(refused)
        finally:
            self._advancing = False

    def _refuse(self, refused: BadRequest) -> None:
        """Answers, then discards input for a moment. If we closed at once, the client could get a reset instead."""
        self._keep_alive = False
        self._discarding = True
        self._send(Response(refused.status, f"{refused}\n".encode(), [("content-type", "text/plain")]))
        self._set_deadline(_LINGER_SECONDS)

    def _recognise_version(self) -> bool:
        """False while undecided, or after the connection was handed over to HTTP/2."""
        if self._version_known:
            return True
        beginning = bytes(self._buffer[self._start : min(self._end, self._start + len(PREFACE))])
        if PREFACE.startswith(beginning):
            if len(beginning) == len(PREFACE):
                self._state.remove(self)
                self._hand_over()
            elif beginning:
                self._shorten_deadline(self._state.limits.head_timeout)
            return False
        self._version_known = True
        return True

    def _hand_over(self) -> None:
        successor = Http2ServerConnection(self._state)
        self._transport.set_protocol(successor)
        successor.connection_made(self._transport)
        if self._end > self._start:
            successor.data_received(bytes(self._buffer[self._start : self._end]))

    def _read_request(self) -> Request | None:
        limits = self._state.limits
        if self._head is None:
            while self._buffer.startswith(b"\r\n", self._start, self._end):  # RFC 9112, 2.2
                self._start += 2
            head_end = self._buffer.find(b"\r\n\r\n", self._start, self._end)
            if (self._end if head_end < 0 else head_end) - self._start > limits.head_bytes_max:
                raise BadRequest(431, f"request line and headers are longer than {limits.head_bytes_max} bytes")
            if head_end < 0:
                if self._end > self._start:
                    self._shorten_deadline(limits.head_timeout)
                return None
            self._take_head(parse_request_head(bytes(memoryview(self._buffer)[self._start : head_end])), head_end + 4)
        assert self._head is not None
        body = self._read_body(self._head)
        if body is None:
            return None
        head, self._head, self._chunks = self._head, None, None
        self._keep_alive = self._keep_alive and head.keep_alive and not self._state.stopping
        self._head_only = head.method == "HEAD"
        self._chunked_answer = head.http_version == "1.1"
        return Request(head.method, head.target.partition("?")[0], head.headers, body, head.http_version)

    def _take_head(self, head: RequestHead, body_start: int) -> None:
        limits = self._state.limits
        if head.content_length > limits.body_bytes_max:
            raise BadRequest(413, f"the body is longer than {limits.body_bytes_max} bytes")
        self._head, self._start = head, body_start
        self._chunks = ChunkedBody(limits.body_bytes_max) if head.chunked else None
        self._set_deadline(limits.body_timeout)
        if head.expects_continue and self._end == self._start and (head.chunked or head.content_length):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self, head: RequestHead) -> bytes | bytearray | None:
        if self._chunks is not None:
            self._start += self._chunks.feed(memoryview(self._buffer)[self._start : self._end])
            return self._chunks.body if self._chunks.complete else None
        body_end = self._start + head.content_length
        if body_end > self._end:
            return None
        body = bytes(memoryview(self._buffer)[self._start : body_end])
        self._start = body_end
        return body

    def _next_request(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _KEPT_BUFFER_BYTES:
                self._buffer = bytearray(_BUFFER_BYTES)
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._set_deadline(self._state.limits.idle_timeout)
        if self._end > self._start and not self._advancing:
            self._advance()

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def _shorten_deadline(self, seconds: float) -> None:
        """Never extends the deadline: a client that sends a byte a second does not get more time."""
        deadline = time.monotonic() + seconds
        if self._deadline is None or deadline < self._deadline:
            self._deadline = deadline

    # Answers: the AnswerSink of the exchange

    def send(self, response: Response) -> None:
        self._send(response)
        self._answered()

    def start(self, response: StreamingResponse) -> None:
        headers = list(response.headers)
        if self._chunked_answer:
            headers.append(("transfer-encoding", "chunked"))
        else:
            self._keep_alive = False
        self._transport.write(self._render_head(response.status, headers))

    async def write(self, chunk: bytes) -> None:
        if self._chunked_answer:
            self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        else:
            self._transport.write(chunk)
        await self._writable.wait()

    def finish(self) -> None:
        if self._chunked_answer:
            self._transport.write(b"0\r\n\r\n")
        self._answered()

    def abandon(self, how: Abandon) -> None:
        self._keep_alive = False
        if how is Abandon.HANG_UP:
            self._transport.abort()
        else:
            self._discarding = True

    def _send(self, response: Response) -> None:
        if self._transport.is_closing():
            return
        body = response.body
        headers = response.headers
        if response.status not in _WITHOUT_BODY:
            headers = [*headers, ("content-length", str(len(body)))]
        head = self._render_head(response.status, headers)
        if self._head_only or response.status in _WITHOUT_BODY:
            body = b""
        if len(body) <= _WRITE_BYTES:
            self._transport.write(head + body)
            return
        self._transport.write(head)
        view = memoryview(body)
        for start in range(0, len(view), _WRITE_BYTES):
            if self._transport.is_closing():
                return  # the client went away: asyncio would log each further write
            self._transport.write(view[start : start + _WRITE_BYTES])

    def _render_head(self, status: int, headers: Headers) -> bytes:
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}", f"date: {date_header(int(time.time()))}"]
        lines.extend(f"{name}: {value}" for name, value in headers)
        if not self._keep_alive:
            lines.append("connection: close")
        lines.append("\r\n")
        return "\r\n".join(lines).encode("latin-1", "replace")

    def _answered(self) -> None:
        self._exchange = None
        if not self._keep_alive:
            self._set_deadline(self._state.limits.write_timeout)
            self._transport.close()
        elif self._writable.is_set() and not self._transport.is_closing():
            self._next_request()
