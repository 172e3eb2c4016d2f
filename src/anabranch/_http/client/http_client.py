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
from typing import Final, TypeVar, cast

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
        self._idle: list[ClientConnection] = []
        self._busy: dict[ClientConnection, None] = {}
        self._open = 0  # idle, busy and connecting
        self._waiters: deque[asyncio.Future[ClientConnection | None]] = deque()
        """Each gets a connection, or None: permission to open one."""
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self) -> ClientConnection | None:
        """An idle connection, or None. The usual case, so it needs no await."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.usable:
                self._busy[connection] = None
                if self._sweep is None:
                    self._watch(_SWEEP_SECONDS)
                return connection
            self._open -= 1
        return None

    async def acquire(self, deadline: float) -> ClientConnection:
        """An idle connection or a new one; waits if the pool is full. Cancelling also cancels the connecting."""
        if self._closed:
            raise UsageError("this client is closed")
        if (kept := self.take()) is not None:
            return kept
        if self._open >= self._connections_max:
            if (handed := await self._wait(deadline)) is not None:
                return handed
        else:
            self._open += 1
        try:
            connection = await self._dialer.dial(self._new_connection, deadline)
        except BaseException:
            self._free_room()
            raise
        self._admit(connection)
        return connection

    def release(self, connection: ClientConnection) -> None:
        """Gives the connection to the caller that has waited longest, or keeps it."""
        self._busy.pop(connection, None)
        if not connection.release() or self._closed:
            connection.abort()
            self._free_room()
            return
        self._keep(connection)

    def discard(self, connection: ClientConnection) -> None:
        self._busy.pop(connection, None)
        connection.abort()
        connection.release()  # returns a borrowed buffer
        self._free_room()

    def drop_idle(self) -> None:
        """Called when the server has closed one idle connection: it has most likely closed the others too."""
        while self._idle:
            self._idle.pop().abort()
            self._open -= 1

    async def close(self) -> None:
        """Fails calls in progress with a TransportError, and returns when all connections are closed."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        connections = [*self._idle, *self._busy]
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(TransportError("the client was closed", maybe_sent=False))
        self._waiters.clear()
        for connection in connections:
            connection.fail(TransportError("the client was closed in the middle of a call"))
        self._open -= len(self._idle)
        self._idle.clear()
        for connection in connections:
            await connection.wait_closed()

    def _new_connection(self, negotiated: str | None) -> ClientConnection:  # noqa: ARG002 -- this pool uses HTTP/1.1 only
        peer = self._dialer.endpoint.url
        return ClientConnection(self._loop, peer, self._timeouts, self._buffers)

    def _admit(self, connection: ClientConnection) -> None:
        self._busy[connection] = None
        if self._closed:
            self.discard(connection)
            raise TransportError("the client was closed", maybe_sent=False)
        self._watch(_SWEEP_SECONDS)

    async def _wait(self, deadline: float) -> ClientConnection | None:
        waiter: asyncio.Future[ClientConnection | None] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                try:
                    return await waiter
                except asyncio.CancelledError:
                    if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                        self._return_turn(waiter.result())  # the turn came while we were cancelled
                    raise
        except TimeoutError:
            where = self._dialer.endpoint.url
            busy = f"all {self._connections_max} connections to {where} were busy until the deadline of the call"
            raise TransportError(busy, maybe_sent=False) from None

    def _return_turn(self, handed: ClientConnection | None) -> None:
        if handed is None:
            self._free_room()
        else:
            del self._busy[handed]
            self._keep(handed)

    def _keep(self, connection: ClientConnection) -> None:
        if self._give(connection):
            self._busy[connection] = None
        else:
            self._idle.append(connection)

    def _free_room(self) -> None:
        if not self._give(None):
            self._open -= 1

    def _give(self, offer: ClientConnection | None) -> bool:
        """Gives `offer` to the caller that has waited longest; false if no caller waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(offer)
                return True
        return False

    # The sweep

    def _watch(self, delay: float) -> None:
        """Schedules a sweep after `delay`, unless one is due earlier."""
        if self._sweep is not None:
            if self._sweep.when() <= self._loop.time() + delay:
                return
            self._sweep.cancel()
        self._sweep = self._loop.call_later(delay, self._check)

    def _check(self) -> None:
        self._sweep = None
        now = self._loop.time()
        for connection in list(self._busy):
            connection.check(now)
        kept_since = now - self._timeouts.idle
        while self._idle and (self._idle[0].idle_since < kept_since or not self._idle[0].usable):
            self._idle.pop(0).abort()
            self._open -= 1
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
        connection = pool.take()
        if not repeatable:
            while connection is not None and connection.has_input():
                pool.discard(connection)
                connection = pool.take()
        if connection is None:
            connection = await pool.acquire(deadline)
        try:
            if len(pieces) == 1:
                response = await connection.start(head + pieces[0], deadline, has_room)
            else:
                response = await connection.exchange(head, pieces, deadline, has_room=has_room)
        except TransportError:
            pool.discard(connection)
            if not (repeatable and connection.dropped_before_answer):
                raise
            pool.drop_idle()
            connection = await pool.acquire(deadline)
            try:
                response = await connection.exchange(head, pieces, deadline, has_room=has_room)
            except BaseException:
                pool.discard(connection)
                raise
        except BaseException:
            pool.discard(connection)
            raise
        try:
            return read(cast("ClientResponse", response))
        finally:
            pool.release(connection)

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()
