"""Signed calls to an AWS service with a JSON protocol: Kinesis, DynamoDB.

A call is sent once. Three failures are repaired, each at most once:

- A kept connection was closed: the HTTP client sends the call again if it is safe to repeat.
- The security token expired: the call is signed again with fresh credentials.
- The local clock is wrong: the call is signed again with the time of the service's Date header.

All other retries are up to the caller.
"""

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Final, TypeVar

from anabranch._aws.account import ServiceAddress
from anabranch._aws.credentials import CredentialSource
from anabranch._aws.errors import CLOCK_CODES, TOKEN_CODES, service_error
from anabranch._http.client.connection import ClientResponse, HasRoom
from anabranch._http.client.dialer import Dialer, client_tls_context
from anabranch._http.client.http_client import HttpClient
from anabranch._http.client.limits import ClientTimeouts
from anabranch._version import __version__
from anabranch._wire.bodies import JSON, decode_aws_error
from anabranch._wire.sigv4 import SignedHeaders, Signer, SigningCredentials
from anabranch.errors import CodecError, ServiceError, TransportError

T = TypeVar("T")

USER_AGENT: Final = f"anabranch/{__version__} python/{platform.python_version()}"
_CLOCK_ERROR_MS_MIN: Final = 60_000
"""Smaller offsets are no reason to sign again: AWS accepts signatures that are off by five minutes."""


@dataclass(frozen=True, slots=True)
class ServiceName:
    name: str
    """The name in signatures and endpoints: `kinesis`."""
    target_prefix: str
    """The part of X-Amz-Target before the operation: `Kinesis_20131202`."""
    content_type: str = JSON


