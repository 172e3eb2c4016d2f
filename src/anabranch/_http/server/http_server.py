"""A small HTTP server: HTTP/1.1 and HTTP/2 on one port, in clear text or over TLS.

It has one listener, a periodic check for slow connections, and a graceful stop. It serves the local Kinesis
and the health pages: few dependencies, bounded clients, no routing.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from types import TracebackType
from typing import Final, Self

from anabranch._http.server.exchange import Handler, ServerLimits, ServerState
from anabranch._http.server.http1_connection import Http1ServerConnection
from anabranch.errors import ConfigurationError, UsageError

_BACKLOG: Final = 1_024
_TLS_GOODBYE_SECONDS: Final = 0.5  # an idle pool sends no close_notify, and nothing is lost without it


class HttpServer:
    def __init__(
        self,
        handler: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        check_host(host)
        self._handler = handler
        self._host = host
        self._address = host
        self._port = port
        self._tls = tls
        self._limits = limits or ServerLimits()
        self._state: ServerState | None = None
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        if self._server is not None:
            raise UsageError("this server is already running; create another one for another port")
        loop = asyncio.get_running_loop()
        state = ServerState(self._handler, self._limits)
        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2", "http/1.1"])
        try:
            self._address = await self._resolve()
            self._server = await loop.create_server(
                lambda: Http1ServerConnection(state),
                self._address,
                self._port,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.head_timeout if self._tls is not None else None,
                ssl_shutdown_timeout=_TLS_GOODBYE_SECONDS if self._tls is not None else None,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise ConfigurationError(_explain(error, self._host, self._port)) from error
        self._state = state
        self._sweep = loop.call_later(self._limits.check_interval, self._check_connections, state)

    @property
    def port(self) -> int:
        """The port in use, also if port 0 was requested."""
        if self._server is None or not self._server.sockets:
            raise UsageError("the server is not running")
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        scheme = "http" if self._tls is None else "https"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._address, self._address)  # noqa: S104 -- shown as loopback
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        return f"{scheme}://{host}:{self.port}"

    async def stop(self, *, grace: float = 5.0) -> None:
        """Accepts no more clients, lets answers in progress finish within `grace` seconds, then aborts the rest."""
        if self._server is None or self._state is None:
            return
        server, state = self._server, self._state
        server.close()
        if self._sweep is not None:
            self._sweep.cancel()
        await state.drain(grace)
        with contextlib.suppress(TimeoutError):  # since Python 3.12 it also waits for unfinished handshakes
            async with asyncio.timeout(_TLS_GOODBYE_SECONDS):
                await server.wait_closed()
        self._server = self._state = self._sweep = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _resolve(self) -> str:
        """One address if the port is 0: otherwise each address of the name would get a different port."""
        if self._port:
            return self._host
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return str(found[0][4][0])

    def _check_connections(self, state: ServerState) -> None:
        now = time.monotonic()
        for connection in list(state.connections):
            connection.check(now)
        self._sweep = asyncio.get_running_loop().call_later(self._limits.check_interval, self._check_connections, state)


def check_host(host: str) -> None:
    if not host:
        raise ConfigurationError("host: an empty address means all interfaces; pass 0.0.0.0 or :: to listen on all")
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigurationError(f"host: {host!r} is not a host name or an address") from None


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: stop the other program, or choose another port (0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"no permission for port {port} on {host}: choose a port above 1023"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"
