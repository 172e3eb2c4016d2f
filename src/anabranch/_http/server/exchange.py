"""Requests and answers, independent of the HTTP version, and what the connections of a server share.

A handler takes a `Request` and returns an answer or an awaitable of one. An answer is a complete `Response`, a
`StreamingResponse`, or an `Abandon`: no answer, as if the server had crashed. An `Exchange` passes it to the
connection's `AnswerSink`. Awaitables and streams run in a task, which is cancelled when the client disconnects.
`ServerState` owns these tasks, so that a stop can wait for them.
"""

import asyncio
import enum
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from typing import Any, Protocol

logger = logging.getLogger("anabranch.http")

Headers = list[tuple[str, str]]


@dataclass(slots=True)
class Request:
    method: str
    path: str
    """Without the query."""
    headers: dict[str, str]
    """Names in lower case. The values of a repeated name are joined with commas."""
    body: bytes | bytearray
    http_version: str
    """`1.0`, `1.1` or `2`."""


@dataclass(slots=True)
class Response:
    status: int
    body: bytes = b""
    headers: Headers = field(default_factory=list)
    """Without content-length, date and connection: the connection adds them."""


@dataclass(slots=True)
class StreamingResponse:
    status: int
    chunks: AsyncGenerator[bytes, None]
    """Closed when the client disconnects, so its `finally` is where a subscription ends."""
    headers: Headers = field(default_factory=list)


class Abandon(enum.Enum):
    """No answer at all."""

    HANG_UP = "hang_up"
    """The connection is reset."""
    SILENCE = "silence"
    """The connection stays open and nothing is ever sent."""


class HangUp(Exception):  # noqa: N818 -- an instruction, not an error
    """Raised by the chunks of a streaming answer to reset the connection on purpose."""


Answer = Response | StreamingResponse | Abandon
Handler = Callable[[Request], Answer | Awaitable[Answer]]


class AnswerSink(Protocol):
    """Sends the bytes of one answer."""

    def send(self, response: Response, /) -> None: ...
    def start(self, response: StreamingResponse, /) -> None: ...
    async def write(self, chunk: bytes, /) -> None: ...
    def finish(self) -> None: ...
    def abandon(self, how: Abandon, /) -> None: ...


class Exchange:
    """Runs the handler for one request and passes its answer to the sink."""

    def __init__(self, state: "ServerState", sink: AnswerSink) -> None:
        self._state = state
        self._sink = sink
        self._task: asyncio.Task[None] | None = None
        self.streaming = False

    def begin(self, request: Request) -> None:
        try:
            outcome = self._state.handler(request)
        except Exception as error:  # noqa: BLE001 -- a failing handler must not end the connection
            outcome = _defect(request, error)
        if isinstance(outcome, Response | Abandon):
            self._finish(outcome)
        else:
            self._task = self._state.spawn(self._perform(request, outcome))

    def cancel(self) -> None:
        """The client disconnected, or the server stops."""
        if self._task is not None:
            self._task.cancel()

    async def _perform(self, request: Request, outcome: StreamingResponse | Awaitable[Answer]) -> None:
        try:
            answer = outcome if isinstance(outcome, StreamingResponse) else await outcome
        except Exception as error:  # noqa: BLE001 -- as in begin
            answer = _defect(request, error)
        if isinstance(answer, StreamingResponse):
            await self._stream(request, answer)
        else:
            self._finish(answer)

    def _finish(self, answer: Response | Abandon) -> None:
        if isinstance(answer, Response):
            self._sink.send(answer)
        else:
            self._sink.abandon(answer)

    async def _stream(self, request: Request, answer: StreamingResponse) -> None:
        if request.method == "HEAD":
            await answer.chunks.aclose()
            self._sink.send(Response(answer.status, b"", answer.headers))
            return
        self.streaming = True
        self._sink.start(answer)
        try:
            async with aclosing(answer.chunks) as chunks:
                async for chunk in chunks:
                    if chunk:
                        await self._sink.write(chunk)
                    await asyncio.sleep(0)  # a source that never waits must not starve other clients
        except Exception as error:  # as in begin. The head has been sent, so only a reset can tell the client
            if not isinstance(error, HangUp):
                logger.exception("the answer to %s %s failed in the middle", request.method, request.path)
            self._sink.abandon(Abandon.HANG_UP)
        else:
            self._sink.finish()


def _defect(request: Request, error: Exception) -> Response:
    logger.error("the handler of %s %s failed", request.method, request.path, exc_info=error)
    return Response(500, b"Internal Server Error\n", [("content-type", "text/plain")])


@lru_cache(1)
def date_header(second: int) -> str:
    """`second` is wall time."""
    return formatdate(second, usegmt=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one client may cost the server. These limits protect other clients; they are not AWS's quotas."""

    connections_max: int = 2_000
    head_bytes_max: int = 64 << 10
    """Request line and headers together."""
    body_bytes_max: int = 24 << 20
    """A PutRecords request of 10 MiB has 14 MiB in base64, and some encoders escape part of it."""
    streams_max: int = 256
    """Concurrent requests on one HTTP/2 connection."""
    head_timeout: float = 10.0
    """From a request's first byte to its last header; for a new TLS connection, to the end of the handshake."""
    body_timeout: float = 60.0
    idle_timeout: float = 300.0
    """Between requests on a connection."""
    write_timeout: float = 330.0
    """How long a client may leave an answer unread; longer than the five minutes of a paused subscription."""
    check_interval: float = 1.0
    """How often connections are checked for these timeouts."""


class ServerConnection(Protocol):
    def check(self, now: float, /) -> None:
        """Disconnects a client that has exceeded a timeout."""

    def drain(self) -> None:
        """Ends streams now, finishes answers in progress, accepts nothing new, then closes."""

    def abort(self) -> None: ...


class ServerState:
    def __init__(self, handler: Handler, limits: ServerLimits) -> None:
        self.handler = handler
        self.limits = limits
        self.stopping = False
        self.connections: dict[ServerConnection, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def add(self, connection: ServerConnection) -> None:
        self.connections[connection] = None
        self._none_left.clear()

    def remove(self, connection: ServerConnection) -> None:
        self.connections.pop(connection, None)
        if not self.connections:
            self._none_left.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, grace: float) -> None:
        """Lets answers in progress finish within `grace` seconds, then aborts the rest and waits for all tasks."""
        self.stopping = True
        for connection in list(self.connections):
            connection.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._none_left.wait()
        for connection in list(self.connections):
            connection.abort()
        await self._none_left.wait()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
