"""A new connection to one endpoint: name, TCP, perhaps a proxy, TLS, and the protocol that both sides agree on.

Every way this can fail becomes a `TransportError` with `maybe_sent=False` that says what was tried and what to look
at: these are the first errors a new user meets. Cancelling it leaves nothing open.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from anabranch._http.addresses import connect_to_host
from anabranch._http.endpoint import Endpoint
from anabranch._http.proxies import Proxy
from anabranch._http.proxy_tunnel import ProxyTunnel
from anabranch.errors import TransportError

__all__ = ["Dialer"]

P = TypeVar("P", bound=asyncio.BufferedProtocol)


class Dialer:
    def __init__(
        self,
        endpoint: Endpoint,
        *,
        tls: ssl.SSLContext | None = None,
        proxy: Proxy | None = None,
        proxy_tls: ssl.SSLContext | None = None,
        connect_timeout: float = 5.0,
    ) -> None:
        if endpoint.tls and tls is None:
            raise ValueError(f"{endpoint.url} needs a TLS context")
        self.endpoint = endpoint
        self._tls = tls if endpoint.tls else None
        self._proxy = proxy
        self._proxy_tls = proxy_tls if proxy is not None and proxy.tls else None
        self._connect_timeout = connect_timeout

    @property
    def request_start(self) -> bytes:
        """The first line of a request, and what a proxy that forwards it in clear text wants beside it."""
        if self._proxy is None or self.endpoint.tls:
            return b"POST / HTTP/1.1\r\n"
        start = f"POST {self.endpoint.url}/ HTTP/1.1\r\n"
        if self._proxy.authorization:
            start += f"proxy-authorization: {self._proxy.authorization}\r\n"
        return start.encode("ascii")

    async def dial(self, choose: Callable[[str | None], P], deadline: float) -> P:
        """`choose` makes the protocol, given what TLS negotiated: `h2`, `http/1.1` or nothing."""
        loop = asyncio.get_running_loop()
        deadline = min(deadline, loop.time() + self._connect_timeout)
        try:
            async with asyncio.timeout_at(deadline):
                transport, landing = await self._land()
                try:
                    return await self._hand_over(transport, landing, choose)
                except BaseException:
                    transport.abort()
                    raise
        except TimeoutError:
            raise TransportError(
                f"no connection to {self._where} within {self._connect_timeout:g} s: is there a route, or a firewall "
                "in between, does it take a proxy (HTTPS_PROXY) or a VPC endpoint that lets this host in?",
                maybe_sent=False,
            ) from None
        except OSError as error:
            raise TransportError(self._advice(error), maybe_sent=False) from error

    async def _land(self) -> tuple[asyncio.Transport, "_Landing"]:
        """A connection to the host, or to the proxy on the way to it; TLS comes after.

        TLS is begun on a connection that is ours already: asyncio's own way in one step forgets the socket when it is
        cancelled at the wrong moment.
        """
        goal = self.endpoint if self._proxy is None else self._proxy
        connected = await connect_to_host(goal.host, goal.port)
        try:
            return await asyncio.get_running_loop().create_connection(_Landing, sock=connected)
        except BaseException:
            connected.close()
            raise

    async def _hand_over(
        self, transport: asyncio.Transport, landing: "_Landing", choose: Callable[[str | None], P]
    ) -> P:
        proxy = self._proxy
        if proxy is not None and self._proxy_tls is not None:
            transport = await _secure(transport, landing, self._proxy_tls, proxy.host)
        if proxy is not None and self._tls is not None:
            tunnel = ProxyTunnel(asyncio.get_running_loop(), proxy, self.endpoint)
            transport.set_protocol(tunnel)
            tunnel.connection_made(transport)
            await tunnel.wait_open()
            transport.set_protocol(landing)
        if self._tls is not None:
            transport = await _secure(transport, landing, self._tls, self.endpoint.host)
        chosen = choose(_negotiated(transport))
        transport.set_protocol(chosen)
        chosen.connection_made(transport)
        landing.pass_on(chosen)
        return chosen

    @property
    def _where(self) -> str:
        return f"{self.endpoint.url} through {self._proxy!r}" if self._proxy else self.endpoint.url

    def _advice(self, error: OSError) -> str:
        where = self._where
        if isinstance(error, socket.gaierror):
            return (
                f"no address is known for the host of {where} ({error.strerror}): "
                "check the region's spelling, endpoint_url and DNS"
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {where} is not trusted ({error.verify_message}): behind a proxy that inspects "
                "TLS, or with a private certificate, name its authority in AWS_CA_BUNDLE"
            )
        if isinstance(error, ssl.SSLError):
            return f"TLS with {where} failed ({error.reason or error}): does this port speak TLS at all?"
        if isinstance(error, ConnectionRefusedError):
            return f"{where} refused the connection: is the server running, and is its port the one in endpoint_url?"
        return f"no connection to {where}: {error.strerror or error}"


class _Landing(asyncio.Protocol):
    """Holds a connection until it is known who reads it, and keeps what comes before: an HTTP/2 server speaks first."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._lost: tuple[Exception | None] | None = None

    def data_received(self, data: bytes) -> None:
        self._received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = (exc,)

    def pass_on(self, chosen: asyncio.BufferedProtocol) -> None:
        early = memoryview(bytes(self._received))
        while early:
            room = memoryview(chosen.get_buffer(-1))
            step = min(len(room), len(early))
            room[:step] = early[:step]
            chosen.buffer_updated(step)
            early = early[step:]
        if self._lost is not None:
            chosen.connection_lost(self._lost[0])


async def _secure(transport: asyncio.Transport, landing: _Landing, tls: ssl.SSLContext, host: str) -> asyncio.Transport:
    secured = await asyncio.get_running_loop().start_tls(transport, landing, tls, server_hostname=host)
    if secured is None:
        raise ConnectionResetError("the connection was lost during the TLS handshake")
    return secured


def _negotiated(transport: asyncio.BaseTransport) -> str | None:
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    return None if tls is None else tls.selected_alpn_protocol()
