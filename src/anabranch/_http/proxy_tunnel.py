"""The few bytes that open a way through an HTTP proxy: CONNECT, its answer, and then a transport for TLS to go over.

Nothing may come after the proxy's answer: whoever is behind it waits for the first bytes of TLS.
"""

import asyncio
from typing import Final, cast

from anabranch._http.endpoint import Endpoint
from anabranch._http.proxies import Proxy
from anabranch._http.response_head import parse_response_head
from anabranch.errors import TransportError

__all__ = ["ProxyTunnel"]

_HEAD_BYTES_MAX: Final = 16 << 10


class ProxyTunnel(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, proxy: Proxy, endpoint: Endpoint) -> None:
        self._proxy = proxy
        self._endpoint = endpoint
        self._received = bytearray()
        self._open: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport | None = None

    async def wait_open(self) -> None:
        await self._open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        authority = self._endpoint.authority
        request = f"CONNECT {authority} HTTP/1.1\r\nhost: {authority}\r\n"
        if self._proxy.authorization:
            request += f"proxy-authorization: {self._proxy.authorization}\r\n"
        self._transport.write(f"{request}\r\n".encode("ascii"))

    def data_received(self, data: bytes) -> None:
        if self._open.done():
            return
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            if len(self._received) > _HEAD_BYTES_MAX:
                self._refuse("its answer to CONNECT has no end")
            return
        try:
            status = parse_response_head(bytes(self._received[:head_end])).status
        except TransportError as error:
            self._refuse(str(error))
            return
        if status == 407:
            self._refuse("it wants a user and a password: HTTPS_PROXY=http://user:password@host:port")
        elif not 200 <= status < 300:
            self._refuse(f"it answered CONNECT with status {status}")
        elif len(self._received) > head_end + 4:
            self._refuse("it sent more than an answer to CONNECT")
        else:
            self._open.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._open.done():
            self._refuse(str(exc) if exc else "it closed the connection")

    def _refuse(self, reason: str) -> None:
        self._open.set_exception(
            TransportError(f"{self._proxy!r} opened no way to {self._endpoint.authority}: {reason}", maybe_sent=False)
        )
        if self._transport is not None:
            self._transport.abort()
