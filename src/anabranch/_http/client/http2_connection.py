"""HTTP/2 for streamed responses: many streams on one connection.

The server may send 64 KiB on each stream, and more only when the stream's reader expects it (rule B3). The connection's
window is at least the sum of all streams' windows, so a slow reader delays only itself. There are no tasks: asyncio's
callbacks feed h2, and readers wait on futures.
"""

import asyncio
from collections.abc import Iterable
from typing import Final, cast

from anabranch._http import http2
from anabranch._http.client.limits import HEAD_BYTES_MAX, WINDOW_BYTES, ClientTimeouts, ReadTimeout
from anabranch.errors import TransportError

STREAMS_MAX: Final = 100
"""Streams on one connection, if the server allows more: a lost packet delays all of them."""
_FRAME_BYTES_MAX: Final = 1 << 20  # fewer frames are less work; the server decides
_BUFFER_BYTES: Final = 256 << 10


class Http2BodyStream:
    """One request and its streamed response."""

    def __init__(
        self, connection: "Http2ClientConnection", stream_id: int, peer: str, read_timeout: ReadTimeout
    ) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._connection = connection
        self._stream_id = stream_id
        self._arrived: list[memoryview] = []
        self.window_bytes = WINDOW_BYTES
        """How much the server may send now."""
        self._peer = peer
        self._read_timeout = read_timeout
        self._error: TransportError | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended or self._error is not None

    async def accepted(self) -> None:
        """Waits until the status is known."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._read_timeout.wait()

    async def receive(self) -> list[memoryview]:
        while not self._arrived:
            if self._ended:
                return []
            if self._error is not None:
                raise self._error
            if self.window_bytes < WINDOW_BYTES // 2:
                self._open_window(WINDOW_BYTES)
            await self._read_timeout.wait()
        payloads, self._arrived = self._arrived, []
        return payloads

    def expect(self, wanted_bytes: int) -> None:
        """Sends one window update for the whole message and the beginning of the next one."""
        if self.window_bytes < wanted_bytes:
            self._open_window(wanted_bytes + WINDOW_BYTES)

    def _open_window(self, to_bytes: int) -> None:
        if not self.ended:
            more_bytes, self.window_bytes = to_bytes - self.window_bytes, to_bytes
            self._connection.open_window(self._stream_id, more_bytes)

    def close(self, *, silent: bool = False) -> None:
        if silent:
            self._connection.retire()
        self._connection.reset(self._stream_id)
        self.fail(TransportError("the stream was closed by this client"))
        self._arrived = []

    def progress(self) -> None:
        self._read_timeout.progress()

    def check(self, now: float) -> None:
        if (missing := self._read_timeout.expired(now)) is not None:
            self._connection.retire()  # it may be dead
            self.fail(TransportError(f"{self._peer} {missing}"))

    # Called by the connection

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers
        self._read_timeout.wake()

    def data(self, payload: bytes, flow_bytes: int) -> None:
        """`flow_bytes` includes the padding, which also counts against the window."""
        if payload:
            self._arrived.append(memoryview(payload))
        self.window_bytes -= flow_bytes
        self._read_timeout.wake()

    def end(self) -> None:
        self._ended = True
        self._read_timeout.wake()

    def fail(self, error: TransportError) -> None:
        if not self.ended:
            self._error = error
        self._read_timeout.wake()


class Http2ClientConnection(asyncio.BufferedProtocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, peer: str, authority: str, timeouts: ClientTimeouts) -> None:
        self._loop = loop
        self._peer = peer
        self._authority = authority
        self._timeouts = timeouts
        self._session = http2.client_session(
            window_bytes=WINDOW_BYTES, frame_bytes_max=_FRAME_BYTES_MAX, head_bytes_max=HEAD_BYTES_MAX
        )
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # set by connection_made, before any use
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._streams: dict[int, Http2BodyStream] = {}
        self._settled: asyncio.Future[None] = loop.create_future()  # the server's limits are known, or it failed
        self._failure: TransportError | None = None
        self._leaving = False  # the server accepts no new streams
        self._closed: asyncio.Future[None] = loop.create_future()
        self._idle_since = loop.time()

    @property
    def usable(self) -> bool:
        """True if one more stream can be opened."""
        if self._leaving or self._transport.is_closing():
            return False
        return len(self._streams) < min(STREAMS_MAX, self._session.remote_settings.max_concurrent_streams)

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    def check(self, now: float) -> None:
        """Fails streams whose reader has waited too long."""
        for stream in list(self._streams.values()):
            stream.check(now)

    def is_over(self, now: float) -> bool:
        """It has no streams, and has been idle for long or accepts no new ones."""
        is_idle = now - self._idle_since > self._timeouts.idle
        return not self._streams and (is_idle or not self.usable)

    async def ready(self) -> None:
        """Waits until the server has sent how many streams it allows. If we open more, all of them fail."""
        await asyncio.shield(self._settled)
        if self._failure is not None:
            raise self._failure

    async def open_stream(self, headers: Iterable[tuple[str, str]], body: bytes) -> Http2BodyStream:
        """Returns when the status is known. A `host` header is replaced by `:authority`."""
        pseudo = ((":method", "POST"), (":scheme", self._scheme), (":authority", self._authority), (":path", "/"))
        named = [(name, value) for name, value in headers if name not in {"host", "connection"}]
        stream_id = 0
        try:
            stream_id = self._session.get_next_available_stream_id()
            self._session.send_headers(stream_id, [*pseudo, *named])
            self._session.send_data(stream_id, body, end_stream=True)
        except http2.Http2Error as error:
            raise TransportError(
                f"cannot send a request to {self._peer} over HTTP/2: {error}", maybe_sent=False
            ) from error
        stream = self._streams[stream_id] = Http2BodyStream(
            self, stream_id, self._peer, ReadTimeout(self._loop, self._timeouts)
        )
        self._open_own_window()
        self._flush()
        try:
            await stream.accepted()
        except BaseException:
            stream.close()
            raise
        return stream

    def reset(self, stream_id: int) -> None:
        """Tells the server to stop sending on this stream, unless the stream has ended."""
        if self._forget(stream_id) is None:
            return
        try:
            self._session.reset_stream(stream_id, http2.ErrorCodes.CANCEL)
        except http2.Http2Error:
            return  # it has already ended
        self._flush()

    def open_window(self, stream_id: int, more_bytes: int) -> None:
        try:
            self._session.increment_flow_control_window(more_bytes, stream_id)
        except http2.Http2Error:
            return  # the stream or the connection is closed
        self._open_own_window()
        self._flush()

    def _open_own_window(self) -> None:
        """The connection's window is the sum of the streams' windows. Data for closed streams counts against it too."""
        wanted_bytes = sum(stream.window_bytes for stream in self._streams.values())
        missing_bytes = wanted_bytes - self._session.inbound_flow_control_window
        if missing_bytes > 0:
            self._session.increment_flow_control_window(missing_bytes + WINDOW_BYTES)

    def retire(self) -> None:
        """Opens no more streams on this connection; open ones continue."""
        self._leaving = True

    def abort(self) -> None:
        self._leaving = True
        self._fail_all(TransportError("the stream was closed by this client"))
        self._transport.abort()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._scheme = "https" if transport.get_extra_info("ssl_object") is not None else "http"
        self._session.initiate_connection()
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 -- always the whole buffer
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for event in self._session.receive_data(self._view[:nbytes]):
                self._apply(event)
        except http2.Http2Error as error:
            self._fail_all(TransportError(f"{self._peer} violated the HTTP/2 protocol: {error}"))
            self._flush()
            self.abort()
            return
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leaving = True
        if not self._closed.done():
            self._closed.set_result(None)
        reason = f": {exc}" if exc else ""
        self._fail_all(TransportError(f"{self._peer} closed the connection in the middle of a stream{reason}"))

    def _apply(self, event: http2.Event) -> None:
        if isinstance(event, http2.DataReceived):
            if (stream := self._streams.get(event.stream_id)) is not None:
                stream.data(event.data, event.flow_controlled_length)
        elif isinstance(event, http2.ResponseReceived):
            if (stream := self._streams.get(event.stream_id)) is not None:
                headers = {bytes(name): bytes(value) for name, value in event.headers}
                stream.head(int(headers.get(b":status", b"0")), headers)
        elif isinstance(event, http2.StreamEnded):
            if (stream := self._forget(event.stream_id)) is not None:
                stream.end()
        elif isinstance(event, http2.StreamReset):
            if (stream := self._forget(event.stream_id)) is not None:
                stream.fail(TransportError(f"{self._peer} reset the stream (HTTP/2 error {event.error_code})"))
        elif isinstance(event, http2.RemoteSettingsChanged):
            self._settle()
        elif isinstance(event, http2.ConnectionTerminated):
            self._leaving = True
            for stream_id in [id_ for id_ in self._streams if id_ > (event.last_stream_id or 0)]:
                self._streams.pop(stream_id).fail(
                    TransportError(f"{self._peer} is closing and did not process the request", maybe_sent=False)
                )

    def _forget(self, stream_id: int) -> Http2BodyStream | None:
        self._idle_since = self._loop.time()
        return self._streams.pop(stream_id, None)

    def _settle(self) -> None:
        if not self._settled.done():
            self._settled.set_result(None)

    def _fail_all(self, error: TransportError) -> None:
        self._failure = self._failure or error
        self._settle()
        for stream_id in list(self._streams):
            self._streams.pop(stream_id).fail(error)

    def _flush(self) -> None:
        if data := self._session.data_to_send():
            self._transport.write(data)