class AwsService:
    def __init__(
        self,
        service: ServiceName,
        address: ServiceAddress,
        credentials: CredentialSource,
        http: HttpClient,
        *,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.region = address.region
        self._service = service
        self._address = address
        self._source = credentials
        self._http = http
        self._wall_ms = wall_ms
        self._signer: Signer | None = None
        self._clock_offset_ms = 0
        """Added to this machine's clock in signatures; 0 until the service reports that the clock is wrong."""
        self._latest_offset_ms = 0
        self._last_headers = f"user-agent: {USER_AGENT}\r\ncontent-length: ".encode("ascii")

    async def call(
        self,
        purpose: str,
        operation: str,
        pieces: Sequence[bytes],
        decode: Callable[[ClientResponse], T],
        *,
        repeatable: bool,
        refused: Callable[[ClientResponse], T | None] = lambda _: None,
        has_room: HasRoom | None = None,
    ) -> T:
        """`decode` turns a successful response into a value. `repeatable`: the call is safe to send twice. `refused`
        turns an error response into a value if it is an outcome, such as a failed condition. `has_room`: asked before a
        large body is received; if it returns false, `NoRoomError` is raised.
        """

        def accept(response: ClientResponse) -> T:
            try:
                if response.status == 200:
                    return decode(response)
                if (outcome := refused(response)) is not None:
                    return outcome
                raise self.error_from(operation, response)
            except CodecError as error:
                raise TransportError(f"{operation}: {error}") from error

        def post(signed: SignedHeaders) -> Awaitable[T]:
            headers = b"%b%b%d\r\n\r\n" % (signed.lines(), self._last_headers, sum(map(len, pieces)))
            return self._http.post(purpose, headers, pieces, accept, repeatable=repeatable, has_room=has_room)

        return await self.send_signed(operation, pieces, post)

    async def send_signed(
        self, operation: str, pieces: Sequence[bytes], send: Callable[[SignedHeaders], Awaitable[T]]
    ) -> T:
        """Signs and sends a call, and again if the service rejected a signature that can be repaired."""
        offset_ms = self._clock_offset_ms
        try:
            credentials = self._source.current()
            if credentials is None:
                credentials = await self._source.get()
            return await send(self._sign(credentials, operation, pieces))
        except ServiceError as error:
            if not await self._repair(error, offset_ms):
                raise
        return await send(self._sign(await self._source.get(), operation, pieces))

    def _sign(self, credentials: SigningCredentials, operation: str, pieces: Sequence[bytes]) -> SignedHeaders:
        signer = self._signer
        if signer is None or credentials is not signer.credentials:
            signer = self._signer = Signer(
                credentials,
                region=self._address.region,
                service=self._service.name,
                host=self._address.endpoint.host_header,
            )
        target = f"{self._service.target_prefix}.{operation}"
        return signer.sign(target, self._service.content_type, pieces, self._wall_ms() + self._clock_offset_ms)

    async def _repair(self, error: ServiceError, used_offset_ms: int) -> bool:
        """True if the call can be signed and sent again: the service rejected it without acting on it."""
        if error.code in CLOCK_CODES and abs(self._latest_offset_ms - used_offset_ms) > _CLOCK_ERROR_MS_MIN:
            self._clock_offset_ms = self._latest_offset_ms
            return True
        if error.code in TOKEN_CODES and self._signer is not None:
            rejected = self._signer.credentials
            return await self._source.renew(rejected) != rejected
        return False

    def error_from(self, operation: str, response: ClientResponse) -> ServiceError:
        headers = response.headers
        error_type = headers.get(b"x-amzn-errortype")
        error = decode_aws_error(response.body, error_type.decode("latin-1") if error_type else None)
        answered_at = server_seconds(headers)
        if answered_at is not None:
            self._latest_offset_ms = round(answered_at * 1000) - self._wall_ms()
        return service_error(
            operation,
            error,
            status=response.status,
            request_id=request_id(headers),
            region=self._address.region,
            retry_after_seconds=_retry_after_seconds(headers, answered_at),
        )

    async def close(self) -> None:
        await self._http.close()


async def open_service(
    service: ServiceName,
    address: ServiceAddress,
    credentials: CredentialSource,
    *,
    purposes: Mapping[str, int],
    timeouts: ClientTimeouts,
) -> AwsService:
    dialer = await make_dialer(address, ("http/1.1",), timeouts)
    return AwsService(service, address, credentials, HttpClient(dialer, purposes=purposes, timeouts=timeouts))


async def make_dialer(address: ServiceAddress, alpn: Sequence[str], timeouts: ClientTimeouts) -> Dialer:
    tls = proxy_tls = None  # made in a thread: it reads certificate files
    if address.endpoint.tls:
        tls = await asyncio.to_thread(client_tls_context, address.ca_bundle, alpn)
    if address.proxy is not None and address.proxy.tls:
        proxy_tls = await asyncio.to_thread(client_tls_context, address.ca_bundle)
    return Dialer(address.endpoint, tls=tls, proxy=address.proxy, proxy_tls=proxy_tls, connect_timeout=timeouts.connect)


def request_id(headers: Mapping[bytes, bytes]) -> str | None:
    value = headers.get(b"x-amzn-requestid")
    return None if value is None else value.decode("latin-1")


def server_seconds(headers: Mapping[bytes, bytes]) -> float | None:
    """The service's clock, from the Date header; None without one."""
    value = headers.get(b"date")
    return None if value is None else _date_seconds(value)


@lru_cache(8)  # many responses have the same date
def _date_seconds(value: bytes) -> float | None:
    """An HTTP date in seconds since 1970; None if it is invalid."""
    try:
        return parsedate_to_datetime(value.decode("latin-1")).timestamp()
    except (ValueError, OverflowError):
        return None


def _retry_after_seconds(headers: Mapping[bytes, bytes], answered_at: float | None) -> float | None:
    """Retry-After holds seconds or a date. A date is relative to the service's clock."""
    value = headers.get(b"retry-after")
    if value is None:
        return None
    if value.isdigit():
        return float(value[:9])
    at = _date_seconds(value)
    return None if at is None or answered_at is None else max(0.0, at - answered_at)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    round_trip_ms: int
    """Includes connecting."""
    clock_ahead_ms: int | None
    """How far this machine's clock is ahead of the service's, to half a second; None if the response has no Date."""


async def probe(address: ServiceAddress) -> ProbeResult:
    """Sends an unsigned request to check the network and the clock. Any response will do, even an error."""
    timeouts = ClientTimeouts()
    http = HttpClient(await make_dialer(address, ("http/1.1",), timeouts), purposes={"probe": 1}, timeouts=timeouts)
    headers = (
        f"host: {address.endpoint.host_header}\r\n"
        f"content-type: {JSON}\r\n"
        "x-amz-target: Kinesis_20131202.ListStreams\r\n"
        f"user-agent: {USER_AGENT}\r\n"
        "content-length: 2\r\n\r\n"
    ).encode("ascii")
    started = time.monotonic()
    try:
        date = await http.post(
            "probe", headers, [b"{}"], lambda response: server_seconds(response.headers), repeatable=True
        )
    finally:
        await http.close()
    now_ms = time.time_ns() // 1_000_000
    # A Date has whole seconds; on average the time is half a second later.
    ahead_ms = None if date is None else now_ms - round(date * 1000) - 500
    return ProbeResult(round((time.monotonic() - started) * 1000), ahead_ms)
