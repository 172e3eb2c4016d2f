"""`LocalKinesis`: the local server as one object to start, use and stop.

async with LocalKinesis(create={"orders": 4}) as kinesis:
    client = boto3.client("kinesis", endpoint_url=kinesis.endpoint_url, region_name=kinesis.region, ...)
"""

import asyncio
import datetime as dt
import ipaddress
import logging
import os
import random
import ssl
import tempfile
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from anabranch._http.server.exchange import Answer, Request, ServerLimits
from anabranch._http.server.http_server import HttpServer, check_host
from anabranch.errors import CodecError, ConfigurationError, UsageError
from anabranch.local.errors import LocalError
from anabranch.local.faults import Faults
from anabranch.local.http import AdminHttpApp, EventStreams, KinesisHttpApp
from anabranch.local.journal import REMEDY, Journal
from anabranch.local.service import LocalState
from anabranch.local.settings import LocalSettings

logger = logging.getLogger("anabranch.local")

_FREE_EVERY_SECONDS = 60.0
_JOURNAL_BYTES_MIN = 1 << 20
"""A journal that is smaller is not rewritten while the server runs."""
_HTTP_LIMITS = ServerLimits(streams_max=16)
"""As many streams on one HTTP/2 connection as Kinesis allows: clients must open several connections here too."""
_CERTIFICATE_LIFETIME = dt.timedelta(days=30)
_CRYPTOGRAPHY_MISSING = (
    "a self-signed certificate needs the package `cryptography`: pip install 'anabranch[tls]', "
    "or pass your own certificate and key"
)


