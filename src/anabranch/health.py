"""Health of consumers and producers over HTTP: an ASGI application, and a small server of our own (rule O2).

| path | |
|---|---|
| `/live` | 503 only if a restart helps: a blocked event loop, or heartbeats that have ended |
| `/ready` | 503 if it does not work now, with the reasons: store or Kinesis unreachable, shards stopped |
| `/metrics` | for Prometheus |
| `/status.json` | everything that `status()` says |

The server runs in a thread of its own, so that it answers while the event loop is busy. `/live` never waits for that
loop. The other pages read its state, each in a thread, and give up after a second.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from anabranch._http.server.exchange import Request, Response
from anabranch._http.server.http_server import HttpServer
from anabranch.errors import ConfigurationError
from anabranch.metrics.catalogue import Level
from anabranch.metrics.prometheus import Prometheus, text_of_all
from anabranch.metrics.sources import Exporters, Source
from anabranch.reports import ConsumerStatus, HealthReport

__all__ = ["HealthApp"]

PATHS: Final = ("/live", "/ready", "/metrics", "/status.json")
_TEXT: Final = "text/plain; charset=utf-8"
STOP_SECONDS: Final = 2.0


@runtime_checkable
class Checked(Protocol):
    """A `Consumer`, `Producer` or `SyncProducer`."""

    exporters: Exporters

    @property
    def restart_reason(self) -> str | None:
        """Why this process should be restarted (rule O2); None if it should not. Known without its event loop."""

    def health(self) -> HealthReport: ...

    def status(self) -> Any: ...


class HealthApp:
    """An ASGI application for consumers and producers: mount it in FastAPI, Starlette or Django."""

    def __init__(self, *checked: Any) -> None:
        if not checked:
            raise ConfigurationError("HealthApp() needs a consumer or a producer, such as HealthApp(consumer)")
        for one in checked:
            if isinstance(one, type) or not isinstance(one, Checked):
                raise ConfigurationError(f"HealthApp got {one!r}; it must be a Consumer, Producer or SyncProducer")
        self._checked: tuple[Checked, ...] = checked

    def answer(self, path: str) -> Response:
        """Answers one of `PATHS`, from any thread. All but `/live` wait a moment if an event loop is busy elsewhere."""
        match path:
            case "/live":
                reasons = [reason for one in self._checked if (reason := one.restart_reason) is not None]
                return _verdict("live", reasons)
            case "/ready":
                return self._ready()
            case "/metrics":
                return self._metrics()
        return json_page([self._status(one) for one in self._checked])

    async def respond(self, method: str, path: str) -> Response:
        """On any event loop, without blocking it."""
        if (refusal := refusal_of(method, path)) is not None:
            return refusal
        return self.answer(path) if path == "/live" else await asyncio.to_thread(self.answer, path)

    def _ready(self) -> Response:
        unready = [report for one in self._checked if not (report := one.health()).ready]
        return _verdict("ready", [reason for report in unready for reason in report.reasons])

    @staticmethod
    def _status(one: Checked) -> dict[str, Any]:
        try:
            status = one.status()
        except TimeoutError:
            status = None  # the health says why
        kind, name = type(one).__name__, one.exporters.source.name
        found = {"kind": kind, "name": name, "health": one.health(), "status": status}
        return found | {"lag": status.lag} if isinstance(status, ConsumerStatus) else found

    def _metrics(self) -> Response:
        sources: dict[Source, Level] = {}
        registries: dict[Any, None] = {}  # those of exporters have the program's own metrics, too
        for checked in self._checked:
            found = {one.registry: None for one in checked.exporters.exporters if isinstance(one, Prometheus)}
            registries |= found
            if not found:
                sources[checked.exporters.source] = "detailed"
        return metrics_page(lambda: text_of_all(sources, registries))

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})
            return
        if scope["type"] != "http":
            raise ConfigurationError(f"HealthApp answers HTTP only, not {scope['type']}")
        path = str(scope["path"]).removeprefix(scope.get("root_path") or "") or "/"
        answer = await self.respond(scope["method"], path)
        headers = [(name.encode(), value.encode()) for name, value in answer.headers]
        headers.append((b"content-length", b"%d" % len(answer.body)))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})


def refusal_of(method: str, path: str) -> Response | None:
    if method not in {"GET", "HEAD"}:
        return _page(405, _TEXT, b"use GET\n")
    if path not in PATHS:
        return _page(404, _TEXT, f"there is no {path}; there are {', '.join(PATHS)}\n".encode())
    return None


def json_page(document: Any, status: int = 200) -> Response:
    return _page(status, "application/json", msgspec.json.encode(document))


def metrics_page(text: Callable[[], bytes]) -> Response:
    try:
        from prometheus_client import CONTENT_TYPE_LATEST  # noqa: PLC0415 -- an optional dependency
    except ImportError:
        return _page(501, _TEXT, b"/metrics needs a library: pip install 'anabranch[prometheus]'\n")
    return _page(200, CONTENT_TYPE_LATEST, text())


def _verdict(what: str, reasons: list[str]) -> Response:
    return json_page({what: not reasons, "reasons": reasons}, 503 if reasons else 200)


def _page(status: int, content_type: str, body: bytes) -> Response:
    return Response(status, body, [("content-type", content_type)])


class HealthServer:
    """Serves a `HealthApp` from a thread of its own."""

    def __init__(self, app: HealthApp, *, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._started: Future[str] = Future()
        self._stop: Callable[[], object] = lambda: None
        self._ended: Future[None] = Future()

    async def start(self) -> str:
        """Returns its URL. Raises if it cannot listen there."""
        threading.Thread(target=self._run, name="anabranch-health", daemon=True).start()
        return await asyncio.wrap_future(self._started)

    async def stop(self) -> None:
        with suppress(RuntimeError):  # its loop has ended
            self._stop()
        await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=STOP_SECONDS)

    def _run(self) -> None:
        """The thread."""
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 -- raised where the start is awaited
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._ended.set_result(None)

    async def _serve(self) -> None:
        over = asyncio.Event()
        self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)
        server = HttpServer(self._handle, host=self._host, port=self._port)
        await server.start()
        self._started.set_result(server.url)
        await over.wait()
        await server.stop(grace=0.5)

    async def _handle(self, request: Request) -> Response:
        return await self._app.respond(request.method, request.path)
