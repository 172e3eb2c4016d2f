"""An HTTP client for one endpoint: whole answers over kept HTTP/1.1 connections, one pool for each purpose.

Purposes never starve each other: reads that wait for nothing must not hold up the writes, nor either of them the
leases. A call is sent once. It is sent a second time only where a kept connection turned out to be closed before a
byte of an answer came, and only if repeating the call is harmless; a call that is not is sent over a connection that
the kernel still knows to be open.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from anabranch._http.client_connection import ClientConnection, Response
from anabranch._http.client_limits import ClientLimits, ClientTimeouts
from anabranch._http.dialer import Dialer
from anabranch._http.pool import ConnectionPool
from anabranch._http.receive_buffers import ReceiveBuffers
from anabranch.errors import TransportError

__all__ = ["HttpClient"]

T = TypeVar("T")


class HttpClient:
    def __init__(
        self,
        dialer: Dialer,
        *,
        purposes: Mapping[str, int],
        timeouts: ClientTimeouts | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        """`purposes` names the pools, each with the most connections it may have."""
        limits = limits or ClientLimits()
        self._loop = asyncio.get_running_loop()
        self._timeouts = timeouts or ClientTimeouts()
        self._start = dialer.request_start
        self._buffers = ReceiveBuffers(limits.kept_buffer_bytes_max)
        self._pools = {
            purpose: ConnectionPool(
                dialer, connections_max=connections_max, limits=limits, timeouts=self._timeouts, buffers=self._buffers
            )
            for purpose, connections_max in purposes.items()
        }

    async def post(
        self,
        purpose: str,
        headers: bytes,
        pieces: Sequence[bytes],
        read: Callable[[Response], T],
        *,
        repeatable: bool,
    ) -> T:
        """What `read` makes of the answer; it copies what it keeps. `headers` are all lines after the first."""
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
                response = cast("Response", await connection.start(head + pieces[0], deadline))
            else:
                response = await connection.exchange(head, pieces, deadline)
        except TransportError:
            pool.discard(connection)
            if not (repeatable and connection.dropped_before_answer):
                raise
            pool.drop_idle()
            connection, response = await self._post_afresh(pool, head, pieces, deadline)
        except BaseException:
            pool.discard(connection)
            raise
        try:
            return read(response)
        finally:
            pool.release(connection)

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()

    async def _post_afresh(
        self, pool: ConnectionPool, head: bytes, pieces: Sequence[bytes], deadline: float
    ) -> tuple[ClientConnection, Response]:
        connection = await pool.acquire(deadline)
        try:
            return connection, await connection.exchange(head, pieces, deadline)
        except BaseException:
            pool.discard(connection)
            raise
