"""One request and its answer, independent of the HTTP version.

A handler takes a `Request` and returns an answer or an awaitable of one: most answers need no task, so none is made
for them. An answer is a complete `Response`, a `StreamingResponse`, or an `Abandon` (no answer, as if the server had
gone away). The connection provides an `AnswerSink` and does the framing. An `Exchange` owns the task that produces its
answer, and cancels it when the client disconnects.
"""

import asyncio
import enum
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

logger = logging.getLogger("anabranch.http")

Headers = list[tuple[str, str]]


@dataclass(slots=True)
class Request:
    method: str
    target: str
    """Path and query as the client sent them."""
    headers: dict[str, str]
    """Names in lower case. The values of a repeated name are joined with commas."""
    body: bytes | bytearray
    http_version: str
    """`1.0`, `1.1` or `2`."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]


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

    HANG_UP = "hang up"
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

    def __init__(
        self, handler: Handler, sink: AnswerSink, spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    ) -> None:
        self._handler = handler
        self._sink = sink
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None
        self.streaming = False

    def begin(self, request: Request) -> None:
        try:
            outcome = self._handler(request)
        except Exception as error:  # noqa: BLE001 -- a failing handler must not end the connection
            outcome = _defect(request, error)
        if isinstance(outcome, Response | Abandon):
            self._finish(outcome)
        else:
            self._task = self._spawn(self._perform(request, outcome))

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
        except HangUp:
            self._sink.abandon(Abandon.HANG_UP)
            return
        except Exception:  # as in begin. The head has been sent, so only a reset can tell the client
            logger.exception("the answer to %s %s failed in the middle", request.method, request.path)
            self._sink.abandon(Abandon.HANG_UP)
            return
        self._sink.finish()


def _defect(request: Request, error: Exception) -> Response:
    logger.error("the handler of %s %s failed", request.method, request.path, exc_info=error)
    return Response(500, b"Internal Server Error\n", [("content-type", "text/plain")])
