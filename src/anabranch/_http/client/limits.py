"""Sizes, counts and timeouts that bound what a server can cost a client.

They protect the process from broken or hostile responses: nothing is allocated, kept or awaited beyond them. They
are above anything that the service does.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

HEAD_BYTES_MAX: Final = 64 << 10
"""Status line and headers together."""
BODY_BYTES_MAX: Final = 64 << 20
"""GetRecords returns up to 10 MiB of data: 14 MiB in base64, plus up to 10,000 partition keys."""
INTERIM_ANSWERS_MAX: Final = 8
"""1xx responses before the final one."""
KEPT_BUFFER_BYTES_MAX: Final = 32 << 20
"""Large receive buffers that a client keeps for reuse."""
WINDOW_BYTES: Final = 64 << 10
"""What a server may send on a stream before its reader asks for more (rule B3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeouts:
    connect: float = 5.0
    """For name lookup, TCP, proxy and TLS together."""
    read: float = 15.0
    """The longest silence inside a complete response."""
    message: float = 40.0
    """The longest wait for a complete message in a stream; a subscription sends one every five seconds. Longer than the
    reader's own limit, so that the reader decides (rule F7).
    """
    total: float = 30.0
    """From the call to the last byte of its response, including the wait for a free connection."""
    idle: float = 20.0
    """How long an idle connection is kept: shorter than servers and load balancers usually do."""


class ReadTimeout:
    """Bounds how long the reader of a stream waits for a complete message.

    Only time spent waiting counts: a reader that is busy elsewhere delays itself, not the server. There is no timer:
    the owner of the stream calls `expired` periodically.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeouts: ClientTimeouts) -> None:
        self._loop = loop
        self._seconds_max = timeouts.message
        self._waiter: asyncio.Future[None] | None = None
        self._since = 0.0
        self._waited = 0.0

    async def wait(self) -> None:
        """Waits until `wake`."""
        self._waiter = self._loop.create_future()
        self._since = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._waited += self._loop.time() - self._since

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def progress(self) -> None:
        """A complete message has arrived."""
        self._waited = 0.0

    def expired(self, now: float) -> str | None:
        """Why the wait was too long, as text; None if it was not."""
        if self._waiter is None:
            return None
        waiting = now - self._since
        if self._waited + waiting < self._seconds_max:
            return None
        what = "nothing" if waiting >= self._seconds_max else "no complete message"
        return f"sent {what} for {self._seconds_max:g} s inside a stream"
