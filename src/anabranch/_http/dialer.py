"""A new connection to one endpoint: name, TCP, perhaps a proxy, TLS, and the protocol that both sides agree on.

Every way this can fail becomes a `TransportError` with `maybe_sent=False` that says what was tried and what to look
at: these are the first errors a new user meets. Cancelling it leaves nothing open.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast

from anabranch._http.endpoint import Endpoint
from anabranch._http.proxies import Proxy
from anabranch._http.proxy_tunnel import ProxyTunnel
from anabranch.errors import TransportError

__all__ = ["Dialer"]

# RFC 8305: the next address is tried beside a slow one, so that a broken IPv6 route costs a quarter of a second.
_HAPPY_EYEBALLS_DELAY: Final = 0.25

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
                if self._proxy is None:
                    return await self._dial_host(self.endpoint.host, self.endpoint.port, self._tls, choose)
                if self._tls is None:
                    return await self._dial_host(self._proxy.host, self._proxy.port, self._proxy_tls, choose)
                return await self._dial_through(self._proxy, self._tls, choose)
        except TimeoutError:
            raise TransportError(
                f"no connection to {self._where} within {self._connect_timeout:g} s: is there a route, or a firewall "
                "in between, does it take a proxy (HTTPS_PROXY) or a VPC endpoint that lets this host in?",
                maybe_sent=False,
            ) from None
        except OSError as error:
            raise TransportError(self._advice(error), maybe_sent=False) from error

    async def _dial_host(
        self, host: str, port: int, tls: ssl.SSLContext | None, choose: Callable[[str | None], P]
    ) -> P:
        _, doorway = await asyncio.get_running_loop().create_connection(
            lambda: _Doorway(choose),
            host,
            port,
            ssl=tls,
            server_hostname=host if tls else None,
            happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY,
        )
        return doorway.chosen

    async def _dial_through(self, proxy: Proxy, tls: ssl.SSLContext, choose: Callable[[str | None], P]) -> P:
        loop = asyncio.get_running_loop()
        transport, tunnel = await loop.create_connection(
            lambda: ProxyTunnel(loop, proxy, self.endpoint),
            proxy.host,
            proxy.port,
            ssl=self._proxy_tls,
            server_hostname=proxy.host if self._proxy_tls else None,
            happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY,
        )
        try:
            await tunnel.wait_open()
            secured = await loop.start_tls(transport, tunnel, tls, server_hostname=self.endpoint.host)
        except BaseException:
            transport.abort()
            raise
        if secured is None:
            raise ConnectionResetError("the connection was lost during the TLS handshake")
        chosen = choose(_negotiated(secured))
        secured.set_protocol(chosen)
        chosen.connection_made(secured)
        early = memoryview(tunnel.take_received())
        while early:
            room = memoryview(chosen.get_buffer(-1))
            step = min(len(room), len(early))
            room[:step] = early[:step]
            chosen.buffer_updated(step)
            early = early[step:]
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
        if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
            return f"{where} refused the connection: is the server running, and is its port the one in endpoint_url?"
        return f"no connection to {where}: {error.strerror or error}"


class _Doorway(asyncio.Protocol, Generic[P]):
    """Stands where a connection arrives, and hands it to the protocol that TLS has negotiated."""

    def __init__(self, choose: Callable[[str | None], P]) -> None:
        self._choose = choose
        self.chosen: P = cast("P", None)  # set before anybody looks: create_connection returns after connection_made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.chosen = self._choose(_negotiated(transport))
        transport.set_protocol(self.chosen)
        self.chosen.connection_made(transport)


def _negotiated(transport: asyncio.BaseTransport) -> str | None:
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    return None if tls is None else tls.selected_alpn_protocol()
