"""A streamed response body over HTTP/1.1, on a connection that was taken over after its head.

`receive` returns what has arrived as views of the receive buffer, valid until the next `receive`. If the reader falls
behind, the buffer fills and the transport is paused, so memory stays bounded. `close` ends the stream at once.

The server may send `WINDOW_BYTES` at any time; `expect` allows it to send more.
"""

import asyncio
from typing import Final, Protocol

from anabranch._http.client.limits import ClientTimeouts, ReadTimeout
from anabranch._http.client.response_framing import CHUNKED, UNTIL_CLOSE, ResponseChunks, ResponseHead
from anabranch.errors import TransportError

WINDOW_BYTES: Final = 64 << 10
"""What a server may send on a stream before its reader asks for more (rule B3)."""
_ROOM_BYTES_MIN: Final = 16 << 10  # one TLS record


class BodyStream(Protocol):
    """The body of a streamed response, over any HTTP version."""

    headers: dict[bytes, bytes]

    async def receive(self) -> list[memoryview]:
        """The next bytes, valid until the next call; an empty list at the end."""

    def expect(self, wanted_bytes: int) -> None:
        """Allows the server to send this many bytes more than `WINDOW_BYTES`: the reader has room for them."""

    def progress(self) -> None:
        """The reader has received a complete message."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Closes the stream because the server is silent. Its connection may be dead: no other stream uses it."""

    def check(self, now: float, /) -> None:
        """Fails the stream if a timeout has expired."""

    async def wait_closed(self) -> None: ...


class Http1BodyStream(asyncio.BufferedProtocol):
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        peer: str,
        head: ResponseHead,
        first: bytes,
        timeouts: ClientTimeouts,
    ) -> None:
        self.headers = head.headers
        self._transport = transport
        self._peer = peer
        self._chunks = ResponseChunks() if head.length == CHUNKED else None
        self._left = head.length if head.length >= 0 else None
        self._until_close = head.length == UNTIL_CLOSE
        self._buffer = bytearray(max(WINDOW_BYTES, len(first) + _ROOM_BYTES_MIN))
        self._view = memoryview(self._buffer)
        self._view[: len(first)] = first
        self._start = 0  # of what the reader has not received yet
        self._end = len(first)
        self._paused = False
        self._finished = self._left == 0
        self._error: TransportError | None = None
        self._read_timeout = ReadTimeout(loop, timeouts)
        self._closed: asyncio.Future[None] = loop.create_future()

    async def receive(self) -> list[memoryview]:
        while True:
            if self._start == self._end:
                self._start = self._end = 0
                if self._paused:
                    self._paused = False
                    self._transport.resume_reading()
            else:
                view = self._view[self._start : self._end]
                self._start = self._end
                if payloads := self._unframe(view):
                    return payloads
                continue
            if self._finished:
                return []
            if self._error is not None:
                raise self._error
            await self._read_timeout.wait()

    def expect(self, wanted_bytes: int) -> None:
        """TCP's own flow control does it: what the reader takes makes room for more."""

    def progress(self) -> None:
        self._read_timeout.progress()

    def close(self) -> None:
        self._finish(TransportError("the stream was closed by this client"))

    def abandon(self) -> None:
        self.close()

    def check(self, now: float) -> None:
        if (missing := self._read_timeout.expired(now)) is not None:
            self._finish(TransportError(f"{self._peer} {missing}"))

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

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
        if self._error is None:
            self._error = error
        self._transport.abort()
        self._read_timeout.wake()

    # Called by asyncio

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 -- the free space is fixed
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        if len(self._buffer) - self._end < _ROOM_BYTES_MIN and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._read_timeout.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        if self._until_close and exc is None and self._error is None:
            self._finished = True
        elif self._error is None:
            reason = f": {exc}" if exc else ""
            self._error = TransportError(f"{self._peer} closed the connection in the middle of a stream{reason}")
        self._read_timeout.wake()