class LocalKinesis:
    """A Kinesis server in this process. Streams are kept in memory unless `data` names a folder."""

    def __init__(
        self,
        *,
        create: Mapping[str, int] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        region: str = "us-east-1",
        account_id: str = "000000000000",
        limits: Literal["aws", "off"] = "off",
        state_delay: float = 0.0,
        time_scale: float = 1.0,
        tls: bool = False,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        data: str | os.PathLike[str] | None = None,
        salvage: bool = False,
        seed: int | None = None,
    ) -> None:
        if key is not None and certificate is None:
            raise ConfigurationError("key: a key needs its certificate: pass the certificate too")
        check_host(host)
        self.settings = LocalSettings(
            region=region,
            account_id=account_id,
            limits=limits,
            state_delay_ms=round(state_delay * 1000),
            time_scale=time_scale,
        )
        self._latest_ms = 0
        self._streams = EventStreams(self._now_ms)
        self.state = LocalState(self.settings, entropy=random.Random(seed), on_change=self._streams.wake)  # noqa: S311 -- no secrets
        self.faults = Faults(random.Random(seed))  # noqa: S311 -- as above
        self.certificate_path: Path | None = None if certificate is None else Path(certificate)
        """The certificate that clients must trust, if the server uses TLS."""
        self._create = dict(create or {})
        self._host = host
        self._port = port
        self._tls = tls or certificate is not None
        self._key_path = None if key is None else Path(key)
        self._data = None if data is None else Path(data)
        self._salvage = salvage
        self._journal: Journal | None = None
        self._server: HttpServer | None = None
        self._certificate_folder: tempfile.TemporaryDirectory[str] | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._freeing: asyncio.TimerHandle | None = None

    @property
    def endpoint_url(self) -> str:
        return self._running().url

    @property
    def port(self) -> int:
        return self._running().port

    @property
    def region(self) -> str:
        return self.settings.region

    def environment(self) -> dict[str, str]:
        """Environment variables that point an AWS SDK or the AWS CLI to this server."""
        variables = {
            "AWS_ENDPOINT_URL_KINESIS": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
        }
        if self.certificate_path is not None:
            variables["AWS_CA_BUNDLE"] = str(self.certificate_path)
        return variables

    async def start(self) -> None:
        if self._server is not None:
            raise UsageError("this local Kinesis is already running")
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        if self._data is not None:
            try:
                self._journal = await asyncio.to_thread(Journal, self._data, salvage=self._salvage)
                await asyncio.to_thread(self._restore, self._journal)
            except OSError as error:
                raise ConfigurationError(f"cannot use {self._data} as data folder: {error.strerror}") from error
            self.state.journal = self._journal.append
        self._create_streams()
        tls = await asyncio.to_thread(self._prepare_tls) if self._tls else None
        admin = AdminHttpApp(self.faults, self.reset, lambda: self.endpoint_url, host=self._host)
        api = KinesisHttpApp(
            self.state,
            self.faults,
            self._streams,
            clock_ms=self._now_ms,
            journal=self._journal,
            after_call=self._schedule_settling,
        )

        def handle(request: Request) -> Answer | Awaitable[Answer]:
            return admin(request) if AdminHttpApp.serves(request.path) else api(request)

        server = HttpServer(handle, host=self._host, port=self._port, tls=tls, limits=_HTTP_LIMITS)
        await server.start()
        self._server = server
        self._schedule_settling()
        self._schedule_freeing()

    async def stop(self) -> None:
        """Ends subscriptions, finishes other responses and writes all changes to disk."""
        server, self._server = self._server, None
        journal, self._journal = self._journal, None
        try:
            if server is not None:
                await server.stop()
        finally:
            for timer in (self._settling, self._freeing):
                if timer is not None:
                    timer.cancel()
            self._settling = self._freeing = None
            self.state.journal = None
            if journal is not None:
                await journal.close()
            if self._certificate_folder is not None:
                folder, self._certificate_folder = self._certificate_folder, None
                self.certificate_path = self._key_path = None
                await asyncio.to_thread(folder.cleanup)

    async def reset(self) -> None:
        """Removes all faults and streams, and creates the streams of `create` again."""
        self.faults.clear()
        self.state.reset()
        self._create_streams()
        self._schedule_settling()
        if self._journal is not None:
            self._journal.replace(list(self.state.snapshot()))
            await self._journal.durable()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _now_ms(self) -> int:
        """Wall time that never goes backwards."""
        self._latest_ms = max(self._latest_ms, time.time_ns() // 1_000_000)
        return self._latest_ms

    def _running(self) -> HttpServer:
        if self._server is None:
            raise UsageError("the local Kinesis is not running: use it inside `async with`, or call start() first")
        return self._server

    def _restore(self, journal: Journal) -> None:
        try:
            unusable = self.state.restore(journal.entries(), salvage=self._salvage)
        except CodecError as error:
            raise ConfigurationError(f"{journal.path}: {error}. Nothing was changed. {REMEDY}") from error
        if unusable:
            kept = journal.keep_file()
            logger.warning("%s: %d entries could not be used; the file is kept as %s", journal.path, unusable, kept)
        self.state.account.free_expired(self._now_ms())
        journal.rewrite(self.state.snapshot())

    def _create_streams(self) -> None:
        for name, shard_count in self._create.items():
            try:
                self.state.call("CreateStream", {"StreamName": name, "ShardCount": shard_count}, now_ms=self._now_ms())
            except LocalError as error:
                if error.code != "ResourceInUseException":  # the data folder already has this stream
                    raise ConfigurationError(f"create: {name} with {shard_count} shards: {error.message}") from None

    def _prepare_tls(self) -> ssl.SSLContext:
        if self.certificate_path is None:
            self._certificate_folder = tempfile.TemporaryDirectory(prefix="anabranch-")
            now = dt.datetime.fromtimestamp(self._now_ms() / 1000, dt.UTC)
            self.certificate_path, self._key_path = write_self_signed_certificate(
                Path(self._certificate_folder.name), self._host, now
            )
        return load_certificate(self.certificate_path, self._key_path)

    def _schedule_settling(self) -> None:
        """Applies timed state changes (CREATING to ACTIVE) when they are due, so that idle subscribers see them."""
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        deadline_ms = self.state.next_deadline_ms()
        if deadline_ms is not None:
            seconds = max(0.001, (deadline_ms - self._now_ms()) / 1000)
            self._settling = asyncio.get_running_loop().call_later(seconds, self._settle)

    def _settle(self) -> None:
        self.state.settle(self._now_ms())
        self._schedule_settling()

    def _schedule_freeing(self) -> None:
        seconds = min(_FREE_EVERY_SECONDS, max(0.5, _FREE_EVERY_SECONDS * self.settings.time_scale))
        self._freeing = asyncio.get_running_loop().call_later(seconds, self._free_expired)

    def _free_expired(self) -> None:
        """Frees expired records in memory, and in the journal when they are more than half of it."""
        self.state.account.free_expired(self._now_ms())
        journal_bytes_max = 2 * self.state.account.size_bytes + _JOURNAL_BYTES_MIN
        if self._journal is not None and self._journal.failure is None and self._journal.size_bytes > journal_bytes_max:
            self._journal.replace(list(self.state.snapshot()))
        self._schedule_freeing()


def load_certificate(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """A TLS context for a server. `key` is optional if the certificate file contains it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except FileNotFoundError:
        missing = next(path for path in (certificate, key) if path is not None and not path.exists())
        raise ConfigurationError(f"no such file: {missing}") from None
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"cannot load certificate {certificate} with key {key or certificate}: {error}"
        ) from None
    return context


def write_self_signed_certificate(folder: Path, host: str, now: dt.datetime) -> tuple[Path, Path]:
    """Writes `certificate.pem` and `key.pem` into `folder` and returns their paths.

    The certificate names the loopback addresses, `localhost` and `host`. Clients trust it through its file
    (`AWS_CA_BUNDLE`, boto3's `verify=`).
    """
    try:
        from cryptography import x509  # noqa: PLC0415 -- an optional dependency
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415
    except ImportError:
        raise ConfigurationError(_CRYPTOGRAPHY_MISSING) from None

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "anabranch local Kinesis")])
    names: dict[x509.GeneralName, None] = {}
    for alternative in ("localhost", "127.0.0.1", "::1", host):
        try:
            names[x509.IPAddress(ipaddress.ip_address(alternative))] = None
        except ValueError:
            names[x509.DNSName(alternative)] = None
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + _CERTIFICATE_LIFETIME)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = folder / "certificate.pem", folder / "key.pem"
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with open(os.open(key_path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123 -- private from the start
        file.write(pem)
    return certificate_path, key_path
