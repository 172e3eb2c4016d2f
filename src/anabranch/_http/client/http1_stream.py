"""One streamed response over HTTP/1.1, on a connection of its own.

`receive` returns what has arrived as views of the receive buffer. If the reader falls behind, the buffer fills and the
transport is paused, so memory stays bounded.
"""

import asyncio
from collections.abc import Iterable
from typing import Final, cast

from anabranch._http.client.limits import INTERIM_ANSWERS_MAX, WINDOW_BYTES, ClientTimeouts, ReadTimeout
from anabranch._http.client.response_framing import CHUNKED, ResponseChunks, ResponseHead, parse_response_head
from anabranch.errors import TransportError

_ROOM_BYTES_MIN: Final = 16 << 10  # one TLS record


class Http1Stream(asyncio.BufferedProtocol):
    """Both the connection and its only stream."""

    usable = False
    """It has no room for another stream."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer: str, request_start: bytes, timeouts: ClientTimeouts
    ) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._peer = peer
        self._request_start = request_start
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # set by connection_made, before any use
        self._chunks: ResponseChunks | None = None
        self._left: int | None = None
        """How much of the body is missing; None if it is chunked, or ends with the connection."""
        self._buffer = bytearray(WINDOW_BYTES + _ROOM_BYTES_MIN)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        """Where the bytes are that the reader has not received yet."""
        self._paused = False
        self._finished = False
        self._ended_cleanly = False
        """The server has closed the connection, which may be the end of the body."""
        self._error: TransportError | None = None
        self._read_timeout = ReadTimeout(loop, timeouts)
        self._closed: asyncio.Future[None] = loop.create_future()

    # As a connection

    async def ready(self) -> None:
        """There is nothing to wait for."""

    async def open_stream(self, headers: Iterable[tuple[str, str]], body: bytes) -> "Http1Stream":
        """Returns when the status is known."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        self._transport.write(b"%b%b\r\n%b" % (self._request_start, lines.encode("ascii"), body))
        try:
            head = await self._read_head()
        except BaseException:
            self.close()
            raise
        self.status, self.headers = head.status, head.headers
        if head.length == CHUNKED:
            self._chunks = ResponseChunks()
        elif head.length >= 0:
            self._left = head.length
            self._finished = self._left == 0
        return self

    async def _read_head(self) -> ResponseHead:
        for _ in range(INTERIM_ANSWERS_MAX + 1):
            while (head_end := self._buffer.find(b"\r\n\r\n", self._start, self._end)) < 0:
                if self._error is not None:
                    raise self._error
                if self._paused:
                    raise TransportError(f"the headers of the response from {self._peer} are too long")
                await self._read_timeout.wait()
            head = parse_response_head(bytes(self._view[self._start : head_end]))
            self._start = head_end + 4
            if head.status >= 200:
                return head
            if head.status == 101:
                break
        raise TransportError(f"{self._peer} sent the unexpected status {head.status}")

    @property
    def stream_count(self) -> int:
        return int(self._error is None)

    def check(self, now: float) -> None:
        if (missing := self._read_timeout.expired(now)) is not None:
            self._finish(TransportError(f"{self._peer} {missing}"))

    def is_over(self, now: float) -> bool:  # noqa: ARG002 -- it is not kept
        return self._closed.done()

    def retire(self) -> None:
        """It is never used again."""

    def abort(self) -> None:
        self.close()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    # As a stream

    async def receive(self) -> list[memoryview]:
        while True:
            if self._start < self._end:
                view = self._view[self._start : self._end]
                self._start = self._end
                if payloads := self._unframe(view):
                    return payloads
            self._start = self._end = 0
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            if self._finished or (self._ended_cleanly and self._chunks is None and self._left is None):
                return []
            if self._error is not None:
                raise self._error
            await self._read_timeout.wait()

    def expect(self, wanted_bytes: int) -> None:
        """Nothing to do: TCP's flow control applies."""

    def progress(self) -> None:
        self._read_timeout.progress()

    def close(self, *, silent: bool = False) -> None:  # noqa: ARG002 -- no other stream uses this connection
        self._finish(TransportError("the stream was closed by this client"))

    def _unframe(self, view: memoryview) -> list[memoryview]:
        if self._chunks is not None:
            payloads = self._chunks.feed(view)
            if self._chunks.complete:
                self._end_of_body()
            return payloads
        if self._left is not None:
            view = view[: self._left]
            self._left -= len(view)
            if self._left == 0:
                self._end_of_body()
        return [view] if view else []

    def _end_of_body(self) -> None:
        self._finished = True
        self._transport.abort()

    def _finish(self, error: TransportError) -> None:
        self._error = self._error or error
        self._transport.abort()
        self._read_timeout.wake()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 -- the free space is fixed
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        if len(self._buffer) - self._end < _ROOM_BYTES_MIN and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._read_timeout.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set_result(None)
        if self._error is None:
            self._ended_cleanly = exc is None
            reason = f": {exc}" if exc else ""
            self._error = TransportError(f"{self._peer} closed the connection in the middle of a stream{reason}")
        self._read_timeout.wake()
