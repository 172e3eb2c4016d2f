"""`LocalKinesis`: the local server as one object to start, use and stop.

async with LocalKinesis(create={"orders": 4}) as kinesis:
    client = boto3.client("kinesis", endpoint_url=kinesis.endpoint_url, region_name=kinesis.region, ...)
"""

import asyncio
import datetime as dt
import os
import random
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec

from anabranch._http.server.exchange import Answer, Request, Response
from anabranch._http.server.http_server import HttpServer
from anabranch._version import __version__
from anabranch.errors import ConfigurationError, UsageError
from anabranch.local.certificate import load_certificate, write_self_signed_certificate
from anabranch.local.errors import LocalError
from anabranch.local.faults import Fault, Faults
from anabranch.local.http import EventStreams, KinesisHttpApp
from anabranch.local.journal import Journal
from anabranch.local.service import LocalState
from anabranch.local.settings import LocalSettings

_RULES: Final = msgspec.json.Decoder(Fault | list[Fault])
_ENCODER: Final = msgspec.json.Encoder()
_JSON: Final = [("content-type", "application/json")]


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
        seed: int | None = None,
    ) -> None:
        if key is not None and certificate is None:
            raise ConfigurationError("key: a key needs its certificate: pass the certificate too")
        self.settings = LocalSettings(
            region=region,
            account_id=account_id,
            limits=limits,
            state_delay_ms=round(state_delay * 1000),
            time_scale=time_scale,
        )
        self._clock = _Clock()
        self._streams = EventStreams(self._clock.now_ms)
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
        self._journal: Journal | None = None
        self._server: HttpServer | None = None
        self._certificate_folder: tempfile.TemporaryDirectory[str] | None = None
        self._settling: asyncio.TimerHandle | None = None

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
            self._journal = await asyncio.to_thread(Journal, self._data)
            await asyncio.to_thread(self._restore, self._journal)
            self.state.journal = self._journal.append
        self._create_streams()
        tls = await asyncio.to_thread(self._prepare_tls) if self._tls else None
        admin = AdminHttpApp(self.faults, self.reset, lambda: self.endpoint_url)
        api = KinesisHttpApp(
            self.state,
            self.faults,
            self._streams,
            clock_ms=self._clock.now_ms,
            durability=self._journal,
            after_call=self._schedule_settling,
        )

        def handle(request: Request) -> Answer | Awaitable[Answer]:
            return admin(request) if AdminHttpApp.serves(request.path) else api(request)

        server = HttpServer(handle, host=self._host, port=self._port, tls=tls)
        await server.start()
        self._server = server
        self._schedule_settling()

    async def stop(self) -> None:
        """Ends subscriptions, finishes other responses and writes all changes to disk."""
        server, self._server = self._server, None
        journal, self._journal = self._journal, None
        try:
            if server is not None:
                await server.stop()
        finally:
            if self._settling is not None:
                self._settling.cancel()
                self._settling = None
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
        if self._journal is not None:
            self._journal.replace(list(self.state.snapshot()))
        self._create_streams()
        self._schedule_settling()
        if self._journal is not None:
            await self._journal.durable()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _running(self) -> HttpServer:
        if self._server is None:
            raise UsageError("the local Kinesis is not running: use it inside `async with`, or call start() first")
        return self._server

    def _restore(self, journal: Journal) -> None:
        self.state.restore(journal.entries())
        journal.rewrite(self.state.snapshot())

    def _create_streams(self) -> None:
        for name, shard_count in self._create.items():
            try:
                self.state.call(
                    "CreateStream", {"StreamName": name, "ShardCount": shard_count}, now_ms=self._clock.now_ms()
                )
            except LocalError as error:
                if error.code != "ResourceInUseException":  # the data folder already has this stream
                    raise ConfigurationError(f"create: {name} with {shard_count} shards: {error.message}") from None

    def _prepare_tls(self) -> ssl.SSLContext:
        if self.certificate_path is None:
            self._certificate_folder = tempfile.TemporaryDirectory(prefix="anabranch-")
            now = dt.datetime.fromtimestamp(self._clock.now_ms() / 1000, dt.UTC)
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
            seconds = max(0.001, (deadline_ms - self._clock.now_ms()) / 1000)
            self._settling = asyncio.get_running_loop().call_later(seconds, self._settle)

    def _settle(self) -> None:
        self.state.settle(self._clock.now_ms())
        self._schedule_settling()


class _Clock:
    """Wall time that never goes backwards."""

    def __init__(self) -> None:
        self._latest_ms = 0

    def now_ms(self) -> int:
        self._latest_ms = max(self._latest_ms, time.time_ns() // 1_000_000)
        return self._latest_ms


class AdminHttpApp:
    """`/health`, and the admin endpoint for faults and resets:

        GET    /health          {"status": "ok", ...} as soon as the server answers
        GET    /_local/faults   the rules, and how often each has matched and struck
        POST   /_local/faults   adds one rule or a list: `{"operation": "PutRecords", "fault": "throttle", "times": 1}`
        DELETE /_local/faults   removes every rule
        POST   /_local/reset    removes every rule and stream, and creates the streams of `create` again

    Requests are not authenticated, so the server listens on loopback by default.
    """

    def __init__(self, faults: Faults, reset: Callable[[], Awaitable[None]], endpoint: Callable[[], str]) -> None:
        self._faults = faults
        self._reset = reset
        self._endpoint = endpoint

    @staticmethod
    def serves(path: str) -> bool:
        return path == "/health" or path.startswith("/_local/")

    def __call__(self, request: Request) -> Response | Awaitable[Response]:
        if request.path == "/health":
            return self._health(request)
        if request.path == "/_local/faults":
            return self._change_faults(request)
        if request.path == "/_local/reset":
            return self._reset_server() if request.method == "POST" else _refuse(405, "use POST to reset the server")
        return _refuse(404, f"unknown path {request.path}; the admin endpoint has /_local/faults and /_local/reset")

    def _health(self, request: Request) -> Response:
        if request.method not in {"GET", "HEAD"}:
            return _refuse(405, "use GET")
        return _answer({"status": "ok", "server": "anabranch", "version": __version__, "endpoint": self._endpoint()})

    def _change_faults(self, request: Request) -> Response:
        if request.method == "POST":
            try:
                rules = _RULES.decode(request.body)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return _refuse(400, f"not a fault rule or a list of them: {error}")
            for rule in rules if isinstance(rules, list) else [rules]:
                self._faults.add(rule)
        elif request.method == "DELETE":
            self._faults.clear()
        elif request.method != "GET":
            return _refuse(405, "use GET to list faults, POST to add, DELETE to remove all")
        return _answer({"faults": self._faults.rules})

    async def _reset_server(self) -> Response:
        await self._reset()
        return _answer({"status": "reset"})


def _answer(value: dict[str, Any]) -> Response:
    return Response(200, _ENCODER.encode(value) + b"\n", list(_JSON))


def _refuse(status: int, message: str) -> Response:
    return Response(status, _ENCODER.encode({"error": message}) + b"\n", list(_JSON))
