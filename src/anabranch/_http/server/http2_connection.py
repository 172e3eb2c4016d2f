"""One HTTP/2 connection of a server: many requests at once, with flow control.

A request is handled when its last byte has arrived. Its body has a size limit and is acknowledged as it arrives. An
answer is sent as far as the client's windows and the socket allow; the rest waits in its stream, and a streaming answer
produces nothing meanwhile. h2 may know that a stream is closed before we see the event: a failed send only ends it.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from anabranch._http import http2
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

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_STREAM_WINDOW_BYTES: Final = 1 << 20
_CONNECTION_WINDOW_BYTES: Final = 16 << 20


class Http2ServerConnection(asyncio.Protocol):
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._transport = asyncio.Transport()  # the connection's own comes with `connection_made`, before any use
        self._session = http2.server_session(
            streams_max=state.limits.streams_max,
            window_bytes=_STREAM_WINDOW_BYTES,
            head_bytes_max=state.limits.head_bytes_max,
        )
        self._streams: dict[int, _ServerStream] = {}
        self._writing_paused = False
        self._draining = False
        self._deadline: float | None = None
        """For the next request, while there is none in progress."""
        self._write_deadline: float | None = None

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        self._state.add(self)
        self._session.initiate_connection()
        self._session.increment_flow_control_window(_CONNECTION_WINDOW_BYTES)
        self._set_deadline(self._state.limits.head_timeout)
        self.flush()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._state.remove(self)
        for stream in list(self._streams.values()):
            stream.lost()
        self._streams.clear()

    def data_received(self, data: bytes) -> None:
        try:
            events = self._session.receive_data(data)
        except http2.Http2Error:
            self.flush()  # h2 has prepared the GOAWAY frame with the error
            self._transport.close()
            return
        for event in events:
            self._take(event)
        if not self._streams:
            self._set_deadline(self._state.limits.idle_timeout)
        self.flush()

    def eof_received(self) -> None:
        """The transport may close: a half-closed client can send no window updates."""

    def pause_writing(self) -> None:
        """Reading pauses too: otherwise answers to pings and settings would pile up."""
        self._writing_paused = True
        self._transport.pause_reading()
        self._write_deadline = time.monotonic() + self._state.limits.write_timeout

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._write_deadline = None
        self._transport.resume_reading()
        self._pump_all()
        self.flush()

    # Called by the server

    def check(self, now: float) -> None:
        idle = self._deadline is not None and now >= self._deadline and not self._streams
        if idle or (self._write_deadline is not None and now >= self._write_deadline):
            self._transport.abort()
            return
        for stream in list(self._streams.values()):
            if stream.deadline is not None and now >= stream.deadline:
                self._reset(stream, http2.ErrorCodes.CANCEL)
        self.flush()

    def drain(self) -> None:
        self._draining = True
        for stream in list(self._streams.values()):
            if stream.silent:
                self._reset(stream, http2.ErrorCodes.CANCEL)
            else:
                stream.drain()
        if not self._streams:
            self._close_gracefully()

    def abort(self) -> None:
        self._transport.abort()

    # Events

    def _take(self, event: http2.Event) -> None:
        if isinstance(event, http2.RequestReceived):
            self._open(event.stream_id, cast("Sequence[tuple[bytes, bytes]]", event.headers))
        elif isinstance(event, http2.DataReceived):
            self._receive(event)
        elif isinstance(event, http2.StreamEnded):
            if (stream := self._streams.get(event.stream_id)) is not None:
                stream.begin(self._state)
        elif isinstance(event, http2.StreamReset):
            if (stream := self._streams.get(event.stream_id)) is not None:
                self._forget(stream)
        elif isinstance(event, http2.WindowUpdated | http2.RemoteSettingsChanged):
            self._pump_all()
        elif isinstance(event, http2.ConnectionTerminated):
            self._transport.close()

    def _open(self, stream_id: int, raw_headers: Sequence[tuple[bytes, bytes]]) -> None:
        headers: dict[str, str] = {}
        for raw_name, raw_value in raw_headers:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            separator = "; " if name == "cookie" else ", "
            headers[name] = f"{headers[name]}{separator}{value}" if name in headers else value
        method, path = headers.pop(":method", ""), headers.pop(":path", "").partition("?")[0]
        headers.pop(":scheme", None)
        authority = headers.pop(":authority", None)
        if authority is not None:
            headers.setdefault("host", authority)
        stream = _ServerStream(self, stream_id, Request(method, path, headers, bytearray(), "2"))
        stream.deadline = time.monotonic() + self._state.limits.body_timeout
        self._streams[stream_id] = stream
        if self._draining:
            self._reset(stream, http2.ErrorCodes.REFUSED_STREAM)

    def _receive(self, event: http2.DataReceived) -> None:
        self._session.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
        stream = self._streams.get(event.stream_id)
        if stream is None or stream.exchange is not None or stream.ended:
            return
        body = cast("bytearray", stream.request.body)
        body += event.data or b""
        if len(body) > self._state.limits.body_bytes_max:
            stream.refuse(
                Response(413, f"the body is longer than {self._state.limits.body_bytes_max} bytes\n".encode())
            )

    # Sending, for the streams

    def send_head(self, stream: "_ServerStream", status: int, headers: Headers) -> None:
        try:
            self._session.send_headers(
                stream.stream_id, [(":status", str(status)), ("date", date_header(int(time.time()))), *headers]
            )
        except http2.Http2Error:
            self._forget(stream)

    def pump(self, stream: "_ServerStream") -> None:
        """Sends what the windows and the socket accept now."""
        try:
            self._send_waiting(stream)
        except http2.Http2Error:
            self._forget(stream)
            return
        if stream.waiting:
            if stream.deadline is None:
                stream.deadline = time.monotonic() + self._state.limits.write_timeout
            return
        stream.deadline = None
        stream.emptied.set()
        if stream.ended:
            self._close_stream(stream)

    def _send_waiting(self, stream: "_ServerStream") -> None:
        while stream.waiting and not self._writing_paused:
            room = min(self._session.local_flow_control_window(stream.stream_id), self._session.max_outbound_frame_size)
            if room <= 0:
                return
            chunk = stream.waiting.popleft()
            if len(chunk) > room:
                stream.waiting.appendleft(chunk[room:])
                chunk = chunk[:room]
            is_last = stream.ended and not stream.waiting
            self._session.send_data(stream.stream_id, chunk, end_stream=is_last)
            self.flush()
            if is_last:
                return
        if stream.ended and not stream.waiting:
            self._session.end_stream(stream.stream_id)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _pump_all(self) -> None:
        for stream in list(self._streams.values()):
            if stream.waiting:
                self.pump(stream)

    def _reset(self, stream: "_ServerStream", code: http2.ErrorCodes) -> None:
        with contextlib.suppress(http2.Http2Error):
            self._session.reset_stream(stream.stream_id, code)
        self._forget(stream)

    def _forget(self, stream: "_ServerStream") -> None:
        stream.lost()
        self._close_stream(stream)

    def _close_stream(self, stream: "_ServerStream") -> None:
        self._streams.pop(stream.stream_id, None)
        if not self._streams:
            self._set_deadline(self._state.limits.idle_timeout)
            if self._draining:
                self._close_gracefully()

    def _close_gracefully(self) -> None:
        if not self._transport.is_closing():
            self._session.close_connection()
            self.flush()
            self._transport.close()

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def flush(self) -> None:
        data = self._session.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)


class _ServerStream:
    """One request and its answer; the AnswerSink of the exchange."""

    def __init__(self, connection: Http2ServerConnection, stream_id: int, request: Request) -> None:
        self.stream_id = stream_id
        self.request = request
        self.exchange: Exchange | None = None
        self.waiting: deque[memoryview] = deque()
        self.emptied = asyncio.Event()
        self.ended = False
        self.silent = False
        self.deadline: float | None = None
        self._connection = connection
        self._gone = False

    def begin(self, state: ServerState) -> None:
        if self.exchange is None and not self.ended:
            self.deadline = None
            self.exchange = Exchange(state, self)
            self.exchange.begin(self.request)

    def refuse(self, response: Response) -> None:
        """Answers before the request is complete, and ignores the rest of it."""
        self.request.body = b""
        self.send(response)

    def drain(self) -> None:
        if self.exchange is not None and self.exchange.streaming:
            self.exchange.cancel()
            self.finish()

    def lost(self) -> None:
        self._gone = True
        self.emptied.set()
        if self.exchange is not None:
            self.exchange.cancel()

    # AnswerSink

    def send(self, response: Response) -> None:
        if self._closed():
            return
        body = b"" if self.request.method == "HEAD" else response.body
        headers = [*response.headers, ("content-length", str(len(response.body)))]
        self._connection.send_head(self, response.status, headers)
        if body:
            self.waiting.append(memoryview(body))
        self.finish()

    def start(self, response: StreamingResponse) -> None:
        if self._closed():
            return
        self._connection.send_head(self, response.status, response.headers)
        self._connection.flush()

    async def write(self, chunk: bytes) -> None:
        if self._closed():
            return
        self.emptied.clear()
        self.waiting.append(memoryview(chunk))
        self._connection.pump(self)
        self._connection.flush()
        await self.emptied.wait()

    def finish(self) -> None:
        if self._closed():
            return
        self.ended = True
        self._connection.pump(self)
        self._connection.flush()

    def abandon(self, how: Abandon) -> None:
        if how is Abandon.HANG_UP:
            self._connection.abort()
        self.silent = True

    def _closed(self) -> bool:
        return self._gone or self.ended or self._connection.is_closing
