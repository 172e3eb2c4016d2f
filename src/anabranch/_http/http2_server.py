"""One HTTP/2 connection of a server: many requests at once, framed and flow-controlled by `h2`.

A request is handed on when its last byte is there; a body is acknowledged to the sender as it arrives and is bounded.
An answer goes out as far as the client's windows and the socket let it; the rest waits in its stream, and a streaming
answer waits with it. `h2` may know that a stream is closed before its event reaches us: sending there is no error.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from anabranch._http.exchange import Abandon, Exchange, Headers, Request, Response, StreamingResponse
from anabranch._http.service import Service

__all__ = ["PREFACE", "Http2Connection"]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_STREAM_WINDOW_BYTES: Final = 1 << 20
_CONNECTION_WINDOW_BYTES: Final = 16 << 20
_CONFIGURATION: Final = h2.config.H2Configuration(client_side=False, header_encoding=None)


class Http2Connection(asyncio.Protocol):
    def __init__(self, service: Service) -> None:
        self._service = service
        self._transport: asyncio.Transport
        self._h2 = h2.connection.H2Connection(_CONFIGURATION)
        self._streams: dict[int, _Stream] = {}
        self._writing_paused = False
        self._draining = False
        self._deadline: float | None = None
        """For the next request, while there is none."""
        self._write_deadline: float | None = None

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._service.add(self)
        self._h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: self._service.limits.streams_max,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW_BYTES,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: self._service.limits.head_bytes_max,
            },
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW_BYTES)
        self._set_deadline(self._service.limits.head_timeout)
        self._flush()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._service.remove(self)
        for stream in list(self._streams.values()):
            stream.lost()
        self._streams.clear()

    def data_received(self, data: bytes) -> None:
        try:
            events = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError:
            self._flush()  # h2 has written the GOAWAY that names the error
            self._transport.close()
            return
        for event in events:
            self._take(event)
        if not self._streams:
            self._set_deadline(self._service.limits.idle_timeout)
        self._flush()

    def eof_received(self) -> None:
        """Nothing to add: without the client's half there are no window updates, so the transport may close."""

    def pause_writing(self) -> None:
        """Nothing more is read either: pings and settings that nobody reads the answers to would pile up here."""
        self._writing_paused = True
        self._transport.pause_reading()
        self._write_deadline = time.monotonic() + self._service.limits.write_timeout

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._write_deadline = None
        self._transport.resume_reading()
        self._pump_all()
        self._flush()

    # What the service calls

    def check(self, now: float) -> None:
        idle = self._deadline is not None and now >= self._deadline and not self._streams
        if idle or (self._write_deadline is not None and now >= self._write_deadline):
            self._transport.abort()
            return
        for stream in list(self._streams.values()):
            if stream.deadline is not None and now >= stream.deadline:
                self._reset(stream, h2.errors.ErrorCodes.CANCEL)
        self._flush()

    def drain(self) -> None:
        self._draining = True
        for stream in list(self._streams.values()):
            if stream.silent:
                self._reset(stream, h2.errors.ErrorCodes.CANCEL)
            else:
                stream.drain()
        if not self._streams:
            self._say_goodbye()

    def abort(self) -> None:
        self._transport.abort()

    # Events

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self._open(_known(event.stream_id), cast("Sequence[tuple[bytes, bytes]]", event.headers))
        elif isinstance(event, h2.events.DataReceived):
            self._receive(event)
        elif isinstance(event, h2.events.StreamEnded):
            stream = self._streams.get(_known(event.stream_id))
            if stream is not None:
                stream.begin(self._service)
        elif isinstance(event, h2.events.StreamReset):
            stream = self._streams.get(_known(event.stream_id))
            if stream is not None:
                self._forget(stream)
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            self._pump_all()
        elif isinstance(event, h2.events.ConnectionTerminated):
            self._transport.close()

    def _open(self, stream_id: int, raw_headers: Sequence[tuple[bytes, bytes]]) -> None:
        headers: dict[str, str] = {}
        for raw_name, raw_value in raw_headers:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            separator = "; " if name == "cookie" else ", "
            headers[name] = f"{headers[name]}{separator}{value}" if name in headers else value
        method, target = headers.pop(":method", ""), headers.pop(":path", "")
        headers.pop(":scheme", None)
        authority = headers.pop(":authority", None)
        if authority is not None:
            headers.setdefault("host", authority)
        stream = _Stream(self, stream_id, Request(method, target, headers, bytearray(), "2"))
        stream.deadline = time.monotonic() + self._service.limits.body_timeout
        self._streams[stream_id] = stream
        if self._draining:
            self._reset(stream, h2.errors.ErrorCodes.REFUSED_STREAM)

    def _receive(self, event: h2.events.DataReceived) -> None:
        stream_id = _known(event.stream_id)
        self._h2.acknowledge_received_data(event.flow_controlled_length or 0, stream_id)
        stream = self._streams.get(stream_id)
        if stream is None or stream.exchange is not None:
            return
        body = cast("bytearray", stream.request.body)
        body += event.data or b""
        if len(body) > self._service.limits.body_bytes_max:
            stream.refuse(
                Response(413, f"the body is longer than {self._service.limits.body_bytes_max} bytes\n".encode())
            )

    # Sending, for the streams

    def send_head(self, stream: "_Stream", status: int, headers: Headers) -> None:
        try:
            self._h2.send_headers(
                stream.stream_id, [(":status", str(status)), ("date", self._service.date(time.time())), *headers]
            )
        except h2.exceptions.ProtocolError:
            self._forget(stream)

    def pump(self, stream: "_Stream") -> None:
        """Sends what the windows and the socket take now."""
        try:
            self._send_waiting(stream)
        except h2.exceptions.ProtocolError:
            self._forget(stream)
            return
        if stream.waiting:
            if stream.deadline is None:
                stream.deadline = time.monotonic() + self._service.limits.write_timeout
            return
        stream.deadline = None
        stream.emptied.set()
        if stream.ended:
            self._close_stream(stream)

    def _send_waiting(self, stream: "_Stream") -> None:
        while stream.waiting and not self._writing_paused:
            room = min(self._h2.local_flow_control_window(stream.stream_id), self._h2.max_outbound_frame_size)
            if room <= 0:
                return
            chunk = stream.waiting.popleft()
            if len(chunk) > room:
                stream.waiting.appendleft(chunk[room:])
                chunk = chunk[:room]
            is_last = stream.ended and not stream.waiting
            self._h2.send_data(stream.stream_id, chunk, end_stream=is_last)
            self._flush()
            if is_last:
                return
        if stream.ended and not stream.waiting:
            self._h2.end_stream(stream.stream_id)

    def flush(self) -> None:
        self._flush()

    def hang_up(self) -> None:
        self._transport.abort()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _pump_all(self) -> None:
        for stream in list(self._streams.values()):
            if stream.waiting:
                self.pump(stream)

    def _reset(self, stream: "_Stream", code: h2.errors.ErrorCodes) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self._h2.reset_stream(stream.stream_id, code)
        self._forget(stream)

    def _forget(self, stream: "_Stream") -> None:
        stream.lost()
        self._close_stream(stream)

    def _close_stream(self, stream: "_Stream") -> None:
        self._streams.pop(stream.stream_id, None)
        if not self._streams:
            self._set_deadline(self._service.limits.idle_timeout)
            if self._draining:
                self._say_goodbye()

    def _say_goodbye(self) -> None:
        if not self._transport.is_closing():
            self._h2.close_connection()
            self._flush()
            self._transport.close()

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)


class _Stream:
    """One request and its answer; the exchange's Sink."""

    def __init__(self, connection: Http2Connection, stream_id: int, request: Request) -> None:
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

    def begin(self, service: Service) -> None:
        if self.exchange is None:
            self.deadline = None
            self.exchange = Exchange(service.handler, self, service.spawn)
            self.exchange.begin(self.request)

    def refuse(self, response: Response) -> None:
        """Answers before the request is complete, and reads no more of it."""
        self.request.body = b""
        self.exchange = Exchange(lambda _: response, self, _no_task)
        self.exchange.begin(self.request)

    def drain(self) -> None:
        if self.exchange is not None and self.exchange.streaming:
            self.exchange.cancel()
            self.finish()

    def lost(self) -> None:
        self._gone = True
        self.emptied.set()
        if self.exchange is not None:
            self.exchange.cancel()

    # The Sink

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
            self._connection.hang_up()
        self.silent = True

    def _closed(self) -> bool:
        return self._gone or self.ended or self._connection.is_closing


def _known(stream_id: int | None) -> int:
    assert stream_id is not None
    return stream_id


def _no_task(_: Any) -> "asyncio.Task[None]":
    raise AssertionError("a refusal is an answer at once")
