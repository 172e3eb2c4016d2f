"""An HTTP client for one endpoint: whole responses over HTTP/1.1 connections, with one connection pool per purpose.

Reads do not delay writes, and neither delays lease updates. A call is sent once. It is sent again only if it is safe to
repeat and a kept connection was closed before the first byte of the response arrived. A call that is not safe to repeat
uses a connection that the kernel still reports as open.

A pool hands out the connection that was used last, so that the others become idle and are closed. If all connections
are busy, callers wait in line. Calls in progress need no timers: one sweep checks their deadlines ten times a second.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from anabranch._http.client.connection import ClientConnection, ClientResponse, HasRoom, ReceiveBuffers
from anabranch._http.client.dialer import Dialer
from anabranch._http.client.limits import KEPT_BUFFER_BYTES_MAX, ClientTimeouts
from anabranch.errors import TransportError, UsageError

T = TypeVar("T")

_SWEEP_SECONDS: Final = 0.1
_IDLE_SWEEP_SECONDS: Final = 1.0


class ConnectionPool:
    def __init__(
        self, dialer: Dialer, *, connections_max: int, timeouts: ClientTimeouts, buffers: ReceiveBuffers
    ) -> None:
        self._dialer = dialer
        self._connections_max = connections_max
        self._timeouts = timeouts
        self._buffers = buffers
        self._loop = asyncio.get_running_loop()
        self._free_turns = connections_max
        """Each call holds a turn while it has a connection. A connection is only opened if none is idle, so there are
        never more connections than turns. An asyncio.Semaphore would make an idle poll 3 % more expensive.
        """
        self._waiters: deque[asyncio.Future[None]] = deque()
        """Callers that wait for a turn."""
        self._idle: list[ClientConnection] = []
        self._busy: dict[ClientConnection, None] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def acquire(self, deadline: float, *, surely_open: bool = False) -> ClientConnection:
        """The idle connection that was used last, or a new one; waits if all are busy. Cancelling also cancels the
        connecting. `surely_open`: not one that the server has closed, even if the event loop does not know of it yet.
        """
        if self._closed:
            raise UsageError("this client is closed")
        if self._free_turns:
            self._free_turns -= 1
        else:
            await self._wait(deadline)
        try:
            connection = self._take_idle(surely_open=surely_open) or await self._dial(deadline)
        except BaseException:
            self._pass_turn_on()
            raise
        self._busy[connection] = None
        self._watch(_SWEEP_SECONDS)
        return connection

    async def replace(self, dropped: ClientConnection, deadline: float) -> ClientConnection:
        """A new connection for a caller whose idle one was closed by the server."""
        self._drop_idle()  # the server has most likely closed the others too
        connection = await self._dial(deadline)
        del self._busy[dropped]
        self._busy[connection] = None
        return connection

    def release(self, connection: ClientConnection) -> None:
        """Keeps the connection if it can be used again."""
        del self._busy[connection]
        if connection.release():
            self._idle.append(connection)
        self._pass_turn_on()

    async def close(self) -> None:
        """Fails calls in progress with a TransportError, and returns when all connections are closed."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        connections = [*self._idle, *self._busy]
        for connection in connections:
            connection.fail(TransportError("the client was closed in the middle of a call"))
        self._idle.clear()
        for connection in connections:
            await connection.wait_closed()

    async def _wait(self, deadline: float) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():
                self._pass_turn_on()
            if not isinstance(error, TimeoutError):
                raise
            where = self._dialer.endpoint.url
            busy = f"all {self._connections_max} connections to {where} were busy until the deadline of the call"
            raise TransportError(busy, maybe_sent=False) from None
        if self._closed:
            self._pass_turn_on()
            raise TransportError("the client was closed", maybe_sent=False)

    def _pass_turn_on(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free_turns += 1

    def _take_idle(self, *, surely_open: bool) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                if not (surely_open and connection.has_input()):
                    return connection
                connection.abort()
        return None

    async def _dial(self, deadline: float) -> ClientConnection:
        connection = await self._dialer.dial(self._new_connection, deadline)
        if self._closed:
            connection.abort()
            raise TransportError("the client was closed", maybe_sent=False)
        return connection

    def _new_connection(self, negotiated: str | None) -> ClientConnection:  # noqa: ARG002 -- this pool uses HTTP/1.1 only
        peer = self._dialer.endpoint.url
        return ClientConnection(self._loop, peer, self._timeouts, self._buffers)

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    # The sweep

    def _watch(self, delay: float) -> None:
        if self._sweep is None:
            self._sweep = self._loop.call_later(delay, self._check)

    def _check(self) -> None:
        self._sweep = None
        now = self._loop.time()
        for connection in list(self._busy):
            connection.check(now)
        kept_since = now - self._timeouts.idle
        while self._idle and (self._idle[0].idle_since < kept_since or not self._idle[0].usable):
            self._idle.pop(0).abort()
        if self._busy:
            self._watch(_SWEEP_SECONDS)
        elif self._idle:
            self._watch(_IDLE_SWEEP_SECONDS)


class HttpClient:
    def __init__(self, dialer: Dialer, *, purposes: Mapping[str, int], timeouts: ClientTimeouts | None = None) -> None:
        """`purposes` maps the name of each pool to its maximum number of connections."""
        self._loop = asyncio.get_running_loop()
        self._timeouts = timeouts or ClientTimeouts()
        self._start = dialer.request_start
        self._buffers = ReceiveBuffers(KEPT_BUFFER_BYTES_MAX)
        self._pools = {
            purpose: ConnectionPool(
                dialer, connections_max=connections_max, timeouts=self._timeouts, buffers=self._buffers
            )
            for purpose, connections_max in purposes.items()
        }

    async def post(
        self,
        purpose: str,
        headers: bytes,
        pieces: Sequence[bytes],
        read: Callable[[ClientResponse], T],
        *,
        repeatable: bool,
        has_room: HasRoom | None = None,
    ) -> T:
        """Returns `read(response)`; `read` must copy what it keeps. `headers` are all lines after the request line."""
        pool = self._pools[purpose]
        deadline = self._loop.time() + self._timeouts.total
        head = self._start + headers
        connection = await pool.acquire(deadline, surely_open=not repeatable)
        try:
            try:
                response = await connection.exchange(head, pieces, deadline, has_room=has_room)
            except TransportError:
                if not (repeatable and connection.dropped_before_answer):
                    raise
                connection = await pool.replace(connection, deadline)
                response = await connection.exchange(head, pieces, deadline, has_room=has_room)
            return read(response)
        finally:
            pool.release(connection)

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()
