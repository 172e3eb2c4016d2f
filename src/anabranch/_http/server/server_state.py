"""What the connections of one server share: the handler, the limits, the open connections, and whether it is stopping.

It owns every task that produces an answer, so that stopping can wait for all of them. It does not depend on the HTTP
version.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Protocol

from anabranch._http.server.exchange import Handler


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
        self._connections: dict[ServerConnection, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._date = (0, "")

    @property
    def full(self) -> bool:
        return len(self._connections) >= self.limits.connections_max

    @property
    def connections(self) -> list[ServerConnection]:
        return list(self._connections)

    def add(self, connection: ServerConnection) -> None:
        self._connections[connection] = None
        self._none_left.clear()

    def remove(self, connection: ServerConnection) -> None:
        self._connections.pop(connection, None)
        if not self._connections:
            self._none_left.set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def date(self, now: float) -> str:
        """The value of the date header, formatted once a second. `now` is wall time."""
        second = int(now)
        if self._date[0] != second:
            self._date = (second, formatdate(second, usegmt=True))
        return self._date[1]

    async def drain(self, grace: float) -> None:
        """Lets answers in progress finish within `grace` seconds, then aborts the rest and waits for all tasks."""
        self.stopping = True
        for connection in self.connections:
            connection.drain()
        try:
            async with asyncio.timeout(grace):
                await self._none_left.wait()
        except TimeoutError:
            for connection in self.connections:
                connection.abort()
            await self._none_left.wait()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
