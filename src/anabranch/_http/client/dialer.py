"""Opens connections to one endpoint: DNS lookup, TCP, an optional proxy, TLS and protocol negotiation.

HTTPS_PROXY, HTTP_PROXY and NO_PROXY name the proxy. They are read by Python's standard library, as in boto3.

Every failure becomes a `TransportError` with `maybe_sent=False` that says what was tried and what to check: these are
the first errors that a new user meets.

If a host has several addresses, they are tried in parallel, each a moment after the previous one (RFC 8305, "happy
eyeballs"). asyncio can do that too, but it leaks the connected socket if it is cancelled at the wrong moment.
"""

import asyncio
import socket
import ssl
from asyncio import FIRST_COMPLETED
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from anabranch._http.client.response_framing import parse_response_head
from anabranch.errors import ConfigurationError, TransportError

P = TypeVar("P", bound=asyncio.BufferedProtocol)

AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
"""As `getaddrinfo` returns it."""

_ATTEMPT_DELAY_SECONDS: Final = 0.25
"""How long after the previous address the next one is tried (RFC 8305, section 5)."""
_CONNECT_RESPONSE_BYTES_MAX: Final = 16 << 10
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    scheme: str
    host: str
    """A host name in ASCII, or an IP address; IPv6 without brackets."""
    port: int

    @property
    def tls(self) -> bool:
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """Host and port, as in a CONNECT request. IPv6 is in brackets."""
        return f"{self._bracketed}:{self.port}"

    @property
    def host_header(self) -> str:
        """As in the Host header, which is signed: the port is left out if it is the default of the scheme."""
        return self._bracketed if self.port == _DEFAULT_PORTS[self.scheme] else self.authority

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host_header}"

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_endpoint(url: str) -> Endpoint:
    try:
        parts = urlsplit(url)
        host, port = _ascii_host(parts.hostname), parts.port
    except ValueError as error:
        raise ValueError(
            f"{url!r} is not a valid endpoint ({error}); use a URL like https://kinesis.eu-west-1.amazonaws.com"
        ) from None
    if parts.scheme not in _DEFAULT_PORTS or not host or parts.username is not None:
        raise ValueError(f"{url!r} is not a valid endpoint; use a URL like https://kinesis.eu-west-1.amazonaws.com")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError(
            f"an endpoint has a scheme, a host and an optional port, but no path, query or fragment: {url!r}"
        )
    return Endpoint(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme])


def _ascii_host(host: str | None) -> str:
    """As headers and DNS need it. Raises UnicodeError, a ValueError, if a label of the host is empty or too long."""
    return (host or "").encode("idna").decode("ascii")


@dataclass(frozen=True, slots=True)
class Proxy:
    host: str
    port: int
    tls: bool
    """The connection to the proxy itself uses TLS."""
    authorization: str | None = None
    """The value of Proxy-Authorization."""

    def __repr__(self) -> str:
        return f"Proxy({self.host}:{self.port})"  # never the password


