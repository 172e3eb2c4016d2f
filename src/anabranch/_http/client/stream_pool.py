"""Streamed responses from one endpoint: over HTTP/2 if the server supports it, else one HTTP/1.1 connection each.

Over TLS, ALPN decides; clear text has no negotiation and stays with HTTP/1.1. The first connection decides for all;
callers that arrive meanwhile wait for it and share it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from anabranch._http.client.connection import ClientConnection, ClientResponse, ReceiveBuffers
from anabranch._http.client.dialer import Dialer
from anabranch._http.client.limits import ClientTimeouts
from anabranch.errors import TransportError, UsageError

if TYPE_CHECKING:
    from anabranch._http.client.http2_connection import Http2ClientConnection

_SWEEP_SECONDS: Final = 1.0
_REFUSAL_BYTES_MAX: Final = 1 << 20


class BodyStream(Protocol):
    """The body of a streamed response, over any HTTP version."""

    headers: dict[bytes, bytes]

    async def receive(self) -> list[memoryview]:
        """The next bytes, valid until the next call; an empty list at the end."""

    def expect(self, wanted_bytes: int) -> None:
        """Allows the server to send this many bytes more than `WINDOW_BYTES`: the reader has room for them."""

    def progress(self) -> None:
        """The reader has received a complete message."""

    def close(self, *, silent: bool = False) -> None:
        """`silent`: the server has sent nothing for too long. Its connection may be dead, so no new stream uses it."""

    def check(self, now: float, /) -> None:
        """Fails the stream if a timeout has expired."""

    async def wait_closed(self) -> None: ...


class StreamPool:
    def __init__(self, dialer: Dialer, *, streams_max: int = 1_000, timeouts: ClientTimeouts | None = None) -> None:
        self._dialer = dialer
        self._streams_max = streams_max
        timeouts = timeouts or ClientTimeouts()
        self._timeouts = replace(timeouts, read=timeouts.message)  # between two messages a stream may be silent
        self._loop = asyncio.get_running_loop()
        self._buffers = ReceiveBuffers(0)
        self._dialling = asyncio.Lock()
        self._speaks_http2: bool | None = None
        self._connections: list[Http2ClientConnection] = []
        self._opening: dict[ClientConnection, None] = {}
        self._streams: dict[BodyStream, None] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def open(self, headers: Iterable[tuple[str, str]], body: bytes) -> BodyStream | ClientResponse:
        """The stream if the server accepts it (status 200), else the complete error response."""
        if self._closed:
            raise UsageError("this client is closed")
        if len(self._streams) + len(self._opening) >= self._streams_max:
            raise TransportError(f"{self._streams_max} streams are already open, which is the limit", maybe_sent=False)
        deadline = self._loop.time() + self._timeouts.total
        connection: Http2ClientConnection | ClientConnection | None = None
        try:
            async with asyncio.timeout_at(deadline):
                connection = await self._connection(deadline)
                if isinstance(connection, ClientConnection):
                    answer = await self._open_http1(connection, headers, body, deadline)
                else:
                    answer = await self._open_http2(connection, headers, body)
        except TimeoutError:
            if connection is not None and not isinstance(connection, ClientConnection):
                connection.retire()  # it may be dead
            raise TransportError(f"{self._dialer.endpoint.url} did not accept the stream in time") from None
        if not isinstance(answer, ClientResponse):
            self._admit(answer)
        return answer

    def close_stream(self, stream: BodyStream, *, silent: bool = False) -> None:
        stream.close(silent=silent)
        self._streams.pop(stream, None)

    async def close(self) -> None:
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        streams, self._streams = list(self._streams), {}
        for connection in self._opening:
            connection.fail(TransportError("the client was closed"))
        for stream in streams:
            stream.close()
        for http2 in self._connections:
            http2.abort()
        for stream in streams:
            await stream.wait_closed()
        for http2 in self._connections:
            await http2.wait_closed()
        self._connections.clear()

    async def _connection(self, deadline: float) -> "Http2ClientConnection | ClientConnection":
        if self._speaks_http2 is False:
            return await self._dial(deadline)
        async with self._dialling:
            for kept in self._connections:
                if kept.usable:
                    return kept
            connection = await self._dial(deadline)
            self._speaks_http2 = not isinstance(connection, ClientConnection)
            if not isinstance(connection, ClientConnection):
                self._connections.append(connection)
                self._watch()
                try:
                    await connection.ready()
                except BaseException:
                    connection.abort()
                    raise
            return connection

    def _admit(self, stream: BodyStream) -> None:
        if self._closed:
            stream.close()
            raise TransportError("the client was closed")
        self._streams[stream] = None
        self._watch()

    async def _dial(self, deadline: float) -> "Http2ClientConnection | ClientConnection":
        connection = await self._dialer.dial(self._choose, deadline)
        if self._closed:
            connection.abort()
            raise TransportError("the client was closed", maybe_sent=False)
        return connection

    def _choose(self, negotiated: str | None) -> "Http2ClientConnection | ClientConnection":
        endpoint = self._dialer.endpoint
        if negotiated == "h2":
            from anabranch._http.client.http2_connection import Http2ClientConnection  # noqa: PLC0415 -- h2 is slow to import

            return Http2ClientConnection(self._loop, endpoint.url, endpoint.host_header, self._timeouts)
        return ClientConnection(self._loop, endpoint.url, self._timeouts, self._buffers)

    async def _open_http2(
        self, connection: "Http2ClientConnection", headers: Iterable[tuple[str, str]], body: bytes
    ) -> BodyStream | ClientResponse:
        stream = await connection.open_stream([*headers, ("content-length", str(len(body)))], body)
        if stream.status == 200:
            return stream
        refusal = bytearray()
        try:
            while payloads := await stream.receive():
                for payload in payloads:
                    refusal += payload
                if len(refusal) > _REFUSAL_BYTES_MAX:
                    raise TransportError(f"{self._dialer.endpoint.url} sent an error response without end")
        finally:
            stream.close()
        return ClientResponse(stream.status, stream.headers, memoryview(refusal))

    async def _open_http1(
        self, connection: ClientConnection, headers: Iterable[tuple[str, str]], body: bytes, deadline: float
    ) -> BodyStream | ClientResponse:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = self._dialer.request_start + f"{lines}content-length: {len(body)}\r\n\r\n".encode("ascii")
        self._opening[connection] = None
        try:
            answer = await connection.exchange(head, [body], deadline, streaming=True)
            if isinstance(answer, ClientResponse):
                answer.body = memoryview(bytes(answer.body))
                connection.abort()
        finally:
            del self._opening[connection]
        return answer

    def _watch(self) -> None:
        if self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._check)

    def _check(self) -> None:
        self._sweep = None
        now = self._loop.time()
        for stream in list(self._streams):
            stream.check(now)
        for connection in list(self._connections):
            idle = connection.stream_count == 0 and now - connection.idle_since > self._timeouts.idle
            if idle or (connection.stream_count == 0 and not connection.usable):
                connection.abort()
                self._connections.remove(connection)
        if self._streams or self._connections:
            self._watch()
