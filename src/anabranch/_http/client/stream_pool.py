"""Streamed responses from one endpoint: over HTTP/2 if the server supports it, else one HTTP/1.1 connection each.

Over TLS, ALPN decides; clear text has no negotiation and stays with HTTP/1.1. The first connection decides for all;
callers that arrive meanwhile wait for it and share it.
"""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

from anabranch._http.client.connection import ClientResponse
from anabranch._http.client.dialer import Dialer
from anabranch._http.client.http1_stream import Http1Stream
from anabranch._http.client.limits import ClientTimeouts
from anabranch.errors import TransportError, UsageError

if TYPE_CHECKING:
    from anabranch._http.client.http2_connection import Http2BodyStream, Http2ClientConnection

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


class StreamPool:
    def __init__(self, dialer: Dialer, *, streams_max: int = 1_000, timeouts: ClientTimeouts | None = None) -> None:
        self._dialer = dialer
        self._streams_max = streams_max
        self._timeouts = timeouts or ClientTimeouts()
        self._loop = asyncio.get_running_loop()
        self._dialling = asyncio.Lock()
        self._speaks_http2: bool | None = None
        self._connections: list[Http2ClientConnection | Http1Stream] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def open(self, headers: Iterable[tuple[str, str]], body: bytes) -> BodyStream | ClientResponse:
        """The stream if the server accepts it (status 200), else the complete error response."""
        if self._closed:
            raise UsageError("this client is closed")
        if sum(connection.stream_count for connection in self._connections) >= self._streams_max:
            raise TransportError(f"{self._streams_max} streams are already open, which is the limit", maybe_sent=False)
        deadline = self._loop.time() + self._timeouts.total
        connection = None
        try:
            async with asyncio.timeout_at(deadline):
                connection = await self._connection(deadline)
                stream = await connection.open_stream([*headers, ("content-length", str(len(body)))], body)
                if stream.status != 200:
                    return await self._read_refusal(stream)
        except TimeoutError:
            if connection is not None:
                connection.retire()  # it may be dead
            raise TransportError(f"{self._dialer.endpoint.url} did not accept the stream in time") from None
        self._check_not_closed(stream)
        return stream

    async def close(self) -> None:
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.abort()
        for connection in connections:
            await connection.wait_closed()

    async def _connection(self, deadline: float) -> "Http2ClientConnection | Http1Stream":
        if self._speaks_http2 is False:
            return await self._dial(deadline)
        async with self._dialling:
            for kept in self._connections:
                if kept.usable:
                    return kept
            connection = await self._dial(deadline)
            self._speaks_http2 = not isinstance(connection, Http1Stream)
            try:
                await connection.ready()
            except BaseException:
                connection.abort()
                raise
            return connection

    async def _dial(self, deadline: float) -> "Http2ClientConnection | Http1Stream":
        connection = await self._dialer.dial(self._choose, deadline)
        if self._closed:
            connection.abort()
            raise TransportError("the client was closed", maybe_sent=False)
        self._connections.append(connection)
        self._watch()
        return connection

    def _choose(self, negotiated: str | None) -> "Http2ClientConnection | Http1Stream":
        endpoint = self._dialer.endpoint
        if negotiated == "h2":
            from anabranch._http.client.http2_connection import Http2ClientConnection  # noqa: PLC0415 -- h2 is slow to import

            return Http2ClientConnection(self._loop, endpoint.url, endpoint.host_header, self._timeouts)
        return Http1Stream(self._loop, endpoint.url, self._dialer.request_start, self._timeouts)

    def _check_not_closed(self, opened: BodyStream) -> None:
        if self._closed:
            opened.close()
            raise TransportError("the client was closed")

    async def _read_refusal(self, stream: "Http2BodyStream | Http1Stream") -> ClientResponse:
        body = bytearray()
        try:
            while payloads := await stream.receive():
                for payload in payloads:
                    body += payload
                if len(body) > _REFUSAL_BYTES_MAX:
                    raise TransportError(f"{self._dialer.endpoint.url} sent an error response without end")
        finally:
            stream.close()
        return ClientResponse(stream.status, stream.headers, memoryview(body))

    def _watch(self) -> None:
        if self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP_SECONDS, self._check)

    def _check(self) -> None:
        self._sweep = None
        now = self._loop.time()
        for connection in list(self._connections):
            connection.check(now)
            if connection.is_over(now):
                connection.abort()
                self._connections.remove(connection)
        if self._connections:
            self._watch()