def proxy_for(endpoint: Endpoint) -> Proxy | None:
    """The proxy that the environment names for this endpoint."""
    url = getproxies_environment().get(endpoint.scheme)
    if not url or proxy_bypass(endpoint.authority):
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = _ascii_host(parts.hostname), parts.port
    except ValueError:
        host, port = "", None
    if not host or parts.scheme not in {"http", "https"}:
        variable = f"{endpoint.scheme}_proxy".upper()
        raise ConfigurationError(f"{variable} is not a valid proxy URL; use one like http://proxy.example.com:3128")
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {b64encode(pair.encode()).decode()}"
    tls = parts.scheme == "https"
    return Proxy(host, port or (443 if tls else 80), tls, authorization)


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
        """How each request on a connection starts. Requests without TLS are sent to the proxy itself, which needs the
        full URL and its own header.
        """
        if self._proxy is None or self.endpoint.tls:
            return b"POST / HTTP/1.1\r\n"
        start = f"POST {self.endpoint.url}/ HTTP/1.1\r\n"
        if self._proxy.authorization:
            start += f"proxy-authorization: {self._proxy.authorization}\r\n"
        return start.encode("ascii")

    async def dial(self, make_protocol: Callable[[str | None], P], deadline: float) -> P:
        """Opens a connection and returns its protocol, which the caller must close. `make_protocol` creates it, given
        the result of ALPN: `h2`, `http/1.1` or None.
        """
        loop = asyncio.get_running_loop()
        deadline = min(deadline, loop.time() + self._connect_timeout)
        try:
            async with asyncio.timeout_at(deadline):
                transport, pending = await self._connect()
                try:
                    return await self._set_up(transport, pending, make_protocol)
                except BaseException:
                    transport.abort()
                    raise
        except TimeoutError:
            raise TransportError(
                f"no connection to {self._where} within {self._connect_timeout:g} s: check routes, firewalls, "
                "the proxy (HTTPS_PROXY) and the security group of the VPC endpoint",
                maybe_sent=False,
            ) from None
        except OSError as error:
            raise TransportError(self._error_text(error), maybe_sent=False) from error

    async def _connect(self) -> tuple[asyncio.Transport, "_PendingProtocol"]:
        """A connection to the host, or to the proxy, without TLS.

        TLS starts later, on a connection that we own: asyncio's way to do both in one step leaks the socket if it is
        cancelled at the wrong moment.
        """
        target = self.endpoint if self._proxy is None else self._proxy
        connected = await connect_to_host(target.host, target.port)
        try:
            return await asyncio.get_running_loop().create_connection(_PendingProtocol, sock=connected)
        except BaseException:
            connected.close()
            raise

    async def _set_up(
        self, transport: asyncio.Transport, pending: "_PendingProtocol", make_protocol: Callable[[str | None], P]
    ) -> P:
        """TLS with the proxy, a tunnel through it, TLS with the endpoint (each if needed), and the final protocol."""
        proxy = self._proxy
        if proxy is not None and self._proxy_tls is not None:
            transport = await _start_tls(transport, pending, self._proxy_tls, proxy.host)
        if proxy is not None and self._tls is not None:
            await _open_tunnel(transport, pending, proxy, self.endpoint)
        if self._tls is not None:
            transport = await _start_tls(transport, pending, self._tls, self.endpoint.host)
        tls_object: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        protocol = make_protocol(None if tls_object is None else tls_object.selected_alpn_protocol())
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        pending.replay_into(protocol)
        return protocol

    @property
    def _where(self) -> str:
        return f"{self.endpoint.url} through {self._proxy!r}" if self._proxy else self.endpoint.url

    def _error_text(self, error: OSError) -> str:
        """What failed, and what to check."""
        where = self._where
        if isinstance(error, socket.gaierror):
            return (
                f"cannot resolve the host of {where} ({error.strerror}): "
                "check the spelling of the region, endpoint_url and DNS"
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {where} is not trusted ({error.verify_message}): behind a proxy that inspects "
                "TLS, or with a private certificate, set AWS_CA_BUNDLE to its certificate authority"
            )
        if isinstance(error, ssl.SSLError):
            return f"TLS with {where} failed ({error.reason or error}): check that this port speaks TLS"
        if isinstance(error, ConnectionRefusedError):
            return (
                f"{where} refused the connection: check that the server is running and that endpoint_url has its port"
            )
        return f"no connection to {where}: {error.strerror or error}"


class _PendingProtocol(asyncio.Protocol):
    """The protocol of a connection until the final one is chosen. Buffers bytes: HTTP/2 servers may send first."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._lost: tuple[Exception | None] | None = None
        """The argument of `connection_lost`, which may be None; None if the connection is open."""
        self._changed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = (exc,)
        self._changed.set()

    async def read_head(self) -> bytes:
        """The head of the proxy's answer to CONNECT. Nothing may follow it: the server behind the tunnel has received
        nothing yet. In the texts of the errors, "it" is the proxy.
        """
        while (head_end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > _CONNECT_RESPONSE_BYTES_MAX:
                raise TransportError("its answer to CONNECT is too long")
            if self._lost is not None:
                raise TransportError(str(self._lost[0] or "it closed the connection"))
            self._changed.clear()
            await self._changed.wait()
        if len(self._received) > head_end + 4:
            raise TransportError("it sent bytes after its answer to CONNECT")
        head = bytes(self._received[:head_end])
        self._received.clear()
        return head

    def replay_into(self, protocol: asyncio.BufferedProtocol) -> None:
        """Passes on everything that arrived so far, as a transport would."""
        rest = memoryview(bytes(self._received))
        while rest:
            buffer = memoryview(protocol.get_buffer(-1))
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            protocol.buffer_updated(count)
            rest = rest[count:]
        if self._lost is not None:
            protocol.connection_lost(self._lost[0])


async def _open_tunnel(
    transport: asyncio.Transport, pending: _PendingProtocol, proxy: Proxy, endpoint: Endpoint
) -> None:
    """Asks the proxy to connect to the endpoint. Afterwards the connection leads there."""
    request = f"CONNECT {endpoint.authority} HTTP/1.1\r\nhost: {endpoint.authority}\r\n"
    if proxy.authorization:
        request += f"proxy-authorization: {proxy.authorization}\r\n"
    transport.write(f"{request}\r\n".encode("ascii"))
    try:
        status = parse_response_head(await pending.read_head()).status
    except TransportError as error:
        reason = str(error)
    else:
        if 200 <= status < 300:
            return
        reason = f"it answered CONNECT with status {status}"
        if status == 407:
            reason = "it needs a user and a password: set HTTPS_PROXY=http://user:password@host:port"
    raise TransportError(f"{proxy!r} did not connect to {endpoint.authority}: {reason}", maybe_sent=False)


async def _start_tls(
    transport: asyncio.Transport, pending: _PendingProtocol, tls: ssl.SSLContext, host: str
) -> asyncio.Transport:
    secured = await asyncio.get_running_loop().start_tls(transport, pending, tls, server_hostname=host)
    if secured is None:
        raise ConnectionResetError("the connection was lost during the TLS handshake")
    return secured


async def connect_to_host(host: str, port: int) -> socket.socket:
    """Returns a connected socket, which the caller must close. If all addresses fail with the same type, raises the
    first error; otherwise an OSError with the texts of all.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    sockets: list[socket.socket] = []
    failures: list[OSError] = []
    connected: asyncio.Future[Any] = loop.create_future()  # the first connected socket

    async def attempt(address: AddressInfo) -> None:
        family, kind, protocol, _, socket_address = address
        try:
            attempted = socket.socket(family, kind, protocol)
            sockets.append(attempted)
            attempted.setblocking(False)
            await loop.sock_connect(attempted, socket_address)
        except OSError as error:
            failures.append(error)
        else:
            if not connected.done():
                connected.set_result(attempted)

    try:
        async with asyncio.TaskGroup() as group:
            attempts: list[asyncio.Future[Any]] = []
            for address in _alternating(addresses):
                task = group.create_task(attempt(address))
                attempts.append(task)
                await asyncio.wait([task, connected], timeout=_ATTEMPT_DELAY_SECONDS, return_when=FIRST_COMPLETED)
                if connected.done():
                    break
            while not connected.done() and (running := [task for task in attempts if not task.done()]):
                await asyncio.wait([*running, connected], return_when=FIRST_COMPLETED)
            for unneeded in attempts:
                unneeded.cancel()
        if connected.done():
            winner: socket.socket = connected.result()
            sockets.remove(winner)
            return winner
    finally:
        for unused in sockets:
            unused.close()
    if len({type(failure) for failure in failures}) == 1:
        raise failures[0]
    raise OSError("; ".join(str(failure) for failure in failures))


def _alternating(addresses: Sequence[AddressInfo]) -> list[AddressInfo]:
    """IPv4 and IPv6 addresses in turn, starting with the family that the system prefers."""
    first = [address for address in addresses if address[0] == addresses[0][0]]
    others = [address for address in addresses if address[0] != addresses[0][0]]
    return [address for address in chain.from_iterable(zip_longest(first, others)) if address is not None]


def client_tls_context(ca_bundle: str | None = None, alpn: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
    """Verifies certificates. Trusts the system's authorities, or only those in `ca_bundle`: a file or a directory.

    Blocks, because it reads certificates from disk. Share the result: creating it takes longer than a TLS handshake.
    """
    try:
        if ca_bundle is not None and Path(ca_bundle).is_dir():
            context = ssl.create_default_context(capath=ca_bundle)
        else:
            context = ssl.create_default_context(cafile=ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"cannot use the certificates in {ca_bundle} (AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, ca_bundle): {error}"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(alpn))
    return context


def system_has_certificates() -> bool:
    """False in container images without certificates, and if Python looks for them in the wrong place."""
    file, directory, *_ = ssl.get_default_verify_paths()
    return bool(file) or (bool(directory) and any(Path(directory).iterdir()))
